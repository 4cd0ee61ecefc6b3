"""`merge_lora`."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import ExitStack

from ckpt_tools.adapters.ecosystems.peft.overrides import parse_overrides
from ckpt_tools.adapters.merge import merging_job
from ckpt_tools.adapters.read.opening import read_adapter
from ckpt_tools.api.workers import ProgressFactory, default_num_workers
from ckpt_tools.conversions.job import Conversion
from ckpt_tools.conversions.run import run
from ckpt_tools.errors import UsageError
from ckpt_tools.formats.opening import open_path


def merge_lora(
    base: str | os.PathLike[str],
    adapter: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    dtype: str = "keep",
    scale: float = 1.0,
    alpha: float | None = None,
    adapter_name: str | None = None,
    config: Sequence[str] = (),
    max_shard_size: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    strict: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    num_workers: int | None = None,
    progress: ProgressFactory | None = None,
    format: str | None = None,  # noqa: A002
) -> Conversion:
    """Merge an adapter of any family into its base, streaming.

    Tensors that the adapter leaves alone are moved as bytes. Adapted ones are computed in float32 and cast once.
    Memory: a few blocks and the adapter; for families that mix the rows of a weight (LyCORIS' OFT and BOFT, DoRA by
    column) a few times the largest weight that they adapt.

    Args:
        base: A safetensors file, an HF directory, or a DCP checkpoint, whose mesh is kept.
        adapter: Whatever `export_lora` reads.
        destination: The directory to create: safetensors for safetensors, DCP for DCP.
        dtype: "keep" the base's, or cast floating-point tensors to "bf16", "f16" or "f32".
        scale: Multiplies what the adapter adds.
        alpha: Goes before every alpha that is found.
        adapter_name: Which adapter, when there are several.
        config: "FIELD=VALUE" of PEFT's configuration, for what nothing else tells.
        max_shard_size: Largest file, for example "5GB"; the base's files by default.
        include: Globs of the adapter's tensors to merge; all by default.
        exclude: Globs of the adapter's tensors to leave out.
        strict: Refuse an adapter of which something is assumed.
        overwrite: Replace an existing destination once the new one is durable.
        dry_run: Plan only.
        num_workers: Threads that move bytes.
        progress: Makes the receiver of progress.
        format: Of the base; overrides what would be detected.

    Raises:
        UsageError: A module that does not fit the base, or something that the result depends on is not known.
        UnreadableError: Base or adapter are incomplete or damaged.
        MergeUnchangedError: Tensors come out as they were, although the adapter changes them.
        DestinationExistsError: The destination exists.
    """
    if not math.isfinite(scale) or not scale:
        what = "is no number" if scale else "leaves nothing of what the adapter adds"
        raise UsageError(f"a scale of {scale:g} {what}", where="--scale", hint="1 adds it as it was trained")
    workers = num_workers or default_num_workers(computes=True)
    with ExitStack() as stack:
        opened = stack.enter_context(open_path(os.fspath(base), format=format))
        read = stack.enter_context(
            read_adapter(
                os.fspath(adapter),
                adapter_name=adapter_name,
                include=include,
                exclude=exclude,
                settings=parse_overrides(config),
            )
        )
        job = stack.enter_context(
            merging_job(
                opened,
                read,
                os.fspath(destination),
                dtype=dtype,
                scale=scale,
                alpha=alpha,
                max_shard_size=max_shard_size,
                num_workers=workers,
                strict=strict,
            )
        )
        job.overwrite = overwrite
        job.num_workers = workers
        job.progress = progress
        return run(job, dry_run=dry_run)
