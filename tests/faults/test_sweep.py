"""Every file call of a conversion fails once, or is the last thing that the process does. Nothing may be lost.

The sweep goes through the calls one by one until a run meets none: open, read, write, fallocate, fsync, rename, mkdir,
unlink, flock (and in one round stat, list, statvfs), on everything below the directory of source and destination.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest
from faults.conftest import OPTIONS
from faults.harness import LOOKING, MOVING, Result, Server, assert_clean, assert_complete, assert_told
from samples import files_of, staging_left

from ckpt_tools import api
from ckpt_tools.errors import CkptError

FAULTS = {
    "fails": {"error": errno.EIO, "only": MOVING},
    "fails-for-good": {"error": errno.EIO, "on": True, "only": MOVING},
    "disk-full": {"error": errno.ENOSPC, "on": True, "only": "open write fallocate mkdir fsync renameat2"},
    "looking-fails": {"error": errno.EIO, "only": LOOKING},
    "killed": {"signal_number": signal.SIGKILL, "only": MOVING},
    "interrupted": {"signal_number": signal.SIGINT, "only": MOVING},
    "terminated": {"signal_number": signal.SIGTERM, "only": "open write fsync renameat2 unlink"},
}
NO_SUCH_RENAME = f"renameat2={errno.EINVAL}"
NO_LOCKS = f"flock={errno.ENOTSUP}"
MAX_POINTS = 2000
# So that a shim that has lost sight of the calls (another libc, another Python) is noticed.
MIN_POINTS = {kind: 12 if kind == "looking-fails" else 40 for kind in FAULTS}


# Errors once and kills for everything; of what goes the same ways, the harder one.
SWEEPS = [
    *(
        (kind, verb, overwrite)
        for kind in ("fails", "killed")
        for verb, overwrite in zip(OPTIONS, (True, False, True), strict=True)
    ),
    *((kind, "shard", False) for kind in ("fails", "killed")),
    *(("interrupted", verb, verb == "shard") for verb in OPTIONS),
    ("fails-for-good", "shard", True),
    *((kind, verb, False) for kind in ("disk-full", "looking-fails") for verb in OPTIONS),
    ("terminated", "gather", True),
]


class Sweep:
    """One verb, one kind of fault, every point."""

    def __init__(self, server: Server, sources: dict[str, Path], references: dict[str, Path], verb: str) -> None:
        self.server, self.verb = server, verb
        self.source, self.reference = sources[verb], references[verb]
        self.root = self.source.parent
        self.expected = files_of(self.reference, manifest=True)
        self.before = files_of(self.source, manifest=True)
        self.points: Counter[str] = Counter()
        self.codes: Counter[int] = Counter()

    def run(self, case: Path, *, overwrite: bool, deny: str = "", **fault) -> Result:
        """The command of the sweep, in the directory `case`."""
        argv = [self.verb, self.source, case / "out", *OPTIONS[self.verb], "-j", "2"]
        if overwrite:
            argv.append("--overwrite")
        return self.server.run(*argv, below=self.root, deny=deny, **fault)

    def sweep(self, directory, *, overwrite, deny="", first=1, step=1, **fault) -> None:
        """Hit one call after the other until a run meets no fault any more."""
        old = files_of(self.source, manifest=True)
        for nth in range(first, MAX_POINTS, step):
            case = directory / str(nth)
            case.mkdir(parents=True)
            if overwrite:
                shutil.copytree(self.source, case / "out")
            result = self.run(case, overwrite=overwrite, deny=deny, nth=nth, **fault)
            self.codes[result.code] += 1
            self.check(case, result, old if overwrite else None, deny)
            self.again(case, overwrite=overwrite, deny=deny)
            shutil.rmtree(case)
            if not result.hit:
                assert result.code == 0, result
                return
            self.points[result.hit.split()[0]] += 1
        raise AssertionError("the sweep does not end")

    def check(self, case: Path, result: Result, old: dict[str, str] | None, deny: str) -> None:
        """What must hold after any fault."""
        assert_told(result)
        assert files_of(self.source, manifest=True) == self.before, "the source was changed"
        # Without an exchange, a killed process may leave the old one beside, for the next run to put back.
        aside = deny == NO_SUCH_RENAME and result.code < 0
        assert_clean(case, allowed=2 if aside else 1)
        out = case / "out"
        if not out.exists():
            assert old is None or aside, result
            assert result.code != 0, result
            return
        found = files_of(out, manifest=True)
        if found == self.expected:
            assert_complete(out, self.expected)
            # A run that failed must not have published, or say so; one that was killed may just have.
            assert result.code <= 0 or "is complete" in result.err, result
        else:
            assert found == old, result
            assert result.code != 0, result

    def again(self, case: Path, *, overwrite: bool, deny: str) -> None:
        """The same command gives the same result, and tidies up."""
        published = (case / "out").exists() and not overwrite
        if deny:
            code = self.run(case, overwrite=overwrite, deny=deny).code
        else:  # the same call, without a process of its own
            options = dict(zip(("mesh",), OPTIONS[self.verb][1:], strict=False))
            try:
                getattr(api, self.verb)(self.source, case / "out", overwrite=overwrite, num_workers=1, **options)
                code = 0
            except CkptError as error:
                code = error.exit_code
        assert code == (5 if published else 0)
        assert_complete(case / "out", self.expected)
        assert staging_left(case) == []


@pytest.mark.full
@pytest.mark.parametrize(("kind", "verb", "overwrite"), SWEEPS, ids=lambda value: str(value).lower())
def test_sweep_every_call_nothing_is_lost(
    request, server, sources, references, case, kind, verb, overwrite, record_property
):
    sweep = Sweep(server, sources, references, verb)
    step = 1 if request.config.getoption("--zoo") else 3  # every third call, with --zoo every one
    sweep.sweep(case, overwrite=overwrite, first=1 + (len(kind) + overwrite) % step, step=step, **FAULTS[kind])
    record_property("points", sum(sweep.points.values()))
    assert sum(sweep.points.values()) >= MIN_POINTS[kind] // step
    print(f"{verb} {kind} overwrite={overwrite}: {dict(sweep.points)}, exit codes {dict(sweep.codes)}")


@pytest.mark.full
@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
@pytest.mark.parametrize("kind", ["fails", "killed", "interrupted"])
def test_sweep_file_system_without_exclusive_renames_nothing_is_lost(
    server, sources, references, case, kind, overwrite, record_property
):
    sweep = Sweep(server, sources, references, "shard")
    fault = FAULTS[kind] | {"only": "fsync rename unlink"}
    sweep.sweep(case, overwrite=overwrite, deny=NO_SUCH_RENAME, **fault)
    record_property("points", sum(sweep.points.values()))
    assert sweep.points["rename"] == (2 if overwrite else 1)


@pytest.mark.full
def test_sweep_file_system_without_locks_nothing_is_lost(server, sources, references, case, record_property):
    sweep = Sweep(server, sources, references, "shard")
    sweep.sweep(case, overwrite=True, deny=NO_LOCKS, error=errno.EIO, only="mkdir write fsync renameat2")
    record_property("points", sum(sweep.points.values()))


def test_sweep_short_reads_and_writes_are_completed(server, sources, references, case):
    for verb in OPTIONS:
        sweep = Sweep(server, sources, references, verb)
        (case / verb).mkdir()
        assert sweep.run(case / verb, overwrite=False, short=1).code == 0
        assert_complete(case / verb / "out", sweep.expected)


def test_sweep_old_checkpoint_that_cannot_be_removed_is_no_failure_and_goes_with_the_next_run(
    server, sources, references, case
):
    sweep = Sweep(server, sources, references, "reshard")
    shutil.copytree(sweep.source, case / "out")
    result = sweep.run(case, overwrite=True, only="unlink", nth=2, error=errno.EIO, on=True)
    assert result.hit.startswith("unlink ")
    assert result.code == 0
    assert "the old checkpoint could not be removed: " in result.err
    assert_complete(case / "out", sweep.expected)
    assert len(staging_left(case)) == 1
    sweep.again(case, overwrite=True, deny="")


def test_sweep_failed_fsync_after_the_rename_takes_it_back(server, sources, references, case):
    sweep = Sweep(server, sources, references, "gather")
    shutil.copytree(sweep.source, case / "out")
    old = files_of(case / "out", manifest=True)
    fsyncs = sweep.run(case, overwrite=True, only="fsync").count
    shutil.rmtree(case / "out")
    shutil.copytree(sweep.source, case / "out")
    result = sweep.run(case, overwrite=True, only="fsync", nth=fsyncs, error=errno.EIO)
    assert result.hit == f"fsync {case}"  # of the destination's parent
    assert result.code == 1
    assert "cannot publish: Input/output error" in result.err
    assert files_of(case / "out", manifest=True) == old
    assert staging_left(case) == []


@pytest.mark.parametrize("verb", OPTIONS)
def test_sweep_every_file_is_synced_before_the_rename_and_the_directories_after(
    server, sources, references, case, verb
):
    sweep = Sweep(server, sources, references, verb)
    calls = sweep.run(case, overwrite=False, only="fsync renameat2", trace=True).calls
    renamed = next(number for number, call in enumerate(calls) if call.startswith("renameat2"))
    assert set(os.listdir(case / "out")) <= {os.path.basename(call) for call in calls[:renamed]}, calls
    assert f"fsync {case}" in calls[renamed:], calls
