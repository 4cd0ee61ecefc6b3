"""Jobs that write a checkpoint as what it is: safetensors, or DCP with the same chunks on the same ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ckpt_tools.conversions.job import Job, cast_target, notes_on
from ckpt_tools.conversions.to_hf import GatherOptions, gathering_job
from ckpt_tools.description.checkpoint import Checkpoint
from ckpt_tools.description.transform import find_model, is_optimizer
from ckpt_tools.errors import UsageError
from ckpt_tools.formats.dcp_placing import kept_cells, place
from ckpt_tools.formats.opening import Opened


def own_job(
    opened: Opened,
    destination: str,
    *,
    dtype: str = "keep",
    dtype_for: Sequence[str] = (),
    max_shard_size: str | None = None,
    only_model: bool = True,
) -> Job:
    """Return the job that writes a checkpoint again.

    What is neither DCP nor safetensors becomes safetensors.

    Args:
        opened: The checkpoint.
        destination: Directory to create.
        dtype: As `--dtype`.
        dtype_for: As `--dtype-for`.
        max_shard_size: As of `gather`; not for DCP.
        only_model: Leave optimizer state and whatever else a trainer keeps out of a DCP checkpoint. Safetensors hold
            nothing but a model anyway.

    Raises:
        UsageError: A size of files that DCP does not have.
    """
    if not opened.format.loads_by_dcp:
        source = opened.source.root
        gather = GatherOptions(source, destination, max_shard_size=max_shard_size, dtype=dtype, dtype_for=dtype_for)
        return gathering_job(opened, gather)
    if max_shard_size is not None:
        raise UsageError(
            "--max-shard-size is for safetensors files, and the source is a DCP checkpoint",
            hint="leave it out, and `ckpt gather` the result",
        )
    chosen = replace(find_model(opened.checkpoint)[0], blobs=()) if only_model else opened.checkpoint
    source_checkpoint = replace(chosen, tensors=tuple(map(opened.resolve, chosen.tensors)))
    target = cast_target(source_checkpoint, dtype, dtype_for)
    cells = {entry.fqn: kept_cells(entry) for entry in target.tensors}
    kept = {entry.fqn for entry in source_checkpoint.tensors}
    placements = opened.checkpoint.placements or {}
    return Job(
        opened=opened,
        source=source_checkpoint,
        target=place(target.tensors, cells, source_checkpoint.blobs),
        destination=destination,
        assets=opened.own_assets,
        dtype=dtype,
        mesh=opened.checkpoint.mesh,
        placements={fqn: placed for fqn, placed in placements.items() if fqn in kept},
        notes=[*notes_on(opened), *(_omitted(opened.checkpoint, kept) if only_model else ())],
    )


def _omitted(checkpoint: Checkpoint, kept: set[str]) -> list[str]:
    others = [entry for entry in checkpoint.tensors if entry.fqn not in kept]
    optimizer = sum(map(is_optimizer, others))
    notes = []
    if optimizer:
        notes.append(f"left out {optimizer} tensors of optimizer state: it belongs to the weights of the source")
    if len(others) > optimizer:
        notes.append(f"left out {len(others) - optimizer} tensors that are not the model's")
    if checkpoint.blobs:
        notes.append(f"left out {len(checkpoint.blobs)} items that are not tensors")
    return notes
