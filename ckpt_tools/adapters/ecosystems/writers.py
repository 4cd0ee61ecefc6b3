"""What is written for kohya's tools and LyCORIS, for ComfyUI, and for `pipe.load_lora_weights`.

kohya's has the authors' module names, and an alpha for every module; ComfyUI's its generic names, the authors' paths
below diffusion_model and text_encoders; diffusers' loras under its own module names, and their configuration. Source:
diffusers 0.42, loaders/lora_base.py (`_load_sft_state_dict_metadata`), utils/peft_utils.py.

What ComfyUI computes otherwise than the libraries that trained an adapter is said so that it does not. Source: ComfyUI,
comfy/weight_adapter/{base,oft,boft}.py: `weight_decompose` divides an output-axis dora_scale by the norm of W, LyCORIS
and PEFT by that of W+ΔW (ComfyUI PR #15458, open); oft and boft bound the norm of Q by alpha, LyCORIS by alpha times
the weight's rows; oft leaves out `rescale`.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ckpt_tools.adapters.adapter import Adapter, Sourced
from ckpt_tools.adapters.architectures.architecture import Architecture, Spelling
from ckpt_tools.adapters.architectures.choose import BaseFamily
from ckpt_tools.adapters.architectures.names import ModulePlace
from ckpt_tools.adapters.ecosystems.output import Written, file_name, header_of, put
from ckpt_tools.adapters.ecosystems.place_modules import (
    Fitting,
    Placed,
    in_diffusers,
    in_native,
    place_all,
    require,
    unchanged,
)
from ckpt_tools.adapters.families import dora, family_of, lokr
from ckpt_tools.adapters.families.changes import change_of
from ckpt_tools.adapters.families.family import InexpressibleError, Module, Setting, refuse
from ckpt_tools.adapters.read.opening import TensorReader, to_array
from ckpt_tools.adapters.read.sidecars import BASE_NORM, DIFFUSERS_FILE, DIFFUSERS_KEY, DORA_SCALE
from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.errors import UsageError
from ckpt_tools.transfer.arrays import Array


def to_kohya(adapter: Adapter[Array], architecture: Architecture, fitting: Fitting) -> Written:
    """Write kohya's names: the authors' paths with underscores, and an alpha for every module."""
    if architecture.kohya is None:
        raise unsupported(adapter, architecture, "kohya's trainers (sd-scripts, musubi-tuner) have")
    placed = in_lycoris(adapter, architecture, fitting, spelling=architecture.kohya.spelling)
    tensors: dict[str, Array] = {}
    for each in placed:
        names = family_of(each.module).lycoris_names
        require(each, names, "kohya")
        if each.module.is_dora and not fitting.has_columns(each.module):
            fitting.note(
                "dora_scale is LyCORIS', which divides by the norm of W+ΔW; ComfyUI divides by that of W "
                "(its PR #15458 is open): for ComfyUI use --to comfyui --base DIR"
            )
        name = f"{each.part.kohya[0]}_{each.module.path.replace('.', '_')}"
        put(tensors, name, each.module, names)
        put_alpha(tensors, name, each.module)
        if family_of(each.module).is_unranked(each.module.factors):
            tensors[f"{name}.alpha"] = np.array(1, np.float32)  # which LyCORIS looks up, and does not use
    file = file_name(adapter.name)
    return fitting.written(file, tensors, header_of(file, [each.module for each in placed], architecture))


def in_lycoris(
    adapter: Adapter[Array],
    architecture: Architecture,
    fitting: Fitting,
    *,
    spelling: Spelling = "native",
    takes_parts: Callable[[str], bool] = lambda _: False,
) -> list[Placed]:
    """Return the modules as kohya and ComfyUI have them: the authors' paths, and LyCORIS' factors."""
    places = place_all(adapter, architecture)
    if spelling == "diffusers":
        placed = in_diffusers(places, as_lora=fitting.as_lora)
    else:
        placed = in_native(places, as_lora=fitting.as_lora, spelling=spelling, takes_parts=takes_parts)
    return [replace(each, module=for_lycoris(each.module, fitting)) for each in placed]


def unsupported(adapter: Adapter[Array], architecture: Architecture, who: str) -> UsageError:
    """Return the error for a model that a target does not have."""
    what = f"{who} no names that ckpt knows for the modules of {architecture.title}"
    hint = "use --to diffusers or --to peft, for diffusers or PEFT"
    return UsageError(what, where=adapter.modules[0].path, hint=hint)


def for_lycoris(module: Module, fitting: Fitting) -> Module:
    """Return a module with the alpha and the magnitude that LyCORIS has."""
    module = fitting.with_plain_alpha(module)
    magnitude = module.factors.get("magnitude")
    if magnitude is None or fitting.has_columns(module):
        return module
    rows = fitting.magnitude_by_row(module)
    dims = module.factors["A"].ndim if "A" in module.factors else 2
    shaped = rows.reshape(-1, *[1] * (dims - 1))
    return replace(module, factors={**module.factors, "magnitude": shaped})


def put_alpha(tensors: dict[str, Array], name: str, module: Module) -> None:
    """Alpha as a floating-point scalar: readers divide it by the rank, and diffusers refuses an integer."""
    if module.alpha is None:
        return
    if abs(module.alpha.value) > float(np.finfo(np.float32).max):
        raise refuse(module, f"its alpha of {module.alpha.value:g} is too large for 32 bits")
    tensors[f"{name}.alpha"] = np.array(module.alpha.value, np.float32)


_ROWS_AT_ONCE = 512
_WITHOUT_RESCALE = ("oft",)


def to_comfyui(adapter: Adapter[Array], architecture: Architecture, fitting: Fitting) -> Written:
    """Write ComfyUI's generic names: the authors' paths below diffusion_model and text_encoders.

    Plain loras of FLUX.2 are written as ai-toolkit does, lora_A and lora_B without an alpha: diffusers reads these as
    well, and fails on an alpha. Of the others diffusers, where it reads ComfyUI's names at all, wants lora_down and
    lora_up.
    """
    if architecture.comfyui is None:
        raise unsupported(adapter, architecture, "ComfyUI has")
    placed = in_lycoris(adapter, architecture, fitting, takes_parts=architecture.comfyui.has)
    is_bare = architecture.reader == "flux2" and all(each.module.factors.keys() == {"A", "B"} for each in placed)
    return _comfyui_file(adapter, placed, architecture, fitting, is_bare=is_bare)


def to_comfyui_unchanged(adapter: Adapter[Array], base: BaseFamily, fitting: Fitting) -> Written:
    """Write the modules of a model without tables under its own names, which ComfyUI maps where they are its own."""
    placed = [replace(each, module=for_lycoris(each.module, fitting)) for each in unchanged(adapter, base)]
    return _comfyui_file(adapter, placed, None, fitting, is_bare=False)


def _comfyui_file(
    adapter: Adapter[Array], placed: list[Placed], architecture: Architecture | None, fitting: Fitting, *, is_bare: bool
) -> Written:
    placed = [replace(each, module=_computed_alike(each.module, adapter, fitting)) for each in placed]
    tensors: dict[str, Array] = {}
    for each in placed:
        family = family_of(each.module)
        require(each, family.lycoris_names, "ComfyUI")
        name = f"{each.part.comfyui}.{each.module.path}"
        if each.is_apart and architecture is not None and architecture.comfyui is not None:
            name = architecture.comfyui.name(each.module.path)
        if is_bare:
            put(tensors, name, fitting.baked(each.module), family.peft_names)
        else:
            put(tensors, name, each.module, family.lycoris_names)
            put_alpha(tensors, name, each.module)
    file = file_name(adapter.name)
    metadata = header_of(file, [each.module for each in placed], architecture)
    if is_bare:
        metadata.pop("ss_network_alpha", None)
    if DORA_SCALE in adapter.settings and any(each.module.is_dora for each in placed):
        metadata[DORA_SCALE] = str(adapter.settings[DORA_SCALE].value)
    return fitting.written(file, tensors, metadata)


def _computed_alike(module: Module, adapter: Adapter[Array], fitting: Fitting) -> Module:
    """Return the module as ComfyUI must be given it to compute what was trained; refuse what it cannot."""
    if module.is_dora and not fitting.has_columns(module) and DORA_SCALE not in adapter.settings:
        what = (
            "ComfyUI divides dora_scale by the norm of W instead of W+ΔW, which is a different adapter (measured: 0.04 "
            "to 1.8 of the largest weight off)"
        )
        raise refuse(module, what, hint="give the base model, whose weights compensate for it: --base DIR")
    if family_of(module).is_rotation and "blocks" in module.factors:
        return _rotation(module, fitting)
    return module


def _rotation(module: Module, fitting: Fitting) -> Module:
    """Put LyCORIS' constraint into the blocks, and write none: ComfyUI would bound them otherwise."""
    rescale = module.factors.get("rescale")
    if module.family in _WITHOUT_RESCALE and rescale is not None and not bool((rescale.astype(np.float32) == 1).all()):
        raise refuse(module, "ComfyUI ignores rescale of diag-oft")
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


def with_base_norms(
    adapter: Adapter[Array], tensors: Mapping[str, TensorEntry], reader: TensorReader, source: str
) -> Adapter[Array]:
    """Return the adapter with magnitudes that are divided by ‖W‖ instead of ‖W+ΔW‖, and say so in its settings.

    A DoRA is m·(W+ΔW)/‖W+ΔW‖ by row. ComfyUI computes m·(W+ΔW)/‖W‖ (its PR #15458 is open): with m·‖W‖/‖W+ΔW‖ in the
    place of m, that is the same. `tensors` are the base's, by the names that a plain model gives them.

    Memory: the largest adapted weight, and a few hundred rows of it.
    """
    modules = tuple(
        _with_base_norm(module, tensors.get(f"{module.path}.weight"), reader, adapter) if module.is_dora else module
        for module in adapter.modules
    )
    settings = {**adapter.settings, DORA_SCALE: Sourced(BASE_NORM, f"norms of the weights of {source}")}
    return replace(adapter.with_modules(modules), settings=settings)


def _with_base_norm(module: Module, entry: TensorEntry | None, reader: TensorReader, adapter: Adapter[Array]) -> Module:
    if entry is None or not entry.dtype.is_float:
        what = "has no weight of this module" if entry is None else f"has {entry.dtype.name} elements here"
        what = f"ComfyUI's DoRA needs the norms of the base's weights, but the base {what}"
        hint = "--base must be the model of the training run, unquantised and with the adapter's own module names"
        raise UsageError(what, where=module.path, hint=hint)
    setting = Setting(convention=adapter.convention, settings=adapter.settings)
    magnitude = module.factors["magnitude"]
    if dora.is_by_column(module, tuple(magnitude.shape), entry.shape, setting):
        return module  # by column ComfyUI computes as LyCORIS does
    change = change_of(dora.without_magnitude(module), entry.shape, setting)
    weight = to_array(reader, entry).reshape(change.rows, math.prod(entry.shape[1:]))
    ratios = np.empty(change.rows, np.float64)
    for start in range(0, change.rows, _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, change.rows)
        part = weight[start:stop].astype(np.float64)
        before = np.linalg.norm(part, axis=1)
        part += change.delta(start, stop)
        after = np.linalg.norm(part, axis=1)
        ratios[start:stop] = np.divide(before, after, out=np.zeros_like(before), where=after > 0)
        if bool(((before == 0) & (after > 0) & (magnitude.reshape(-1)[start:stop] != 0)).any()):
            what = "a row of the base's weight is zero: ComfyUI would divide by its norm"
            hint = "merge the adapter into the base: ckpt merge-lora BASE ADAPTER DST"
            raise UsageError(what, where=module.path, hint=hint)
    folded = (magnitude.astype(np.float64) * ratios.reshape(magnitude.shape)).astype(np.float32)
    return replace(module, factors={**module.factors, "magnitude": folded})


_FUSED = {"img_attn": "to_qkv", "txt_attn": "to_added_qkv"}
_TEXT_ENCODER = {"A": "lora_linear_layer.down.weight", "B": "lora_linear_layer.up.weight"}
"""diffusers' text encoders: with PEFT's names an adapter of the MLP alone is not recognised.
Source: diffusers 0.42 utils/state_dict_utils.py."""


def to_diffusers(adapter: Adapter[Array], architecture: Architecture, fitting: Fitting) -> Written:
    """Write loras under diffusers' module names, alpha/r multiplied into B: most of its loaders refuse an alpha."""
    places = place_all(adapter, architecture)
    whole = _place_lokr(places, architecture) if fitting.may_fuse else None
    if whole is not None:
        return _lokr_file(whole, fitting)
    return _diffusers_file(in_diffusers(places, as_lora=fitting.as_lora), architecture.title, fitting)


def to_diffusers_unchanged(adapter: Adapter[Array], base: BaseFamily, fitting: Fitting) -> Written:
    """Write loras of a model without tables under its own module names."""
    return _diffusers_file(unchanged(adapter, base), base.title, fitting)


def _diffusers_file(placed: list[Placed], title: str, fitting: Fitting) -> Written:
    fitted = [replace(each, module=_for_diffusers(each, title, fitting)) for each in placed]
    tensors: dict[str, Array] = {}
    for each in fitted:
        names = _TEXT_ENCODER if each.part.is_encoder else family_of(each.module).peft_names
        require(each, names, "diffusers")
        put(tensors, f"{each.part.component}.{each.module.path}", each.module, names)
    return fitting.written(DIFFUSERS_FILE, tensors, _metadata(fitted))


def _lokr_file(placed: list[Placed], fitting: Fitting) -> Written:
    """LoKr of FLUX.2; diffusers takes alpha for the rank here as well, and rebuilds the configuration by itself."""
    tensors: dict[str, Array] = {}
    for each in placed:
        module = fitting.baked_lokr(each.module)
        put(tensors, f"{each.part.component}.{module.path}", module, family_of(module).peft_names)
    return fitting.written(DIFFUSERS_FILE, tensors, {"format": "pt"})


def _for_diffusers(placed: Placed, title: str, fitting: Fitting) -> Module:
    module = placed.module
    if not placed.part.is_in_diffusers:
        raise refuse(module, f"diffusers does not load adapters of {placed.part.component} of {title}")
    module = fitting.as_lora(module)
    if "A_embedding" in module.factors:
        raise refuse(module, "diffusers does not load adapters of embeddings")
    module = fitting.baked(module)
    if module.is_dora:
        magnitude = fitting.magnitude_by_row(module)
        if module.factors["A"].ndim == 4:
            magnitude = magnitude.reshape(1, -1, 1, 1)
        module = replace(module, factors={**module.factors, "magnitude": magnitude})
    return module


def _metadata(placed: Sequence[Placed]) -> dict[str, str]:
    """Return the header of a diffusers file of loras whose scale is 1: alpha is the rank, for every module."""
    # diffusers takes PEFT's LoraConfig from there, all of it: a component that is not in it would get PEFT's defaults
    # (rank 8).
    document: dict[str, object] = {}
    for component in dict.fromkeys(each.part.component for each in placed):
        those = [each for each in placed if each.part.component == component]
        config = _lora_config([each.module for each in those], short=those[0].part.is_encoder)
        document |= {f"{component}.{key}": value for key, value in config.items()}
    return {"format": "pt", DIFFUSERS_KEY: json.dumps(document, indent=2, sort_keys=True)}


def _lora_config(modules: Sequence[Module], *, short: bool) -> Mapping[str, object]:
    """LoraConfig of one component; `short` paths fit CLIP with and without `text_model.`."""
    ranks = {
        module.path.removeprefix("text_model.") if short else module.path: module.factors["A"].shape[0]
        for module in modules
    }
    rank = Counter(ranks.values()).most_common(1)[0][0]
    others = {path: each for path, each in ranks.items() if each != rank}
    anchored = others if short else {f"^{path}": each for path, each in others.items()}
    return {
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": anchored,
        "alpha_pattern": anchored,
        "target_modules": sorted(ranks),
        "use_dora": any(module.is_dora for module in modules),
        "lora_bias": any("B_bias" in module.factors for module in modules),
        "peft_type": "LORA",
    }


def _place_lokr(places: Sequence[tuple[ModulePlace, Module]], architecture: Architecture) -> list[Placed] | None:
    """Return an adapter of LoKr modules alone as diffusers' loaders that know it take it, or None when they would not.

    It rebuilds PEFT's LoKr configuration from the shapes alone: one `decompose_factor` must give the factors of every
    module, and PEFT must come to the same choice of full and low-rank halves. Fused projections stay fused: diffusers
    fuses the model's own when it meets them. Source: diffusers 0.42, utils/peft_utils.py (`_create_lokr_config`),
    loaders/lora_conversion_utils.py; peft 0.21, tuners/lokr/layer.py (`update_layer`, `factorization`).
    """
    if not architecture.lokr or not places:
        return None
    if "native" not in architecture.lokr and any(where.at is None and len(where.diffusers) > 1 for where, _ in places):
        return None
    if any(module.family != lokr.Lokr.name or module.is_dora or "t2" in module.factors for _, module in places):
        return None
    placed = []
    try:
        for where, module in places:
            moved = family_of(module).swap_halves(module) if where.is_swapped and where.at is None else module
            placed.append(Placed(part=where.part, module=replace(moved, path=_path(where))))
    except InexpressibleError:
        return None
    fused = {each.module.path.rpartition(".")[0] for each in placed if each.module.path.endswith("qkv")}
    if any(each.module.path.rpartition(".")[0] in fused and _is_part(each.module.path) for each in placed):
        return None  # the model's projections cannot be fused and apart
    if len({each.module.path for each in placed}) < len(placed):
        return None
    return placed if _is_rebuilt([each.module for each in placed]) else None


def _path(where: ModulePlace) -> str:
    paths = where.diffusers
    if where.at is not None:
        return paths[where.at]
    if len(paths) == 1:
        return paths[0]
    stream = where.native.split(".")[2]
    return f"{paths[0].rpartition('.')[0]}.{_FUSED[stream]}"


def _is_part(path: str) -> bool:
    return path.rpartition(".")[2] in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")


def _is_rebuilt(modules: Sequence[Module]) -> bool:
    """Would PEFT make factors of these very shapes?"""
    halves = [lokr.halves_of(module) for module in modules]
    candidates = [*sorted({each.first[0] for each in halves}), -1]
    if not any(lokr.is_rebuilt(halves, factor) for factor in candidates):
        return False
    both = any("w1_a" in module.factors for module in modules)
    for module, each in zip(modules, halves, strict=True):
        ranks = [module.factors[role].shape[1] for role in ("w2_a", "w1_a") if role in module.factors]
        rank = ranks[0] if ranks else max(each.second)
        if lokr.half_built_otherwise(module.factors, each, rank, both=both) is not None:
            return False
    return True
