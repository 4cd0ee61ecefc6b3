"""The process that estimates a model with a config: imports torch, builds on meta, tracks, and ends."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import partial

from ckpt_tools.errors import RefusedConfigError, UsageError
from ckpt_tools.estimate.options import SIZES_HINT, EstimateOptions
from ckpt_tools.estimate.report import Estimate
from ckpt_tools.estimate.run import by_formula, config_of, estimate_of, with_assumptions
from ckpt_tools.models.config import read_config
from ckpt_tools.sandbox.child import Here, build_behind_walls


def estimate(options: EstimateOptions, here: Here) -> Estimate:
    """Estimate; what `run.start_estimate` calls in a child."""
    start = time.perf_counter()
    config = config_of(options)
    try:
        result = by_formula(options) if config is None else _track(options, os.path.abspath(config), here)
    except RefusedConfigError as error:
        error.hint = SIZES_HINT  # there is no --factory here
        raise
    return replace(result, notes=with_assumptions(result), seconds=time.perf_counter() - start)


def _track(options: EstimateOptions, config: str, here: Here) -> Estimate:
    found = read_config(config, hint=SIZES_HINT)
    import torch

    from ckpt_tools.estimate.model import figures_of, notes_of
    from ckpt_tools.estimate.track import track
    from ckpt_tools.models.recipe_of import recipe_of

    torch.set_num_threads(1)
    try:
        recipe = recipe_of(found.values, found.where, otherwise=SIZES_HINT)
    except RefusedConfigError:
        raise
    except UsageError as error:  # without the library, or with a class that it does not know, the weights answer
        if "_class_name" not in found.values or not os.path.isdir(options.path or ""):
            raise
        result = by_formula(options)
        return replace(result, notes=(f"nothing was run: {error.what}", *result.notes))
    build_behind_walls(here, subject=f"a {recipe.title}", where=found.where, foreign=(os.path.dirname(config),))
    result = estimate_of(options, recipe.title, figures_of(recipe), partial(track, recipe))
    return replace(result, notes=notes_of(recipe, options.seq_len))
