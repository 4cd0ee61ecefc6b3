"""Fuzz every parser for a while: with atheris when it is installed, else with the tests' own mutations in a loop.

    bin/fuzz SECONDS [TARGET]

What is found is written to fuzz-findings/ beside the tests, with the traceback; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from fuzz.mutate import mutate, random_operations  # noqa: E402

MAX_SECONDS = 2.0
"""Of processor time, for one input."""
MAX_GROWTH_BYTES = 500 << 20
"""Of the peak of resident memory, for one input."""


def guarded(check, data: bytes) -> bool:
    """Run a check within the bounds of time and memory."""
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    accepted = check(data)
    seconds = time.process_time() - start
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert seconds < MAX_SECONDS, f"{seconds:.1f} s"
    assert growth < MAX_GROWTH_BYTES, f"{growth >> 20} MiB"
    return accepted


def fuzz_in_a_loop(name: str, seconds: float, seed: int) -> int:
    """Mutate the seeds until the time is over."""
    from fuzz.targets import TARGETS

    target = TARGETS[name]
    rng = random.Random(seed)
    tried = accepted = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        data = mutate(rng.choice(target.seeds), random_operations(rng), tokens=target.tokens, others=target.seeds)
        tried += 1
        try:
            accepted += guarded(target.check, data)
        except BaseException:
            save(name, data)
            raise
    print(f"fuzz: {name}: {tried} mutations of {len(target.seeds)} seeds, {accepted} accepted (seed {seed})")
    return 0


def fuzz_with_atheris(name: str, seconds: float, seed: int) -> int:
    """Let libFuzzer choose, by the coverage of ckpt_tools."""
    import atheris

    with atheris.instrument_imports(include=["ckpt_tools"], enable_loader_override=False):
        from fuzz.targets import TARGETS
    target = TARGETS[name]

    def one_input(data: bytes) -> None:
        try:
            guarded(target.check, data)
        except BaseException:
            save(name, data)
            raise

    def mutator(data: bytes, max_size: int, number: int) -> bytes:
        rng = random.Random(number)
        if rng.random() < 0.5:
            return atheris.Mutate(data, max_size)
        return mutate(data, random_operations(rng), tokens=target.tokens, others=target.seeds)[:max_size]

    with tempfile.TemporaryDirectory() as work:
        corpus = Path(work, "corpus")
        corpus.mkdir()
        for i, content in enumerate(target.seeds):
            (corpus / f"seed-{i}").write_bytes(content)
        words = Path(work, "words")
        quoted = ("".join(f"\\x{byte:02x}" for byte in token) for token in target.tokens if token)
        words.write_text("".join(f'"{word}"\n' for word in quoted if len(word) <= 4 * 64))
        arguments = ["fuzz", str(corpus), f"-dict={words}", f"-max_total_time={max(1, int(seconds))}", f"-seed={seed}"]
        arguments += ["-max_len=16384", "-timeout=20", "-rss_limit_mb=4096", f"-artifact_prefix={work}/"]
        arguments += ["-verbosity=0", "-print_final_stats=1"]
        atheris.Setup(arguments, one_input, custom_mutator=mutator)
        atheris.Fuzz()
    return 0


def save(name: str, data: bytes) -> None:
    """Keep an input that broke something, and say how."""
    directory = HERE.parents[1] / "fuzz-findings"
    directory.mkdir(exist_ok=True)
    path = directory / f"{name}-{zlib.crc32(data):08x}"
    path.write_bytes(data)
    path.with_suffix(".txt").write_text(traceback.format_exc())
    print(f"fuzz: {name}: FOUND {path}\n{traceback.format_exc()}", file=sys.stderr)


def main() -> int:
    """Share the time out over the targets, each in a process of its own."""
    parser = argparse.ArgumentParser(prog="bin/fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("seconds", type=float, help="for all targets together")
    parser.add_argument("target", nargs="?", help="one of them; all by default")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the mutations")
    parser.add_argument("--child", choices=["atheris", "loop"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        run = fuzz_with_atheris if options.child == "atheris" else fuzz_in_a_loop
        return run(options.target, options.seconds, options.seed)
    from fuzz.targets import TARGETS

    if options.target is not None and options.target not in TARGETS:
        parser.error(f"the targets are {', '.join(TARGETS)}")
    names = [options.target] if options.target else list(TARGETS)
    how = "atheris" if importlib.util.find_spec("atheris") else "loop"
    if how == "loop":
        print("fuzz: atheris is not installed (.venv/bin/pip install -e '.[fuzz]'): mutating without coverage")
    failed = []
    for name in names:
        command = [sys.executable, str(HERE / "run.py"), str(options.seconds / len(names)), name]
        command += ["--child", how, "--seed", str(options.seed)]
        print(f"fuzz: {name}, {options.seconds / len(names):.0f} s with {how}", flush=True)
        if subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode:
            failed.append(name)
    print(f"fuzz: {len(names)} targets, {len(failed)} with findings{': ' + ', '.join(failed) if failed else ''}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
