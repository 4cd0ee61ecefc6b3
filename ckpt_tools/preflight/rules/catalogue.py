"""All rules, and the page of documentation that is made of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING

from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.preflight.model_facts import ModelFacts
from ckpt_tools.preflight.rules import (
    adapters,
    batches,
    conditions,
    engines,
    launching,
    model,
    oddities,
    optimizers,
    options,
    parallel,
    precision,
    saving,
    schedules,
    sizes,
    words,
    world,
)
from ckpt_tools.preflight.rules.rule import ALL, Case, Rule, apply

if TYPE_CHECKING:
    from ckpt_tools.preflight.configs.config import Config

_MODULES: Mapping[str, ModuleType] = {
    "Ranks and mesh": world,
    "Engines and what they exclude": engines,
    "Options of FSDP1 and FSDP2": options,
    "Tensor, sequence, expert and pipeline parallelism": parallel,
    "The model": model,
    "Dtypes": precision,
    "Saving, loading and memory": saving,
    "Adapters and quantisation": adapters,
    "Optimizers": optimizers,
    "What only one framework does": oddities,
    "Sizes": sizes,
    "Batches and lengths": batches,
    "Launch": launching,
    "Schedules": schedules,
    "Words that options take": words,
    "Options that exclude or need each other": conditions,
}
"""Heading → the file of its rules; the tens of an id are its heading."""


def _rules_of(module: ModuleType, tens: str) -> Iterator[Rule]:
    yield from (one for one in vars(module).values() if isinstance(one, Rule))
    yield from (one for one in words.TABLE_RULES if one.id.startswith(tens))


GROUPS: Mapping[str, tuple[Rule, ...]] = MappingProxyType(
    {
        heading: tuple(sorted(_rules_of(module, f"CKPT{number:02}"), key=lambda one: one.id))
        for number, (heading, module) in enumerate(_MODULES.items())
    }
)
"""Heading → its rules, by id."""

RULES: tuple[Rule, ...] = tuple(one for rules in GROUPS.values() for one in rules)
CATALOGUE: Mapping[str, Rule] = MappingProxyType({one.id: one for one in RULES})


def check_rules(config: Config, facts: ModelFacts | None = None) -> tuple[Finding, ...]:
    """Return what is wrong with a config, by rule id; without facts, the rules on the model are silent."""
    return apply(RULES, Case(config=config, facts=facts or ModelFacts(where="")))


def render_rules(groups: Mapping[str, Iterable[Rule]] = GROUPS) -> str:
    """Return the rules as a page of documentation."""
    lines = [
        "# Rules of preflight",
        "",
        "<!-- Written by bin/docs from ckpt_tools/preflight/rules. Do not edit. -->",
        "",
        "What `ckpt preflight` looks for in a trainer's config, by the id that it gives. An *error* means that the",
        "run would fail, or would not do what the config says; a *warning* that it runs, but differently",
        "from what one may think. An id is never changed and never given to another rule.",
    ]
    for heading, rules in groups.items():
        lines += ["", f"## {heading}", ""]
        for one in rules:
            whose = "all" if one.frameworks == ALL else ", ".join(one.frameworks)
            lines += [
                f"### {one.id}: {one.title}",
                "",
                f"- **{one.severity.capitalize()}** in {whose}.",
                f"- **Why**: {one.why}.",
                f"- **Fix**: {one.fix}.",
                "",
            ]
        lines.pop()
    return "\n".join([*lines, ""])
