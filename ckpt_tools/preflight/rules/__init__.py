"""Rules with ids (CKPT0xx) on what a trainer's config asks for. Pure functions; no torch, no framework is imported."""

from ckpt_tools.preflight.rules.catalogue import CATALOGUE, RULES, check_rules, render_rules
from ckpt_tools.preflight.rules.rule import Case, Rule, Violation

__all__ = ["CATALOGUE", "RULES", "Case", "Rule", "Violation", "check_rules", "render_rules"]
