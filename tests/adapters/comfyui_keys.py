"""ComfyUI's key map and patching of plain loras, written anew after its public source (comfy/lora.py, comfy/utils.py).

A name of an adapter maps to a native weight, or to some of its rows; `swap` exchanges the halves of the change. What
the map does not name is not loaded: ComfyUI warns and goes on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

Target = tuple[str, slice | None, bool]


def key_map(name: str, native: Mapping[str, torch.Tensor]) -> dict[str, Target]:
    table: dict[str, Target] = {}
    for key in native:
        if key.endswith(".weight"):
            module = key.removesuffix(".weight")
            table[f"diffusion_model.{module}"] = (key, None, False)
            table[f"lora_unet_{module.replace('.', '_')}"] = (key, None, False)
    if name in ("flux1", "flux2"):
        for path, target in _flux(native).items():
            for spelling in (f"transformer.{path}", f"lycoris_{_flat(path)}", f"lora_transformer_{_flat(path)}"):
                table[spelling] = target
    if name == "sd3":
        for path, target in _sd3(native).items():
            for spelling in (f"transformer.{path}", f"lora_transformer_{_flat(path)}"):
                table[spelling] = target
    return table


def _flat(path: str) -> str:
    return path.replace(".", "_")


def _rows(start: int, count: int) -> slice:
    return slice(start, start + count)


def _blocks(native: Mapping[str, torch.Tensor], prefix: str) -> list[str]:
    return sorted({match[1] for key in native if (match := re.match(rf"{prefix}\.(\d+)\.", key))})


def _flux(native: Mapping[str, torch.Tensor]) -> dict[str, Target]:
    h = native["img_in.weight"].shape[0]
    table: dict[str, Target] = {}
    for i in _blocks(native, "double_blocks"):
        here, there = f"transformer_blocks.{i}", f"double_blocks.{i}"
        for n, (one, other) in enumerate((("to_q", "add_q_proj"), ("to_k", "add_k_proj"), ("to_v", "add_v_proj"))):
            table[f"{here}.attn.{one}"] = (f"{there}.img_attn.qkv.weight", _rows(n * h, h), False)
            table[f"{here}.attn.{other}"] = (f"{there}.txt_attn.qkv.weight", _rows(n * h, h), False)
        for one, other in {
            "attn.to_out.0": "img_attn.proj",
            "norm1.linear": "img_mod.lin",
            "norm1_context.linear": "txt_mod.lin",
            "attn.to_add_out": "txt_attn.proj",
            "ff.net.0.proj": "img_mlp.0",
            "ff.net.2": "img_mlp.2",
            "ff_context.net.0.proj": "txt_mlp.0",
            "ff_context.net.2": "txt_mlp.2",
            "ff.linear_in": "img_mlp.0",
            "ff.linear_out": "img_mlp.2",
            "ff_context.linear_in": "txt_mlp.0",
            "ff_context.linear_out": "txt_mlp.2",
        }.items():
            table[f"{here}.{one}"] = (f"{there}.{other}.weight", None, False)
    for i in _blocks(native, "single_blocks"):
        here, there = f"single_transformer_blocks.{i}", f"single_blocks.{i}"
        for n, one in enumerate(("to_q", "to_k", "to_v")):
            table[f"{here}.attn.{one}"] = (f"{there}.linear1.weight", _rows(n * h, h), False)
        table[f"{here}.proj_mlp"] = (f"{there}.linear1.weight", _rows(3 * h, 4 * h), False)
        for one, other in {
            "norm.linear": "modulation.lin",
            "proj_out": "linear2",
            "attn.to_qkv_mlp_proj": "linear1",
            "attn.to_out": "linear2",
        }.items():
            table[f"{here}.{one}"] = (f"{there}.{other}.weight", None, False)
    for one, other in {
        "proj_out": "final_layer.linear",
        "x_embedder": "img_in",
        "context_embedder": "txt_in",
        "time_text_embed.timestep_embedder.linear_1": "time_in.in_layer",
        "time_text_embed.timestep_embedder.linear_2": "time_in.out_layer",
        "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
        "time_text_embed.text_embedder.linear_2": "vector_in.out_layer",
        "time_text_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
        "time_text_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
    }.items():
        table[one] = (f"{other}.weight", None, False)
    table["norm_out.linear"] = ("final_layer.adaLN_modulation.1.weight", None, True)
    return table


def _sd3(native: Mapping[str, torch.Tensor]) -> dict[str, Target]:
    table: dict[str, Target] = {}
    numbers = _blocks(native, "joint_blocks")
    h = native["joint_blocks.0.x_block.attn.qkv.weight"].shape[0] // 3
    for i in numbers:
        here, there = f"transformer_blocks.{i}", f"joint_blocks.{i}"
        for n, (one, other) in enumerate((("to_q", "add_q_proj"), ("to_k", "add_k_proj"), ("to_v", "add_v_proj"))):
            table[f"{here}.attn.{one}"] = (f"{there}.x_block.attn.qkv.weight", _rows(n * h, h), False)
            table[f"{here}.attn2.{one}"] = (f"{there}.x_block.attn2.qkv.weight", _rows(n * h, h), False)
            table[f"{here}.attn.{other}"] = (f"{there}.context_block.attn.qkv.weight", _rows(n * h, h), False)
        for one, other in {
            "norm1.linear": "x_block.adaLN_modulation.1",
            "attn.to_out.0": "x_block.attn.proj",
            "attn2.to_out.0": "x_block.attn2.proj",
            "attn.to_add_out": "context_block.attn.proj",
            "ff.net.0.proj": "x_block.mlp.fc1",
            "ff.net.2": "x_block.mlp.fc2",
            "ff_context.net.0.proj": "context_block.mlp.fc1",
            "ff_context.net.2": "context_block.mlp.fc2",
        }.items():
            table[f"{here}.{one}"] = (f"{there}.{other}.weight", None, False)
        is_last = i == numbers[-1]
        table[f"{here}.norm1_context.linear"] = (f"{there}.context_block.adaLN_modulation.1.weight", None, is_last)
    for one, other in {
        "proj_out": "final_layer.linear",
        "context_embedder": "context_embedder",
        "pos_embed.proj": "x_embedder.proj",
        "time_text_embed.text_embedder.linear_1": "y_embedder.mlp.0",
        "time_text_embed.text_embedder.linear_2": "y_embedder.mlp.2",
        "time_text_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
        "time_text_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
    }.items():
        table[one] = (f"{other}.weight", None, False)
    table["norm_out.linear"] = ("final_layer.adaLN_modulation.1.weight", None, True)
    return table


def patched(
    name: str, native: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Return the native weights with an adapter applied, and the adapter's names that were not used."""
    weights = {key: tensor.clone() for key, tensor in native.items()}
    unused = set(tensors)
    for path, (key, rows, is_swapped) in key_map(name, native).items():
        for up_end, down_end in (("lora_up.weight", "lora_down.weight"), ("lora_B.weight", "lora_A.weight")):
            up, down = tensors.get(f"{path}.{up_end}"), tensors.get(f"{path}.{down_end}")
            if up is None or down is None:
                continue
            unused -= {f"{path}.{up_end}", f"{path}.{down_end}", f"{path}.alpha"}
            alpha = tensors.get(f"{path}.alpha")
            scale = 1.0 if alpha is None else alpha.item() / down.shape[0]
            change = scale * (up.flatten(1) @ down.flatten(1))
            if is_swapped:
                change = torch.cat(change.chunk(2)[::-1])
            target = weights[key] if rows is None else weights[key][rows]
            target += change.reshape(target.shape)
    return weights, unused
