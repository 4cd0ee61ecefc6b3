"""`shard`, `reshard` and `gather`."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Annotated, Literal

from ckpt_tools.api.workers import default_num_workers
from ckpt_tools.conversions.check_names import check_names
from ckpt_tools.conversions.job import Conversion, Job
from ckpt_tools.conversions.run import run
from ckpt_tools.conversions.to_hf import gathering_job, model_beside
from ckpt_tools.conversions.to_mesh import ShardingOptions, sharding_job
from ckpt_tools.errors import UsageError
from ckpt_tools.formats.opening import open_path
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
    Source,
    takes,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardOptions(ShardingOptions):
    """The options of `reshard`."""

    overwrite: Overwrite = False
    dry_run: DryRun = False
    num_workers: NumWorkers = None
    format: From = None
    progress: Progress = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOptions(ReshardOptions):
    """The options of `shard`."""

    engine: Annotated[
        Literal["stream", "dtensor"],
        Option(
            "stream, or the reference path through torch: one process per rank, distribute_tensor, dcp.save.",
            after="prefix",
        ),
    ] = "stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherOptions:
    """The options of `gather`."""

    source: Source = field(kw_only=False)
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
    allow_foreign_names: Annotated[
        bool, Option("Write names that the architecture in config.json does not have, or not all of its names.")
    ] = False
    overwrite: Overwrite = False
    dry_run: DryRun = False
    num_workers: NumWorkers = None
    format: From = None
    progress: Progress = None


@takes(ShardOptions)
def shard(options: ShardOptions) -> Conversion:
    """Convert full safetensors into a DTensor-sharded DCP checkpoint.

    Raises:
        UsageError: An impossible mesh or rule.
        UnreadableError: The source is incomplete or damaged.
        DestinationExistsError: The destination exists.
    """
    with open_path(os.fspath(options.source), format=options.format) as opened:
        if opened.format.loads_by_dcp:
            raise _wrong_verb("the source is already sharded", "reshard", options)
        job = sharding_job(opened, options)
        job.use_dtensor = options.engine == "dtensor"
        return _run(job, options)


@takes(ReshardOptions)
def reshard(options: ReshardOptions) -> Conversion:
    """Convert a sharded checkpoint for another mesh; optimizer state and non-tensor items come along.

    Optimizer state is cut like its parameter.

    Raises:
        UsageError: An impossible mesh or rule.
        UnreadableError: The source is incomplete or damaged.
        DestinationExistsError: The destination exists.
    """
    with open_path(os.fspath(options.source), format=options.format) as opened:
        if not opened.format.is_sharded:
            raise _wrong_verb("the source is not sharded", "shard", options)
        return _run(sharding_job(opened, options), options)


def _wrong_verb(what: str, instead: str, options: ShardingOptions) -> UsageError:
    source, destination = (os.fspath(path) for path in (options.source, options.destination))
    mesh = "dp_shard=N" if options.mesh is None else options.mesh
    return UsageError(what, where=source, hint=f"ckpt {instead} {source} {destination} --mesh {mesh}")


@takes(GatherOptions)
def gather(options: GatherOptions) -> Conversion:
    """Convert a sharded checkpoint into full safetensors that transformers loads.

    Without options, a checkpoint that `shard` made from HF files gives those very files back, byte for byte.

    Raises:
        UsageError: Options that contradict each other, keys that `like` has and the source lacks, or names that
            transformers would not load into the architecture that config.json names.
        UnreadableError: The source is incomplete or damaged.
        DestinationExistsError: The destination exists.
    """
    with ExitStack() as stack:
        opened = stack.enter_context(open_path(os.fspath(options.source), format=options.format))
        reference = None if options.like is None else stack.enter_context(open_path(os.fspath(options.like)))
        beside = model = None
        if options.assets is not None:
            if not os.path.isdir(options.assets):
                raise UsageError("--assets takes a directory", where=os.fspath(options.assets))
            beside, model = model_beside(os.fspath(options.assets), stack)
        job = gathering_job(
            opened,
            os.fspath(options.destination),
            max_shard_size=options.max_shard_size,
            dtype=options.dtype,
            strip=options.strip_prefix,
            assets=beside,
            like=reference,
            include=options.include,
            exclude=options.exclude,
        )
        originals = filter(None, (opened, reference, model))
        is_selection = bool(options.include or options.exclude)
        check_names(job, originals, allow_foreign=options.allow_foreign_names, is_selection=is_selection)
        return _run(job, options)


def _run(job: Job, options: ReshardOptions | GatherOptions) -> Conversion:
    job.overwrite = options.overwrite
    job.num_workers = options.num_workers or default_num_workers()
    job.progress = options.progress
    return run(job, dry_run=options.dry_run)
