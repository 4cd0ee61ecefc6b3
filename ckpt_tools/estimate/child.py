"""The process that estimates a model with a config: imports torch, builds on meta, tracks, and ends."""

from __future__ import annotations

import json
import os
from typing import Any

from ckpt_tools.errors import CkptError
from ckpt_tools.estimate.source import SIZES_HINT
from ckpt_tools.memory import peak_rss_bytes

JOB_NAME = "job.json"
"""What to do: options, the config's path, the parent."""
RESULT_NAME = "result.json"
"""What came of it."""


def main(directory: str) -> None:
    """Do the job of a directory."""
    from ckpt_tools.smoke.world import die_with_parent

    with open(os.path.join(directory, JOB_NAME), encoding="utf-8") as file:
        job = json.load(file)
    die_with_parent(job["parent"])
    try:
        result = _run(job)
    except CkptError as error:
        # What builds models for smoke runs proposes an option that estimates do not have.
        hint = SIZES_HINT if "--factory" in (error.hint or "") else error.hint
        parts = {"what": error.what, "where": error.where, "hint": hint}
        result = {"error": {"class": type(error).__name__, **parts}}
    path = os.path.join(directory, RESULT_NAME)
    with open(path + ".part", "w", encoding="utf-8") as file:
        json.dump(result, file)
    os.replace(path + ".part", path)


def _run(job: dict[str, Any]) -> dict[str, object]:
    import torch

    from ckpt_tools.estimate.evaluate import evaluate, propose
    from ckpt_tools.estimate.model import figures_of, notes_of
    from ckpt_tools.estimate.options import parse_options
    from ckpt_tools.estimate.report import Estimate
    from ckpt_tools.estimate.track import track
    from ckpt_tools.smoke.options import SmokeOptions
    from ckpt_tools.smoke.setting import find_recipe

    torch.set_num_threads(1)
    options = parse_options(job["options"])
    recipe = find_recipe(SmokeOptions(model=job["config"]))
    figures = figures_of(recipe)

    def tracked(case: Any) -> Any:  # noqa: ANN401 - a Case; torch's side is imported here only
        return track(recipe, case)

    cases = evaluate(figures, options, tracked)
    proposals = propose(figures, options, cases, tracked) if options.advise else ()
    return Estimate(
        model=recipe.title,
        params=figures.params,
        cases=cases,
        gpu_memory=options.gpu_memory,
        proposals=proposals,
        notes=notes_of(recipe, options.case),
        peak_rss_bytes=peak_rss_bytes(),
    ).to_json()
