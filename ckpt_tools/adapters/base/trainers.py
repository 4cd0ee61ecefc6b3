"""LoRA of trainers with models of their own (torchtitan, torchtune, Megatron-Bridge), by the names of the hub's model.

The key maps of weights say what becomes of the factors: B and a magnitude have the weight's rows, so that what the map
does to rows (rotary embeddings, fused q, k and v) is done to them; A is that of every part.

Source: torchtitan 0.3.0 `components/lora.py`; torchtune 0.6.1 `modules/peft/`; Megatron-Bridge 0.3.1 `peft/`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ckpt_tools.adapters.adapter import AdapterModule, Sourced
from ckpt_tools.adapters.read.opening import OpenedAdapter
from ckpt_tools.description.checkpoint import TensorEntry
from ckpt_tools.description.dtypes import BY_NAME
from ckpt_tools.errors import UsageError
from ckpt_tools.maps.laying import lay_out
from ckpt_tools.maps.mosaic import unstack, whole
from ckpt_tools.models.conventions import Convention, agreed, check_settings, conventions_of

_Config = Mapping[str, object]
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
    if adapter.convention != "trainer":
        return read
    for module in adapter.modules:
        if not {"A", "B"} <= module.factors.keys():
            there = ", ".join(module.factors)
            raise UsageError(f"{module.path} has {there} alone, and a LoRA needs A and B", where=module.path)
    classes = config.get("architectures") or [config.get("_class_name")]
    name = str(classes[0]) if isinstance(classes, list) else ""
    weights = {f"{module.path.partition('.adapter')[0]}.weight" for module in adapter.modules}
    known = conventions_of(weights, name, config)
    if not known:
        kind = config.get("model_type") or name
        raise UsageError(
            f"the names are a trainer's own, and ckpt has no map from them to a base of the type {kind}",
            where=adapter.modules[0].path,
            hint="give the model that was trained, with its config.json; or let the trainer export the adapter",
        )
    check_settings(read.opened.settings, config)
    settled = {field: Sourced(value, f"{known[0].name} has no other") for field, value in _SETTLED.items()}
    made = adapter.with_modules(sorted(_converted(read, known, config), key=lambda module: module.path))
    settings = {**settled, **adapter.settings}
    return read._replace(adapter=replace(made, convention="peft", settings=settings, base_shapes={}, base_tensors={}))


def _converted(read: OpenedAdapter, known: tuple[Convention, ...], config: _Config) -> Iterator[_Module]:
    for module in read.adapter.modules:
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
