"""The tensor-parallel plan of a model, found by transformers in a child in the sandbox. No torch here."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass

from ckpt_tools.sandbox import check_config
from ckpt_tools.sandbox.child import Child, Here, build_in_sandbox
from ckpt_tools.transfer.placement.tp_plan import TpPlan, check_quantization, find_tp_plan, import_model_class

RESOLVE = "ckpt_tools.transfer.placement.auto_plan:resolve"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What the child is asked."""

    config: Mapping[str, object]
    directory: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What it says."""

    plan: TpPlan | None


def auto_plan(config: Mapping[str, object], directory: str) -> TpPlan | None:
    """Return the plan that transformers has for the model of a config.json, None where it is not installed."""
    check_config(config, directory)
    check_quantization(config)
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("torch") is None:
        return None
    job = Question(config=config, directory=directory)
    with Child(RESOLVE, job, Answer, does="finds the tensor-parallel plan", sandboxed=True) as child:
        return child.result().plan


def resolve(job: Question, here: Here) -> Answer:
    """Find the plan; what `auto_plan` calls in a child."""
    named = job.config.get("architectures")
    subject = f"a {named[0]}" if isinstance(named, list) and named else "the model"
    import_model_class(job.config)
    build_in_sandbox(here, subject=subject, where=job.directory, foreign=(job.directory,))
    return Answer(plan=find_tp_plan(job.config))
