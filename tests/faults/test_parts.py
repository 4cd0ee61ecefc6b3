"""Parts that are killed anywhere, start together, or do not belong together: one whole checkpoint, or none."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from faults.harness import Result, Server, assert_clean, request
from samples import files_of, small_blocks, staging_left, tensor, write_model

from ckpt_tools import api
from ckpt_tools.cli import main
from ckpt_tools.errors import UsageError
from ckpt_tools.transfer.share_record import find_part

BLOCK = 256
COUNT = 3
MANY = {
    "model.a.weight": tensor("F32", 32, 24, seed=1),
    "model.b.weight": tensor("BF16", 24, 20, seed=2),
    "model.c.weight": tensor("F32", 5, 7, 11, seed=3),
    "model.step": tensor("I64", seed=4),
}
MESH = ("--mesh", "dp_shard=5")


class Parts:
    """Parts of one conversion in small blocks, and what one process makes of it."""

    def __init__(self, server: Server, root: Path) -> None:
        self.server, self.source = server, root / "model"
        write_model(self.source, MANY, num_files=2)
        assert self.server.run("shard", self.source, root / "expected", *MESH, block_bytes=BLOCK).code == 0
        self.expected = files_of(root / "expected")

    def argv(self, out: Path, index: int, count: int = COUNT, *more: object) -> tuple[object, ...]:
        return ("shard", self.source, out, *(more or MESH), "-j", 2, "--part", f"{index}/{count}", "--json")

    def run(self, out: Path, index: int, count: int = COUNT, *more: object, **fault) -> Result:
        return self.server.run(*self.argv(out, index, count, *more), block_bytes=BLOCK, **fault)

    def finish(self, out: Path, *indices: int) -> None:
        """Run these parts; then the destination is complete, and nothing is left beside or in it."""
        last = None
        for index in indices:
            result = self.run(out, index)
            assert result.code == 0, result
            last = json.loads(result.out)
        assert last is None or last["published"], last
        assert files_of(out) == self.expected
        assert_clean(out.parent)


@pytest.fixture(scope="module")
def parts(memory: Path, server: Server):
    root = memory / "parts"
    root.mkdir()
    yield Parts(server, root)
    shutil.rmtree(root)


def _moments(count: int, config: pytest.Config, few: int) -> list[int]:
    step = 1 if config.getoption("zoo") else max(1, count // few)
    return list(range(1, count + 1, step))


@pytest.mark.full
@pytest.mark.parametrize("index", [0, COUNT - 1], ids=["begins", "publishes"])
def test_part_that_is_killed_anywhere_is_run_again(parts: Parts, case: Path, index: int, pytestconfig) -> None:
    """The last part's file calls include every step of publishing."""
    others = [other for other in range(COUNT) if other != index]
    before = others if index else []
    for other in before:
        assert parts.run(case / "count", other).code == 0
    count = parts.run(case / "count", index, below=case, nth=1 << 30).count
    assert count > 50
    for left in case.iterdir():
        shutil.rmtree(left)
    for nth in _moments(count, pytestconfig, 6):
        out = case / f"out-{nth}"
        for other in before:
            assert parts.run(out, other).code == 0
        killed = parts.run(out, index, below=case, nth=nth, signal_number=signal.SIGKILL)
        assert killed.code == -signal.SIGKILL
        again = parts.run(out, index)
        assert again.code == 0, (nth, again)
        parts.finish(out, *(() if index else others))
        shutil.rmtree(out)


def test_part_that_was_killed_continues_where_it_was(parts: Parts, case: Path) -> None:
    out = case / "out"
    killed = parts.run(out, 0, below=case, only="write", nth=20, signal_number=signal.SIGKILL)
    assert killed.code == -signal.SIGKILL
    notes = json.loads(parts.run(out, 0).out)["notes"]
    assert any(note.startswith("continued an interrupted run: ") for note in notes)
    parts.finish(out, 1, 2)


def test_last_parts_at_once_publish_once(parts: Parts, case: Path) -> None:
    for turn in range(3):
        out = case / f"out-{turn}"
        asked = [request(*parts.argv(out, index), block_bytes=BLOCK) for index in range(COUNT)]
        results = parts.server.run_crowd(asked)
        assert [result.code for result in results] == [0] * COUNT, results
        told = [json.loads(result.out) for result in results]
        assert any(each["published"] for each in told)
        assert all(index not in each["waiting_for"] for index, each in enumerate(told))
        parts.finish(out)


def test_same_part_twice_at_once(parts: Parts, case: Path) -> None:
    out = case / "out"
    inside: list[Result] = []
    here = lambda: inside.append(_run_here(parts, out, 0))  # noqa: E731 - the server waits for the other one
    result = parts.run(out, 0, below=case, only="write", nth=8, while_stopped=here)
    assert result.code == 0, result
    assert inside[0].code == 5
    assert "another process is writing this part" in inside[0].err
    parts.finish(out, 1, 2)


def _run_here(parts: Parts, out: Path, index: int) -> Result:
    streams = io.StringIO(), io.StringIO()
    with small_blocks(BLOCK), contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        code = main([str(argument) for argument in parts.argv(out, index)])
    return Result(code, *(stream.getvalue() for stream in streams), "", 0, [])


def test_rivals_are_refused_and_nothing_is_lost(parts: Parts, case: Path) -> None:
    out = case / "out"
    assert parts.run(out, 0).code == 0
    (name,) = staging_left(case)
    before = files_of(case / name)
    for more, count, said in (
        (("--mesh", "dp_shard=4"), COUNT, "another conversion is under way here (3 parts, started"),
        (MESH, 4, "under way here in 3 parts, not 4"),
    ):
        result = parts.run(out, 1, count, *more)
        assert result.code == 5
        assert said in result.err
    ordinary = parts.server.run("shard", parts.source, out, *MESH, block_bytes=BLOCK)
    assert ordinary.code == 5
    assert "another conversion is under way here (3 parts, started" in ordinary.err
    assert files_of(case / name) == before
    parts.finish(out, 2, 1)


def test_work_of_one_process_that_was_killed_makes_room(parts: Parts, case: Path) -> None:
    out = case / "out"
    argv = ("shard", parts.source, out, *MESH)
    killed = parts.server.run(*argv, block_bytes=BLOCK, below=case, only="write", nth=9, signal_number=signal.SIGKILL)
    assert killed.code == -signal.SIGKILL
    assert any(
        "removed the remains of an interrupted run" in note for note in json.loads(parts.run(out, 0).out)["notes"]
    )
    parts.finish(out, 1, 2)


def test_source_that_has_changed_is_refused(parts: Parts, case: Path) -> None:
    out, file = case / "out", parts.source / "model-00001-of-00002.safetensors"
    assert parts.run(out, 0).code == 0
    before = file.stat()
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))
    assert parts.run(out, 1).code == 5
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    parts.finish(out, 1, 2)


def test_part_that_is_there_is_not_read_again(parts: Parts, case: Path) -> None:
    out = case / "out"
    assert parts.run(out, 1).code == 0
    again = json.loads(parts.run(out, 1).out)
    assert (again["bytes_read"], again["waiting_for"], again["published"]) == (0, [0, 2], False)
    early = parts.server.run("inspect", out)
    assert early.code == 4
    assert "a write is not finished (1 of 3 parts, started" in early.err
    planned = parts.run(out, 0, COUNT, *MESH, "--dry-run")
    assert "part 0/3 of that is 2 data files" in planned.out
    parts.finish(out, 0, 2)
    done = parts.run(out, 0)
    assert done.code == 0
    assert "this conversion is complete" in done.out
    assert parts.run(out, 0, COUNT, "--mesh", "dp_shard=4").code == 5


@pytest.mark.parametrize("damage", ["file", "record", "gone"])
def test_files_that_are_not_those_of_a_record_are_written_again(parts: Parts, case: Path, damage: str) -> None:
    out = case / "out"
    for index in (0, 1):
        assert parts.run(out, index).code == 0
    staging = case / staging_left(case)[0]
    record = next((staging / ".ckpt").glob("share-00000-*"))
    file = staging / "__0_0.distcp"
    if damage == "record":
        record.write_bytes(record.read_bytes().replace(b"a", b"b", 1))
    elif damage == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert json.loads(parts.run(out, 2).out)["waiting_for"] == [0]
    parts.finish(out, 0)


def test_without_locks_the_claim_keeps_others_out(parts: Parts, case: Path) -> None:
    out, deny = case / "out", {"below": case, "deny": "flock=95"}
    assert parts.run(out, 0, **deny).code == 0
    assert parts.run(out, 1, COUNT, "--mesh", "dp_shard=4", **deny).code == 5
    for index in (1, 2):
        assert parts.run(out, index, **deny).code == 0
    parts.finish(out)


def test_refused_with_the_way_on(tmp_path: Path, parts: Parts) -> None:
    for argv, said in (
        (("shard", "--overwrite"), "--overwrite cannot be shared"),
        (("shard", "--engine", "dtensor"), "--engine dtensor cannot be shared"),
    ):
        result = parts.server.run(argv[0], parts.source, tmp_path / "out", *MESH, *argv[1:], "--part", "0/2")
        assert result.code == 2
        assert said in result.err
        assert "hint:" in result.err
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="--part must be I/N"):
        api.shard(parts.source, tmp_path / "out", mesh="dp_shard=2", part="2/2")


KILLED_ONCE = """
import os, signal
if os.environ.get("RANK") == "2" and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
    fsync = os.fsync
    def killed(descriptor):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".distcp"):
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(descriptor)
    os.fsync = killed
"""


@pytest.mark.full
def test_torchrun_with_a_process_that_is_killed_once(parts: Parts, case: Path, tmp_path: Path) -> None:
    out = case / "out"
    (tmp_path / "sitecustomize.py").write_text(KILLED_ONCE)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    command = ("-m", "ckpt_tools", "shard", str(parts.source), str(out), *MESH, "--json")
    done = subprocess.run(
        [*launcher, "--max-restarts", "1", *command],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "exitcode: -9" in done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sum(result.get("published", False) for result in results) >= 1  # those that were ended say so in JSON, too
    assert api.verify(out, against=parts.source).ok
    assert_clean(case)


@pytest.mark.parametrize(
    ("environ", "parts_from", "expected"),
    [
        ({"RANK": "3", "WORLD_SIZE": "8"}, "auto", None),
        ({"RANK": "3", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "x"}, "auto", "3/8"),
        ({"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"}, "auto", None),
        ({"RANK": "3", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "x"}, "none", None),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}, "auto", None),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}, "slurm", "3/8"),
        ({"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_MIN": "5"}, "slurm", "0/4"),
        ({"SLURM_ARRAY_TASK_ID": "9", "SLURM_ARRAY_TASK_COUNT": "4", "SLURM_ARRAY_TASK_MIN": "5"}, "slurm", "error"),
        ({"JOB_COMPLETION_INDEX": "7", "CKPT_PARTS": "8"}, "k8s", "7/8"),
        ({"JOB_COMPLETION_INDEX": "7"}, "k8s", "error"),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, "mpi", "1/2"),
        ({"PMI_RANK": "2", "PMI_SIZE": "2"}, "mpi", "error"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "torchrun", "error"),
        ({}, "torchrun", "error"),
    ],
)
def test_what_started_a_process_says_which_part_it_is(environ, parts_from, expected) -> None:
    if expected == "error":
        with pytest.raises(UsageError):
            find_part(environ, parts_from)
    else:
        found = find_part(environ, parts_from)
        assert (None if found is None else str(found)) == expected


@pytest.mark.parametrize("by", ["torchrun", "a rank"])
def test_a_command_that_a_rank_starts_is_no_part(tmp_path: Path, by: str) -> None:
    """It inherits torchrun's variables, and nobody starts the other parts."""
    source, out = write_model(tmp_path / "model"), tmp_path / "out"
    command = [sys.executable, "-m", "ckpt_tools", "shard", str(source), str(out), "--mesh", "dp_shard=2", "--json"]
    rank = [sys.executable, "-c", f"import subprocess; raise SystemExit(subprocess.call({command}))"]
    environ = os.environ | {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
    done = subprocess.run(rank if by == "a rank" else command, env=environ, capture_output=True, text=True, check=True)
    assert out.exists() is (by == "a rank")
    assert ("waiting_for" in json.loads(done.stdout)) is (by == "torchrun")
