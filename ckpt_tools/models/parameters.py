"""Parameters of a model: their dtypes, and other tensors in their place. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
"""By the names that options take."""


def replace_parameters(model: nn.Module, make: Callable[[nn.Parameter], torch.Tensor | None]) -> None:
    """Put what `make` returns in the place of every parameter; None leaves it. Names that share one share the new one.

    What hangs on a parameter (attributes, `requires_grad`) hangs on the new one.
    """
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # with the old ones, lest an id be given out again
    for module in model.modules():
        for name, present in list(module._parameters.items()):  # noqa: SLF001 - setattr would register it anew
            if present is None:
                continue
            if id(present) not in made:
                made[id(present)] = (present, _like(present, make(present)))
            module._parameters[name] = made[id(present)][1]  # noqa: SLF001


def _like(present: nn.Parameter, tensor: torch.Tensor | None) -> nn.Parameter:
    if tensor is None:
        return present
    parameter = nn.Parameter(tensor, requires_grad=present.requires_grad)
    parameter.__dict__.update(present.__dict__)
    return parameter
