"""The tensor-parallel plan of a model, found by transformers in a child behind walls. No torch here."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ckpt_tools.placement import TpPlan, check_quantization, find_tp_plan, import_model_class
from ckpt_tools.processes.child import Child, build_behind_walls
from ckpt_tools.text import escape_name
from ckpt_tools.walls import check_config

RESOLVE = "ckpt_tools.placement.auto_plan:resolve"
"""What runs in the child."""


def auto_plan(config: Mapping[str, object], directory: str) -> TpPlan | None:
    """Return the plan that transformers has for the model of a config.json, None where it is not installed.

    Args:
        config: The parsed config.json.
        directory: Where it lies.

    Raises:
        UsageError: Transformers does not know the model, or has no plan for it; or the config is refused.
    """
    check_config(config, directory)
    check_quantization(config)
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None:
        return None
    job = {"config": dict(config), "model": directory}
    with Child(RESOLVE, job, does="finds the tensor-parallel plan", walled=True) as child:
        found = child.result()["plan"]
    return None if found is None else TpPlan(**found | {"may_lack": frozenset(found["may_lack"])})


def resolve(job: Mapping[str, Any]) -> dict[str, object]:
    """Find the plan for the "config" of a job."""
    named = job["config"].get("architectures")
    subject = f"a {escape_name(str(named[0]))}" if isinstance(named, list) and named else "the model"
    import_model_class(job["config"])
    build_behind_walls(job, subject=subject, where=job["model"], foreign=(job["model"],))
    plan = find_tp_plan(job["config"])
    return {"plan": None if plan is None else asdict(plan) | {"may_lack": sorted(plan.may_lack)}}
