"""How much memory a training run takes on one rank, before a GPU is booked. Importing this package imports no torch."""

from __future__ import annotations

from ckpt_tools.estimate.case import Case
from ckpt_tools.estimate.options import EstimateOptions
from ckpt_tools.estimate.report import CaseEstimate, Estimate, Memory
from ckpt_tools.estimate.run import estimate

__all__ = ["Case", "CaseEstimate", "Estimate", "EstimateOptions", "Memory", "estimate"]
