"""What was measured, as a table for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).resolve().parents[3] / "docs" / "concepts" / "loaders.md"
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
    is_loaded: bool = False
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
        """Does check-lora say something else than the loader does?"""
        if self.failure is None or not self.loader:
            return False
        return (self.verdict == "loads" and not self.is_right) or (self.verdict == "fails" and self.is_right)

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

    def __str__(self) -> str:
        return f"{self.id}: {self.text}, check-lora: {self.verdict} {self.why[:300]} {(self.failure or '')[:300]}"


def render(cells: Sequence[Cell], sources: Mapping[str, str]) -> str:
    """Return the table: a row for every architecture and family, a column for every target and loader."""
    del sources
    columns = list(dict.fromkeys((cell.target, cell.loader) for cell in cells if cell.loader))
    rows = dict.fromkeys((cell.architecture, cell.family) for cell in cells)
    heads = [target if target == loader else f"{target} in {loader}" for target, loader in columns]
    lines = [f"| | | {' | '.join(heads)} |", "|---" * (len(columns) + 2) + "|"]
    for architecture, family in rows:
        texts = [_text(cells, architecture, family, *column) for column in columns]
        lines.append(f"| {architecture} | {family} | {' | '.join(texts)} |")
    return "\n".join(lines) + "\n"


def _text(cells: Iterable[Cell], architecture: str, family: str, target: str, loader: str) -> str:
    for cell in cells:
        if (cell.architecture, cell.family, cell.target) == (architecture, family, target) and (
            cell.loader in (loader, "")
        ):
            return cell.text
    return ""


def write(text: str) -> None:
    """Put the table between the page's two markers."""
    page = PAGE.read_text(encoding="utf-8")
    head, rest = page.split(BEGIN)
    PAGE.write_text(head + BEGIN + text + END + rest.split(END)[1], encoding="utf-8")
