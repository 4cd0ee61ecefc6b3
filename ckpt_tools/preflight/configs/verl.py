"""verl's configs: Hydra's YAML, or the overrides of a command line on top of verl's own.

PPO and its kin (`actor_rollout_ref`), of which the actor is the model that is trained, and SFT: the FSDP trainer
(`model.partial_pretrain`) and, since 0.6, the one with an `engine`.

Source: verl 0.2 to 0.9.1: `trainer/config/_generated_ppo_trainer.yaml` and `sft_trainer*.yaml` (defaults),
`workers/config/{engine,actor}.py` (dataclasses, which take no other option), `workers/fsdp_workers.py`
(`create_device_mesh`, `_build_model_optimizer`), `workers/engine/fsdp/`, `trainer/fsdp_sft_trainer.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.errors import LimitError
from ckpt_tools.preflight.configs.config import Reading
from ckpt_tools.preflight.configs.document import Document
from ckpt_tools.preflight.configs.hydra import Overrides, is_override, read_overrides, resolve
from ckpt_tools.preflight.configs.launch import launched_ranks, lost_options, programs, several_commands
from ckpt_tools.preflight.configs.mesh import build_mesh, sharding_strategy
from ckpt_tools.preflight.configs.verl_parts import (
    CONFIGS,
    ENGINES,
    adapter_of,
    axes_of,
    bases_of,
    dtypes_of,
    engine_of,
    keys_of,
    validate_tree,
)
from ckpt_tools.preflight.configs.verl_schema import (
    Actor,
    ActorRolloutRef,
    Data,
    Fsdp,
    Model,
    Ppo,
    Runner,
    WrapPolicy,
)
from ckpt_tools.preflight.configs.verl_sft import read_sft
from ckpt_tools.preflight.spec import ParallelSpec

_ACTOR = "actor_rollout_ref.actor"
_GROUPS = ("model_engine", "engine", "optim")
"""Groups of which is known what they choose: the engine of PPO, that of SFT, and the optimizer that goes with it."""


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
    if isinstance(model, Mapping) and "partial_pretrain" in model:
        return True
    return any(base.startswith("engine@engine") for base in bases_of(values))


def _starts_sft(document: Document) -> bool:
    return any("sft_trainer" in word for word in _words(document) if word.startswith(("verl.", "verl/")))


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
        overrides = read_overrides(command, configs=CONFIGS, groups=_GROUPS)
        overrides = replace(overrides, unread=(*_own_programs(document), *overrides.unread))
        tree, findings = overrides.values, overrides.findings
        if sum(_arguments(words) is not None for words in document.commands) > 1:
            findings += (several_commands(document.path),)
        findings += _lost_options(document)
    try:
        values, unknown = resolve(tree)
    except ValueError as error:
        raise LimitError(str(error), where=document.path) from None
    bases = bases_of(values)
    is_megatron = any("megatron" in word for word in (*command, *bases) if word.startswith(("--config-name", "ppo_")))
    if _is_sft(values) or _starts_sft(document):
        # torchrun starts it, whatever `trainer` says.
        reading = read_sft(values, world_size or launched_ranks(document.commands), overrides)
    else:
        reading = _read_ppo(values, world_size, frozenset(unknown), overrides, is_megatron=is_megatron)
    return replace(reading, findings=findings + reading.findings)


def _read_ppo(
    values: Mapping[str, object],
    world_size: int | None,
    unknown: frozenset[str],
    overrides: Overrides | None,
    *,
    is_megatron: bool,
) -> Reading:
    raw, findings, counted = validate_tree(Ppo, values, overrides)
    part = raw.actor_rollout_ref or ActorRolloutRef()
    actor, model = part.actor or Actor(), part.model or Model()
    fsdp = actor.fsdp_config or Fsdp()
    runner, data = raw.trainer or Runner(), raw.data or Data()
    world = world_size or (None if unknown & {"trainer.nnodes", "trainer.n_gpus_per_node"} else _world(runner))
    chosen = engine_of(overrides, "model_engine")
    strategy = actor.strategy or ("megatron" if is_megatron else chosen)
    engine = ENGINES.get(strategy, "other")
    axes = axes_of(fsdp, world)
    is_known = engine != "other" and f"{_ACTOR}.fsdp_config.fsdp_size" not in unknown
    mesh = build_mesh(axes, world) if is_known else None
    ulysses = actor.ulysses_sequence_parallel_size or 1
    axes["sp"] = ulysses if ulysses > 1 else fsdp.ulysses_sequence_parallel_size or 1
    compute, reduce = dtypes_of(fsdp)
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
        adapter=adapter_of(model),
        optimizer=(actor.optim.optimizer if actor.optim is not None else None) or "AdamW",
        seq_len=_length(data.max_prompt_length) + _length(data.max_response_length),
        batch_size=actor.ppo_micro_batch_size_per_gpu,
        state_dict_type="SHARDED_STATE_DICT",
        model=model.path,
        resume_from=runner.resume_from_path,
        keys=keys_of(values, _PPO_KEYS),
    )
    return Reading(raw=raw, values=values, spec=spec, options=counted, world_keys=_WORLD_KEYS, findings=findings)


def _world(runner: Runner) -> int | None:
    """Return the ranks that verl starts; its own defaults are one node of 8."""
    nodes = 1 if runner.nnodes is None else runner.nnodes
    gpus = 8 if runner.n_gpus_per_node is None else runner.n_gpus_per_node
    return nodes * gpus if nodes > 0 and gpus > 0 else None


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
