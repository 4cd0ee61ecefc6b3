"""What a page is made of, as values: text and numbers alone, no markup."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from ckpt_tools.description.checkpoint import Finding

Mood = Literal["good", "partly", "bad", "unknown"]
"""How a verdict is shown; its words say the same. Green is "good" alone: nothing was left unchecked or assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Names and what they stand for."""

    kind: ClassVar[str] = "facts"
    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text below headers; the first column names the row."""

    kind: ClassVar[str] = "table"
    caption: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    align: str
    """A letter per column: "l" left or "r" right."""
    left_out: int = 0
    """Rows that are not shown, which is said."""
    is_folded: bool = False
    """Shown on request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingList:
    """Findings, the worst first."""

    kind: ClassVar[str] = "findings"
    groups: Sequence[tuple[str, Sequence[Finding]]]
    """(heading, findings) in order."""
    left_out: int = 0
    """Findings that are not shown, which is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notes:
    """Sentences."""

    kind: ClassVar[str] = "notes"
    items: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """Lines of a program, such as stacks; shown on request."""

    kind: ClassVar[str] = "listing"
    caption: str
    lines: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One stacked bar."""

    name: str
    parts: Sequence[int]
    """A size per series of the `Bars`."""
    total: str
    """What it comes to, in words."""
    group: str = ""
    """What it belongs to, with its neighbours: named below bars that stand upright."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Stacked bars on one scale, and perhaps a line across them. The same numbers should stand in a table."""

    kind: ClassVar[str] = "bars"
    caption: str
    series: Sequence[str]
    bars: Sequence[Bar]
    limit: int | None = None
    limit_name: str = ""
    is_upright: bool = False
    """They stand side by side, in the order of time."""

    @property
    def groups(self) -> list[tuple[str, int]]:
        """Names of groups, and how many bars stand in each; without groups each bar's own name."""
        runs = itertools.groupby(self.bars, key=lambda bar: bar.group) if any(b.group for b in self.bars) else ()
        return [(name, len(list(bars))) for name, bars in runs] or [(bar.name, 1) for bar in self.bars]

    @property
    def scale(self) -> int:
        """What the full width stands for."""
        return max([self.limit or 0, 1, *(sum(bar.parts) for bar in self.bars)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Numbers per step. The same numbers should stand in a table."""

    kind: ClassVar[str] = "curves"
    caption: str
    series: Sequence[tuple[str, Sequence[float]]]
    """(name, number per step); what is not finite leaves a gap."""

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest finite number."""
        finite = [number for _, numbers in self.series for number in numbers if math.isfinite(number)]
        return min(finite, default=0.0), max(finite, default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatTable:
    """Numbers by row and column, with a colour for how large they are."""

    kind: ClassVar[str] = "heat"
    caption: str
    corner: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[tuple[str, float] | None]]]
    """(name, cell per column); a cell is its text and its heat from 0 to 1, or nothing."""
    legend: str = ""
    left_out: int = 0
    """Rows and columns that are not shown, which is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """What the page's script draws from the page's data."""

    kind: ClassVar[str] = "drawing"
    draws: Literal["modules", "heat", "mesh", "files"]
    caption: str
    layout: int = 0
    """Which of the data's layouts."""


Part = Facts | Table | FindingList | Notes | Listing | Bars | Curves | HeatTable | Drawing


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of a page below a heading."""

    title: str
    parts: Sequence[Part]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One page."""

    command: str
    subject: str
    """What was looked at, as the user named it."""
    sections: Sequence[Section]
    mood: Mood | None = None
    verdict: str = ""
    data: object = None
    """What the script draws from: whatever JSON holds."""
