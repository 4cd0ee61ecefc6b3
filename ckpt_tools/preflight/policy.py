"""A launcher's FSDP options as what `shard_model` takes: policy, mesh and blocks.

Source: accelerate 1.15 `utils/dataclasses.py:FullyShardedDataParallelPlugin`; OpenRLHF's FSDP2 strategy, which averages
gradients and returns outputs in fp32.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import nn

from ckpt_tools.checkpoint.layout import Mesh, parse_mesh
from ckpt_tools.errors import UsageError
from ckpt_tools.fsdp2 import Policy, Precision
from ckpt_tools.fsdp2.blocks import Blocks
from ckpt_tools.fsdp2.policy import INSTEAD
from ckpt_tools.preflight.configs.commands import read_script
from ckpt_tools.preflight.configs.document import Document, read_document
from ckpt_tools.preflight.configs.read import understand
from ckpt_tools.preflight.plain_values import dtype_name, find_value
from ckpt_tools.text import first_few

_DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
_WRAPS = {"transformer_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "size_based_auto_wrap_policy": "SIZE_BASED_WRAP"}
_FOLLOWED = ("sharding_strategy", "forward_prefetch", "ignored_modules", "activation_checkpointing", "auto_wrap_policy")
_APART = ("mixed_precision_policy", "ignored_modules", "param_init_fn", "state_dict_config", "optim_state_dict_config")
"""Options of the plugin that no file has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """What a launcher's options come to."""

    policy: Policy
    mesh: Mesh
    blocks: Blocks
    activation_checkpointing: bool
    offload_optimizer: bool
    notes: tuple[str, ...]


def read_sharding(
    config: object, *, world_size: int, mesh: str | None = None, model: nn.Module | None = None
) -> Sharding:
    """Return the policy, mesh and blocks that a launcher's options stand for.

    `config` is accelerate's `FullyShardedDataParallelPlugin` or its keyword arguments; the path of a config that
    `preflight` reads, or its keys and values; or the text of a command line (OpenRLHF). `mesh`
    ("dp_replicate=2,dp_shard=4") goes before the options. `model` is needed where they name modules to ignore. Raise
    UsageError for options without FSDP, or that cannot be followed.
    """
    plugin = _plugin(config)
    read = understand(_document(config, plugin), world_size=world_size)
    spec = read.spec
    # A plan may show a process without its job: what it says of sharding is clear.
    wrong = [finding for finding in read.findings if finding.severity == "error" and finding.code != "no-job"]
    if wrong:
        raise UsageError(wrong[0].what, where=wrong[0].where, hint=wrong[0].hint)
    unread = (*(read.options.unknown if plugin else read.options.deciding), *read.options.unread)
    if unread or spec.engine not in ("fsdp2", "fsdp1"):
        what = f"unsupported: {first_few(list(unread), 4)}" if unread else f"the engine is {spec.engine}, not FSDP"
        raise UsageError(what, where=read.path)
    chosen = spec.mesh if mesh is None else parse_mesh(mesh, world_size=world_size)
    if chosen is None:
        hint = "pass mesh='dp_replicate=2,dp_shard=4': replicas over machines, shards inside"
        raise UsageError("the options do not set how many ranks share a copy of the model", where=read.path, hint=hint)
    strategy, reshards = spec.strategy or "full_shard", spec.reshard_after_forward
    if strategy in ("shard_grad_op", "no_shard"):
        reshards = None
    options = plugin or _options(read.values)
    notes = [
        f"{name}: {INSTEAD[name]}"
        for name, value in options.items()
        if name in INSTEAD and name not in _FOLLOWED and not _is_default(name, value)
    ]
    precision = Precision(
        param_dtype=_DTYPES.get(spec.param_dtype or ""),
        reduce_dtype=_DTYPES.get(spec.reduce_dtype or ""),
        output_dtype=torch.float32 if spec.framework == "openrlhf" else None,
    )
    given = options.get("mixed_precision_policy")
    if given is not None:
        own = {name: getattr(given, name, None) for name in _PRECISION}
        if isinstance(given, (str, torch.dtype, Mapping)):
            own = dict(given) if isinstance(given, Mapping) else dict.fromkeys(_PRECISION[:2], given)
        precision = Precision(**{name: _dtype(own.get(name)) for name in _PRECISION[:3]})
        notes += [f"buffer_dtype: {INSTEAD['buffer_dtype']}"] * (own.get("buffer_dtype") is not None)
    if strategy == "hybrid_shard" and chosen.size("dp_replicate") == 1:
        notes.append("hybrid_shard on one machine is full_shard: pass mesh='dp_replicate=2,dp_shard=4' for several")
        strategy = "full_shard"
    if spec.wrap_min_num_params is not None:
        notes.append(f"auto_wrap_policy: {INSTEAD['auto_wrap_policy']}")
    return Sharding(
        policy=Policy(
            strategy=strategy,
            precision=precision,
            cpu_offload=spec.offload_params,
            pin_memory=getattr(options.get("cpu_offload"), "pin_memory", None),
            reshard_after_forward=reshards,
            prefetch_forward=int(str(options.get("forward_prefetch")).lower() == "true"),
            ignored=_ignored(options.get("ignored_modules"), model),
        ),
        mesh=chosen,
        blocks=spec.wrap_classes or ("auto" if spec.wraps_blocks else ()),
        activation_checkpointing=spec.activation_checkpointing,
        offload_optimizer=spec.offload_optimizer,
        notes=tuple(notes),
    )


_PRECISION = ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype")


def _plugin(config: object) -> dict[str, Any]:
    """Return the arguments of accelerate's plugin; nothing for other options."""
    if is_dataclass(config) and not isinstance(config, type):
        given = {field.name: (getattr(config, field.name), field.default) for field in fields(config)}
        config = {name: value for name, (value, default) in given.items() if value is not default}
    elif not isinstance(config, Mapping) or {"fsdp_config", "distributed_type", "train", "config"} & config.keys():
        return {}
    return {str(name): value for name, value in config.items() if value is not None}


def _document(config: object, plugin: Mapping[str, Any]) -> Document:
    if plugin:
        section = {name: _plain(value) for name, value in plugin.items() if name not in _APART}
        names = {"transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap", "cpu_offload": "offload_params"}
        section = {names.get(name, name): value for name, value in section.items()}
        section = {name if name == "fsdp_version" else f"fsdp_{name}": value for name, value in section.items()}
        return Document(path="the plugin", values={"distributed_type": "FSDP", "fsdp_config": section})
    if isinstance(config, str) and "--" in config:
        return Document(path="the command", commands=read_script(config).commands)
    document = (
        Document(path="the options", values=config) if isinstance(config, Mapping) else read_document(str(config))
    )
    if document.values is not None and "train" in document.values and "config" not in document.values:
        return replace(document, values={"config": {"process": [document.values]}})  # a process of ai-toolkit's alone
    return document


def _plain(value: Any) -> Any:  # noqa: ANN401 - enums, functions and torch's policies
    """Return an argument of the plugin as the launcher's file has it."""
    name = getattr(value, "name", getattr(value, "__name__", None))
    if name is not None:
        return _WRAPS.get(name, name)
    if isinstance(value, (bool, int, str, list, tuple, set)):
        return sorted(value) if isinstance(value, set) else value
    return getattr(value, "offload_params", hasattr(value, "pin_memory"))


def _dtype(value: object) -> torch.dtype | None:
    if value is None or isinstance(value, torch.dtype):
        return value
    found = _DTYPES.get(dtype_name(str(value)) or "")
    if found is None:
        raise UsageError(f"unknown dtype {value!r}", where="mixed_precision_policy", hint="use bf16, fp16 or fp32")
    return found


def _options(values: Mapping[str, object]) -> dict[str, Any]:
    section = values.get("fsdp_config", find_value(values, "config.process[0].train") or values)
    return {str(k).removeprefix("fsdp_"): v for k, v in section.items()} if isinstance(section, Mapping) else {}


def _is_default(name: str, value: object) -> bool:
    if name == "mixed_precision":
        return True  # followed, as the spec's dtypes
    word = str(getattr(value, "name", value)).lower()
    return word in ("false", "none", "no_prefetch", "no_wrap") or (name, word) in (
        ("backward_prefetch", "true"),
        ("backward_prefetch", "backward_pre"),
    )


def _ignored(value: Any, model: nn.Module | None) -> tuple[str, ...]:  # noqa: ANN401 - modules, or a regular expression
    if not value:
        return ()
    if model is None:
        raise UsageError("ignored_modules needs the model", where="read_sharding", hint="pass model=…")
    wanted = () if isinstance(value, str) else {id(module) for module in value}
    named = [
        fqn
        for fqn, module in model.named_modules()
        if fqn and (re.fullmatch(value, fqn) if isinstance(value, str) else id(module) in wanted)
    ]
    if not named:
        raise UsageError("ignored_modules matches no module of the model", where="read_sharding")
    return tuple(named)
