"""Rules with ids (CKPT0xx) on what a trainer's config asks for, and the page of documentation that is made of them.

Pure functions; no torch, no framework is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING

from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.preflight.model_facts import ModelFacts
from ckpt_tools.preflight.rules import batches, fsdp, mesh, model, precision, words
from ckpt_tools.preflight.rules.rule import ALL, Case, Rule, apply

if TYPE_CHECKING:
    from ckpt_tools.preflight.configs.config import Config

__all__ = ["CATALOGUE", "RULES", "check_rules", "render_rules"]

_HEADINGS = (
    "Ranks and mesh", "Engines and what they exclude", "Options of FSDP1 and FSDP2",
    "Tensor, sequence, expert and pipeline parallelism", "The model", "Dtypes", "Saving, loading and memory",
    "Adapters and quantisation", "Optimizers", "What only one framework does", "Sizes", "Batches and lengths",
    "Launch", "Schedules", "Words that options take", "Options that exclude or need each other",
)  # fmt: skip
"""The tens of an id are its heading."""
_ALL = chain(words.TABLE_RULES, *(vars(module).values() for module in (batches, fsdp, mesh, model, precision, words)))
RULES: tuple[Rule, ...] = tuple(sorted((one for one in _ALL if isinstance(one, Rule)), key=lambda one: one.id))
CATALOGUE: Mapping[str, Rule] = MappingProxyType({one.id: one for one in RULES})
GROUPS: Mapping[str, tuple[Rule, ...]] = MappingProxyType(
    {
        heading: tuple(one for one in RULES if one.id.startswith(f"CKPT{number:02}"))
        for number, heading in enumerate(_HEADINGS)
    }
)
"""Heading → its rules, by id."""


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
