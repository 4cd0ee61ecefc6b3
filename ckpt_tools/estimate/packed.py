"""Linear layers of 4-bit weights, and a loss whose logits never exist whole, as far as memory goes. Imports torch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ckpt_tools.estimate.figures import NF4_SCALE_BYTES


class _Unpacked(torch.autograd.Function):
    """x · Wᵀ with a weight that exists only while it is used: once in forward, once more in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, out: int) -> torch.Tensor:  # noqa: ANN401
        ctx.save_for_backward(packed)
        ctx.out = out
        return x @ x.new_empty((out, x.shape[-1])).t()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # noqa: ANN401
        (packed,) = ctx.saved_tensors
        (grad,) = grads
        into = packed.numel() * packed.element_size() * 2 // ctx.out
        return grad @ grad.new_empty((ctx.out, into)), None, None


class PackedLinear(nn.Module):
    """A frozen linear layer of 4-bit weights, kept in a parameter of the compute dtype (`bnb_4bit_quant_storage`)."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        rows = math.ceil(linear.weight.numel() / 2 / dtype.itemsize)
        packed = torch.empty((rows, 1), dtype=dtype, device="meta")
        self.weight = nn.Parameter(packed, requires_grad=False)
        scales = math.ceil(linear.weight.numel() * NF4_SCALE_BYTES)
        self.register_buffer("scales", torch.empty(scales, dtype=torch.uint8, device="meta"))
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., out] of [..., in]."""
        found: torch.Tensor = _Unpacked.apply(  # type: ignore[no-untyped-call]
            x.to(self.weight.dtype), self.weight, self.out_features
        )
        return found if self.bias is None else found + self.bias


def pack_linears(model: nn.Module, dtype: torch.dtype) -> None:
    """Pack the frozen layers under adapters."""
    for module in model.modules():
        base = module._modules.get("base_layer")  # noqa: SLF001 - PEFT's name for it
        if isinstance(base, nn.Linear):
            module._modules["base_layer"] = PackedLinear(base, dtype)  # noqa: SLF001


class _Chunked(torch.autograd.Function):
    """Cross-entropy of x · Wᵀ, chunk by chunk, gradients computed in forward (as Liger's kernel does)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        rows, width = x.shape
        # Liger's choice: as many values in a chunk's logits as in x.
        chunk = min(rows, 1 << max(0, math.ceil(math.log2(max(1, rows * width / weight.shape[0])))))
        grad_x = torch.empty_like(x)
        grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        logits = x[:chunk] @ weight.t()
        grad_x[:chunk] = logits @ weight
        if grad_weight is not None:
            grad_weight += logits.t() @ x[:chunk]
        ctx.save_for_backward(grad_x, grad_weight)
        return x.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:  # noqa: ANN401, ARG004
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x, grad_weight


def fuse_loss(output: nn.Module) -> None:
    """Let an output layer return the loss in place of logits."""

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _Chunked.apply(hidden.flatten(0, -2), output.weight)  # type: ignore[no-untyped-call]
        return found

    output.forward = forward
