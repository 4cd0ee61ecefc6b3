"""`shard`, `reshard` and `gather`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack

from ckpt_tools.api.workers import ProgressFactory, default_num_workers
from ckpt_tools.conversions.check_names import check_names
from ckpt_tools.conversions.job import Conversion, Job
from ckpt_tools.conversions.run import run
from ckpt_tools.conversions.to_hf import gathering_job, model_beside
from ckpt_tools.conversions.to_mesh import MeshOptions, sharding_job
from ckpt_tools.description.layout import Mesh
from ckpt_tools.errors import UsageError
from ckpt_tools.formats.opening import open_path


def shard(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    mesh: str | Mesh | None = None,
    world_size: int | None = None,
    rules: str | os.PathLike[str] | None = None,
    set: Sequence[str] = (),  # noqa: A002 - the option's name
    tp_plan: str | None = None,
    dtype: str = "keep",
    prefix: str = "",
    engine: str = "stream",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    overwrite: bool = False,
    dry_run: bool = False,
    num_workers: int | None = None,
    progress: ProgressFactory | None = None,
    format: str | None = None,  # noqa: A002
) -> Conversion:
    """Convert full safetensors into a DTensor-sharded DCP checkpoint.

    Args:
        source: A safetensors file or an HF directory.
        destination: The DCP directory to create.
        mesh: For example "dp_shard=8" or "dp_replicate=2,dp_shard=-1,tp=2".
        world_size: Needed when an axis of `mesh` is -1.
        rules: YAML file of placement rules.
        set: Rules "GLOB=axis:S(d)[,axis:R]", before the file's.
        tp_plan: "auto" takes the tensor-parallel plan of the model's config.json.
        dtype: "keep", or cast floating-point tensors to "bf16", "f16" or "f32".
        prefix: Put in front of every FQN.
        engine: "stream", or "dtensor" for the reference path through torch.
        include: Globs of the FQNs to convert; all by default.
        exclude: Globs of the FQNs to leave out.
        overwrite: Replace an existing destination once the new one is durable.
        dry_run: Plan only.
        num_workers: Threads that move bytes.
        progress: Makes the receiver of progress.
        format: Overrides what would be detected.

    Raises:
        UsageError: An impossible mesh or rule.
        UnreadableError: The source is incomplete or damaged.
        DestinationExistsError: The destination exists.
    """
    with open_path(os.fspath(source), format=format) as opened:
        if opened.format.loads_by_dcp:
            raise UsageError(
                "the source is already sharded",
                where=os.fspath(source),
                hint=_instead("reshard", source, destination, mesh),
            )
        if engine not in ("stream", "dtensor"):
            raise UsageError(f"{engine!r} is not an engine", hint="--engine takes stream or dtensor")
        options = MeshOptions(mesh=mesh, world_size=world_size, rules=rules, set=set, tp_plan=tp_plan)
        job = sharding_job(
            opened,
            os.fspath(destination),
            options,
            dtype=dtype,
            prefix=prefix,
            include=include,
            exclude=exclude,
        )
        job.use_dtensor = engine == "dtensor"
        return _run(job, overwrite, dry_run, num_workers, progress)


def _instead(
    verb: str, source: str | os.PathLike[str], destination: str | os.PathLike[str], mesh: str | Mesh | None
) -> str:
    return f"ckpt {verb} {os.fspath(source)} {os.fspath(destination)} --mesh {'dp_shard=N' if mesh is None else mesh}"


def reshard(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    mesh: str | Mesh | None = None,
    world_size: int | None = None,
    rules: str | os.PathLike[str] | None = None,
    set: Sequence[str] = (),  # noqa: A002
    tp_plan: str | None = None,
    dtype: str = "keep",
    prefix: str = "",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    overwrite: bool = False,
    dry_run: bool = False,
    num_workers: int | None = None,
    progress: ProgressFactory | None = None,
    format: str | None = None,  # noqa: A002
) -> Conversion:
    """Convert a sharded checkpoint for another mesh; optimizer state and non-tensor items come along.

    Arguments and errors are those of `shard`. Optimizer state is cut like its parameter.
    """
    with open_path(os.fspath(source), format=format) as opened:
        if not opened.format.is_sharded:
            raise UsageError(
                "the source is not sharded",
                where=os.fspath(source),
                hint=_instead("shard", source, destination, mesh),
            )
        options = MeshOptions(mesh=mesh, world_size=world_size, rules=rules, set=set, tp_plan=tp_plan)
        job = sharding_job(
            opened,
            os.fspath(destination),
            options,
            dtype=dtype,
            prefix=prefix,
            include=include,
            exclude=exclude,
        )
        return _run(job, overwrite, dry_run, num_workers, progress)


def gather(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    max_shard_size: str | None = None,
    dtype: str = "keep",
    strip_prefix: str = "auto",
    assets: str | os.PathLike[str] | None = None,
    like: str | os.PathLike[str] | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    allow_foreign_names: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    num_workers: int | None = None,
    progress: ProgressFactory | None = None,
    format: str | None = None,  # noqa: A002
) -> Conversion:
    """Convert a sharded checkpoint into full safetensors that transformers loads.

    Without options, a checkpoint that `shard` made from HF files gives those very files back, byte for byte.

    Args:
        source: A DCP directory, or anything else that holds tensors.
        destination: The HF directory to create.
        max_shard_size: Largest file, for example "5GB" (the default when nothing else decides).
        dtype: "keep", or cast floating-point tensors to "bf16", "f16" or "f32".
        strip_prefix: "auto" finds the model inside a trainer's state and strips wrappers; "none"; or a prefix.
        assets: Directory whose config, tokenizer, … are put beside the weights.
        like: Reference whose names, order, files and dtypes are restored.
        include: Globs of the FQNs to convert; all by default.
        exclude: Globs of the FQNs to leave out.
        allow_foreign_names: Write names that the architecture does not have, or not all of its names, with a warning.
        overwrite: Replace an existing destination once the new one is durable.
        dry_run: Plan only.
        num_workers: Threads that move bytes.
        progress: Makes the receiver of progress.
        format: Overrides what would be detected.

    Raises:
        UsageError: Options that contradict each other, keys that `like` has and the source lacks, or names that
            transformers would not load into the architecture that config.json names.
        UnreadableError: The source is incomplete or damaged.
        DestinationExistsError: The destination exists.
    """
    with ExitStack() as stack:
        opened = stack.enter_context(open_path(os.fspath(source), format=format))
        reference = None if like is None else stack.enter_context(open_path(os.fspath(like)))
        beside = model = None
        if assets is not None:
            if not os.path.isdir(assets):
                raise UsageError("--assets takes a directory", where=os.fspath(assets))
            beside, model = model_beside(os.fspath(assets), stack)
        job = gathering_job(
            opened,
            os.fspath(destination),
            max_shard_size=max_shard_size,
            dtype=dtype,
            strip=strip_prefix,
            assets=beside,
            like=reference,
            include=include,
            exclude=exclude,
        )
        originals = filter(None, (opened, reference, model))
        check_names(job, originals, allow_foreign=allow_foreign_names, is_selection=bool(include or exclude))
        return _run(job, overwrite, dry_run, num_workers, progress)


def _run(
    job: Job, overwrite: bool, dry_run: bool, num_workers: int | None, progress: ProgressFactory | None
) -> Conversion:
    job.overwrite = overwrite
    job.num_workers = num_workers or default_num_workers()
    job.progress = progress
    return run(job, dry_run=dry_run)
