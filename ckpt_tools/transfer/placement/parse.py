"""Read rules as people write them: a YAML file, or `--set` on the command line."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import cast

from ckpt_tools.checkpoint.layout import AXES, AXIS_ALIASES, Mesh, Placement, parse_mesh, parse_placement
from ckpt_tools.errors import UsageError
from ckpt_tools.transfer.placement.plain_yaml import load_yaml
from ckpt_tools.transfer.placement.rule import Rule, RuleSet, suggest

_FILE_KEYS = ("version", "mesh", "rules")
_RULE_KEYS = ("match", "place", "style")


def parse_rules(text: str, *, where: str, world_size: int | None = None) -> RuleSet:
    """Parse a rules file, called `where` in messages.

    It is YAML: `version: 1`, an optional `mesh` (axis → ranks; -1 needs `world_size`), and `rules`, each with `match`
    and either `place` (axis → placement) or `style`.
    """
    try:
        document = load_yaml(text)
    except ValueError as error:
        raise UsageError(f"the rules are not valid YAML: {_one_line(error)}", where=where) from error
    content = _mapping(document, "the rules file", where)
    _check_keys(content, _FILE_KEYS, "the rules file", where)
    version = content.get("version")
    if version != 1 or isinstance(version, bool):
        found = "no version" if version is None else f"version {_one_line(version)}"
        raise UsageError(f"the rules file has {found}, expected 1", where=where, hint="start it with version: 1")
    items = content.get("rules", [])
    if not isinstance(items, list):
        raise UsageError("rules must be a list", where=where, hint="write each rule as - match: ...")
    rules = tuple(_rule(item, f"{where}, rule {i}") for i, item in enumerate(items, start=1))
    return RuleSet(rules=rules, mesh=_mesh(content["mesh"], where, world_size) if "mesh" in content else None)


def parse_set(text: str) -> Rule:
    """Parse `GLOB=axis:S(d)[,axis:R]`; `GLOB=` leaves the tensor to FSDP alone."""
    origin = f"--set {text!r}"
    # The last "=": a placement has none.
    match, equals, places = text.rpartition("=")
    if not equals or not match.strip():
        hint = "write --set 'GLOB=axis:S(d)', for example '**.q_proj.weight=tp:S(0)'"
        raise UsageError(f"{text!r} is not a rule", where="--set", hint=hint)
    pairs: list[tuple[str, str]] = []
    for part in places.split(",") if places.strip() else []:
        axis, colon, placement = part.partition(":")
        if not colon:
            raise UsageError(f"{part.strip()!r} is not axis:placement", where=origin, hint="write for example tp:S(0)")
        pairs.append((axis.strip(), placement))
    return Rule(match=match.strip(), place=_place(pairs, origin), origin=origin)


def _rule(item: object, where: str) -> Rule:
    content = _mapping(item, "a rule", where)
    _check_keys(content, _RULE_KEYS, "a rule", where)
    match = content.get("match")
    if not isinstance(match, str) or not match:
        raise UsageError("a rule needs match: a pattern on tensor names", where=where, hint="quote the pattern")
    style = content.get("style")
    if "style" in content and not isinstance(style, str):
        what = f"style must be a name, found {_one_line(style)}"
        raise UsageError(what, where=where, hint="write for example style: colwise")
    place = None
    if "place" in content:
        pairs = _mapping(content["place"], "place", where)
        place = _place([(axis, placement) for axis, placement in pairs.items()], where)
    return Rule(match=match, place=place, style=cast("str | None", style), origin=where)


def _place(pairs: list[tuple[str, str]] | list[tuple[str, object]], where: str) -> dict[str, Placement]:
    result: dict[str, Placement] = {}
    for spelling, text in pairs:
        axis = _axis(spelling, where)
        if axis in result:
            raise UsageError(f"the axis {axis} is placed twice", where=where)
        if not isinstance(text, str):
            what = f"{_one_line(text)} is not a placement for {axis}"
            raise UsageError(what, where=where, hint="write S(0) to cut dim 0, R to replicate")
        try:
            result[axis] = parse_placement(text)
        except UsageError as error:
            raise UsageError(error.what, where=where, hint=error.hint) from error
    return result


def _axis(spelling: str, where: str) -> str:
    axis = AXIS_ALIASES.get(spelling, spelling)
    if axis not in AXES:
        what = f"unknown mesh axis {_one_line(spelling)}"
        raise UsageError(what, where=where, hint=suggest(spelling, AXES, "the axes are"))
    return axis


def _mesh(value: object, where: str, world_size: int | None) -> Mesh:
    axes = _mapping(value, "mesh", where)
    for axis, size in axes.items():
        _axis(axis, where)  # before it is put into a text: "tp=2,ep" is no axis
        if not isinstance(size, int) or isinstance(size, bool):
            what = f"mesh axis {axis} has {_one_line(size)} ranks"
            raise UsageError(what, where=where, hint="write for example mesh: {dp_shard: 8}")
    try:
        return parse_mesh(",".join(f"{axis}={size}" for axis, size in axes.items()), world_size=world_size)
    except UsageError as error:
        raise UsageError(error.what, where=where, hint=error.hint) from error


def _mapping(value: object, name: str, where: str) -> Mapping[str, object]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise UsageError(f"{name} must be a mapping of names, found {_one_line(value)}", where=where)
    return cast("dict[str, object]", value)


def _check_keys(content: Mapping[str, object], known: tuple[str, ...], name: str, where: str) -> None:
    for key in content:
        if key not in known:
            what = f"unknown key {_one_line(key)} in {name}"
            raise UsageError(what, where=where, hint=suggest(key, known, "the keys are"))


def _one_line(value: object) -> str:
    text = " ".join(str(value).split()) if isinstance(value, Exception) else reprlib.repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
