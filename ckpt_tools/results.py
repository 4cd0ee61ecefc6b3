"""What all results of the public functions have in common: short text, what a notebook shows, the JSON document."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, fields, is_dataclass
from importlib import import_module
from itertools import islice
from typing import Any

from ckpt_tools.text import escape_message, escape_name, first_few
from ckpt_tools.units import format_number, format_size

SCHEMA_VERSION = 1
"""Of every JSON document. Within a version fields are added, never renamed or removed."""
_PAGES = {
    "Difference": "diff.diff_page", "Estimate": "estimate.estimate_page", "PreflightReport": "preflight.preflight_page",
    "PruneResult": "runs.tending_page", "SmokeReport": "smoke.smoke_page", "Stats": "stats.stats_page",
    "Summary": "inspection.build_page", "Verification": "verify.verify_page",
}  # fmt: skip
"""Result → what makes its page, in `cli/`."""
_MAX_ROWS = 18  # Fields that are shown
_MAX_CHARS = 100  # Of the text of one


class Result:
    """The result of a public function; a dataclass with a `to_json`."""

    __slots__ = ()

    def to_json(self) -> dict[str, object]:
        """Return it as JSON holds it inside another document."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return the document that the command prints with `--json`, in plain values; no number is NaN or infinite."""
        text = json.dumps({"schema_version": SCHEMA_VERSION, **self.to_json()})
        document: dict[str, Any] = json.loads(text, parse_constant=lambda _: None)
        return document

    @property
    def title(self) -> str:
        """What it comes to, in a line; "" where its fields say all."""
        identity: Result | None = getattr(self, "identity", None)
        return "" if identity is None else identity.title

    def __repr__(self) -> str:
        rows = self._rows()
        width = max((len(name) for name, _ in rows), default=0)
        return "\n".join([self._head(), *(f"  {name:<{width}}  {text}" for name, text in rows)])

    def _repr_html_(self) -> str:
        """Return the top of the result's page; a table of its fields where it has no page.

        Pages are made in `cli/`, above this room. As with the functions of commands, only their names are known here,
        and they are resolved when a notebook asks: no import runs upwards, and who shows no page loads none.
        """
        if type(self).__name__ in _PAGES:
            module, _, make = _PAGES[type(self).__name__].partition(".")
            page = getattr(import_module(f"ckpt_tools.cli.{module}"), make)(self)
            return str(import_module("ckpt_tools.cli.views.write").build_summary(page))
        from html import escape

        cell = '<{0} style="text-align: left">{1}</{0}>'
        rows = "".join(f"<tr>{cell.format('th', n)}{cell.format('td', escape(text))}</tr>" for n, text in self._rows())
        return f"<table><caption>{escape(self._head())}</caption>{rows}</table>"

    def _head(self) -> str:
        return f"{type(self).__name__}: {escape_message(self.title)}".removesuffix(": ")

    def _rows(self) -> list[tuple[str, str]]:
        """Return the fields that hold something, and what."""
        held: Any = self  # a dataclass
        found = [(each.name, _shown(each.name, getattr(self, each.name))) for each in fields(held)]
        rows = [(name, text[:_MAX_CHARS] + "…" * (len(text) > _MAX_CHARS)) for name, text in found if text]
        left = len(rows) - _MAX_ROWS
        return rows[:_MAX_ROWS] + [("…", f"and {left} more fields")] * (left > 0)


def as_json(held: object, names: str) -> dict[str, Any]:
    """Return attributes as JSON holds them, in this order: those named, `key=name` under another key."""
    pairs = (each.partition("=") for each in names.split())
    return {key: plain(getattr(held, name or key)) for key, _, name in pairs}


def plain(value: Any) -> Any:  # noqa: ANN401 - whatever a field holds
    """Return a value as JSON holds it: with its own `to_json`, or a dataclass as its fields."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if is_dataclass(value):
        return asdict(value)  # type: ignore[arg-type]
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


class CheckedResult(Result):
    """A result that is true when its command would end with 0, and false when it would end with 3."""

    __slots__ = ()

    @property
    def ok(self) -> bool:
        """True without a finding of severity error."""
        return not any(each.severity == "error" for each in getattr(self, "findings", ()))

    def __bool__(self) -> bool:
        return self.ok

    @property
    def title(self) -> str:
        """What it comes to, in a line."""
        return getattr(self, "verdict", "ok" if self.ok else "NOT ok")


def _shown(name: str, value: object) -> str:
    """Return what a field holds, in a line; "" for nothing."""
    if isinstance(value, int) and not isinstance(value, bool):
        return format_size(value) if "bytes" in name else f"{value:,}"
    if value is None or (isinstance(value, Collection) and not value):
        return ""
    if not isinstance(value, Collection) or isinstance(value, str):
        return _item(value)
    is_map = isinstance(value, Mapping)
    few: list[Any] = list(islice(value.items() if isinstance(value, Mapping) else value, 3))
    items = (f"{_item(k)}: {_shown(name, v)}".removesuffix(": ") for k, v in few) if is_map else map(_item, few)
    more = f" and {len(value) - len(few):,} more" if len(value) > len(few) else ""
    return f"{len(value):,}: " * (len(value) > 1) + first_few(list(items)) + more


def _item(value: Any) -> str:  # noqa: ANN401 - whatever a field holds
    """Return a value in a few words: a name, or what a finding says."""
    if isinstance(value, Result):
        return value.title or type(value).__name__
    if isinstance(value, float):
        return format_number(value, 4)
    if hasattr(value, "severity"):
        return f"{value.severity}: {value.code}: {value.what}"
    if hasattr(value, "label"):
        return str(value.label)
    if is_dataclass(value) and type(value).__str__ is object.__str__:
        return _item(getattr(value, fields(value)[0].name))
    return _item(value[0]) if isinstance(value, tuple) and value else escape_name(str(value))
