"""`preflight`: everything that can be checked before a run."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import ckpt_tools.preflight as _preflight  # noqa: F401 - loaded later, it would take the name of the function
from ckpt_tools.units import parse_size

if TYPE_CHECKING:
    from ckpt_tools.description.checkpoint import Finding
    from ckpt_tools.preflight.report import PreflightReport
    from ckpt_tools.preflight.spec import Framework


def preflight(
    config: str | os.PathLike[str],
    *,
    framework: Framework | None = None,
    world_size: int | None = None,
    model: str | os.PathLike[str] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    gpu_memory: str | None = None,
    smoke: bool = True,
    on_check: Callable[[str, str], None] | None = None,
    on_findings: Callable[[tuple[Finding, ...]], None] | None = None,
) -> PreflightReport:
    """Read a trainer's config and say whether the run will start, fit, load and train.

    Config and rules, memory, the checkpoint against the model and the mesh, and a smoke run of a cut-down model. What
    could not be checked is listed in the report (`not_checked`); where that is the config itself, or an option on which
    something depends, `ok` is false. The trainer itself is never imported.

    Args:
        config: The config of accelerate, transformers' Trainer, torchtitan, axolotl, ai-toolkit or verl, or a script
            with OpenRLHF's command line, which is read and not run.
        framework: Whose config it is; found out by default.
        world_size: Number of ranks; what the config says by default.
        model: Directory of the model with its config.json; what the config names by default.
        checkpoint: What is loaded; by default what the config resumes from, or the model's own weights.
        gpu_memory: What a device has, for example "80GB"; without it nothing is said to fit or not.
        smoke: Train a few steps of the model, cut down, on ranks of this machine.
        on_check: Told when a check begins and ends: its name, and "begun", "done" or "failed".
        on_findings: Told what was found as soon as it is known, before what is slow begins; each finding once.

    Raises:
        UsageError: Nobody's config, or a path that is not there.
        UnreadableError: The config is damaged.
    """
    # pydantic comes with it, which no other command needs.
    from ckpt_tools.preflight.run import preflight as run

    return run(
        os.fspath(config),
        framework=framework,
        world_size=world_size,
        model=None if model is None else os.fspath(model),
        checkpoint=None if checkpoint is None else os.fspath(checkpoint),
        gpu_memory=None if gpu_memory is None else parse_size(gpu_memory),
        smoke=smoke,
        on_check=on_check,
        on_findings=on_findings,
    )
