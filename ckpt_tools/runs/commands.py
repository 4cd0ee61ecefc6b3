"""`prune` and `watch`: a run's folder that looks after itself."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from ckpt_tools.errors import CkptError, DestinationExistsError, UnreadableError, UsageError
from ckpt_tools.options import AnyPath, Doc, default_num_workers, takes
from ckpt_tools.options.runs import KeepOptions, PruneOptions, WatchOptions
from ckpt_tools.runs.folder import open_folder
from ckpt_tools.runs.manage import PruneResult, RunManager, Settings
from ckpt_tools.runs.retention import Rules
from ckpt_tools.storage.locations import is_remote
from ckpt_tools.units import parse_duration


def _manager(options: KeepOptions, directory: AnyPath, settings: Settings, **more: Any) -> RunManager:  # noqa: ANN401 - as Tender has it
    """Return what manages a folder so."""
    folder = open_folder(os.fspath(directory), [os.fspath(each) for each in options.also_used_by])
    kept = parse_duration(options.quarantine)
    return RunManager(folder, replace(settings, accept=tuple(options.accept), quarantine_s=kept), **more)


def rules_of(options: KeepOptions, unverified: Sequence[str] = ()) -> Rules:
    """Return the rules that they are."""
    return Rules(
        last=options.keep_last,
        every=options.keep_every,
        best=options.keep_best,
        metric=options.metric,
        greater_is_better=options.greater_is_better,
        unverified=tuple(unverified),
    )


@takes(PruneOptions, 'ckpt_tools.prune("run", keep_last=1, dry_run=True).removed', "('step-1',)")
def prune(options: PruneOptions) -> PruneResult:
    """Remove the checkpoints of a run that are verified and superseded.

    What `watch` has not verified stays, and so does the last verified one, whatever comes after it, and what is linked,
    named by the trainer's own files, or in use.

    Raises:
        UsageError: Nothing says what to keep, or no checkpoint has the metric.
        UnreadableError: There are no checkpoints of a run.
        BusyError: Another ckpt manages the folder.
    """
    rules = rules_of(options, options.unverified)
    settings = Settings(rules=rules, level=None, quiet_s=options.settle, dry_run=options.dry_run)
    manager = _manager(options, options.directory, settings, say=options.say)
    if options.undo:
        return manager.undo([name for name in options.undo if name != "all"])
    if not rules.removes:
        raise UsageError("no retention rule given", hint="add --keep-last K, --keep-every N or --keep-best K")
    return _require(manager.once())


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchCall(WatchOptions):
    """The options of `watch`, and who is told of each look."""

    each: Annotated[
        Callable[[PruneResult], None] | None, Doc("Called after each look, until it ends by an exception.")
    ] = None


@takes(WatchCall, 'ckpt_tools.watch("run", once=True).last_fit', "'step-2'")
def watch(options: WatchCall) -> PruneResult:
    """Verify the checkpoints of a run as they come, and remove what is superseded; without `once`, for ever.

    Raises:
        UsageError: Options that contradict each other.
        UnreadableError: There is no such folder; with `once` or `status`, no checkpoints of a run.
        BusyError: With `once`, another ckpt manages the folder.
    """
    path = os.fspath(options.directory)
    if options.push is not None and options.gather is None and is_remote(path):
        raise UsageError("push needs a directory on this machine", hint="add --gather OUT")
    if options.assets is not None and options.gather is None:
        raise UsageError("--assets needs --gather", hint="add --gather OUT")
    settings = Settings(
        rules=rules_of(options),
        level=options.level,
        quiet_s=options.settle,
        num_workers=options.num_workers or default_num_workers(path),
        dry_run=options.status,
        send=_senders(options),
    )
    manager = _manager(options, path, settings, say=options.say, progress=options.progress)
    if options.once or options.status:
        return _require(manager.once())
    return _for_ever(manager, options)


def _for_ever(manager: RunManager, options: WatchCall) -> PruneResult:
    """Look again and again. What fails is told once, and tried again: the run goes on."""
    say = options.say or (lambda _: None)
    trouble = ""
    while True:
        try:
            pruned = manager.once(wait=False)
        except UsageError:
            raise
        except CkptError as error:
            if str(error) != trouble:
                say(f"{error}; retrying every {options.interval:g} s")
            trouble = str(error)
        else:
            trouble = ""
            if options.each is not None:
                options.each(pruned)
        time.sleep(options.interval)


def _require(pruned: PruneResult) -> PruneResult:
    """Refuse a folder without a checkpoint: it is hardly the one that is meant."""
    if not pruned.checkpoints:
        hint = "give the folder that holds checkpoint-N, step-N, global_step_N, *.ckpt or name_000000500.safetensors"
        raise UnreadableError("no trainer checkpoints in this folder", where=pruned.path, hint=hint)
    return pruned


def _senders(options: WatchOptions) -> dict[str, Callable[[str, str], None]]:
    """Return what brings a verified checkpoint to where it is wanted."""
    found: dict[str, Callable[[str, str], None]] = {}
    out = None if options.gather is None else os.fspath(options.gather)
    if out is not None:

        def gather_one(name: str, path: str) -> None:
            from ckpt_tools.checks.commands import verify
            from ckpt_tools.convert.commands import gather

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
            from ckpt_tools.hub.push import push

            directory = path if out is None else os.path.join(out, os.path.splitext(name)[0])
            result = push(directory, repo, commit_message=f"{name}, verified by ckpt")
            if not result.ok:
                raise CkptError("the push was refused, or the uploaded files differ from the local ones", where=repo)

        found[f"{repo} (hub)"] = push_one
    return found
