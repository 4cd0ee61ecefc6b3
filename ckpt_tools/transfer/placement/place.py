"""Apply rules to the tensors of a checkpoint: which axis cuts which dim, and why not.

Shape legend: L is the length of a tensor dim as torch counts it, N the number of ranks along a mesh axis.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, cast

from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.checkpoint.globs import NameIndex, Names
from ckpt_tools.checkpoint.layout import (
    AXES,
    AXIS_ALIASES,
    FSDP_AXIS,
    Fsdp,
    Grid,
    Layout,
    Mesh,
    Placement,
    Shard,
    cut_tensor,
    fsdp_axes,
    parse_mesh,
    parse_placement,
)
from ckpt_tools.errors import UsageError
from ckpt_tools.transfer.placement.plain_yaml import load_yaml
from ckpt_tools.transfer.placement.rule import Rule, RuleSet, suggest

# Read rules as people write them: a YAML file, or `--set` on the command line

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


Uneven = Literal["refuse", "replicate"]
"""What to do with a cut that PyTorch could not load: refuse it, or keep the tensor off these axes."""
_OWN: Names = {}  # Stands for the tensors' own names


def place_tensors(
    tensors: Iterable[TensorEntry], mesh: Mesh, rules: Sequence[Rule], *, uneven: Uneven = "refuse", names: Names = _OWN
) -> Layout:
    """Return where every tensor goes.

    A tensor is cut along dim 0 by `dp_shard`, as `fully_shard` does, and as the first rule that matches it says
    (`--set` before the file's), by any of its `names`. Scalars are replicated.
    """
    entries = tuple(tensors)
    _check_axes(rules, mesh)
    index = NameIndex(names or {entry.fqn: (entry.fqn,) for entry in entries})
    rule_of = {fqn: rule for rule, found in reversed([(rule, rule.find(index)) for rule in rules]) for fqn in found}
    result: dict[str, dict[str, Placement]] = {}
    packed = []
    kept_whole: dict[str, tuple[str, ...]] = {}
    for entry in entries:
        rule = rule_of.get(entry.fqn)
        placements: dict[str, Placement] = {}
        if entry.shape and any(name == FSDP_AXIS for name, _ in mesh.axes):
            placements[FSDP_AXIS] = Shard(0)
        if rule is not None:
            _check_shape(entry, rule)
            placements |= rule.placements(entry.fqn, len(entry.shape))
        kinds = (Shard, Fsdp) if entry.shape else Shard
        cuts = {axis: placement for axis, placement in placements.items() if isinstance(placement, kinds)}
        if uneven == "replicate" and (axes := _uneven_axes(entry, mesh, cuts)):
            kept_whole[entry.fqn] = axes
            cuts = {axis: placement for axis, placement in cuts.items() if axis not in axes}
        _check_cuts(entry, mesh, cuts, rule)
        result[entry.fqn] = dict(cuts)
        if rule is not None and rule.is_packed(len(entry.shape)) and any(mesh.size(a) > 1 for a in rule.axes):
            packed.append(entry.fqn)
    return Layout(mesh=mesh, placements=result, packed=tuple(packed), kept_whole=kept_whole)


def cut_entry(entry: TensorEntry, mesh: Mesh, placements: Mapping[str, Placement]) -> Grid:
    """Return how `mesh` cuts `entry`, in logical elements.

    Torch keeps two F4 elements in one of its own and cuts between those, so the cuts fall on even elements.
    """
    return cut_tensor(entry.shape, mesh, placements, pack=entry.dtype.pack)


def _check_axes(rules: Sequence[Rule], mesh: Mesh) -> None:
    names = [name for name, _ in mesh.axes]
    for rule in rules:
        for axis in rule.axes:
            if axis not in names:
                said = f"style {rule.style}" if rule.style else f"{axis}:{(rule.place or {})[axis]}"
                what = f"the rule {rule.match!r} ({said}) needs the axis {axis}, which the mesh {mesh} does not have"
                raise UsageError(what, where=rule.origin, hint=f"add the axis: --mesh {mesh},{axis}=N")


def _check_shape(entry: TensorEntry, rule: Rule) -> None:
    """Refuse a tensor that is not the one which the rule is about: it may be transposed, or of another config."""
    meant = rule.shapes.get(entry.fqn, entry.shape)
    if meant != entry.shape and rule.axes:
        what = f"tensor {entry.fqn!r} has shape {list(entry.shape)} here and {list(meant)} in the live model: "
        what += f"the style {rule.style} would cut a different dim than intended"
        hint = f"does config.json belong to the weights? --set '{entry.fqn}=tp:S(d)' cuts the dim d that you mean"
        raise UsageError(what, where=rule.origin, hint=hint)


def _check_cuts(entry: TensorEntry, mesh: Mesh, cuts: Mapping[str, Placement], rule: Rule | None) -> None:
    where = rule.origin if rule is not None else None
    pack = entry.dtype.pack
    if pack > 1 and (not entry.shape or entry.shape[-1] % pack):
        what = f"{_describe(entry)} ends inside a byte: torch keeps {pack} elements per byte of the last dim"
        raise UsageError(what, hint=f"leave it out: --exclude '{entry.fqn}'")
    for axis, placement in cuts.items():
        if isinstance(placement, Shard) and placement.dim >= len(entry.shape):
            what = f"{axis}:{placement} cannot cut {_describe(entry)}: it has no dim {placement.dim}"
            raise UsageError(what, where=where, hint="narrow the rule's pattern, or choose another dim")
    _check_fsdp(entry, mesh, cuts, where)
    _check_bytes(entry, mesh, cuts, where)


def _check_fsdp(entry: TensorEntry, mesh: Mesh, cuts: Mapping[str, Placement], where: str | None) -> None:
    """Refuse what `fully_shard` refuses, and what it saves but cannot load.

    Source: `torch/distributed/fsdp/_fully_shard/_fsdp_param.py` (uneven sharding needs dim 0). When another
    axis cuts the same dim unevenly, some ranks get more than the next cut of theirs accounts for (17 rows on
    dp_shard=4, tp=2): the chunk table that PyTorch saves does not fit the data, and loading stops with
    "mismatch sizes".
    """
    fsdp, num_ranks = cuts.get(FSDP_AXIS), _fsdp_ranks(mesh, cuts)
    if Fsdp() in cuts.values() and not isinstance(fsdp, Shard):
        what = f"tensor {entry.fqn!r}: F lets {FSDP_AXIS} cut over another axis, too, but {FSDP_AXIS} does not cut it"
        raise UsageError(what, where=where, hint=f"place {FSDP_AXIS}:S(0), too, on a mesh with an axis {FSDP_AXIS}")
    if not isinstance(fsdp, Shard) or num_ranks == 1:
        return
    dim, length = fsdp.dim, _length(entry, fsdp.dim)
    others = _same_dim(cuts, fsdp)
    num_parts = math.prod(mesh.size(axis) for axis in others)
    if _uneven_axes(entry, mesh, cuts):
        axes = "×".join(others)
        what = f"tensor {entry.fqn!r}: {axes} and {FSDP_AXIS} both cut dim {dim}, and its {length} elements are "
        what += f"not divisible by {axes}={num_parts}; PyTorch saves such tensors in a way that it cannot load"
        hint = f"keep it off {axes} (--set '{entry.fqn}=', or --tp-uneven replicate for all such tensors), "
        raise UsageError(what, where=where, hint=f"{hint}or choose a size that divides {length}")
    if dim > 0 and (length // num_parts) % num_ranks:
        inside = f" left by {'×'.join(others)}={num_parts}" if others else ""
        part, by = length // num_parts, f"{'×'.join(fsdp_axes(mesh, cuts))}={num_ranks}"
        what = f"tensor {entry.fqn!r}: {FSDP_AXIS}:{fsdp} needs the {part} elements of dim {dim}{inside} to be "
        what += f"divisible by {by}, as fully_shard does for every dim but 0"
        hint = f"cut dim 0 instead ({FSDP_AXIS}:S(0)), or choose a size that divides {part}"
        raise UsageError(what, where=where, hint=hint)


def _uneven_axes(entry: TensorEntry, mesh: Mesh, cuts: Mapping[str, Placement]) -> tuple[str, ...]:
    """Return the axes that cut the same dim as FSDP into parts of different lengths; see `_check_fsdp`."""
    fsdp = cuts.get(FSDP_AXIS)
    if not isinstance(fsdp, Shard) or _fsdp_ranks(mesh, cuts) == 1 or fsdp.dim >= len(entry.shape):
        return ()
    others = _same_dim(cuts, fsdp)
    return others if _length(entry, fsdp.dim) % math.prod(map(mesh.size, others)) else ()


def _fsdp_ranks(mesh: Mesh, cuts: Mapping[str, Placement]) -> int:
    return math.prod(map(mesh.size, fsdp_axes(mesh, cuts)))


def _same_dim(cuts: Mapping[str, Placement], fsdp: Shard) -> tuple[str, ...]:
    return tuple(axis for axis, placement in cuts.items() if placement == fsdp and axis != FSDP_AXIS)


def _length(entry: TensorEntry, dim: int) -> int:
    """Return the length of a dim as torch counts it."""
    return entry.shape[dim] // (entry.dtype.pack if dim == len(entry.shape) - 1 else 1)


def _check_bytes(entry: TensorEntry, mesh: Mesh, cuts: Mapping[str, Placement], where: str | None) -> None:
    """Refuse cuts inside a byte. Only types that torch lacks (F6) can get here."""
    bits = entry.dtype.bits
    if bits % 8 == 0 or not any(mesh.size(axis) > 1 for axis in cuts):
        return
    starts = [offset for offset, _ in cut_entry(entry, mesh, cuts).intervals[-1]]
    if any(start * bits % 8 for start in (*starts, entry.shape[-1])):
        what = f"{_describe(entry)} cannot be cut by {mesh}: a cut would fall inside a byte"
        hint = f"keep it whole: --set '{entry.fqn}={','.join(f'{axis}:R' for axis in cuts)}'"
        raise UsageError(what, where=where, hint=hint)


def _describe(entry: TensorEntry) -> str:
    return f"tensor {entry.fqn!r} of dtype {entry.dtype.name} and shape {list(entry.shape)}"
