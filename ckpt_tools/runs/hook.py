"""Manage a run's checkpoints beside any training loop, in a process of its own: training never waits for it."""

from __future__ import annotations

import itertools
import math
import os
import sys
import threading
import time
import warnings
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, Self

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.runs.folder import BusyError, open_folder, place_of
from ckpt_tools.runs.manage import PruneResult, RunManager, Settings
from ckpt_tools.runs.retention import Rules
from ckpt_tools.sandbox.child import Child, Here
from ckpt_tools.storage.run_leases import leased

_DOES = "manages the run's checkpoints"
_POLL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TendingJob:
    """What to manage."""

    path: str
    names: tuple[str, ...] = ()  # What was saved, or is being saved
    settings: Settings
    patience_s: float  # For so long nothing changes before a save counts as given up


@dataclass(frozen=True, slots=True, kw_only=True)
class TendingAnswer:
    """What came of it."""

    findings: tuple[Finding, ...] = ()
    failed: tuple[str, ...] = ()
    last_verified: str = ""  # Path of the latest good one


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportJob:
    """What to export at the end."""

    source: str
    destination: str
    config: Mapping[str, object] | None


class BadCheckpointError(CkptError):
    """A checkpoint that the run has saved is not what it must be."""

    code = "bad-checkpoint"


class _StoppedError(Exception):
    """The run does not want to wait."""


class Tending:
    """Verifies what a run saves, and removes what is superseded; call it on every rank, rank 0 acts.

        with Tending("outputs/checkpoint", keep_last=3) as tending:
            for step, batch in enumerate(batches):
                train(batch)
                if step % 500 == 0:
                    dcp.async_save(state, checkpoint_id=f"outputs/checkpoint/step-{step}")
                    tending.saved(f"step-{step}")
                tending.check()

    A bad checkpoint is a warning, or an error with `on_finding="raise"`, at the next `check` or at the end; nothing is
    ever removed because of one. Leaving the `with` waits for the last verification, and after an error ends it.

    Args:
        directory: Folder that the run saves to.
        keep_last: As of `ckpt prune`, and so are the next four.
        keep_every: See there.
        keep_best: See there.
        metric: See there.
        greater_is_better: See there.
        level: As of `ckpt watch`.
        on_finding: What `check` does about a bad checkpoint. With "raise", make this on every rank: it makes a group.
        export_adapter: Directory to create at the end: the adapter of the last good checkpoint, for PEFT.
        model: Whose `peft_config` the exported adapter gets, beside what is stored; or such a config as a dict.
        resumed_from: Checkpoint that is held, by a lease, until the run ends.
        settle_s: For so many seconds a checkpoint must not have changed before it is read.
        patience_s: After so many seconds without any change a save that has not ended is a finding.
        rank: Of this process; by default that of torch.distributed, or RANK in the environment.

    Raises:
        UsageError: A setting that makes no sense.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: int | None = None,
        metric: str = "eval_loss",
        greater_is_better: bool | None = None,
        level: Literal["data", "values"] = "values",
        on_finding: Literal["warn", "raise"] = "warn",
        export_adapter: str | os.PathLike[str] | None = None,
        model: object = None,
        resumed_from: str | os.PathLike[str] | None = None,
        settle_s: float = 2.0,
        patience_s: float = 300.0,
        rank: int | None = None,
    ) -> None:
        for name, value in {"keep_last": keep_last, "keep_every": keep_every, "keep_best": keep_best}.items():
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")
        if level not in ("data", "values") or on_finding not in ("warn", "raise"):
            raise UsageError('level must be "data" or "values", on_finding "warn" or "raise"')
        rules = Rules(
            last=keep_last, every=keep_every, best=keep_best, metric=metric, greater_is_better=greater_is_better
        )
        settings = Settings(rules=rules, level=level, quiet_s=settle_s, patience_s=math.inf)
        self._job = TendingJob(path=os.fspath(directory), settings=settings, patience_s=patience_s)
        self._raises = on_finding == "raise"
        self._export = None if export_adapter is None else os.fspath(export_adapter)
        self._config = _live_config(model)
        self._acts = (rank if rank is not None else _rank()) == 0
        self._held = ExitStack()
        self._held.enter_context(leased(resumed_from or "", is_wanted=self._acts))
        self._change = threading.Condition()
        self._names: list[str] = []
        self._answers: list[TendingAnswer | CkptError] = []
        self._told: set[str] = set()
        self._last_verified = ""
        self._worker: threading.Thread | None = None
        self._is_wanted = self._ends = self._stops = False
        self._group = _group() if self._raises else None
        """Of all ranks, by which rank 0 tells what all raise."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(wait=kind is None)

    def saved(self, name: str = "", *, keep: Collection[str] | None = None) -> None:
        """Tell that a save has begun or ended; returns at once.

        `name` is the checkpoint's file or directory; it is needed where the save may not have begun to write. What is
        in `keep` the trainer points at: it stays until the next call.
        """
        if not self._acts:
            return
        with self._change:
            self._names += [os.path.basename(name.rstrip("/"))] if name else []
            if keep is not None:
                kept = tuple(os.path.basename(each.rstrip("/")) for each in keep)
                settings = self._job.settings
                settings = replace(settings, rules=replace(settings.rules, kept=kept))
                self._job = replace(self._job, settings=settings)
            self._is_wanted = True
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="ckpt-tending", daemon=True)
                self._worker.start()
            self._change.notify_all()

    def check(self) -> None:
        """Warn of, or raise, what was found since the last call; returns at once.

        `BadCheckpointError` is raised only where `on_finding` is "raise", and then on every rank, each of which calls
        this as often as the others.
        """
        with self._change:
            answers, self._answers = self._answers, []
        texts = []
        for answer in answers:
            if isinstance(answer, CkptError):
                self._warn(f"the run's checkpoints are not managed: {answer}")
                continue
            for failure in answer.failed:
                self._warn(failure)
            new = (each for each in answer.findings if each.where not in self._told)  # what is bad is so at every look
            texts += [f"{each.code}: {each.what} (at {each.where})" for each in new]
            self._told.update(each.where.partition("/")[0] for each in answer.findings)
        fresh = [text for text in dict.fromkeys(texts) if text not in self._told]
        self._told.update(fresh)
        if self._raises and (text := _told_to_all("; ".join(fresh), self._group)):
            raise BadCheckpointError(text, where=self._job.path, hint="earlier checkpoints are kept")
        for text in fresh:
            warnings.warn(f"bad checkpoint: {text}", RuntimeWarning, stacklevel=2)

    def close(self, *, wait: bool = True) -> None:
        """End: look at the folder a last time, export the adapter, and tell what was found.

        Without `wait`, what is under way is ended. `BadCheckpointError` is raised as by `check`.
        """
        if not self._acts and wait and not self._ends:
            self._ends = True
            self.check()
        if not self._acts or self._ends:
            return
        if wait:
            self.saved()
        with self._change:
            self._ends, self._stops = True, not wait
            self._change.notify_all()
        if self._worker is not None:
            self._worker.join()
        self._held.close()
        if wait:
            self._write_adapter()
            self.check()

    def _work(self) -> None:
        """Be the thread that starts a process whenever something was saved, one at a time."""
        while True:
            with self._change:
                self._change.wait_for(lambda: self._is_wanted or self._ends)
                if self._stops or not self._is_wanted:
                    return
                names, self._names, self._is_wanted = tuple(self._names), [], False
            try:
                answer: TendingAnswer | CkptError = self._call("tend", replace(self._job, names=names))
            except _StoppedError:
                return
            except CkptError as error:
                answer = error
            with self._change:
                self._answers.append(answer)
                if isinstance(answer, TendingAnswer):
                    self._last_verified = answer.last_verified or self._last_verified

    def _call(self, function: str, job: object) -> TendingAnswer:
        with Child(f"ckpt_tools.runs.hook:{function}", job, TendingAnswer, does=_DOES) as child:
            return child.result(None, on_wait=self._stop_if_wanted)

    def _stop_if_wanted(self) -> None:
        if self._stops:
            raise _StoppedError

    def _write_adapter(self) -> None:
        if self._export is None:
            return
        if not self._last_verified:
            self._warn("no adapter was exported: no checkpoint has been verified")
            return
        try:
            self._call("export", ExportJob(source=self._last_verified, destination=self._export, config=self._config))
        except CkptError as error:
            self._warn(f"no adapter was exported: {error}")

    def _warn(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            warnings.warn(text, RuntimeWarning, stacklevel=3)


def _live_config(model: Any) -> Mapping[str, object] | None:  # noqa: ANN401 - of a library that may not be there
    """Return the configuration of the active adapter of a model, or of a module in it; None without one."""
    if model is None or isinstance(model, Mapping):
        return model
    for module in model.modules():
        if configs := getattr(module, "peft_config", None):
            active = getattr(module, "active_adapter", None)
            name = active if isinstance(active, str) and active in configs else next(iter(configs))
            found: Mapping[str, object] = configs[name].to_dict()
            return found
    return None


def _group() -> Any:  # noqa: ANN401 - of a library that may not be there
    """Return a group of all ranks that needs no GPU and waits as long as a verification takes; None of one rank."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.new_group(backend="gloo", timeout=timedelta(days=1))


def _told_to_all(text: str, group: Any) -> str:  # noqa: ANN401 - as `_group` returns it
    """Return what rank 0 says, on every rank."""
    said = [text]
    if group is not None:
        sys.modules["torch.distributed"].broadcast_object_list(said, src=0, group=group)
    return said[0]


def _rank() -> int:
    """Return the rank of this process; torch is not imported for that."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    text = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    return int(text) if text.isdigit() else 0


# What the process beside the run does: it manages the folder until what was saved is settled


def tend(job: TendingJob, here: Here) -> TendingAnswer:
    """Manage the folder until everything that was saved is verified, or nothing more comes."""
    del here
    manager = RunManager(open_folder(job.path), job.settings)
    findings: dict[Finding, None] = {}
    before, since = None, time.monotonic()
    while True:
        try:
            pruned = manager.once(wait=False)
        except BusyError as error:  # a watch of somebody else's: it does the same
            if time.monotonic() - since > job.patience_s:
                return TendingAnswer(findings=tuple(findings), failed=(str(error),))
            time.sleep(_POLL_S)
            continue
        findings.update(dict.fromkeys(each for each in pruned.findings if each.severity == "error"))
        waiting = _waiting(pruned, job.names)
        now = [(each.name, each.state, each.nbytes) for each in pruned.checkpoints]
        if now != before:
            before, since = now, time.monotonic()
        if not waiting or time.monotonic() - since > job.patience_s:
            ends = (f"its save did not finish: {why}" for why in waiting.values())
            found = map(Finding.error, itertools.repeat("unfinished-checkpoint"), waiting, ends)
            last = os.path.join(pruned.path, pruned.last_fit) if pruned.last_fit else ""
            return TendingAnswer(findings=(*findings, *found), failed=pruned.failed, last_verified=last)
        time.sleep(_POLL_S)


def export(job: ExportJob, here: Here) -> TendingAnswer:
    """Write the adapter that a checkpoint holds."""
    from ckpt_tools.adapters.export import export_lora

    del here
    export_lora(job.source, job.destination, live_config=job.config)
    return TendingAnswer()


def _waiting(pruned: PruneResult, names: Collection[str]) -> dict[str, str]:
    """Return the saves that have not come to an end: name → why. What something later follows is not waited for."""
    found = {}
    there = {each.name: each for each in pruned.checkpoints}
    latest = {each.series: each for each in pruned.checkpoints}  # by step
    for name in {*names, *(each.name for each in latest.values())}:
        place, candidate = place_of(name), there.get(name)
        is_passed = place and place.series in latest and (place.step or 0) < (latest[place.series].step or -1)
        if place is None or is_passed:
            continue
        if candidate is None or candidate.state not in ("verified", "unfit", "bad", "unsupported"):
            found[name] = "no such checkpoint" if candidate is None else candidate.why or candidate.state
    return found
