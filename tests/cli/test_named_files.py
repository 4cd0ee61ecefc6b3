"""Small documents that users name: what is no regular file is refused at once, and nothing is read without end."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from samples import write_model

from ckpt_tools.cli import main
from ckpt_tools.errors import LimitError, StorageError, UnreadableError, UsageError
from ckpt_tools.storage.source import read_named_file


@contextmanager
def seconds(limit: int) -> Iterator[None]:
    """Fail where something would wait for ever."""

    def stop(*_: object) -> None:
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(limit)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one, pytest.MonkeyPatch.context() as patch:
        patch.chdir(path.parent)  # its path may be too long for a socket
        one.bind(path.name)


KINDS: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a directory": os.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a socket": make_socket,
}
COMMANDS = {
    "preflight": ("preflight", "{}"),
    "preflight --model": ("preflight", "{config}", "--model", "{}"),
    "preflight --checkpoint": ("preflight", "{config}", "--checkpoint", "{}"),
    "shard --rules": ("shard", "{model}", "{out}", "--mesh", "dp_shard=2", "--rules", "{}"),
    "smoke --model": ("smoke", "--model", "{}"),
    "estimate": ("estimate", "{}"),
    "inspect": ("inspect", "{}"),
    "merge-lora": ("merge-lora", "{model}", "{}", "{out}"),
    "check-lora --base": ("check-lora", "{model}", "--base", "{}"),
    "gather --assets": ("gather", "{model}", "{out}", "--assets", "{}"),
}
ACCELERATE = "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 2\nfsdp_config: {}\n"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "command", [pytest.param(name, marks=pytest.mark.full) if name == "smoke --model" else name for name in COMMANDS]
)
def test_what_is_no_file_is_refused_at_once(command: str, kind: str, tmp_path: Path, capsys) -> None:
    odd = tmp_path / "odd.json"
    KINDS[kind](odd)
    (tmp_path / "accelerate.yaml").write_text(ACCELERATE)
    places = {"config": tmp_path / "accelerate.yaml", "model": tmp_path / "model", "out": tmp_path / "out"}
    write_model(tmp_path / "model")
    argv = [word.format(odd, **places) for word in COMMANDS[command]]
    with seconds(20):
        code = main([*argv, "--json"])
    captured = capsys.readouterr()
    if (command, kind) == ("gather --assets", "a directory"):
        assert code == 0
        return
    if command == "preflight --checkpoint":
        assert code == 3  # a finding among others
        assert str(odd) in captured.out
        return
    assert code in (2, 4), captured
    error = json.loads(captured.err)["error"]
    assert error["what"]
    assert error["where"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_message_says_what_was_found(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "odd"
    KINDS[kind](path)
    with seconds(20), pytest.raises(UsageError, match=f"expected the rules, found {kind}") as caught:
        read_named_file(str(path), what="the rules", max_bytes=10, refusal=UsageError, hint="this")
    assert caught.value.hint == "this"
    assert str(path) == caught.value.where


def test_pipe_that_comes_instead_of_the_file_is_refused(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "rules").write_text("x")
    status = os.stat(tmp_path / "rules")
    (tmp_path / "rules").unlink()
    os.mkfifo(tmp_path / "rules")
    monkeypatch.setattr(os, "stat", lambda *_, **__: status)  # as it was a moment before
    with seconds(20), pytest.raises(UnreadableError, match="found a pipe"):
        read_named_file(str(tmp_path / "rules"), what="the rules", max_bytes=10)


def test_length_is_limited_and_content_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "rules"
    path.write_bytes(b"0123456789")
    assert read_named_file(str(path), what="the rules", max_bytes=10) == b"0123456789"
    with pytest.raises(LimitError, match="more than 9 bytes"):
        read_named_file(str(path), what="the rules", max_bytes=9)


@pytest.mark.parametrize("name", ["gone", "a\0b", "file/below", "circle", "n" * 300])
def test_path_that_leads_nowhere_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "circle").symlink_to("circle")
    with pytest.raises(UsageError):
        read_named_file(str(tmp_path / name), what="the rules", max_bytes=9, refusal=UsageError)


def test_file_that_the_system_does_not_read_is_a_storage_error() -> None:
    with pytest.raises(StorageError, match="cannot read the rules"):
        read_named_file("/proc/self/mem", what="the rules", max_bytes=9)
