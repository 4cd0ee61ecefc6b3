"""ComfyUI's key map, its patching of plain loras and its maths, written anew after its public source and behaviour.

A name of an adapter maps to a native weight, or to some of its rows; `swap` exchanges the halves of the change. What
the map does not name is not loaded: ComfyUI warns and goes on. Source: comfy/lora.py, comfy/utils.py.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

import torch

MAPS = tomllib.loads((Path(__file__).parent / "comfyui_keys.toml").read_text())
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
            for spelling in (f"transformer.{path}", f"lycoris_{_flat(path)}", f"lora_transformer_{_flat(path)}", path):
                table[spelling] = target
    if name == "qwen_image":
        for module in [key.removesuffix(".weight") for key in native if key.endswith(".weight")]:
            table |= dict.fromkeys(
                (module, f"transformer.{module}", f"lycoris_{_flat(module)}"), (f"{module}.weight", None, False)
            )
    if name == "sd3":
        for path, target in _sd3(native).items():
            for spelling in (f"transformer.{path}", f"lora_transformer_{_flat(path)}", f"base_model.model.{path}"):
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
        for one, other in MAPS["flux double_blocks"].items():
            table[f"{here}.{one}"] = (f"{there}.{other}.weight", None, False)
    for i in _blocks(native, "single_blocks"):
        here, there = f"single_transformer_blocks.{i}", f"single_blocks.{i}"
        for n, one in enumerate(("to_q", "to_k", "to_v")):
            table[f"{here}.attn.{one}"] = (f"{there}.linear1.weight", _rows(n * h, h), False)
        table[f"{here}.proj_mlp"] = (f"{there}.linear1.weight", _rows(3 * h, 4 * h), False)
        for one, other in MAPS["flux single_blocks"].items():
            table[f"{here}.{one}"] = (f"{there}.{other}.weight", None, False)
    for one, other in MAPS["flux"].items():
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
        for one, other in MAPS["sd3 joint_blocks"].items():
            table[f"{here}.{one}"] = (f"{there}.{other}.weight", None, False)
        is_last = i == numbers[-1]
        table[f"{here}.norm1_context.linear"] = (f"{there}.context_block.adaLN_modulation.1.weight", None, is_last)
    for one, other in MAPS["sd3"].items():
        table[one] = (f"{other}.weight", None, False)
    table["norm_out.linear"] = ("final_layer.adaLN_modulation.1.weight", None, True)
    return table


PAIRS = (
    ("lora_up.weight", "lora_down.weight"),
    ("lora_B.weight", "lora_A.weight"),
    ("lora_B.default.weight", "lora_A.default.weight"),
)


def patched(
    name: str, native: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Return the native weights with an adapter applied, and the adapter's names that were not used."""
    weights = {key: tensor.clone() for key, tensor in native.items()}
    unused = set(tensors)
    for path, (key, rows, is_swapped) in key_map(name, native).items():
        for up_end, down_end in PAIRS:
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


# What ComfyUI computes from an adapter's tensors.
#
# Source: ComfyUI, comfy/weight_adapter/base.py (`weight_decompose`), {lora,loha,lokr,oft,boft}.py, at strength 1.


def low_rank(tensors, path):
    """What a lora or a loha adds, scaled."""
    alpha = tensors.get(f"{path}.alpha")
    if f"{path}.lora_up.weight" in tensors:
        down = tensors[f"{path}.lora_down.weight"]
        change, rank = tensors[f"{path}.lora_up.weight"].flatten(1) @ down.flatten(1), down.shape[0]
    elif f"{path}.lokr_w2" in tensors:
        return torch.kron(tensors[f"{path}.lokr_w1"], tensors[f"{path}.lokr_w2"])  # two full factors have no scale
    else:
        halves = [tensors[f"{path}.hada_w{i}_a"] @ tensors[f"{path}.hada_w{i}_b"] for i in (1, 2)]
        change, rank = halves[0] * halves[1], tensors[f"{path}.hada_w1_b"].shape[0]
    return change if alpha is None else change * (float(alpha) / rank)


def weight_of(tensors, path, weight):
    """The weight that ComfyUI makes of `weight`."""
    if f"{path}.oft_blocks" in tensors:
        return rotated(tensors, path, weight)
    new = weight + low_rank(tensors, path).reshape(weight.shape)
    scale = tensors.get(f"{path}.dora_scale")
    if scale is None:
        return new
    if scale.shape[0] == weight.shape[0]:  # by output: the norm of the weight as it was
        norm = weight.flatten(1).norm(dim=1).reshape(-1, *[1] * (weight.ndim - 1))
    else:
        norm = new.transpose(0, 1).flatten(1).norm(dim=1).reshape(1, -1, *[1] * (weight.ndim - 2))
    return new * (scale / (norm + torch.finfo(weight.dtype).eps))


def rotated(tensors, path, weight):
    blocks = tensors[f"{path}.oft_blocks"]
    bound = tensors.get(f"{path}.alpha")
    skew = blocks - blocks.transpose(-1, -2)
    if blocks.ndim == 4 and bound is None:
        return weight  # it fails, says so in a log, and goes on
    norm = float(skew.norm()) + 1e-8
    if bound is not None and 0 < float(bound) < norm:  # the bound is alpha itself, not alpha times the rows
        skew = skew * (float(bound) / norm)
    eye = torch.eye(skew.shape[-1])
    turns = (eye + skew) @ (eye - skew).inverse()
    if blocks.ndim == 3:  # `rescale` is loaded, and left out
        parts = weight.reshape(*turns.shape[:2], -1)
        return torch.einsum("knm,knc->kmc", turns, parts).reshape(weight.shape)
    half = blocks.shape[-1] // 2
    flat = weight.flatten(1)
    for i, turn in enumerate(turns):
        apart = 2**i * half
        mixed = flat.unflatten(0, (-1, 2, apart)).transpose(1, 2).flatten(0, 2).unflatten(0, (-1, blocks.shape[-1]))
        mixed = torch.einsum("bij,bjc->bic", turn, mixed)
        flat = mixed.flatten(0, 1).unflatten(0, (-1, apart, 2)).transpose(1, 2).flatten(0, 2)
    if f"{path}.rescale" in tensors:
        flat = flat * tensors[f"{path}.rescale"].flatten(1)
    return flat.reshape(weight.shape)
