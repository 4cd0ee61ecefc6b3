"""verl's configs: Hydra's YAML, or the overrides of a command line on top of verl's own.

PPO and its kin (`actor_rollout_ref`), of which the actor is the model that is trained, and SFT: the FSDP trainer
(`model.partial_pretrain`) and, since 0.6, the one with an `engine`.

Source: verl 0.2 to 0.9.1: `trainer/config/_generated_ppo_trainer.yaml` and `sft_trainer*.yaml` (defaults),
`workers/config/{engine,actor}.py` (dataclasses, which take no other option), `workers/fsdp_workers.py`
(`create_device_mesh`, `_build_model_optimizer`), `workers/engine/fsdp/`, `trainer/fsdp_sft_trainer.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.checkpoint.layout import Mesh
from ckpt_tools.errors import LimitError
from ckpt_tools.preflight.configs.document import Document
from ckpt_tools.preflight.configs.field_rows import (
    FieldRow,
    Given,
    ReaderInput,
    Table,
    TrainerReader,
    read_table,
    row,
    value_at,
)
from ckpt_tools.preflight.configs.launch import lost_options, programs, several_commands
from ckpt_tools.preflight.configs.names import known
from ckpt_tools.preflight.configs.overrides import is_override, read_overrides, resolve
from ckpt_tools.preflight.configs.schema import OptionSection, option_names, section
from ckpt_tools.preflight.plain_values import find_value
from ckpt_tools.preflight.spec import AdapterSpec, Engine, build_mesh

# verl's configs as Hydra makes them: a tree, or the overrides of a command line that make one

_CONFIGS = ("ppo_trainer", "ppo_megatron_trainer", "sft_trainer", "sft_trainer_engine")
"""verl's own configs, whose defaults are known; what another one holds is not."""
_GROUPS = ("model_engine", "engine", "optim", "model")
"""Groups of which is known what they choose: the engine of PPO, that of SFT, its optimizer, and the model's options."""
_MODEL = "hf_model"  # verl's only file of the group `model`
_OWN_ENGINES = ("dp", "fsdp")  # choices of a group that mean FSDP


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A config as a tree."""

    values: Mapping[str, object]
    findings: tuple[Finding, ...] = ()
    words: tuple[str, ...] = ()  # What may hold any options: other configs than verl's own, `$@`, programs of others
    is_command: bool = False
    added: frozenset[str] = frozenset()
    groups: Mapping[str, str] = field(default_factory=dict)
    configs: Collection[str] = ()

    def engine(self, group: str) -> str:
        """Return the engine that a group chooses; FSDP by default."""
        chosen = self.groups.get(group, "fsdp")
        return "fsdp" if chosen in _OWN_ENGINES else chosen


def read_tree(document: Document) -> Tree:
    """Return what a document says; raise LimitError if its values point at one another without end."""
    if document.values is not None:
        values = _resolved(document.values, document)
        return Tree(values=values, words=_foreign(values), configs=bases_of(values))
    started = [at for at, command in enumerate(document.commands) if _arguments(command) is not None]
    command = _arguments(document.commands[started[0]]) or () if started else document.words
    overrides = read_overrides(command, configs=_CONFIGS, groups=_GROUPS)
    values, findings = _resolved(overrides.values, document), overrides.findings
    if len(started) > 1:
        findings += (several_commands(document.path),)
    if started:
        findings += lost_options(document.commands[started[0] + 1 :], is_override)
    model = overrides.groups.get("model", _MODEL)
    own_model = () if model == _MODEL else (f"model={model}",)
    return Tree(
        values=values,
        findings=findings,
        words=(*(() if started else _own_programs(document)), *overrides.unread, *own_model, *_foreign(values)),
        is_command=True,
        added=overrides.added,
        groups=overrides.groups,
        configs=(*command, *bases_of(values)),
    )


def looks_like(document: Document) -> bool:
    """Is this verl's?"""
    if document.values is not None:
        return isinstance(document.values.get("actor_rollout_ref"), Mapping) or is_sft(document.values)
    return any("verl.trainer" in word or word.lstrip("+~").startswith("actor_rollout_ref.") for word in document.words)


def is_sft(values: Mapping[str, object]) -> bool:
    """Is a tree for one of the SFT trainers?"""
    return is_fsdp_sft(values) or any(base.startswith("engine@engine") for base in bases_of(values))


def is_fsdp_sft(values: Mapping[str, object]) -> bool:
    """Is a tree for the FSDP SFT trainer, which has no engine?"""
    model = values.get("model")
    return isinstance(model, Mapping) and "partial_pretrain" in model


def _resolved(tree: Mapping[str, object], document: Document) -> Mapping[str, object]:
    try:
        return resolve(tree)
    except ValueError as error:
        raise LimitError(str(error), where=document.path) from None


def _foreign(values: Mapping[str, object]) -> tuple[str, ...]:
    """Return the configs below a file that are not verl's own."""
    own = {*_CONFIGS, *known("verl", "defaults")}
    return tuple(f"defaults: {name}" for name in bases_of(values) if name not in own)


def bases_of(values: Mapping[str, object]) -> list[str]:
    """Return the configs that a file is laid over (Hydra's defaults list)."""
    defaults = values.get("defaults")
    names: list[str] = []
    for item in defaults if isinstance(defaults, list) else ():
        pairs = item.items() if isinstance(item, Mapping) else ((item, None),)
        names += [str(name) if file is None else f"{name}:{file}" for name, file in pairs]
    return names


def _arguments(command: Sequence[str]) -> Sequence[str] | None:
    """Return what follows verl's program in a command; None where the command does not start it."""
    for at, word in enumerate(command):
        if word.startswith(("verl.trainer.", "verl/trainer/")):
            return command[at + 1 :]
    return None


def _own_programs(document: Document) -> tuple[str, ...]:
    """Return the programs that are started with verl's options and are not verl's: their defaults are not known."""
    with_options = (
        command
        for command in document.commands
        if any(one.lstrip("+~").startswith("actor_rollout_ref.") for one in command)
    )
    return tuple(chain.from_iterable(map(programs, with_options)))


_ACTOR = "actor_rollout_ref.actor"
_FSDP, _PPO_OPTIONS = section("verl.fsdp"), section("verl.ppo")
_SFT_OTHER, _SFT_MEGATRON, _SFT_OPTIONS = (section(f"verl.sft{engine}") for engine in ("", ".megatron", ".fsdp"))
"""Files for the SFT trainer, whose engine's options are passed over, or are those of Megatron or FSDP."""


def _engine_row(option: str, default: str) -> FieldRow:
    """Make the row of the engine; the options of others than FSDP are not read."""

    def engine(given: Given) -> Engine:
        strategy = value_at(given.raw, option) or default
        return "fsdp1" if strategy == "fsdp" else "fsdp2" if strategy == "fsdp2" else "other"

    return row(option, value=engine)


def _fsdp_rows(at: str, *, model: str) -> Table:
    """Return the rows of what FSDP is told below `at`, of a model whose options lie at `model`."""

    def options(given: Given) -> Any:  # noqa: ANN401 - a section
        found = value_at(given.raw, at)
        return found if isinstance(found, _FSDP) else _FSDP()

    def axes(given: Given) -> dict[str, int]:
        """Return `create_device_mesh`'s axes: groups of `fsdp_size` ranks shard, and replicate each other."""
        size, world = options(given).fsdp_size, given.spec.world_size
        if size is None or size < 0 or (world is not None and size >= world):
            return {"dp_shard": -1}
        return {"dp_replicate": -1, "dp_shard": size}

    def mesh(given: Given) -> Mesh | None:
        is_known = given.has_value(f"{at}.fsdp_size")
        return build_mesh(given.spec.axes, given.spec.world_size) if is_known else None

    def compute(given: Given) -> str:
        fsdp = options(given)
        is_mixed = "mixed_precision" in fsdp.model_fields_set  # it wins over `dtype`
        return (fsdp.mixed_precision.param_dtype if is_mixed else fsdp.dtype) or "bf16"

    def adapter(given: Given) -> AdapterSpec | None:
        trained: Any = value_at(given.raw, model)
        rank = trained.lora_rank or 0
        if rank <= 0 and trained.lora_adapter_path is None:
            return None
        alpha = 16.0 if trained.lora_alpha is None else trained.lora_alpha
        return AdapterSpec(kind="lora", rank=rank or None, alpha=alpha, targets=trained.target_modules or _ALL_LINEAR)

    return read_table(
        "verl.fsdp",
        {"at": at, "model": model},
        axes=axes,
        mesh=mesh,
        compute=compute,
        wrap_min_num_params=lambda given: options(given).wrap_policy.min_num_params or None,
        adapter=adapter,
    )


def _on_megatron(table: Table, at: str) -> Table:
    """Return a table with the mesh of Megatron, told below `at`; data-parallel ranks are the rest."""
    rest = {name: one for name, one in table.items() if name not in ("axes", "mesh")}
    return {**rest, **read_table("verl.megatron", {"at": at})}


_ALL_LINEAR = ("all-linear",)


def _world_size(given: Given) -> int | None:
    """Return the ranks that verl starts; its own defaults are one node of 8."""
    is_known = given.has_value("trainer.nnodes") and given.has_value("trainer.n_gpus_per_node")
    return (given.raw.trainer.nnodes or 1) * (given.raw.trainer.n_gpus_per_node or 8) if is_known else None


def _ulysses(given: Given) -> int:
    actor = given.raw.actor_rollout_ref.actor
    asked = actor.ulysses_sequence_parallel_size or 1
    return asked if asked > 1 else actor.fsdp_config.ulysses_sequence_parallel_size or 1


def _seq_len(given: Given) -> int:
    return (given.raw.data.max_prompt_length or 512) + (given.raw.data.max_response_length or 512)


_PPO = {
    **read_table("verl.nodes", world_size=_world_size),
    **_fsdp_rows(f"{_ACTOR}.fsdp_config", model="actor_rollout_ref.model"),
    **read_table("verl.ppo", ulysses=_ulysses, seq_len=_seq_len),
}
_SFT = read_table("verl.sft")  # torchrun starts it, whatever `trainer` says
_ENGINE_SFT = {**_SFT, **_fsdp_rows("engine", model="model"), **read_table("verl.engine_sft")}
"""`sft_trainer.py`, whose `engine` is FSDP's unless a group says otherwise."""
_FSDP_SFT = {
    **_SFT,
    **_fsdp_rows("model.fsdp_config", model="model"),
    **read_table("verl.fsdp_sft", axes=lambda _: {"dp_shard": -1}),
}
"""`fsdp_sft_trainer.py`: one mesh of all ranks, and bf16 computation, always."""


def _prepare(document: Document) -> ReaderInput:
    tree = read_tree(document)
    model, table = _chosen(tree, document)
    source = ReaderInput(model=model, table=table, values=tree.values, findings=tree.findings, words=tree.words)
    if not tree.is_command:
        return source
    names = option_names(model)
    groups = [f"{key}=…" for key in tree.values if key not in names]  # `model_engine=…` chooses whole files
    options = {key: value for key, value in tree.values.items() if key in names}
    return replace(source, options=options, added=tree.added, words=(*tree.words, *groups))


def _chosen(tree: Tree, document: Document) -> tuple[type[OptionSection], Table]:
    """Return the options and the table of the trainer that is started."""
    starts_sft = any("sft_trainer" in word for word in document.words if word.startswith(("verl.", "verl/")))
    if not is_sft(tree.values) and not starts_sft:
        configs = [name for name in tree.configs if name.startswith(("--config-name", "ppo_"))]
        is_megatron = any("megatron" in name for name in configs)
        default = "megatron" if is_megatron else tree.engine("model_engine")
        strategy = find_value(tree.values, f"{_ACTOR}.strategy") or default
        table = _on_megatron(_PPO, f"{_ACTOR}.megatron") if strategy == "megatron" else _PPO
        return _PPO_OPTIONS, {"engine": _engine_row(f"{_ACTOR}.strategy", default), **table}
    if is_fsdp_sft(tree.values):
        return _SFT_OPTIONS, {"engine": _engine_row("model.strategy", "fsdp2"), **_FSDP_SFT}
    chosen = tree.engine("engine")
    if chosen == "megatron":
        return _SFT_MEGATRON, {"engine": row(value=lambda _: "other"), **_on_megatron(_ENGINE_SFT, "engine")}
    model = _SFT_OPTIONS if chosen == "fsdp" else _SFT_OTHER
    return model, {"engine": _engine_row("engine.strategy", chosen), **_ENGINE_SFT}


READER = TrainerReader(name="verl", looks_like=looks_like, prepare=_prepare)
