"""What ComfyUI computes otherwise than the libraries that trained an adapter, and how it is said so that it does not.

Source: ComfyUI, comfy/weight_adapter/{base,oft,boft}.py: `weight_decompose` divides an output-axis dora_scale by the
norm of W, LyCORIS and PEFT by that of W+ΔW (ComfyUI PR #15458, open); oft and boft bound the norm of Q by alpha,
LyCORIS by alpha times the weight's rows; oft leaves out `rescale`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ckpt_tools.adapters.adapter import Adapter, Sourced
from ckpt_tools.adapters.ecosystems.fit import Fitting
from ckpt_tools.adapters.families import family_of
from ckpt_tools.adapters.families.family import Module, refuse
from ckpt_tools.adapters.read.sidecars import DORA_SCALE
from ckpt_tools.moving.arrays import Array

_WITHOUT_RESCALE = ("oft",)
"""Families of which ComfyUI leaves out `rescale`."""


def comfyui_module(module: Module, adapter: Adapter[Array], fitting: Fitting) -> Module:
    """Return the module as ComfyUI must be given it to compute what was trained.

    Raises:
        InexpressibleError: ComfyUI cannot, or the base is needed.
    """
    if module.is_dora and not fitting.has_columns(module) and DORA_SCALE not in adapter.settings:
        raise refuse(
            module,
            "ComfyUI divides dora_scale by the norm of W instead of W+ΔW, which is a different adapter (measured: 0.04 "
            "to 1.8 of the largest weight off)",
            hint="give the base model, whose weights make up for it: --base DIR",
        )
    if family_of(module).is_rotation and "blocks" in module.factors:
        return _rotation(module, fitting)
    return module


def _rotation(module: Module, fitting: Fitting) -> Module:
    """Put LyCORIS' constraint into the blocks, and write none: ComfyUI would bound them otherwise."""
    rescale = module.factors.get("rescale")
    if module.family in _WITHOUT_RESCALE and rescale is not None and not bool((rescale.astype(np.float32) == 1).all()):
        raise refuse(module, "ComfyUI leaves out rescale of diag-oft")
    constraint = 0.0 if module.alpha is None else module.alpha.value
    stored = module.factors["blocks"]
    bound = constraint * stored.shape[-3] * stored.shape[-1]
    blocks = stored.astype(np.float64)
    norm = float(np.linalg.norm((blocks - blocks.swapaxes(-1, -2)).reshape(-1))) + 1e-8
    factors = dict(module.factors)
    if 0 < bound < norm:
        factors["blocks"] = (blocks * (bound / norm)).astype(np.float32)
        fitting.count("LyCORIS' constraint was multiplied into the blocks")
    # Without any alpha ComfyUI's boft fails, and leaves the weight as it was.
    return replace(module, factors=factors, alpha=Sourced(0.0, "the constraint is in the blocks"))
