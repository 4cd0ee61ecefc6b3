"""Paths with a scheme: what is remote, what is this machine's after all, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from samples import MODEL, safetensors_bytes

import ckpt_tools
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.storage import locations


@pytest.mark.parametrize(
    ("path", "scheme"),
    [
        ("s3://bucket/key", "s3"),
        ("S3://bucket/key", "s3"),
        ("hf://org/name@main", "hf"),
        ("/data/s3://x", None),
        ("s3:/one", None),
        ("file:///data", None),
        ("C:\\x", None),
        ("", None),
    ],
)
def test_what_is_remote(path: str, scheme: str | None) -> None:
    assert locations.scheme_of(path) == scheme
    assert locations.is_remote(path) is (scheme is not None)


def test_a_file_url_is_a_path_of_this_machine(tmp_path: Path) -> None:
    source = tmp_path / "model.safetensors"
    source.write_bytes(safetensors_bytes(MODEL))
    plain = ckpt_tools.shard(source, tmp_path / "plain", mesh="dp_shard=2")
    named = ckpt_tools.shard(f"file://{source}", f"file://localhost{tmp_path}/named", mesh="dp_shard=2")
    assert [file for file, _ in named.files] == [file for file, _ in plain.files]
    for file in (tmp_path / "plain").iterdir():
        assert (tmp_path / "named" / file.name).read_bytes() == file.read_bytes()


def test_a_host_in_a_file_url_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="absolute path"):
        ckpt_tools.inspect("file://elsewhere/model")


@pytest.mark.parametrize("path", ["ftp://host/model", "s4://bucket/model"])
def test_an_unknown_scheme_is_refused_by_name(path: str, tmp_path: Path) -> None:
    source = tmp_path / "model.safetensors"
    source.write_bytes(safetensors_bytes(MODEL))
    with pytest.raises(UsageError, match=f"not {path.partition(':')[0]}://"):
        ckpt_tools.inspect(path)
    with pytest.raises(UsageError, match=f"not {path.partition(':')[0]}://"):
        ckpt_tools.shard(source, path, mesh="dp_shard=2")
    assert list(tmp_path.iterdir()) == [source]


def test_the_hub_is_written_by_push(tmp_path: Path) -> None:
    source = tmp_path / "model.safetensors"
    source.write_bytes(safetensors_bytes(MODEL))
    with pytest.raises(UsageError) as caught:
        ckpt_tools.shard(source, "hf://org/name", mesh="dp_shard=2")
    assert "ckpt push" in (caught.value.hint or "")


def test_nothing_at_a_path(tmp_path: Path) -> None:
    with pytest.raises(UnreadableError, match="no such file"):
        locations.open_place(str(tmp_path / "missing"))


def test_push_takes_what_is_on_this_machine() -> None:
    with pytest.raises(UsageError, match="on this machine") as caught:
        ckpt_tools.push("s3://bucket/model", "me/model")
    assert "ckpt gather s3://bucket/model" in (caught.value.hint or "")
