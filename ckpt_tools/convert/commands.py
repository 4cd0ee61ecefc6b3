"""`shard`, `reshard` and `gather`, and `commit`, which publishes what their parts have written."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, get_args, get_origin

from ckpt_tools.checkpoint.entries import Asset, Checkpoint, Chunk
from ckpt_tools.checkpoint.formats._json import parse_json
from ckpt_tools.checkpoint.formats.format import read_document
from ckpt_tools.checkpoint.formats.manifest import MANIFEST_NAME
from ckpt_tools.checkpoint.formats.opening import Opened, open_path
from ckpt_tools.checkpoint.formats.rank_files import VERL_FILE, RankFiles
from ckpt_tools.checkpoint.formats.rank_writer import RankFile, places_of, plan_rank_file
from ckpt_tools.checkpoint.formats.step import open_repository, open_step, refuse_mixed
from ckpt_tools.checkpoint.layout import Mesh, parse_mesh
from ckpt_tools.checkpoint.names import single_files
from ckpt_tools.convert.assets import choose_assets, model_beside, own_assets
from ckpt_tools.convert.check_names import check_names
from ckpt_tools.convert.find_model import model_in
from ckpt_tools.convert.job import Conversion, Job, choose
from ckpt_tools.convert.run import run
from ckpt_tools.convert.to_fp8 import quantised_job, warn_of_settings
from ckpt_tools.convert.to_hf import gathering_job
from ckpt_tools.convert.to_mesh import sharding_job
from ckpt_tools.convert.to_step import (
    converted_job,
    given_flags,
    layout_for,
    outer_job,
    repository_job,
    starting_job,
    step_job,
)
from ckpt_tools.errors import DestinationExistsError, StorageError, UnreadableError, UsageError
from ckpt_tools.models.config import CONFIG_NAME
from ckpt_tools.models.open_asking import open_asking
from ckpt_tools.models.output_names import Naming, claim_of, name_live
from ckpt_tools.options import Parameter, default_num_workers, options_of, parameters, takes
from ckpt_tools.options.convert import CommitOptions, ConvertOptions, GatherOptions, ReshardOptions, ShardOptions
from ckpt_tools.storage.locations import absolute, is_directory, is_remote, open_shared_sink
from ckpt_tools.storage.run_leases import leased
from ckpt_tools.text import first_few
from ckpt_tools.transfer.quantised.decoded import dequantised
from ckpt_tools.transfer.share_record import parse_part

# Jobs that end in files of ranks: a step of verl's for another number of ranks

_CONFIG = "fsdp_config.json"
_MAX_CONFIG_BYTES = 1 << 20
_REPLICATE, _SHARD = "dp_replicate", "dp_shard"  # What the dims of verl's mesh are; the last one is always there


def is_of_verl(opened: Opened) -> bool:
    """Does a checkpoint consist of what verl's ranks left?"""
    names = (os.path.basename(file) for file in opened.checkpoint.files)
    return isinstance(opened.format, RankFiles) and any(map(VERL_FILE.fullmatch, names))


def ranks_job(opened: Opened, options: ConvertOptions, stack: ExitStack) -> Job:
    """Return the job that writes files of ranks for another mesh, of one model or of every model of a step."""
    mesh, destination = _mesh(options), os.fspath(options.destination)
    if opened.step is None:
        return _job(opened, mesh, destination)
    parts = {}
    for part in opened.step.parts:
        own = stack.enter_context(open_path(os.path.join(opened.checkpoint.root, part.directory)))
        parts[part.directory] = _job(own, mesh, destination)
    outer = outer_job(opened, destination, parts, mesh)
    outer.assets = [(opened.source, asset) for asset in opened.step.companions if asset.file != MANIFEST_NAME]
    return outer


def _mesh(options: ConvertOptions) -> Mesh:
    stated = ("rules", "set", "tp_plan", "prefix", "include", "exclude", "dtype", "dtype_for", "dequantize")
    if flag := next(given_flags(options, stated), None):
        raise UsageError(f"--for verl changes only the mesh; {flag} is given too", hint="leave out one")
    mesh: Mesh | None = None if options.mesh is None else parse_mesh(options.mesh, world_size=options.world_size)
    if mesh is None or [name for name, _ in mesh.axes] not in ([_REPLICATE, _SHARD], [_SHARD]):
        what = f"verl's ranks form a mesh of {_SHARD}, or of {_REPLICATE} and {_SHARD}"
        raise UsageError(what, hint=f"--mesh {_SHARD}=N")
    return mesh


def _job(opened: Opened, mesh: Mesh, destination: str) -> Job:
    """Return the job for one model: its files, those of its optimizer, and what else its ranks keep."""
    if opened.broken:
        raise opened.broken[0]
    source, files = opened.source, opened.source.list_files()
    ranks: dict[str, dict[int, str]] = {}
    for file in files:
        if (match := VERL_FILE.fullmatch(file)) is not None:
            ranks.setdefault(match["kind"], {})[int(match["rank"])] = file
    own = {file for found in ranks.values() for file in found.values()}
    assets = [Asset(file=file, nbytes=n) for file, n in files.items() if file not in own and file != MANIFEST_NAME]
    read = {chunk.span.file for entry in opened.checkpoint.tensors for chunk in entry.chunks}
    places = places_of(opened.checkpoint.tensors)
    planned: list[RankFile] = []
    warnings = []
    sizes = tuple(size for _, size in mesh.axes)
    for kind, found in ranks.items():
        order = sorted(found)
        for rank in range(mesh.world_size):
            pattern = found[order[rank % len(order)]]
            name = f"{kind}_world_size_{mesh.world_size}_rank_{rank}.pt"
            if pattern in read:
                planned.append(plan_rank_file(source, pattern, name, rank=rank, sizes=sizes, places=places))
            elif kind == "extra_state":
                assets.append(Asset(file=name, nbytes=files[pattern], stored_as=pattern))
        if kind == "optim" and found[order[0]] not in read:
            why = next((what for what in opened.unread if "optimizer" in what), "ckpt does not read its kind")
            warnings.append(f"without the optimizer: {why}; checkpoint.load_contents=['model','extra'] resumes so")
    chunks: dict[str, list[Chunk]] = {}
    for each in planned:
        for fqn, chunk in each.chunks:
            chunks.setdefault(fqn, []).append(chunk)
    entries = opened.checkpoint.tensors
    if shared := [entry.fqn for entry in entries if entry.fqn not in chunks]:
        raise UsageError(
            f"tensors that share their memory with others cannot be written for other ranks: {first_few(shared)}",
            where=opened.source.root,
            hint="without --for verl, `ckpt reshard` writes DCP",
        )
    config = _config(opened) if _CONFIG in files else {}
    if config.get("FSDP_version") != 2 and (mesh.size(_SHARD) == 1 or len(mesh.axes) > 1):
        what = "whole tensors on one rank" if mesh.size(_SHARD) == 1 else f"the process groups of {_REPLICATE} by name"
        hint = "use gather for a model that verl starts from; with FSDP2, fsdp_config.json has FSDP_version 2"
        raise UsageError(f"FSDP1 has {what}, which cannot be written", where=opened.source.root, hint=hint)
    rewritten = {_CONFIG: json.dumps({**config, "world_size": mesh.world_size}, indent=4).encode()} if config else {}
    before = len(ranks["model"])
    note = f"{before} ranks become {mesh.world_size}; rank R has the scheduler and the RNG state of rank R mod {before}"
    return Job(
        opened=opened,
        source=replace(opened.checkpoint, tensors=tuple(map(opened.resolve, opened.ahead(entries))), blobs=()),
        target=Checkpoint(
            root="",
            format=RankFiles.name,
            tensors=tuple(replace(entry, chunks=tuple(chunks[entry.fqn])) for entry in entries),
            files={each.name: each.frame.nbytes for each in planned},
        ),
        destination=destination,
        heads={each.name: each.frame.before for each in planned},
        seals={each.name: each.frame.seal for each in planned},
        assets=[(source, asset) for asset in assets],
        rewritten=rewritten,
        mesh=mesh,
        notes=[*opened.notes, note],
        warnings=warnings,
    )


def _config(opened: Opened) -> dict[str, object]:
    """Return verl's own note of its ranks."""
    content = read_document(opened.source, _CONFIG, _MAX_CONFIG_BYTES)
    stated = parse_json(content, what="verl's note of its ranks", where=_CONFIG)
    if not isinstance(stated, dict):
        raise UnreadableError("verl's note of its ranks is not a JSON object", where=_CONFIG)
    return stated


VERBS = ("shard", "reshard", "gather")
_OF_A_RUN = ("destination", "part", "only_commit", "dry_run", "overwrite", "num_workers", "progress")
"""Options that say how a process runs, not what is made."""


def build_command(options: Hashable) -> str:
    """Return what an options class of one of `VERBS` asks for; "" where an option cannot be written down.

    Paths are absolute. What is secret is in no option.
    """
    verb = type(options).__name__.removesuffix("Options").lower()
    given = {}
    for each in parameters(type(options)):
        value = getattr(options, each.name)
        if each.name not in _OF_A_RUN and value != each.default:
            given[each.name] = absolute(os.fspath(value)) if each.is_path else value
    try:
        return json.dumps([verb, given]) if verb in VERBS else ""
    except TypeError:
        return ""


def parse_command(text: str) -> tuple[str, Mapping[str, Any]] | None:
    """Return the verb and its options; None where the text is no command."""
    try:
        verb, given = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return None
    if not isinstance(verb, str) or verb not in VERBS or not isinstance(given, dict):
        return None
    known = {each.name: each for each in options_of(_FUNCTIONS[verb]) if each.name not in _OF_A_RUN}
    is_one = all(name in known and _is_value(known[name], value) for name, value in given.items())
    needed = {name for name, each in known.items() if each.default is inspect.Parameter.empty}
    return (verb, given) if is_one and needed <= given.keys() else None


def _is_value(option: Parameter, value: object) -> bool:
    kinds = (option.hint, *get_args(option.hint))
    if isinstance(value, list):
        return any(get_origin(kind) is Sequence for kind in kinds) and all(isinstance(each, str) for each in value)
    return type(value) in kinds or (isinstance(value, str) and (option.is_path or value in option.words))


@takes(ShardOptions, 'ckpt_tools.shard("model", "model-hsdp", mesh={"dp_replicate": 2, "fsdp": 4}).verified', "True")
def shard(options: ShardOptions) -> Conversion:
    """Convert full safetensors into a DTensor-sharded DCP checkpoint.

    Raises:
        UsageError: An impossible mesh or rule.
        UnreadableError: The source is incomplete or damaged.
        DestinationExistsError: The destination exists.
    """
    _check_serialization(options, use_dtensor=options.engine == "dtensor")
    with leased(options.source, is_wanted=not options.dry_run), ExitStack() as stack:
        return _run(_each(options, stack, partial(_sharding_job, options=options)), options)


def _each(options: ConvertOptions | GatherOptions, stack: ExitStack, build: Callable[[Opened], Job]) -> Job:
    """Return the job that `build` makes of the source, or of every model of a repository."""
    models = None
    if options.format is None and options.component is None:
        models = open_repository(os.fspath(options.source), as_part=options.as_part)
    if models is None:
        return build(stack.enter_context(_open(options)))
    return repository_job(stack.enter_context(models), options, build)


def _sharding_job(stored: Opened, options: ShardOptions) -> Job:
    """Return the job that shards one model."""
    is_own = stored.format.has_views or stored.manifest is not None
    if stored.format.loads_by_dcp or (stored.format.is_sharded and is_own):
        raise _wrong_verb("the source is already sharded", "reshard", options)
    opened = _plain(_model_of(stored), options)
    use_dtensor = options.engine == "dtensor"
    if use_dtensor and options.dequantize:
        raise UsageError("--engine dtensor does not decode", hint="use --engine stream")
    layout, names = None, str(options.names)
    if options.trainer is not None:
        source = os.fspath(options.source)
        layout = layout_for(options.trainer, names=names, prefix=options.prefix, source=source)
        names = layout.names if options.map is None else names
        options = replace(options, prefix=layout.prefix)
    naming = Naming.of(names, options.map)
    if use_dtensor and naming.names not in ("auto", "hub"):
        what = f"--engine dtensor writes the names of the file, not those of --{'map' if naming.own else 'names'}"
        raise UsageError(what, hint="use --engine stream")
    naming = Naming(names="hub") if use_dtensor else naming
    named = name_live(opened.checkpoint, opened.assets, naming, opened.resolve)
    job = sharding_job(opened, options, named=named)
    job.use_dtensor = use_dtensor
    return job if layout is None else starting_job(job, layout)


def _model_of(opened: Opened) -> Opened:
    """Return a trainer's own file with its model alone, which is meant; anything else as it is."""
    if not opened.format.has_views:
        return opened
    notes: list[str] = []
    model, _ = model_in(opened, "auto", notes)
    return replace(opened, checkpoint=model, notes=(*opened.notes, *notes))


@takes(ReshardOptions, 'ckpt_tools.reshard("model-dp8", "model-dp4", mesh=4).num_tensors', "21")
def reshard(options: ReshardOptions) -> Conversion:
    """Convert a sharded checkpoint for another mesh; optimizer state and non-tensor items come along.

    Optimizer state is cut like its parameter.

    Raises:
        UsageError: An impossible mesh or rule.
        UnreadableError: The source is incomplete or damaged.
        DestinationExistsError: The destination exists.
    """
    _check_serialization(options)
    with leased(options.source, is_wanted=not options.dry_run), ExitStack() as stack:
        naming = Naming.of(options.names, options.map)
        is_step = options.format is None and options.component is None
        step = open_step(os.fspath(options.source), as_part=options.as_part) if is_step else None
        if step is not None:
            stack.callback(step.__exit__)
            if step.step.is_repository:
                make = partial(_resharding_job, options=options, naming=naming)
                return _run(repository_job(step, options, make), options)
            if options.dequantize:
                raise UsageError("--dequantize takes a model, not a step", hint="name the directory of its model")
            if options.trainer in (None, step.step.trainer):
                if options.serialization == "safetensors":
                    what = f"{step.step.title} is resumed from --serialization torch, not safetensors"
                    raise UsageError(what, hint="--for plain writes only the model")
                return _run(step_job(step, options), options)
        opened = stack.enter_context(_open(options))
        if options.trainer == "verl" and is_of_verl(opened):
            return _run(ranks_job(opened, options, stack), options)
        return _run(_resharding_job(opened, options, naming), options)


def _resharding_job(opened: Opened, options: ReshardOptions, naming: Naming) -> Job:
    """Return the job that cuts one sharded model again."""
    if not opened.format.is_sharded:
        raise _wrong_verb("the source is not sharded", "shard", options)
    return converted_job(_plain(opened, options), options, naming, options.trainer)


def _open(options: ConvertOptions | GatherOptions) -> Opened:
    """Open the source as the options say."""
    source, shapes, own = os.fspath(options.source), getattr(options, "shapes_from", None), options.component
    return open_asking(source, format=options.format, shapes_from=shapes, as_part=options.as_part, component=own)


def _check_serialization(options: ConvertOptions, *, use_dtensor: bool = False) -> None:
    """Refuse safetensors where something else is to be written, or the trainer loads something else."""
    if options.serialization == "torch":
        return
    if use_dtensor:
        raise UsageError("--engine dtensor writes only --serialization torch", hint="use --engine stream")
    if options.trainer not in (None, "plain"):
        what = f"--for {options.trainer} writes what it loads, which is not --serialization safetensors"
        raise UsageError(what, hint="leave out one; --for plain is for scripts of your own")


def _wrong_verb(what: str, instead: str, options: ConvertOptions) -> UsageError:
    source, destination = (os.fspath(path) for path in (options.source, options.destination))
    mesh = "dp_shard=N" if options.mesh is None else options.mesh
    kind = "" if options.format is None else f" --from {options.format}"
    return UsageError(what, where=source, hint=f"ckpt {instead} {source} {destination} --mesh {mesh}{kind}")


@takes(GatherOptions, 'ckpt_tools.gather("model-dp8", "gathered").verified', "True")
def gather(options: GatherOptions) -> Conversion:
    """Convert a sharded checkpoint into full safetensors that transformers loads.

    Without options, a checkpoint that `shard` made from HF files gives those very files back, byte for byte.

    Raises:
        UsageError: Options that contradict each other, keys that `like` has and the source lacks, or names that
            transformers would not load into the architecture that config.json names.
        UnreadableError: The source is incomplete or damaged.
        DestinationExistsError: The destination exists.
    """
    with leased(options.source, is_wanted=not options.dry_run), ExitStack() as stack:
        return _run(_each(options, stack, partial(_gathering_job, options=options, stack=stack)), options)


def _gathering_job(opened: Opened, options: GatherOptions, stack: ExitStack) -> Job:
    """Return the job that makes one model whole."""
    opened = _plain(opened, options)
    reference = None if options.like is None else stack.enter_context(open_path(os.fspath(options.like)))
    owners, model = [("the step's own", own_assets(opened, os.fspath(options.source), stack))], None
    if options.assets is not None:
        if not is_directory(os.fspath(options.assets)):
            raise UsageError("--assets takes a directory", where=os.fspath(options.assets))
        companions, model = model_beside(os.fspath(options.assets), stack)
        owners.append((f"that of --assets {os.fspath(options.assets)}", companions))
    if reference is not None:
        owners.append((f"that of --like {os.fspath(options.like or '')}", reference.own_assets))
    assets, notes = choose_assets(owners)
    job = gathering_job(opened, options, assets=assets, like=reference)
    job.notes += notes
    originals = filter(None, (opened, reference, model))
    is_selection = bool(options.include or options.exclude)
    if options.names == single_files.CONVENTION:  # its map has compared them with a whole model's
        if claim_of(assets) is None:
            job.warnings = (*job.warnings, f"no {CONFIG_NAME}: diffusers needs that of the model (--assets DIR)")
    else:
        check_names(job, originals, allow_foreign=options.allow_foreign_names, is_selection=is_selection)
    return _quantised(job, options)


def _quantised(job: Job, options: GatherOptions) -> Job:
    """Return the job as it is, or the one that `--quantize` asks for."""
    if options.quantize is None:
        if options.keep_precision:
            raise UsageError("--keep-precision needs --quantize", hint="add --quantize fp8")
        warn_of_settings(job)
        return job
    if options.to != "safetensors":
        raise UsageError(f"--quantize writes safetensors; --to {options.to} is given too", hint="leave out --to")
    if options.like is not None:
        raise UsageError("--like and --quantize both set dtypes", hint="--assets REF copies its config and tokenizer")
    keep, limit = options.keep_precision, options.max_file_nbytes
    return quantised_job(job, keep=keep, max_file_nbytes=limit, num_workers=_num_workers(options))


def _plain(opened: Opened, options: ConvertOptions | GatherOptions) -> Opened:
    """Return the source as it is to be converted: with `--dequantize`, what its quantised tensors stand for."""
    refuse_mixed(opened)
    if not options.dequantize:
        return opened
    if isinstance(options, GatherOptions) and options.assets is not None:
        what = "--dequantize uses the config.json beside the weights; --assets would replace it"
        raise UsageError(what, hint=f"copy {CONFIG_NAME} to the checkpoint, and leave out --assets")
    return dequantised(opened, options.dtype)


def _run(job: Job, options: ConvertOptions | GatherOptions) -> Conversion:
    """Run a job."""
    allowed = isinstance(options, GatherOptions) and options.allow_foreign_names
    choose(job, include=options.include, exclude=options.exclude, as_part=options.as_part, allow_foreign_names=allowed)
    job.overwrite, job.keep_pickles = options.overwrite, options.keep_pickles
    job.num_workers = _num_workers(options)
    job.progress = options.progress
    job.part = None if options.part is None else parse_part(options.part)
    job.only_commit = options.only_commit
    job.command = build_command(options)
    return run(job, dry_run=options.dry_run)


def _num_workers(options: ConvertOptions | GatherOptions) -> int:
    return options.num_workers or default_num_workers(options.source, options.destination)


# `commit`: the last step of a conversion whose last part died before it

_FUNCTIONS: Mapping[str, Callable[..., Conversion]] = {"shard": shard, "reshard": reshard, "gather": gather}


@takes(CommitOptions, 'ckpt_tools.commit("model-parts").published', "True")
def commit(options: CommitOptions) -> Conversion:
    """Publish what the parts of a conversion have written; what they were asked for stands beside it.

    The source must be there as it was for them, under the same path.

    Raises:
        UnreadableError: Nothing is being written there.
        StorageError: Parts are missing; the message says which.
        UsageError: What is being written there does not say by which command.
        DestinationExistsError: It is published already, or the source has changed since.
    """
    destination = os.fspath(options.destination)
    try:
        with open_shared_sink(destination) as sink:
            claim = sink.find_claim()
    except DestinationExistsError:
        what, hint = "nothing to publish: no conversion is in progress here", "`ckpt verify` checks what is there"
        raise DestinationExistsError(what, where=destination, hint=hint) from None
    if claim is None:
        what, hint = "no conversion is in progress here", "pass the DST of the conversion that was interrupted"
        raise UnreadableError(what, where=destination, hint=hint)
    command = parse_command(claim.command)
    if command is None:
        hint = f"run any part again: --part 0/{claim.num_parts}"
        raise UsageError("the write in progress here does not record its command", where=destination, hint=hint)
    verb, given = command
    _check_paths(verb, given, destination)
    done = _FUNCTIONS[verb](
        **given, destination=destination, part=f"0/{claim.num_parts}", only_commit=True, progress=options.progress
    )
    if not done.published:
        missing = [str(index) for index in done.waiting_for]
        again = " and ".join(f"--part {index}/{claim.num_parts}" for index in missing[:4])
        parts, are = ("parts", "are") if len(missing) > 1 else ("part", "is")
        what = f"{parts} {first_few(missing, 8)} of {claim.num_parts} {are} missing"
        raise StorageError(what, where=destination, hint=f"run {again} again; the others are kept")
    return done


def _check_paths(verb: str, given: Mapping[str, object], destination: str) -> None:
    """Refuse to read what a bucket says should be read of this machine: whoever may write there wrote it.

    A staging directory on this machine is its owner's alone.
    """
    paths = {each.name for each in options_of(_FUNCTIONS[verb]) if each.is_path}
    own = [str(value) for name, value in given.items() if name in paths and not is_remote(str(value))]
    if own and is_remote(destination):
        what = f"the write in progress here reads {first_few(own)} on the machine that started it"
        raise UsageError(what, where=destination, hint="run any part of it again there: a finished part publishes")
