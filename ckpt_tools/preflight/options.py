"""What `ckpt preflight` is asked. Importing this imports no pydantic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.options import AnyPath, Argument, Doc, Option
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
        Doc('Called when a check begins and ends, with its name and "begun", "done" or "failed".'),
    ] = None
    on_findings: Annotated[
        Callable[[tuple[Finding, ...]], None] | None,
        Doc("Called with new findings as soon as they are known, before the slow checks begin; each finding once."),
    ] = None

    @property
    def gpu_bytes(self) -> int | None:
        """Memory of a device."""
        return None if self.gpu_memory is None else parse_size(self.gpu_memory)
