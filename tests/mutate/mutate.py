"""Change ckpt, one small change at a time, and list the changes that no test of the room notices.

The working tree is never written to: package and tests are copied into a temporary directory, which is gone in the end.
"""

from __future__ import annotations

import argparse
import ast
import copy
import difflib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HAND_MADE = Path(__file__).with_name("hand_made.toml")
ROOMS = {
    "storage": "unit/test_guards.py unit/test_staging.py unit/test_source.py corrupt/test_containment.py faults",
    "transfer": "unit/test_guards.py unit/test_plan.py unit/test_strides.py unit/test_tiles.py unit/test_casting.py "
    "unit/test_moments.py property/test_shares.py property/test_plan.py property/test_resume.py corrupt/test_dcp.py "
    "corrupt/test_frames.py corrupt/test_values.py property/test_part_stream.py property/test_roundtrip.py",
    "runs": "tending",
    "storage/remote": "remote/test_guards.py property/test_part_stream.py remote",
    "checkpoint/formats": "unit property corrupt formats",
    "convert": "cli property steps faults/test_resume.py faults/test_parts.py",
    "checkpoint/names": "names property/test_mosaic.py",
}
"""Room → its tests, below tests/, the quick ones first."""
LEAST_SECONDS = 30
"""That a mutant's tests get, beside three times what they take without it: one that hangs is noticed, too."""

_FLIPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """A file with a change."""

    file: str
    line: int
    content: str
    tests: tuple[str, ...]
    """Arguments of pytest."""
    name: str = ""


class World:
    """A copy of the package and its tests."""

    def __init__(self, directory: str) -> None:
        self.root = Path(directory, "tree")
        self._num_written = 0
        for name in ("ckpt_tools", "tests", "docs", "bin"):
            shutil.copytree(ROOT / name, self.root / name, symlinks=True)
        for name in ("pyproject.toml", "README.md", "SECURITY.md"):
            shutil.copy(ROOT / name, self.root)
        self._home = Path(directory, "home")
        self._home.mkdir()

    def test(self, tests: Sequence[str], seconds: float) -> tuple[int | None, str]:
        """Return pytest's exit code and what it printed; None when it took too long."""
        options = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:randomly"]
        environ = os.environ | {"PYTHONPATH": str(self.root), "HOME": str(self._home), "TMPDIR": str(self._home)}
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=self.root,
            env=environ | {"CI": "1"},  # hypothesis tries the same examples every time
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        code = None
        try:
            out = process.communicate(timeout=max(1.0, seconds))[0]
            code = process.returncode
        except subprocess.TimeoutExpired:
            out = ""
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        return code, out

    def notices(self, mutant: Mutant, seconds: float) -> bool:
        """Do the tests fail with the change?"""
        path = self.root / mutant.file
        before = path.read_text()
        try:
            self._write(path, mutant.content)
            return self.test(mutant.tests, seconds)[0] not in (0, 5)
        finally:
            self._write(path, before)

    def _write(self, path: Path, content: str) -> None:
        # Bytecode is told by size and whole seconds of the source: neither need differ between two mutants.
        self._num_written += 1
        path.write_text(content)
        os.utime(path, (1_000_000 + self._num_written,) * 2)


def _changed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what a node may become."""
    if isinstance(node, ast.Compare):
        for i, operator in enumerate(node.ops):
            if type(operator) in _FLIPS:
                other = copy.deepcopy(node)
                other.ops[i] = _FLIPS[type(operator)]()
                yield other
    elif isinstance(node, ast.BoolOp | ast.BinOp) and type(node.op) in _FLIPS:
        other = copy.deepcopy(node)
        other.op = _FLIPS[type(node.op)]()
        yield other
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield from (ast.Constant(node.value + 1), ast.Constant(node.value - 1))
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield ast.Pass()
    elif isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield ast.Return(ast.Constant(None))


def _conditions(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield a condition and what may stand in its place: a refusal that never comes, or one turned round."""
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        if isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise):
            yield node.test, ast.Constant(False)
        yield node.test, ast.UnaryOp(ast.Not(), node.test)


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yield nodes, but for what is only said, or told to type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom | ast.AnnAssign):
            continue
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue
        yield child
        yield from _walk(child)


def make_mutants(file: str, text: str, tests: tuple[str, ...]) -> list[Mutant]:
    """Return every mutant of a file, in the order of its text."""
    raw = text.encode()
    starts = [0]
    for line in raw.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    made = []
    for node in _walk(ast.parse(text)):
        pairs = [*((node, new) for new in _changed(node)), *_conditions(node)]
        for old, new in pairs:
            begin, end = (
                starts[line - 1] + column
                for line, column in ((old.lineno, old.col_offset), (old.end_lineno, old.end_col_offset))  # type: ignore[attr-defined]
            )
            written = ast.unparse(new)
            if not isinstance(new, ast.stmt):
                written = f"({written})"
            content = raw[:begin] + written.encode() + raw[end:]
            with suppress(SyntaxError):
                ast.parse(content)
                made.append(Mutant(file, old.lineno, content.decode(), tests))  # type: ignore[attr-defined]
    return made


def load_hand_made(words: Sequence[str] = ()) -> list[Mutant]:
    """Return the mutants of the table, those that have one of `words` in their name or file."""
    made = []
    table = tomllib.loads(HAND_MADE.read_text())
    rooms = {room: tuple(f"tests/{t}" if t[0] != "-" else t for t in tests) for room, tests in table["tests"].items()}
    for file, rows in table["files"].items():
        text, tests = (ROOT / file).read_text(), rooms[rows.pop("tests")]
        for name, (old, new) in rows.items():
            if text.count(old) != 1:
                raise SystemExit(f"{HAND_MADE}: {name}: {file} has its text {text.count(old)} times")
            if not words or any(word in name or word in file for word in words):
                line = text[: text.index(old)].count("\n") + 1
                made.append(Mutant(file, line, text.replace(old, new), tests, name))
    return made


def _diff(mutant: Mutant) -> str:
    before = (ROOT / mutant.file).read_text().splitlines(keepends=True)
    lines = list(difflib.unified_diff(before, mutant.content.splitlines(keepends=True), n=0))[3:]
    return "".join(f"    {line}" for line in lines)


def main() -> int:
    """Run; the exit code is 1 when a hand-made mutant survives."""
    parser = argparse.ArgumentParser(prog="bin/mutate", description=__doc__)
    parser.add_argument("what", nargs="*", help=f"a room ({', '.join(ROOMS)}); with --hand-made words to choose by")
    parser.add_argument("--hand-made", action="store_true", help="the mutants of tests/mutate/hand_made.toml")
    parser.add_argument("--seconds", type=float, default=600, help="end after so long (default: 600)")
    parser.add_argument("--seed", type=int, default=None, help="which mutants come first (default: others each day)")
    parser.add_argument("--full", action="store_true", help="also run the tests that are not quick")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started ends, too
    if given.hand_made:
        mutants = load_hand_made(given.what)
    elif len(given.what) == 1 and given.what[0] in ROOMS:
        tests = (*(f"tests/{each}" for each in ROOMS[given.what[0]].split()), *([] if given.full else ["--quick"]))
        files = sorted((ROOT / "ckpt_tools" / given.what[0]).rglob("*.py"))
        mutants = [m for f in files for m in make_mutants(str(f.relative_to(ROOT)), f.read_text(), tests)]
        random.Random(given.seed or int(time.time()) // 86400).shuffle(mutants)
    else:
        parser.error("name one room, or --hand-made")
    end = time.monotonic() + given.seconds
    took: dict[tuple[str, ...], float] = {}
    survivors, killed = [], 0
    with tempfile.TemporaryDirectory(prefix="ckpt-mutate-") as directory:
        world = World(directory)
        for mutant in mutants:
            if time.monotonic() > end:
                break
            if mutant.tests not in took:
                start = time.monotonic()
                code, out = world.test(mutant.tests, 600)
                if code != 0:
                    raise SystemExit(f"without a mutant these fail: {' '.join(mutant.tests)}\n{out[-3000:]}")
                took[mutant.tests] = time.monotonic() - start
            if world.notices(mutant, LEAST_SECONDS + 3 * took[mutant.tests]):
                killed += 1
                if mutant.name:
                    print(f"killed: {mutant.name}", flush=True)
                continue
            survivors.append(mutant)
            print(f"survives: {mutant.name or 'a change'}, {mutant.file}:{mutant.line}\n{_diff(mutant)}", flush=True)
    tried = killed + len(survivors)
    print(f"{tried} of {len(mutants)} mutants tried: {killed} killed, {len(survivors)} survived")
    return 1 if given.hand_made and survivors else 0


if __name__ == "__main__":
    sys.exit(main())
