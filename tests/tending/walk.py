"""A random life of a run's folder: saves, killed saves, damage, clocks that jump, and a watch that is killed anywhere.

    python -m tending.walk 200 [SEED]      (in tests/; s3://… walks need the fixtures of test_faults.py)

What the folder holds is known here without ckpt: a checkpoint is good while every file of it is as it was saved. After
every pass, killed or not, what is missing must have been good, and verified, and followed by a good one that is there.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from steps import toy_steps
from tending import runs

from ckpt_tools import api
from ckpt_tools.errors import UnreadableError
from ckpt_tools.storage.run_folder import RECORD_NAME

_CHANGES = ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync")
"""Calls of `os` at one of which a pass is killed; a few are killed while they only look."""
_REMOVALS = ("mkdir", "rename", "unlink", "rmdir")
_LOOKS = ("open", "scandir", "lstat")


class Walk:
    """One run's folder on a disk."""

    def __init__(self, root: Path, template: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.run = root / "run"
        self.run.mkdir()
        self.template = template
        self.whole = _content(template)
        self.step = 0
        self.rules: dict[str, int] = {}
        self.num_killed = self.num_removed = 0

    def go(self, num_acts: int) -> None:
        """Let things happen."""
        for _ in range(num_acts):
            act = self.random.choices(
                [self.save, self.save_half, self.damage, self.jump, self.resave, self.link, self.lose_record],
                [6, 2, 1, 2, 1, 1, 1],
            )[0]
            act()
            self.tend()
        self.rules = {"keep_last": 2}
        self.tend(is_killed=False)

    # What happens

    def save(self) -> None:
        self.step += self.random.randint(1, 30)
        runs.save_step(self.run, self.step, template=self.template)

    def save_half(self) -> None:
        """A save is killed: somewhere in its files, or before the last of them has its name; or it holds too little."""
        self.save()
        path = self.run / f"step-{self.step}"
        how = self.random.randrange(5)
        if how == 4:  # readable, and hollow
            shutil.rmtree(path)
            toy_steps.save({"model": dict([*toy_steps.state_of(0).items()][: self.random.randint(1, 2)])}, path)
            return
        if how == 0:
            (path / ".metadata").unlink()
        elif how == 1:
            (path / ".metadata").rename(path / ".metadata.tmp")
        elif how == 2:
            os.truncate(path / "__0_0.distcp", self.random.randrange(2000))
        else:
            shutil.rmtree(path)
            path.mkdir()

    def some(self) -> Path | None:
        found = sorted(self.run.glob("step-*"))
        return self.random.choice(found) if found else None

    def damage(self) -> None:
        path = self.some()
        if path is not None and (path / "__0_0.distcp").exists():
            with contextlib.suppress(ValueError):  # cut off before
                runs.flip(path / "__0_0.distcp")

    def jump(self) -> None:
        """The clock was wrong when some of it was written."""
        for path in self.run.rglob("*"):
            if self.random.random() < 0.5 and not path.is_symlink():
                when = self.random.choice([0, 1, 10**9, 4 * 10**9, time.time(), self.random.random() * 2**31])
                os.utime(path, (when, when))

    def resave(self) -> None:
        """The run goes on from an earlier step, and saves over a later one."""
        path = self.some()
        if path is not None:
            shutil.rmtree(path)
            runs.save_step(self.run, int(path.name[5:]), template=self.template)

    def link(self) -> None:
        path = self.some()
        latest = self.run / "latest"
        latest.unlink(missing_ok=True)
        if path is not None:
            self.random.choice([lambda: latest.symlink_to(path.name), lambda: latest.write_text(path.name)])()

    def lose_record(self) -> None:
        record = self.run / RECORD_NAME
        if record.exists():
            content = record.read_bytes()
            record.write_bytes(content[: self.random.randrange(len(content) + 1)])

    # What must hold

    def tend(self, *, is_killed: bool | None = None) -> None:
        """Tend the folder in another process, which may be killed on the way; then look what has become of it."""
        if self.random.random() < 0.5:
            rules = {"keep_last": 1, "keep_every": 50}
            names = self.random.sample(sorted(rules), self.random.randint(1, 2))
            self.rules = {name: rules[name] * self.random.randint(1, 3) for name in names}
        before = self.state()
        named = self.named()
        calls, most = self.random.choice([(_REMOVALS, 6), (_REMOVALS, 12), (_CHANGES, 25), (_LOOKS, 100)])
        killed_at = self.random.randint(1, most) if is_killed is not False and self.random.random() < 0.7 else None
        self.num_killed += in_a_fork(self.one_pass, killed_at, calls)
        self.check(before, self.state(), named)

    def one_pass(self) -> None:
        with patch("time.time", lambda: self.random.random() * 2**32):
            if self.random.random() < 0.8:
                api.watch(self.run, once=True, settle=0, num_workers=1, **self.rules)
            else:
                api.prune(self.run, settle=0, **(self.rules or {"keep_last": 1}))

    def state(self) -> dict[int, bool]:
        """Return step → is it as it was saved, of what has a checkpoint's name."""
        return {int(path.name[5:]): _content(path) == self.whole for path in self.run.glob("step-*")}

    def named(self) -> str:
        latest = self.run / "latest"
        if latest.is_symlink():
            return os.readlink(latest)
        return latest.read_text() if latest.exists() else ""

    def check(self, before: dict[int, bool], after: dict[int, bool], named: str) -> None:
        assert after.keys() <= before.keys()
        assert all(after[step] == before[step] for step in after), "something is neither whole nor gone"
        good = [step for step, is_good in before.items() if is_good]
        gone = before.keys() - after.keys()
        self.num_removed += len(gone)
        for step in gone:
            assert before[step], f"step-{step} was not good, and nobody has asked to remove it"
            assert step != max(good), f"step-{step} was the last good one"
            assert any(after[later] for later in after if later > step), f"nothing good follows step-{step}"
            assert f"step-{step}" != named, f"step-{step} is linked"
            assert step % self.rules.get("keep_every", step + 1), f"--keep-every keeps step-{step}"
            followed = sum(later > step and after[later] for later in after)
            assert followed >= self.rules.get("keep_last", 1), f"--keep-last keeps step-{step}"


def in_a_fork(work: Callable[[], None], killed_at: int | None, calls: tuple[str, ...]) -> bool:
    """Do the work in a process of its own that is killed at its Nth of these calls; was it?"""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            left = killed_at or 0

            def wrap(function):
                def call(*args, **kwargs):
                    nonlocal left
                    left -= 1
                    if left == 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return function(*args, **kwargs)

                return call

            for name in calls if killed_at else ():
                setattr(os, name, wrap(getattr(os, name)))
            with contextlib.suppress(UnreadableError):  # nothing has been saved yet
                work()
            status = 0
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(status)
    _, status = os.waitpid(pid, 0)
    killed = os.WIFSIGNALED(status)
    assert killed or os.WEXITSTATUS(status) == 0, "the pass has failed"
    return killed


def _content(path: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in path.iterdir() if each.is_file()}


def walk(num_runs: int, seed: int, template: Path) -> tuple[int, int]:
    """Walk; return how many passes were killed, and how many checkpoints were removed."""
    killed = removed = 0
    with tempfile.TemporaryDirectory() as directory:  # what is imported here no fork imports
        runs.save_step(Path(directory), 1, template=template)
        api.watch(directory, once=True, settle=0)
    for number in range(seed, seed + num_runs):
        with tempfile.TemporaryDirectory(prefix="ckpt-walk-") as directory:
            one = Walk(Path(directory), template, number)
            try:
                one.go(6)
            except AssertionError as error:
                raise AssertionError(f"seed {number}: {error}") from error
            killed, removed = killed + one.num_killed, removed + one.num_removed
    return killed, removed


if __name__ == "__main__":
    count, first = int(sys.argv[1]), int((sys.argv[2:] or ["0"])[0])
    with tempfile.TemporaryDirectory() as home:
        found = walk(count, first, runs.make_template(Path(home)))
    sys.stdout.write(
        f"{count} runs from seed {first}: {found[0]} passes killed, {found[1]} checkpoints removed, 0 lost\n"
    )
