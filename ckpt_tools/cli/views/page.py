"""What results are shown as, in text and on pages: values, no markup. What prints them escapes text from files."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.checkpoint.identity import Identity
from ckpt_tools.checkpoint.infer_mesh import block_of
from ckpt_tools.checks.sibling_tensors import kind_of
from ckpt_tools.cli.views.layouts import format_ranges
from ckpt_tools.text import escape_message, first_few

Item = TypeVar("Item")
Mood = Literal["good", "partly", "bad", "unknown"]
"""How a verdict is shown; its words say the same. Green is "good" alone: nothing was left unchecked or assumed."""
MAX_FINDINGS = 5000  # Findings on a page; more are counted
MAX_ROWS = 500  # Rows of a table of a page; more are counted
UNREAD = "not read"  # Drawn hatched
_MAX_LAYERS = 256
_MAX_KINDS = 48
MAX_POINTS = _MAX_LAYERS * _MAX_KINDS  # Of a measure of a `Depth`
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


class Excerpt(NamedTuple):
    """Lines of a file, those that findings are about and their neighbours: number, text and findings of each."""

    caption: str
    lines: Sequence[tuple[int, str, Sequence[Finding]]]


class Bar(NamedTuple):
    """One stacked bar: a size per series of its `Bars`, and what they come to in words."""

    name: str
    parts: Sequence[int]
    total: str
    group: str = ""  # What it belongs to, with its neighbours: named below bars that stand upright
    findings: Sequence[Finding] = ()  # About it


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


class Cell(NamedTuple):
    """One place of a `HeatTable`."""

    text: str
    heat: float = 0.0  # From 0 to 1
    is_unread: bool = False  # All or a part of it was not read: hatched
    findings: Sequence[Finding] = ()  # About it


class HeatTable(NamedTuple):
    """Numbers by row and column, with a colour for how large they are."""

    caption: str
    corner: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell | None]]]
    legend: str = ""
    left_out: int = 0  # Rows and columns that are not shown, which is said


class Depth(NamedTuple):
    """Lines over the layers of a model, one per kind of weight. The same numbers should stand in a table."""

    caption: str
    measures: Mapping[str, Mapping[str, float | str]]
    """Measure → FQN → its number, or in a word why it has none; what has no layer is not drawn."""
    findings: Sequence[Finding] = ()  # Those about a tensor are marked at it
    along: str = "layer"

    @classmethod
    def over_steps(cls, caption: str, series: Mapping[str, Sequence[float]]) -> Depth:
        """Return lines over the steps of a run instead."""
        numbers = {f"step.{i}.{name}": n for name, found in series.items() for i, n in enumerate(found, 1)}
        return cls(caption, {"": numbers}, along="step")

    def places(self) -> dict[str, tuple[str, int]]:
        """Return the kind of weight and the layer of every tensor that is drawn."""
        named = dict.fromkeys(fqn for found in self.measures.values() for fqn in found)
        found = {fqn: place for fqn in named if (place := _place(fqn)) is not None}
        is_one = len({stack for stack, _, _ in found.values()}) == 1
        return {fqn: (kind if is_one else f"{stack}: {kind}", layer) for fqn, (stack, layer, kind) in found.items()}

    def to_json(self, numbers: Mapping[Finding, int]) -> dict[str, object]:
        """Return what a browser draws: (kind, layer, number or word by measure) of every tensor."""
        places = self.places()
        about = tensors_of(self.findings, places)
        kinds = {kind: i for i, kind in enumerate(dict.fromkeys(kind for kind, _ in places.values()))}
        layers = sorted({layer for _, layer in places.values()})
        kept = {*layers[:: len(places) // MAX_POINTS + 1], *(places[fqn][1] for fqn in about.values())}
        rows = [
            [kinds[kind], layer, *(_drawn(found.get(fqn)) for found in self.measures.values())]
            for fqn, (kind, layer) in places.items()
            if layer in kept and kinds[kind] < _MAX_KINDS
        ]
        return {
            "along": self.along,
            "kinds": list(kinds)[:_MAX_KINDS],
            "measures": list(self.measures),
            "rows": rows,
            "pins": [[kinds[places[fqn][0]], places[fqn][1], numbers.get(f), f.what] for f, fqn in about.items()],
            "left_out": [len(layers) - len(kept), max(0, len(kinds) - _MAX_KINDS)],
        }


def _drawn(value: float | str | None) -> float | str | None:
    if isinstance(value, str) or value is None:
        return value
    short = float(f"{value:.3g}")  # which may be one that is too large
    return "NaN or Inf" if not math.isfinite(value) else short if math.isfinite(short) else value


def _place(fqn: str) -> tuple[str, int, str] | None:
    """Return the stack, the layer and the kind of weight of a tensor in layers."""
    block = block_of(fqn)
    return None if block is None else (*block, kind_of(fqn).partition("*.")[2] or "(itself)")


_QUOTED = re.compile(r"tensor (['\"])(.+?)\1[: ]")


def tensors_of(findings: Iterable[Finding], names: Iterable[str]) -> dict[Finding, str]:
    """Return the tensor that each finding is about, of those that are named."""
    known = {escape_message(name): name for name in names}
    quoted = ((each, _QUOTED.match(each.what)) for each in findings)
    about = {e: (known.get(e.tensor or e.where) or (known.get(q[2]) if q else None)) for e, q in quoted}
    return {finding: fqn for finding, fqn in about.items() if fqn is not None}


class ScriptDrawing(NamedTuple):
    """What the page's script draws from one of the layouts of the page's data."""

    draws: Literal["modules", "heat", "mesh"]
    caption: str
    layout: int = 0


Part = FactList | PageTable | FindingList | NoteList | Listing | Excerpt | Bars | HeatTable | Depth | ScriptDrawing


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
    data: Mapping[str, object] | None = None  # What the script draws from: whatever JSON holds
    titles: Sequence[str] = ()  # What was looked at, a line for each

    def parts(self) -> Iterator[Part]:
        """Yield what stands below the headings."""
        return (part for section in self.sections for part in section.parts)

    @property
    def groups(self) -> list[tuple[str, Sequence[Finding]]]:
        """The findings of the page, the worst first."""
        groups = [group for part in self.parts() if isinstance(part, FindingList) for group in part.groups]
        return sorted(groups, key=lambda group: SEVERITIES[group[1][0].severity])


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


def identity_titles(identities: Sequence[Identity], names: Sequence[str] = "AB") -> list[str]:
    """Return the line that says what was looked at; of two, with their names."""
    return [f"{n}: {e.title}" if len(identities) > 1 else e.title for n, e in zip(names, identities, strict=False)]


def identity_sections(identities: Sequence[Identity]) -> list[PageSection]:
    """Return how it is known what was looked at, and what came along."""
    titles = ["What it is"] if len(identities) == 1 else [f"What {side} is" for side in "AB"]
    rows = (identity_rows(each, 12)[1:] for each in identities)
    return [PageSection(title, [FactList(found)]) for title, found in zip(titles, rows, strict=False) if found]


def by_layer(numbers: Mapping[str, int], *, caption: str, legend: str, findings: Sequence[Finding] = ()) -> list[Part]:
    """Return numbers of tensors in layers as a map, neighbours that are alike in one row; the others as a table."""
    heat_of, about = heats([*numbers.values()]), dict[str, list[Finding]]()
    for finding, fqn in tensors_of(findings, numbers).items():
        about.setdefault(fqn, []).append(finding)
    layers: dict[tuple[str, int], dict[str, list[str]]] = {}
    for fqn in numbers:
        if (place := _place(fqn)) is not None:
            layers.setdefault(place[:2], {}).setdefault(place[2], []).append(fqn)
    kinds = list(dict.fromkeys(kind for row in layers.values() for kind in row))
    rows: list[tuple[str, list[Cell | None]]] = []
    alike = itertools.groupby(
        sorted(layers.items()),
        lambda item: (item[0][0], {kind: [numbers[fqn] for fqn in fqns] for kind, fqns in item[1].items()}),
    )
    for (stack, by_kind), group in alike:
        blocks, members = zip(*group, strict=True)
        name = f"{stack}.{format_ranges(number for _, number in blocks)}".removeprefix(".")
        cells: list[Cell | None] = []
        for kind in kinds[:_MAX_KINDS]:
            heat, sign = heat_of(max(by_kind.get(kind, [0])))
            here = [each for row in members for fqn in row.get(kind, ()) for each in about.get(fqn, ())]
            text = f"{sign}{sum(by_kind.get(kind, [])):,}"
            cells.append(Cell(text, heat, findings=here) if kind in by_kind else None)
        rows.append((f"{name} × {len(blocks)}" if len(blocks) > 1 else name, cells))
    left_out = max(0, len(kinds) - _MAX_KINDS) + max(0, len(rows) - _MAX_LAYERS)
    others = [(fqn, f"{number:,}") for fqn, number in numbers.items() if block_of(fqn) is None]
    parts: list[Part] = []
    if rows:
        parts.append(HeatTable(caption, "layer", kinds[:_MAX_KINDS], rows[:_MAX_LAYERS], legend, left_out))
    if others:
        parts.append(PageTable.of(f"{caption}: outside of layers", "tensor, >number", others, lambda other: other))
    return parts


def heats(numbers: Sequence[int]) -> Callable[[int], tuple[float, str]]:
    """Return what gives a number its heat among the usual ones, and a sign where it lies far above these."""
    ordered = sorted(numbers) or [0]
    low, high = ordered[len(ordered) // 4], ordered[3 * len(ordered) // 4]
    fence = high + max(1.5 * (high - low), 0.1 * high)
    most = max([number for number in ordered if number <= fence], default=0) or 1
    return lambda number: (0.2 + 0.8 * min(1.0, number / most) if number else 0.0, "▲ " if number > fence else "")
