"""What verl's PPO and SFT trainers have in common: configs under configs, engines, the mesh and dtypes of FSDP."""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.preflight.configs.config import Options, first_key
from ckpt_tools.preflight.configs.hydra import Overrides
from ckpt_tools.preflight.configs.names import known
from ckpt_tools.preflight.configs.options import option_names
from ckpt_tools.preflight.configs.schema import SectionType, validate
from ckpt_tools.preflight.configs.verl_schema import Fsdp, Model
from ckpt_tools.preflight.spec import AdapterSpec, Engine

CONFIGS = ("ppo_trainer", "ppo_megatron_trainer", "sft_trainer", "sft_trainer_engine")
"""verl's own configs, whose defaults are known; what another one holds is not."""
ENGINES: Mapping[str, Engine] = {"fsdp": "fsdp1", "fsdp2": "fsdp2"}
"""Strategy → engine; the others' options are not read."""
_OWN_ENGINES = ("dp", "fsdp")
"""Choices of a group that mean FSDP."""


def bases_of(values: Mapping[str, object]) -> list[str]:
    """Return the configs that a file is laid over (Hydra's defaults list)."""
    defaults = values.get("defaults")
    names: list[str] = []
    for item in defaults if isinstance(defaults, list) else ():
        pairs = item.items() if isinstance(item, Mapping) else ((item, None),)
        names += [str(name) if file is None else f"{name}:{file}" for name, file in pairs]
    return names


def validate_tree(
    model: type[SectionType], values: Mapping[str, object], overrides: Overrides | None
) -> tuple[SectionType, tuple[Finding, ...], Options]:
    """Validate a tree; what other configs than verl's own may hold, which it is laid over, is unread."""
    own = {*CONFIGS, *known("verl", "defaults")}
    words = [f"defaults: {name}" for name in bases_of(values) if name not in own]
    if overrides is None:
        return validate(model, values, words=words)
    groups = [f"{key}=…" for key in values if key not in option_names(model)]  # `model_engine=…` chooses whole files
    others = {key: value for key, value in values.items() if key in option_names(model)}
    return validate(model, others, added=overrides.added, words=(*overrides.unread, *words, *groups))


def engine_of(overrides: Overrides | None, group: str) -> str:
    """Return the engine that a group chooses; FSDP by default."""
    chosen = "fsdp" if overrides is None else overrides.groups.get(group, "fsdp")
    return "fsdp" if chosen in _OWN_ENGINES else chosen


def axes_of(fsdp: Fsdp, world: int | None) -> dict[str, int]:
    """Return `create_device_mesh`'s axes: groups of `fsdp_size` ranks shard, and replicate each other."""
    size = -1 if fsdp.fsdp_size is None else fsdp.fsdp_size
    if size < 0 or (world is not None and size >= world):
        return {"dp_shard": -1}
    return {"dp_replicate": -1, "dp_shard": size}


def dtypes_of(fsdp: Fsdp) -> tuple[str, str]:
    """Return the dtypes of computation and of averaging; `mixed_precision` wins over `dtype`."""
    given = fsdp.mixed_precision
    if given is None:
        return fsdp.dtype or "bf16", "f32"
    return given.param_dtype or "bf16", given.reduce_dtype or "f32"


def adapter_of(model: Model) -> AdapterSpec | None:
    """Return the adapter that is trained, if any."""
    rank = model.lora_rank or 0
    if rank <= 0 and model.lora_adapter_path is None:
        return None
    return AdapterSpec(
        kind="lora",
        rank=rank or None,
        alpha=16.0 if model.lora_alpha is None else model.lora_alpha,
        targets=model.target_modules or ("all-linear",),
    )


def keys_of(values: Mapping[str, object], paths: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Return field of the spec → the option that says it, for those that are given."""
    found = {field: first_key(values, *names) for field, names in paths.items()}
    return {field: path for field, path in found.items() if path is not None}
