"""Retention, judged apart from its code: lives, rot that no listing shows, kills at one call, several at once."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lives.run import PREFIX, Broken, Life, content_of, in_quarantine, live, weights
from samples import without_ranks

from ckpt_tools import api, cli


def make_run(run: Path, layout: str, *steps: int) -> Path:
    for step in steps:
        path = run / f"{PREFIX[layout]}{step}"
        path.mkdir(parents=True)
        for file, content in content_of(layout, "good", step % 8).items():
            (path / file).write_bytes(content)
        if layout != "dcp":
            (path / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
    return run


def there(run: Path) -> list[int]:
    return sorted(int(path.name.partition("-")[2]) for path in run.glob("[cs]*-*[0-9]") if path.is_dir())


def watch(run: Path, **options: object) -> object:
    return api.watch(run, once=True, settle=0, num_workers=1, **options)


def test_promises_hold_in_random_lives() -> None:
    for number in range(400, 404):
        live(number, Counter())


@pytest.mark.full
def test_promises_hold_in_more_lives() -> None:
    counts: Counter[str] = Counter()
    for number in range(24):
        live(number, counts)
    assert counts["killed"] > 3
    assert counts["removed"] > 18
    assert counts["left open"] < 5


@pytest.mark.full
def test_life_that_loses_a_step_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    tend = Life.ckpt

    def losing(life: Life, *options: str) -> tuple[int, dict]:
        found = tend(life, *options)
        for path in sorted(life.run.glob("*-*/model.safetensors"))[:1]:
            path.unlink()
        return found

    monkeypatch.setattr(Life, "ckpt", losing)
    with pytest.raises(Broken, match="is half in its place"):
        live(16, Counter())


class _KilledError(BaseException):
    """The process ends here."""


def test_clock_that_steps_back_ends_no_quarantine(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "dcp", 1, 2, 3)
    watch(run, keep_last=2)
    now = time.time()
    with patch("time.time", lambda: now - 60):
        api.prune(run, keep_last=1)
    assert len(in_quarantine(run)) == 2


@pytest.mark.parametrize("layout", ["dcp", "trainer"])
def test_half_emptied_quarantine_has_no_way_back(tmp_path: Path, layout: str) -> None:
    """What a killed prune has half removed would come back under the name of a checkpoint."""
    run = make_run(tmp_path / "run", layout, 1, 2, 3)
    watch(run)
    unlink, left = os.unlink, [3]

    def dying(*args: object, **options: object) -> None:
        left[0] -= 1
        if not left[0]:
            raise _KilledError
        unlink(*args, **options)

    with pytest.raises(_KilledError), patch("os.unlink", dying):
        api.prune(run, keep_last=1, quarantine="0s")
    api.prune(run, undo=["all"])
    assert len(there(run)) == 2  # one was half emptied
    assert len({len([*path.iterdir()]) for path in run.iterdir() if path.is_dir() and "trash" not in path.name}) == 1
    watch(run, keep_last=1, quarantine="0s")
    assert not in_quarantine(run)


def test_link_of_a_killed_watch_holds_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "dcp", 1)
    replace = os.replace

    def dying(source: str, target: str, **options: object) -> None:
        if target.endswith("latest-good"):
            raise _KilledError
        replace(source, target, **options)

    with pytest.raises(_KilledError), patch("os.replace", dying):
        watch(run)
    make_run(run, "dcp", 2)
    assert watch(run, keep_last=1).removed == ("step-1",)
    assert [path.name for path in run.iterdir() if path.is_symlink()] == ["latest-good"]


def zero_optimizer(file: Path) -> None:
    """Zero its moments, and write it again as torch does: sizes and checksums fit."""
    state = torch.load(file, weights_only=True)
    for row in state["state"].values():
        for moment in row.values():
            moment.zero_()
    torch.save(state, file)


def rot(path: Path, how: str) -> None:
    if how == "optimizer":
        zero_optimizer(path / "optimizer.pt")
        return
    file = max((each for each in path.iterdir() if each.suffix in (".distcp", ".safetensors")), key=os.path.getsize)
    content = bytearray(file.read_bytes())
    if how == "flip":
        content[-50] ^= 4
    file.write_bytes({"zeros": bytes(len(content)), "truncated": content[: len(content) // 2]}.get(how, content))


@pytest.mark.full(but=["dcp-flip"])
@pytest.mark.parametrize(
    ("layout", "how"),
    [(layout, how) for layout in PREFIX for how in ("zeros", "flip", "truncated")] + [("trainer", "optimizer")],
)
def test_survivor_that_rots_where_no_listing_shows_it_keeps_all(tmp_path: Path, layout: str, how: str) -> None:
    """Same size, same times of modification and change: only reading tells."""
    run = make_run(tmp_path / "run", layout, 1, 2, 3)
    watch(run)
    last = run / f"{PREFIX[layout]}3"
    lstat, known = os.lstat, {str(path): os.lstat(path) for path in last.iterdir()}
    rot(last, how)
    with patch("os.lstat", lambda path, **options: known.get(os.fspath(path)) or lstat(path, **options)):
        pruned = api.prune(run, keep_last=1)
        assert (pruned.removed, pruned.exit_code) == ((), 3)
        assert [each.code for each in pruned.findings] == ["changed-since"]
        assert watch(run, keep_last=1).removed == (f"{PREFIX[layout]}1",)  # its successor is read as well
        assert 2 in there(run)


@pytest.mark.full
def test_save_whose_optimizer_is_zero_supersedes_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "trainer", 1, 2, 3)
    zero_optimizer(run / "checkpoint-3" / "optimizer.pt")
    pruned = watch(run, keep_last=1)
    assert (pruned.removed, pruned.exit_code, there(run)) == (("checkpoint-1",), 3, [2, 3])
    assert "tensors now half or fully zero or constant" in next(each.what for each in pruned.findings)


_TRAINER = """
import sys, time, torch, warnings
import torch.distributed.checkpoint as dcp
from lives.run import weights
warnings.simplefilter("ignore")
for step in range(1, 11):
    dcp.save({"model": weights(step), "step": torch.tensor(float(step))}, checkpoint_id=f"{sys.argv[1]}/step-{step}")
    time.sleep(0.15)
"""


@pytest.mark.full
def test_two_watches_a_prune_and_a_trainer_lose_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "dcp")
    run.mkdir()
    tests = os.fspath(Path(__file__).parents[1])
    trainer = subprocess.Popen([sys.executable, "-c", _TRAINER, run], env={**os.environ, "PYTHONPATH": tests})
    while not there(run):
        time.sleep(0.05)
    line = [sys.executable, "-m", "ckpt_tools", "watch", run, "--interval", "0.1", "--settle", "0.5"]
    watches = [subprocess.Popen([*line, "--keep-last", "2"], stderr=subprocess.PIPE, text=True) for _ in range(2)]
    codes: set[int] = set()
    deadline = time.monotonic() + 90
    while (trainer.poll() is None or there(run) != [9, 10]) and time.monotonic() < deadline:
        codes.add(cli.main(["prune", str(run), "--keep-last", "2", "-q"]))
        time.sleep(0.05)
    for process in watches:
        process.send_signal(signal.SIGTERM)
    said = [process.communicate(timeout=60)[1] for process in watches]
    assert trainer.wait() == 0
    assert codes <= {0, 1, 4}  # 1: a watch has the folder; 4: nothing is whole yet
    assert {process.returncode for process in watches} == {130}, said
    assert not [text for text in said if "NOT" in text or "Traceback" in text]
    away = in_quarantine(run)
    assert (there(run), {*away}) == ([9, 10], {f"step-{step}" for step in range(1, 9)})
    for step in range(1, 11):
        state = {"model": {name: torch.zeros_like(each) for name, each in weights(step).items()}}
        with without_ranks():
            dcp.load(state, checkpoint_id=away.get(f"step-{step}", run / f"step-{step}"))
        assert all(torch.equal(each, state["model"][name]) for name, each in weights(step).items())


@pytest.mark.full
@pytest.mark.parametrize("command", ["watch", "prune"])
def test_reader_in_another_mount_namespace_is_seen(tmp_path: Path, command: str) -> None:
    """As a container reads it: by another path, in another namespace, where the folder itself is hidden."""
    run, seen = make_run(tmp_path / "run", "dcp", 1, 2), tmp_path / "seen"
    seen.mkdir()
    if not shutil.which("unshare"):
        pytest.skip("unshare is not installed")
    script = (
        'mount --bind "$1/step-1" "$2" && mount -t tmpfs none "$1" && exec 3< "$2/.metadata" && echo open && read x'
    )
    reader = subprocess.Popen(
        ["unshare", "-m", "sh", "-c", script, "sh", run, seen],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        if reader.stdout.readline() != "open\n":
            pytest.skip(f"the kernel forbids another mount namespace here: {reader.communicate()[1].strip()}")
        pruned = watch(run, keep_last=1) if command == "watch" else (watch(run), api.prune(run, keep_last=1))[1]
        assert pruned.removed == ()
        assert f"in use by process {reader.pid}" in {each.reason for each in pruned.checkpoints}
    finally:
        reader.communicate("\n" if reader.poll() is None else None)
    assert api.prune(run, keep_last=1).removed == ("step-1",)
