"""stdout and stderr that are closed, full or abandoned, under every command that can be run here."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from samples import ASSETS, shard_model, staging_left, tensor, write_model

from ckpt_tools import api
from ckpt_tools.cli.commands import COMMANDS

ADAPTER = {
    "base_model.model.model.layers.0.q_proj.lora_A.weight": ("F32", (2, 8), b"\0\0\x80\x3f" * 16),
    "base_model.model.model.layers.0.q_proj.lora_B.weight": ("F32", (8, 2), b"\0\0\x80\x3f" * 16),
}
BASE = {"model.layers.0.q_proj.weight": ("F32", (8, 8), bytes(256))}
PEFT = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}

CASES: dict[str, tuple[str, int]] = {
    "inspect": ("inspect model", 0),
    "shard": ("shard model OUT --mesh dp_shard=2", 0),
    "gather": ("gather run OUT", 0),
    "reshard": ("reshard run OUT --mesh dp_shard=3", 0),
    "verify": ("verify model", 0),
    "scan": ("scan model", 0),
    "diff": ("diff model other", 3),
    "commit": ("commit nowhere", 4),
    "stats": ("stats model", 0),
    "average": ("average base base2 OUT", 0),
    "extract": ("extract model OUT --include model.step", 0),
    "rename": ("rename base OUT --map map.txt", 0),
    "estimate": ("estimate nowhere --mesh dp_shard=2", 2),
    "smoke": ("smoke nowhere", 4),
    "preflight": ("preflight nowhere.yaml", 4),
    "export-lora": ("export-lora adapter OUT --to peft", 0),
    "merge-lora": ("merge-lora base adapter OUT", 0),
    "check-lora": ("check-lora adapter --base base", 0),
    "extract-lora": ("extract-lora nowhere base OUT", 4),
    "resize-lora": ("resize-lora nowhere OUT --rank 1", 4),
    "push": ("push nowhere me/there", 4),
    "watch": ("watch . --once", 4),
    "prune": ("prune . --keep-last 1", 4),
    "env": ("env", 0),
    "help": ("help mesh", 0),
    "--help": ("--help", 0),
    "--version": ("--version", 0),
    "misspelt": ("verrify model", 2),
}
"""Command line, exit code with streams that work."""
CLOSED = ("inspect", "gather", "diff", "merge-lora", "--help")
"""Commands of which stderr is closed and stdout full; of the others it is the other way round."""
QUICK = ("shard", "verify", "--help")
"""Commands that every run tries: each is a process of its own, and the others print by the same way."""
EACH = [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in CASES]
WRITERS = ("shard", "gather", "reshard", "average", "extract", "rename", "export-lora", "merge-lora")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("streams")
    shard_model(path)
    write_model(path / "other", {"x": tensor("U8", 1)})
    write_model(path / "base", BASE)
    write_model(path / "base2", BASE)
    (path / "map.txt").write_text("[*]\nmodel.layers.*.q_proj.weight = block.*.q.weight\n")
    write_model(path / "adapter", ADAPTER, assets={"adapter_config.json": json.dumps(PEFT).encode()})
    (path / "adapter" / "model.safetensors").rename(path / "adapter" / "adapter_model.safetensors")
    return path


def run(directory: Path, line: str, redirection: str) -> tuple[int, str]:
    """Exit code and what came out on whichever stream is left."""
    command = f"{shlex.quote(sys.executable)} -m ckpt_tools {line} {redirection}"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"CKPT_PROGRESS": "plain"},
    )
    said = done.stdout + done.stderr
    for word in ("Traceback", "bug in ckpt", "Exception", "lost sys."):
        assert word not in said, (line, redirection, said)
    return done.returncode, said


def test_every_command_is_tried() -> None:
    assert COMMANDS.keys() <= CASES.keys()


@pytest.mark.parametrize("name", EACH)
def test_stderr_that_takes_nothing_changes_nothing(directory: Path, tmp_path: Path, name: str) -> None:
    line, expected = CASES[name]
    out = tmp_path / "out"
    code, _ = run(directory, line.replace("OUT", str(out)), "2>&-" if name in CLOSED else "2>/dev/full")
    assert code == expected
    if name in WRITERS:
        assert api.verify(out).ok


@pytest.mark.parametrize("name", EACH)
def test_stdout_that_takes_nothing_is_an_error_that_says_what_is_done(
    directory: Path, tmp_path: Path, name: str
) -> None:
    line, expected = CASES[name]
    out = tmp_path / "out"
    code, said = run(directory, line.replace("OUT", str(out)), ">/dev/full" if name in CLOSED else ">&-")
    if expected in (0, 3):
        assert code == 1
        assert "the output could not be written" in said
    else:
        assert code == expected  # an error is said on stderr alone
    if name in WRITERS:
        assert api.verify(out).ok
        assert "out is complete; only the output could not be written" in said
    assert staging_left(tmp_path) == []


@pytest.mark.full
@pytest.mark.parametrize("options", ["", "--json"])
def test_neither_stream_takes_anything_and_the_destination_is_complete(
    directory: Path, tmp_path: Path, options: str
) -> None:
    for number, redirection in enumerate((">&- 2>&-", ">/dev/full 2>/dev/full", "<&- >&- 2>&-")):
        out = tmp_path / str(number)
        code, said = run(directory, f"shard model {out} --mesh dp_shard=2 {options}", redirection)
        assert (code, said) == (1, "")
        assert api.verify(out).ok


def test_json_that_could_not_be_written_is_json_on_stderr(directory: Path, tmp_path: Path) -> None:
    code, said = run(directory, f"gather run {tmp_path / 'out'} --json", ">/dev/full")
    assert code == 1
    document = json.loads(said)
    assert document["error"]["code"] == "output"
    assert "is complete" in document["error"]["hint"]


@pytest.mark.full
def test_quiet_conversion_needs_no_stdout(directory: Path, tmp_path: Path) -> None:
    assert run(directory, f"shard model {tmp_path / 'out'} --mesh dp_shard=2 -q", ">&-") == (0, "")


@pytest.mark.full
def test_reader_that_left_hears_nothing_but_of_what_is_complete(directory: Path, tmp_path: Path) -> None:
    # `true` ends before ckpt has begun to print.
    code, said = run(directory, "inspect model", "| true")
    assert (code, said) in ((1, ""), (0, ""))
    code, said = run(directory, f"shard model {tmp_path / 'out'} --mesh dp_shard=2", "| true")
    assert code == 1
    assert "out is complete; only the output could not be written" in said
    code, said = run(directory, "inspect model --tensors", "| head -1")
    assert code in (0, 1)
    assert said.count("\n") == 1


@pytest.mark.full
def test_data_never_lands_in_a_stream_that_was_closed(directory: Path, tmp_path: Path) -> None:
    run(directory, f"shard model {tmp_path / 'out'} --mesh dp_shard=2", "<&- >&- 2>&-")
    run(directory, f"gather {tmp_path / 'out'} {tmp_path / 'back'}", "<&- >&- 2>&-")
    assert api.diff(directory / "model", tmp_path / "back").equal
    assert {name: (tmp_path / "back" / name).read_bytes() for name in ASSETS} == ASSETS
