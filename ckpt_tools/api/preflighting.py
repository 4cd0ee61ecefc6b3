"""`preflight`: everything that can be checked before a run."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.options import AnyPath, Argument, Doc, Option, takes
from ckpt_tools.preflight.report import PreflightReport
from ckpt_tools.preflight.spec import Framework
from ckpt_tools.units import parse_size


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightOptions:
    """The options of `preflight`."""

    config: Annotated[
        AnyPath,
        Argument(
            "A trainer's config; for OpenRLHF and verl also the script or text file with its command line.", "CONFIG"
        ),
    ] = field(kw_only=False)
    framework: Annotated[Framework | None, Option("Framework of the config.", none="auto")] = None
    world_size: Annotated[int | None, Option("Number of ranks (default: from CONFIG).", min=1)] = None
    model: Annotated[AnyPath | None, Option("Directory of the model (default: from CONFIG).", metavar="DIR")] = None
    checkpoint: Annotated[
        AnyPath | None,
        Option(
            "Checkpoint to load (default: the one that CONFIG resumes from, or the model's own weights).", metavar="SRC"
        ),
    ] = None
    gpu_memory: Annotated[str | None, Option("Memory of a device (80GB).", metavar="SIZE")] = None
    smoke: Annotated[
        bool, Option("Train a few steps of the model, cut down, on this machine.", name="--smoke/--no-smoke")
    ] = True
    on_check: Annotated[
        Callable[[str, str], None] | None,
        Doc('Told when a check begins and ends: its name, and "begun", "done" or "failed".'),
    ] = None
    on_findings: Annotated[
        Callable[[tuple[Finding, ...]], None] | None,
        Doc("Told what was found as soon as it is known, before what is slow begins; each finding once."),
    ] = None


@takes(PreflightOptions)
def preflight(options: PreflightOptions) -> PreflightReport:
    """Read a trainer's config and say whether the run will start, fit, load and train.

    Config and rules, memory, the checkpoint against the model and the mesh, and a smoke run of a cut-down model. What
    could not be checked is listed in the report (`not_checked`); where that is the config itself, or an option on which
    something depends, `ok` is false. The trainer itself is never imported.

    Raises:
        UsageError: Nobody's config, or a path that is not there.
        UnreadableError: The config is damaged.
    """
    # pydantic comes with it, which no other command needs.
    from ckpt_tools.preflight.run import preflight as run

    return run(
        os.fspath(options.config),
        framework=options.framework,
        world_size=options.world_size,
        model=None if options.model is None else os.fspath(options.model),
        checkpoint=None if options.checkpoint is None else os.fspath(options.checkpoint),
        gpu_memory=None if options.gpu_memory is None else parse_size(options.gpu_memory),
        smoke=options.smoke,
        on_check=options.on_check,
        on_findings=options.on_findings,
    )
