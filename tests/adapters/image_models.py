"""Toy models of diffusers' own classes for images and video, and adapters of all their linear layers."""

from __future__ import annotations

import functools
import math
import tomllib
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch
from arrays import to_array, to_tensor
from torch import nn

from ckpt_tools.adapters.adapter import Adapter, AdapterModule, Sourced
from ckpt_tools.adapters.ecosystems.output import Written
from ckpt_tools.adapters.ecosystems.to_target import to_target as to_target_of_arrays

TOYS = tomllib.loads((Path(__file__).parent / "toys.toml").read_text())


def toy(name: str, **options: object) -> nn.Module:
    import diffusers

    config = {**TOYS[name], **options}
    with warnings.catch_warnings(action="ignore"):
        return getattr(diffusers, config.pop("class"))(**config).eval()


flux1, flux2, sd3, sdxl, qwen_image = (
    functools.partial(toy, name) for name in ("flux1", "flux2", "sd3", "sdxl", "qwen_image")
)


def flux1_inputs() -> dict[str, object]:
    return {
        "hidden_states": torch.randn(1, 6, 4),
        "encoder_hidden_states": torch.randn(1, 3, 20),
        "pooled_projections": torch.randn(1, 12),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([3.5]),
        "img_ids": torch.zeros(6, 3),
        "txt_ids": torch.zeros(3, 3),
    }


def flux2_inputs() -> dict[str, object]:
    return {
        "hidden_states": torch.randn(1, 6, 4),
        "encoder_hidden_states": torch.randn(1, 3, 20),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([3.5]),
        "img_ids": torch.zeros(1, 6, 4),
        "txt_ids": torch.zeros(1, 3, 4),
    }


def sd3_inputs() -> dict[str, object]:
    return {
        "hidden_states": torch.randn(1, 4, 8, 8),
        "encoder_hidden_states": torch.randn(1, 3, 20),
        "pooled_projections": torch.randn(1, 12),
        "timestep": torch.tensor([500.0]),
    }


def sdxl_inputs() -> dict[str, object]:
    return {
        "sample": torch.randn(1, 4, 8, 8),
        "timestep": torch.tensor(10),
        "encoder_hidden_states": torch.randn(1, 3, 24),
        "added_cond_kwargs": {"text_embeds": torch.randn(1, 32), "time_ids": torch.randn(1, 6)},
    }


MORE: dict[str, Callable[[], nn.Module]] = {
    "sd1": functools.partial(toy, "sd"),
    "sd2": functools.partial(toy, "sd", use_linear_projection=True),
    "kolors": functools.partial(toy, "sdxl", encoder_hid_dim=12, encoder_hid_dim_type="text_proj"),
    **{
        name: functools.partial(toy, name) for name in ("chroma", "qwen_image", "z_image", "lumina2", "sana", "hidream")
    },
}
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, object]]]] = {
    "flux1": (flux1, flux1_inputs),
    "flux2": (flux2, flux2_inputs),
    "sd3": (sd3, sd3_inputs),
    "sdxl": (sdxl, sdxl_inputs),
}
OF_DIFFUSERS = ("aura_flow", "cosmos", "mochi", "kandinsky5", "krea2", "ideogram4", "ernie_image", "hunyuan_image")
"""Of whose names only diffusers' are known."""
VIDEO = ("wan", "wan-vace", "wan-skyreels", "hunyuan_video", "hunyuan_video_1_5", "ltx", "ltx2", "cogvideox")
ALL: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    **{name: (name, make) for name, (make, _) in MODELS.items()},
    **{name: (name, make) for name, make in MORE.items()},
    **{name: (name.partition("-")[0], functools.partial(toy, name)) for name in (*VIDEO, *OF_DIFFUSERS)},
}
"""Model → (its family, its maker)."""
COMPONENT = {"flux1": "transformer", "flux2": "transformer", "sd3": "transformer", "sdxl": "unet"}


def lora(
    path: str, shape: tuple[int, ...], *, rank: int = 4, alpha: float = 2.0, dora: bool = False
) -> AdapterModule[torch.Tensor]:
    """A random lora of a weight of `shape`, all of whose rows it changes."""
    out, columns, *kernel = shape
    factors = {"A": torch.randn(rank, columns, *kernel) / 4, "B": torch.randn(out, rank, *[1] * len(kernel)) / 4}
    if dora:
        factors["magnitude"] = torch.rand(out) + 0.5
    return AdapterModule(
        path=path, family="lora", factors=factors, rank=Sourced(rank, "test"), alpha=Sourced(alpha, "test"),
    )  # fmt: skip


def linears(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shape of every weight that a lora can have, by module path."""
    return {
        name: tuple(module.weight.shape)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    }


def adapter(modules: Iterable[AdapterModule[torch.Tensor]], convention: str = "peft") -> Adapter[torch.Tensor]:
    return Adapter(modules=tuple(sorted(modules, key=lambda module: module.path)), convention=convention)


def to_target(given: Adapter[torch.Tensor], target: str, **options: object) -> Written:
    """The product's `to_target`, for torch tensors on both sides."""
    modules = [
        each.with_factors({role: to_array(factor) for role, factor in each.factors.items()}) for each in given.modules
    ]
    written = to_target_of_arrays(given.with_modules(tuple(modules)), target, **options)
    return replace(written, tensors={name: to_tensor(array) for name, array in written.tensors.items()})


def delta(module: AdapterModule[torch.Tensor]) -> torch.Tensor:
    """What a lora adds, computed here and not by the product's own maths."""
    a, b = module.factors["A"].double(), module.factors["B"].double()
    rank = a.shape[0]
    scale = module.alpha.value / (math.sqrt(rank) if module.use_rslora else rank)
    flat = b.reshape(b.shape[0], rank) @ a.reshape(rank, -1)
    return (scale * flat).reshape(b.shape[0], *a.shape[1:])


def merged(weight: torch.Tensor, module: AdapterModule[torch.Tensor]) -> torch.Tensor:
    """The weight with a lora, or a DoRA by rows, applied."""
    new = weight.double() + delta(module)
    if "magnitude" in module.factors:
        norm = new.flatten(1).norm(dim=1)
        factor = module.factors["magnitude"].double().reshape(-1) / norm
        new = new * factor.reshape(-1, *[1] * (new.ndim - 1))
    return new.to(weight.dtype)


def apply_to_model(model: nn.Module, modules: Iterable[AdapterModule[torch.Tensor]]) -> None:
    """Add the changes to the weights."""
    with torch.no_grad():
        for module in modules:
            weight = model.get_submodule(module.path).weight
            weight.copy_(merged(weight, module))
