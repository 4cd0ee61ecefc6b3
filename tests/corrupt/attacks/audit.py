"""Runs every command over the corpus, and says what went wrong."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from corrupt.attacks import watch
from corrupt.attacks.recipe import ALL, VERBS, Case, Corpus, Recipe
from samples import write_model

GROUPS = {"look": ("inspect", "diff"), "verify": ("structure", "data"), "gather": ("gather",), "mesh": ("mesh",)}
"""What one process runs."""
CODES = {0, 2, 3, 4, 5}
DESTINATION = "destination"


@dataclass
class Report:
    """What the runs showed."""

    num_recipes: int = 0
    num_runs: int = 0
    executions: int = 0
    imports: int = 0
    opens: int = 0
    changes: int = 0
    tracebacks: int = 0
    wrong_outputs: int = 0
    problems: list[str] = field(default_factory=list)
    seconds: Counter[str] = field(default_factory=Counter)
    """By recipe."""

    def add(self, other: Report) -> None:
        """Count `other` in."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def __str__(self) -> str:
        return (
            f"{self.num_recipes} recipes, {self.num_runs} runs, {self.executions} executions, {self.imports} imports, "
            f"{self.opens} opens outside the roots, {self.changes} changes outside the destination, "
            f"{self.tracebacks} tracebacks, {self.wrong_outputs} wrong outputs"
        )


def fingerprint(root: Path) -> dict[str, tuple[object, ...]]:
    """Everything about every file below `root` that a command could change; links are not followed."""
    found = {}
    for directory, names, files in os.walk(root):
        for name in (*names, *files):
            path = os.path.join(directory, name)
            status = os.lstat(path)
            content: object = None
            if stat.S_ISLNK(status.st_mode):
                content = os.readlink(path)
            elif stat.S_ISREG(status.st_mode) and status.st_size < 1 << 28:
                content = hashlib.sha256(Path(path).read_bytes()).hexdigest()
            found[os.path.relpath(path, root)] = (status.st_mode, status.st_size, status.st_mtime_ns, content)
    return found


def _commands(recipe: Recipe, verb: str, source: str, destination: str, corpus: Corpus) -> Iterable[list[str]]:
    bases = next(iter(corpus.cases.values())).bases
    forced = [] if verb != "inspect" or "--from" not in recipe.options else list(recipe.options)
    if verb == "inspect":
        yield ["inspect", source, "--tensors", *forced]
    elif verb in ("structure", "data"):
        yield ["verify", source, "--level", verb]
    elif verb == "diff":
        yield ["diff", source, str(bases[recipe.reference])]
    elif verb == "gather":
        yield ["gather", source, destination, *recipe.options]
    else:
        yield [recipe.mesh_verb, source, destination, "--mesh", "dp_shard=2", *recipe.options]


def _tasks(corpus: Corpus, group: str, *, whole: bool) -> Iterable[dict[str, object]]:
    for number, (name, case) in enumerate(corpus.cases.items()):
        recipe = ALL[name]
        source = str(case.root / recipe.source)
        for turn, verb in enumerate(VERBS):
            if verb not in GROUPS[group]:
                continue
            converts = verb in ("gather", "mesh")
            writable = case.root / "out" / verb
            writable.mkdir(parents=True, exist_ok=True)
            destination = str(writable / DESTINATION)
            for argv in _commands(recipe, verb, source, destination, corpus):
                # A destination that the recipe prepared is there once; the other run does without.
                both = whole or any(writable.iterdir())
                for as_json in (False, True) if both else (bool((number + turn) % 2),):
                    planted = any(writable.iterdir())
                    if planted and as_json and recipe.codes[verb] == (0,):
                        continue
                    then = []
                    if converts and 0 in recipe.codes[verb]:
                        then = [["verify", destination, "--json"], ["diff", source, destination, "--json"]]
                    yield {
                        "id": [name, verb, as_json],
                        "argv": [*argv, *(["--json"] if as_json else [])],
                        "roots": [*(str(case.root / root) for root in recipe.roots), str(corpus.root / "bases")],
                        "writable": str(writable),
                        "destination": destination if converts else "",
                        "remove": converts and 0 in recipe.codes[verb],
                        "then": then,
                    }


def run_watched(work: Path, warm_up: list[list[str]], runs: list[dict[str, object]]) -> tuple[list[dict], list[str]]:
    """Run commands in one process that is watched; return the lines that it wrote, and what ended it too early."""
    (work / "empty").mkdir()
    results = work / "results"
    document = {"cwd": str(work / "empty"), "results": str(results), "warm_up": warm_up, "runs": runs}
    (work / "job.json").write_text(json.dumps(document))
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("CKPT_", "PYTHON"))}
    process = subprocess.run(
        [sys.executable, "-P", watch.__file__, str(work / "job.json")],
        env=environment | {"PYTHONPATH": str(Path(__file__).parents[3]), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    num_ended = sum("id" in line for line in lines)
    if process.returncode == 0 and num_ended == len(runs):
        return lines, []
    last = lines[-1] if lines else "the start"
    what = f"{num_ended} of {len(runs)} runs ended, the process with {process.returncode} at {last}"
    return lines, [f"{what}: {process.stderr[-2000:]}"]


def run_group(corpus: Corpus, group: str, *, whole: bool = True) -> Report:
    """Run the commands of one group over every case, in one process; without `whole` in text or in JSON, by turns."""
    work = corpus.root / f"work-{group}"
    work.mkdir()
    tasks, warm_up = list(_tasks(corpus, group, whole=whole)), _warm_up(corpus, work)
    before = {name: _guarded(case) for name, case in corpus.cases.items()}
    report = Report(num_recipes=len(corpus.cases))
    lines, problems = run_watched(work, warm_up, tasks)
    report.problems += problems
    for result in lines:
        if "id" in result:
            _judge(report, result, corpus)
    for name, case in corpus.cases.items():
        if case.canary.exists():
            report.executions += 1
            report.problems.append(f"{name}: the payload was executed")
        if _guarded(case) != before[name]:
            report.changes += 1
            report.problems.append(f"{name}: something outside of the destination changed")
    return report


def _guarded(case: Case) -> dict[str, tuple[object, ...]]:
    return {part.name: fingerprint(part) for part in case.root.iterdir() if part.name != "out"}  # type: ignore[misc]


def _warm_up(corpus: Corpus, work: Path) -> list[list[str]]:
    """Every command once in each of its forms, so that what the product loads lazily is loaded."""
    bases = next(iter(corpus.cases.values())).bases
    runs: list[list[str]] = []
    (work / "warm-empty").mkdir()
    (work / "warm-file").write_bytes(b"x" * 99)
    # So that the table of formats that are not read is.
    runs += [["inspect", str(work / name)] for name in ("warm-empty", "warm-file")]
    llama = work / "warm-llama"  # so that the table of architectures is read
    llama.mkdir()
    (llama / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    runs.append(["gather", str(bases["plain"]), str(work / "warm-l"), "--assets", str(llama)])
    whole = write_model(work / "warm-model", assets={"config.json": (llama / "config.json").read_bytes()})
    runs.append(["inspect", str(whole)])
    (llama / "names.pkl").write_bytes(b"\x80\2ca\nb\n.")
    runs.append(["scan", str(llama)])
    for form in ([], ["--json"]):
        for base in ("dcp", "plain", "hf", "index", "sharded"):
            verb = "shard" if base in ("hf", "index") else "reshard"
            source = str(bases[base])
            out = str(work / f"warm-{base}{len(form)}")
            runs += [
                ["inspect", source, "--tensors", *form],
                ["inspect", source, "--by", "module", *form],
                ["verify", source, "--level", "structure", *form],
                ["verify", source, *form],
                ["diff", source, str(bases["changed"]), *form],
                ["gather", source, out + "-g", *form],
                ["gather", source, out + "-g", "--overwrite", *form],
                [verb, source, out + "-m", "--mesh", "dp_shard=2", *form],
                ["gather", source, out + "-g", *form],
                [verb, source, out + "-n", "--mesh", "nothing=2", *form],
            ]
        runs += [["verify", str(bases["hf"] / "absent"), *form], ["gather", *form], ["inspect", "--absent", *form]]
    return runs


def _judge(report: Report, result: dict, corpus: Corpus) -> None:
    """Hold one run against what its recipe says."""
    name, verb, as_json = result["id"]
    recipe = ALL[name]
    label = f"{name}: {verb}{' --json' if as_json else ''}"
    for run in (result, *result["then"]):
        report.num_runs += 1
        report.seconds[name] += run["seconds"]
        for kind, event, what in run["seen"]:
            counter = {"execution": "executions", "import": "imports", "open": "opens", "change": "changes"}[kind]
            setattr(report, counter, getattr(report, counter) + 1)
            report.problems.append(f"{label}: {kind}: {event} {what}")
        if run["raised"] or "Traceback" in run["err"]:
            report.tracebacks += 1
            report.problems.append(f"{label}: traceback: {(run['raised'] or run['err'])[-600:]}")
        if run["unsafe"]:
            report.wrong_outputs += 1
            report.problems.append(f"{label}: raw characters in the output: {run['unsafe']}")
        if run["json"]:
            report.wrong_outputs += 1
            report.problems.append(f"{label}: {run['json']}")
    code = result["code"]
    allowed = recipe.codes[verb]
    if code not in allowed or (code not in CODES and code not in allowed):
        report.wrong_outputs += 1
        report.problems.append(f"{label}: exit code {code}, not {allowed}: {(result['err'] or result['out'])[:400]}")
    if code == 4 and recipe.words and recipe.words not in result["err"].lower():
        report.wrong_outputs += 1
        report.problems.append(f"{label}: does not say {recipe.words!r}: {result['err'][:400]}")
    if result["seconds"] > recipe.seconds:
        report.problems.append(f"{label}: took {result['seconds']:.1f} s, the limit is {recipe.seconds}")
    planted = name.startswith("destination-")
    if result["left"] and not planted:
        report.wrong_outputs += 1
        report.problems.append(f"{label}: left {result['left']}")
    if verb in ("gather", "mesh") and not planted and result["exists"] != (code == 0):
        report.wrong_outputs += 1
        report.problems.append(
            f"{label}: exit code {code}, and the destination {'exists' if result['exists'] else 'does not'}"
        )
    for run, codes in zip(result["then"], ((0,), (0, 3)), strict=False):
        if run["code"] not in codes:
            report.wrong_outputs += 1
            report.problems.append(f"{label}: the result does not pass: {(run['err'] + run['out'])[:400]}")
        elif codes == (0, 3):
            document = json.loads(run["out"])
            # gather leaves out what is not the model's, and names change; what both have must be equal.
            if document["changed"] or (verb == "mesh" and not document["equal"]):
                report.wrong_outputs += 1
                report.problems.append(f"{label}: the result differs: {run['out'][:400]}")
