"""Options of `watch` and `prune`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from ckpt_tools.options import AnyPath, Argument, Doc, Option, common

Run = Annotated[AnyPath, Argument("Folder of a run's checkpoints, on a disk or in a bucket.", "DIR")]
Unverified = Annotated[Sequence[str], Option("Unverified checkpoint to remove as well (repeatable).", metavar="NAME")]
Quiet = Annotated[
    float, Option("Seconds without change before a checkpoint is read or removed.", metavar="SECONDS", min=0)
]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepOptions:
    """What to keep, as the user said it."""

    keep_last: Annotated[int | None, Option("Number of last verified checkpoints to keep.", metavar="K", min=1)] = None
    keep_every: Annotated[int | None, Option("Step interval: its multiples are kept.", metavar="N", min=1)] = None
    keep_best: Annotated[int | None, Option("Number of best checkpoints to keep.", metavar="K", min=1)] = None
    metric: Annotated[str, Option("Metric of --keep-best, as the Trainer logs it or Lightning puts it into names.")] = (
        "eval_loss"
    )
    greater_is_better: Annotated[
        bool | None, Option("Take the highest metric as best (default: unless its name ends in loss).")
    ] = None
    accept: Annotated[
        Sequence[str], Option("Checkpoint that may differ from those before it (repeatable).", metavar="NAME")
    ] = ()
    quarantine: Annotated[
        str, Option("Time for which prune --undo can restore what was removed.", metavar="DURATION")
    ] = "1d"
    also_used_by: Annotated[
        Sequence[AnyPath], Option("Directory whose links protect what they lead to (repeatable).", metavar="DIR")
    ] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneOptions(KeepOptions):
    """The options of `prune`."""

    directory: Run = field(kw_only=False)
    unverified: Unverified = ()
    undo: Annotated[
        Sequence[str], Option("Checkpoint to restore from quarantine, or all (repeatable).", metavar="NAME|all")
    ] = ()
    settle: Quiet = 10.0
    dry_run: Annotated[bool, Option("Print what would go, and why the rest stays; remove nothing.", short="-n")] = False
    say: Annotated[Say | None, Doc("Called with a line of text for all that is done.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions(KeepOptions):
    """The options of `watch`."""

    directory: Run = field(kw_only=False)
    level: Annotated[
        Literal["data", "values"],
        Option("Depth of checks: values, every byte, NaN and Inf; data, bytes with a checksum."),
    ] = "values"
    gather: Annotated[
        AnyPath | None, Option("Directory for full safetensors of the checkpoints that stay.", metavar="OUT")
    ] = None
    assets: Annotated[AnyPath | None, Option("Model with the config and tokenizer for --gather.", metavar="DIR")] = None
    push: Annotated[
        str | None, Option("Hub repository for what stays (with --gather, for the results).", metavar="REPO")
    ] = None
    once: Annotated[bool, Option("Look once and exit, e.g. for cron (exit code 3: a bad checkpoint).")] = False
    status: Annotated[
        bool, Option("Show what is known and what is removed when; verify and write nothing (exit code as --once).")
    ] = False
    interval: Annotated[float, Option("Seconds between looks.", metavar="SECONDS", min=0.1)] = 30.0
    settle: Quiet = 10.0
    num_workers: common.NumWorkers = None
    progress: common.Progress = None
    say: Annotated[Say | None, Doc("Called with a line of text for all that is done.")] = None
