"""What this machine has: memory that is free, devices to compute on."""

from __future__ import annotations

import torch

from ckpt_tools.errors import UsageError
from ckpt_tools.memory import available_bytes


def free_memory(device: torch.device) -> int:
    """Return the bytes that can still be allocated: of a GPU, or of this machine within its container's limit."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return available_bytes()


def choose_device(wanted: str, *, num_local: int, local_rank: int) -> torch.device:
    """Return where a rank computes; "auto" takes GPUs when there is one for every rank of this machine."""
    count = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
    if count >= num_local:
        return torch.device("cuda", local_rank)
    if wanted == "cuda":
        raise UsageError(
            f"{num_local} ranks need as many GPUs, and there are {count}", hint="use --device cpu, or fewer ranks"
        )
    return torch.device("cpu")
