"""Selective activation checkpointing, per operation, as torchtitan does it. Imports torch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


def _kept_operations() -> set[Any]:
    """Return what is never computed twice: attention, and what other ranks sent.

    Source: `torchtitan/distributed/activation_checkpoint.py`.
    """
    aten, comm = torch.ops.aten, torch.ops._c10d_functional  # noqa: SLF001 - where collectives live
    return {
        aten._scaled_dot_product_efficient_attention.default,  # noqa: SLF001
        aten._scaled_dot_product_flash_attention.default,  # noqa: SLF001
        aten._scaled_dot_product_cudnn_attention.default,  # noqa: SLF001
        aten._scaled_dot_product_flash_attention_for_cpu.default,  # noqa: SLF001
        aten._scaled_dot_product_attention_math.default,  # noqa: SLF001
        comm.reduce_scatter_tensor.default,
        comm.all_to_all_single.default,
    }


def checkpoint_selectively(unit: nn.Module) -> None:
    """Keep what `_kept_operations` names and every second matrix product of `unit`; compute the rest again."""
    kept = _kept_operations()
    products = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}

    def contexts() -> Any:  # noqa: ANN401 - a pair of context managers
        seen: Counter[bool] = Counter()

        def policy(context: Any, function: Any, *args: object, **kwargs: object) -> CheckpointPolicy:  # noqa: ANN401, ARG001
            if function in products:
                seen[context.is_recompute] += 1
                is_kept = seen[context.is_recompute] % 2 == 1
            else:
                is_kept = function in kept
            return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]

    inner = unit.forward

    def forward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the block takes
        # Around forward and not around the call: what is computed again must not gather parameters again.
        return checkpoint(inner, *args, use_reentrant=False, context_fn=contexts, **kwargs)

    unit.forward = forward
