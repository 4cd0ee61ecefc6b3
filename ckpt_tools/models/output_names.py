"""By which names a conversion writes tensors: the file's, the live model's or the hub's; see `names.convert`.

A map acts on descriptions alone. What it takes apart or joins is moved as views of the source's chunks, and no name is
guessed: with `auto`, tensors that are not certainly those of the architecture keep the names that they have.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from ckpt_tools.checkpoint.entries import Asset, Checkpoint, TensorEntry
from ckpt_tools.checkpoint.formats.manifest import MANIFEST_NAME, TensorMap
from ckpt_tools.checkpoint.formats.table import format_of
from ckpt_tools.checkpoint.names.apply_mosaic import lay_out, zero_entry
from ckpt_tools.checkpoint.names.convert import Converted, to_hub, to_live
from ckpt_tools.checkpoint.names.keymap import KeyMap, load_key_maps, parse_key_maps
from ckpt_tools.checkpoint.names.match_architecture import match_names
from ckpt_tools.checkpoint.names.mosaic import Mosaic, invert, whole
from ckpt_tools.checkpoint.names.patterns import matches
from ckpt_tools.checkpoint.names.single_files import CONVENTION, SingleFileFamily, convert
from ckpt_tools.checkpoint.names.table import Expected
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.floors import installed_release
from ckpt_tools.models.config import CONFIG_NAME, config_in
from ckpt_tools.models.conventions import CONVENTIONS, UnclearNamesError, agreed, conventions_of, map_of, named_by
from ckpt_tools.storage.source import Source, read_named_file
from ckpt_tools.text import escape_name, first_few

AssetList = Sequence[tuple[Source, Asset]]  # Files that belong to a model and hold no weights, and where from
Resolve = Callable[[TensorEntry], TensorEntry]  # Returns a tensor with its chunks on their raw bytes
_LIBRARIES = (*CONVENTIONS, CONVENTION)
_MAX_MAP_BYTES = 1 << 20
_WHOLE_MAP = "the map needs a line for every tensor; `drop NAME` keeps a name, and ** at its end is anything"
_NO_CONFIG = "no config.json beside the weights names an architecture"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a file beside the weights says that they are."""

    architecture: str
    config: Mapping[str, object]
    source: Source  # Where that file lies


def claim_of(assets: AssetList) -> Claim | None:
    """Return what the config.json among `assets` names; None when nothing does."""
    found = next(((source, asset) for source, asset in assets if asset.file == CONFIG_NAME), None)
    if found is None:
        return None
    config = config_in(found[0])
    if config.architecture is None:
        return None
    return Claim(architecture=config.architecture, config=config.values, source=found[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A checkpoint by the names that are to be written."""

    checkpoint: Checkpoint  # Chunks are raw where tensors were taken apart or joined
    sources: Mapping[str, str] = field(default_factory=dict)  # Name → name in the source, of one whole tensor of it
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further name of a tensor → its name in the checkpoint; of `name_hub`, those that are left out, in the source."""
    copies: tuple[tuple[TensorEntry, TensorEntry], ...] = ()  # What must be equal, named as the tensor of the first
    map: TensorMap | None = None  # What brought the names about; None where none changed
    apart: tuple[TensorEntry, ...] = ()  # Tensors of the source that are joined or split; their records hold for none
    lost: tuple[str, ...] = ()  # What the hub has no place for; it keeps its name
    left_out: tuple[str, ...] = ()  # What has no place among these names and was left out, for people
    note: str = ""  # What was done, for people; empty for nothing

    @classmethod
    def as_it_is(cls, checkpoint: Checkpoint) -> Self:
        """Return it by its own names."""
        return cls(checkpoint=checkpoint, sources={entry.fqn: entry.fqn for entry in checkpoint.tensors})


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """Which names are asked for."""

    names: str = "auto"
    own: Mapping[str, KeyMap] = field(default_factory=dict)  # The user's own map: `model_type` (or "*") → map

    @classmethod
    def of(cls, names: str, path: str | os.PathLike[str] | None) -> Self:
        """Return what `--names` and `--map` say together."""
        if path is None:
            return cls(names=names)
        if names != "auto":
            raise UsageError("--map sets the names itself", hint=f"leave out --names {names}")
        where = os.fspath(path)
        content = read_named_file(where, what="the map", max_bytes=_MAX_MAP_BYTES, refusal=UsageError)
        try:
            own = parse_key_maps(content.decode(), where=where)
        except UnicodeDecodeError as error:
            raise UsageError(f"the map is not UTF-8 text: {error}", where=where) from None
        if not own:
            what = "the map is empty"
            raise UsageError(what, where=where, hint="begin with [*], then a line NEW = OLD for each tensor")
        return cls(names="map", own=own)


def name_live(checkpoint: Checkpoint, assets: AssetList, naming: Naming, resolve: Resolve) -> Named:
    """Return a file's tensors by the names of the live model, or of a convention."""
    plain = Named.as_it_is(checkpoint)
    names = naming.names
    if names == "hub":
        said = "names of the file: not known to be the hub's, as --names hub requires"
        return plain if _is_hub(checkpoint, assets) else replace(plain, note=said)
    try:
        known, found = _forward(checkpoint.tensors, assets, naming)
    except (UsageError, UnreadableError) as error:
        if names != "auto":
            what = error.what if naming.own else f"--names {names}: {error.what}"
            hint = (error.hint or _WHOLE_MAP) if naming.own else "leave out --names to keep names that are not known"
            raise UsageError(what, where=error.where or checkpoint.root, hint=hint) from error
        return plain if error.what == _NO_CONFIG else replace(plain, note=f"names of the file: {error.what}")
    whose = f"{names}'s {known.architecture}" if names in _LIBRARIES else f"the live {known.architecture}"
    whose = known.architecture if naming.own else whose
    return _named(checkpoint, found, known, whose, resolve)


def name_hub(checkpoint: Checkpoint, assets: AssetList, naming: Naming, resolve: Resolve) -> Named:
    """Return a live model's tensors by the names of its files, of tied ones only one."""
    plain = Named.as_it_is(checkpoint)
    if naming.names == "live":
        return plain
    whose = "the hub"
    try:
        if naming.names == CONVENTION:
            family, found = _other_side(checkpoint.tensors, assets, is_diffusers=False)
            whose = f"diffusers' {family.title}"
        else:
            found = _backward(checkpoint.tensors, assets, naming)
    except UnclearNamesError:
        raise
    except (UsageError, UnreadableError) as error:
        if naming.names in _LIBRARIES:
            hint = error.hint or "leave out --names to keep names that are not known"
            what = f"--names {naming.names}: {error.what}"
            raise UsageError(what, where=error.where or checkpoint.root, hint=hint) from error
        if naming.own or (naming.names == "hub" and not _is_hub(checkpoint, assets)):
            what = error.what if naming.own else f"--names hub: {error.what}"
            hint = _WHOLE_MAP if naming.own else "--names live writes the existing names"
            raise UsageError(what, where=error.where or checkpoint.root, hint=hint) from error
        return plain
    if checkpoint.mesh is None and not format_of(checkpoint).keeps_order:
        _refuse_packed(checkpoint, found)
    return _named(checkpoint, found, None, whose, resolve)


def name_known(checkpoint: Checkpoint, assets: AssetList, names: str, resolve: Resolve) -> Named | None:
    """Return a library's tensors by the hub's names, with what the hub has no place for; None where they are not one's.

    Raise `UnclearNamesError` where libraries have these names for different tensors.
    """
    claim = claim_of(assets)
    if claim is None or not checkpoint.tensors:
        return None
    fqns = [entry.fqn for entry in checkpoint.tensors]
    known = conventions_of(fqns, claim.architecture, claim.config)
    known = tuple(one for one in known if names in ("auto", one.name))
    if not known:
        return None
    try:
        found = agreed(known, _whole(checkpoint.tensors), claim.config)
    except UnclearNamesError:
        raise
    except UsageError:  # a part of a model, for instance
        return None
    return _named(checkpoint, found, None, "the hub", resolve)


def _refuse_packed(checkpoint: Checkpoint, found: Converted) -> None:
    """Refuse matrices that lie side by side in one tensor, cut along that dim by nobody knows whom."""
    # A tensor-parallel rank has a part of each of them (PyTorch's `_StridedShard`), which PyTorch 2.13 describes as one
    # run. What a trainer made of that the chunks do not show: rows of one matrix may stand in the place of another's.
    entries = {entry.fqn: entry for entry in checkpoint.tensors}
    cut = []
    for mosaic in found.mosaics.values():
        piece = mosaic.pieces[0] if mosaic.pieces else None
        if piece is None or len(mosaic.sources) > 1:
            continue
        entry = entries[piece.source]
        for dim, axis in enumerate(piece.axes):
            is_part = axis > 0 and mosaic.shape[dim] < entry.shape[axis]  # FSDP, which keeps the order, cuts dim 0
            if is_part and entry.num_parts(axis) > 1:
                cut.append((entry, axis))
    packed = {entry.fqn for entry, _ in cut}
    others = [entry for entry in checkpoint.tensors if entry.fqn not in packed]
    cut = [(entry, axis) for entry, axis in cut if not _is_cut_by_fsdp(entry, axis, others)]
    if names := dict.fromkeys(entry.fqn for entry, _ in cut):
        raise UsageError(
            f"{first_few(names, 2)}: several matrices in one tensor, cut where they lie side by side; "
            "whether the ranks' parts are in the order of the whole, the checkpoint does not say",
            where=checkpoint.root,
            hint="if they were redistributed to Shard before saving, or nothing was tensor-parallel, `ckpt reshard` it "
            "to dp_shard=1 and gather that; otherwise save the model without tensor parallelism",
        )


def _is_cut_by_fsdp(entry: TensorEntry, axis: int, others: Iterable[TensorEntry]) -> bool:
    """Is another weight of the module cut alike? Tensor parallelism cuts that one's inputs, its last dim, instead."""
    (module, _, _), dims, parts = entry.fqn.rpartition("."), len(entry.shape), entry.num_parts(axis)
    companions = [one for one in others if one.fqn.rpartition(".")[0] == module and len(one.shape) == dims > axis + 1]
    return any((one.num_parts(axis), one.num_parts(dims - 1)) == (parts, 1) for one in companions)


def name_back(
    checkpoint: Checkpoint,
    headers: Sequence[TensorEntry],
    assets: AssetList,
    recorded: TensorMap | None,
    naming: Naming,
    resolve: Resolve,
) -> Named:
    """Return live tensors as those of the files that they came from: the same map, turned around."""
    # `headers` are what the files hold; `recorded` is what the manifest says of the map, None for a reference.
    if recorded is not None and recorded.names == "map" and not naming.own:
        raise UsageError("the names were made by a map of your own", hint="name it again: --map FILE")
    there = {entry.fqn: entry for entry in checkpoint.tensors}
    wanted = naming if naming.own else Naming(names="live" if recorded is None else recorded.names)
    if recorded is None and not naming.own:
        wanted = next((n for name in CONVENTIONS if _fits(n := Naming(names=name), headers, assets, there)), wanted)
    known, found = _forward(headers, assets, wanted)
    if recorded is not None and recorded != known:
        raise UsageError(
            f"the names were made by a different map from the one that ckpt now has for {known.architecture}",
            hint=f"gather with the ckpt that wrote it ({MANIFEST_NAME} says which), or remove {MANIFEST_NAME} to go on "
            "without the original files' names",
        )
    live = {name: mosaic for name, mosaic in found.mosaics.items() if name in there}
    for name, mosaic in live.items():
        if there[name].shape != mosaic.shape:
            raise UsageError(f"tensor {name!r} is {list(there[name].shape)}, the map makes {list(mosaic.shape)} of it")
    used = {source for mosaic in live.values() for source in mosaic.sources}
    try:
        back, copies = invert(live, {entry.fqn: entry.shape for entry in headers if entry.fqn in used})
    except ValueError as error:
        raise UsageError(f"the tensors are not what the map makes of the files: {error}") from error
    for fqn, mosaic in back.items():
        back[fqn] = replace(mosaic, dtype=there[mosaic.sources[0]].dtype) if mosaic.sources else mosaic
    rest = _whole(entry for entry in checkpoint.tensors if entry.fqn not in live and entry.fqn not in back)
    aliases = {alias: name for alias, name in found.aliases.items() if alias in rest and name in there}
    made = Converted(mosaics={**back, **rest}, aliases=aliases, copies=tuple(copies))
    left_out = [name for name, mosaic in live.items() if mosaic.is_zeros]
    note = f"left out {first_few(left_out)}, written as zeros beside the hub's tensors" if left_out else ""
    return replace(_named(checkpoint, made, None, "", resolve), note=note)


def _fits(naming: Naming, headers: Iterable[TensorEntry], assets: AssetList, there: Mapping[str, TensorEntry]) -> bool:
    """Does the map make exactly these names of the files' tensors?"""
    try:
        _, found = _forward(headers, assets, naming)
    except (UsageError, UnreadableError):
        return False
    return all(name in there for name, mosaic in found.mosaics.items() if not mosaic.is_zeros)


def _forward(tensors: Iterable[TensorEntry], assets: AssetList, naming: Naming) -> tuple[TensorMap, Converted]:
    """Return by which map tensors of the hub get these names, and what they become."""
    if naming.names == CONVENTION:
        family, found = _other_side(tensors, assets, is_diffusers=True)
        return TensorMap(names=naming.names, architecture=family.title, digest=family.key_map.digest), found
    if naming.own or naming.names in CONVENTIONS:
        title, key_map, config = _key_map(naming, assets)
        hub = _whole(tensors)
        if naming.own:
            found, digest = key_map.forward(hub, config), key_map.digest
        else:
            found, digest = named_by(key_map, hub, title, config)
        return TensorMap(names=naming.names, architecture=title, digest=digest), found
    claim = _claim(assets)
    hub = _whole(tensors)
    expected = _expected(claim, lambda one: match_names(hub, one, claim.config).is_whole)
    if claim.config.get("quantization_config") is not None:
        raise UsageError("the model is quantised, and only its quantiser determines its tensors in memory")
    known = TensorMap(names="live", architecture=claim.architecture, digest=expected.digest, by=expected.by)
    return known, to_live(hub, expected, claim.config)


def _backward(tensors: Sequence[TensorEntry], assets: AssetList, naming: Naming) -> Converted:
    """Return the hub's tensors of those of a live model or of a convention; of neither, an error says so."""
    if naming.own or naming.names in CONVENTIONS:
        _, own, config = _key_map(naming, assets)
        return own.backward(_whole(tensors), config)
    fqns = [entry.fqn for entry in tensors]
    claim = _claim(assets)
    known = conventions_of(fqns, claim.architecture, claim.config)
    if any(convention.is_of_class for convention in known):
        return agreed(known, _whole(tensors), claim.config)

    def fits(expected: Expected) -> bool:
        return bool(known) or all(matches(expected.names, fqn, expected.counts) for fqn in fqns)

    expected = _expected(claim, fits)  # a class of its own may mean other things by the same model_type
    if known:
        return agreed(known, _whole(tensors), claim.config)
    if not fits(expected):
        raise UsageError(f"the names are not those of a live {claim.architecture}")
    return to_hub(_whole(tensors), expected, claim.config)


def _other_side(
    tensors: Iterable[TensorEntry], assets: AssetList, *, is_diffusers: bool
) -> tuple[SingleFileFamily, Converted]:
    """Return a base model's family, and its tensors as those of a single file or of diffusers."""
    claim = claim_of(assets)
    return convert(_whole(tensors), claim.config if claim else {}, is_diffusers=is_diffusers)


def _is_hub(checkpoint: Checkpoint, assets: AssetList) -> bool:
    """Are they the hub's tensors already?"""
    try:
        _forward(checkpoint.tensors, assets, Naming(names="live"))
    except (UsageError, UnreadableError):
        return False
    return True


def _claim(assets: AssetList) -> Claim:
    claim = claim_of(assets)
    if claim is None:
        raise UsageError(_NO_CONFIG)
    return claim


def _expected(claim: Claim, fits: Callable[[Expected], bool]) -> Expected:
    from ckpt_tools.models.ask_transformers import expected_for  # with the sandbox

    expected = expected_for(claim.architecture, claim.config, fits)
    if expected is None:
        what = f"{claim.architecture} is not known to ckpt, nor to the transformers that is installed, if any"
        raise UsageError(what)
    return expected


def _key_map(naming: Naming, assets: AssetList) -> tuple[str, KeyMap, Mapping[str, object]]:
    """Return for which model the map is, the map, and the config that sizes are looked up in."""
    claim = claim_of(assets) if "*" in naming.own else _claim(assets)
    maps = naming.own or load_key_maps(naming.names)
    config: Mapping[str, object] = {} if claim is None else claim.config
    key_map = (None if claim is None else map_of(maps, claim.architecture, claim.config)) or maps.get("*")
    if key_map is None:
        whose = "in the file" if naming.own else f"of {naming.names}"
        kind = config.get("model_type") or (claim and claim.architecture)
        raise UsageError(f"there is no map {whose} for {kind}: there are {', '.join(sorted(maps, key=str.lower))}")
    return key_map.title if claim is None else claim.architecture, key_map, config


def _whole(tensors: Iterable[TensorEntry]) -> dict[str, Mosaic]:
    return {entry.fqn: whole(entry.fqn, entry.dtype, entry.shape) for entry in tensors}


def _named(checkpoint: Checkpoint, found: Converted, known: TensorMap | None, whose: str, resolve: Resolve) -> Named:
    entries = {entry.fqn: entry for entry in checkpoint.tensors}
    entries |= {m.sources[0]: zero_entry(m) for m in found.mosaics.values() if m.is_zeros}
    joined = {
        source
        for mosaic in found.mosaics.values()
        for source in mosaic.sources
        if not mosaic.is_only(entries[source].shape)
    } | {source for pair in found.copies for one in pair for source in one.sources}
    raw = {fqn: resolve(entry) if fqn in joined else entry for fqn, entry in entries.items()}
    tensors = tuple(lay_out(fqn, mosaic, raw) for fqn, mosaic in found.mosaics.items())
    sources = {
        fqn: mosaic.sources[0]
        for fqn, mosaic in found.mosaics.items()
        if mosaic.sources and not mosaic.is_zeros and mosaic.is_only(entries[mosaic.sources[0]].shape)
    }
    copies = tuple(
        (lay_out(one.sources[0], one, raw), lay_out(other.sources[0], other, raw))
        for one, other in found.copies
        if one.pieces
    )
    changed = sum(1 for fqn in found.mosaics if sources.get(fqn) != fqn)
    parts = [f"{changed} of {len(tensors)} tensors are renamed, joined or split"] if changed else []
    if found.aliases and known is not None:
        parts.append(f"tied: {first_few([f'{alias} is {name}' for alias, name in found.aliases.items()], 2)}")
    installed = f"transformers {installed_release('transformers')}"
    if changed and known is not None and known.by not in ("", installed):
        parts.append(
            f"as {known.by} has them" + ("" if installed.endswith("None") else f", and {installed} is installed")
        )
    parts += found.notes
    return Named(
        checkpoint=replace(checkpoint, tensors=tensors),
        sources=sources,
        aliases=found.aliases,
        copies=copies,
        map=known if changed else None,
        apart=tuple(raw[fqn] for fqn in sorted(joined)),
        lost=found.lost,
        left_out=found.notes,
        note=f"names of {escape_name(whose)}: {'; '.join(parts)}" if parts and whose else "",
    )
