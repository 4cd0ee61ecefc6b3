"""Walls around the building of models whose config.json comes from a stranger (see docs/decisions/0009)."""

from ckpt_tools.sandbox.audit import Breach, Walls, aside, behind_walls, demand_walls
from ckpt_tools.sandbox.config import check_config
from ckpt_tools.sandbox.enclose import Limits, raise_walls

__all__ = ["Breach", "Limits", "Walls", "aside", "behind_walls", "check_config", "demand_walls", "raise_walls"]
