"""Configs that break one rule each, beside one that nearly does, out of rule_cases.yaml."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

_TABLES: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
DROP = object()
"""A value of an edit that removes what it is set to."""
RIGHT: dict[str, dict[str, Any]] = _TABLES["right"]
"""One right config of each framework."""
MODELS: dict[str, dict[str, Any]] = _TABLES["models"]
"""config.json of models."""
LLAMA, MIXTRAL, TIED, BIG = (MODELS[name] for name in ("LLAMA", "MIXTRAL", "TIED", "BIG"))
NAMES = {
    "accelerate": "accelerate.yaml",
    "trainer": "args.json",
    "torchtitan": "config.json",
    "axolotl": "axolotl.yml",
    "ai-toolkit": "train.yaml",
    "verl": "ppo.yaml",
    "openrlhf": "train.sh",
    "llamafactory": "sft.yaml",
    "deepspeed": "ds.json",
}
"""Its file."""
_SHORT: dict[str, str] = {word: path.replace("*", "{}") for word, path in _TABLES["short"].items()}
AI, ACTOR, SHARD = (_SHORT[word].removesuffix(".{}") for word in ("AI", "ACTOR", "SHARD"))
SIZE, DEGREE = _SHORT["SIZE"].format, _SHORT["DEGREE"].format

Edits = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RuleCase:
    """A config that breaks a rule, and a near miss."""

    rule: str
    framework: str
    fires: Edits
    """Edits of the right config that break the rule."""
    near: Edits
    """Edits that nearly do."""
    also: tuple[str, ...] = ()
    """Other rules that the first one breaks as well, because it cannot be broken alone."""
    near_also: tuple[str, ...] = ()
    """Other rules that the near miss breaks."""
    world_size: int | None = 8
    near_world_size: int | None = None
    """Of the near miss, when it differs."""
    model: dict[str, Any] | None = None
    """config.json of the model."""
    near_model: dict[str, Any] | None = None
    """Of the near miss, when it differs."""
    weights: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of weights beside it."""
    near_weights: Mapping[str, tuple[int, ...]] | None = None
    build: bool = False
    """Build the model on meta."""


def _cases() -> Iterator[RuleCase]:
    for rule, cases in _TABLES["cases"].items():
        for case in cases:
            framework = next(name for name in case if name in RIGHT)
            rest = {name: _plain(name, value) for name, value in case.items() if name not in (framework, "near")}
            yield RuleCase(
                rule=rule, framework=framework, fires=_edits(case[framework]), near=_edits(case["near"]), **rest
            )


def _edits(written: Edits) -> Edits:
    return {_long(path): DROP if value == "DROP" else value for path, value in written.items()}


def _long(path: str) -> str:
    word, _, rest = path.partition(".")
    return _SHORT[word].format(rest) if word in _SHORT else path


def _plain(name: str, value: Any) -> Any:
    if name.endswith("model"):
        base, changes = (value, {}) if isinstance(value, str) else next(iter(value.items()))
        return MODELS[base] | changes
    if name.endswith("weights"):
        return {key: tuple(shape) for key, shape in value.items()}
    return tuple(value) if isinstance(value, list) else value


CASES: tuple[RuleCase, ...] = tuple(_cases())
WRONG: tuple[tuple[str, Edits, Any, list[str]], ...] = tuple(
    (framework, _edits(row["edits"]), _plain("model", row["model"]) if "model" in row else None, row["rules"])
    for framework, rows in _TABLES["wrong"].items()
    for row in rows
)
"""Framework, edits, model, and exactly the rules that they break."""


def edited(framework: str, edits: Edits) -> dict[str, Any]:
    """Return the right config of a framework with edits."""
    values = copy.deepcopy(RIGHT[framework])
    if framework == "openrlhf":
        for name, value in edits.items():
            if value is None or value is DROP:
                values.pop(name, None)
            else:
                values[name] = value
        return values
    for path, value in edits.items():
        node: Any = values
        *parents, last = path.replace("]", "").replace("[", ".").split(".")
        for part in parents:
            node = node[int(part)] if part.isdigit() else node.setdefault(part, {})
        if value is DROP:
            node.pop(last, None)
        else:
            node[last] = value
    return values


def text_of(framework: str, values: dict[str, Any], *, ranks: int | None = 8) -> str:
    """Return a config as its file has it."""
    if framework == "openrlhf":
        lines = [f"torchrun --nproc_per_node={ranks or 8} -m openrlhf.cli.train_sft"]
        lines += [f"   --{name}" if value is True else f"   --{name} {value}" for name, value in values.items()]
        return "#!/bin/bash\nset -x\n" + " \\\n".join(lines) + "\n"
    if NAMES[framework].endswith(".json"):
        return json.dumps(values, indent=2)
    return yaml.safe_dump(values, sort_keys=False)
