"""What several pages are made of: findings, notes, and numbers by layer and kind of weight."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckpt_tools.checks.alike import kind_of
from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.description.identity import Identity
from ckpt_tools.description.infer import block_of
from ckpt_tools.report.page import Facts, FindingList, HeatTable, Mood, Notes, Part, Section, Table
from ckpt_tools.text import first_few

MAX_FINDINGS = 5000
"""Findings on a page; more are counted."""
MAX_ROWS = 500
"""Rows of a table; more are counted."""
_MAX_LAYERS = 256
_MAX_KINDS = 48
_ORDER = {"error": 0, "warning": 1, "info": 2}


def count(number: int, noun: str) -> str:
    """Return "1 error", "2 errors"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def mood_of(*, ok: bool, left: object) -> Mood:
    """Return how a verdict is shown, given what was `left` unchecked."""
    return "bad" if not ok else "partly" if left else "good"


def findings_section(findings: Sequence[Finding], title: str = "Findings") -> list[Section]:
    """Return findings by code, the worst first; nothing without one."""
    groups: dict[tuple[int, str], list[Finding]] = {}
    ordered = sorted(findings, key=lambda finding: _ORDER[finding.severity])
    for finding in ordered[:MAX_FINDINGS]:
        groups.setdefault((_ORDER[finding.severity], finding.code), []).append(finding)
    listed = [(code, found) for (_, code), found in groups.items()]
    part = FindingList(groups=listed, left_out=max(0, len(ordered) - MAX_FINDINGS))
    return [Section(title=f"{title}: {len(findings):,}", parts=(part,))] if findings else []


def notes_section(title: str, items: Iterable[str]) -> list[Section]:
    """Return sentences below a heading; nothing without one."""
    listed = list(dict.fromkeys(items))
    return [Section(title=title, parts=(Notes(items=listed),))] if listed else []


def identity_sections(identities: Sequence[Identity]) -> list[Section]:
    """Return what was looked at, each with how it is known; nothing where that is not known."""
    found = []
    for number, each in enumerate(identities):
        rows = [("it is", each.title), *((each.whole, why) for why in each.evidence)]
        rows += [("resumes", why) for why in each.reasons]
        rows += [("step", f"{count.step}: {first_few(count.files)}") for count in each.steps if len(each.steps) > 1]
        rows += [("taken" if one.is_taken else "not taken", f"{one.name}: {one.why}") for one in each.candidates]
        rows += [("models", first_few(each.components, 12))] if each.components else []
        rows += [("runs", what) for what in each.executables]
        title = "What it is" if len(identities) == 1 else f"What {'AB'[number]} is"
        found.append(Section(title=title, parts=(Facts(rows=rows),)))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
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
        others_shown, left_out = others[:MAX_ROWS], max(0, len(others) - MAX_ROWS)
        headers = ("tensor", "")
        title = f"{caption}: outside of layers"
        parts.append(Table(caption=title, headers=headers, rows=others_shown, align="lr", left_out=left_out))
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
    return HeatTable(caption=caption, corner="layer", columns=shown, rows=rows, legend=legend, left_out=left)
