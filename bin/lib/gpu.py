"""Prove what only a GPU can: load, smoke, memory beside the estimate, bandwidth, audit, and the tests marked `gpu`.

Every part runs in a process of its own, within what is left of --minutes. A part that lacks something is skipped, with
what it needs. --rehearse runs the parts on the CPU, on a small model: that tests this script, not a GPU.
Exit code 0: every part that this machine allows has passed. 3: one failed. 4: none ran, or this was a rehearsal.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import gpu_parts
import torch
from gpu_parts import CASES, ROOT, SIZES, SMALL, Figures

MEMORY_NEEDED = 12 << 30


def _parts() -> Iterator[tuple[str, tuple[str, ...], Callable[[Path, str], Figures]]]:
    """Name, needs, and what to run."""
    cuda = ("a CUDA device",)
    yield "load", cuda, gpu_parts.run_load
    yield "smoke, 1 rank", cuda, partial(gpu_parts.run_smoke, num_ranks=1)
    yield "smoke, 2 ranks", ("two CUDA devices",), partial(gpu_parts.run_smoke, num_ranks=2)
    for case in CASES:
        needs = (*cuda, "12 GiB of device memory", *(("bitsandbytes",) if case == "qlora" else ()))
        needs += ("triton",) if case == "compile" else ()
        yield f"memory, {case}", needs, partial(gpu_parts.run_memory, case=case)
    yield "bandwidth", cuda, gpu_parts.run_bandwidth
    yield "audit", cuda, gpu_parts.run_audit
    yield "tests", ("a CUDA device to test on",), gpu_parts.run_tests


def lacks(needs: tuple[str, ...], *, rehearses: bool) -> list[str]:
    """Which needs this machine does not meet."""
    count = torch.cuda.device_count()
    memory = torch.cuda.get_device_properties(0).total_memory if count else 0
    met = {
        "a CUDA device": count > 0 or rehearses,
        "two CUDA devices": count > 1 or rehearses,
        "a CUDA device to test on": count > 0 and not rehearses,
        "12 GiB of device memory": memory >= MEMORY_NEEDED or rehearses,
    }
    return [need for need in needs if not (met[need] if need in met else importlib.util.find_spec(need))]


def run_part(name: str, source: Path, device: str, seconds: float) -> Figures:
    """Run a part in a process of its own; what came of it."""
    command = [sys.executable, __file__, "--part", name, "--source", str(source), "--device", device]
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {"OMP_NUM_THREADS": "4"} | os.environ | {"PYTHONPATH": paths}
    started = time.monotonic()
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=max(seconds, 1.0))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return {"state": "failed", "why": f"not done after {seconds:.0f} s"}
    took = round(time.monotonic() - started, 1)
    if process.returncode:
        return {"state": "failed", "seconds": took, "why": (err.strip().splitlines() or ["no message"])[-1]}
    return {"state": "ran", "seconds": took, "figures": json.loads(out.splitlines()[-1])}


def main() -> int:
    """Run all parts, or the one that is asked for; the exit code."""
    parser = argparse.ArgumentParser(prog="bin/gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the result (default: stdout)")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all parts together (default: 10)")
    parser.add_argument("--only", metavar="WORD", default="", help="run the parts whose names contain it")
    parser.add_argument("--rehearse", action="store_true", help="run what a CPU can, on a small model")
    for name in ("--part", "--source", "--device"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        run = next(run for name, _, run in _parts() if name == options.part)
        print(json.dumps(run(Path(options.source), options.device)))
        return 0
    deadline = time.monotonic() + 60 * options.minutes
    results: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory(prefix="ckpt-gpu-") as place:
        source = Path(place, "model")
        for name, needs, _ in _parts():
            if options.only not in name:
                continue
            if missing := lacks(needs, rehearses=options.rehearse):
                results[name] = {"state": "skipped", "why": f"needs {', '.join(missing)}"}
            else:
                if not source.exists():
                    gpu_parts.build(SMALL if options.rehearse else SIZES, "cpu").save_pretrained(source)
                results[name] = run_part(
                    name, source, "cpu" if options.rehearse else "cuda", deadline - time.monotonic()
                )
            print(
                f"{name}: {results[name]['state']} {results[name].get('why', '')}".rstrip(), file=sys.stderr, flush=True
            )
    states = {each["state"] for each in results.values()}
    code = 3 if "failed" in states else 4 if options.rehearse or "ran" not in states else 0
    document = json.dumps(about() | {"rehearsal": options.rehearse, "exit_code": code, "parts": results}, indent=2)
    options.json.write_text(document + "\n") if options.json else print(document)
    return code


def about() -> Figures:
    """When, with what, and on which devices."""
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in ("torch", "transformers", "safetensors", "bitsandbytes", "fastsafetensors"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {"date": datetime.now(UTC).date().isoformat(), "versions": versions, "devices": devices}


if __name__ == "__main__":
    sys.exit(main())
