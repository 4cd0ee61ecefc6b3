"""Jobs that end in an HF directory: `gather`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from ckpt_tools.checkpoint.entries import Checkpoint, TensorEntry
from ckpt_tools.checkpoint.formats import hf, safetensors, torch_directory
from ckpt_tools.checkpoint.formats.blob_contents import revealed
from ckpt_tools.checkpoint.formats.file_names import INDEX_SUFFIX, PICKLES
from ckpt_tools.checkpoint.formats.manifest import MANIFEST_NAME, Origin
from ckpt_tools.checkpoint.formats.opening import Opened
from ckpt_tools.checkpoint.names import origins_of, single_files
from ckpt_tools.checkpoint.transform import rename, select, strip_prefix
from ckpt_tools.convert.check_names import Ties, ties_in
from ckpt_tools.convert.find_model import as_stored, check_copies, differences, is_same, leave_out, model_in
from ckpt_tools.convert.job import Job, cast_target, check_whole, notes_on
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.models.config import CONFIG_NAME, config_in
from ckpt_tools.models.output_names import AssetList, Naming, name_back, name_hub
from ckpt_tools.options.convert import GatherOptions
from ckpt_tools.text import counted, escape_name, first_few
from ckpt_tools.transfer.plan import Seal


def gathering_job(
    opened: Opened,
    options: GatherOptions,
    *,
    assets: AssetList | None = None,
    like: Opened | None = None,
    before: Mapping[str, str] | None = None,
) -> Job:
    """Return the job that writes `opened` as full safetensors.

    The first of these decides on names, order and files: `like`; the original that the source's manifest
    remembers, when no option asks for something else; `max_shard_size`. `before` is as of `cast_target`.
    """
    destination, dtype, strip = os.fspath(options.destination), options.dtype, options.strip_prefix
    opened = revealed(opened, strip)
    companions = opened.own_assets if assets is None else assets
    include, exclude = options.include, options.exclude
    stem, suffix = os.path.splitext(destination)
    if suffix in (".safetensors", *PICKLES):
        what = f"the destination becomes a directory, so its name should not end in {suffix}"
        raise UsageError(what, where=destination, hint=f"ckpt gather … {stem}")
    naming = Naming.of(options.names, options.map)
    notes = notes_on(opened)
    original = opened.origin
    is_cast = dtype != "keep" or bool(options.dtype_for)
    plain = not is_cast and options.max_shard_size is None and not include and not exclude and strip == "auto"
    plain = plain and options.names != "live" and options.to == "safetensors"
    if naming.names not in ("auto", "hub") and not (opened.format.is_sharded and original and original.map):
        original = None  # these files' own names, which are to change
    if like is not None:
        if like.origin is None or not plain:
            decided = ("to", "dtype", "dtype_for", "max_shard_size", "strip_prefix", "names", "include", "exclude")
            plainly = GatherOptions(options.source, options.destination)
            given = [name.replace("_", "-") for name in decided if getattr(options, name) != getattr(plainly, name)]
            hint = f"leave out --{', --'.join(given)}" if given else "--like needs a model in safetensors files"
            raise UsageError("--like already sets names, files and dtypes", hint=hint)
        model, names = model_in(opened, strip, notes)
        return _restore(
            *(opened, model, names, like.origin, destination), *(companions, notes, naming), is_reference=True
        )
    if plain and original is not None:
        names = {fqn[len(original.prefix) :]: fqn for fqn in (e.fqn for e in opened.checkpoint.tensors)}
        model = rename(opened.checkpoint, strip_prefix((e.fqn for e in opened.checkpoint.tensors), original.prefix))
        return _restore(opened, model, names, original, destination, companions, notes, naming)
    if naming.names == "auto" and not opened.format.is_training:
        naming = Naming(names="live")
    shown = written_names(opened, strip, companions, naming) if include or exclude else {}
    chosen = replace(opened, checkpoint=select(opened.checkpoint, include=include, exclude=exclude, also=shown))
    model, names = model_in(chosen, strip, notes)
    named = leave_out(name_hub(model, companions, naming, opened.resolve), model, opened)
    warnings = differences(named, opened, companions, notes)
    if named.note:
        notes.append(named.note)
    read = map(opened.resolve, opened.ahead(named.checkpoint.tensors))
    source = replace(named.checkpoint, tensors=tuple(read), blobs=())
    own = {fqn: names.get(own, own) for fqn, own in named.sources.items()}
    own |= {entry.fqn: "" for entry in source.tensors if entry.fqn not in named.sources}
    apart = as_stored(named.apart, names)
    check_whole(opened, companions, source.tensors, own, apart)
    target, cast = cast_target(opened, source, dtype, options.dtype_for, own, companions, before)
    notes += cast
    heads: dict[str, bytes]
    seals: dict[str, Seal] = {}
    if options.to == "torch":
        name, largest = torch_directory.STEM, options.max_file_nbytes
        files = hf.arrange(target.tensors, max_file_nbytes=largest, stem=name, suffix=".bin")
        placed, frames = torch_directory.place(files)
        heads = {name: frame.before for name, frame in frames.items()}
        seals = {name: frame.seal for name, frame in frames.items()}
        documents = hf.documents(files, name + torch_directory.INDEX_SUFFIX)
    else:
        name = _stem(companions, naming)
        files = hf.arrange(target.tensors, max_file_nbytes=options.max_file_nbytes, stem=name)
        placed, heads = hf.place(files)
        documents = hf.documents(files, name + INDEX_SUFFIX)
    return Job(
        opened=opened,
        source=source,
        target=placed,
        destination=destination,
        heads=heads,
        seals=seals,
        documents=documents,
        assets=companions,
        dtype=dtype,
        names=own,
        apart=apart,
        notes=notes,
        warnings=warnings,
    )


def written_names(opened: Opened, strip: str, assets: AssetList, naming: Naming) -> dict[str, list[str]]:
    """Return the hub's names of tensors, as far as the whole has them: a choice may be what makes that possible."""
    found: dict[str, list[str]] = {}
    with suppress(UsageError, UnreadableError):
        model, names = model_in(opened, strip, [])
        for name, own in name_hub(model, assets, naming, opened.resolve).sources.items():
            found.setdefault(names.get(own, own), []).append(name)
    return found


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
        model, names, apart = _turned_back(opened, model, names, placed, assets, origin, naming, notes)
        by_fqn = {entry.fqn: entry for entry in model.tensors}
    wanted = {entry.fqn: entry for entry in placed}
    if len(wanted) != len(placed):
        what = "the headers that are to be restored have a tensor twice"
        where = opened.source.root
        raise UnreadableError(what, where=where, hint=f"remove {MANIFEST_NAME} to write files of another arrangement")
    _leave_out_twins(wanted, by_fqn, opened, ties_in(assets), notes)
    _same_keys(wanted, by_fqn, is_reference=is_reference)
    for fqn, entry in wanted.items():
        own = by_fqn[fqn]
        castable = own.dtype == entry.dtype or (own.dtype.is_float and entry.dtype.is_float)
        if own.shape != entry.shape or not castable:
            here, there = (f"{each.dtype.name} {list(each.shape)}" for each in (own, entry))
            what = f"tensor {fqn!r} is {here}, the reference has {there}"
            raise UsageError(what, hint="is it a reference of this model?")
    documents = {}
    if origin.index_name is not None and origin.index_text is not None:
        documents[origin.index_name] = origin.index_text.encode()
        if set(hf.parse_index(documents[origin.index_name], where=MANIFEST_NAME).values()) - sizes.keys():
            what = "the index that is to be restored names other files than its headers"
            hint = f"remove {MANIFEST_NAME} to write files of another arrangement"
            raise UnreadableError(what, where=opened.source.root, hint=hint)
    kept = opened.ahead(entry for entry in model.tensors if entry.fqn in wanted)
    source = replace(model, tensors=tuple(map(opened.resolve, kept)), blobs=())
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
    notes: list[str],
) -> tuple[Checkpoint, Mapping[str, str], tuple[TensorEntry, ...]]:
    """Return a live model's tensors as those of some files, their names in the source, and what is written in parts."""
    try:
        named = name_back(model, headers, assets, origin.map, naming, opened.resolve)
    except UsageError:
        if origin.map is not None or naming.own:
            raise
        return model, names, ()
    check_copies(named, opened)
    notes += [named.note] if named.note else []
    found = {entry.fqn: "" for entry in named.checkpoint.tensors}
    found |= {fqn: names.get(own, own) for fqn, own in named.sources.items()}
    return named.checkpoint, found, as_stored(named.apart, names)


def _leave_out_twins(
    wanted: Mapping[str, TensorEntry], found: dict[str, TensorEntry], opened: Opened, ties: Ties, notes: list[str]
) -> None:
    """Remove from `found` what the reference has under another name only: tied weights, proven by their bytes."""
    kept = [entry for fqn, entry in found.items() if fqn in wanted]
    for fqn, entry in [(fqn, entry) for fqn, entry in found.items() if fqn not in wanted]:
        alike = [other for other in kept if (other.shape, other.dtype) == (entry.shape, entry.dtype)]
        twin = next((other for other in alike if is_same(entry, other, opened, ties(entry.fqn, other.fqn))), None)
        if twin is not None:
            del found[fqn]
            notes.append(f"left out {escape_name(fqn)!r}: it is {escape_name(twin.fqn)!r}, byte for byte")


def _same_keys(wanted: Mapping[str, TensorEntry], found: Mapping[str, TensorEntry], *, is_reference: bool) -> None:
    missing = [fqn for fqn in wanted if fqn not in found]
    extra = [fqn for fqn in found if fqn not in wanted]
    if not missing and not extra:
        return
    parts = []
    if missing:
        parts.append(f"does not have {counted(len(missing), 'tensor')} of the reference ({first_few(missing)})")
    if extra:
        parts.append(f"has {len(extra)} that the reference does not have ({first_few(extra)})")
    owners = origins_of(extra)
    if owners:
        parts[-1] += f", names that are {owners[0].what}"
    hint = "is it one of this model? `ckpt diff --keys-only` lists the names; --assets REF keeps the source's own"
    hint = hint if is_reference else f"remove {MANIFEST_NAME}, which records the reference, to write what is there"
    raise UsageError("the checkpoint " + " and ".join(parts), hint=hint)


def _stem(assets: AssetList, naming: Naming) -> str:
    """Return what loaders call the weights: diffusers looks for a name of its own."""
    if naming.names == single_files.CONVENTION:
        return "diffusion_pytorch_model"
    source = next((source for source, asset in assets if asset.file == CONFIG_NAME), None)
    with suppress(UnreadableError):
        if source is not None and "_class_name" in config_in(source).values:
            return "diffusion_pytorch_model"
    return "model"
