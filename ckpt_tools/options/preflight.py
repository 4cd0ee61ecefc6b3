"""Options of `preflight`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from ckpt_tools.options import AnyPath, Argument, Option
from ckpt_tools.options.output import Html

Framework = Literal[
    "accelerate", "trainer", "torchtitan", "axolotl", "ai-toolkit", "verl", "openrlhf", "llamafactory", "deepspeed"
]
"""Whose config it is; "trainer" is transformers' TrainingArguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightFields:
    """The options of `preflight`."""

    config: Annotated[
        AnyPath | Sequence[AnyPath],
        Argument(
            "Files that start the run: a trainer's config, accelerate's config, or the script or Slurm job that names"
            " them (- for stdin).",
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
    gpu_memory: Annotated[str | None, Option("Memory of a device, e.g. 80GB.", metavar="SIZE")] = None
    smoke: Annotated[
        bool, Option("Train a few steps of the cut-down model on this machine.", name="--smoke/--no-smoke")
    ] = True
    memory: Annotated[bool, Option("Estimate the memory of a rank.", name="--memory/--no-memory")] = True
    host: Annotated[
        bool,
        Option(
            "Check this machine, e.g. in a job's prolog: GPUs, driver, disk, memory, limits, paths and port (CONFIG is"
            " optional); skip memory, checkpoint and smoke."
        ),
    ] = False
    only: Annotated[
        Sequence[str], Option("Only check to make: rules, memory, checkpoint or smoke (repeatable).", metavar="CHECK")
    ] = ()
    ignore: Annotated[
        Sequence[str],
        Option("Code of findings that may pass; they are listed as ignored (repeatable).", metavar="CODE"),
    ] = ()
    strict: Annotated[bool, Option("Fail on warnings, and on requested checks that were not made.")] = False
    override: Annotated[
        Sequence[str], Option("Override for the trainer's config, like a word after -- (repeatable).", metavar="WORD")
    ] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightView:
    """How `ckpt preflight` shows its result."""

    format: Annotated[
        Literal["text", "json", "sarif", "github"],
        Option("Output format (github: annotations of a workflow; json: same as --json)."),
    ] = "text"
    html: Html = None
