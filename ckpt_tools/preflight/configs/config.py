"""What reading a config gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt_tools.checkpoint import Finding
from ckpt_tools.preflight.spec import Framework, ParallelSpec

if TYPE_CHECKING:
    from ckpt_tools.preflight.configs.schema import Section


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A trainer's config that was read."""

    framework: Framework
    """Whose it is."""
    path: str
    """Its file, as the user named it."""
    raw: Section
    """The framework's own model of it; options of a wrong type count as not given."""
    values: Mapping[str, object]
    """The file as nested plain values, in the user's own spelling. Options of a command line: name → text, True for a
    switch, a list for several words."""
    spec: ParallelSpec
    """What it asks for."""
    findings: tuple[Finding, ...] = ()
    """Unknown options, wrong types, values that are not in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one framework's reader makes of a document."""

    raw: Section
    """See `Config.raw`."""
    values: Mapping[str, object]
    """See `Config.values`."""
    spec: ParallelSpec
    """See `Config.spec`."""
    findings: tuple[Finding, ...] = ()
    """See `Config.findings`."""


def first_key(values: Mapping[str, object], *paths: str) -> str | None:
    """Return the first of the dotted `paths` that the file has with a value, or None."""
    for path in paths:
        if path in values:
            if values[path] is not None:
                return path
            continue
        node: object = values
        for part in path.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        if node is not None:
            return path
    return None
