"""`fsdp_config` as accelerate, Trainer and axolotl have it: all three end in accelerate's FSDP plugin.

Source: accelerate 1.15 `utils/dataclasses.py:FullyShardedDataParallelPlugin`, `utils/constants.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from pydantic import PlainValidator

from ckpt_tools.preflight.configs.config import first_key
from ckpt_tools.preflight.configs.mesh import sharding_strategy
from ckpt_tools.preflight.configs.options import Spell
from ckpt_tools.preflight.configs.schema import FALSE_WORDS, TRUE_WORDS, Count, Names, Section, Truth, Word
from ckpt_tools.preflight.spec import ParallelSpec

SECTION = "fsdp_config"
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""Strategies of FSDP1 by their numbers, from 1."""
STATE_DICTS = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
"""Kinds of state dicts by their numbers, from 1."""
TRANSFORMER_WRAP = "TRANSFORMER_BASED_WRAP"
SIZE_WRAP = "SIZE_BASED_WRAP"


def _version(value: object) -> int:
    if str(value).strip() in ("1", "2") and not isinstance(value, bool):
        return int(str(value))
    raise ValueError("1 or 2")


def _one_of(names: tuple[str, ...], value: object) -> str:
    text = str(value).strip().upper()
    if text in names:
        return text
    if text.isdecimal() and len(text) == 1 and 1 <= int(text) <= len(names):
        return names[int(text) - 1]
    raise ValueError(f"one of {', '.join(names)}")


Version = Annotated[int, PlainValidator(_version)]
"""Of FSDP."""
Strategy = Annotated[str, PlainValidator(partial(_one_of, STRATEGIES))]
"""A strategy of FSDP1, for its name or number."""
StateDict = Annotated[str, PlainValidator(partial(_one_of, STATE_DICTS))]
"""A kind of state dict, for its name or number."""


class FsdpOptions(Section):
    """Options that all three take, each without its prefix."""

    version: Version | None = None
    # Its type depends on the version; the rules look at it.
    reshard_after_forward: Any = None
    auto_wrap_policy: Word | None = None
    transformer_layer_cls_to_wrap: Names | None = None
    min_num_params: Count | None = None
    state_dict_type: StateDict | None = None
    cpu_ram_efficient_loading: Truth | None = None
    activation_checkpointing: Truth | None = None
    use_orig_params: Truth | None = None
    sync_module_states: Truth | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginDefaults:
    """What one of the three makes of options that are missing."""

    version: int
    """FSDP's."""
    auto_wrap_policy: str | None
    """Policy."""
    min_num_params: int
    """Of SIZE_BASED_WRAP."""
    full_state_dict: bool
    """Is FULL_STATE_DICT the default under FSDP2 too?"""
    cpu_ram_efficient_loading: bool
    """Does only the first rank read the weights?"""


def strip_prefix(values: Mapping[str, object], prefix: str = "fsdp_") -> tuple[dict[str, object], Spell]:
    """Return `values` with the keys of `fsdp_config` without prefix, and what turns their paths back.

    A key that is there in both spellings counts as the frameworks count it: the later one wins.
    """
    section = values.get(SECTION)
    if not isinstance(section, Mapping):
        return dict(values), str
    spelled = {str(key).removeprefix(prefix): str(key) for key in section}
    options = {str(key).removeprefix(prefix): value for key, value in section.items()}
    is_prefixed = any(key.startswith(prefix) for key in section)

    def spell(path: str) -> str:
        head, _, name = path.partition(".")
        if head != SECTION or not name:
            return path
        return f"{SECTION}.{spelled.get(name, prefix + name if is_prefixed else name)}"

    return {**values, SECTION: options}, spell


def with_plugin(
    spec: ParallelSpec,
    options: FsdpOptions,
    values: Mapping[str, object],
    defaults: PluginDefaults,
    *,
    strategy: str = STRATEGIES[0],
    reshard: object = None,
    offloads: bool = False,
) -> ParallelSpec:
    """Return a spec with what the FSDP plugin makes of its options.

    Args:
        spec: The rest: engine, axes, mesh, dtypes.
        options: The options.
        values: The file.
        defaults: Of the framework.
        strategy: Under FSDP1, the strategy in force.
        reshard: Under FSDP2, `reshard_after_forward` in force; None for the default.
        offloads: Are parameters kept in host memory?
    """
    if spec.engine not in ("fsdp1", "fsdp2"):
        return spec
    keys = dict(spec.keys)
    for field, name in (
        ("wrap_classes", "transformer_layer_cls_to_wrap"),
        ("wrap_min_num_params", "min_num_params"),
        ("state_dict_type", "state_dict_type"),
        ("cpu_ram_efficient_loading", "cpu_ram_efficient_loading"),
        ("activation_checkpointing", "activation_checkpointing"),
    ):
        found = option_key(values, name)
        if found is not None:
            keys.setdefault(field, found)
    policy = (options.auto_wrap_policy or defaults.auto_wrap_policy or "").upper()
    loading = options.cpu_ram_efficient_loading
    after: bool | None
    if spec.engine == "fsdp2":
        after = True if reshard is None else as_truth(reshard)
        strategy = sharding_strategy(spec.axes, spec.mesh, reshards=after is not False)
    else:
        after = {"SHARD_GRAD_OP": False, "HYBRID_SHARD_ZERO2": False, "NO_SHARD": None}.get(strategy, True)
        strategy = "hybrid_shard" if strategy == "HYBRID_SHARD_ZERO2" else strategy.lower()
    is_full = spec.engine == "fsdp1" or defaults.full_state_dict
    min_num_params = _min_num_params(options, defaults) if policy == SIZE_WRAP else None
    return replace(
        spec,
        strategy=strategy,
        reshard_after_forward=after,
        offload_params=offloads,
        activation_checkpointing=spec.activation_checkpointing or bool(options.activation_checkpointing),
        wrap_classes=(options.transformer_layer_cls_to_wrap or ()) if policy == TRANSFORMER_WRAP else (),
        wrap_min_num_params=min_num_params,
        wraps_blocks=policy == TRANSFORMER_WRAP or min_num_params is not None,
        state_dict_type=options.state_dict_type or STATE_DICTS[0 if is_full else 2],
        cpu_ram_efficient_loading=defaults.cpu_ram_efficient_loading if loading is None else loading,
        keys=keys,
    )


def option_key(values: Mapping[str, object], name: str) -> str | None:
    """Return the key path of an option of `fsdp_config` in whichever spelling the file has."""
    return first_key(values, f"{SECTION}.fsdp_{name}", f"{SECTION}.{name}")


def as_truth(value: object) -> bool | None:
    """Return a truth, or None for what is none. Source: `str_to_bool`."""
    word = str(value).strip().lower()
    return True if word in TRUE_WORDS else False if word in FALSE_WORDS else None


def _min_num_params(options: FsdpOptions, defaults: PluginDefaults) -> int | None:
    size = defaults.min_num_params if options.min_num_params is None else options.min_num_params
    return size or None  # 0 wraps nothing
