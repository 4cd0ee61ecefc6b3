"""Random draws and running state of a forward pass, made the same on the ranks and in the reference.

Whatever a model draws from the common generators (dropout, noise, timesteps, augmentation) depends on the batch and the
step alone: a rank draws what the reference draws for that rank's batch.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping

import torch
from torch import nn

from ckpt_tools.fsdp2.ties import owner_of

_SEED = 20_000
_STEPS = 1_000_003  # Between the seeds of two steps: more than there are ranks

Buffers = Mapping[str, torch.Tensor]  # FQN → a copy of the buffer


def seed(index: int, step: int) -> None:
    """Seed torch (CPU and GPUs), Python and NumPy for one pass over the batch of data-parallel index `index`."""
    value = _SEED + index + _STEPS * step
    torch.manual_seed(value)
    random.seed(value)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(value % 2**32)


def state() -> tuple[object, ...]:
    """Return where the generators are: two that are equal mean that nothing was drawn between them."""
    numpy = sys.modules.get("numpy")
    return (
        torch.get_rng_state().numpy().tobytes(),
        torch.cuda.get_rng_state().numpy().tobytes() if torch.cuda.is_initialized() else None,  # type: ignore[no-untyped-call]
        random.getstate(),
        None if numpy is None else repr(numpy.random.get_state()),
    )


def take_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of every buffer."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def put_buffers(model: nn.Module, buffers: Buffers) -> None:
    """Give buffers back what they were."""
    for name, value in buffers.items():
        module, key = owner_of(model, name)
        buffer = module._buffers[key]  # noqa: SLF001 - setattr keeps it too, this says what is meant
        if buffer is not None and (buffer.shape, buffer.dtype) == (value.shape, value.dtype):
            with torch.no_grad():
                buffer.copy_(value)
        else:
            module._buffers[key] = value.clone()  # noqa: SLF001
