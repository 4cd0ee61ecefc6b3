"""Random lives of run folders, tended by `ckpt watch` and `ckpt prune`: what the guide promises holds after every pass.

    bin/lives [N] [--seed S]

A life saves with stock torch and safetensors, hollow and cut steps among them, deletes, renames, damages and pins them;
a pass may be killed at any call that changes something, meet a full disk or another clock. `model.py` says what must
have gone, what must be there, whole, and the exit code. Exit code 1 with a life that broke a promise.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import errno
import io
import json
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed.checkpoint as dcp
from lives.model import Content, Folder, Rules, Step
from safetensors.torch import save_file
from samples import memory_directory, without_ranks

from ckpt_tools import cli

PREFIX = {"safetensors": "checkpoint-", "trainer": "checkpoint-", "dcp": "step-"}
SHAPES = {"model.embed_tokens.weight": (12, 4), "model.layers.0.mlp.up_proj.weight": (16, 4), "lm_head.weight": (12, 4)}
KINDS = ("empty", "half", "missing", "zeros", "huge", "wrapped", "other", "alone", "nan")
"""Hollow steps and those of another model; alone: weights without an optimizer."""
_CHANGES = ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync", "symlink", "open", "scandir", "lstat")
State = dict[str, torch.Tensor]


class Broken(Exception):  # noqa: N818
    """A promise was broken."""


def weights(variant: int, kind: str = "good") -> State:
    """Return a model that training has moved a little, or what a hollow save makes of it."""
    base, moved = torch.Generator().manual_seed(0), torch.Generator().manual_seed(variant + 1)
    state = {
        name: torch.randn(shape, generator=base) + 0.01 * torch.randn(shape, generator=moved)
        for name, shape in SHAPES.items()
    }
    last = "lm_head.weight"
    return {
        "empty": lambda: {name: torch.empty(0) for name in state},
        "half": lambda: {name: each for name, each in state.items() if name == last},
        "missing": lambda: {name: each for name, each in state.items() if name != last},
        "zeros": lambda: {name: torch.zeros_like(each) for name, each in state.items()},
        "huge": lambda: {name: each * 1e30 for name, each in state.items()},
        "wrapped": lambda: {name.replace(".0.", ".0._fsdp_wrapped_module."): each for name, each in state.items()},
        "other": lambda: {f"other.{name}": each[:, :2].clone() for name, each in state.items()},
        "nan": lambda: state | {last: torch.full(SHAPES[last], float("nan"))},
    }.get(kind, lambda: state)()


@cache
def content_of(layout: str, kind: str, variant: int) -> Content:
    """Save a step as a trainer does, and return its files."""
    state, with_rest = weights(variant, kind), kind != "alone"
    rows = {i: {"exp_avg": 0.01 * e, "exp_avg_sq": e**2} for i, e in enumerate(weights(variant).values())}
    optimizer = {"state": rows, "param_groups": [{"lr": 0.1, "params": [*rows]}]}
    with memory_directory() as home:
        path = Path(home)
        if layout == "dcp":
            with without_ranks():
                dcp.save({"model": state} | ({"optimizer": optimizer} if with_rest else {}), checkpoint_id=path)
        else:
            save_file(state, path / "model.safetensors", metadata={"format": "pt"})
            (path / "config.json").write_text("{}")
        if layout == "trainer" and with_rest:
            torch.save(optimizer, path / "optimizer.pt")
            torch.save({"base_lrs": [0.1]}, path / "scheduler.pt")
            torch.save({"cpu": torch.arange(4)}, path / "rng_state.pth")
        return {file.name: file.read_bytes() for file in path.iterdir()}


class Life:
    """One run's folder, what happens to it, and what is known of it."""

    def __init__(self, home: Path, seed: int, counts: Counter[str]) -> None:
        self.chance, self.counts = random.Random(seed), counts
        self.run = home / "run"
        self.run.mkdir()
        (self.run / "notes.txt").write_text("not a checkpoint")
        self.layout = self.chance.choice([*PREFIX])
        self.folder, self.parked, self.growing = Folder(), dict[str, Step](), dict[str, Step]()
        self.story: list[str] = []
        self.top, self.skew = 0, 0.0
        self.is_healthy = self.chance.random() < 0.4
        self.has_metric = self.layout != "dcp" and self.chance.random() < 0.5
        self.rules = self.draw_rules()

    def draw_rules(self) -> Rules:
        draw = self.chance
        names = draw.sample(["last", "every", "best"][: 2 + self.has_metric], draw.randint(1, 2))
        values = {"last": draw.randint(1, 3), "every": draw.choice([10, 20]), "best": draw.randint(1, 2)}
        rules = {name: values[name] for name in names if draw.random() < 0.95}
        return Rules(**rules, quarantine_s=draw.choice([86400.0, 86400.0, 3600.0, 0.0]))

    def go(self, num_acts: int) -> None:
        """Let things happen, and tend the folder after each."""
        for _ in range(num_acts):
            acts = [self.save] * 3
            if not self.is_healthy:
                acts += [self.save_hollow] * 2 + [self.save_cut, self.save_frozen, self.damage, self.touch, self.rename]
                acts += [self.take_away, self.come_back, self.go_back, self.overwrite, self.pin, self.lose_record]
                acts += [self.undo, self.accept]
            act = self.chance.choice(acts)
            self.story.append(act.__name__)
            act()
            if self.growing and self.chance.random() < 0.3:
                self.write(*self.growing.popitem())
            if self.chance.random() < 0.3:
                self.rules = self.draw_rules()
            fault = self.chance.choices(["", "kill", "full", "clock"], [7, 3, 1, 1])[0]
            self.tend(self.chance.choice(["watch", "watch", "watch", "prune"]), fault)
        while self.growing:  # every save comes to its end
            self.write(*self.growing.popitem())
        self.rules = Rules(last=2)
        self.tend("watch")

    # What happens

    def save(self, kind: str = "good", number: int | None = None) -> str:
        number = number or self.top + self.chance.randint(1, 15)
        self.top = max(self.top, number)
        name, metric = f"{PREFIX[self.layout]}{number}", None
        content = content_of(self.layout, kind, self.chance.randrange(8))
        if self.layout != "dcp":
            log = {"step": number, "loss": 1.0}
            if self.has_metric and self.chance.random() < 0.8:
                log["eval_loss"] = metric = self.chance.choice([0.1, 0.2, 0.3, 0.4, float("nan"), float("inf")])
            state = json.dumps({"global_step": number, "log_history": [log]})
            content = content | {"trainer_state.json": state.encode()}
        holds, is_bad = int(kind != "alone" or self.layout == "safetensors"), kind in ("nan", "empty")
        kind = "good" if is_bad or kind == "alone" else kind
        self.write(name, Step(number, kind, content, holds, "bad" if is_bad else "whole", metric))
        return name

    def write(self, name: str, step: Step) -> None:
        """Write it anew, as a save or a copy does."""
        shutil.rmtree(self.run / name, ignore_errors=True)
        (self.run / name).mkdir()
        for file, content in step.content.items():
            (self.run / name / file).write_bytes(content)
        self.folder.steps[name] = step
        step.change()

    def save_hollow(self) -> None:
        self.save(self.chance.choice(KINDS) if self.folder.fit() else "good")

    def save_cut(self) -> None:
        """The save is killed, or goes on for some passes."""
        name = self.save()
        whole = self.folder.steps[name]
        file = max(whole.content, key=lambda each: len(whole.content[each]))
        cut = whole.content[file][: int(len(whole.content[file]) * self.chance.uniform(0.2, 0.9))]
        self.write(name, Step(whole.number, "good", whole.content | {file: cut}, state="half"))
        if self.chance.random() < 0.6:
            self.growing[name] = whole

    def save_frozen(self) -> None:
        """The same bytes are saved again, which is fit as far as the guide goes."""
        if one := self.some("fit"):
            name, one = self.save(), self.folder.steps[one]
            new = self.folder.steps[name]
            own = {file: content for file, content in new.content.items() if file == "trainer_state.json"}
            self.write(name, replace(new, kind=one.kind, holds=one.holds, content=one.content | own))

    def some(self, verdict: str = "") -> str:
        names = [name for name, step in self.folder.rows() if verdict in ("", step.verdict)]
        return self.chance.choice([name for name in names if name not in self.growing] or [""])

    def damage(self) -> None:
        """A disk flips a bit of what was verified, or cuts it, under the same times."""
        if name := self.some("fit"):
            step = self.folder.steps[name]
            file = next(each for each in step.content if each.endswith((".distcp", ".safetensors")))
            path, content = self.run / name / file, bytearray(step.content[file])
            status, is_cut = path.stat(), self.chance.random() < 0.4
            content[-50] ^= 1
            self.folder.ghosts.append(replace(step))  # as it was, it is still compared with
            step.content = step.content | {file: bytes(content[: len(content) // 2] if is_cut else content)}
            path.write_bytes(step.content[file])
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
            step.state, step.verdict = "half" if is_cut else "rotten", ""

    def touch(self) -> None:
        """A clock was wrong when this was written; what was verified may be anything else."""
        if name := self.some():
            when = self.chance.choice([1, 10**9, 4 * 10**9, time.time()])
            for file in (self.run / name).iterdir():
                os.utime(file, (when, when))
            self.folder.steps[name].change()

    def rename(self) -> None:
        if name := self.some():
            self.top += 1
            step = self.lose(self.folder.steps, name)
            new = self.chance.choice([f"{PREFIX[self.layout]}{self.top}", f"old-{name}"])
            (self.run / name).rename(self.run / new)
            if not new.startswith("old-"):
                self.folder.steps[new] = replace(step, number=self.top, metric=None, is_back=False)
                self.folder.steps[new].change()

    def lose(self, steps: dict[str, Step], name: str) -> Step:
        """Note that one is gone."""
        step = steps.pop(name)
        self.folder.ghosts += [step] * (step.verdict == "fit")
        return step

    def take_away(self) -> None:
        """The trainer's own limit, or a person, removes it; it may come back."""
        if name := self.some():
            shutil.rmtree(self.run / name)
            self.parked[name] = replace(self.lose(self.folder.steps, name), is_back=False)

    def come_back(self) -> None:
        if self.parked:
            self.write(*self.parked.popitem())

    def go_back(self) -> None:
        """The run resumes from an earlier step."""
        number = self.chance.randint(1, max(1, self.top))
        taken = {step.number for each in (self.folder.steps, self.folder.away, self.parked) for step in each.values()}
        self.save(number=None if number in taken or number >= self.top else number)

    def overwrite(self) -> None:
        if name := self.some("fit"):
            old = self.folder.steps[name]
            self.save(number=old.number)
            self.folder.steps[name].is_back = old.is_back

    def pin(self) -> None:
        """Somebody says that a step is in use: a link, a lease of another host, or the trainer's pointer."""
        if name := self.some():
            for each in ("keep", ".ckpt-lease-1", "latest"):
                (self.run / each).unlink(missing_ok=True)
            until = self.chance.choice([1e9, 4e9])  # one that is over holds as well
            lease = {"host": "far", "pid": 7, "since": 1e9, "until": until, "checkpoint": name}
            how = self.chance.randrange(4)
            if how == 0:
                (self.run / "keep").symlink_to(name)
            elif how < 3:
                (self.run / ("", ".ckpt-lease-1", "latest")[how]).write_text(json.dumps(lease) if how == 1 else name)
            self.folder.pins = {name} if how < 3 else set()

    def lose_record(self) -> None:
        (self.run / ".ckpt-tend.json").unlink(missing_ok=True)
        self.folder.forget()

    def undo(self) -> None:
        asked = self.chance.choice([*self.folder.away, "all"])
        code, document = self.ckpt("prune", "--undo", asked)
        place, _ = self.found()
        for name in [*self.folder.away] if asked == "all" else [asked]:
            if name in place:
                self.folder.steps[name] = replace(self.folder.away.pop(name), is_back=True)
            elif not self.rests(name, self.folder.away[name]) >= {"gone"}:  # its removal has not begun
                raise Broken(f"--undo {asked} ends with {code}, and {name} is not back: {document}")
        self.check(self.folder, set(), "--undo")

    def accept(self) -> None:
        name = self.some("unfit")
        if name and "rotten" not in self.folder.steps[name].state:  # which by its checksums may be bad, not unfit
            self.folder.accept(name)
            rules, self.rules = self.rules, Rules(last=2, accept=name)
            self.tend("watch")
            self.rules = rules

    # What must hold

    @property
    def now(self) -> float:
        return time.monotonic() + self.skew

    def ckpt(self, command: str, *options: str) -> tuple[int, dict]:
        """Run a command line here, by this life's clock; exit code and document."""
        out, err, now, skew = io.StringIO(), io.StringIO(), time.time, self.skew
        once = ["--once"] * (command == "watch" and "--status" not in options)
        line = [command, str(self.run), *once, "--settle", "0", "--json", *options]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), patch("time.time", lambda: now() + skew):
            code = cli.main(line)
        return code, json.loads(out.getvalue() or json.dumps({"said": err.getvalue()}))

    def tend(self, command: str, fault: str = "") -> None:
        """Tend the folder, with a fault or without, and see that all is as the model has it."""
        rules, folder = self.rules, self.folder
        if command == "prune" and not rules.remove:
            return
        if fault == "clock":
            self.skew += self.chance.choice([-4000.0, -60.0, 60.0, 2000.0, 3 * 86400.0, 1e9])
        rows = {"last": rules.last, "every": rules.every, "best": rules.best}
        options = [part for name, value in rows.items() if value for part in (f"--keep-{name}", str(value))]
        options += [*(("--accept", rules.accept) if rules.accept else ()), "--quarantine", f"{rules.quarantine_s:.0f}s"]
        what = f"{command} {' '.join(options)} {fault}"
        shown = ", ".join(f"{step.number} {step.kind} {step.state}" for _, step in folder.rows())
        self.story.append(f"{what} ({shown})")
        if fault == "kill":
            self.kill(command, options)
        has_lock = (self.run / ".ckpt-tend.lock").exists()
        with full_disk() if fault == "full" else contextlib.nullcontext():
            code, document = self.ckpt(command, *options)
        if "checkpoints" not in document:
            is_measured = any(step.metric is not None for step in folder.steps.values())
            is_right = {4: not folder.steps, 1: fault == "full" and not has_lock}  # nothing can be begun
            if not is_right.get(code, code == 2 and command == "prune" and rules.best and not is_measured):
                raise Broken(f"{what}: ends with {code}: {document}")
            return
        seen = {row["name"]: row["fit"] for row in document["checkpoints"]}
        new = {name: step for name, step in folder.steps.items() if not step.verdict}
        if command == "watch":
            self.counts["left open"] += folder.verify(rules.accept, seen)
        gone, fit = folder.plan(rules), {name for name, _ in folder.fit()}
        want = 3 if command == "watch" and fit < folder.steps.keys() else 0
        if (fit, gone) != ({name for name in seen if seen[name]}, {*document["removed"]}) or code not in (
            want,
            1 if fault == "full" else want,
        ):
            raise Broken(f"{what}: fit {fit}, must go {gone}, exit {want}; but exit {code}, {document}")
        self.check(folder, gone, what, is_full=fault == "full")
        self.settle()
        self.counts["removed"] += len(gone)
        if fault == "full":  # what was verified is recorded as far as space was reserved
            states = {row["name"]: row["state"] for row in self.ckpt("watch", "--status")[1]["checkpoints"]}
            for name, step in new.items():
                if states.get(name) == "complete":
                    step.change()
        elif self.chance.random() < 0.25:
            again = self.ckpt(command, *options)
            if again[1]["removed"] or again[0] != code:
                raise Broken(f"{what}: a second pass ends with {again}")
            self.check(folder, set(), f"{what}, again")

    def kill(self, command: str, options: list[str]) -> None:
        """Let a pass be killed at some call, and sometimes bring back what it has removed."""
        calls = self.chance.sample(_CHANGES[:7], 3) if self.chance.random() < 0.8 else [*_CHANGES]
        left = self.chance.randint(1, 60 if len(calls) > 3 else 8)
        self.counts["killed"] += in_a_fork(lambda: self.ckpt(command, *options), left, calls)
        would = self.folder.copy()
        if command == "watch":
            would.verify(self.rules.accept, {})
        self.check(self.folder, would.plan(self.rules), "killed", is_part=True)
        self.settle(would)
        if self.folder.away and self.chance.random() < 0.3:
            self.counts["undone after a kill"] += 1
            self.undo()

    def rests(self, name: str, step: Step) -> set[str]:
        """Return where what was removed may be."""
        age = abs(self.now - step.away_since) if name in self.folder.away else 0.0
        if age < self.rules.quarantine_s - 5:
            return {"in quarantine"}
        return {"gone", "in quarantine", "half in quarantine"}

    def check(self, folder: Folder, gone: set[str], what: str, *, is_part: bool = False, is_full: bool = False) -> None:
        """Everything is whole in its place, or whole in quarantine, or gone if it may be."""
        place, trash = self.found()
        ends = self.rules.remove and not is_part and any(name not in gone for name, _ in folder.fit())
        for name, step in [*folder.steps.items(), *folder.away.items()]:
            here, there = place.pop(name, None), trash.get(name)
            found = "half in quarantine" if there not in (None, step.content) else "in quarantine" if there else "gone"
            if here is not None:
                found = "in its place" if here == step.content else "half in its place"
            may = self.rests(name, step)
            if "gone" in may and ends and self.rules.quarantine_s == 0 and what != "--undo":
                may = {"gone"}
            may = {"gone", "in quarantine"} if is_full else may
            if name in folder.steps:
                may = {"in its place"} | may if is_part and name in gone else may if name in gone else {"in its place"}
            if found not in may:
                raise Broken(f"{what}: {name} is {found}, not {' or '.join(sorted(may))}")
        if place or not (self.run / "notes.txt").exists():
            raise Broken(f"{what}: {sorted(place)} appeared, or the notes are lost")

    def found(self) -> tuple[dict[str, Content], dict[str, Content]]:
        """Return what is in its place, and what is in quarantine."""
        steps = {path.name: path for path in self.run.glob(f"{PREFIX[self.layout]}*")}
        return tuple(
            {name: {file.name: file.read_bytes() for file in path.iterdir()} for name, path in found.items()}
            for found in (steps, in_quarantine(self.run))
        )

    def settle(self, judged: Folder | None = None) -> None:
        """Note what a pass has removed, by the verdicts that it came to, and what is gone for good."""
        place, trash = self.found()
        for name in self.folder.steps.keys() - place.keys():
            step = self.folder.steps.pop(name)
            self.folder.away[name] = replace(step if judged is None else judged.steps[name], away_since=self.now)
        for name in [name for name, step in self.folder.away.items() if trash.get(name) != step.content]:
            self.lose(self.folder.away, name)


def in_quarantine(run: Path) -> dict[str, Path]:
    """Return the steps that can be brought back: name → path."""
    parts = [(path.name.split("-", 4), path) for path in run.glob(".ckpt-trash-*")]
    return {name: path for (_, _, since, _, name), path in parts if int(since, 16)}


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """Let everything fail that needs space."""
    real_open, make = builtins.open, os.open

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def opening(file, mode="r", *rest, **options):
        return fail() if {*mode} & {*"wxa"} else real_open(file, mode, *rest, **options)

    def making(path, flags, *rest, **options):
        is_new = flags & os.O_CREAT and not os.path.lexists(path)
        return fail() if is_new else make(path, flags, *rest, **options)

    none = SimpleNamespace(f_bavail=0, f_frsize=4096, f_favail=1, f_files=1)
    calls = {"mkdir": fail, "symlink": fail, "open": making, "statvfs": lambda _: none}
    with patch.multiple(os, **calls), patch("builtins.open", opening):
        yield


def in_a_fork(work: Callable[[], object], left: int, calls: list[str]) -> bool:
    """Work in a process of its own that is killed before its Nth of these calls; was it?"""
    pid = os.fork()
    if pid == 0:

        def wrap(function):
            def call(*args, **kwargs):
                nonlocal left
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), 9)
                return function(*args, **kwargs)

            return call

        try:
            for name in calls:
                setattr(os, name, wrap(getattr(os, name)))
            work()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def live(number: int, counts: Counter[str]) -> None:
    """Live one life; Broken with its number."""
    with memory_directory() as home:
        life = Life(Path(home), number, counts)
        try:
            life.go(5)
        except Broken as error:
            raise Broken(f"life {number} ({life.layout}): {error}; {'; '.join(life.story)}") from error


def main() -> int:
    """Live, and print what came of it."""
    parser = argparse.ArgumentParser(prog="bin/lives", description=__doc__.splitlines()[0])
    parser.add_argument("count", type=int, nargs="?", default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counts, broken, began = Counter(), 0, time.process_time()
    for number in range(options.seed, options.seed + options.count):
        try:
            live(number, counts)
        except Broken as error:
            broken += 1
            print(f"BROKEN {error}", flush=True)
    shown = ", ".join(f"{number} {what}" for what, number in sorted(counts.items()))
    cost = f"{time.process_time() - began:.0f} s of processor"
    print(f"lives: {options.count} from seed {options.seed}, {broken} broken; {shown} ({cost})")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
