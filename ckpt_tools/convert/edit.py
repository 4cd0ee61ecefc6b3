"""`average`, `extract` and `rename`: what makes another checkpoint of the same kind."""

from __future__ import annotations

import math
import os
from contextlib import ExitStack
from dataclasses import replace

from ckpt_tools.checkpoint.formats.opening import Opened
from ckpt_tools.checkpoint.formats.step import refuse_mixed
from ckpt_tools.checkpoint.transform import select
from ckpt_tools.convert.average import averaging_job, steps_of
from ckpt_tools.convert.check_names import check_names
from ckpt_tools.convert.job import Conversion, Job, check_whole, choose
from ckpt_tools.convert.layers import first_layers
from ckpt_tools.convert.rewrite import renamed, rewrite_job
from ckpt_tools.convert.run import run
from ckpt_tools.convert.to_hf import written_names
from ckpt_tools.errors import UsageError
from ckpt_tools.models.config import CONFIG_NAME
from ckpt_tools.models.naming import AssetList, Named, Naming
from ckpt_tools.models.opening import open_asking
from ckpt_tools.options import AnyPath, default_num_workers, takes
from ckpt_tools.options.rewrite import AverageOptions, ExtractOptions, RenameOptions, WritingOptions


@takes(AverageOptions)
def average(options: AverageOptions) -> Conversion:
    """Average the weights of several checkpoints (SWA, EMA, soups), streaming, in the format of the first.

    Arithmetic is float32 in the order of the sources, and rounds once.

    Raises:
        UsageError: The checkpoints differ in names, shapes or dtypes, or the weights are not as many.
        UnreadableError: One of them is incomplete or damaged.
        DestinationExistsError: The destination exists.
    """
    sources = [os.fspath(path) for path in options.sources]
    steps, said = _steps(options, len(sources))
    places = [os.path.realpath(path) for path in sources]
    if twice := [path for path, place in zip(sources, places, strict=True) if places.count(place) > 1]:
        raise UsageError("the same checkpoint is given twice", where=twice[0], hint="--weights says how much it counts")
    with ExitStack() as stack:
        first, *others = opened = [
            stack.enter_context(open_asking(path, format=options.format, as_part=options.as_part)) for path in sources
        ]
        for each in others:
            refuse_mixed(each)
        job = _own(first, options.destination, options)
        job.num_workers = options.num_workers or default_num_workers(*sources, computes=True)
        job = averaging_job(job, others, steps)
        names = map(os.path.basename, places)
        of = [{"name": name, "format": each.format.name} for name, each in zip(names, opened, strict=True)]
        job.made = {"averaged": {**said, "of": of}}
        result = run(job, dry_run=options.dry_run)
        return replace(result, bytes_read=result.bytes_read * len(sources))


def _steps(options: AverageOptions, count: int) -> tuple[tuple[float, ...], dict[str, object]]:
    """Return what `averaging_job` takes, and how the user said it."""
    if count < 2:
        raise UsageError("an average needs at least two checkpoints", hint="ckpt average A B DST")
    if options.ema is not None:
        if options.weights is not None:
            raise UsageError("--ema brings weights of its own", hint="leave out --weights")
        if not 0 < options.ema < 1:
            raise UsageError(f"--ema must be between 0 and 1, got {options.ema:g}", hint="0.99 is usual")
        return (1 - options.ema,) * (count - 1), {"ema": options.ema}
    weights = [1.0] * count if options.weights is None else _parse_weights(options.weights)
    if len(weights) != count:
        raise UsageError(f"--weights has {len(weights)} numbers for {count} checkpoints", hint="one for each, in order")
    return steps_of(weights), {"weights": [weight / math.fsum(weights) for weight in weights]}


def _parse_weights(text: str) -> list[float]:
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--weights must be numbers, got {text!r}", hint="--weights 0.5,0.3,0.2") from None
    if not all(0 < weight < math.inf for weight in weights):
        raise UsageError("--weights must be positive", hint="leave out a checkpoint that shall not count")
    if abs(math.fsum(weights) - 1) > 1e-6:
        raise UsageError(f"--weights must be 1 together, got {math.fsum(weights):g}", hint="--weights 0.5,0.3,0.2")
    return weights


@takes(ExtractOptions)
def extract(options: ExtractOptions) -> Conversion:
    """Write a part of a checkpoint, in its own format: chosen tensors, or a model of its first layers.

    Raises:
        UsageError: Nothing is chosen, or a glob matches nothing; no config to cut.
        UnreadableError: The source is incomplete or damaged.
        DestinationExistsError: The destination exists.
    """
    if not options.include and not options.exclude and options.layers is None:
        raise UsageError("nothing says what to extract", hint="add --include GLOB, --exclude GLOB or --layers N")
    with open_asking(os.fspath(options.source), format=options.format, as_part=options.as_part) as opened:
        chosen, notes = opened.checkpoint, []
        assets: AssetList = opened.own_assets
        if options.layers is not None:
            chosen, assets, note = first_layers(opened, options.layers)
            notes = [note]
        own = Naming(names="auto" if opened.format.is_training else "live")
        also = {} if opened.format.loads_by_dcp else written_names(opened, "auto", assets, own)
        chosen = select(chosen, include=options.include, exclude=options.exclude, also=also)
        check_whole(opened, opened.own_assets, chosen.tensors, {})
        part = replace(opened, checkpoint=chosen, origin=None)
        job = _own(part, options.destination, options, only_model=options.layers is not None)
        choose(job, include=options.include, exclude=options.exclude, as_part=options.as_part)
        job.assets = assets
        job.notes += notes
        if not opened.format.loads_by_dcp:  # a trainer's names have prefixes
            check_names(job, [opened], allow_foreign=True, is_selection=bool(options.include or options.exclude))
        return run(job, dry_run=options.dry_run)


@takes(RenameOptions)
def rename(options: RenameOptions) -> Conversion:
    """Write a model's weights by other names, in its own format: renamed, joined or split as a key map says.

    `gather` with the same map, or the same `names`, is the way back.

    Raises:
        UsageError: The map does not fit the names, or there is other state than weights; not one of `map` and `names`.
        UnreadableError: The source is incomplete or damaged.
        DestinationExistsError: The destination exists.
    """
    if options.map is None and options.names is None:
        raise UsageError("nothing says which names to write", hint="add --map FILE or --names comfyui")
    naming = Naming.of(options.names or "auto", options.map)
    with open_asking(os.fspath(options.source), format=options.format, as_part=options.as_part) as opened:
        if options.names is not None:
            return run(_single_file(opened, options, naming), dry_run=options.dry_run)
        job = _own(opened, options.destination, options, named=renamed(opened, naming))
        job.not_checked = (*job.not_checked, "names were not compared with an architecture: they are the map's own")
        return run(job, dry_run=options.dry_run)


def _single_file(opened: Opened, options: RenameOptions, naming: Naming) -> Job:
    """Return the job that writes what ComfyUI loads: one file of any size, without diffusers' config."""
    if opened.format.loads_by_dcp:
        raise UsageError(f"--names {options.names} takes no DCP checkpoint", hint="`ckpt gather` it first")
    named = renamed(opened, naming)
    assets = tuple(asset for asset in named.checkpoint.assets if asset.file != CONFIG_NAME)
    named = replace(named, checkpoint=replace(named.checkpoint, assets=assets))
    options = replace(options, max_shard_size=options.max_shard_size or "1000000TB")
    return _own(opened, options.destination, options, named=named)


def _own(
    opened: Opened,
    destination: AnyPath,
    options: WritingOptions,
    *,
    only_model: bool = True,
    named: Named | None = None,
) -> Job:
    """Return the job that writes a checkpoint again, as the options say."""
    refuse_mixed(opened)
    job = rewrite_job(opened, os.fspath(destination), options, only_model=only_model, named=named)
    job.overwrite, job.progress = options.overwrite, options.progress
    job.keep_pickles = options.keep_pickles
    job.num_workers = options.num_workers or default_num_workers(opened.source.place, destination)
    return job
