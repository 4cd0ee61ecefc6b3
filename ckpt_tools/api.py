"""One function per verb, with the command line's names and defaults; the command line is a thin face on these."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from ckpt_tools import diff as diffing
from ckpt_tools import inspect as inspecting
from ckpt_tools import verify as verifying
from ckpt_tools.checkpoint import Checkpoint, Finding, Format
from ckpt_tools.convert import run
from ckpt_tools.diff import Difference
from ckpt_tools.errors import UsageError
from ckpt_tools.execute import Progress
from ckpt_tools.inspect import Summary
from ckpt_tools.job import Conversion, Job
from ckpt_tools.layout import Mesh
from ckpt_tools.opening import open_path
from ckpt_tools.smoke import SmokeOptions, SmokeReport, run_smoke
from ckpt_tools.storage.source import Source
from ckpt_tools.text import escape_name
from ckpt_tools.to_hf import assets_in, gathering_job
from ckpt_tools.to_mesh import MeshOptions, find_layout, sharding_job
from ckpt_tools.transform import select
from ckpt_tools.units import parse_size
from ckpt_tools.verify import Level, Verification

ProgressFactory = Callable[[int], Progress]
"""Given the number of bytes to move, returns what reports them."""


def default_num_workers() -> int:
    """Return how many threads move bytes by default: two per core, at most eight."""
    return min(8, 2 * (len(os.sched_getaffinity(0)) or 1))


def open_checkpoint(path: str | os.PathLike[str], *, format: Format | None = None) -> Checkpoint:  # noqa: A002
    """Describe the checkpoint at `path` from its headers alone.

    Args:
        path: A safetensors file, an HF directory or a DCP directory.
        format: Overrides what would be detected.

    Raises:
        UnreadableError: Not a complete, readable checkpoint.
    """
    with open_path(os.fspath(path), format=format) as opened:
        return opened.checkpoint


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
    format: Format | None = None,  # noqa: A002
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
        if opened.checkpoint.format == "dcp":
            raise UsageError(
                "the source is already sharded",
                where=escape_name(os.fspath(source)),
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
    paths = f"{escape_name(os.fspath(source))} {escape_name(os.fspath(destination))}"
    return f"ckpt {verb} {paths} --mesh {'dp_shard=N' if mesh is None else mesh}"


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
    format: Format | None = None,  # noqa: A002
) -> Conversion:
    """Convert a sharded checkpoint for another mesh; optimizer state and non-tensor items come along.

    Arguments and errors are those of `shard`. Optimizer state is cut like its parameter.
    """
    with open_path(os.fspath(source), format=format) as opened:
        if opened.checkpoint.format not in ("dcp", "hf-sharded"):
            raise UsageError(
                "the source is not sharded",
                where=escape_name(os.fspath(source)),
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
    overwrite: bool = False,
    dry_run: bool = False,
    num_workers: int | None = None,
    progress: ProgressFactory | None = None,
    format: Format | None = None,  # noqa: A002
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
        overwrite: Replace an existing destination once the new one is durable.
        dry_run: Plan only.
        num_workers: Threads that move bytes.
        progress: Makes the receiver of progress.
        format: Overrides what would be detected.

    Raises:
        UsageError: Options that contradict each other, or keys that `like` has and the source lacks.
        UnreadableError: The source is incomplete or damaged.
        DestinationExistsError: The destination exists.
    """
    with ExitStack() as stack:
        opened = stack.enter_context(open_path(os.fspath(source), format=format))
        reference = None if like is None else stack.enter_context(open_path(os.fspath(like)))
        beside = None
        if assets is not None:
            if not os.path.isdir(assets):
                raise UsageError("--assets takes a directory", where=escape_name(os.fspath(assets)))
            beside = assets_in(stack.enter_context(Source(os.fspath(assets))))
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
        return _run(job, overwrite, dry_run, num_workers, progress)


def inspect(
    source: str | os.PathLike[str],
    *,
    mesh: str | Mesh | None = None,
    world_size: int | None = None,
    rules: str | os.PathLike[str] | None = None,
    set: Sequence[str] = (),  # noqa: A002
    tp_plan: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    format: Format | None = None,  # noqa: A002
) -> Summary:
    """Summarise a checkpoint from its headers alone.

    Args:
        source: A safetensors file, an HF directory or a DCP directory.
        mesh: Show the layout that this mesh would give instead of the one on disk.
        world_size: Needed when an axis of `mesh` is -1.
        rules: YAML file of placement rules for `mesh`.
        set: Rules "GLOB=axis:S(d)[,axis:R]" for `mesh`.
        tp_plan: "auto" takes the tensor-parallel plan of the model's config.json for `mesh`.
        include: Globs of the FQNs to look at; all by default.
        exclude: Globs of the FQNs to leave out.
        format: Overrides what would be detected.

    Raises:
        UsageError: An impossible mesh or rule.
        UnreadableError: Not a complete, readable checkpoint.
    """
    with open_path(os.fspath(source), format=format) as opened:
        checkpoint = select(opened.checkpoint, include=include, exclude=exclude)
        if mesh is None and rules is None:
            if set or tp_plan is not None:
                raise UsageError("rules need a mesh", hint="add for example --mesh dp_shard=8,tp=2")
            return inspecting.summarise(checkpoint, path=os.fspath(source))
        options = MeshOptions(mesh=mesh, world_size=world_size, rules=rules, set=set, tp_plan=tp_plan)
        layout = find_layout(opened, checkpoint, options)
        virtual = inspecting.overlay(checkpoint, layout.mesh, layout.placements)
        return inspecting.summarise(virtual, path=os.fspath(source), mesh_source="overlay")


def verify(
    source: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    level: Level = "data",
    num_workers: int | None = None,
    progress: ProgressFactory | None = None,
    format: Format | None = None,  # noqa: A002
) -> Verification:
    """Check a checkpoint and collect everything that is wrong.

    Args:
        source: A safetensors file, an HF directory or a DCP directory.
        against: A checkpoint of any format that must hold the same tensors, bit for bit.
        level: "structure" reads headers; "data" also reads every byte.
        num_workers: Threads that read.
        progress: Makes the receiver of progress.
        format: Overrides what would be detected.

    Raises:
        UnreadableError: So broken that it cannot even be described.
    """
    if level not in ("structure", "data"):
        raise UsageError(f"{level!r} is not a level", hint="--level takes structure or data")
    workers = num_workers or default_num_workers()
    with ExitStack() as stack:
        opened = stack.enter_context(open_path(os.fspath(source), format=format))
        reference = None if against is None else stack.enter_context(open_path(os.fspath(against)))
        total = opened.checkpoint.total_bytes if level == "data" else 0
        if reference is not None:
            total += opened.checkpoint.total_bytes + reference.checkpoint.total_bytes
        receiver = progress(total) if progress is not None and total else None
        result = verifying.verify(opened, level=level, num_workers=workers, progress=receiver)
        if reference is None or not result.ok:
            return result
        difference = diffing.diff(opened, reference, num_workers=workers, progress=receiver)
        return verifying.with_findings(result, _findings_of(difference, os.fspath(against or "")))


def _findings_of(difference: Difference, against: str) -> tuple[Finding, ...]:
    where = escape_name(against)
    rows = [("missing-tensor", fqn, "only the reference has it") for fqn in difference.only_in_b]
    rows += [("extra-tensor", fqn, "the reference does not have it") for fqn in difference.only_in_a]
    rows += [("different-tensor", change.fqn, change.what) for change in difference.changed]
    return tuple(
        Finding(code=code, severity="error", where=where, what=f"tensor {escape_name(fqn)!r}: {what}")
        for code, fqn, what in rows
    )


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    keys_only: bool = False,
    atol: float | None = None,
    rtol: float | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    num_workers: int | None = None,
    progress: ProgressFactory | None = None,
) -> Difference:
    """Compare two checkpoints of any formats: names, shapes, dtypes and bytes.

    Args:
        a: One checkpoint.
        b: The other.
        keys_only: Compare names, shapes and dtypes only.
        atol: Absolute tolerance for floating-point tensors; bitwise without tolerances.
        rtol: Relative tolerance.
        include: Globs of the FQNs to look at; all by default.
        exclude: Globs of the FQNs to leave out.
        num_workers: Threads that read.
        progress: Makes the receiver of progress.

    Raises:
        UnreadableError: One of them is incomplete or damaged.
    """
    with open_path(os.fspath(a)) as one, open_path(os.fspath(b)) as other:
        left, right = (
            replace(
                side,
                checkpoint=select(side.checkpoint, include=include, exclude=exclude, beside=beside.checkpoint),
            )
            for side, beside in ((one, other), (other, one))
        )
        total = left.checkpoint.total_bytes + right.checkpoint.total_bytes
        return diffing.diff(
            left,
            right,
            keys_only=keys_only,
            atol=atol,
            rtol=rtol,
            num_workers=num_workers or default_num_workers(),
            progress=progress(total) if progress is not None and not keys_only else None,
        )


def smoke(
    source: str | os.PathLike[str] | None = None,
    *,
    model: str | os.PathLike[str] | None = None,
    factory: str | None = None,
    mesh: str | Mesh | None = None,
    nproc: int | None = None,
    device: str = "auto",
    strategy: str | None = None,
    steps: int = 3,
    param_dtype: str = "keep",
    reduce_dtype: str = "keep",
    lora: bool = False,
    quantize: str | None = None,
    memory: str | None = None,
    timeout_s: float | None = None,
    on_phase: Callable[[str, str], None] | None = None,
    on_abandoned: Callable[[SmokeReport], None] | None = None,
) -> SmokeReport:
    """Build, shard, load, train, save and reload a model on several ranks, and compare it with one process.

    The ranks are processes of this machine, which end with the call, or those of torchrun.

    Args:
        source: A checkpoint of any format; without one the weights are random.
        model: A config.json, or the directory that holds it; beside the weights by default.
        factory: "pkg.mod:callable" that builds the model instead (see `ckpt_tools.smoke.builtin`).
        mesh: For example "dp_shard=2,tp=2"; dp_shard over all ranks by default.
        nproc: Number of ranks.
        device: "auto", "cpu" or "cuda".
        strategy: full_shard, shard_grad_op, hybrid_shard or no_shard; what suits the mesh by default.
        steps: Training steps.
        param_dtype: "keep", "bf16", "f16" or "f32": what the ranks compute in.
        reduce_dtype: In what gradients are averaged; as `param_dtype` by default.
        lora: Train LoRA adapters on the frozen model.
        quantize: "nf4" for 4-bit frozen weights.
        memory: What the run may take, for example "8GB"; a model that needs more is tried with fewer layers. By
            default what is free.
        timeout_s: Seconds that a phase may take before its ranks count as hanging; two minutes by default, and more
            for large models.
        on_phase: Told "begun", "done" or "failed" for every phase.
        on_abandoned: Under torchrun, given the report when ranks hang, before the process ends.

    Raises:
        UsageError: Options, mesh or model that cannot be.
        UnreadableError: The source is not a complete checkpoint.
    """
    options = SmokeOptions(
        source=None if source is None else os.fspath(source),
        model=None if model is None else os.fspath(model),
        factory=factory,
        mesh=None if mesh is None else str(mesh),
        nproc=nproc,
        device=device,
        strategy=strategy,
        steps=steps,
        param_dtype=param_dtype,
        reduce_dtype=reduce_dtype,
        lora=lora,
        quantize=quantize,
        memory_bytes=None if memory is None else parse_size(memory),
        timeout_s=timeout_s,
    )
    return run_smoke(options, on_phase=on_phase, on_abandoned=on_abandoned)


def _run(
    job: Job, overwrite: bool, dry_run: bool, num_workers: int | None, progress: ProgressFactory | None
) -> Conversion:
    job.overwrite = overwrite
    job.num_workers = num_workers or default_num_workers()
    job.progress = progress
    return run(job, dry_run=dry_run)
