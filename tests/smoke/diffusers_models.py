"""Small models of diffusers, and what each is in a process of its own."""

from __future__ import annotations

import json
import tempfile

_IMAGE = {"block_out_channels": [16, 32], "norm_num_groups": 8, "layers_per_block": 1}
_UNET = _IMAGE | {
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    "cross_attention_dim": 24,
    "attention_head_dim": 4,
}
_HEADS = {"attention_head_dim": 16, "num_attention_heads": 2}
_ROPE = {"axes_dims_rope": [4, 4, 8]}
CONFIGS = {
    "FluxTransformer2DModel": _HEADS | _ROPE | {
        "in_channels": 4, "num_layers": 2, "num_single_layers": 2, "joint_attention_dim": 24,
        "pooled_projection_dim": 20, "guidance_embeds": True,
    },
    "Flux2Transformer2DModel": _HEADS | {
        "in_channels": 4, "num_layers": 2, "num_single_layers": 2, "joint_attention_dim": 24,
        "axes_dims_rope": [4, 4, 4, 4], "timestep_guidance_channels": 16,
    },
    "SD3Transformer2DModel": _HEADS | {
        "sample_size": 16, "in_channels": 4, "out_channels": 4, "num_layers": 2, "joint_attention_dim": 24,
        "caption_projection_dim": 32, "pooled_projection_dim": 20, "pos_embed_max_size": 16,
    },
    "QwenImageTransformer2DModel": _HEADS | _ROPE | {
        "in_channels": 16, "out_channels": 4, "num_layers": 2, "joint_attention_dim": 24,
    },
    "WanTransformer3DModel": _HEADS | {
        "in_channels": 4, "out_channels": 4, "text_dim": 24, "freq_dim": 16, "ffn_dim": 32, "num_layers": 2,
        "rope_max_seq_len": 32,
    },
    "LTXVideoTransformer3DModel": _HEADS | {
        "in_channels": 4, "out_channels": 4, "num_layers": 2, "caption_channels": 24, "cross_attention_dim": 32,
    },
    "ZImageTransformer2DModel": {
        "in_channels": 4, "dim": 32, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2,
        "cap_feat_dim": 24, "axes_dims": [4, 4, 8], "axes_lens": [64, 32, 32],
    },
    "PixArtTransformer2DModel": {
        "sample_size": 128, "in_channels": 4, "out_channels": 8, "num_layers": 2, "attention_head_dim": 24,
        "num_attention_heads": 2, "cross_attention_dim": 48, "caption_channels": 24,
    },
    "UNet2DConditionModel": _UNET | {
        "sample_size": 16, "addition_embed_type": "text_time", "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 64,
    },
    "ControlNetModel": {key: value for key, value in _UNET.items() if key != "up_block_types"} | {
        "conditioning_embedding_out_channels": [16, 16, 16, 16],
    },
    "AutoencoderKL": _IMAGE | {
        "latent_channels": 4, "down_block_types": ["DownEncoderBlock2D"] * 2,
        "up_block_types": ["UpDecoderBlock2D"] * 2,
    },
    "AutoencoderKLWan": {
        "base_dim": 4, "z_dim": 4, "dim_mult": [1, 2], "num_res_blocks": 1, "temperal_downsample": [True],
    },
}  # fmt: skip
"""Class → its config, without the class."""


def config_of(name):
    """Return the config.json of a class."""
    return CONFIGS[name] | {"_class_name": name, "_diffusers_version": "0.42.0"}


def try_all(path):
    """Build, feed and train every model alone; write what they are as JSON."""
    import torch

    from ckpt_tools.errors import UsageError
    from ckpt_tools.fsdp2 import find_blocks
    from ckpt_tools.models.recipe import call, find_loss, loss_of
    from ckpt_tools.models.recipe_of import recipe_of
    from ckpt_tools.sandbox.audit import Sandbox, in_sandbox

    torch.set_num_threads(1)
    recipes = {name: recipe_of(config_of(name), name) for name in CONFIGS}
    found = {}
    with in_sandbox(Sandbox(subject="a model", where="config", scratch=tempfile.gettempdir())):
        for name, recipe in recipes.items():
            with torch.device("meta"):
                bare = recipe.build()
            tensors = {**dict(bare.named_parameters()), **dict(bare.named_buffers())}
            torch.manual_seed(0)
            model = recipe.build()
            output = call(model, recipe.batch(model, 1))
            loss = loss_of(output, find_loss(output))
            loss.backward()
            found[name] = {
                "parameters_off_meta": [key for key, one in bare.named_parameters() if not one.is_meta],
                "buffers_on_meta": [key for key, one in bare.named_buffers() if one.is_meta],
                "same_shapes": all(tensors[key].shape == one.shape for key, one in model.named_parameters()),
                "blocks": find_blocks(bare),
                "loss": loss.item(),
                "without_gradient": [k for k, p in model.named_parameters() if p.grad is None],
                "zero_gradient": [k for k, p in model.named_parameters() if p.grad is not None and not p.grad.any()],
            }
        unknown = recipe_of({"_class_name": "T2IAdapter", "channels": [8, 16]}, "config.json")
        try:
            unknown.batch(unknown.build(), 1)
        except UsageError as error:
            found["refused"] = [error.what, error.hint]
    with open(path, "w", encoding="utf-8") as file:
        json.dump(found, file)
