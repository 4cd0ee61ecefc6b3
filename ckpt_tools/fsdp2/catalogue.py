"""Every way in which FSDP2 is known to break: how it shows, why, and what to change. The data is diagnoses.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.tables import read_packaged

Found = Literal["exception", "audit", "ranks", "watch"]
"""Where a diagnosis comes from: an error's text and frames, `audit`, comparing ranks, or what `watch` saw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosisEntry:
    """One row of the table."""

    id: str  # Stable kebab-case identifier; the code of findings
    symptom: str
    cause: str
    fix: str
    found_by: tuple[Found, ...]
    silent: bool = False  # Training goes on, with wrong numbers
    text: str = ""  # Regular expression for errors that mean this and nothing else; its group `where` names the place
    inside: tuple[str, ...] = ()  # Functions of which one runs when they are raised


def _read_entries() -> Mapping[str, DiagnosisEntry]:
    table: dict[str, dict[str, Any]] = tomllib.loads(read_packaged(__package__, "diagnoses.toml"))
    found = {}
    for code, fields in table.items():
        tuples: dict[str, Any] = {name: tuple(fields.pop(name, ())) for name in ("found_by", "inside")}
        found[code] = DiagnosisEntry(id=code, **fields, **tuples)
    return found


CATALOGUE: Mapping[str, DiagnosisEntry] = MappingProxyType(_read_entries())
"""Diagnosis id → entry."""


def build_finding(code: str, where: str, what: str) -> Finding:
    """Return an error with the hint that the catalogue has for it."""
    return Finding.error(code, where, what, CATALOGUE[code].fix)


def build_warning(code: str, where: str, what: str) -> Finding:
    """Return a warning with the hint that the catalogue has for it: what may be meant so."""
    return Finding.warning(code, where, what, CATALOGUE[code].fix)
