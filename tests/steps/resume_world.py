"""What real trainers do with a step that is whole, half written, or mended from another: the oracle of `verify`.

In `tests`, `python -m steps.resume_world [NAME …]` trains with every trainer (`trainers.resumed`), resumes it from
every damaged copy of its second step, and writes `resume_oracle.yaml` (what it did) and `resume_oracle.tar.xz` (saves).
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import lzma
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import yaml
from fsdp2.ranks import RankError, RankLost, run_ranks
from trainers import resumed
from trainers.resumed import LAST, SAVED, WAYS, Way

FOREIGN = 1
"""The step that foreign files are of."""
RECORD, SAVES = (Path(__file__).with_name(f"resume_oracle.{ending}") for ending in ("yaml", "tar.xz"))
_TIMEOUT_S = 40


def order_of(step: Path) -> list[str]:
    """The files of a save as they were written: by time, and by number where the clock is too coarse (on tmpfs)."""
    files = [path for path in step.rglob("*") if path.is_file()] if step.is_dir() else [step]
    files.sort(key=lambda path: (path.stat().st_mtime_ns, path.stat().st_ino))
    return [str(path.relative_to(step)) if path != step else "" for path in files]


def cases_of(order: list[str], is_same: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
    """Yield (damage, file): what a kill before that file or in its middle leaves, and the file damaged alone."""
    yield "intact", ""
    for file in order:
        if file not in (order[0], order[-1]):  # nothing; the last one missing
            yield "until", file
        yield "within", file
    for file in order:
        if file:
            yield "missing", file
        yield "empty", file
        if file and not is_same(file):
            yield "foreign", file


def other_name(file: str) -> str:
    """Of the file in the other step: DeepSpeed's have the step in them."""
    return file.replace(f"step{SAVED}", f"step{FOREIGN}")


def make(damage: str, name: str, order: list[str], step: Path, other: Path, target: Path) -> None:
    """Write a damaged copy of a step to `target`, with what it takes of the other step."""
    place = order.index(name) if damage != "intact" else len(order)
    for number, file in enumerate(order):
        if (damage in ("until", "within") and number > place) or (damage in ("until", "missing") and number == place):
            continue
        to = target / file if file else target
        to.parent.mkdir(parents=True, exist_ok=True)
        is_foreign = damage == "foreign" and number == place
        content = (other / other_name(file) if is_foreign else step / file).read_bytes()
        if number == place and damage in ("empty", "within"):
            content = content[: len(content) // 2] if damage == "within" else b""
        to.write_bytes(content)


def ask(name: str, out: Path, resume: Path | None) -> list[tuple] | str:
    """Return what every rank brought, or what the first to fail raised."""
    arguments = (name, out, resume)
    backend = "gloo" if WAYS[name].ranks > 1 else None
    options = {"timeout": _TIMEOUT_S, "check": False, "backend": backend, "start": "fork"}
    found = run_ranks(WAYS[name].ranks, resumed.be_rank, *arguments, **options)
    failures = [each for each in found if isinstance(each, RankError)]
    waits = ("Timed out waiting", "Connection closed", "Connection reset")
    own = [each for each in failures if not isinstance(each, RankLost) and not any(w in each.message for w in waits)]
    if own:
        return f"crashes: {min(own, key=lambda each: each.time).message}"
    return "hangs: one rank waits for another" if failures else found


def differences(found: list[tuple], straight: list[tuple]) -> list[str]:
    """What a run went on with that the uninterrupted one did not; `losses` where losses or the last weights differ."""
    differ = []
    for (losses, state, final), (theirs, before, last) in zip(found, straight, strict=True):
        goes_on = all(losses.get(step) == theirs[step] for step in range(SAVED + 1, LAST + 1))
        differ += [] if goes_on and final == last else ["losses"]
        differ += [f"step {state['step']}"] if state["step"] != before["step"] else []
        differ += [key for key in before if key != "step" and state[key] != before[key]]
    return sorted(dict.fromkeys(differ))


def survey(name, saves, wanted, order=None) -> Iterator[tuple]:
    """Train, resume from every copy; yield first the order of the files, then (damage, file, what the trainer did).

    The order is that of this run, in which ranks race, unless it is given.
    """
    way = WAYS[name]
    resumed.prepare(way)
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="oracle-", dir=shm if shm.is_dir() else None) as scratch:
        straight = ask(name, Path(scratch, "run"), None)
        assert not isinstance(straight, str), straight
        step, other = (Path(scratch, "run", way.step.format(number)) for number in (SAVED, FOREIGN))
        order = order or order_of(step)
        yield "order", order, ""
        (saves / name).mkdir(parents=True)
        for number, path in ((SAVED, step), (FOREIGN, other)):
            (shutil.copytree if path.is_dir() else shutil.copy)(path, saves / name / str(number))
        unsaved: list[str] = []  # what the trainer does not save: Lightning no RNG state
        for damage, file in cases_of(
            order, lambda file: (step / file).read_bytes() == (other / other_name(file)).read_bytes()
        ):
            if wanted(damage, file):
                case = Path(scratch, "case")
                make(damage, file, order, step, other, case / step.name)
                found = ask(name, case / "out", case / step.name)
                if not isinstance(found, str):
                    differ = differences(found, straight)
                    unsaved = differ if damage == "intact" else unsaved
                    rest = [each for each in differ if each not in unsaved]
                    found = f"restarts: {', '.join(rest)}" if "losses" in differ else "resumes"
                yield damage, file, found
                shutil.rmtree(case)


def versions(way: Way) -> str:
    """Of what trained."""
    names = [name for name in (*way.needs, "torch") if "." not in name]
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


def record(name: str) -> None:
    """Write what a trainer did, and its saves, over what was recorded of it."""
    with tempfile.TemporaryDirectory() as made:
        found = survey(name, Path(made, "new"), lambda *_: True)
        files: dict[str, dict[str, str]] = {file: {} for file in next(found)[1]}
        entry = {"by": versions(WAYS[name]), "intact": "", "files": files}
        for damage, file, what in found:
            print(name, damage, file, what, sep="\t", flush=True)
            if damage == "intact":
                entry["intact"] = what
            else:
                files[file][damage] = what
        known = {**(yaml.safe_load(RECORD.read_text()) if RECORD.exists() else {}), name: entry}
        known = {name: known[name] for name in WAYS if name in known}
        RECORD.write_text(yaml.safe_dump(known, sort_keys=False, default_flow_style=None, width=160))
        saves = Path(made, "all")
        unpack(saves)
        shutil.rmtree(saves / name, ignore_errors=True)
        Path(made, "new", name).rename(saves / name)
        pack(saves)


def pack(saves: Path) -> None:
    """Write all saves as small as can be; of DeepSpeed's scripts, which every save has alike, only the beginning."""
    paths = sorted(
        (path for path in saves.rglob("*") if path.is_file()), key=lambda path: (path.suffix, path.name, path)
    )
    options = {"preset": 9 | lzma.PRESET_EXTREME, "format": tarfile.USTAR_FORMAT}
    with tarfile.open(SAVES, "w:xz", **options) as archive:
        for path in paths:
            content = path.read_bytes()[: 64 if path.suffix == ".py" else None]
            info = tarfile.TarInfo(str(path.relative_to(saves)))
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


def unpack(saves: Path) -> None:
    """Write the recorded saves: NAME/2 and NAME/1, each the step or its only file."""
    saves.mkdir(exist_ok=True)
    if SAVES.exists():
        with tarfile.open(SAVES) as archive:
            archive.extractall(saves, filter="data")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--again"]:  # a name and its cases in JSON; prints what the trainer does now
        with tempfile.TemporaryDirectory() as made:
            chosen = [tuple(case) for case in json.loads(sys.argv[3])]
            order = list(yaml.safe_load(RECORD.read_text())[sys.argv[2]]["files"])
            again = survey(sys.argv[2], Path(made), lambda *case: case in chosen, order)
            rows = [row for row in again if row[0] != "order"]
        print(json.dumps(rows))
    else:
        for each in sys.argv[1:] or WAYS:  # in processes of their own: what one needs, another must do without
            if (child := os.fork()) == 0:
                record(each)
                os._exit(0)
            os.waitpid(child, 0)
