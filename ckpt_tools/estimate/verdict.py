"""Whether a case fits in a device, and where the figures are too uncertain to say."""

from __future__ import annotations

from ckpt_tools.estimate.margin import Margin
from ckpt_tools.estimate.options import Case
from ckpt_tools.estimate.report import Memory

OFFLOAD_UNDERESTIMATE = 1.7
"""What the formula's peak with offload has to be multiplied by, at most: it is 0.61 of what PEFT's documentation
("Fully Sharded Data Parallel") says of QLoRA with FSDP and offload of a 70B model."""


def judge(
    case: Case, memory: Memory, margin: Margin, gpu_memory: int, *, is_tracked: bool
) -> tuple[bool | None, str | None]:
    """Say whether a case fits.

    Args:
        case: What was estimated.
        memory: Of one rank, in bytes.
        margin: Beside its peak.
        gpu_memory: Bytes of a device.
        is_tracked: Was a step tracked, or is it the formula's?

    Returns:
        True or False where the estimate decides, else None and the reason.
    """
    fits = memory.peak + margin.total <= gpu_memory
    if fits and case.offload and not is_tracked and memory.peak * OFFLOAD_UNDERESTIMATE + margin.total > gpu_memory:
        return None, f"with offload the formula is as low as 1/{OFFLOAD_UNDERESTIMATE} of what was measured elsewhere"
    tp = case.mesh.size("tp")
    cut = memory.at_peak.get("activations", 0) * (1 - 1 / tp)
    if not fits and memory.peak - cut + margin.total <= gpu_memory:
        return None, "activations are counted whole on every tp rank; sequence and loss parallelism would cut them"
    return fits, None
