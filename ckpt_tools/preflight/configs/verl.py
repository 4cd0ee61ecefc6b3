"""verl's configs: Hydra's YAML, or the overrides of a command line on top of verl's own.

PPO and its kin (`actor_rollout_ref`), of which the actor is the model that is trained, and the FSDP trainer for SFT
(`model.partial_pretrain`).

Source: verl, January 2026: `trainer/config/_generated_ppo_trainer.yaml` and `sft_trainer.yaml` (defaults),
`workers/config/{engine,actor}.py` (dataclasses, which take no other option), `workers/fsdp_workers.py`
(`create_device_mesh`, `_build_model_optimizer`), `trainer/fsdp_sft_trainer.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from ckpt_tools.checkpoint import Finding
from ckpt_tools.errors import LimitError
from ckpt_tools.preflight.configs.config import Options, Reading, first_key
from ckpt_tools.preflight.configs.document import Document
from ckpt_tools.preflight.configs.hydra import Overrides, is_override, read_overrides, resolve
from ckpt_tools.preflight.configs.launch import launched_ranks, lost_options, programs, several_commands
from ckpt_tools.preflight.configs.mesh import build_mesh, sharding_strategy
from ckpt_tools.preflight.configs.options import option_names
from ckpt_tools.preflight.configs.schema import SectionType, validate
from ckpt_tools.preflight.configs.verl_schema import (
    Actor,
    ActorRolloutRef,
    Data,
    Fsdp,
    Model,
    Ppo,
    Runner,
    Sft,
    SftFsdp,
    SftModel,
    WrapPolicy,
)
from ckpt_tools.preflight.spec import AdapterSpec, Engine, ParallelSpec
from ckpt_tools.text import escape_name

_ACTOR = "actor_rollout_ref.actor"
_CONFIGS = ("ppo_trainer", "ppo_megatron_trainer", "sft_trainer")
"""verl's own configs, whose defaults are known; what another one holds is not."""
_ENGINES: Mapping[str, Engine] = {"fsdp": "fsdp1", "fsdp2": "fsdp2"}


def looks_like(document: Document) -> bool:
    """Is this verl's?"""
    if document.values is not None:
        return _is_ppo(document.values) or _is_sft(document.values)
    return any(
        "verl.trainer" in word or word.lstrip("+~").startswith("actor_rollout_ref.") for word in _words(document)
    )


def _words(document: Document) -> list[str]:
    return [word for command in document.commands for word in command]


def _arguments(command: Sequence[str]) -> Sequence[str] | None:
    """Return what follows verl's program in a command; None where the command does not start it."""
    for at, word in enumerate(command):
        if word.startswith(("verl.trainer.", "verl/trainer/")):
            return command[at + 1 :]
    return None


def _command(document: Document) -> Sequence[str]:
    """Return the arguments of the first command that starts verl; all words where none does."""
    found = (arguments for command in document.commands if (arguments := _arguments(command)) is not None)
    return next(found, _words(document))


def _lost_options(document: Document) -> tuple[Finding, ...]:
    """Return the finding on overrides that come after the end of verl's command."""
    at = next((at for at, command in enumerate(document.commands) if _arguments(command) is not None), None)
    return () if at is None else lost_options(document.commands[at + 1 :], is_override)


def _own_programs(document: Document) -> tuple[str, ...]:
    """Return the programs that are started with verl's options and are not verl's: their defaults are not known."""
    if any(_arguments(command) is not None for command in document.commands):
        return ()
    with_options = (
        command
        for command in document.commands
        if any(one.lstrip("+~").startswith("actor_rollout_ref.") for one in command)
    )
    return tuple(chain.from_iterable(map(programs, with_options)))


def _is_ppo(values: Mapping[str, object]) -> bool:
    return isinstance(values.get("actor_rollout_ref"), Mapping)


def _is_sft(values: Mapping[str, object]) -> bool:
    model = values.get("model")
    return isinstance(model, Mapping) and "partial_pretrain" in model


def read(document: Document, *, world_size: int | None) -> Reading:
    """Read a config.

    Args:
        document: A tree, or a script whose overrides are read.
        world_size: Ranks; None for `trainer.nnodes` × `trainer.n_gpus_per_node`.
    """
    findings: tuple[Finding, ...] = ()
    overrides = None
    tree, command = document.values, _command(document)
    if tree is None:
        overrides = read_overrides(command, configs=_CONFIGS)
        overrides = replace(overrides, unread=(*_own_programs(document), *overrides.unread))
        tree, findings = overrides.values, overrides.findings
        if sum(_arguments(words) is not None for words in document.commands) > 1:
            findings += (several_commands(document.path),)
        findings += _lost_options(document)
    try:
        values, unknown = resolve(tree)
    except ValueError as error:
        raise LimitError(str(error), where=escape_name(document.path)) from None
    bases = _bases(values)
    is_megatron = any("megatron" in word for word in (*command, *bases) if word.startswith(("--config-name", "ppo_")))
    if _is_sft(values):
        # torchrun starts it, whatever `trainer` says.
        reading = _read_sft(values, world_size or launched_ranks(document.commands), overrides)
    else:
        reading = _read_ppo(values, world_size, frozenset(unknown), overrides, is_megatron=is_megatron)
    return replace(reading, findings=findings + reading.findings)


def _bases(values: Mapping[str, object]) -> list[str]:
    """Return the configs that a file is laid over (Hydra's defaults list)."""
    defaults = values.get("defaults")
    items = defaults if isinstance(defaults, list) else []
    return [one if isinstance(one, str) else ": ".join(map(str, one)) if isinstance(one, dict) else "" for one in items]


def _validate(
    model: type[SectionType], values: Mapping[str, object], overrides: Overrides | None
) -> tuple[SectionType, tuple[Finding, ...], Options]:
    words = [f"defaults: {name}" for name in _bases(values) if name not in (*_CONFIGS, "_self_")]
    if overrides is None:
        return validate(model, values, words=words)
    groups = [f"{key}=…" for key in values if key not in option_names(model)]  # `model_engine=…` chooses whole files
    known = {key: value for key, value in values.items() if key in option_names(model)}
    return validate(model, known, added=overrides.added, words=(*overrides.unread, *words, *groups))


def _read_ppo(
    values: Mapping[str, object],
    world_size: int | None,
    unknown: frozenset[str],
    overrides: Overrides | None,
    *,
    is_megatron: bool,
) -> Reading:
    raw, findings, counted = _validate(Ppo, values, overrides)
    part = raw.actor_rollout_ref or ActorRolloutRef()
    actor, model = part.actor or Actor(), part.model or Model()
    fsdp = actor.fsdp_config or Fsdp()
    runner, data = raw.trainer or Runner(), raw.data or Data()
    world = world_size or (None if unknown & {"trainer.nnodes", "trainer.n_gpus_per_node"} else _world(runner))
    strategy = actor.strategy or ("megatron" if is_megatron else "fsdp")
    engine = _ENGINES.get(strategy, "other")
    axes = _axes(fsdp, world)
    is_known = engine != "other" and f"{_ACTOR}.fsdp_config.fsdp_size" not in unknown
    mesh = build_mesh(axes, world) if is_known else None
    ulysses = actor.ulysses_sequence_parallel_size or 1
    axes["sp"] = ulysses if ulysses > 1 else fsdp.ulysses_sequence_parallel_size or 1
    compute, reduce = _mixed(fsdp)
    reshards = fsdp.reshard_after_forward is not False
    wrap = fsdp.wrap_policy or WrapPolicy()
    spec = ParallelSpec(
        framework="verl",
        engine=engine,
        world_size=world,
        axes=axes if engine != "other" else {},
        mesh=mesh,
        strategy=sharding_strategy(axes, mesh, reshards=reshards) if engine != "other" else None,
        reshard_after_forward=reshards if engine != "other" else None,
        param_dtype=compute,
        reduce_dtype=reduce,
        master_dtype=fsdp.model_dtype or "f32",
        # param_offload and optimizer_offload move things between phases; during an update all is on the GPU.
        offload_params=engine == "fsdp2" and bool(fsdp.offload_policy),
        activation_checkpointing=model.enable_gradient_checkpointing is not False,
        wrap_classes=wrap.transformer_layer_cls_to_wrap or (),
        wrap_min_num_params=(wrap.min_num_params or None) if engine == "fsdp1" else None,
        adapter=_adapter(model),
        optimizer=(actor.optim.optimizer if actor.optim is not None else None) or "AdamW",
        seq_len=_length(data.max_prompt_length) + _length(data.max_response_length),
        batch_size=actor.ppo_micro_batch_size_per_gpu,
        state_dict_type="SHARDED_STATE_DICT",
        model=model.path,
        resume_from=runner.resume_from_path,
        keys=_keys(values, _PPO_KEYS),
    )
    return Reading(raw=raw, values=values, spec=spec, options=counted, world_keys=_WORLD_KEYS, findings=findings)


def _read_sft(values: Mapping[str, object], world_size: int | None, overrides: Overrides | None) -> Reading:
    """Read a file for `fsdp_sft_trainer.py`: one mesh of all ranks, and bf16 computation, always."""
    raw, findings, counted = _validate(Sft, values, overrides)
    model, data = raw.model or SftModel(), raw.data or Data()
    fsdp = model.fsdp_config or SftFsdp()
    engine = _ENGINES.get(model.strategy or "fsdp2", "other")
    runner = raw.trainer or Runner()
    axes: dict[str, int] = {"dp_shard": -1}
    mesh = build_mesh(axes, world_size)
    axes["sp"] = raw.ulysses_sequence_parallel_size or 1
    wrap = fsdp.wrap_policy or WrapPolicy()
    spec = ParallelSpec(
        framework="verl",
        engine=engine,
        world_size=world_size,
        axes=axes,
        mesh=mesh if engine != "other" else None,
        strategy=sharding_strategy(axes, mesh, reshards=True) if engine != "other" else None,
        reshard_after_forward=True if engine != "other" else None,
        param_dtype="bf16",
        reduce_dtype="f32",
        master_dtype=fsdp.model_dtype or "f32",
        offload_params=bool(fsdp.offload_params),
        activation_checkpointing=model.enable_gradient_checkpointing is not False,
        wrap_classes=wrap.transformer_layer_cls_to_wrap or (),
        wrap_min_num_params=(wrap.min_num_params or None) if engine == "fsdp1" else None,
        adapter=_adapter(model),
        optimizer=(raw.optim.optimizer if raw.optim is not None else None) or "AdamW",
        seq_len=1024 if data.max_length is None else data.max_length,
        batch_size=4 if data.micro_batch_size_per_gpu is None else data.micro_batch_size_per_gpu,
        state_dict_type="SHARDED_STATE_DICT",
        model=model.partial_pretrain,
        resume_from=runner.resume_from_path,
        keys=_keys(values, _SFT_KEYS),
    )
    return Reading(raw=raw, values=values, spec=spec, options=counted, findings=findings)


def _world(runner: Runner) -> int | None:
    """Return the ranks that verl starts; its own defaults are one node of 8."""
    nodes = 1 if runner.nnodes is None else runner.nnodes
    gpus = 8 if runner.n_gpus_per_node is None else runner.n_gpus_per_node
    return nodes * gpus if nodes > 0 and gpus > 0 else None


def _axes(fsdp: Fsdp, world: int | None) -> dict[str, int]:
    """Return `create_device_mesh`'s axes: groups of `fsdp_size` ranks shard, and replicate each other."""
    size = -1 if fsdp.fsdp_size is None else fsdp.fsdp_size
    if size < 0 or (world is not None and size >= world):
        return {"dp_shard": -1}
    return {"dp_replicate": -1, "dp_shard": size}


def _mixed(fsdp: Fsdp) -> tuple[str, str]:
    """Return the dtypes of computation and of averaging; `mixed_precision` wins over `dtype`."""
    given = fsdp.mixed_precision
    if given is None:
        return fsdp.dtype or "bf16", "f32"
    return given.param_dtype or "bf16", given.reduce_dtype or "f32"


def _adapter(model: Model) -> AdapterSpec | None:
    rank = model.lora_rank or 0
    if rank <= 0 and model.lora_adapter_path is None:
        return None
    return AdapterSpec(
        kind="lora",
        rank=rank or None,
        alpha=16.0 if model.lora_alpha is None else model.lora_alpha,
        targets=model.target_modules or ("all-linear",),
    )


def _length(tokens: int | None) -> int:
    return 512 if tokens is None else tokens


_WORLD_KEYS = ("trainer.n_gpus_per_node", "trainer.nnodes")
_PPO_KEYS: Mapping[str, tuple[str, ...]] = {
    "engine": (f"{_ACTOR}.strategy",),
    "world_size": _WORLD_KEYS,
    "axes.dp_shard": (f"{_ACTOR}.fsdp_config.fsdp_size",),
    "axes.dp_replicate": (f"{_ACTOR}.fsdp_config.fsdp_size",),
    "axes.sp": (
        f"{_ACTOR}.ulysses_sequence_parallel_size",
        f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size",
    ),
    "strategy": (f"{_ACTOR}.fsdp_config.reshard_after_forward",),
    "reshard_after_forward": (f"{_ACTOR}.fsdp_config.reshard_after_forward",),
    "param_dtype": (f"{_ACTOR}.fsdp_config.mixed_precision.param_dtype", f"{_ACTOR}.fsdp_config.dtype"),
    "reduce_dtype": (f"{_ACTOR}.fsdp_config.mixed_precision.reduce_dtype",),
    "master_dtype": (f"{_ACTOR}.fsdp_config.model_dtype",),
    "offload_params": (f"{_ACTOR}.fsdp_config.offload_policy",),
    "activation_checkpointing": ("actor_rollout_ref.model.enable_gradient_checkpointing",),
    "wrap_classes": (f"{_ACTOR}.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap",),
    "wrap_min_num_params": (f"{_ACTOR}.fsdp_config.wrap_policy.min_num_params",),
    "adapter": ("actor_rollout_ref.model.lora_rank", "actor_rollout_ref.model.lora_adapter_path"),
    "optimizer": (f"{_ACTOR}.optim.optimizer",),
    "seq_len": ("data.max_prompt_length", "data.max_response_length"),
    "batch_size": (f"{_ACTOR}.ppo_micro_batch_size_per_gpu",),
    "model": ("actor_rollout_ref.model.path",),
    "resume_from": ("trainer.resume_from_path",),
}
"""Field of the spec → options that say it."""
_SFT_KEYS: Mapping[str, tuple[str, ...]] = {
    "engine": ("model.strategy",),
    "axes.sp": ("ulysses_sequence_parallel_size",),
    "master_dtype": ("model.fsdp_config.model_dtype",),
    "offload_params": ("model.fsdp_config.offload_params",),
    "activation_checkpointing": ("model.enable_gradient_checkpointing",),
    "wrap_classes": ("model.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap",),
    "wrap_min_num_params": ("model.fsdp_config.wrap_policy.min_num_params",),
    "adapter": ("model.lora_rank",),
    "optimizer": ("optim.optimizer",),
    "seq_len": ("data.max_length",),
    "batch_size": ("data.micro_batch_size_per_gpu",),
    "model": ("model.partial_pretrain",),
    "resume_from": ("trainer.resume_from_path",),
}


def _keys(values: Mapping[str, object], paths: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    found = {field: first_key(values, *names) for field, names in paths.items()}
    return {field: path for field, path in found.items() if path is not None}
