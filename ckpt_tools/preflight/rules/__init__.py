"""Rules with ids (CKPT0xx) on what a trainer's config asks for.

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
from ckpt_tools.preflight.rules.rule import ConfigRule, Subject, apply

if TYPE_CHECKING:
    from ckpt_tools.preflight.configs.config import Config

__all__ = ["CATALOGUE", "RULES", "check_rules"]

_FILES = ("batches", "fsdp", "mesh", "model", "precision", "option_words")
_ALL = chain(option_words.TABLE_RULES, *(vars(import_module(f"{__name__}.{each}")).values() for each in _FILES))
RULES: tuple[ConfigRule, ...] = tuple(
    sorted((one for one in _ALL if isinstance(one, ConfigRule)), key=lambda one: one.id)
)
CATALOGUE: Mapping[str, ConfigRule] = MappingProxyType({one.id: one for one in RULES})


def check_rules(config: Config, facts: ModelFacts | None = None) -> tuple[Finding, ...]:
    """Return what is wrong with a config, by rule id; without facts, the rules on the model are silent."""
    return apply(RULES, Subject(config=config, facts=facts or ModelFacts(where="")))
