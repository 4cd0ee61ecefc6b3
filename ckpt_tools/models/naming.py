"""By which names a conversion writes tensors: the file's, the live model's or the hub's; see `maps.convert`.

A map acts on descriptions alone. What it takes apart or joins is moved as views of the source's chunks, and no name is
guessed: with `auto`, tensors that are not certainly those of the architecture keep the names that they have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from ckpt_tools.description.checkpoint import Asset, Checkpoint, TensorEntry
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.formats.manifest import MANIFEST_NAME, TensorMap
from ckpt_tools.maps.convert import Converted, to_hub, to_live
from ckpt_tools.maps.keymap import KeyMap, load_key_maps
from ckpt_tools.maps.mosaic import Mosaic, invert, lay_out, whole
from ckpt_tools.maps.patterns import matches
from ckpt_tools.maps.table import Expected, load_table
from ckpt_tools.models.config import CONFIG_NAME, config_in
from ckpt_tools.options import Option
from ckpt_tools.storage.source import Source
from ckpt_tools.text import escape_name, first_few

AssetList = Sequence[tuple[Source, Asset]]
"""Files that belong to a model and hold no weights, and where from."""
ShardNames = Annotated[
    Literal["auto", "hub", "live", "torchtitan"],
    Option(
        "Names to write: live are those of the model in memory, hub those of its files; "
        "auto is live where the architecture is known, else the file's."
    ),
]
GatherNames = Annotated[
    Literal["auto", "hub", "live"],
    Option("Names to write: auto is hub where the architecture is known; live are those that are there."),
]
Resolve = Callable[[TensorEntry], TensorEntry]
"""Returns a tensor with its chunks on their raw bytes."""
CONVENTIONS = ("torchtitan",)
"""Names that are neither the hub's nor transformers'; see `maps.keymap`."""
_NO_CONFIG = "no config.json beside the weights names an architecture"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a file beside the weights says that they are."""

    architecture: str
    config: Mapping[str, object]
    source: Source
    """Where that file lies."""


def claim_of(assets: AssetList) -> Claim | None:
    """Return what the config.json among `assets` names; None when nothing does.

    Raises:
        UnreadableError: It is not a JSON object, or too long.
    """
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

    checkpoint: Checkpoint
    """Chunks are raw where tensors were taken apart or joined."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Name → name in the source, of what is one tensor of the source as it is."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further name of a tensor → its name in the checkpoint; of `name_hub`, those that are left out, in the source."""
    map: TensorMap | None = None
    """What brought the names about; None where none changed."""
    apart: tuple[TensorEntry, ...] = ()
    """Tensors of the source that are joined or split; what is recorded of them holds for none that is written."""
    note: str = ""
    """What was done, for people; empty for nothing."""


def name_live(checkpoint: Checkpoint, assets: AssetList, names: str, resolve: Resolve) -> Named:
    """Return a file's tensors by the names of the live model, or of a convention.

    Raises:
        UsageError: `names` asks for them, and it is not certain what they are.
    """
    plain = Named(checkpoint=checkpoint, sources={entry.fqn: entry.fqn for entry in checkpoint.tensors})
    if names == "hub":
        return plain
    try:
        known, found = _forward(checkpoint.tensors, assets, names)
    except (UsageError, UnreadableError) as error:
        if names != "auto":
            raise UsageError(
                f"--names {names}: {error.what}",
                where=error.where or checkpoint.root,
                hint="--names hub keeps the names of the file",
            ) from error
        return plain if error.what == _NO_CONFIG else replace(plain, note=f"names of the file: {error.what}")
    whose = f"{names}'s {known.architecture}" if names in CONVENTIONS else f"the live {known.architecture}"
    return _named(checkpoint, found, known, whose, resolve)


def name_hub(checkpoint: Checkpoint, assets: AssetList, names: str, resolve: Resolve) -> Named:
    """Return a live model's tensors by the names of its files, of tied ones only one.

    Raises:
        UsageError: `names` is "hub", and it is not certain what they are.
    """
    plain = Named(checkpoint=checkpoint, sources={entry.fqn: entry.fqn for entry in checkpoint.tensors})
    if names == "live":
        return plain
    try:
        claim = _claim(assets)
        found = _backward(checkpoint.tensors, claim)
    except (UsageError, UnreadableError) as error:
        if names == "hub" and not _is_hub(checkpoint, assets):
            raise UsageError(
                f"--names hub: {error.what}",
                where=error.where or checkpoint.root,
                hint="--names live writes the names that are there",
            ) from error
        return plain
    return _named(checkpoint, found, None, f"{claim.architecture} on the hub", resolve)


def name_back(
    checkpoint: Checkpoint,
    headers: Sequence[TensorEntry],
    assets: AssetList,
    recorded: TensorMap | None,
    resolve: Resolve,
) -> Named:
    """Return live tensors as those of the files that they came from: the same map, turned around.

    Args:
        checkpoint: By the names of the live model.
        headers: What the files hold.
        assets: Files beside them, with the model's config.
        recorded: What the manifest says of the map; None for a reference.
        resolve: Returns a tensor with raw chunks.

    Raises:
        UsageError: They are not what the map made of those files, or it is another map.
    """
    known, found = _forward(headers, assets, "live" if recorded is None else recorded.names)
    if recorded is not None and recorded != known:
        raise UsageError(
            f"the names were made by another map than the one that ckpt has for {known.architecture} now",
            hint=f"gather with the ckpt that wrote it ({MANIFEST_NAME} says which), or remove {MANIFEST_NAME} to go on "
            "without the original files' names",
        )
    there = {entry.fqn: entry for entry in checkpoint.tensors}
    live = {name: mosaic for name, mosaic in found.mosaics.items() if name in there}
    for name, mosaic in live.items():
        if there[name].shape != mosaic.shape:
            raise UsageError(f"tensor {name!r} is {list(there[name].shape)}, the map makes {list(mosaic.shape)} of it")
    used = {source for mosaic in live.values() for source in mosaic.sources}
    try:
        back = invert(live, {entry.fqn: entry.shape for entry in headers if entry.fqn in used})
    except ValueError as error:
        raise UsageError(f"the tensors are not what the map makes of the files: {error}") from error
    for fqn, mosaic in back.items():
        back[fqn] = replace(mosaic, dtype=there[mosaic.sources[0]].dtype)
    rest = _whole(entry for entry in checkpoint.tensors if entry.fqn not in live and entry.fqn not in back)
    return _named(checkpoint, Converted(mosaics={**back, **rest}), None, "", resolve)


def _forward(tensors: Iterable[TensorEntry], assets: AssetList, names: str) -> tuple[TensorMap, Converted]:
    """Return by which map tensors of the hub get these names, and what they become."""
    claim = _claim(assets)
    if names in CONVENTIONS:
        key_map = _key_map(names, claim)
        mosaics, aliases = key_map.forward(_whole(tensors), claim.config)
        known = TensorMap(names=names, architecture=claim.architecture, digest=key_map.digest)
        return known, Converted(mosaics=mosaics, aliases=aliases)
    expected = _expected(claim)
    known = TensorMap(names="live", architecture=claim.architecture, digest=expected.digest)
    return known, to_live(_whole(tensors), expected, claim.config)


def _backward(tensors: Sequence[TensorEntry], claim: Claim) -> Converted:
    """Return the hub's tensors of those of a live model or of a convention; of neither, an error says so."""
    fqns = [entry.fqn for entry in tensors]
    for convention in CONVENTIONS:
        key_map = load_key_maps(convention).get(str(claim.config.get("model_type")))
        if key_map is not None and key_map.knows(fqns):
            mosaics, left_out = key_map.backward(_whole(tensors), claim.config)
            return Converted(mosaics=mosaics, aliases=left_out)
    expected = _expected(claim)
    if not all(matches(expected.names, fqn, expected.counts) for fqn in fqns):
        raise UsageError(f"the names are not those of a live {claim.architecture}")
    return to_hub(_whole(tensors), expected, claim.config)


def _is_hub(checkpoint: Checkpoint, assets: AssetList) -> bool:
    """Are they the hub's tensors already?"""
    try:
        _forward(checkpoint.tensors, assets, "live")
    except (UsageError, UnreadableError):
        return False
    return True


def _claim(assets: AssetList) -> Claim:
    claim = claim_of(assets)
    if claim is None:
        raise UsageError(_NO_CONFIG)
    return claim


def _expected(claim: Claim) -> Expected:
    expected = load_table().expected(claim.architecture, claim.config)
    if expected is None:
        raise UsageError(f"{claim.architecture} is not known to ckpt")
    return expected


def _key_map(convention: str, claim: Claim) -> KeyMap:
    maps, model_type = load_key_maps(convention), str(claim.config.get("model_type"))
    if model_type not in maps:
        raise UsageError(f"there is no map of {convention} for {model_type}: there are {', '.join(sorted(maps))}")
    return maps[model_type]


def _whole(tensors: Iterable[TensorEntry]) -> dict[str, Mosaic]:
    return {entry.fqn: whole(entry.fqn, entry.dtype, entry.shape) for entry in tensors}


def _named(checkpoint: Checkpoint, found: Converted, known: TensorMap | None, whose: str, resolve: Resolve) -> Named:
    entries = {entry.fqn: entry for entry in checkpoint.tensors}
    joined = {
        source
        for mosaic in found.mosaics.values()
        for source in mosaic.sources
        if not mosaic.is_only(entries[source].shape)
    }
    raw = {fqn: resolve(entry) if fqn in joined else entry for fqn, entry in entries.items()}
    tensors = tuple(lay_out(fqn, mosaic, raw) for fqn, mosaic in found.mosaics.items())
    sources = {
        fqn: mosaic.sources[0]
        for fqn, mosaic in found.mosaics.items()
        if mosaic.is_only(entries[mosaic.sources[0]].shape)
    }
    changed = sum(1 for fqn in found.mosaics if sources.get(fqn) != fqn)
    parts = [f"{changed} of {len(tensors)} tensors are renamed, joined or split"] if changed else []
    if found.aliases and known is not None:
        parts.append(f"tied: {first_few([f'{alias} is {name}' for alias, name in found.aliases.items()], 2)}")
    return Named(
        checkpoint=replace(checkpoint, tensors=tensors),
        sources=sources,
        aliases=found.aliases,
        map=known if changed else None,
        apart=tuple(raw[fqn] for fqn in sorted(joined)),
        note=f"names of {escape_name(whose)}: {'; '.join(parts)}" if parts and whose else "",
    )
