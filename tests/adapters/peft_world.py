"""Small models with random PEFT adapters, and the modules that a reader would make of them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from ckpt_tools.adapters.adapter import AdapterModule, FamilyName, Sourced

ROLES = {
    "lora_A": "A", "lora_B": "B", "lora_embedding_A": "A_embedding", "lora_embedding_B": "B_embedding",
    "lora_magnitude_vector": "magnitude", "oft_R": "R", "oft_embedding_R": "R_embedding", "boft_R": "R", "boft_s": "s",
}  # fmt: skip


class Zoo(nn.Module):
    """One module of every kind that PEFT adapts; none is square unless its name says so."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 16)
        self.linear = nn.Linear(16, 8)
        self.square = nn.Linear(16, 16, bias=False)
        self.conv = nn.Conv2d(4, 8, 3)
        self.point = nn.Conv2d(4, 8, 1)
        self.line = nn.Conv1d(4, 8, 3)
        self.config = {"model_type": "zoo", "tie_word_embeddings": False}


def randomise(model: nn.Module, wanted: Callable[[str], bool], seed: int = 0) -> None:
    """Give every wanted parameter random values of the size that training would give them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if wanted(name):
                noise = torch.randn(parameter.shape, generator=generator) * 0.3
                around = float(any(part in name for part in ("boft_s", "magnitude", "rescale", "dora_scale")))
                parameter.copy_(around + noise)


def adapt(model: nn.Module, config: object, seed: int = 0) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a PEFT model with a random adapter, and the merged weights as PEFT computes them."""
    from peft import get_peft_model

    with warnings.catch_warnings(action="ignore"):
        peft_model = get_peft_model(copy.deepcopy(model), config)
        markers = (*ROLES, "hada_", "lokr_")
        randomise(peft_model, lambda name: any(marker in name for marker in markers), seed)
        merged = copy.deepcopy(peft_model).merge_and_unload()
    return peft_model, {name: tensor.detach() for name, tensor in merged.state_dict().items()}


def modules_of(
    peft_model: nn.Module, family: FamilyName, *, alpha: float | None, rank: int | None, use_rslora: bool = False
) -> list[AdapterModule[Tensor]]:
    """Take the factors out of a PEFT model, by name."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, parameter in peft_model.named_parameters():
        parts = name.removeprefix("base_model.model.").split(".")
        for i, part in enumerate(parts):
            role = ROLES.get(part) or (part[5:] if part.startswith(("hada_", "lokr_")) else None)
            if role is not None:
                if role == "B" and parts[-1] == "bias":
                    role = "B_bias"
                found.setdefault(".".join(parts[:i]), {})[role] = parameter.detach()
    return [
        AdapterModule(
            path=path,
            family=family,
            factors=factors,
            rank=None if rank is None else Sourced(rank, "config"),
            alpha=None if alpha is None else Sourced(alpha, "config"),
            use_rslora=use_rslora,
        )
        for path, factors in found.items()
    ]


def settings_of(values: Mapping[str, object]) -> dict[str, Sourced[object]]:
    """Settings as a reader gives them, of a configuration."""
    return {
        name: Sourced(value, "adapter_config.json") for name, value in ({"peft_type": "any"} | dict(values)).items()
    }
