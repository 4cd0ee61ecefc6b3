"""Rules with ids (CKPT0xx) on what a trainer's config asks for, and the page of documentation that is made of them.

Pure functions; no torch, no framework is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.preflight.model_facts import ModelFacts
from ckpt_tools.preflight.rules import option_words
from ckpt_tools.preflight.rules.rule import ALL, ConfigRule, Subject, apply

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
_FILES = ("batches", "fsdp", "mesh", "model", "precision", "option_words")
_ALL = chain(option_words.TABLE_RULES, *(vars(import_module(f"{__name__}.{each}")).values() for each in _FILES))
RULES: tuple[ConfigRule, ...] = tuple(
    sorted((one for one in _ALL if isinstance(one, ConfigRule)), key=lambda one: one.id)
)
CATALOGUE: Mapping[str, ConfigRule] = MappingProxyType({one.id: one for one in RULES})


def check_rules(config: Config, facts: ModelFacts | None = None) -> tuple[Finding, ...]:
    """Return what is wrong with a config, by rule id; without facts, the rules on the model are silent."""
    return apply(RULES, Subject(config=config, facts=facts or ModelFacts(where="")))


def render_rules() -> str:
    """Return the rules as a page of documentation."""
    text = (
        "# Rules of preflight\n\n<!-- Written by bin/docs from ckpt_tools/preflight/rules. Do not edit. -->\n\n"
        "What `ckpt preflight` looks for in a trainer's config, by the id that it gives. An *error* means that the\n"
        "run would fail, or would not do what the config says; a *warning* that it runs, but differently\n"
        "from what one may think. An id is never changed and never given to another rule.\n"
    )
    for number, heading in enumerate(_HEADINGS):
        text += f"\n## {heading}\n"
        for one in (one for one in RULES if one.id.startswith(f"CKPT{number:02}")):
            whose = "all" if one.frameworks == ALL else ", ".join(one.frameworks)
            text += f"\n### {one.id}: {one.title}\n\n- **{one.severity.capitalize()}** in {whose}.\n"
            text += f"- **Why**: {one.why}.\n- **Fix**: {one.fix}.\n"
    return text
