"""What was measured, as a table for people."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[3] / "docs" / "dev"
COLUMNS = (
    ("peft", "peft"),
    ("diffusers", "diffusers"),
    ("comfyui", "comfyui"),
    ("comfyui", "diffusers"),
    ("kohya", "kohya"),
    ("kohya", "comfyui"),
    ("kohya", "diffusers"),
    ("diffusers", "invokeai"),
    ("comfyui", "invokeai"),
    ("kohya", "invokeai"),
    ("", "ai-toolkit"),
)
"""Target of an export ("" for whichever the loader takes), and the loader that is given the file."""
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
    """Return the tables for a terminal: architecture and family × target and loader, and the adapters for vLLM."""
    return "\n".join("".join(f"{' | '.join(row)}\n" for row in rows) for _, rows in _tables(cells))


def _tables(cells: Sequence[Cell]) -> list[tuple[str, list[list[str]]]]:
    """File → its rows, of which the first is the head."""
    images = [cell for cell in cells if cell.architecture]
    heads = [loader if target in ("", loader) else f"{target}, in {loader}" for target, loader in COLUMNS]
    keys = dict.fromkeys((cell.architecture, cell.family) for cell in images)
    rows = [[*key, *(_text(images, *key, *column) for column in COLUMNS)] for key in keys]
    found = [("loaders.csv", [["model", "family", *heads], *rows])]
    for server, title in (("vllm", "vLLM"), ("sglang", "SGLang")):
        own = [cell for cell in cells if not cell.architecture and cell.loader == server]
        rows = [[cell.family, cell.text, cell.verdict] for cell in own]
        found.append((f"loaders-{server}.csv", [["adapter", title, f"check-lora --for {server}"], *rows]))
    return found


def _text(cells: Iterable[Cell], architecture: str, family: str, target: str, loader: str) -> str:
    for cell in cells:
        is_meant = (cell.architecture, cell.family) == (architecture, family) and target in (cell.target, "")
        if is_meant and cell.loader in ((loader, "") if target else (loader,)):
            return cell.text
    return "not run"


def write(cells: Sequence[Cell]) -> None:
    """Write the tables; a row that was not run again stays."""
    for name, (head, *rows) in _tables(cells):
        path = FOLDER / name
        width = 2 if "family" in head else 1
        old = list(csv.reader(path.read_text(encoding="utf-8").splitlines())) if path.exists() else []
        kept = old[1:] if old[:1] == [head] else []
        every = {tuple(row[:width]): row for row in (*kept, *rows)}
        with open(path, "w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([head, *every.values()])
