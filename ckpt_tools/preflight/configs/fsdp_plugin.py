"""`fsdp_config` as accelerate, Trainer and axolotl have it: all three end in accelerate's FSDP plugin.

Source: accelerate 1.15 `utils/dataclasses.py:FullyShardedDataParallelPlugin`, `utils/constants.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ckpt_tools.checkpoint.layout import Mesh
from ckpt_tools.preflight.configs.field_rows import FSDP, FieldRow, Given, ReaderInput, Table, row
from ckpt_tools.preflight.configs.schema import STATE_DICTS, STRATEGIES
from ckpt_tools.preflight.plain_values import as_truth
from ckpt_tools.preflight.spec import Engine, build_mesh, sharding_strategy

SECTION = "fsdp_config"
_PREFIX = "fsdp_"
TRANSFORMER_WRAP = "TRANSFORMER_BASED_WRAP"
SIZE_WRAP = "SIZE_BASED_WRAP"


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginDefaults:
    """What one of the three makes of options that are missing."""

    auto_wrap_policy: str | None
    min_num_params: int
    full_state_dict: bool
    cpu_ram_efficient_loading: bool


def without_prefix(source: ReaderInput) -> ReaderInput:
    """Return a source whose `fsdp_config` has keys without prefix; of a key in both spellings the later one wins."""
    section = source.values.get(SECTION)
    if not isinstance(section, Mapping):
        return source
    spelled = {str(key).removeprefix(_PREFIX): str(key) for key in section}
    options = {str(key).removeprefix(_PREFIX): value for key, value in section.items()}
    default = _PREFIX if any(key.startswith(_PREFIX) for key in section) else ""

    def spell(path: str) -> str:
        head, _, name = path.partition(".")
        if head != SECTION or not name:
            return path
        return f"{SECTION}.{spelled.get(name, default + name)}"

    return replace(source, options={**source.values, SECTION: options}, spell=spell)


def plugin_rows(
    defaults: PluginDefaults, *, offload: FieldRow, v1: FieldRow | None = None, v2: FieldRow | None = None
) -> Mapping[Engine, Table]:
    """Return the rows of the plugin for both versions of FSDP; `v1` and `v2` replace those of the strategy."""

    def classes(given: Given) -> tuple[str, ...]:
        return given.raw.fsdp_config.transformer_layer_cls_to_wrap or () if policy(given) == TRANSFORMER_WRAP else ()

    def min_num_params(given: Given) -> int | None:
        size = given.raw.fsdp_config.min_num_params
        # 0 wraps nothing.
        return ((defaults.min_num_params if size is None else size) or None) if policy(given) == SIZE_WRAP else None

    def policy(given: Given) -> str:
        return (given.raw.fsdp_config.auto_wrap_policy or defaults.auto_wrap_policy or "").upper()

    def recomputes(given: Given) -> bool:
        return given.spec.activation_checkpointing or bool(given.raw.fsdp_config.activation_checkpointing)

    loading = "cpu_ram_efficient_loading"
    both: Table = {
        "offload_params": offload,
        "activation_checkpointing": row(f"{SECTION}.activation_checkpointing", value=recomputes),
        "wrap_classes": row(f"{SECTION}.transformer_layer_cls_to_wrap", value=classes),
        "wrap_min_num_params": row(f"{SECTION}.min_num_params", value=min_num_params),
        "wraps_blocks": row(
            value=lambda given: policy(given) == TRANSFORMER_WRAP or given.spec.wrap_min_num_params is not None
        ),
        loading: row(f"{SECTION}.{loading}", default=defaults.cpu_ram_efficient_loading),
    }
    state_dicts = {version: STATE_DICTS[0 if version == 1 or defaults.full_state_dict else 2] for version in (1, 2)}
    strategies = (v1 or row(value=lambda _: v1_strategy(STRATEGIES[0])), v2 or row(value=v2_strategy))
    return {
        engine: {
            "strategy reshard_after_forward": strategy,
            "state_dict_type": row(f"{SECTION}.state_dict_type", default=state_dicts[version]),
            **both,
        }
        for engine, version, strategy in zip(FSDP, (1, 2), strategies, strict=True)
    }


def plugin_mesh(given: Given) -> Mesh | None:
    """Return the mesh; DeepSpeed makes the groups of its own sequence parallelism."""
    spec = given.spec
    is_other = spec.engine == "other" or spec.axes.get("sp", 1) > 1
    return None if is_other else build_mesh(spec.axes, spec.world_size)


def v1_strategy(name: str) -> tuple[str, bool | None]:
    """Return a strategy of FSDP1 in our words, and whether parameters are given back after forward."""
    after = {"SHARD_GRAD_OP": False, "HYBRID_SHARD_ZERO2": False, "NO_SHARD": None}.get(name, True)
    return "hybrid_shard" if name == "HYBRID_SHARD_ZERO2" else name.lower(), after


def v2_strategy(given: Given, *, default: bool = True) -> tuple[str, bool | None]:
    """Return the same of FSDP2, whose mesh says the rest; `default` is what a missing option means."""
    reshard = given.raw.fsdp_config.reshard_after_forward
    after = default if reshard is None else as_truth(reshard)
    return sharding_strategy(given.spec, reshards=after is not False), after
