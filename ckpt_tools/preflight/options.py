"""What `ckpt preflight` is asked. Importing this imports no pydantic."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.options import AnyPath, Argument, Doc, Option
from ckpt_tools.preflight.places import Place
from ckpt_tools.preflight.spec import Framework
from ckpt_tools.units import parse_size


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightOptions:
    """The options of `preflight`."""

    config: Annotated[
        AnyPath | Sequence[AnyPath],
        Argument(
            "What the run is started with: a trainer's config, accelerate's beside it, or the script or Slurm job that"
            " names them (- for stdin).",
            "CONFIG",
        ),
    ] = field(default=(), kw_only=False)
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
    memory: Annotated[bool, Option("Estimate the memory of a rank.", name="--memory/--no-memory")] = True
    host: Annotated[
        bool,
        Option(
            "Check this machine, as a job's prolog: GPUs, driver, disk, memory, limits, paths and port, with CONFIG or"
            " without; leaves out memory, checkpoint and smoke."
        ),
    ] = False
    only: Annotated[
        Sequence[str],
        Option("Make only this check: rules, memory, checkpoint, smoke (repeatable).", metavar="CHECK"),
    ] = ()
    ignore: Annotated[
        Sequence[str],
        Option("Let findings with this code pass; they are listed as ignored (repeatable).", metavar="CODE"),
    ] = ()
    strict: Annotated[bool, Option("Fail on warnings, and on a check that was asked for and not made.")] = False
    override: Annotated[
        Sequence[str],
        Option("Override the trainer's config, as words after -- do (repeatable).", metavar="WORD"),
    ] = ()
    on_check: Annotated[
        Callable[[str, str], None] | None,
        Doc('Called when a check begins and ends, with its name and "begun", "done" or "failed".'),
    ] = None
    on_findings: Annotated[
        Callable[[tuple[Finding, ...]], None] | None,
        Doc("Called with new findings as soon as they are known, before the slow checks begin; each finding once."),
    ] = None

    on_places: Annotated[
        Callable[[Mapping[Finding, Place]], None] | None,
        Doc("Called once, at the beginning, with a mapping that fills: finding → the line that it points at."),
    ] = None

    @property
    def configs(self) -> tuple[str, ...]:
        """The files."""
        given = (self.config,) if isinstance(self.config, str | os.PathLike) else self.config
        return tuple(os.fspath(path) for path in given)

    def why_skipped(self, check: str) -> str:
        """Return the option that leaves a check out; "" where it is to be made."""
        if self.only and check not in self.only:
            return " ".join(f"--only {name}" for name in self.only)
        if self.host and check in ("memory", "checkpoint", "smoke"):
            return "--host"
        left_out = {"smoke": not self.smoke, "memory": not self.memory}.get(check, False)
        return f"--no-{check}" if left_out else ""

    @property
    def gpu_bytes(self) -> int | None:
        """Memory of a device."""
        return None if self.gpu_memory is None else parse_size(self.gpu_memory)
