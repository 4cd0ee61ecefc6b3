"""Rules: which mesh axis cuts which tensor along which dim, by patterns on FQNs.

A pattern (`description.globs`) and what it means (`rule`) come from a YAML file or from `--set` (`parse`), or from the
model's own tensor-parallel plan (`tp_plan`); `place` applies them to the tensors of a checkpoint.
"""

from __future__ import annotations

from ckpt_tools.placement.parse import parse_rules, parse_set
from ckpt_tools.placement.place import cut_entry, place_tensors
from ckpt_tools.placement.rule import Rule, RuleSet
from ckpt_tools.placement.tp_plan import TpPlan, check_quantization, find_tp_plan, import_model_class, tp_plan_rules

__all__ = [
    "Rule",
    "RuleSet",
    "TpPlan",
    "check_quantization",
    "cut_entry",
    "find_tp_plan",
    "import_model_class",
    "parse_rules",
    "parse_set",
    "place_tensors",
    "tp_plan_rules",
]
