"""Jobs that end in a trainer's own layout: whole training steps, and what `--for TRAINER` asks for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

from ckpt_tools.checkpoint.entries import Checkpoint
from ckpt_tools.checkpoint.formats import hf, step as steps_format
from ckpt_tools.checkpoint.formats.blob_contents import check_sealed, revealed
from ckpt_tools.checkpoint.formats.file_names import is_weights
from ckpt_tools.checkpoint.formats.judge_step import StepVerdict
from ckpt_tools.checkpoint.formats.manifest import TensorRecord
from ckpt_tools.checkpoint.formats.opening import Opened
from ckpt_tools.checkpoint.formats.repositories import FILES_NAME
from ckpt_tools.checkpoint.formats.step import OpenedStep, judge, judge_path, refuse_mixed
from ckpt_tools.checkpoint.formats.step_layouts import TrainerLayout, dataloader_ranks, trainer_layout
from ckpt_tools.checkpoint.identity import TrainerName
from ckpt_tools.checkpoint.layout import Layout, Mesh
from ckpt_tools.checkpoint.names import origins_of
from ckpt_tools.convert.find_model import model_in, name_again
from ckpt_tools.convert.job import PART_NOTE, Job
from ckpt_tools.convert.to_mesh import find_layout, resharding_job, sharding_job
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.models.config import config_beside
from ckpt_tools.models.output_names import Named, Naming
from ckpt_tools.options import parameters
from ckpt_tools.options.convert import ConvertOptions, GatherOptions
from ckpt_tools.text import counted, first_few

_OTHER_LIBRARIES = ("torchtitan", "megatron", "nanotron", "gguf")
"""Codes of names that no model of transformers or diffusers has, adapted or wrapped."""

_OF_ONE_MODEL = (
    *("prefix", "include", "exclude", "dtype_for", "map", "trainer", "like", "assets", "strip_prefix", "part"),
    *("keep_precision", "shapes_from", "rules", "set", "tp_plan"),
)
"""Options that say something of one model's names, files or shape."""
_OF_FILES = ("max_shard_size", "to", "quantize", "dequantize", "names")
"""Options of `gather` under which a model would not be one file in a directory of others, or not of the bytes there."""


def layout_for(trainer: TrainerName, *, names: str, prefix: str, source: str) -> TrainerLayout:
    """Return what `--for` writes; `--names` and `--prefix` must be absent, or say the same.

    A prefix may go on where the trainer's ends. `source` is what is converted, for messages.
    """
    layout = trainer_layout(trainer)
    if layout.refusal:
        what = f"--for {trainer}: {layout.refusal}"
        raise UsageError(what, hint=layout.instead.format(source=source) if layout.instead else None)
    own = "live" if layout.names == "auto" and layout.prefix else layout.names
    if own != "auto" and names not in ("auto", own):
        raise UsageError(f"--for {trainer} writes --names {own}, but --names {names} is given", hint="leave out one")
    if prefix and not prefix.startswith(layout.prefix):
        what = f"--for {trainer} adds the prefix {layout.prefix!r} to every name, but --prefix {prefix} is given"
        raise UsageError(what, hint="leave out one")
    return replace(layout, names=layout.names if names == "auto" else names, prefix=prefix or layout.prefix)


def starting_job(job: Job, layout: TrainerLayout) -> Job:
    """Return the job that writes `job`'s checkpoint where the trainer looks for it."""
    job.notes += [layout.start.format(destination=job.destination)] if layout.start else []
    if not layout.part:
        return job
    if job.use_dtensor:
        what = "--engine dtensor only writes a DCP directory"
        raise UsageError(what, hint=f"use --engine stream, or write into {layout.part}/")
    outer = outer_job(job.opened, job.destination, {layout.part: job}, job.mesh)
    outer.notes, job.notes = job.notes, []
    return outer


def outer_job(opened: Opened, destination: str, parts: dict[str, Job], mesh: Mesh | None) -> Job:
    """Return the job of a directory that holds parts, and nothing else yet."""
    name = steps_format.FORMAT.name
    return Job(
        opened=opened,
        source=Checkpoint(root=opened.source.root, format=name, tensors=()),
        target=Checkpoint(root="", format=name, tensors=()),
        destination=destination,
        mesh=mesh,
        parts=parts,
    )


def step_job(step: OpenedStep, options: ConvertOptions) -> Job:
    """Return the job that writes a whole step, each part cut as `options` say, and the files beside as they are."""
    path = step.root.source.root
    refuse_mixed(step.root)
    for _, error in step.broken:
        raise error
    if step.step.rank_files:
        what = f"{first_few(step.step.rank_files)}: pickles of each rank's own part, which fit no other mesh"
        raise UnreadableError(what, where=path, hint="save with DCP (accelerate's use_dcp=True)")
    _refuse(judge(step.root), path)
    _refuse_options(step, options, ("prefix", "include", "exclude", "dtype_for", "map", "names"))
    parts: dict[str, Job] = {}
    mesh: Mesh | None = None
    for index in sorted({part.index for part, _ in step.parts}):
        own = [(part, opened) for part, opened in step.parts if part.index == index]
        layout = _layout(step, [opened for _, opened in own], options)
        mesh = layout.mesh
        for part, opened in own:
            job = parts[part.directory] = sharding_job(opened, options, layout=layout)
            job.notes = [note for note in job.notes if note != PART_NOTE]
    outer = outer_job(step.root, os.fspath(options.destination), parts, mesh)
    outer.assets = [(step.root.source, asset) for asset in step.step.companions]
    outer.dtype = options.dtype
    outer.notes = [f"whole step: {first_few(list(parts), 6)}; {len(outer.assets)} other files are copied unchanged"]
    if step.passed_over:
        outer.notes.append(f"left out (hidden directories, links, special files): {first_few(step.passed_over, 6)}")
    if mesh is not None:
        verdict = judge_path(path, num_ranks=mesh.world_size)
        outer.notes += [f"{each.file}: {each.what}; {each.does}" for each in verdict.reasons]
    return outer


def _refuse(verdict: StepVerdict, path: str) -> None:
    """Refuse to write a step that would not resume as the trainer meant."""
    for reason in (each for each in verdict.reasons if each.is_sure):
        what = f"{reason.file}: {reason.what}; {reason.does}"
        raise UnreadableError(what, where=path, hint="restore it; `ckpt gather`, or --for plain, writes only the model")


def repository_job(step: OpenedStep, options: ConvertOptions | GatherOptions, build: Callable[[Opened], Job]) -> Job:
    """Return the job that writes every model of a repository, each as `build` makes it, and the files beside."""
    path = step.root.source.root
    for _, error in step.broken:
        raise error
    if step.step.lacking:
        what = f"{step.step.title} without the weights of {first_few(step.step.lacking, 6)}"
        raise UnreadableError(what, where=path, hint=f"restore them, or choose one model: {_give(step)}")
    into_files = step.step.trainer == "files" and isinstance(options, GatherOptions)
    _refuse_options(step, options, (*_OF_ONE_MODEL, *(_OF_FILES if into_files else ())))
    jobs: dict[str, Job] = {part.name: build(opened) for part, opened in step.parts}
    if into_files:
        outer = _files_job(step, jobs, os.fspath(options.destination))
    else:
        outer = jobs.pop("") if "" in jobs else outer_job(step.root, os.fspath(options.destination), {}, None)
        outer.parts = jobs
        if step.step.trainer == "files":
            outer.documents = {FILES_NAME: json.dumps([*jobs]).encode()}
    outer.opened, outer.dtype = replace(outer.opened, identity=step.identity), options.dtype
    own = {asset.file for _, asset in outer.assets}
    companions = [asset for asset in step.step.companions if not is_weights(asset.file) and asset.file not in own]
    outer.assets = [*outer.assets, *((step.root.source, asset) for asset in companions)]
    if left_out := [asset.file for asset in step.step.companions if is_weights(asset.file)]:
        outer.notes.append(f"left out, as weights in another format or of another model: {first_few(left_out)}")
    outer.notes.insert(0, f"{step.step.title} of {len(step.parts)} models: {first_few(step.step.components, 12)}")
    return outer


def _files_job(step: OpenedStep, jobs: Mapping[str, Job], destination: str) -> Job:
    """Return the job that makes of every model the one file that it was, all in one directory."""
    outer = outer_job(step.root, destination, {}, None)
    checkpoint, records = outer.source, dict[str, TensorRecord]()
    outer.target = replace(outer.target, format=hf.FORMAT.name)
    for part, model in step.parts:
        job, file = jobs[part.name], part.name + hf.FORMAT.suffix
        target, heads = job.target, job.heads
        if len(heads) > 1:
            target, heads = hf.place({file: target.tensors})
        inside = partial(os.path.join, "" if part.directory == file else part.directory)
        if both := outer.names.keys() & job.names.keys():
            what = f"two models have a tensor of this name: {first_few(both)}"
            raise UsageError(what, where=step.root.source.root, hint=f"choose one: {_give(step)}")
        checkpoint, outer.source = _join(checkpoint, model.checkpoint, inside), _join(outer.source, job.source, inside)
        outer.target = _join(outer.target, target, dict.fromkeys(target.files, file).__getitem__)
        outer.heads = {**outer.heads, file: next(iter(heads.values()))}
        outer.names = {**outer.names, **job.names}
        outer.notes += [f"{part.name}: {note}" for note in job.notes]
        outer.notes += [f"{part.name}: left out, {asset.file}" for _, asset in job.assets]
        outer.warnings, outer.not_checked = (*outer.warnings, *job.warnings), (*outer.not_checked, *job.not_checked)
        records |= {} if model.manifest is None else model.manifest.tensors
    manifest = next((each.manifest for each in (step.root, *(model for _, model in step.parts)) if each.manifest), None)
    manifest = manifest and replace(manifest, tensors=records)
    outer.opened = replace(step.root, checkpoint=checkpoint, manifest=manifest)
    return outer


def _join(whole: Checkpoint, part: Checkpoint, rename: Callable[[str], str]) -> Checkpoint:
    """Return a description with what another one has, its files by other names."""
    moved = (
        replace(e, chunks=tuple(replace(c, span=replace(c.span, file=rename(c.span.file))) for c in e.chunks))
        for e in part.tensors
    )
    files = {rename(file): size for file, size in part.files.items()}
    return replace(whole, tensors=(*whole.tensors, *moved), files={**whole.files, **files})


def _refuse_options(step: OpenedStep, options: ConvertOptions | GatherOptions, fields: Sequence[str]) -> None:
    """Refuse options that are for one checkpoint."""
    for flag in given_flags(options, fields):
        what = f"{flag} applies to one checkpoint; this is {step.step.title} of {len(step.parts)}"
        raise UsageError(what, where=step.root.source.root, hint=f"choose one: {_give(step)}")


def given_flags(options: ConvertOptions | GatherOptions, fields: Sequence[str]) -> Iterator[str]:
    """Yield those of some options that are given, as the command line has them: that are not as they are by default."""
    stated = {each.name: each for each in parameters(cast("type", type(options)))}
    for each in (stated[name] for name in fields if name in stated):
        if getattr(options, each.name) not in (None, (), [], "", False, each.default):
            yield each.flag


def _give(step: OpenedStep) -> str:
    if step.step.is_repository:
        return f"--component {step.step.components[0]}"
    return os.path.join(step.root.source.root, step.parts[0][0].directory)


def _layout(step: OpenedStep, group: list[Opened], options: ConvertOptions) -> Layout:
    """Return where a model and its optimizer go: rules and plans are of parameters, and state follows them."""
    tensors = tuple(entry for opened in group for entry in opened.checkpoint.tensors)
    has_config = (opened for opened in (*group, step.root) if config_beside(opened.source) is not None)
    with_config = next(has_config, group[0]) if options.tp_plan is not None else group[0]
    return find_layout(with_config, replace(group[0].checkpoint, tensors=tensors), options)


def converted_job(opened: Opened, options: ConvertOptions, naming: Naming, trainer: TrainerName | None) -> Job:
    """Return the job of `reshard` on one DCP checkpoint: all of it, or for another trainer its model alone."""
    verdict = judge(opened)
    own = verdict.trainer if verdict.trainer in ("lightning", "torchtitan") else None
    check_sealed(opened)
    if trainer is None or (trainer == own and not options.prefix):
        for error in opened.broken:
            hint = f"{error.hint or 'restore it'}; for the model alone, move the optimizer's files away"
            raise UnreadableError(f"the optimizer's state is incomplete: {error.what}", where=error.where, hint=hint)
        if opened.format.loads_by_dcp:
            _refuse(verdict, opened.source.root)
        job = resharding_job(opened, options, naming)
        job.notes += _notes_on_loader(opened, job.mesh)
        return job
    if naming.own:
        raise UsageError(f"--map sets the names, but --for {trainer} needs those of {trainer}", hint="leave out one")
    gathered = f"OUT, after `ckpt gather {opened.source.root} OUT`"
    layout = layout_for(trainer, names=naming.names, prefix=options.prefix, source=gathered)
    opened = revealed(opened)
    model, names = model_in(opened, "auto", [])
    origin, inside = opened.origin, set(names.values())
    if origin is not None:
        is_whole = len(model.tensors) == len(opened.checkpoint.tensors)
        is_whole = is_whole and all(old == origin.prefix + new for new, old in names.items())
        origin = origin if is_whole else None
    kept = tuple(entry for entry in opened.checkpoint.tensors if entry.fqn in inside)
    checkpoint = replace(opened.checkpoint, tensors=kept, blobs=())
    chosen = replace(opened, checkpoint=checkpoint, companions=(), origin=origin)
    notes: list[str] = []
    if (wanted := _names_for(opened, layout)) is None:
        named = Named(checkpoint=model, sources=names, map=None if origin is None else origin.map)
    else:
        named, _ = name_again(chosen, Naming(names=wanted), notes)
    job = sharding_job(chosen, replace(options, prefix=layout.prefix), named=named)
    job.notes += [*notes, *_notes_on_rest(opened, model)]
    job.warnings = (*job.warnings, *_warn_of_names(named.checkpoint, trainer))
    return starting_job(job, layout)


def _names_for(opened: Opened, layout: TrainerLayout) -> str | None:
    """Return what is to be done with the names: those of a file become the live model's, others stay; None for that."""
    origin = opened.origin
    made = None if origin is None else "hub" if origin.map is None else origin.map.names
    if layout.names != "auto":
        return None if made == layout.names else layout.names
    return "auto" if made == "hub" and layout.prefix else None


def _warn_of_names(model: Checkpoint, trainer: TrainerName) -> Iterator[str]:
    """Say that a model of transformers does not have these names, when they are certainly another library's."""
    owners = [owner for owner in origins_of([entry.fqn for entry in model.tensors]) if owner.code in _OTHER_LIBRARIES]
    if owners and trainer_layout(trainer).prefix:
        yield f"the names are {owners[0].what}, and are kept: transformers models do not load them"


def _notes_on_rest(opened: Opened, model: Checkpoint) -> Iterator[str]:
    """Say what of a step another trainer does not get."""
    checkpoint = opened.checkpoint
    count = len(checkpoint.tensors) - len(model.tensors)
    rest = [f"{counted(count, 'tensor')} (optimizer state and the like)"] if count else []
    rest += [f"{len(checkpoint.blobs)} items that are not tensors"] if checkpoint.blobs else []
    rest += [asset.file for asset in opened.companions]
    if rest:
        yield f"the model alone, for another trainer; left out: {first_few(rest, 6)}"


def _notes_on_loader(opened: Opened, mesh: Mesh | None) -> Iterator[str]:
    """Say what torchtitan does with the state of a data loader that other ranks saved."""
    saved = dataloader_ranks(opened.checkpoint)
    if saved and mesh is not None and saved != mesh.size("dp_replicate") * mesh.size("dp_shard"):
        yield (
            f"the data loader's state belongs to {saved} data-parallel ranks, and torchtitan rejects it on any other "
            'number: set checkpoint.exclude_from_loading = ["dataloader"] to start the data over'
        )
