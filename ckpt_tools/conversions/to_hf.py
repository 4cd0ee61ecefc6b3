"""Jobs that end in an HF directory: `gather`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Annotated

from ckpt_tools.conversions.check_names import Ties, ties_in
from ckpt_tools.conversions.job import Job, cast_target, notes_on
from ckpt_tools.description.checkpoint import Asset, Checkpoint, TensorEntry
from ckpt_tools.description.transform import find_model, is_optimizer, rename, select, strip_prefix, strip_wrappers
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.formats import hf, safetensors
from ckpt_tools.formats.file_names import INDEX_SUFFIX, is_weights
from ckpt_tools.formats.manifest import MANIFEST_NAME, Origin
from ckpt_tools.formats.opening import Opened, open_path
from ckpt_tools.maps import origins_of
from ckpt_tools.models.config import CONFIG_NAME
from ckpt_tools.models.naming import AssetList, GatherNames, MapFile, Naming, name_back, name_hub
from ckpt_tools.moving.plan import check_complete
from ckpt_tools.moving.read import read_blocks
from ckpt_tools.options import (
    AnyPath,
    Destination,
    DryRun,
    DTypeName,
    Exclude,
    From,
    Include,
    MaxShardSize,
    NumWorkers,
    Option,
    Overwrite,
    Progress,
    Source as SourcePath,
)
from ckpt_tools.storage.journal import JOURNAL_NAME
from ckpt_tools.storage.source import Source
from ckpt_tools.text import escape_name, first_few
from ckpt_tools.units import parse_size

DEFAULT_MAX_SHARD_SIZE = "5GB"
"""Largest HF file when nothing else says how to split, as in huggingface_hub."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherOptions:
    """The options of `gather`."""

    source: SourcePath = field(kw_only=False)
    destination: Destination = field(kw_only=False)
    max_shard_size: MaxShardSize = None
    dtype: DTypeName = "keep"
    strip_prefix: Annotated[
        str,
        Option(
            "auto finds the model inside a trainer's state and strips wrappers such as _orig_mod.",
            metavar="auto|none|PFX",
        ),
    ] = "auto"
    assets: Annotated[AnyPath | None, Option("Config, tokenizer, … to put beside the weights.", metavar="DIR")] = None
    like: Annotated[AnyPath | None, Option("Restore this model's names, order, files and dtypes.", metavar="REF")] = (
        None
    )
    include: Include = ()
    exclude: Exclude = ()
    names: GatherNames = "auto"
    map: MapFile = None
    allow_foreign_names: Annotated[
        bool, Option("Write names that the architecture in config.json does not have, or not all of its names.")
    ] = False
    overwrite: Overwrite = False
    dry_run: DryRun = False
    num_workers: NumWorkers = None
    format: From = None
    progress: Progress = None


def gathering_job(
    opened: Opened, options: GatherOptions, *, assets: AssetList | None = None, like: Opened | None = None
) -> Job:
    """Return the job that writes `opened` as full safetensors.

    The first of these decides on names, order and files: `like`; the original that the source's manifest
    remembers, when no option asks for something else; `max_shard_size`.
    """
    destination, dtype, strip = os.fspath(options.destination), options.dtype, options.strip_prefix
    include, exclude = options.include, options.exclude
    if destination.endswith(".safetensors"):
        raise UsageError(
            "the destination is a directory of safetensors files, its name should not end in .safetensors",
            where=destination,
            hint=f"ckpt gather … {destination.removesuffix('.safetensors')}",
        )
    naming = Naming.of(options.names, options.map)
    notes = notes_on(opened)
    original = opened.origin
    plain = dtype == "keep" and options.max_shard_size is None and not include and not exclude and strip == "auto"
    plain = plain and options.names != "live"
    if like is not None:
        if like.origin is None or not plain:
            raise UsageError(
                "--like decides on names, files and dtypes by itself",
                hint="leave out --dtype, --max-shard-size, --strip-prefix, --names, --include and --exclude",
            )
        model, names = model_in(opened, strip, notes)
        return _restore(
            *(opened, model, names, like.origin, destination),
            *(_assets(opened, assets or assets_of(like)), notes, naming),
            is_reference=True,
        )
    if plain and original is not None:
        names = {fqn[len(original.prefix) :]: fqn for fqn in (e.fqn for e in opened.checkpoint.tensors)}
        model = rename(opened.checkpoint, strip_prefix((e.fqn for e in opened.checkpoint.tensors), original.prefix))
        return _restore(opened, model, names, original, destination, _assets(opened, assets), notes, naming)
    chosen = replace(opened, checkpoint=select(opened.checkpoint, include=include, exclude=exclude))
    model, names = model_in(chosen, strip, notes)
    beside = _assets(opened, assets)
    if naming.names == "auto" and not opened.format.is_training:
        naming = Naming(names="live")
    named = name_hub(model, beside, naming, opened.resolve)
    _check_tied(named.aliases, model, opened)
    if named.note:
        notes.append(named.note)
    source = replace(named.checkpoint, tensors=tuple(map(opened.resolve, named.checkpoint.tensors)), blobs=())
    target = cast_target(source, dtype)
    files = hf.arrange(target.tensors, max_file_nbytes=parse_size(options.max_shard_size or DEFAULT_MAX_SHARD_SIZE))
    placed, heads = hf.place(files)
    documents = {"model" + INDEX_SUFFIX: hf.build_index(files)} if len(files) > 1 else {}
    return Job(
        opened=opened,
        source=source,
        target=placed,
        destination=destination,
        heads=heads,
        documents=documents,
        assets=beside,
        dtype=dtype,
        names={fqn: names.get(own, own) for fqn, own in named.sources.items()}
        | {entry.fqn: "" for entry in source.tensors if entry.fqn not in named.sources},
        apart=_as_stored(named.apart, names),
        notes=notes,
    )


def _as_stored(apart: Iterable[TensorEntry], names: Mapping[str, str]) -> tuple[TensorEntry, ...]:
    """Return tensors by the names that they have in the source."""
    return tuple(replace(entry, fqn=names.get(entry.fqn, entry.fqn)) for entry in apart)


def _check_tied(aliases: Mapping[str, str], model: Checkpoint, opened: Opened) -> None:
    """Refuse to leave out a name of tied weights when its bytes are others.

    Raises:
        UsageError: They are: the model was trained with two tensors where its config says one.
    """
    entries = {entry.fqn: entry for entry in model.tensors}
    for alias, name in aliases.items():
        if not _is_same(entries[alias], entries[name], opened, tied=True):
            raise UsageError(
                f"{alias!r} and {name!r} are one tensor by the config, and differ in the checkpoint",
                where=opened.source.root,
                hint=f"is tie_word_embeddings in {CONFIG_NAME} what was trained? --names live writes both",
            )


def model_in(opened: Opened, strip: str, notes: list[str]) -> tuple[Checkpoint, dict[str, str]]:
    """Return the model's tensors under their plain names, and {plain name: name in the source}.

    `strip` is what `--strip-prefix` says; what is left out is added to `notes`.

    Raises:
        UsageError: No tensor has the prefix that is to be stripped.
        UnreadableError: There is no model.
    """
    checkpoint = opened.checkpoint
    if strip == "none" or (strip == "auto" and not opened.format.is_training):
        model = replace(checkpoint, blobs=())
        new_name: Callable[[str], str] = str
    elif strip == "auto":
        model, prefix = find_model(checkpoint)
        recorded = opened.origin.prefix if opened.origin is not None else ""
        if recorded and all(entry.fqn.startswith(recorded) for entry in model.tensors):
            prefix = recorded  # what `shard --prefix` put there need not be guessed
        stripped = strip_prefix((strip_wrappers(entry.fqn) for entry in model.tensors), prefix)

        def new_name(fqn: str) -> str:
            return stripped(strip_wrappers(fqn))

        if prefix:
            notes.append(f"stripped the prefix {escape_name(prefix)!r} (--strip-prefix none keeps it)")
    else:
        prefix = strip if strip.endswith(".") else strip + "."
        inside = tuple(entry for entry in checkpoint.tensors if entry.fqn.startswith(prefix))
        if not inside:
            raise UsageError(
                f"no tensor begins with {prefix!r}",
                hint="`ckpt inspect SRC` shows the prefixes; --strip-prefix auto finds the model's",
            )
        model = replace(checkpoint, tensors=inside, blobs=())
        new_name = strip_prefix((entry.fqn for entry in inside), prefix)
    notes += _omitted(checkpoint, model)
    if checkpoint.blobs:
        notes.append(f"left out {len(checkpoint.blobs)} non-tensor items, which safetensors cannot hold")
    if not model.tensors:
        raise UnreadableError(
            "the checkpoint holds no model tensors",
            where=checkpoint.root,
            hint="`ckpt inspect SRC --tensors` lists what it holds; --strip-prefix PFX chooses a part of it",
        )
    renamed = rename(model, new_name)
    names = {new.fqn: old.fqn for new, old in zip(renamed.tensors, model.tensors, strict=True)}
    return renamed, names


def _omitted(checkpoint: Checkpoint, model: Checkpoint) -> list[str]:
    """Say which tensors of `checkpoint` are not in `model`."""
    kept = {entry.fqn for entry in model.tensors}
    omitted = [entry for entry in checkpoint.tensors if entry.fqn not in kept]
    others = [entry.fqn for entry in omitted if not is_optimizer(entry)]
    notes = []
    if len(omitted) > len(others):
        notes.append(f"left out {len(omitted) - len(others)} tensors of optimizer state")
    if others:
        notes.append(f"left out {len(others)} tensors that are not the model's: {first_few(others)}")
    return notes


def _restore(
    opened: Opened,
    model: Checkpoint,
    names: Mapping[str, str],
    origin: Origin,
    destination: str,
    assets: AssetList,
    notes: list[str],
    naming: Naming,
    *,
    is_reference: bool = False,
) -> Job:
    """Return the job that writes the very files that `origin` remembers; the model must have the same tensors."""
    by_fqn = {entry.fqn: entry for entry in model.tensors}
    placed: list[TensorEntry] = []
    heads: dict[str, bytes] = {}
    sizes: dict[str, int] = {}
    for name, text in origin.headers.items():
        raw = text.encode()
        header = safetensors.parse_header(raw, file=name, file_nbytes=None)
        heads[name] = len(raw).to_bytes(safetensors.LENGTH_BYTES, "little") + raw
        sizes[name] = header.nbytes
        placed += header.tensors
    apart: tuple[TensorEntry, ...] = ()
    if origin.map is not None or (is_reference and not by_fqn.keys() >= {entry.fqn for entry in placed}):
        model, names, apart = _turned_back(opened, model, names, placed, assets, origin, naming)
        by_fqn = {entry.fqn: entry for entry in model.tensors}
    wanted = {entry.fqn: entry for entry in placed}
    if len(wanted) != len(placed):
        raise UnreadableError(
            "the headers that are to be restored have a tensor twice",
            where=opened.source.root,
            hint=f"remove {MANIFEST_NAME} to write files of another arrangement",
        )
    _leave_out_twins(wanted, by_fqn, opened, ties_in(assets), notes)
    _same_keys(wanted, by_fqn)
    for fqn, entry in wanted.items():
        own = by_fqn[fqn]
        castable = own.dtype == entry.dtype or (own.dtype.is_float and entry.dtype.is_float)
        if own.shape != entry.shape or not castable:
            raise UsageError(
                f"tensor {fqn!r} is {own.dtype.name} {list(own.shape)}, "
                f"the reference has {entry.dtype.name} {list(entry.shape)}",
                hint="is it a reference of this model?",
            )
    documents = {}
    if origin.index_name is not None and origin.index_text is not None:
        documents[origin.index_name] = origin.index_text.encode()
    source = replace(
        model,
        tensors=tuple(opened.resolve(entry) for entry in model.tensors if entry.fqn in wanted),
        blobs=(),
    )
    return Job(
        opened=opened,
        source=source,
        target=Checkpoint(root="", format=hf.FORMAT.name, tensors=tuple(placed), files=sizes),
        destination=destination,
        heads=heads,
        documents=documents,
        assets=assets,
        names=names,
        apart=apart,
        notes=notes,
    )


def _turned_back(
    opened: Opened,
    model: Checkpoint,
    names: Mapping[str, str],
    headers: Sequence[TensorEntry],
    assets: AssetList,
    origin: Origin,
    naming: Naming,
) -> tuple[Checkpoint, Mapping[str, str], tuple[TensorEntry, ...]]:
    """Return a live model's tensors as those of some files, their names in the source, and what is written in parts."""
    try:
        named = name_back(model, headers, assets, origin.map, naming, opened.resolve)
    except UsageError:
        if origin.map is not None or naming.own:
            raise
        return model, names, ()
    found = {entry.fqn: "" for entry in named.checkpoint.tensors}
    found |= {fqn: names.get(own, own) for fqn, own in named.sources.items()}
    return named.checkpoint, found, _as_stored(named.apart, names)


def _leave_out_twins(
    wanted: Mapping[str, TensorEntry], found: dict[str, TensorEntry], opened: Opened, ties: Ties, notes: list[str]
) -> None:
    """Remove from `found` what the reference has under another name only: tied weights, proven by their bytes."""
    kept = [entry for fqn, entry in found.items() if fqn in wanted]
    for fqn, entry in [(fqn, entry) for fqn, entry in found.items() if fqn not in wanted]:
        alike = [other for other in kept if (other.shape, other.dtype) == (entry.shape, entry.dtype)]
        twin = next((other for other in alike if _is_same(entry, other, opened, ties(entry.fqn, other.fqn))), None)
        if twin is not None:
            del found[fqn]
            notes.append(f"left out {escape_name(fqn)!r}: it is {escape_name(twin.fqn)!r}, byte for byte")


def _is_same(one: TensorEntry, other: TensorEntry, opened: Opened, tied: bool) -> bool:
    """Are the bytes the same? Tensors of one value everywhere (zeros, ones) prove nothing unless the names are tied."""
    for entry in (one, other):
        check_complete(entry)
    if [(c.box, c.span) for c in one.chunks] == [(c.box, c.span) for c in other.chunks]:
        return True  # two names of one item
    itemsize = max(1, one.dtype.num_bytes(1))
    left, right = (read_blocks(opened.resolve(entry), opened.source) for entry in (one, other))
    first: bytes | None = None
    varies = False
    for pair in zip_longest(left, right):
        if None in pair or pair[0][1] != pair[1][1]:
            return False
        content = pair[0][1]
        first = bytes(content[:itemsize]) if first is None else first
        varies = varies or content != memoryview(first * (len(content) // itemsize))
    return varies or (tied and first is not None)


def _same_keys(wanted: Mapping[str, TensorEntry], found: Mapping[str, TensorEntry]) -> None:
    missing = [fqn for fqn in wanted if fqn not in found]
    extra = [fqn for fqn in found if fqn not in wanted]
    if not missing and not extra:
        return
    parts = []
    if missing:
        parts.append(f"lacks {len(missing)} tensors of the reference ({first_few(missing)})")
    if extra:
        parts.append(f"has {len(extra)} that the reference does not have ({first_few(extra)})")
    owners = origins_of(extra)
    if owners:
        parts[-1] += f", names that are {owners[0].what}"
    raise UsageError(
        "the checkpoint " + " and ".join(parts),
        hint="is it a reference of this model? `ckpt diff --keys-only` lists the names; "
        "--assets REF instead of --like REF keeps the checkpoint's own names where the architecture has them",
    )


def _assets(opened: Opened, others: AssetList | None) -> AssetList:
    """Return the assets to carry along: `others` before the source's own of the same name."""
    chosen = {asset.file: (source, asset) for source, asset in (*assets_of(opened), *(others or ()))}
    return [chosen[name] for name in sorted(chosen)]


def assets_of(opened: Opened) -> AssetList:
    """Return the assets of an open checkpoint."""
    return [(opened.source, asset) for asset in opened.checkpoint.assets]


def model_beside(path: str, stack: ExitStack) -> tuple[AssetList, Opened | None]:
    """Return the files of a directory that hold no weights, and the model that lies there with them, if any."""
    try:
        opened = stack.enter_context(open_path(path))
    except UnreadableError:
        return assets_in(stack.enter_context(Source(path))), None
    return assets_in(opened.source), opened


def assets_in(source: Source) -> AssetList:
    """Return the files of a directory that hold no weights."""
    return [
        (source, Asset(file=name, nbytes=size))
        for name, size in source.list_files().items()
        if not is_weights(name) and name not in (MANIFEST_NAME, JOURNAL_NAME)
    ]
