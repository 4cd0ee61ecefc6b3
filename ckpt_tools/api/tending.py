"""`prune` and `watch`: a run's folder that looks after itself."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from ckpt_tools.errors import CkptError, DestinationExistsError, UnreadableError, UsageError
from ckpt_tools.options import AnyPath, Argument, Doc, Option, default_num_workers, takes
from ckpt_tools.options.common import DryRun, NumWorkers, Progress
from ckpt_tools.remote.places import is_remote
from ckpt_tools.tending.folder import open_folder
from ckpt_tools.tending.retention import Rules
from ckpt_tools.tending.tend import Settings, Tended, Tender
from ckpt_tools.units import parse_duration

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

    def tender(self, directory: AnyPath, settings: Settings, **told: Any) -> Tender:  # noqa: ANN401 - as Tender has it
        """Return what tends a folder so."""
        folder = open_folder(os.fspath(directory), [os.fspath(each) for each in self.also_used_by])
        kept = parse_duration(self.quarantine)
        return Tender(folder, replace(settings, accept=tuple(self.accept), quarantine_s=kept), **told)

    def rules(self, unverified: Sequence[str] = ()) -> Rules:
        """Return the rules that they are."""
        greater = self.greater_is_better
        return Rules(
            last=self.keep_last,
            every=self.keep_every,
            best=self.keep_best,
            metric=self.metric,
            greater_is_better=not self.metric.endswith("loss") if greater is None else greater,
            unverified=tuple(unverified),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneOptions(KeepOptions):
    """The options of `prune`."""

    directory: Run = field(kw_only=False)
    unverified: Unverified = ()
    undo: Annotated[
        Sequence[str], Option("Bring this one back from quarantine, or all (repeatable).", metavar="NAME|all")
    ] = ()
    settle: Quiet = 10.0
    dry_run: DryRun = False
    say: Annotated[Say | None, Doc("Called with a line of text for all that is done.")] = None


@takes(PruneOptions)
def prune(options: PruneOptions) -> Tended:
    """Remove the checkpoints of a run that are verified and superseded.

    What `watch` has not verified stays, and so does the last verified one, whatever comes after it, and what is linked,
    named by the trainer's own files, or in use.

    Raises:
        UsageError: Nothing says what to keep, or no checkpoint has the metric.
        UnreadableError: There are no checkpoints of a run.
        BusyError: Another ckpt tends the folder.
    """
    rules = options.rules(options.unverified)
    settings = Settings(rules=rules, level=None, quiet_s=options.settle, dry_run=options.dry_run)
    tender = options.tender(options.directory, settings, say=options.say)
    if options.undo:
        return tender.undo([name for name in options.undo if name != "all"])
    if not rules.removes:
        raise UsageError("nothing says what to keep", hint="add --keep-last K, --keep-every N or --keep-best K")
    return _require(tender.once())


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
    interval: Annotated[float, Option("Seconds between two looks.", metavar="SECONDS", min=0.1)] = 30.0
    settle: Quiet = 10.0
    num_workers: NumWorkers = None
    progress: Progress = None
    say: Annotated[Say | None, Doc("Called with a line of text for all that is done.")] = None
    each: Annotated[Callable[[Tended], None] | None, Doc("Called after each look, until it ends by an exception.")] = (
        None
    )


@takes(WatchOptions)
def watch(options: WatchOptions) -> Tended:
    """Verify the checkpoints of a run as they come, and remove what is superseded; without `once`, for ever.

    Raises:
        UsageError: Options that contradict each other.
        UnreadableError: There is no such folder; with `once`, no checkpoints of a run.
        BusyError: With `once`, another ckpt tends the folder.
    """
    path = os.fspath(options.directory)
    if options.push is not None and options.gather is None and is_remote(path):
        raise UsageError("push takes a directory of this machine", hint="add --gather OUT")
    if options.assets is not None and options.gather is None:
        raise UsageError("--assets needs --gather", hint="add --gather OUT")
    settings = Settings(
        rules=options.rules(),
        level=options.level,
        quiet_s=options.settle,
        num_workers=options.num_workers or default_num_workers(path),
        send=_senders(options),
    )
    tender = options.tender(path, settings, say=options.say, progress=options.progress)
    if options.once:
        return _require(tender.once())
    return _for_ever(tender, options)


def _for_ever(tender: Tender, options: WatchOptions) -> Tended:
    """Look again and again. What fails is told once, and tried again: the run goes on."""
    say = options.say or (lambda _: None)
    trouble = ""
    while True:
        try:
            tended = tender.once(wait=False)
        except UsageError:
            raise
        except CkptError as error:
            if str(error) != trouble:
                say(f"{error}; trying again every {options.interval:g} s")
            trouble = str(error)
        else:
            trouble = ""
            if options.each is not None:
                options.each(tended)
        time.sleep(options.interval)


def _require(tended: Tended) -> Tended:
    """Refuse a folder without a checkpoint: it is hardly the one that is meant."""
    if not tended.decisions:
        raise UnreadableError(
            "no checkpoint of a trainer is here",
            where=tended.path,
            hint="give the folder that holds checkpoint-N, step-N, global_step_N, *.ckpt or name_000000500.safetensors",
        )
    return tended


def _senders(options: WatchOptions) -> dict[str, Callable[[str, str], None]]:
    """Return what brings a verified checkpoint to where it is wanted."""
    found: dict[str, Callable[[str, str], None]] = {}
    out = None if options.gather is None else os.fspath(options.gather)
    if out is not None:

        def gather_one(name: str, path: str) -> None:
            from ckpt_tools.api import gather, verify

            destination = os.path.join(out, os.path.splitext(name)[0])
            try:
                gather(path, destination, assets=options.assets, num_workers=options.num_workers)
            except DestinationExistsError:  # of a watch that was killed, or of another run
                if not verify(destination, against=path).ok:
                    raise

        found[out] = gather_one
    if options.push is not None:
        repo = options.push

        def push_one(name: str, path: str) -> None:
            from ckpt_tools.api import push

            directory = path if out is None else os.path.join(out, os.path.splitext(name)[0])
            result = push(directory, repo, commit_message=f"{name}, verified by ckpt")
            if not result.ok:
                raise CkptError("the push was refused, or what arrived is not what is here", where=repo)

        found[f"{repo} (hub)"] = push_one
    return found
