"""The layers that adapters go on when nobody names them."""

from __future__ import annotations

from torch import nn

from ckpt_tools.errors import UsageError
from ckpt_tools.fsdp2.ties import tied_groups


def linear_layers(model: nn.Module) -> list[str]:
    """Return the FQNs of the linear layers that get adapters: all but the output layer and layers that share weights.

    Raises:
        UsageError: There is none.
    """
    get_output = getattr(model, "get_output_embeddings", None)
    output = get_output() if callable(get_output) else None
    shared = {fqn.rpartition(".")[0] for group in tied_groups(model) for fqn in group}
    found = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module is not output and name not in shared and name
    ]
    if not found:
        raise UsageError("--lora finds no linear layer to adapt", where=type(model).__name__)
    return found
