"""A cluster's run folded down to this machine: a small mesh of the same kind, and what of the spec a smoke run tries.

Whatever is folded, replaced or left out becomes a sentence: a green smoke run proves no more than what it ran.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ckpt_tools.description.layout import AXES, FSDP_AXIS, Mesh
from ckpt_tools.models.config import config_path, read_config
from ckpt_tools.options.smoke import ADAPTERS
from ckpt_tools.preflight.shrink import cut_depth, describe_cut, shrink_config
from ckpt_tools.preflight.spec import ParallelSpec, strategy_on
from ckpt_tools.smoke import SmokeOptions
from ckpt_tools.text import escape_name

MAX_RANKS = 4
"""Ranks of a smoke run on this machine."""
_KEPT = 2
"""Ranks along an axis that is kept."""
_IMPORTANCE = (FSDP_AXIS, "tp", "dp_replicate")
"""Which axes are kept when there are not ranks enough for all, most telling first."""
_NOT_RUN = {
    "cp": "context parallelism",
    "pp": "pipeline stages",
    "ep": "expert parallelism",
    "sp": "sequence parallelism",
}
_DTYPES = ("bf16", "f16", "f32")
_ALL = ("all-linear", "all")
_PLAIN = re.compile(r"\w+(\.\w+)*", re.ASCII)
"""A module's name or the end of it; anything else is a pattern of the trainer's."""
_NOT_TRIED = {
    "deepspeed": "DeepSpeed distributes the model, and the smoke run tries FSDP2",
    "other": "the smoke run tries FSDP2, but this config has another engine",
    "none": "the model is not distributed: there is one process",
}
"""Engine → why no smoke run tries it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """What a smoke run of a spec will be, and what of the spec it does not try; or why there is none."""

    options: SmokeOptions | None
    notes: tuple[str, ...]
    why_not: str = ""


def fold_mesh(mesh: Mesh, *, max_ranks: int = MAX_RANKS) -> tuple[Mesh, tuple[str, ...]]:
    """Return a mesh of at most `max_ranks` ranks with the same kinds of axes, and what became of every changed axis.

    Data and tensor parallelism keep two ranks each, `dp_shard` before `tp` before `dp_replicate`; others are left out.
    """
    sizes = dict(mesh.axes)
    shard = sizes.get(FSDP_AXIS, 1)
    notes = []
    others = [axis for axis in ("cp", "ep") if sizes.get(axis, 1) > 1]
    if others and shard == 1:
        # FSDP cuts over dp_shard × cp × ep: without ranks of its own it still cuts.
        shard = math.prod(sizes[axis] for axis in others)
        notes.append(
            f"FSDP cuts over the {shard} ranks of {' and '.join(others)}; the smoke run does over {FSDP_AXIS}={_KEPT}"
        )
    wanted = {FSDP_AXIS: shard, "tp": sizes.get("tp", 1), "dp_replicate": sizes.get("dp_replicate", 1)}
    kept: dict[str, int] = {}
    ranks = 1
    for axis in _IMPORTANCE:
        if wanted[axis] > 1 and ranks * _KEPT <= max_ranks:
            kept[axis] = _KEPT
            ranks *= _KEPT
    folded = [f"{axis}={sizes[axis]} to {_KEPT}" for axis in kept if sizes.get(axis, 1) > _KEPT]
    if folded:
        notes.append(f"the mesh {mesh} is folded: {', '.join(folded)}")
    dropped = [axis for axis in _IMPORTANCE if wanted[axis] > 1 and axis not in kept]
    if dropped:
        left = ", ".join(f"{axis}={sizes[axis]}" for axis in dropped)
        notes.append(f"{left} is left out: {max_ranks} ranks are not enough for every axis")
    for axis, what in _NOT_RUN.items():
        if sizes.get(axis, 1) > 1:
            notes.append(f"{axis}={sizes[axis]} is left out: the smoke run does not try {what}")
    order = [axis for axis in ("dp_replicate", FSDP_AXIS, "tp") if axis in kept]
    return Mesh(tuple((axis, kept[axis]) for axis in order) or ((FSDP_AXIS, 1),)), tuple(notes)


def fold_spec(spec: ParallelSpec, *, model: str, source: str | None, blocks: Sequence[str] = ()) -> Fold:
    """Return the smoke run that comes nearest to a spec on this machine; without a `source` weights are random."""
    if spec.engine in _NOT_TRIED:
        return Fold(options=None, notes=(), why_not=_NOT_TRIED[spec.engine])
    notes: list[str] = []
    if spec.engine == "fsdp1":
        notes.append("FSDP1 is tried as its equivalent in FSDP2")
    whole = spec.mesh
    if whole is None:
        whole = _likely_mesh(spec)
        notes.append(f"the mesh is not known; one like {whole} is tried")
    if spec.engine == "ddp" and whole.size("dp_replicate") == 1 and whole.size(FSDP_AXIS) > 1:
        whole = Mesh(tuple(("dp_replicate" if name == FSDP_AXIS else name, size) for name, size in whole.axes))
    mesh, folded = fold_mesh(whole)
    notes += folded
    strategy = strategy_on(spec, mesh)
    if spec.strategy is not None and strategy.removesuffix("_zero2") != spec.strategy:
        notes.append(f"{spec.strategy} becomes {strategy} on {mesh}")
    if type(spec.reshard_after_forward) is int:
        notes.append(f"reshard_after_forward={spec.reshard_after_forward} is tried as true")
    notes += _not_tried(spec)
    if blocks and spec.wrap_classes and set(spec.wrap_classes) != set(blocks):
        notes.append(f"the wrapped classes are {_names(blocks)}, not {_names(spec.wrap_classes)}")
    param = _dtype(spec.param_dtype, "computing", notes)
    reduce = _dtype(spec.reduce_dtype, "averaging gradients", notes)
    lora, adapter, targets = _adapter(spec, notes)
    options = SmokeOptions(
        source=source,
        model=model,
        mesh=str(mesh),
        device="cpu",
        strategy=strategy,
        steps=2,
        param_dtype=param,
        reduce_dtype=reduce,
        lora=lora,
        adapter=adapter,
        target=targets,
        quantize=_quantize(spec, lora, notes),
        timeout_s=60.0,
    )
    return Fold(options=options, notes=tuple(notes))


def _likely_mesh(spec: ParallelSpec) -> Mesh:
    """Return a mesh with the axes that the config names, where the number of ranks is not known or does not fit."""
    sizes = {name: _KEPT if size == -1 else size for name, size in spec.axes.items() if name in AXES and name != "ep"}
    axes = tuple((name, size) for name, size in sizes.items() if size > 1)
    return Mesh(axes or (("dp_replicate" if spec.engine == "ddp" else FSDP_AXIS, _KEPT),))


def _not_tried(spec: ParallelSpec) -> list[str]:
    notes = []
    if spec.framework == "torchtitan":
        notes.append("transformers' model is tried; torchtitan has one of its own")
    if spec.offload_params or spec.offload_optimizer:
        notes.append("offloading is not tried: everything is in host memory here")
    if spec.activation_checkpointing:
        notes.append("activation checkpointing is not tried")
    if spec.wrap_min_num_params is not None:
        notes.append("wrapping by number of parameters is not tried: layers are wrapped")
    if not spec.wraps_blocks:
        notes.append("layers are wrapped; in the run the model is one FSDP group")
    optimizer = (spec.optimizer or "adamw").lower()
    if not optimizer.startswith("adamw") or "8bit" in optimizer or "4bit" in optimizer:
        notes.append(f"the optimizer {escape_name(spec.optimizer or '')} is not tried: AdamW steps in its place")
    return notes


def _dtype(value: str | None, name: str, notes: list[str]) -> str:
    if value is None:
        return "keep"
    if value in _DTYPES:
        return value
    notes.append(f"{name} in {escape_name(value)} is not tried")
    return "keep"


def _names(classes: Sequence[str]) -> str:
    return ", ".join(map(escape_name, classes))


def _adapter(spec: ParallelSpec, notes: list[str]) -> tuple[bool, str, tuple[str, ...]]:
    """Return whether adapters are trained, of which kind, and on which layers (globs; none for all)."""
    if spec.adapter is None:
        return False, "lora", ()
    if importlib.util.find_spec("peft") is None:
        notes.append("the adapter is not tried: peft is not installed; the whole model is trained")
        return False, "lora", ()
    kind = spec.adapter.kind
    if kind not in ADAPTERS or (spec.quantize == "nf4" and kind not in ("lora", "dora")):
        notes.append(f"a LoRA adapter is tried in place of {escape_name(kind)}")
        kind = "lora"
    named = tuple(name for name in spec.adapter.targets if name not in _ALL)
    # ai-toolkit's are parts of the names of its own models, which need not be those of diffusers.
    if any(_PLAIN.fullmatch(name) is None or spec.framework == "ai-toolkit" for name in named):
        notes.append("adapters are on all linear layers, not only on the chosen ones")
        return True, kind, ()
    return True, kind, tuple(glob for name in named for glob in (name, f"**.{name}"))


def _quantize(spec: ParallelSpec, lora: bool, notes: list[str]) -> str | None:
    if spec.quantize is None:
        return None
    if spec.quantize == "nf4" and lora and importlib.util.find_spec("bitsandbytes") is not None:
        return "nf4"
    notes.append(f"quantising to {escape_name(spec.quantize)} is not tried: the frozen weights are plain")
    return None


def write_cuts(model: str, directory: str) -> tuple[str, ...]:
    """Write cut-down configs of a model, the smallest first, and return their directories."""
    config = read_config(model).values
    paths = []
    for name, cut in (("narrow", shrink_config(config)), ("shallow", cut_depth(config))):
        path = os.path.join(directory, name)
        os.makedirs(path, exist_ok=True)
        with open(config_path(path), "w", encoding="utf-8") as file:
            json.dump(cut, file)
        paths.append(path)
    return tuple(paths)


def describe_chosen(model: str, chosen: str) -> str:
    """Say how the config in `chosen` differs from the model's."""
    return describe_cut(read_config(model).values, read_config(chosen).values)
