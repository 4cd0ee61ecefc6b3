"""The sandbox around the building of models whose config.json comes from a stranger (see docs/decisions/0009)."""

from ckpt_tools.sandbox.audit import Breach, Sandbox, aside, demand_sandbox, in_sandbox
from ckpt_tools.sandbox.config import check_config
from ckpt_tools.sandbox.enclose import Limits, enter_sandbox

__all__ = ["Breach", "Limits", "Sandbox", "aside", "check_config", "demand_sandbox", "enter_sandbox", "in_sandbox"]
