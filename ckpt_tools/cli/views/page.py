"""What results are shown as, in text and on pages: values, no markup. What prints them escapes text from files."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.checkpoint.identity import Identity
from ckpt_tools.checkpoint.infer_mesh import block_of
from ckpt_tools.checks.sibling_tensors import kind_of
from ckpt_tools.text import first_few

Item = TypeVar("Item")
Mood = Literal["good", "partly", "bad", "unknown"]
"""How a verdict is shown; its words say the same. Green is "good" alone: nothing was left unchecked or assumed."""
MAX_FINDINGS = 5000  # Findings on a page; more are counted
MAX_ROWS = 500  # Rows of a table of a page; more are counted
_MAX_LAYERS = 256
_MAX_KINDS = 48
SEVERITIES = {"error": 0, "warning": 1, "info": 2}  # In the order in which they are shown


class FactList(NamedTuple):
    """Names and what they stand for."""

    rows: Sequence[tuple[str, str]]


class PageTable(NamedTuple):
    """Rows of text below headers; the first column names the row."""

    caption: str
    headers: Sequence[str]
    align: str  # A letter per column: "l" left or "r" right
    rows: Sequence[Sequence[str]]
    left_out: int = 0  # Rows that are not shown, which is said
    is_folded: bool = False  # Shown on request

    @classmethod
    def of(
        cls,
        caption: str,
        columns: str,
        items: Sequence[Item],
        cells: Callable[[Item], Sequence[str]],
        *,
        most: int | None = MAX_ROWS,
        is_folded: bool = False,
    ) -> PageTable:
        """Return a table of at most `most` items; `columns` is `file, >bytes`: > before those at the right."""
        rows = [cells(item) for item in items[:most]]
        return cls(caption, *read_columns(columns), rows, len(items) - len(rows), is_folded)


def read_columns(columns: str) -> tuple[list[str], str]:
    """Return the headers of `file, >bytes`, and a letter for each: "l" left or "r" right, which > says."""
    headers = columns.split(", ")
    return [header.removeprefix(">") for header in headers], "".join("lr"[each[:1] == ">"] for each in headers)


class FindingList(NamedTuple):
    """Findings by heading, the worst first; `left_out` are not shown, which is said."""

    groups: Sequence[tuple[str, Sequence[Finding]]]
    left_out: int = 0


class NoteList(NamedTuple):
    """Sentences."""

    items: Sequence[str]


class Listing(NamedTuple):
    """Lines of a program, such as stacks; shown on request."""

    caption: str
    lines: Sequence[str]


class Bar(NamedTuple):
    """One stacked bar: a size per series of its `Bars`, and what they come to in words."""

    name: str
    parts: Sequence[int]
    total: str
    group: str = ""  # What it belongs to, with its neighbours: named below bars that stand upright


class Bars(NamedTuple):
    """Stacked bars on one scale, and perhaps a line across them. The same numbers should stand in a table."""

    caption: str
    series: Sequence[str]
    bars: Sequence[Bar]
    limit: int | None = None
    limit_name: str = ""
    is_upright: bool = False  # They stand side by side, in the order of time

    @property
    def groups(self) -> list[tuple[str, int]]:
        """Names of groups, and how many bars stand in each; without groups each bar's own name."""
        runs = itertools.groupby(self.bars, key=lambda bar: bar.group) if any(b.group for b in self.bars) else ()
        return [(name, len(list(bars))) for name, bars in runs] or [(bar.name, 1) for bar in self.bars]

    @property
    def scale(self) -> int:
        """What the full width stands for."""
        return max([self.limit or 0, 1, *(sum(bar.parts) for bar in self.bars)])


class Curves(NamedTuple):
    """Numbers per step, by name; what is not finite leaves a gap. The same numbers should stand in a table."""

    caption: str
    series: Sequence[tuple[str, Sequence[float]]]

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest finite number."""
        finite = [number for _, numbers in self.series for number in numbers if math.isfinite(number)]
        return min(finite, default=0.0), max(finite, default=0.0)


class HeatTable(NamedTuple):
    """Numbers by row and column, with a colour for how large they are."""

    caption: str
    corner: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[tuple[str, float] | None]]]
    """(name, cell per column); a cell is its text and its heat from 0 to 1, or nothing."""
    legend: str = ""
    left_out: int = 0  # Rows and columns that are not shown, which is said


class ScriptDrawing(NamedTuple):
    """What the page's script draws from one of the layouts of the page's data."""

    draws: Literal["modules", "heat", "mesh", "files"]
    caption: str
    layout: int = 0


Part = FactList | PageTable | FindingList | NoteList | Listing | Bars | Curves | HeatTable | ScriptDrawing


class PageSection(NamedTuple):
    """A part of a page below a heading."""

    title: str
    parts: Sequence[Part]


class Page(NamedTuple):
    """One page, of what the user named `subject`."""

    command: str
    subject: str
    sections: Sequence[PageSection]
    mood: Mood | None = None
    verdict: str = ""
    data: object = None  # What the script draws from: whatever JSON holds


def count(number: int, noun: str) -> str:
    """Return "1 error", "2 errors"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def mood_of(*, ok: bool, left: object) -> Mood:
    """Return how a verdict is shown, given what was `left` unchecked."""
    return "bad" if not ok else "partly" if left else "good"


def findings_section(findings: Sequence[Finding], title: str = "Findings") -> list[PageSection]:
    """Return findings by code, the worst first; nothing without one."""
    groups: dict[tuple[int, str], list[Finding]] = {}
    ordered = sorted(findings, key=lambda finding: SEVERITIES[finding.severity])
    for finding in ordered[:MAX_FINDINGS]:
        groups.setdefault((SEVERITIES[finding.severity], finding.code), []).append(finding)
    listed = [(code, found) for (_, code), found in groups.items()]
    part = FindingList(listed, max(0, len(ordered) - MAX_FINDINGS))
    return [PageSection(f"{title}: {len(findings):,}", [part])] if findings else []


def notes_section(title: str, items: Iterable[str]) -> list[PageSection]:
    """Return sentences below a heading; nothing without one."""
    listed = list(dict.fromkeys(items))
    return [PageSection(title, [NoteList(listed)])] if listed else []


def identity_rows(identity: Identity | None, most_models: int) -> list[tuple[str, str]]:
    """Return what was looked at, how that is known, and what came along; nothing where it is not known."""
    if identity is None:
        return []
    whole = "part" if identity.whole == "part" else "whole"
    return [
        ("is", identity.title),
        *((whole, why) for why in identity.evidence),
        *(("resume", why) for why in identity.reasons),
        *((f"step {one.step}", first_few(one.files)) for one in identity.steps if len(identity.steps) > 1),
        *((f"{'takes' if one.is_taken else 'not'} {one.name}", one.why) for one in identity.candidates),
        *([("models", first_few(identity.components, most_models))] if identity.components else []),
        *(("runs", what) for what in identity.executables),
    ]


def identity_sections(identities: Sequence[Identity]) -> list[PageSection]:
    """Return what was looked at, each with how it is known."""
    titles = ["What it is"] if len(identities) == 1 else [f"What {side} is" for side in "AB"]
    rows = (identity_rows(each, 12) for each in identities)
    return [PageSection(title, [FactList(found)]) for title, found in zip(titles, rows, strict=False)]


class Sized(NamedTuple):
    """What a tensor's cell shows."""

    value: float | None
    """What its colour stands for, on a logarithmic scale; what is no finite number counts as the most."""
    text: str

    @property
    def weight(self) -> float:
        """The value, or infinity."""
        return self.value if self.value is not None and math.isfinite(self.value) else math.inf


def by_layer(tensors: Mapping[str, Sized], *, caption: str, legend: str) -> list[Part]:
    """Return tensors in layers as a map of layer × kind of weight; the others as a table.

    A cell that stands for several tensors (experts) shows the one with the most, and how many they are.
    """
    cells: dict[str, dict[str, list[Sized]]] = {}
    others: list[tuple[str, str]] = []
    for fqn, sized in tensors.items():
        block = block_of(fqn)
        if block is None:
            others.append((fqn, sized.text))
            continue
        layer = f"{block[0]}.{block[1]}".removeprefix(".")
        kind = kind_of(fqn[len(layer) + 1 :]) or "(itself)"
        cells.setdefault(layer, {}).setdefault(kind, []).append(sized)
    parts: list[Part] = []
    if cells:
        parts.append(_heat_table(cells, caption, legend))
    if others:
        parts.append(PageTable.of(f"{caption}: outside of layers", "tensor, >", others, lambda other: other))
    return parts


def _heat_table(cells: Mapping[str, Mapping[str, Sequence[Sized]]], caption: str, legend: str) -> HeatTable:
    kinds = list(dict.fromkeys(kind for row in cells.values() for kind in row))
    numbers = [
        each.weight for row in cells.values() for found in row.values() for each in found if 0 < each.weight < math.inf
    ]
    low, high = min(numbers, default=1.0), max(numbers, default=1.0)

    def show(found: Sequence[Sized] | None) -> tuple[str, float] | None:
        if not found:
            return None
        most = max(found, key=lambda each: each.weight)
        heat = 1.0 if most.weight else 0.0
        if 0 < most.weight < math.inf and high > low:
            heat = 0.1 + 0.9 * math.log(max(most.weight, low) / low) / math.log(high / low)
        return most.text + (f" ({len(found)})" if len(found) > 1 else ""), heat

    shown, left = kinds[:_MAX_KINDS], max(0, len(kinds) - _MAX_KINDS)
    rows = [(layer, [show(row.get(kind)) for kind in shown]) for layer, row in list(cells.items())[:_MAX_LAYERS]]
    left += max(0, len(cells) - _MAX_LAYERS)
    return HeatTable(caption, "layer", shown, rows, legend, left)
