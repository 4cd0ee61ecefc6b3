"""Prove, before a long run, that a model with its checkpoint, mesh and strategy trains correctly.

The process that calls `run_smoke` stays light: it starts a launcher, which imports torch once and forks the ranks.
Importing this package imports no torch.
"""

from __future__ import annotations

from ckpt_tools.smoke.options import SmokeOptions
from ckpt_tools.smoke.report import PhaseResult, RankMemory, ReloadResult, SmokeReport
from ckpt_tools.smoke.start import run_smoke

__all__ = ["PhaseResult", "RankMemory", "ReloadResult", "SmokeOptions", "SmokeReport", "run_smoke"]
