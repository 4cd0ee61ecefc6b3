"""What of a base model an adapter is compared with: names and shapes, from headers alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace

from ckpt_tools.adapters.adapter import SAVED, TOKENS, Adapter, AdapterModule, Sourced
from ckpt_tools.adapters.architectures.choose import model_family_of
from ckpt_tools.adapters.base import gguf_names
from ckpt_tools.adapters.base.model import BaseModel, adapted_paths, as_named, live_tensors, without_predictors
from ckpt_tools.adapters.base.slots import some, stacked_experts
from ckpt_tools.adapters.base.tied import HEAD, tied_embeddings
from ckpt_tools.adapters.ecosystems.peft.config_rules import MODEL_TYPES, changes_base
from ckpt_tools.adapters.families import FAMILIES, family_of
from ckpt_tools.adapters.read.assemble import known_shape
from ckpt_tools.adapters.read.opening import OpenedAdapter, TensorReader
from ckpt_tools.adapters.read.sidecars import base_config
from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.checkpoint.formats.opening import Opened, open_path
from ckpt_tools.checkpoint.names.apply_mosaic import lay_out
from ckpt_tools.checkpoint.names.mosaic import unstack, whole
from ckpt_tools.checkpoint.transform import plain_names
from ckpt_tools.errors import UsageError
from ckpt_tools.models.conventions import Convention, agreed, check_settings, conventions_of
from ckpt_tools.text import natural_key


def read_base(path: str | os.PathLike[str]) -> BaseModel:
    """Read the headers of a base model."""
    with open_path(os.fspath(path)) as opened:
        tensors = plain_names(opened.checkpoint)
        config = base_config(opened)
        shapes = {name: slot.shape for name, slot in stacked_experts(tensors).items()}
        shapes |= {name: known_shape(entry) for name, entry in tensors.items()}
        if tied := tied_embeddings(opened, tensors):
            shapes[HEAD] = tied[0].shape
        return BaseModel(
            shapes=without_predictors(shapes, config),
            source="--base",
            family=model_family_of(shapes, config),
            task_type=_task_type(config),
            config=config,
        )


def on_base(read: OpenedAdapter, base: str | os.PathLike[str] | None) -> OpenedAdapter:
    """Return an adapter of a trainer's own model under the names of the base's; errors as `in_hub_names`."""
    if base is None or read.adapter.convention not in _OWN_NAMES:
        return read
    with open_path(os.fspath(base)) as opened:
        return in_hub_names(read, base_config(opened))


def base_of(read: OpenedAdapter, base: str | os.PathLike[str] | None) -> tuple[BaseModel | None, bool]:
    """Return the base model as the adapter names it, and whether its weights are proven to be the training run's."""
    if base is None:
        return _base_in(read.adapter), False
    replicated = read.adapter.settings.get("layer_replication")
    if replicated is not None and replicated.value:
        what = "layer_replication repeats layers of the base: the names of the adapter's modules are not the base's"
        raise UsageError(what, where="--base", hint="leave it out")
    is_proven = False
    if read.adapter.base_tensors:
        with open_path(os.fspath(base)) as opened:
            tensors = live_tensors(plain_names(opened.checkpoint), base_config(opened))
            is_proven = refuse_changed(read.adapter, read.opened, opened, tensors)
    return as_named(read_base(base), adapted_paths(read.adapter)), is_proven


def _base_in(adapter: Adapter[TensorEntry]) -> BaseModel | None:
    """Return the base model that a training checkpoint holds beside the adapter."""
    if not adapter.base_shapes:
        return None
    return BaseModel(
        shapes=adapter.base_shapes, source="the base model in the source", family=model_family_of(adapter.base_shapes)
    )


def _task_type(config: Mapping[str, object]) -> Sourced[object] | None:
    """Return PEFT's task type, where its forward for that task is one that the model understands."""
    architectures = config.get("architectures")
    source = "architecture in the base's config.json"
    for name in architectures if isinstance(architectures, list) else ():
        if not isinstance(name, str):
            continue
        if name.removesuffix("ForConditionalGeneration") in MODEL_TYPES["text_first"]:
            return Sourced("SEQ_2_SEQ_LM", source)
        for end, task in MODEL_TYPES["tasks"].items():
            if name.endswith(end) and (task == "CAUSAL_LM" or {*MODEL_TYPES["of_pictures"]}.isdisjoint(config)):
                return Sourced(task, source)
    return None


# The frozen weights that a training checkpoint holds beside its adapter, compared with the base of a merge.

_MAX_VECTOR_ELEMS = 1 << 20  # Longer ones are not compared: what is read stays small


def on_changed_base(adapter: Adapter[TensorEntry]) -> Adapter[TensorEntry]:
    """Return PiSSA, OLoRA and the like with the weights that they left of the base, where the source holds all of them.

    Whole tensors replace the base's before the factors are added, which then belong to a plain base.
    """
    adapted = [m for m in adapter.modules if not m.is_saved and m.family != TOKENS]
    held = [(m, adapter.base_tensors.get(f"{m.path}.{m.parameter}")) for m in adapted]
    if not changes_base(adapter) or any(entry is None or not entry.dtype.is_float for _, entry in held):
        return adapter
    left = [AdapterModule(path=m.path, family=SAVED, factors={m.parameter: e}) for m, e in held if e is not None]
    init: Sourced[object] = Sourced(True, "the changed base is in the checkpoint")
    settings = {**adapter.settings, "init_lora_weights": init}
    return replace(adapter.with_modules((*adapter.modules, *left)), settings=settings)


def refuse_changed(
    adapter: Adapter[TensorEntry], source: Opened, base: Opened, tensors: Mapping[str, TensorEntry]
) -> bool:
    """Refuse an adapter whose source has other biases, norms or values in its smallest adapted weight than the base.

    `tensors` are the base's, by the names that a plain model gives them. Return True if an adapted weight was compared:
    the adapter was trained on the base as it is.
    """
    own, theirs = TensorReader(source), TensorReader(base)

    def differs(name: str) -> bool:
        return not _is_same(adapter.base_tensors[name], tensors[name], own, theirs)

    names = list(_comparable(adapter, tensors))
    adapted = {f"{m.path}.{m.parameter}" for m in adapter.modules if not m.is_saved and m.family != TOKENS}
    weights = [name for name in names if name in adapted]
    weight = min(weights, key=lambda name: (tensors[name].num_elems, name), default=None)
    if weight is not None and not changes_base(adapter) and differs(weight):
        raise UsageError(
            f"{weight} in the checkpoint that holds the adapter differs from the base's: the adapter was "
            "trained on that one",
            where=weight,
            hint="is it the base of the training run? PiSSA, OLoRA and the like change it before training: --config "
            "init_lora_weights=pissa (or olora, …) says so, and merge-lora then takes the changed weights from the "
            "checkpoint",
        )
    vectors = [name for name in names if len(tensors[name].shape) == 1 and tensors[name].num_elems <= _MAX_VECTOR_ELEMS]
    changed = [name for name in vectors if differs(name)]
    if changed:
        is_bias = all(name.endswith(".bias") for name in changed)
        raise UsageError(
            f"{len(changed)} of {len(vectors)} biases and norms in the checkpoint that holds the adapter differ from "
            f"the base's: {some(list(changed))}",
            where=changed[0],
            hint=("were they trained? --config bias=all includes them" if is_bias else "were they trained, or is this")
            + (" (lora_only: those of adapted modules)" if is_bias else " another base?")
            + f"; to keep those of the base, read only the factors: --include {_factors(adapter)}",
        )
    return weight is not None and not changes_base(adapter)


def _factors(adapter: Adapter[TensorEntry]) -> str:
    """Return the glob of the factors' names."""
    markers = (family_of(module).marker for module in adapter.modules)
    return f"'**{next(filter(None, markers), FAMILIES['lora'].marker)}**'"


def _comparable(adapter: Adapter[TensorEntry], tensors: Mapping[str, TensorEntry]) -> Iterator[str]:
    """Yield the names of parameters that both have, in the same shape and as plain numbers."""
    for name, entry in adapter.base_tensors.items():
        other = tensors.get(name)
        if other is None or other.shape != entry.shape or not name.endswith((".weight", ".bias")):
            continue
        if entry.dtype.is_float and other.dtype.is_float:
            yield name


def _is_same(one: TensorEntry, other: TensorEntry, own: TensorReader, theirs: TensorReader) -> bool:
    """Do they hold the same numbers, or is one of them the other one rounded?"""
    import numpy as np

    from ckpt_tools.transfer.arrays import array_of
    from ckpt_tools.transfer.casting import cast_array

    first = array_of(own.read(one), one.dtype, (-1,))
    second = array_of(theirs.read(other), other.dtype, (-1,))
    for wide, narrow in ((first, second), (second, first)):
        rounded = np.empty_like(narrow)
        cast_array(wide, rounded)
        if rounded.tobytes() == narrow.tobytes():
            return True
    return False


# LoRA of trainers with models of their own (torchtitan, torchtune, Megatron-Bridge), by the names of the hub's model.
#
# The key maps of weights say what becomes of the factors: B and a magnitude have the weight's rows, so that what the
# map does to rows (rotary embeddings, fused q, k and v) is done to them; A is that of every part.
#
# Source: torchtitan 0.3.0 `components/lora.py`; torchtune 0.6.1 `modules/peft/`; Megatron-Bridge 0.3.1 `peft/`.

_Config = Mapping[str, object]
_OWN_NAMES = ("trainer", "gguf")  # Conventions whose modules are not called as the hub's
_Module = AdapterModule[TensorEntry]
_PARTS = {"adapter_q": 0, "adapter_k": 1, "adapter_v": 2, "adapter_gate": 0, "adapter_up": 1}
"""Adapter of a part of a fused weight (Megatron-Bridge's CanonicalLoRA) → which part it is."""
_SETTLED: _Config = {"use_rslora": False, "init_lora_weights": True, "alpha_pattern": {}}
"""Fields of PEFT's configuration for which these trainers have one value alone."""


def in_hub_names(read: OpenedAdapter, config: _Config) -> OpenedAdapter:
    """Return an adapter under the module paths of the hub's model; unchanged where it has no trainer's names.

    `config` is the base's config.json. The factors become views of the same bytes.
    """
    adapter = read.adapter
    if adapter.convention not in _OWN_NAMES:
        return read
    for module in adapter.modules:
        if not {"A", "B"} <= module.factors.keys() and "A_embedding" not in module.factors:
            there = ", ".join(module.factors)
            raise UsageError(f"{module.path} has only {there}; a LoRA needs A and B", where=module.path)
    classes = config.get("architectures") or [config.get("_class_name")]
    name = str(classes[0]) if isinstance(classes, list) else ""
    weights = {f"{module.path.partition('.adapter')[0]}.weight" for module in adapter.modules}
    if adapter.convention == "gguf":
        known, config = gguf_names.of_adapter(read.opened.metadata, config)
    else:
        known = conventions_of(weights, name, config)
    if not known:
        kind = config.get("model_type") or name
        what = f"the names are the trainer's own, and ckpt cannot map them to a base of type {kind}"
        hint = "pass the model that was trained, with its config.json; or export the adapter with the trainer"
        raise UsageError(what, where=adapter.modules[0].path, hint=hint)
    check_settings(read.opened.settings, config)
    settled = {field: Sourced(value, f"{known[0].name} has no other") for field, value in _SETTLED.items()}
    made = adapter.with_modules(sorted(_converted(read, known, config), key=lambda module: natural_key(module.path)))
    settings = {**settled, **adapter.settings}
    return read._replace(adapter=replace(made, convention="peft", settings=settings, base_shapes={}, base_tensors={}))


def _converted(read: OpenedAdapter, known: tuple[Convention, ...], config: _Config) -> Iterator[_Module]:
    for module in read.adapter.modules:
        if "A_embedding" in module.factors:  # of GGUF, whose rows keep their order
            yield module
            continue
        path, _, part = module.path.partition(".adapter")
        raw = {role: read.opened.resolve(factor) for role, factor in module.factors.items()}
        down, *others = (whole(role, raw[role].dtype, raw[role].shape) for role in sorted(raw))
        rows = dict(zip(sorted(raw)[1:], others, strict=True))
        if part:
            place = _place_of_part(f"{path}.weight", _PARTS[part[1:]], rows["B"].shape[0], known, config)
            found = {role: {place: mosaic} for role, mosaic in rows.items()}
        else:
            found = {role: dict(agreed(known, {f"{path}.weight": rows[role]}, config).mosaics) for role in rows}
        for name, up in found["B"].items():
            if up.shape[1:] != raw["B"].shape[-1:] or any(each.axes[-1] < len(down.shape) - 1 for each in up.pieces):
                raise UsageError(f"the map of {known[0].name} changes more than rows of {path}", where=module.path)
            own = down if len(down.shape) == 2 else unstack(down, 0)[up.pieces[0].starts[0]]
            mosaics = {"A": own, **{role: each[name] for role, each in found.items()}}
            hub = name.removesuffix(".weight")
            factors = {role: lay_out(f"{hub}.{role}", mosaic, raw) for role, mosaic in mosaics.items()}
            yield replace(module, path=hub, factors=factors, rank=Sourced(own.shape[0], f"A has {own.shape[0]} rows"))


def _place_of_part(name: str, number: int, rows: int, known: tuple[Convention, ...], config: _Config) -> str:
    """Return the hub's name of one part of a fused weight, whose rows are `rows` many."""
    heads, groups = (config.get(key) for key in ("num_attention_heads", "num_key_value_heads"))
    total = 2 * rows
    if name.endswith("qkv.weight") and isinstance(heads, int) and isinstance(groups, int):
        total = rows // (groups if number else heads) * (heads + 2 * groups)
    parts = agreed(known, {name: whole(name, BY_NAME["F32"], (total, 1))}, config).mosaics
    place = list(parts)[number]
    if parts[place].shape[0] != rows:
        raise UsageError(f"{rows} rows are not those of {place}, which has {parts[place].shape[0]}", where=name)
    return place
