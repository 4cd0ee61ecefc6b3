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
from typing import Any

from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.description.layout import Mesh
from ckpt_tools.errors import LimitError
from ckpt_tools.preflight.configs.document import Document
from ckpt_tools.preflight.configs.hydra import Overrides, is_override, read_overrides, resolve
from ckpt_tools.preflight.configs.launch import launched_ranks, lost_options, programs, several_commands
from ckpt_tools.preflight.configs.mesh import build_mesh, sharding_strategy
from ckpt_tools.preflight.configs.names import known
from ckpt_tools.preflight.configs.options import option_names
from ckpt_tools.preflight.configs.schema import Section
from ckpt_tools.preflight.configs.table import FSDP, Given, Reader, Row, Source, Table, named_by, row, value_at
from ckpt_tools.preflight.configs.verl_schema import Fsdp, Model, Ppo, Sft, SftOther
from ckpt_tools.preflight.spec import AdapterSpec, Engine

_ACTOR = "actor_rollout_ref.actor"
_CONFIGS = ("ppo_trainer", "ppo_megatron_trainer", "sft_trainer", "sft_trainer_engine")
"""verl's own configs, whose defaults are known; what another one holds is not."""
_GROUPS = ("model_engine", "engine", "optim")
"""Groups of which is known what they choose: the engine of PPO, that of SFT, and the optimizer that goes with it."""
_OWN_ENGINES = ("dp", "fsdp")
"""Choices of a group that mean FSDP."""


def _looks_like(document: Document) -> bool:
    if document.values is not None:
        return _is_ppo(document.values) or _is_sft(document.values)
    return any("verl.trainer" in word or word.lstrip("+~").startswith("actor_rollout_ref.") for word in document.words)


def _arguments(command: Sequence[str]) -> Sequence[str] | None:
    """Return what follows verl's program in a command; None where the command does not start it."""
    for at, word in enumerate(command):
        if word.startswith(("verl.trainer.", "verl/trainer/")):
            return command[at + 1 :]
    return None


def _command(document: Document) -> Sequence[str]:
    """Return the arguments of the first command that starts verl; all words where none does."""
    found = (arguments for command in document.commands if (arguments := _arguments(command)) is not None)
    return next(found, document.words)


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
    return _is_fsdp_sft(values) or any(base.startswith("engine@engine") for base in _bases(values))


def _is_fsdp_sft(values: Mapping[str, object]) -> bool:
    model = values.get("model")
    return isinstance(model, Mapping) and "partial_pretrain" in model


def _prepare(document: Document) -> Source:
    """Make a tree ready, or a script, whose overrides make one."""
    findings: tuple[Finding, ...] = ()
    overrides = None
    tree, command = document.values, _command(document)
    if tree is None:
        overrides = read_overrides(command, configs=_CONFIGS, groups=_GROUPS)
        tree, findings = overrides.values, overrides.findings
        if sum(_arguments(words) is not None for words in document.commands) > 1:
            findings += (several_commands(document.path),)
        findings += _lost_options(document)
    try:
        values, _ = resolve(tree)
    except ValueError as error:
        raise LimitError(str(error), where=document.path) from None
    model, table = _chosen(values, document, overrides, command)
    words = [f"defaults: {name}" for name in _bases(values) if name not in {*_CONFIGS, *known("verl", "defaults")}]
    source = Source(model=model, table=table, values=values, findings=findings, words=tuple(words))
    if overrides is None:
        return source
    names = option_names(model)
    return replace(
        source,
        options={key: value for key, value in values.items() if key in names},
        added=overrides.added,
        # `model_engine=…` chooses whole files.
        words=(
            *_own_programs(document),
            *overrides.unread,
            *words,
            *(f"{key}=…" for key in values if key not in names),
        ),
    )


def _chosen(
    values: Mapping[str, object], document: Document, overrides: Overrides | None, command: Sequence[str]
) -> tuple[type[Section], Table[Any]]:
    """Return the options and the table of the trainer that is started."""
    starts_sft = any("sft_trainer" in word for word in document.words if word.startswith(("verl.", "verl/")))
    if not _is_sft(values) and not starts_sft:
        words = [word for word in (*command, *_bases(values)) if word.startswith(("--config-name", "ppo_"))]
        is_megatron = any("megatron" in word for word in words)
        engine = _engine_row(f"{_ACTOR}.strategy", "megatron" if is_megatron else _group(overrides, "model_engine"))
        return Ppo, {"engine": engine, **_PPO}
    if _is_fsdp_sft(values):
        return Sft, {"engine": _engine_row("model.strategy", "fsdp2"), **_FSDP_SFT}
    chosen = _group(overrides, "engine")
    return Sft if chosen == "fsdp" else SftOther, {"engine": _engine_row("engine.strategy", chosen), **_ENGINE_SFT}


def _bases(values: Mapping[str, object]) -> list[str]:
    """Return the configs that a file is laid over (Hydra's defaults list)."""
    defaults = values.get("defaults")
    names: list[str] = []
    for item in defaults if isinstance(defaults, list) else ():
        pairs = item.items() if isinstance(item, Mapping) else ((item, None),)
        names += [str(name) if file is None else f"{name}:{file}" for name, file in pairs]
    return names


def _group(overrides: Overrides | None, name: str) -> str:
    """Return the engine that a group chooses; FSDP by default."""
    chosen = "fsdp" if overrides is None else overrides.groups.get(name, "fsdp")
    return "fsdp" if chosen in _OWN_ENGINES else chosen


def _engine_row(option: str, default: str) -> Row[Any]:
    """Make the row of the engine; the options of others than FSDP are not read."""

    def engine(given: Given[Any]) -> Engine:
        strategy = value_at(given.raw, option) or default
        return "fsdp1" if strategy == "fsdp" else "fsdp2" if strategy == "fsdp2" else "other"

    return row(option, value=engine)


def _fsdp_rows(at: str, *, model: str) -> Table[Any]:
    """Return the rows of what FSDP is told.

    Args:
        at: Where its options lie.
        model: Where those of the model lie.
    """

    def options(given: Given[Any]) -> Fsdp:
        found = value_at(given.raw, at)
        return found if isinstance(found, Fsdp) else Fsdp()

    def axes(given: Given[Any]) -> dict[str, int]:
        """Return `create_device_mesh`'s axes: groups of `fsdp_size` ranks shard, and replicate each other."""
        size, world = options(given).fsdp_size, given.spec.world_size
        if size is None or size < 0 or (world is not None and size >= world):
            return {"dp_shard": -1}
        return {"dp_replicate": -1, "dp_shard": size}

    def mesh(given: Given[Any]) -> Mesh | None:
        is_known = given.has_value(f"{at}.fsdp_size")
        return build_mesh(given.spec.axes, given.spec.world_size) if is_known else None

    def strategy(given: Given[Any]) -> tuple[str, bool]:
        reshards = options(given).reshard_after_forward is not False
        return sharding_strategy(given.spec.axes, given.spec.mesh, reshards=reshards), reshards

    def compute(given: Given[Any]) -> str:
        fsdp = options(given)
        is_mixed = "mixed_precision" in fsdp.model_fields_set  # it wins over `dtype`
        return (fsdp.mixed_precision.param_dtype if is_mixed else fsdp.dtype) or "bf16"

    def min_num_params(given: Given[Any]) -> int | None:
        return options(given).wrap_policy.min_num_params or None

    def adapter(given: Given[Any]) -> AdapterSpec | None:
        trained = value_at(given.raw, model)
        rank = trained.lora_rank or 0 if isinstance(trained, Model) else 0
        if not isinstance(trained, Model) or (rank <= 0 and trained.lora_adapter_path is None):
            return None
        alpha = 16.0 if trained.lora_alpha is None else trained.lora_alpha
        return AdapterSpec(kind="lora", rank=rank or None, alpha=alpha, targets=trained.target_modules or _ALL_LINEAR)

    return {
        "axes.dp_shard axes.dp_replicate": named_by(f"{at}.fsdp_size"),
        "axes": row(value=axes, engines=FSDP),
        "mesh": row(value=mesh, engines=FSDP),
        "strategy reshard_after_forward": row(f"{at}.reshard_after_forward", value=strategy, engines=FSDP),
        "param_dtype": row(f"{at}.mixed_precision.param_dtype", f"{at}.dtype", value=compute),
        "reduce_dtype": row(f"{at}.mixed_precision.reduce_dtype", default="f32"),
        "master_dtype": row(f"{at}.model_dtype", default="f32"),
        # param_offload and optimizer_offload move things between phases; during an update all is on the GPU.
        "offload_params": row(f"{at}.offload_policy", default=False, engines=("fsdp2",)),
        "activation_checkpointing": row(f"{model}.enable_gradient_checkpointing", default=True),
        "wrap_classes": row(f"{at}.wrap_policy.transformer_layer_cls_to_wrap", default=()),
        "wrap_min_num_params": row(f"{at}.wrap_policy.min_num_params", value=min_num_params, engines=("fsdp1",)),
        "adapter": row(f"{model}.lora_rank", f"{model}.lora_adapter_path", value=adapter),
        "state_dict_type": row(default="SHARDED_STATE_DICT"),
        "resume_from": row("trainer.resume_from_path"),
    }


_ALL_LINEAR = ("all-linear",)


def _world_size(given: Given[Ppo]) -> int | None:
    """Return the ranks that verl starts; its own defaults are one node of 8."""
    runner = given.raw.trainer
    nodes = 1 if runner.nnodes is None else runner.nnodes
    gpus = 8 if runner.n_gpus_per_node is None else runner.n_gpus_per_node
    is_known = given.has_value("trainer.nnodes") and given.has_value("trainer.n_gpus_per_node")
    return nodes * gpus if is_known and nodes > 0 and gpus > 0 else None


def _ulysses(given: Given[Ppo]) -> int:
    actor = given.raw.actor_rollout_ref.actor
    asked = actor.ulysses_sequence_parallel_size or 1
    return asked if asked > 1 else actor.fsdp_config.ulysses_sequence_parallel_size or 1


def _prompt_and_response(given: Given[Ppo]) -> int:
    lengths = (given.raw.data.max_prompt_length, given.raw.data.max_response_length)
    return sum(512 if tokens is None else tokens for tokens in lengths)


_PPO: Table[Ppo] = {
    "world_size": row("trainer.n_gpus_per_node", "trainer.nnodes", value=_world_size),
    **_fsdp_rows(f"{_ACTOR}.fsdp_config", model="actor_rollout_ref.model"),
    "axes.sp": row(
        f"{_ACTOR}.ulysses_sequence_parallel_size",
        f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size",
        value=_ulysses,
        engines=FSDP,
    ),
    "optimizer": row(f"{_ACTOR}.optim.optimizer", default="AdamW"),
    "seq_len": row("data.max_prompt_length", "data.max_response_length", value=_prompt_and_response),
    "batch_size": row(f"{_ACTOR}.ppo_micro_batch_size_per_gpu"),
    "model": row("actor_rollout_ref.model.path"),
}
_SFT: Table[Any] = {
    # torchrun starts it, whatever `trainer` says.
    "world_size": row(value=lambda given: launched_ranks(given.document.commands)),
    "optimizer": row("optim.optimizer", default="AdamW"),
    "seq_len": row("data.max_length", default=1024),
    "batch_size": row("data.micro_batch_size_per_gpu", default=4),
}
_ENGINE_SFT: Table[SftOther] = {
    **_SFT,
    **_fsdp_rows("engine", model="model"),
    "axes.sp": row("engine.ulysses_sequence_parallel_size", default=1, engines=FSDP),
    "model": row("model.path"),
}
"""`sft_trainer.py`, whose `engine` is FSDP's unless a group says otherwise."""
_FSDP_SFT: Table[Sft] = {
    **_SFT,
    **_fsdp_rows("model.fsdp_config", model="model"),
    "axes": row(value=lambda _: {"dp_shard": -1}),
    "axes.sp": row("ulysses_sequence_parallel_size", default=1),
    "strategy reshard_after_forward": row(
        value=lambda given: (sharding_strategy(given.spec.axes, given.spec.mesh, reshards=True), True), engines=FSDP
    ),
    "param_dtype": row(default="bf16"),
    "reduce_dtype": row(default="f32"),
    "offload_params": row("model.fsdp_config.offload_params", default=False),
    "model": row("model.partial_pretrain"),
}
"""`fsdp_sft_trainer.py`: one mesh of all ranks, and bf16 computation, always."""

READER = Reader(name="verl", looks_like=_looks_like, prepare=_prepare)
