"""What ComfyUI computes from an adapter's tensors, written anew after its documented behaviour.

Source: ComfyUI, comfy/weight_adapter/base.py (`weight_decompose`), {lora,loha,lokr,oft,boft}.py, at strength 1.
"""

from __future__ import annotations

import torch


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
