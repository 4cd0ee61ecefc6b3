"""Options of `watch` and `prune`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from ckpt_tools.options import AnyPath, Argument, Doc, Option, common

Run = Annotated[AnyPath, Argument("Folder that a run saves its checkpoints to, on a disk or in a bucket.", "DIR")]
Unverified = Annotated[
    Sequence[str], Option("Also remove this one, which is not verified (repeatable).", metavar="NAME")
]
Quiet = Annotated[
    float, Option("Seconds that a checkpoint must not change before it is read or removed.", metavar="SECONDS", min=0)
]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepOptions:
    """What to keep, as the user said it."""

    keep_last: Annotated[int | None, Option("Keep the latest K verified checkpoints.", metavar="K", min=1)] = None
    keep_every: Annotated[int | None, Option("Keep those whose step is a multiple of N.", metavar="N", min=1)] = None
    keep_best: Annotated[int | None, Option("Keep the K with the best metric.", metavar="K", min=1)] = None
    metric: Annotated[str, Option("Metric of --keep-best, as the Trainer logs it or Lightning puts it into names.")] = (
        "eval_loss"
    )
    greater_is_better: Annotated[
        bool | None, Option("Highest is best (default: unless the metric's name ends in loss).")
    ] = None
    accept: Annotated[
        Sequence[str], Option("Let this one succeed the others although it differs (repeatable).", metavar="NAME")
    ] = ()
    quarantine: Annotated[
        str, Option("How long what was removed can be brought back by prune --undo.", metavar="DURATION")
    ] = "1d"
    also_used_by: Annotated[
        Sequence[AnyPath], Option("Directory whose links keep what they lead to (repeatable).", metavar="DIR")
    ] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneOptions(KeepOptions):
    """The options of `prune`."""

    directory: Run = field(kw_only=False)
    unverified: Unverified = ()
    undo: Annotated[
        Sequence[str], Option("Bring this one back from quarantine, or all (repeatable).", metavar="NAME|all")
    ] = ()
    settle: Quiet = 10.0
    dry_run: common.DryRun = False
    say: Annotated[Say | None, Doc("Called with a line of text for all that is done.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions(KeepOptions):
    """The options of `watch`."""

    directory: Run = field(kw_only=False)
    level: Annotated[
        Literal["data", "values"],
        Option("What to check of a new checkpoint; values: every byte, NaN and Inf; data: bytes with a checksum."),
    ] = "values"
    gather: Annotated[
        AnyPath | None, Option("Also convert what stays into full safetensors, below this directory.", metavar="OUT")
    ] = None
    assets: Annotated[AnyPath | None, Option("Model with the config and tokenizer for --gather.", metavar="DIR")] = None
    push: Annotated[
        str | None, Option("Also push what stays (with --gather, the result) to the hub.", metavar="REPO")
    ] = None
    once: Annotated[bool, Option("Look once, and end: for cron. Exit code 3 with a bad checkpoint.")] = False
    status: Annotated[
        bool, Option("Only show what is known and what goes when: nothing is verified or written. Exit code as --once.")
    ] = False
    interval: Annotated[float, Option("Seconds between two looks.", metavar="SECONDS", min=0.1)] = 30.0
    settle: Quiet = 10.0
    num_workers: common.NumWorkers = None
    progress: common.Progress = None
    say: Annotated[Say | None, Doc("Called with a line of text for all that is done.")] = None
