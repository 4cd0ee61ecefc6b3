"""Jobs that end in a trainer's own layout: whole training steps, and what `--for TRAINER` asks for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

from ckpt_tools.conversions.job import PART_NOTE, Job
from ckpt_tools.conversions.to_hf import model_in
from ckpt_tools.conversions.to_mesh import KEEP, ShardingOptions, find_layout, sharding_job
from ckpt_tools.description.checkpoint import Checkpoint
from ckpt_tools.description.layout import Layout, Mesh
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.formats import step as steps_format
from ckpt_tools.formats.opening import Opened
from ckpt_tools.formats.step import OpenedStep
from ckpt_tools.formats.steps import (
    TRAINERS,
    TrainerLayout,
    TrainerName,
    dataloader_ranks,
    missing_parts,
    note_missing_rng,
    trainer_of,
)
from ckpt_tools.maps import origins_of
from ckpt_tools.models.config import config_beside
from ckpt_tools.models.naming import Naming
from ckpt_tools.text import first_few

_OTHER_LIBRARIES = ("torchtitan", "megatron", "nanotron", "gguf")
"""Codes of names that no model of transformers or diffusers has, adapted or wrapped."""


def layout_for(trainer: TrainerName, *, names: str, prefix: str, source: str) -> TrainerLayout:
    """Return what `--for` writes; the other options must say nothing, or the same.

    Args:
        trainer: Value of `--for`.
        names: Value of `--names`.
        prefix: Value of `--prefix`; it may go on where the trainer's ends.
        source: What is converted, for messages.

    Raises:
        UsageError: The trainer loads no DCP checkpoint, or an option says something else.
    """
    layout = TRAINERS[trainer]
    if layout.refusal:
        raise UsageError(
            f"--for {trainer}: {layout.refusal}", hint=layout.instead.format(source=source) if layout.instead else None
        )
    if names not in ("auto", layout.names):
        raise UsageError(
            f"--for {trainer} writes --names {layout.names}, and --names {names} is given", hint="leave out one"
        )
    if prefix and not prefix.startswith(layout.prefix):
        raise UsageError(
            f"--for {trainer} puts {layout.prefix!r} in front of every name, and --prefix {prefix} is given",
            hint="leave out one",
        )
    return replace(layout, prefix=prefix or layout.prefix)


def starting_job(job: Job, layout: TrainerLayout) -> Job:
    """Return the job that writes `job`'s checkpoint where the trainer looks for it.

    Raises:
        UsageError: Its data files are PyTorch's to write.
    """
    job.notes += [layout.start.format(destination=job.destination)] if layout.start else []
    if not layout.part:
        return job
    if job.use_dtensor:
        raise UsageError(
            "--engine dtensor writes a DCP directory alone", hint=f"use --engine stream, or write into {layout.part}/"
        )
    outer = _outer(job.opened, job.destination, {layout.part: job}, job.mesh)
    outer.notes, job.notes = job.notes, []
    return outer


def _outer(opened: Opened, destination: str, parts: dict[str, Job], mesh: Mesh | None) -> Job:
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


def step_job(step: OpenedStep, options: ShardingOptions) -> Job:
    """Return the job that writes a whole step, each part cut as `options` say, and the files beside as they are.

    Raises:
        UsageError: An option that would leave something out, or change names in one part alone.
        UnreadableError: A part is not complete, or one that resuming needs is not there.
    """
    path = step.root.source.root
    for _, error in step.broken:
        raise error
    for directory, is_needed in missing_parts(step.step):
        if is_needed:
            raise UnreadableError(
                f"{step.step.title} without {directory}",
                where=path,
                hint=f"restore it, or convert one part: {_give(step)}",
            )
    for flag, value in (("--prefix", options.prefix), ("--include", options.include), ("--exclude", options.exclude)):
        if value:
            what = f"{flag} is for one checkpoint, and this is a step of {len(step.parts)}"
            raise UsageError(what, where=path, hint=f"convert one part: {_give(step)}")
    parts: dict[str, Job] = {}
    mesh: Mesh | None = None
    for index in sorted({part.index for part, _ in step.parts}):
        own = [(part, opened) for part, opened in step.parts if part.index == index]
        layout = _layout(step, [opened for _, opened in own], options)
        mesh = layout.mesh
        for part, opened in own:
            job = parts[part.directory] = sharding_job(opened, options, layout=layout)
            job.notes = [note for note in job.notes if note != PART_NOTE]
    outer = _outer(step.root, os.fspath(options.destination), parts, mesh)
    outer.assets = [(step.root.source, asset) for asset in step.step.beside]
    outer.dtype = options.dtype
    outer.notes = [f"a whole step: {first_few(list(parts), 6)} and {len(outer.assets)} files beside them, as they are"]
    if mesh is not None and (note := note_missing_rng(step.step.names, mesh.world_size)):
        outer.notes.append(note)
    return outer


def _give(step: OpenedStep) -> str:
    return os.path.join(step.root.source.root, step.parts[0][0].directory)


def _layout(step: OpenedStep, group: list[Opened], options: ShardingOptions) -> Layout:
    """Return where a model and its optimizer go: rules and plans are of parameters, and state follows them."""
    tensors = tuple(entry for opened in group for entry in opened.checkpoint.tensors)
    has_config = (opened for opened in (*group, step.root) if config_beside(opened.source) is not None)
    with_config = next(has_config, group[0]) if options.tp_plan is not None else group[0]
    return find_layout(with_config, replace(group[0].checkpoint, tensors=tensors), options)


def converted_job(opened: Opened, options: ShardingOptions, trainer: TrainerName | None) -> Job:
    """Return the job of `reshard` on one DCP checkpoint: all of it, or for another trainer its model alone.

    Raises:
        UsageError: As `layout_for`; or the names cannot be brought into the trainer's.
    """
    own = trainer_of(opened.checkpoint, opened.beside)
    if trainer is None or (trainer == own and not options.prefix):
        job = sharding_job(opened, options)
        job.notes += _notes_on_loader(opened, job.mesh)
        return job
    layout = layout_for(trainer, names="auto", prefix=options.prefix, source=opened.source.root)
    model, names = model_in(opened, "auto", [])
    origin = opened.origin
    if origin is not None:
        is_whole = len(model.tensors) == len(opened.checkpoint.tensors)
        is_whole = is_whole and all(old == origin.prefix + new for new, old in names.items())
        origin = replace(origin, prefix="") if is_whole else None
    naming = _naming(opened, layout)
    plain = replace(opened, checkpoint=model, beside=(), origin=origin)
    job = sharding_job(plain, replace(options, prefix=layout.prefix), naming=naming)
    job.names = {new: names.get(old, old) for new, old in job.names.items()}
    job.apart = [replace(entry, fqn=names.get(entry.fqn, entry.fqn)) for entry in job.apart]
    job.notes += _notes_on_rest(opened, model)
    job.warnings = (*job.warnings, *_warn_of_names(model, trainer))
    return starting_job(job, layout)


def _naming(opened: Opened, layout: TrainerLayout) -> Naming:
    """Return what is to be done with the names: those of a file become the trainer's, a live model's stay."""
    origin = opened.origin
    made = None if origin is None else "hub" if origin.map is None else origin.map.names
    if layout.names != "auto":
        return KEEP if made == layout.names else Naming(names=layout.names)
    return Naming() if made == "hub" and layout.prefix else KEEP


def _warn_of_names(model: Checkpoint, trainer: TrainerName) -> Iterator[str]:
    """Say that a model of transformers does not have these names, when they are certainly another library's."""
    owners = [owner for owner in origins_of([entry.fqn for entry in model.tensors]) if owner.code in _OTHER_LIBRARIES]
    if owners and TRAINERS[trainer].prefix:
        yield f"the names are {owners[0].what}, and stay: a model of transformers does not load them"


def _notes_on_rest(opened: Opened, model: Checkpoint) -> Iterator[str]:
    """Say what of a step another trainer does not get."""
    checkpoint = opened.checkpoint
    count = len(checkpoint.tensors) - len(model.tensors)
    rest = [f"{count} tensors (optimizer state and the like)"] if count else []
    rest += [f"{len(checkpoint.blobs)} items that are not tensors"] if checkpoint.blobs else []
    rest += [asset.file for asset in opened.beside]
    if rest:
        yield f"the model alone, for another trainer; left out: {first_few(rest, 6)}"


def _notes_on_loader(opened: Opened, mesh: Mesh | None) -> Iterator[str]:
    """Say what torchtitan does with the state of a data loader that other ranks saved."""
    saved = dataloader_ranks(opened.checkpoint)
    if saved and mesh is not None and saved != mesh.size("dp_replicate") * mesh.size("dp_shard"):
        yield (
            f"the data loader's state is of {saved} data-parallel ranks, and torchtitan refuses it on another number: "
            'checkpoint.exclude_from_loading = ["dataloader"] begins the data anew'
        )
