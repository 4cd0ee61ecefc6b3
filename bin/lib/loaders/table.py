"""What was measured, as a table for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).resolve().parents[3] / "docs" / "dev" / "loaders.md"
COLUMNS = (
    ("peft", "peft"),
    ("diffusers", "diffusers"),
    ("comfyui", "comfyui"),
    ("comfyui", "diffusers"),
    ("kohya", "kohya"),
    ("kohya", "comfyui"),
    ("kohya", "diffusers"),
    ("", "ai-toolkit"),
)
"""Target of an export ("" for whichever the loader takes), and the loader that is given the file."""
BEGIN, END = "<!-- bin/loaders begins -->\n", "<!-- bin/loaders ends -->\n"
EXACT = 1e-5
"""Largest error that is rounding: sums of float32 products, in another order."""


@dataclass(slots=True)
class Cell:
    """One file in one loader."""

    architecture: str
    family: str
    target: str
    loader: str
    """"" where ckpt wrote no file."""
    refused: str = ""
    verdict: str = ""
    """check-lora's, against the base and for this loader."""
    why: str = ""
    failure: str | None = None
    """Why the loader raised; "" where it did not; None where it was not run."""
    error: float | None = None

    @property
    def id(self) -> str:
        """Name of its job."""
        return f"{self.architecture}/{self.family}/{self.target}/{self.loader}"

    @property
    def is_right(self) -> bool:
        """Is what the loader has what was trained?"""
        return self.failure == "" and self.error is not None and self.error <= EXACT

    @property
    def is_defect(self) -> bool:
        """Does check-lora say something else than the loader does, or not load what was written for it?"""
        if self.failure is None or not self.loader:
            return False
        if self.loader == self.target and not self.is_right:
            return True
        judged = {"loads": True, "fails": False}.get(self.verdict, self.is_right)
        return judged is not self.is_right

    @property
    def text(self) -> str:
        """What the table shows."""
        if self.refused:
            return "not written"
        if self.failure is None:
            return "not run"
        if self.failure:
            return "raises"
        if self.error is None:
            return "ignored"
        return "0" if self.error == 0 else f"{self.error:.0e}"

    def answered(self, failure: str) -> None:
        """Note what the loader's process said."""
        self.failure = None if failure.startswith("NotImplementedError") else failure

    def __str__(self) -> str:
        return f"{self.id}: {self.text}, check-lora: {self.verdict} {self.why[:300]} {(self.failure or '')[:300]}"


def render(cells: Sequence[Cell]) -> str:
    """Return the tables: architecture and family × target and loader, and the adapters for vLLM."""
    return "\n".join(f"{title}\n\n{head}\n{_rule(head)}\n" + "".join(rows) for title, head, rows in _tables(cells))


def _tables(cells: Sequence[Cell]) -> list[tuple[str, str, list[str]]]:
    images = [cell for cell in cells if cell.architecture]
    heads = [loader if target in ("", loader) else f"{target}, in {loader}" for target, loader in COLUMNS]
    keys = dict.fromkeys((cell.architecture, cell.family) for cell in images)
    rows = [f"| {' | '.join((*key, *(_text(images, *key, *column) for column in COLUMNS)))} |\n" for key in keys]
    found = [("### Image and video models", f"| model | family | {' | '.join(heads)} |", rows)]
    rows = [f"| {cell.family} | {cell.text} | {cell.verdict} |\n" for cell in cells if not cell.architecture]
    return [*found, ("### Language models in vLLM", "| adapter | vLLM | `check-lora --for vllm` |", rows)]


def _rule(head: str) -> str:
    return "|---" * (head.count("|") - 1) + "|"


def _text(cells: Iterable[Cell], architecture: str, family: str, target: str, loader: str) -> str:
    for cell in cells:
        is_meant = (cell.architecture, cell.family) == (architecture, family) and target in (cell.target, "")
        if is_meant and cell.loader in ((loader, "") if target else (loader,)):
            return cell.text
    return "not run"


def write(cells: Sequence[Cell]) -> None:
    """Put the tables between the page's two markers; a row that was not run again stays."""
    page = PAGE.read_text(encoding="utf-8")
    head, rest = page.split(BEGIN)
    old, tail = rest.split(END)
    kept = {_key(line): f"{line}\n" for line in old.splitlines() if line.startswith("| ")}
    text = ""
    for title, first, rows in _tables(cells):
        width = 2 if "family" in first else 1
        new = {_key(row)[:width]: row for row in rows}
        same = {key[:width]: line for key, line in kept.items() if len(key) == first.count("|") - 1}
        every = {key: line for key, line in (same | new).items() if line.strip() != first}
        text += f"{title}\n\n{first}\n{_rule(first)}\n{''.join(every.values())}\n"
    PAGE.write_text(head + BEGIN + text + END + tail, encoding="utf-8")


def _key(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.strip().strip("|").split("|"))
