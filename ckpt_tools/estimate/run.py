"""Estimate from a process that imports no torch."""

from __future__ import annotations

import time
from dataclasses import replace

from ckpt_tools.estimate.evaluate import evaluate, propose
from ckpt_tools.estimate.options import Case, EstimateOptions
from ckpt_tools.estimate.report import Estimate
from ckpt_tools.estimate.source import config_of, find_figures
from ckpt_tools.memory import peak_rss_bytes
from ckpt_tools.processes.child import Child

ESTIMATE = "ckpt_tools.estimate.child:estimate"
"""What runs in a process of its own."""
_NO_CONFIG = "there is no config.json, and nothing to run"


def run_estimate(options: EstimateOptions) -> Estimate:
    """Say how much memory a training run takes on the rank that holds the most.

    With a config.json, two training steps run in a process of their own, on tensors without data, and PyTorch's own
    tracker counts; the formula stands beside it. Otherwise the formula alone answers.

    Args:
        options: The model, and the ways to train it.

    Raises:
        UsageError: A model that cannot be built, or a mesh that cannot be.
        UnreadableError: A checkpoint without a config that cannot be described.
    """
    start = time.perf_counter()
    if config_of(options) is None:
        result = by_formula(options)
    else:
        with start_estimate(options) as child:
            result = child.result(None)
    return replace(result, seconds=time.perf_counter() - start)


def start_estimate(options: EstimateOptions) -> Child[Estimate]:
    """Return a process that estimates, to be entered."""
    relief = "end what else runs, or let the formula answer alone (--params, --layers, --hidden)"
    return Child(ESTIMATE, options, Estimate, does="estimates", relief=relief, walled=True)


def by_formula(options: EstimateOptions) -> Estimate:
    """Return what the formula says, from figures or from a checkpoint's headers.

    Raises:
        UsageError: Neither figures nor a checkpoint with blocks.
        UnreadableError: The checkpoint cannot be described.
    """
    title, figures, notes = find_figures(options)

    def none(case: Case) -> str:  # noqa: ARG001 - what a tracker takes
        return _NO_CONFIG

    cases = evaluate(figures, options, none)
    return Estimate(
        model=title,
        params=figures.params,
        cases=cases,
        gpu_memory=options.gpu_bytes,
        proposals=propose(figures, options, cases, none),
        notes=notes,
        peak_rss_bytes=peak_rss_bytes(),
    )
