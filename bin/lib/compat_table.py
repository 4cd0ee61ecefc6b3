"""Environments of other releases, one at a time: made, tried, noted in docs/dev/compatibility.md, and removed.

Each is a virtual environment in the cache directory with one release of Python and PyTorch; PyTorch comes from the
package index, on x86_64 a build of 3 to 6 GB for GPUs, which needs none to run. Everything else is what
bin/requirements.lock says, or for `lowest` the oldest release that pyproject.toml allows.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "dev" / "compatibility.md"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ckpt-compat"
BEGIN, END = "<!-- written by bin/compat -->\n", "<!-- end -->\n"
TESTS = (
    "tests/unit",
    "tests/cli/test_commands.py",
    "tests/hub/test_push.py",
    "tests/compat/test_dtensor_engine.py",
    "tests/compat/test_stock_load.py",
    "tests/fsdp2/test_load.py",
    "tests/fsdp2/test_save.py",
    "tests/adapters/test_export.py",
)
TEST_TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "diffusers", "lycoris-lora", "setuptools")
"""setuptools is PEFT's, for BOFT; some releases of torch bring it along."""
EXTRAS = "hf,demo"
BITSANDBYTES = "bitsandbytes>=0.50,<0.51"
"""Not by the extra, which needs a newer torch than the oldest: 4-bit weights have to be refused, not to be missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What to try."""

    python: str
    """major.minor."""
    torch: str
    """Release."""
    lowest: bool = False
    """Everything that pyproject.toml names as old as it allows."""

    @property
    def name(self) -> str:
        """How the command line and the table call it."""
        return f"py{self.python}-torch{self.torch}" + ("-lowest" if self.lowest else "")


ENVIRONMENTS = (
    Environment(python="3.11", torch="2.10.0", lowest=True),
    Environment(python="3.12", torch="2.10.0"),
    Environment(python="3.12", torch="2.11.0"),
    Environment(python="3.12", torch="2.12.1"),
    Environment(python="3.11", torch="2.13.0"),
    Environment(python="3.11", torch="2.14.1"),
    Environment(python="3.13", torch="2.15.0"),
    Environment(python="3.14", torch="2.15.0"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A row of the table, and what to print."""

    walk: str
    tests: str
    failures: tuple[str, ...] = ()


def run(*command: str | Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command in the tree; its output is kept."""
    return subprocess.run([*map(str, command)], cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def find_python(version: str) -> str | None:
    """Return an interpreter of that version: on PATH, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    found = sorted(pyenv.glob(f"{version}.*/bin/python{version}"), reverse=True)
    for candidate in (f"python{version}", *map(str, found)):
        try:
            done = run(candidate, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])")
        except OSError:
            continue
        if done.returncode == 0 and done.stdout.strip() == version:
            return candidate
    return None


def pins(path: Path) -> Path:
    """Write the versions of the lock, without torch and what each of its releases wants its own version of."""
    lines = (ROOT / "bin" / "requirements.lock").read_text().splitlines()
    names = [line.partition(" ")[0] for line in lines if re.match(r"[a-zA-Z]", line)]
    path.write_text(
        "".join(f"{name}\n" for name in names if not re.match(r"(torch|setuptools|triton)==|nvidia-|cuda-", name))
    )
    return path


def make(environment: Environment, home: Path) -> str | None:
    """Make the environment in `home`; say why that failed, or return None."""
    python = find_python(environment.python)
    if python is None:
        return f"no Python {environment.python} here"
    uv = CACHE / "uv" / "bin" / "uv"
    if not uv.exists():
        run(sys.executable, "-m", "venv", CACHE / "uv")
        run(CACHE / "uv" / "bin" / "python", "-m", "pip", "install", "--quiet", "uv")
    os.environ["UV_CACHE_DIR"] = str(CACHE / "downloads")
    constraints = pins(CACHE / "pins.txt")
    install = (uv, "pip", "install", "--quiet", "--python", home / "bin" / "python")
    asked = (f"torch=={environment.torch}", f"{ROOT}[{EXTRAS}]", BITSANDBYTES)
    versions = ("--resolution", "lowest-direct") if environment.lowest else ("--constraint", constraints)
    for command in (
        (uv, "venv", "--quiet", "--clear", "--python", python, home),
        (*install, *versions, *asked),
        (*install, *(() if environment.lowest else versions), *TEST_TOOLS),
        (uv, "pip", "uninstall", "--quiet", "--python", home / "bin" / "python", "ckpt-tools"),
    ):
        done = run(*command)
        if done.returncode:
            return "cannot be installed: " + done.stderr.strip().replace("\n", " ")[-400:]
    return None


def try_out(home: Path, *, walk_only: bool) -> Outcome:
    """Run the walk and the quick tests in an environment, on this tree."""
    python = home / "bin" / "python"
    settings = dict(os.environ, PYTHONPATH=str(ROOT), PYTHONDONTWRITEBYTECODE="1")
    done = run(python, ROOT / "bin" / "lib" / "compat_walk.py", env=settings)
    try:
        walked = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return Outcome(walk="broken", tests="not run", failures=(done.stderr[-2000:],))
    failures = [f"{step}: {said}" for step, said in walked["failures"].items()]
    walk = f"{walked['steps'] - len(failures)} of {walked['steps']}"
    if walk_only:
        return Outcome(walk=walk, tests="not run", failures=tuple(failures))
    # Old releases warn of what newer ones changed; a warning is an error only in the environment of bin/setup.
    flags = (
        "-q",
        "--quick",
        "-n",
        "2",
        "-p",
        "no:cacheprovider",
        "-o",
        "filterwarnings=default",
        "--tb=line",
        "--timeout=300",
    )
    tested = run(python, "-m", "pytest", *flags, *TESTS, env=settings)
    failures += [line for line in tested.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    last = tested.stdout.strip().splitlines()[-1] if tested.stdout.strip() else tested.stderr[-300:]
    return Outcome(walk=walk, tests=re.sub(r" in [\d.]+s.*|=+ ?", "", last).strip(), failures=tuple(failures))


def note(environment: Environment, outcome: Outcome) -> None:
    """Replace the environment's row of the table, or add it."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    table, _, after = rest.partition(END)
    rows = {line.split("|")[1].strip(): line for line in table.splitlines()[2:]}
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    rows[f"`{environment.name}`"] = f"| `{environment.name}` | {today} | {outcome.walk} | {outcome.tests} |"
    order = {f"`{each.name}`": place for place, each in enumerate(ENVIRONMENTS)}
    lines = [row for _, row in sorted(rows.items(), key=lambda item: order.get(item[0], len(order)))]
    head = "| environment | date | steps of the walk | quick tests |\n|---|---|---|---|\n"
    PAGE.write_text(f"{before}{BEGIN}{head}" + "".join(f"{line}\n" for line in lines) + f"{END}{after}")


def main() -> int:
    """Run what the command line asks for; 1 when anything failed."""
    parser = argparse.ArgumentParser(prog="bin/compat", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="environments (default: all)")
    parser.add_argument("--list", action="store_true", help="print the names of the environments")
    parser.add_argument("--walk-only", action="store_true", help="run no tests")
    parser.add_argument("--keep", action="store_true", help="keep environments and downloads")
    arguments = parser.parse_args()
    known = {each.name: each for each in ENVIRONMENTS}
    if arguments.list:
        print("\n".join(known))
        return 0
    if unknown := [name for name in arguments.names if name not in known]:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    failed = False
    for name in arguments.names or known:
        home = CACHE / name
        home.parent.mkdir(parents=True, exist_ok=True)
        why_not = make(known[name], home)
        outcome = Outcome(walk="not run", tests=why_not) if why_not else try_out(home, walk_only=arguments.walk_only)
        if not arguments.keep:
            shutil.rmtree(home, ignore_errors=True)
        if not why_not:  # what was seen elsewhere stands
            note(known[name], outcome)
        print(f"{name}: walk {outcome.walk}, tests {outcome.tests}", *outcome.failures, sep="\n  ", flush=True)
        failed |= bool(outcome.failures or why_not)
    if not arguments.keep:
        shutil.rmtree(CACHE, ignore_errors=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
