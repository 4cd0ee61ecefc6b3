"""Times what ckpt does (--only lists the jobs) as whole processes, beside `cp -r` + sync and other tools.

Contenders take turns within each round, so a slow minute hits all alike. The page cache is warm for
everybody: nothing is dropped, every source is read once before its job. Everybody ends with the output on
disk: ckpt by its own fsync, cp and the peers, which leave that to the system, by `sync -f`. Beyond that the
peers run as their own defaults are. What ckpt writes is checked once per job, outside the clock.
"""

from __future__ import annotations

import argparse
import filecmp
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lora import ALPHA
from measure import CommandError, Sample, floor_rss_bytes, measure
from report import Kind, Row, to_json, to_markdown
from scale import run_scale, to_json as scale_to_json, to_markdown as scale_to_markdown

from ckpt_tools.checkpoint.formats.manifest import MANIFEST_NAME
from ckpt_tools.units import parse_size

HERE = Path(__file__).resolve().parent
CKPT = str(Path(sys.prefix, "bin", "ckpt"))
SOURCES = {"shard": "hf", "gather": "dcp", "reshard": "dcp", "verify": "dcp", "merge": "hf", "export": "trained"}
SOURCES |= {"gather-bin": "bin", "gather-ranks": "ranks", "dequantize": "fp8", "gather-zero": "zero"}
"""Job → the directory that it reads. gather-zero needs deepspeed, which is no dependency."""
JOBS = tuple(name for name in SOURCES if name != "gather-zero" or importlib.util.find_spec("deepspeed"))
WIDER = {"gather-zero": 2}
"""Job → how many times the model's bytes it writes, where not once: float32 of bfloat16."""
TP_RULES = (
    "model.layers.*.self_attn.{q,k,v}_proj.weight=tp:S(0)",
    "model.layers.*.self_attn.o_proj.weight=tp:S(1)",
    "model.layers.*.mlp.{gate,up}_proj.weight=tp:S(0)",
    "model.layers.*.mlp.down_proj.weight=tp:S(1)",
    "{model.embed_tokens,lm_head}.weight=tp:S(0)",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to do a job."""

    name: str
    kind: Kind
    command: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job, its source and everybody who does it into `out`."""

    name: str
    source: Path
    out: Path
    contenders: list[Contender]
    check: list[str] | None
    """Command that proves what ckpt wrote; None when the job writes nothing, or checks it itself."""


def say(text: str) -> None:
    """Tell how far it is, on stderr."""
    print(f"bench: {text}", file=sys.stderr, flush=True)


def peer(script: str, source: Path, out: Path, *arguments: object, adapter: Path | None = None) -> Contender:
    """A peer in its own Python process, until its output is on disk."""
    sources = [source] if adapter is None else [source, adapter]
    words = [sys.executable, HERE / "peers" / f"{script}.py", *sources, out, *arguments]
    command = ["sh", "-c", '"$@" && sync -f "$0"', str(out), *map(str, words)]
    return Contender(name=script.replace("_", " ") + " + sync", kind="peer", command=command)


def plan_jobs(work: Path, names: list[str], num_ranks: int, with_peers: bool) -> Iterator[Job]:
    """The jobs named, in order."""
    hf, dcp, out = work / "hf", work / "dcp", work / "out"
    adapter, trained = work / "adapter", work / "trained"
    stored, ranks, fp8, zero = (work / name for name in ("bin", "ranks", "fp8", "zero"))
    rules = [word for rule in TP_RULES for word in ("--set", rule)]
    ours = {
        "shard": ["shard", hf, out, "--mesh", f"dp_shard={num_ranks}"],
        "gather": ["gather", dcp, out],
        "reshard": ["reshard", dcp, out, "--mesh", "dp_shard=2,tp=2", *rules],
        "verify": ["verify", dcp, "--level", "data"],
        "merge": ["merge-lora", hf, adapter, out],
        "export": ["export-lora", trained, out, "--alpha", ALPHA, "--base-model", "bench/base"],
        "gather-bin": ["gather", stored, out],
        "gather-ranks": ["gather", ranks, out],
        "dequantize": ["gather", fp8, out, "--dequantize"],
        "gather-zero": ["gather", zero, out],
    }
    peers = {
        "shard": [peer("hf_one_rank", hf, out), peer("hf_ranks", hf, out, num_ranks)],
        "gather": [
            peer("dcp_to_torch", dcp, out),
            peer("dcp_consolidate", dcp, out, hf / "model.safetensors.index.json"),
            peer("accelerate_merge", dcp, out),
        ],
        "merge": [peer("peft_merge", hf, out, adapter=adapter)],
        "gather-bin": [peer("torch_load_and_save_file", stored, out)],
        "gather-ranks": [peer("as_verl_merges", ranks, out)],
        "dequantize": [peer("transformers_fp8", fp8, out)],
        "gather-zero": [peer("zero_to_fp32", zero, out)],
    }
    against = [CKPT, "verify", str(out), "--against", str(hf), "--quiet"]
    checks = {
        **dict.fromkeys(("shard", "gather", "reshard", "gather-bin", "gather-ranks"), against),
        "merge": [sys.executable, str(HERE / "check_merge.py"), str(hf), str(adapter), str(out)],
        "export": [CKPT, "check-lora", str(out), "--base", str(hf), "--quiet"],
        "dequantize": [sys.executable, str(HERE / "check_decoded.py"), str(fp8), str(out)],
        "gather-zero": [sys.executable, str(HERE / "check_widened.py"), str(hf), str(out)],
    }
    for name in names:
        source = work / SOURCES[name]
        copied = hf if name == "dequantize" else source  # as many bytes as are written
        copy = ["sh", "-c", 'cp -r "$1" "$2" && sync -f "$2"', "cp", str(copied), str(out)]
        yield Job(
            name=name,
            source=source,
            out=out,
            contenders=[
                Contender(name="ckpt", kind="ckpt", command=[CKPT, *map(str, ours[name])]),
                Contender(name="cp -r + sync", kind="cp", command=copy),
                *(peers.get(name, []) if with_peers else []),
            ],
            check=checks.get(name),
        )


def warm(directory: Path) -> None:
    """Read everything once, so that every contender finds it in memory."""
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(1 << 23):
                    pass


def compare_directories(before: Path, after: Path) -> None:
    """Fail unless `after` holds the files of `before` with the same bytes, and nothing else but the manifest."""
    names = {p.relative_to(d).as_posix() for d in (before, after) for p in d.rglob("*") if p.is_file()}
    names.discard(MANIFEST_NAME)
    _, different, missing = filecmp.cmpfiles(before, after, names, shallow=False)
    if different or missing:
        raise CommandError(f"gather did not give the files back: {', '.join(different + missing)}")


def run_job(job: Job, work: Path, repeats: int) -> list[Row]:
    """Let all contenders take turns; a peer that fails is out, a failing ckpt ends the run."""
    for directory in dict.fromkeys((job.source, work / "hf")):
        warm(directory)
    log = work / "log"
    samples: dict[str, list[Sample]] = {contender.name: [] for contender in job.contenders}
    failed: set[str] = set()
    for turn in range(repeats):
        first = turn % len(job.contenders)
        for contender in job.contenders[first:] + job.contenders[:first]:
            if contender.name in failed:
                continue
            try:
                sample = measure(contender.command, log)
                if contender.kind == "ckpt" and turn == 0 and job.check is not None:
                    measure(job.check, log)
                    if job.name == "gather":
                        compare_directories(work / "hf", job.out)
            except CommandError as error:
                if contender.kind != "peer":
                    raise
                say(f"{contender.name} failed and is left out: {error}")
                failed.add(contender.name)
                samples[contender.name].clear()
            else:
                samples[contender.name].append(sample)
                peak = sample.peak_rss_bytes / 1e6
                say(f"{job.name} {turn + 1}/{repeats} {contender.name}: {sample.seconds:.2f} s, {peak:.0f} MB")
            finally:
                shutil.rmtree(job.out, ignore_errors=True)
    times = WIDER.get(job.name, 1)
    return [
        Row(job=job.name, contender=c.name, kind=c.kind, samples=tuple(samples[c.name]), times=times)
        for c in job.contenders
    ]


def describe_machine(work: Path) -> dict[str, object]:
    """What the figures depend on."""
    versions = {name: importlib.metadata.version(name) for name in ("ckpt-tools", "torch", "safetensors")}
    kind = subprocess.run(["stat", "-f", "-c", "%T", str(work)], capture_output=True, text=True, check=False)
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "file_system": kind.stdout.strip(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **versions,
    }


def prepare(work: Path, options: argparse.Namespace) -> None:
    """Make the other sources that the jobs need."""

    def make(script: str, *words: object) -> None:
        # In a process of its own: what this one has used is the floor of every peak that is measured.
        command = [sys.executable, str(HERE / f"{script}.py"), *map(str, words)]
        subprocess.run(command, stdout=sys.stderr, check=True)

    hf, sharded = work / "hf", {}
    needed = {SOURCES[name] for name in options.only}
    if "dcp" in needed:
        sharded[work / "dcp"] = hf
    if "merge" in options.only:
        make("adapter", "peft", hf, work / "adapter")
    if "trained" in needed:
        make("adapter", "trained", hf, work / "trained-hf", options.files)
        sharded[work / "trained"] = work / "trained-hf"
    if kinds := sorted(needed & {"bin", "ranks", "fp8", "zero"}):
        make("sources", hf, work, options.ranks, *kinds)
    for dcp, source in sharded.items():
        measure([CKPT, "shard", str(source), str(dcp), "--mesh", f"dp_shard={options.ranks}"], work / "log")
        if source != hf:
            shutil.rmtree(source)


@contextmanager
def work_directory(parent: str | None) -> Iterator[Path]:
    """A directory of our own, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="ckpt-bench-", dir=parent) as work:
        yield Path(work).resolve()


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="bin/bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=parse_size, default="2GB", help="bytes of the model (default 2GB)")
    parser.add_argument("--files", type=int, default=4, help="safetensors files of the source (default 4)")
    parser.add_argument("--hidden", type=int, help="width of the model (default: fits --size, at most 2048)")
    parser.add_argument("--ranks", type=int, default=8, help="ranks that shard writes for (default 8)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds; medians are over them (default 5)")
    parser.add_argument("--only", default=",".join(JOBS), help=f"jobs to run, of {','.join(JOBS)}")
    parser.add_argument("--no-peers", action="store_true", help="only ckpt and cp")
    parser.add_argument(
        "--scale",
        action="store_true",
        help="instead: sparse checkpoints of 1 TB, time and memory against tensors and ranks",
    )
    parser.add_argument("--workdir", help="where to write (default: the temporary directory)")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of the table")
    options = parser.parse_args(arguments)
    options.only = [name.strip() for name in options.only.split(",")]
    for name in options.only:
        if name in SOURCES and name not in JOBS:
            parser.error(f"{name} needs deepspeed, which is not installed")
        if name not in JOBS:
            parser.error(f"--only knows {', '.join(JOBS)}, not {name!r}")
    if options.hidden is None:
        # Embedding and head, 64 · hidden² bytes, take about a seventh of the model.
        options.hidden = min(2048, max(64, math.isqrt(options.size // 450) // 64 * 64))
    for name in ("files", "ranks", "repeats"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if options.hidden < 64 or options.hidden % 64:
        parser.error("--hidden must be a multiple of 64")
    return options


def bench_scale(workdir: str | None, repeats: int, as_json: bool) -> int:
    """Run `--scale`, print; the exit code."""
    cases = []
    with work_directory(workdir) as work:
        try:
            for case in run_scale(CKPT, work, repeats=repeats):
                ranks = f", {case.num_ranks} ranks" if case.num_ranks else ""
                say(f"{case.command}, {case.num_tensors} tensors{ranks}: {case.median_seconds:.2f} s")
                cases.append(case)
        except CommandError as error:
            print(f"bench: {error}", file=sys.stderr)
            return 1
        machine = describe_machine(work)
    if as_json:
        document = {"schema_version": 1, "machine": machine, "repeats": repeats, "scale": scale_to_json(cases)}
        print(json.dumps(document, indent=2))
    else:
        print(scale_to_markdown(cases))
        facts = ", ".join(f"{name} {value}" for name, value in machine.items())
        print(f"\nWhole processes, medians of {repeats}, sparse files of 1 TB.")
        print(f"{facts}; peaks below {floor_rss_bytes() / 1e6:.0f} MB are not told apart")
    return 0


def main(arguments: list[str]) -> int:
    """Make the source, run the jobs, print; the exit code."""
    options = parse_arguments(arguments)
    if options.scale:
        return bench_scale(options.workdir, options.repeats, options.json)
    rows: list[Row] = []
    with work_directory(options.workdir) as work:
        free = shutil.disk_usage(work).free
        sources = {SOURCES[name] for name in options.only} - {"hf"}
        times = 3 + len(sources) + 2 * ("zero" in sources)  # the model, two outputs at most, sources; float32 is twice
        if free < times * options.size:
            print(f"bench: {work} has {free / 1e9:.1f} GB free, {times} times --size is needed", file=sys.stderr)
            return 1
        hf = work / "hf"
        make = [sys.executable, str(HERE / "generate.py"), hf, options.size, options.files, options.hidden]
        subprocess.run(list(map(str, make)), stdout=sys.stderr, check=True)
        num_bytes = sum(path.stat().st_size for path in hf.iterdir())
        try:
            prepare(work, options)
            for job in plan_jobs(work, options.only, options.ranks, not options.no_peers):
                rows += run_job(job, work, options.repeats)
        except CommandError as error:
            print(f"bench: {error}", file=sys.stderr)
            return 1
        machine = describe_machine(work)
    if options.json:
        settings = {name: getattr(options, name) for name in ("size", "files", "hidden", "ranks", "repeats")}
        document = {"schema_version": 1, "machine": machine, "settings": settings, "num_bytes": num_bytes}
        document |= {"floor_rss_bytes": floor_rss_bytes(), "results": to_json(rows, num_bytes)}
        print(json.dumps(document, indent=2))
    else:
        print(to_markdown(rows, num_bytes))
        facts = ", ".join(f"{name} {value}" for name, value in machine.items())
        print(f"\n{num_bytes / 1e9:.2f} GB, {options.ranks} ranks, {options.repeats} rounds, warm cache.")
        print(f"{facts}; peaks below {floor_rss_bytes() / 1e6:.0f} MB are not told apart")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
