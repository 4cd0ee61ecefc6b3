"""Toy models of the four image families, diffusers' own classes, and adapters of all their linear layers."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from arrays import to_array, to_tensor
from torch import nn

from ckpt_tools.adapters.adapter import Adapter, AdapterModule, Sourced
from ckpt_tools.adapters.ecosystems.forms import to_target as to_target_of_arrays
from ckpt_tools.adapters.ecosystems.output import Written


def flux1() -> nn.Module:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=20,
        pooled_projection_dim=12,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
    ).eval()


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


def flux2() -> nn.Module:
    from diffusers import Flux2Transformer2DModel

    return Flux2Transformer2DModel(
        in_channels=4,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=20,
        timestep_guidance_channels=8,
        axes_dims_rope=(4, 4, 4, 4),
    ).eval()


def flux2_inputs() -> dict[str, object]:
    return {
        "hidden_states": torch.randn(1, 6, 4),
        "encoder_hidden_states": torch.randn(1, 3, 20),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([3.5]),
        "img_ids": torch.zeros(1, 6, 4),
        "txt_ids": torch.zeros(1, 3, 4),
    }


def sd3() -> nn.Module:
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=20,
        caption_projection_dim=32,
        pooled_projection_dim=12,
        out_channels=4,
        pos_embed_max_size=8,
        dual_attention_layers=(0,),
    ).eval()


def sd3_inputs() -> dict[str, object]:
    return {
        "hidden_states": torch.randn(1, 4, 8, 8),
        "encoder_hidden_states": torch.randn(1, 3, 20),
        "pooled_projections": torch.randn(1, 12),
        "timestep": torch.tensor([500.0]),
    }


def sdxl(**options: object) -> nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64, 64),
        layers_per_block=2,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4, 4),
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        transformer_layers_per_block=(1, 1, 2),
        projection_class_embeddings_input_dim=80,
        cross_attention_dim=24,
        norm_num_groups=8,
        **options,
    ).eval()


def sdxl_inputs() -> dict[str, object]:
    return {
        "sample": torch.randn(1, 4, 8, 8),
        "timestep": torch.tensor(10),
        "encoder_hidden_states": torch.randn(1, 3, 24),
        "added_cond_kwargs": {"text_embeds": torch.randn(1, 32), "time_ids": torch.randn(1, 6)},
    }


def sd(*, linear: bool = False) -> nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 8, 16, 16),
        layers_per_block=2,
        attention_head_dim=2,
        cross_attention_dim=24,
        norm_num_groups=4,
        use_linear_projection=linear,
    ).eval()


def chroma() -> nn.Module:
    from diffusers import ChromaTransformer2DModel

    with warnings.catch_warnings(action="ignore"):
        return ChromaTransformer2DModel(
            in_channels=4,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=20,
            axes_dims_rope=(4, 4, 8),
            approximator_num_channels=8,
            approximator_hidden_dim=16,
            approximator_layers=2,
        ).eval()


def qwen_image() -> nn.Module:
    from diffusers import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        axes_dims_rope=(4, 6, 6),
    ).eval()


def z_image() -> nn.Module:
    from diffusers import ZImageTransformer2DModel

    return ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=2,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=24,
        axes_dims=[4, 6, 6],
        axes_lens=[16, 16, 16],
        siglip_feat_dim=12,  # Z-Image-Omni
    ).eval()


def lumina2() -> nn.Module:
    from diffusers import Lumina2Transformer2DModel

    return Lumina2Transformer2DModel(
        sample_size=8,
        in_channels=4,
        hidden_size=48,
        num_layers=2,
        num_refiner_layers=2,
        num_attention_heads=3,
        num_kv_heads=1,
        multiple_of=16,
        cap_feat_dim=24,
        axes_dim_rope=(4, 6, 6),
        axes_lens=(16, 16, 16),
    ).eval()


def sana() -> nn.Module:
    from diffusers import SanaTransformer2DModel

    return SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=8,
        cross_attention_dim=16,
        caption_channels=24,
        sample_size=8,
    ).eval()


def hidream() -> nn.Module:
    from diffusers import HiDreamImageTransformer2DModel

    return HiDreamImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_channels=[12, 20],
        text_emb_dim=16,
        num_routed_experts=2,
        num_activated_experts=1,
        axes_dims_rope=(4, 2, 2),
        max_resolution=(8, 8),
        llama_layers=[0, 1],
    ).eval()


MORE: dict[str, Callable[[], nn.Module]] = {
    "sd1": sd,
    "sd2": functools.partial(sd, linear=True),
    "kolors": functools.partial(sdxl, encoder_hid_dim=12, encoder_hid_dim_type="text_proj"),
    "chroma": chroma,
    "qwen_image": qwen_image,
    "z_image": z_image,
    "lumina2": lumina2,
    "sana": sana,
    "hidream": hidream,
}
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, object]]]] = {
    "flux1": (flux1, flux1_inputs),
    "flux2": (flux2, flux2_inputs),
    "sd3": (sd3, sd3_inputs),
    "sdxl": (sdxl, sdxl_inputs),
}
COMPONENT = {"flux1": "transformer", "flux2": "transformer", "sd3": "transformer", "sdxl": "unet"}


def lora(
    path: str, shape: tuple[int, ...], *, rank: int = 4, alpha: float = 2.0, dora: bool = False
) -> AdapterModule[torch.Tensor]:
    """A random lora of a weight of `shape`, all of whose rows it changes."""
    out, columns, *kernel = shape
    factors = {
        "A": torch.randn(rank, columns, *kernel) / 4,
        "B": torch.randn(out, rank, *[1] * len(kernel)) / 4,
    }
    if dora:
        factors["magnitude"] = torch.rand(out) + 0.5
    return AdapterModule(
        path=path,
        family="lora",
        factors=factors,
        rank=Sourced(rank, "test"),
        alpha=Sourced(alpha, "test"),
    )


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
