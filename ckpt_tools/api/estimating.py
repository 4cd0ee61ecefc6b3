"""How much memory training takes."""

from __future__ import annotations

from ckpt_tools.estimate import Estimate, EstimateOptions, run_estimate
from ckpt_tools.options import takes


@takes(EstimateOptions)
def estimate(options: EstimateOptions) -> Estimate:
    """Estimate how much memory training a model takes on the rank that holds the most; nothing is allocated.

    With a config.json, a training step runs without data and is tracked; otherwise a formula gives the estimate.

    Raises:
        UsageError: Invalid options, an impossible mesh, or a model that cannot be built.
        UnreadableError: The checkpoint cannot be described.
    """
    return run_estimate(options)
