"""Jobs that write a checkpoint as what it is: safetensors, or DCP with the same chunks on the same ranks."""

from __future__ import annotations

from dataclasses import replace

from ckpt_tools.checkpoint.formats.dcp_placing import kept_cells, place
from ckpt_tools.checkpoint.formats.inside import check_sealed, revealed
from ckpt_tools.checkpoint.formats.opening import Opened
from ckpt_tools.checkpoint.transform import find_model
from ckpt_tools.convert.find import model_in, name_again, omitted, with_zeros
from ckpt_tools.convert.job import Job, cast_target, check_whole, notes_on
from ckpt_tools.convert.to_hf import gathering_job
from ckpt_tools.errors import UsageError
from ckpt_tools.models.naming import Named, Naming, name_live
from ckpt_tools.options.adapters import MergeOptions
from ckpt_tools.options.convert import GatherOptions, WritingOptions
from ckpt_tools.text import first_few


def rewrite_job(
    opened: Opened,
    destination: str,
    options: WritingOptions | MergeOptions,
    *,
    only_model: bool = True,
    named: Named | None = None,
) -> Job:
    """Return the job that writes a checkpoint again; what is neither DCP nor safetensors becomes safetensors.

    `only_model` leaves optimizer state and whatever else a trainer keeps out of a DCP checkpoint. Safetensors hold
    nothing but a model anyway.
    """
    own, dtype, dtype_for, limit = None, options.dtype, options.dtype_for, options.max_shard_size
    if named is not None:
        own = {entry.fqn: named.sources.get(entry.fqn, "") for entry in named.checkpoint.tensors}
        check_whole(opened, opened.own_assets, named.checkpoint.tensors, own, named.apart)
        opened = replace(with_zeros(opened, named), checkpoint=named.checkpoint, origin=None)
    if not opened.format.loads_by_dcp:
        gather = GatherOptions(
            opened.source.root,
            destination,
            max_shard_size=limit,
            dtype=dtype,
            dtype_for=dtype_for,
            names="auto" if named is None else "live",
            strip_prefix="auto" if named is None else "none",
        )
        job = gathering_job(opened, gather, before=own)
        return job if named is None else _of_names(job, named)
    if limit is not None:
        what = "--max-shard-size is for safetensors files, and the source is a DCP checkpoint"
        raise UsageError(what, hint="leave it out, and `ckpt gather` the result")
    opened = revealed(opened) if only_model else opened
    check_sealed(opened)
    chosen = replace(find_model(opened.checkpoint)[0], blobs=()) if only_model else opened.checkpoint
    source_checkpoint = replace(chosen, tensors=tuple(map(opened.resolve, chosen.tensors)))
    target, cast = cast_target(opened, source_checkpoint, dtype, dtype_for, {}, opened.own_assets, own)
    cells = {entry.fqn: kept_cells(entry) for entry in target.tensors}
    kept = {entry.fqn for entry in source_checkpoint.tensors}
    placements = opened.checkpoint.placements or {}
    job = Job(
        opened=opened,
        source=source_checkpoint,
        target=place(target.tensors, cells, source_checkpoint.blobs),
        destination=destination,
        assets=opened.own_assets,
        dtype=dtype,
        mesh=opened.checkpoint.mesh,
        placements={fqn: placed for fqn, placed in placements.items() if fqn in kept},
        notes=[*notes_on(opened), *cast, *(omitted(opened.checkpoint, chosen, changed=True) if only_model else ())],
    )
    return job if named is None else _of_names(job, named)


def _of_names(job: Job, named: Named) -> Job:
    """Let a job know what its tensors are called in the source."""
    own = {entry.fqn: named.sources.get(named.aliases.get(entry.fqn, entry.fqn), "") for entry in job.source.tensors}
    placements = job.opened.checkpoint.placements or {}
    job.names, job.apart = own, named.apart
    job.placements = {fqn: placements[name] for fqn, name in own.items() if name in placements}
    job.notes += [named.note] if named.note else []
    return job


def renamed(opened: Opened, naming: Naming) -> Named:
    """Return a model by the names of a key map, tied ones each with its bytes."""
    notes: list[str] = []
    if opened.format.loads_by_dcp:
        named, _ = name_again(opened, naming, notes, choose="`ckpt extract SRC WEIGHTS {}`, and rename WEIGHTS")
    else:
        model, names = model_in(opened, "auto", notes)
        named = name_live(model, opened.own_assets, naming, opened.resolve)
        named = replace(named, sources={new: names.get(old, old) for new, old in named.sources.items()})
    if opened.format.loads_by_dcp and named.apart:
        what = f"the map joins or splits tensors, which are cut: {first_few([entry.fqn for entry in named.apart])}"
        where = opened.source.root
        raise UsageError(what, where=where, hint="`ckpt reshard SRC DST --map FILE --mesh …` cuts them anew")
    entries = {entry.fqn: entry for entry in named.checkpoint.tensors}
    copies = (replace(entries[fqn], fqn=alias, path=()) for alias, fqn in named.aliases.items())
    checkpoint = replace(named.checkpoint, tensors=(*named.checkpoint.tensors, *copies), blobs=())
    note = "; ".join(filter(None, (*notes, named.note)))
    return replace(named, checkpoint=checkpoint, note=note)
