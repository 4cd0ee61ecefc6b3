"""Mistakes that people make in configs, out of mistakes.yaml: bases that are right, and changes that are not."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from preflight.rule_cases import MODELS

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.options.preflight import Framework
from ckpt_tools.preflight.configs import read_config
from ckpt_tools.preflight.model_facts import facts_of
from ckpt_tools.preflight.rules import check_rules

_TABLES: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
BASES: Mapping[str, dict[str, Any]] = _TABLES["bases"]
_FRAMEWORKS: Mapping[str, Framework] = {"sft": "trainer", "grpo": "trainer"}
_PROGRAMS = {
    "openrlhf-sft": "torchrun --nproc_per_node={ranks} -m openrlhf.cli.train_sft",
    "openrlhf-ppo": "python3 -m openrlhf.cli.train_ppo_ray",
}


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """A change of a base; what preflight must find, where, and what must stand in the hint."""

    kind: str
    base: str
    change: Mapping[str, Any]
    code: str
    key: str
    fix: str
    source: str
    near: Mapping[str, Any] | None = None
    """A change of the same keys that is right."""
    ranks: int = 8
    model: Any = None

    @property
    def framework(self) -> Framework:
        """Whose config it is."""
        return framework_of(self.base)

    def is_found_in(self, findings: tuple[Finding, ...]) -> bool:
        """Is it among them, at its key, with its fix?"""
        return any(
            found.code == self.code and found.where.startswith(self.key) and self.fix in (found.hint or "")
            for found in findings
        )


def framework_of(base: str) -> Framework:
    """Return whose config a base is."""
    name = base if base == "ai-toolkit" else base.partition("-")[0]
    found: Any = _FRAMEWORKS.get(name, name)
    return found


MISTAKES = tuple(Mistake(**case) for case in _TABLES["cases"])


def findings_of(
    directory: Path, base: str, change: Mapping[str, Any], *, ranks: int = 8, model: Any = None
) -> tuple[Finding, ...]:
    """Return what preflight finds in a base with a change, without memory, checkpoint and smoke run."""
    values = _changed(BASES[base], change)
    path = directory / ("train.sh" if base in _PROGRAMS else "config.json")
    if base in _PROGRAMS:
        options = [f"   --{name}" + ("" if value is True else f" {value}") for name, value in values.items()]
        path.write_text(" \\\n".join([_PROGRAMS[base].format(ranks=ranks), *options]) + "\n")
    else:
        path.write_text(json.dumps(values, indent=2))
    says_itself = base in _PROGRAMS or framework_of(base) == "accelerate"
    config = read_config(str(path), framework=framework_of(base), world_size=None if says_itself else ranks)
    facts = None
    if model is not None:
        name, edits = (model, {}) if isinstance(model, str) else next(iter(model.items()))
        facts = facts_of(MODELS[name] | edits)
    return (*config.findings, *check_rules(config, facts))


def _changed(base: dict[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a base with values at key paths; a key with dots of its own is taken as it is."""
    values = copy.deepcopy(base)
    has_dots = any("." in key for key in base)
    for path, value in change.items():
        parts: list[Any] = [path] if has_dots else [int(p) if p.isdigit() else p for p in re.split(r"[.\[\]]+", path)]
        node: Any = values
        for part in parts[:-1]:
            node = node[part] if isinstance(part, int) else node.setdefault(part, {})
        if value == "DROP":
            node.pop(parts[-1], None)
        else:
            node[parts[-1]] = value
    return values
