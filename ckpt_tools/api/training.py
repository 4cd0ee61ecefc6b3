"""`smoke`: what builds and trains models."""

from __future__ import annotations

import os
from collections.abc import Callable

from ckpt_tools.description.layout import Mesh
from ckpt_tools.smoke import SmokeOptions, SmokeReport, run_smoke
from ckpt_tools.units import parse_size


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
        factory: "pkg.mod:callable" that builds the model instead (see `ckpt_tools.models.builtin`).
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
