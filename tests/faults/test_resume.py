"""A killed run, started again, continues; it trusts nothing that it finds, and says what it did."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import zlib
from pathlib import Path

import pytest
from faults.harness import Result, Server, assert_clean, assert_complete, assert_told
from samples import files_of, staging_left, tensor, write_model

from ckpt_tools import api

BLOCK = 256


def kill(below: Path, nth: int = 60) -> dict[str, object]:
    """The fault that ends a run at its `nth` write."""
    return {"below": below, "only": "write", "nth": nth, "signal_number": signal.SIGKILL}


MANY = {
    "model.a.weight": tensor("F32", 32, 24, seed=1),
    "model.b.weight": tensor("BF16", 24, 20, seed=2),
    "model.c.weight": tensor("F32", 5, 7, 11, seed=3),
    "model.step": tensor("I64", seed=4),
}
"""Tensors of many small blocks, cut evenly and unevenly."""
NBYTES = sum(len(raw) for _, _, raw in MANY.values())
OPTIONS = {"shard": ("--mesh", "dp_shard=3"), "gather": (), "reshard": ("--mesh", "dp_shard=2,tp=2", "--set")}
OPTIONS["reshard"] += ("model.a.weight=tp:S(1)",)
JOURNAL = ".ckpt-journal"
CONTINUED = re.compile(r"continued an interrupted run: (\d+) B of|continued an interrupted run: ([\d.]+) KiB of")
AFRESH = "removed the remains of an interrupted run with other arguments or another source"


class Runs:
    """Runs of one verb in small blocks, and its reference."""

    def __init__(self, server: Server, root: Path, verb: str) -> None:
        self.server, self.verb = server, verb
        self.source = root / ("model" if verb == "shard" else "run")
        reference = root / f"reference-{verb}"
        if not reference.exists():
            assert self.run(root, reference.name).code == 0
        self.expected = files_of(reference, manifest=True)

    def run(self, case: Path, out: str = "out", *more: object, source: Path | None = None, **fault) -> Result:
        argv = [self.verb, source or self.source, case / out, *OPTIONS[self.verb], "-j", "2", *more]
        return self.server.run(*argv, block_bytes=BLOCK, **fault)

    def killed(self, case: Path, nth: int = 60) -> Path:
        """Run until the `nth` write, which is the end; return the staging directory."""
        result = self.run(case, **kill(case, nth))
        assert result.code == -signal.SIGKILL
        (name,) = staging_left(case)
        return case / name

    def completes(self, case: Path, *more: object, **fault) -> Result:
        """Run; nothing is left and the result is that of a run without interruption."""
        result = self.run(case, "out", *more, **fault)
        assert result.code == 0, result
        assert_complete(case / "out", self.expected)
        assert_clean(case)
        return result


def _kept(result: Result) -> int:
    """Bytes that a run says it kept, rounded as it says them."""
    match = CONTINUED.search(result.err)
    if match is None:
        return 0
    return int(match[1]) if match[1] else round(float(match[2]) * 1024)


@pytest.fixture(scope="session")
def world(memory: Path, server: Server) -> Path:
    """A model and a checkpoint of it, in memory."""
    root = memory / "resume"
    root.mkdir()
    write_model(root / "model", MANY, num_files=2)
    argv = ("shard", root / "model", root / "run", "--mesh", "dp_shard=4")
    assert server.run(*argv, block_bytes=BLOCK).code == 0
    return root


@pytest.fixture(params=OPTIONS)
def runs(request, server: Server, world: Path) -> Runs:
    return Runs(server, world, request.param)


@pytest.fixture
def shard(server: Server, world: Path) -> Runs:
    return Runs(server, world, "shard")


@pytest.mark.full
def test_resume_after_a_kill_at_any_write_continues(runs, case):
    kept, continued = [], 0
    for nth in range(1, 2000, 4):
        directory = case / str(nth)
        directory.mkdir()
        result = runs.run(directory, **kill(directory, nth))
        if not result.hit:
            assert_complete(directory / "out", runs.expected)
            break
        (name,) = staging_left(directory)
        records = (directory / name / JOURNAL).read_bytes().count(b"\n") - 1 if nth > 1 else 0
        again = runs.completes(directory)
        assert (_kept(again) > 0) == (records > 0), again
        continued += records > 0
        kept.append(_kept(again))
    assert continued >= 12
    # The last kill came in the documents: all was kept.
    assert max(kept) >= 0.99 * NBYTES


@pytest.mark.full
def test_error_at_opening_a_staged_file_keeps_what_was_written(shard, case):
    kept = 0
    for nth in range(1, 100):
        directory = case / str(nth)
        directory.mkdir()
        result = shard.run(directory, below=directory, only="open", nth=nth, error=errno.EIO)
        if not result.hit:
            break
        if result.code:
            is_kept = "the same command continues from there" in result.err and len(staging_left(directory)) == 1
            assert is_kept or not kept, result  # once something was written, all of it is kept
            kept += is_kept
            shard.completes(directory)
    assert kept >= 15


@pytest.mark.full
def test_resume_loses_at_most_one_block_per_thread(server, world, case):
    runs = Runs(server, world, "gather")
    for nth in range(3, 65, 2):
        directory = case / str(nth)
        directory.mkdir()
        result = runs.run(directory, trace=True, **kill(directory, nth))
        assert result.code == -signal.SIGKILL
        (name,) = staging_left(directory)
        records = (directory / name / JOURNAL).read_bytes().count(b"\n") - 1
        # The files' headers are written first and the call that was hit is not done; every other is one block. The last
        # call is the one that was hit, unless another thread's was noted after it.
        data = [call for call in result.calls[:-1] if call.endswith(".safetensors")]
        assert -1 <= max(0, len(data) - 2) - records <= 2


@pytest.mark.full(but=["gather"])
def test_resume_that_is_killed_again_and_again_ends(runs, case):
    # Every attempt gets a little further: reading back what is there writes nothing.
    attempts = 0
    while attempts < 100:
        if runs.run(case, **kill(case, 25 if runs.verb == "gather" else 45)).code == 0:
            break
        attempts += 1
    assert attempts >= 2
    assert_complete(case / "out", runs.expected)
    assert_clean(case)


@pytest.mark.full
def test_resume_detects_staged_bytes_that_changed(runs, case):
    killed = case / "killed"
    killed.mkdir()
    staging = runs.killed(killed)
    files = sorted(path for path in staging.rglob("*") if path.is_file() and path.name != JOURNAL)
    complete = _kept_of(runs, killed, case / "whole")
    fewer = 0
    for file in files:
        for share in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
            nbytes = file.stat().st_size
            if not nbytes:
                continue
            directory = case / f"{file.name}-{share}"
            shutil.copytree(killed, directory)
            victim = directory / file.relative_to(killed)
            raw = bytearray(victim.read_bytes())
            raw[round(share * (nbytes - 1))] ^= 0x10
            victim.write_bytes(raw)
            result = runs.completes(directory)
            assert _kept(result) <= complete
            fewer += _kept(result) < complete
    assert fewer >= 2


def _kept_of(runs: Runs, killed: Path, directory: Path) -> int:
    shutil.copytree(killed, directory)
    return _kept(runs.completes(directory))


@pytest.mark.full
@pytest.mark.parametrize("what", ["shorter", "longer", "missing", "link", "hard-link", "foreign"])
def test_resume_makes_staged_files_anew_that_are_not_as_they_were(shard, case, what):
    directory = case / "here"
    directory.mkdir()
    staging = shard.killed(directory)
    victim = case / "victim"
    victim.write_bytes(b"precious" * 1000)
    file = min(staging.glob("*.distcp"))
    nbytes = file.stat().st_size
    if what in ("shorter", "longer"):
        os.truncate(file, nbytes + (-1 if what == "shorter" else 1))
    elif what == "foreign":
        (staging / "foreign.distcp").write_bytes(b"x")
        (staging / "foreign").symlink_to(victim)
    else:
        file.unlink()
    if what == "link":
        file.symlink_to(victim)
    elif what == "hard-link":
        os.truncate(victim, nbytes)
        file.hardlink_to(victim)
    before = victim.read_bytes()
    result = shard.run(directory)
    assert victim.read_bytes() == before
    assert result.code == 0, result
    assert_complete(directory / "out", shard.expected)
    assert_clean(directory)


# Another source, other arguments


def _touch(source: Path) -> None:
    os.utime(min(source.glob("*.safetensors")), ns=(1, 1))


def _replace(source: Path) -> None:
    file = min(source.glob("*.safetensors"))
    status = file.stat()
    other = source / "other"
    other.write_bytes(file.read_bytes())
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.replace(file)


def _write_over(source: Path) -> None:
    file = min(source.glob("*.safetensors"))
    raw = file.read_bytes()
    file.write_bytes(raw[:-8] + bytes(8))


@pytest.mark.parametrize("change", [_touch, _replace, _write_over])
def test_resume_with_a_changed_source_starts_afresh_and_says_so(shard, server, case, change):
    source = case / "source"
    shutil.copytree(shard.source, source)
    assert shard.run(case, source=source, **kill(case)).code < 0
    change(source)
    result = shard.run(case, source=source)
    assert result.code == 0, result
    assert AFRESH in result.err
    assert _kept(result) == 0
    assert server.run("verify", case / "out", "--against", source, block_bytes=BLOCK).code == 0
    assert_clean(case)


@pytest.mark.full
@pytest.mark.parametrize(
    "arguments",
    [
        ("--mesh", "dp_shard=2"),
        ("--prefix", "x."),
        ("--exclude", "model.step"),
        ("--set", "model.a.weight=dp_shard:S(1)"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_resume_with_other_arguments_starts_afresh_and_says_so(shard, server, case, arguments):
    shard.killed(case)
    result = shard.run(case, "out", *arguments)
    assert result.code == 0, result
    assert AFRESH in result.err
    assert _kept(result) == 0
    assert server.run("verify", case / "out", block_bytes=BLOCK).code == 0
    assert_clean(case)


def test_resume_with_another_dtype_starts_afresh_and_says_so(shard, case):
    shard.killed(case)
    result = api.shard(shard.source, case / "out", mesh="dp_shard=3", dtype="f32")
    assert AFRESH in result.notes
    assert api.verify(case / "out", level="data").ok
    assert_clean(case)


def test_resume_of_another_verb_starts_afresh_and_says_so(shard, server, world, case):
    shard.killed(case)
    gather = Runs(server, world, "gather")
    assert AFRESH in gather.completes(case).err


# Journals that are not what a run wrote


def _line(*record: object) -> bytes:
    text = json.dumps(record).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _with_lines(*lines: bytes):
    def make(journal: Path) -> None:
        with journal.open("ab") as stream:
            stream.write(b"".join(lines))

    return make


def _only(raw: bytes):
    def make(journal: Path) -> None:
        journal.write_bytes(raw)

    return make


def _torn(journal: Path) -> None:
    os.truncate(journal, journal.stat().st_size - 7)


def _flipped(journal: Path) -> None:
    raw = bytearray(journal.read_bytes())
    for at in range(40, len(raw), 90):
        raw[at] ^= 1
    journal.write_bytes(raw)


def _foreign(journal: Path) -> None:
    raw = journal.read_bytes()
    journal.write_bytes(b"0" * 32 + raw[32:])


def _link(journal: Path) -> None:
    journal.unlink()
    journal.symlink_to(journal.parents[1] / "victim")


def _hard_link(journal: Path) -> None:
    victim = journal.parents[1] / "victim"
    victim.write_bytes(journal.read_bytes())
    journal.unlink()
    journal.hardlink_to(victim)


def _pipe(journal: Path) -> None:
    journal.unlink()
    os.mkfifo(journal)


def _directory(journal: Path) -> None:
    journal.unlink()
    journal.mkdir()
    (journal / "x").write_bytes(b"x")


def _huge(journal: Path) -> None:
    os.truncate(journal, 1 << 34)  # sparse


def _long_line(journal: Path) -> None:
    with journal.open("ab") as stream:
        stream.write(b"[" * (3 << 20) + b"\n")


DIGEST = "0" * 32
JOURNALS = {
    "empty": (_only(b""), False),
    "garbage": (_only(bytes(range(256)) * 40), False),
    "foreign": (_foreign, False),
    "link": (_link, False),
    "hard-link": (_hard_link, False),
    "pipe": (_pipe, False),
    "directory": (_directory, False),
    "huge": (_huge, False),
    "torn": (_torn, True),
    "flipped": (_flipped, True),
    "long-line": (_long_line, True),
    "not-json": (_with_lines(b"\xff\xfe\n", b"\n\n", b"00000000 x\n", b"zzzzzzzz []\n"), True),
    "nested": (_with_lines(b"%08x %s\n" % (zlib.crc32(b"[" * 90_000), b"[" * 90_000)), True),
    "wrong-types": (
        _with_lines(
            _line(),
            _line(1),
            _line(None, None, None, None),
            _line("a", "b", "c", "d"),
            _line({}, [], {}, []),
            _line(0, 0, DIGEST, 5),
            _line(0, 0, DIGEST, [5]),
            _line(0, 0, DIGEST, [[1, 2, 3]]),
            _line(float("inf"), float("nan"), DIGEST, []),
            _line(0, 0, [DIGEST], []),
        ),
        True,
    ),
    "wrong-numbers": (
        _with_lines(
            _line(-1, -1, DIGEST, []),
            _line(10**30, 10**30, DIGEST, []),
            _line(0, 1, DIGEST, [[-1, -1, -1, -1]]),
            _line(0, 2, DIGEST, [[10**20, 10**20, 10**20, 10**20]]),
        ),
        True,
    ),
}
"""What is done to the journal, and whether the run can still be continued."""


@pytest.mark.full(but=["gather-torn", "gather-link", "gather-empty"])
@pytest.mark.parametrize("kind", JOURNALS)
def test_resume_with_a_journal_that_is_not_right_is_harmless(runs, case, kind):
    change, continues = JOURNALS[kind]
    victim = case / "victim"
    victim.write_bytes(b"precious")
    staging = runs.killed(case)
    change(staging / JOURNAL)
    before = victim.read_bytes()
    result = runs.completes(case)
    assert_told(result)
    assert victim.read_bytes() == before
    assert (_kept(result) > 0) == continues, result
    assert (AFRESH in result.err) == (not continues)


def test_resume_counts_what_is_allocated_as_there(server, memory, case):
    model = write_model(case / "model", {f"w{i}": tensor("U8", 1 << 20, seed=i) for i in range(8)}, num_files=1)
    argv = ("shard", model, case / "out", "--mesh", "dp_shard=2")
    assert server.run(*argv, **kill(case, 9)).code < 0
    # 8 MiB are needed, 4 MiB beside the margin of 16 MiB are free: enough for who has 8 MiB already.
    scarce = {"below": case, "only": "statvfs", "free": 20 << 20}
    other = server.run("shard", model, case / "other", "--mesh", "dp_shard=2", **scarce)
    assert other.code == 1
    assert "are needed" in other.err
    assert server.run(*argv, **scarce).code == 0
    assert api.verify(case / "out", against=model).ok
    assert staging_left(case) == []
