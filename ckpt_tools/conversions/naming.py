"""By which names a conversion writes tensors: the file's, the live model's or the hub's; see `maps.convert`.

A map acts on descriptions alone. What it takes apart or joins is moved as views of the source's chunks, and no name is
guessed: with `auto`, tensors that are not certainly those of the architecture keep the names that they have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from ckpt_tools.conversions.check_names import Claim, claim_of
from ckpt_tools.conversions.job import AssetList
from ckpt_tools.description.checkpoint import Checkpoint, TensorEntry
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.formats.manifest import MANIFEST_NAME, TensorMap
from ckpt_tools.maps.convert import Converted, to_hub, to_live
from ckpt_tools.maps.mosaic import Mosaic, invert, lay_out, whole
from ckpt_tools.maps.patterns import matches
from ckpt_tools.maps.table import Expected, load_table
from ckpt_tools.options import Option
from ckpt_tools.text import escape_name, first_few

NamesOption = Annotated[
    Literal["auto", "hub", "live"],
    Option(
        "Names to write: live are those of the model in memory, hub those of its files; "
        "auto is live for shard and hub for gather where the architecture is known, else those that are there.",
    ),
]
Resolve = Callable[[TensorEntry], TensorEntry]
"""Returns a tensor with its chunks on their raw bytes."""
_NO_CONFIG = "no config.json beside the weights names an architecture"


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
    """Return a file's tensors by the names of the live model.

    Raises:
        UsageError: `names` is "live", and it is not certain what they are.
    """
    plain = Named(checkpoint=checkpoint, sources={entry.fqn: entry.fqn for entry in checkpoint.tensors})
    if names == "hub":
        return plain
    try:
        claim, expected = _architecture(assets)
        found = to_live(_whole(checkpoint.tensors), expected, claim.config)
    except (UsageError, UnreadableError) as error:
        if names == "live":
            raise UsageError(
                f"--names live: {error.what}",
                where=error.where or checkpoint.root,
                hint="--names hub keeps the names of the file",
            ) from error
        return plain if error.what == _NO_CONFIG else replace(plain, note=f"names of the file: {error.what}")
    known = TensorMap(architecture=claim.architecture, digest=expected.digest)
    return _named(checkpoint, found, known, f"the live {claim.architecture}", resolve)


def name_hub(checkpoint: Checkpoint, assets: AssetList, names: str, resolve: Resolve) -> Named:
    """Return a live model's tensors by the names of its files, of tied ones only one.

    Raises:
        UsageError: `names` is "hub", and it is not certain what they are.
    """
    plain = Named(checkpoint=checkpoint, sources={entry.fqn: entry.fqn for entry in checkpoint.tensors})
    if names == "live":
        return plain
    try:
        claim, expected = _architecture(assets)
        if not all(matches(expected.names, entry.fqn, expected.counts) for entry in checkpoint.tensors):
            raise UsageError(f"the names are not those of a live {claim.architecture}")  # noqa: TRY301 - one way out
        found = to_hub(_whole(checkpoint.tensors), expected, claim.config)
    except (UsageError, UnreadableError) as error:
        if names == "hub":
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
    claim, expected = _architecture(assets)
    if recorded is not None and (recorded.architecture, recorded.digest) != (claim.architecture, expected.digest):
        raise UsageError(
            f"the names were made by another map than the one that ckpt has for {claim.architecture} now",
            hint=f"gather with the ckpt that wrote it ({MANIFEST_NAME} says which), or remove {MANIFEST_NAME} to go on "
            "without the original files' names",
        )
    there = {entry.fqn: entry for entry in checkpoint.tensors}
    found = to_live(_whole(headers), expected, claim.config)
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


def _architecture(assets: AssetList) -> tuple[Claim, Expected]:
    claim = claim_of(assets)
    if claim is None:
        raise UsageError(_NO_CONFIG)
    expected = load_table().expected(claim.architecture, claim.config)
    if expected is None:
        raise UsageError(f"{claim.architecture} is not known to ckpt")
    return claim, expected


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
