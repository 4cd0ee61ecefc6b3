"""Runs the loaders' own code on toy models, and says how far what they load is from what was trained.

    bin/loaders [--comfyui DIR] [--sd-scripts DIR] [--musubi DIR] [--ai-toolkit DIR] [--invokeai DIR] [--vllm DIR]
                [--sglang DIR] [--only NAME …] [--every] [--write]

For every architecture and family, PEFT makes an adapter of diffusers' model; `ckpt export-lora` writes it for each
target; each loader's source, from a directory that you name, loads the file in a process of its own. The error is the
largest difference of a weight from the trained one, relative to the largest change. The weights of a loader that has
the authors' names are converted by diffusers, not by ckpt. Exit code 1: a loader differs from ckpt's verdict.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.insert(1, str(HERE.parents[2]))

import language  # noqa: E402
from loader_kohya import reads  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from table import Cell, render, write  # noqa: E402
from toy_models import Tensors, Toy, toys  # noqa: E402
from trained import FAMILIES, error, train  # noqa: E402

from ckpt_tools import api  # noqa: E402
from ckpt_tools.errors import CkptError  # noqa: E402

READS: Mapping[str, Sequence[str]] = {
    "peft": ("peft",),
    "diffusers": ("diffusers", "ai-toolkit", "invokeai"),
    "comfyui": ("comfyui", "diffusers", "ai-toolkit", "invokeai"),
    "kohya": ("kohya", "comfyui", "diffusers", "invokeai"),
}
"""Target of an export → loaders that are given the file."""
SERVERS = ("vllm", "sglang")
SOURCES = ("comfyui", "sd-scripts", "musubi", "ai-toolkit", "invokeai", *SERVERS)
MODULES: Mapping[str, str] = {"sd-scripts": "kohya", "musubi": "kohya", "lycoris": "kohya", "ai-toolkit": "ai_toolkit"}
"""Whose code → the module here that runs it; none is of that name."""
_TIMEOUT = 1200


@dataclass(slots=True)
class World:
    """One architecture on disk."""

    name: str
    toy: Toy
    root: Path
    native: Tensors | None = None
    weights: Tensors = field(default_factory=dict)
    """Those of diffusers' model."""

    @property
    def base(self) -> Path:
        """The directory of diffusers' model."""
        return self.root / self.name / "base"

    @property
    def native_file(self) -> Path:
        """The same weights under the authors' names."""
        return self.root / self.name / "native.safetensors"

    def make(self) -> None:
        """Save diffusers' model, with the weights of the native one where there is one."""
        model: Any = self.toy.build()
        if self.native_file.exists():
            self.native = load_file(self.native_file)
            own = model.state_dict()
            converted = self.toy.to_diffusers(self.native)
            assert {*converted} == {*own}, f"{self.name}: names differ, {sorted({*converted} ^ {*own})[:4]}"
            same = {name: each for name, each in converted.items() if each.shape == own[name].shape}
            model.load_state_dict(same, strict=False)
        self.weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.save_pretrained(self.base)

    def loaded(self, file: Path, loader: str) -> Tensors:
        """Return what a loader made, under diffusers' names."""
        found = load_file(file)
        of_diffusers = loader in ("peft", "diffusers", "ai-toolkit")
        of_diffusers |= loader == "kohya" and self.toy.kohya.get("names") == "diffusers"
        of_diffusers |= loader == "invokeai" and self.toy.invokeai != "flux"
        if not of_diffusers:
            found = self.toy.to_diffusers(found)
        lacking = sorted({*self.weights} - {*found})
        assert not lacking, f"{self.name}: {loader} gave back no {lacking[:4]}"
        return {name: found[name] for name, own in self.weights.items() if found[name].shape == own.shape}


@dataclass(slots=True)
class Runs:
    """Processes of the loaders."""

    sources: Mapping[str, str]
    root: Path
    _numbers: Iterator[int] = field(default_factory=lambda: iter(range(10**6)))

    def answers(self, module: str, source: str, jobs: Sequence[Mapping[str, str]]) -> dict[str, str]:
        """Return every job's failure, "" for none."""
        if not jobs:
            return {}
        number = next(self._numbers)
        given, answers, log = (self.root / f"{number}.{end}" for end in ("jobs", "answers", "log"))
        given.write_text(json.dumps(list(jobs)), encoding="utf-8")
        answers.touch()
        command = [sys.executable, str(HERE / "child.py"), module, source, str(given), str(answers)]
        with open(log, "w", encoding="utf-8") as output:
            subprocess.run(command, stdout=output, stderr=output, timeout=_TIMEOUT, check=False, cwd=self.root)
        lines = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
        found = {line["id"]: line["failure"] for line in lines}
        if len(found) < len(jobs):
            sys.exit(
                f"loaders: FAILED: {module} ended after {len(found)} of {len(jobs)} jobs:\n{log.read_text()[-2000:]}"
            )
        return found


def main(arguments: Sequence[str]) -> int:
    """Run; the exit code."""
    table = toys()
    parser = argparse.ArgumentParser(prog="bin/loaders", description=(__doc__ or "").splitlines()[0])
    for name in SOURCES:
        parser.add_argument(f"--{name}", metavar="DIR", help=f"public source of {name} (default: not run)")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="architectures, families or targets")
    parser.add_argument("--every", action="store_true", help="train every linear layer and convolution")
    parser.add_argument("--write", action="store_true", help="write the table of docs/dev/loaders.md")
    given = parser.parse_args(arguments)
    sources = {name: found for name in SOURCES if (found := getattr(given, name.replace("-", "_")))}
    unknown = sorted({*given.only} - {*table} - {*FAMILIES} - {*READS} - {*SERVERS})
    if unknown:
        parser.error(f"{unknown[0]!r} is no architecture, family or target, and no server")

    def chosen(names: Iterable[str]) -> list[str]:
        names = list(names)
        return [name for name in names if name in given.only] or names

    with tempfile.TemporaryDirectory(prefix="ckpt-loaders-") as root:
        runs = Runs(sources, Path(root))
        cells: list[Cell] = []
        if not given.only or not {*given.only} <= {*SERVERS}:
            worlds = make_worlds({name: table[name] for name in chosen(table)}, runs)
            cells = judge(worlds, chosen(FAMILIES), chosen(READS), runs, every=given.every)
        for server in SERVERS:
            if server in sources and (not given.only or server in given.only):
                cells += judge_server(server, runs)
    print(render(cells))
    if given.write:
        write(cells)
    wrong = [cell for cell in cells if cell.is_defect]
    for cell in wrong:
        print(f"DEFECT {cell}")
    return 1 if wrong else 0


def make_worlds(table: Mapping[str, Toy], runs: Runs) -> list[World]:
    """Write every base model."""
    worlds = [World(name, toy, runs.root) for name, toy in table.items()]
    for world in worlds:
        (runs.root / world.name).mkdir()
    if "comfyui" in runs.sources:
        jobs = [
            {"id": world.name, "architecture": world.name, "out": str(world.native_file)}
            for world in worlds
            if world.toy.comfyui
        ]
        for name, failure in runs.answers("comfyui", runs.sources["comfyui"], jobs).items():
            assert not failure, f"{name}: {failure}"
    for world in worlds:
        world.make()
    return worlds


def judge(
    worlds: Sequence[World], families: Sequence[str], targets: Sequence[str], runs: Runs, *, every: bool
) -> list[Cell]:
    """Train, export, check and load everything."""
    cells, jobs, meant = [], [], {}
    for world in worlds:
        for family in families:
            place = runs.root / world.name / family.replace(" ", "-")
            try:
                trained = train(world.toy, world.base, family, place / "trained", every=every)
            except ValueError as problem:
                cells += [Cell(world.name, family, target, "", f"PEFT: {problem}") for target in targets]
                continue
            save_file({name: each.contiguous() for name, each in trained.items()}, place / "meant.safetensors")
            for target in targets:
                made, more = _export(world, family, target, place)
                cells += made
                jobs += more
                meant.update(dict.fromkeys((job["id"] for job in more), (world, place / "meant.safetensors")))
    by_id = {cell.id: cell for cell in cells}
    for name, failure in _load(jobs, runs).items():
        cell, (world, place) = by_id[name], meant[name]
        cell.answered(failure)
        out = place.parent / f"{cell.target}-{cell.loader}.safetensors"
        if not failure:
            cell.error = error(world.loaded(out, cell.loader), load_file(place), world.weights)
            out.unlink()
    return cells


def _export(world: World, family: str, target: str, place: Path) -> tuple[list[Cell], list[dict[str, str]]]:
    """Write one file; returns a cell and a job for every loader of it."""
    directory = place / target
    try:
        api.export_lora(place / "trained", directory, to=target, base=world.base, architecture=world.toy.architecture)
    except CkptError as failure:
        return [Cell(world.name, family, target, "", failure.what)], []
    file = next(directory.glob("*.safetensors"))
    cells, jobs = [], []
    for loader in READS[target]:
        source = file if target != "peft" else directory
        cell = Cell(world.name, family, target, loader)
        if loader == "ai-toolkit" and world.toy.ai_toolkit.get("target") != target:
            continue
        if loader != "ai-toolkit":  # which goes on with training: check-lora does not judge it
            verdict = api.check_lora(source, base=world.base, loaders=[loader], architecture=world.toy.architecture)
            cell.verdict = verdict.verdict
            cell.why = "; ".join(each.what for each in verdict.findings if each.severity == "error")
        cells.append(cell)
        job = {
            "id": cell.id,
            "architecture": world.name,
            "loader": loader,
            "model": str(world.base),
            "base": str(world.native_file),
            "file": str(file),
            "out": str(place / f"{target}-{loader}.safetensors"),
        }
        job["place"] = "installed" if loader in ("peft", "diffusers") else loader
        if loader == "kohya":
            if not world.toy.kohya or world.native is None:
                continue
            names = world.toy.kohya.get("names")
            job["names"] = str(next(world.base.glob("*.safetensors")) if names == "diffusers" else world.native_file)
            own = reads(world.toy.kohya, [*load_file(file)])
            job["place"] = world.toy.kohya["source"] if own else "lycoris"
        jobs.append(job)
    return cells, jobs


def judge_server(server: str, runs: Runs) -> list[Cell]:
    """Give adapters of language models to vLLM or SGLang."""
    jobs, meant = [], {}
    for name in language.ADAPTERS:
        base, directory, weights, trained = language.make(name, runs.root)
        verdict = api.check_lora(directory, base=base, loaders=[server])
        cell = Cell("", name, "peft", server, verdict=verdict.verdict)
        cell.why = "; ".join(each.what for each in verdict.findings if each.severity == "error")
        file, model = directory / "adapter_model.safetensors", next(base.glob("*.safetensors"))
        out = runs.root / f"{server}-{directory.name}.safetensors"
        jobs.append({"id": cell.id, "architecture": "", "base": str(model), "file": str(file), "out": str(out)})
        meant[cell.id] = (cell, out, weights, trained)
    for name, failure in runs.answers(server, runs.sources[server], jobs).items():
        cell, out, weights, trained = meant[name]
        cell.answered(failure)
        if not failure:
            found = load_file(out)
            cell.error = error({each: found[each] for each in weights if each in found}, trained, weights)
    return [cell for cell, *_ in meant.values()]


def _load(jobs: Sequence[Mapping[str, str]], runs: Runs) -> dict[str, str]:
    """Give every job to its loader; a job whose source was not given has no answer."""
    found: dict[str, str] = {}
    places = {"installed": "", "lycoris": ""} | dict(runs.sources)
    for place in dict.fromkeys(job["place"] for job in jobs):
        if place in places:
            own = [job for job in jobs if job["place"] == place]
            found |= runs.answers(MODULES.get(place, place), places[place], own)
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
