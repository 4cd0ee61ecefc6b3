"""verl's configs as Hydra makes them: a tree, or the overrides of a command line that make one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.errors import LimitError
from ckpt_tools.preflight.configs.document import Document
from ckpt_tools.preflight.configs.hydra import is_override, read_overrides, resolve
from ckpt_tools.preflight.configs.launch import lost_options, programs, several_commands
from ckpt_tools.preflight.configs.names import known

_CONFIGS = ("ppo_trainer", "ppo_megatron_trainer", "sft_trainer", "sft_trainer_engine")
"""verl's own configs, whose defaults are known; what another one holds is not."""
_GROUPS = ("model_engine", "engine", "optim", "model")
"""Groups of which is known what they choose: the engine of PPO, that of SFT, its optimizer, and the model's options."""
_MODEL = "hf_model"
"""verl's only file of the group `model`."""
_OWN_ENGINES = ("dp", "fsdp")
"""Choices of a group that mean FSDP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A config as a tree."""

    values: Mapping[str, object]
    """The tree, with what it points at in place of `${…}`."""
    findings: tuple[Finding, ...] = ()
    words: tuple[str, ...] = ()
    """What may hold any options: other configs than verl's own, `$@`, programs of others."""
    is_command: bool = False
    added: frozenset[str] = frozenset()
    """Paths of overrides with a `+`."""
    groups: Mapping[str, str] = field(default_factory=dict)
    """Group → the file that is chosen for it."""
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
