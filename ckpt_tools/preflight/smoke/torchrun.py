"""Take part in torchrun's ranks: the same phases, in processes that are there already. Imports torch.

Every rank keeps its journal in a directory that all share. A thread in each one watches it: when no phase ends for too
long, or another rank has failed, it leaves where its main thread is, the watchdog reports, and the process ends.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from ckpt_tools.errors import UsageError
from ckpt_tools.preflight.smoke.messages import Launched, LaunchJob, OnPhase, SavedWorld, tell
from ckpt_tools.preflight.smoke.options import SmokeOptions
from ckpt_tools.preflight.smoke.rank import run_rank
from ckpt_tools.preflight.smoke.report import SmokeReport, assemble, first_error
from ckpt_tools.preflight.smoke.setting import SmokeSetting, other_world, resolve
from ckpt_tools.preflight.smoke.watchdog import HUNG, STACK, Watchdog, read_logs, register
from ckpt_tools.sandbox.audit import aside
from ckpt_tools.sandbox.hang_report import StackFrame
from ckpt_tools.sandbox.journal import Event, Journal, RankLog, events_path, read_events
from ckpt_tools.sandbox.ranks import RanksOutcome

RunLocal = Callable[[LaunchJob], Launched]  # Runs the world that reloads
_POLL_S = 0.2
_GRACE_S = 5.0  # What the other ranks get to say what they know once one has failed
_EXIT_FINDINGS = 3
_LINGER_S = 20.0  # How long torchrun is kept waiting for the watchdog; it kills after 30


def run_in_torchrun(
    options: SmokeOptions, *, watchdog: Watchdog | None, on_phase: OnPhase | None, run_local: RunLocal
) -> SmokeReport:
    """Be one of torchrun's ranks; `watchdog`, on rank 0, reports when some rank hangs or has died."""
    if dist.is_initialized():
        raise UsageError(
            "a process group already exists", hint="run smoke before it is created, or after it is destroyed"
        )
    setting = resolve(options, world_size=int(os.environ["WORLD_SIZE"]))
    store, rank, world_size = next(rendezvous("env://", timeout=timedelta(seconds=60)))
    shared = PrefixStore("ckpt-smoke", store)
    if watchdog is not None:
        shared.set("directory", watchdog.directory)
    directory = shared.get("directory").decode()
    if not os.path.isdir(directory):
        raise UsageError(
            f"rank {rank} does not see {directory}, which rank 0 created",
            hint="set TMPDIR to a directory that all machines share",
        )
    journal = _ToldJournal(on_phase, events_path(directory, rank))
    register(directory, rank)
    guard = _Guard(directory, rank, world_size, journal, setting.timeout_s, watchdog)
    with guard.watching():
        done = run_rank(
            setting,
            rank=rank,
            num_local=int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
            local_rank=int(os.environ.get("LOCAL_RANK", rank)),
            directory=directory,
            journal=journal,
            store=PrefixStore("ckpt-smoke-group", store),
        )
        guard.stop()
        guard.leave(failed=not done)
        own = RankLog(rank=rank, events=read_events(events_path(directory, rank)))
        error = first_error({rank: own})
        if watchdog is None:
            # Torchrun ends every process once one has failed: rank 0 speaks first, and goes with the directory.
            guard.wait_for_report(_GRACE_S if error else setting.timeout_s * (10 if done else 1))
        if error is not None:
            raise error
        if watchdog is None:
            return replace(assemble(setting, RanksOutcome(logs={rank: own})), is_primary=False)
        if not guard.has_all(setting.timeout_s if done else _GRACE_S):
            guard.hand_over()
        outcome = RanksOutcome(logs=read_logs(directory, world_size))
        report = assemble(setting, outcome)
        if done and not report.failed:
            report = _with_reload(setting, outcome, run_local)
        if not watchdog.dismiss():
            guard.linger()
        return report


def _with_reload(setting: SmokeSetting, trained: RanksOutcome, run_local: RunLocal) -> SmokeReport:
    """Return the report with the phase that needs ranks of its own, which the launcher starts."""
    reloading, why_not = other_world(setting, trained.logs[0])
    if reloading is None:
        return assemble(setting, trained, reload_skipped=why_not)
    saved = trained.logs[0].fact("saved", SavedWorld)
    return assemble(setting, trained, run_local(LaunchJob(options=reloading.options, saved=saved)).reloaded)


class _ToldJournal(Journal):
    """A journal whose phases somebody is told about."""

    def __init__(self, on_phase: OnPhase | None, path: str | None) -> None:
        super().__init__(path)
        self._on_phase = on_phase

    def _add(self, event: Event) -> None:
        super()._add(event)
        with aside():  # the caller's own code
            tell(self._on_phase, event)


@dataclass
class _Guard:
    """Watches the main thread of this rank from a thread of its own."""

    _directory: str
    _rank: int
    _world_size: int
    _journal: Journal
    _timeout_s: float
    _watchdog: Watchdog | None
    _is_over: threading.Event = field(default_factory=threading.Event)
    _main: int = field(default_factory=threading.get_ident)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch, and take the signal by which torchrun ends its ranks: the main thread may never come to see it."""
        threading.Thread(target=self._watch, daemon=True).start()
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals, written = os.pipe()
        os.set_blocking(written, False)
        previous = signal.signal(signal.SIGTERM, lambda *_: None)
        old = signal.set_wakeup_fd(written, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, args=(signals,), daemon=True).start()
        try:
            yield
        finally:
            self._is_over.set()
            signal.set_wakeup_fd(old)
            signal.signal(signal.SIGTERM, previous)
            os.close(written)

    def stop(self) -> None:
        """The main thread has come to an end."""
        self._is_over.set()

    def leave(self, *, failed: bool) -> None:
        """Say that the journal has everything that this rank knows."""
        for name in ("failed", f"rank-{self._rank}.left")[not failed :]:
            with open(os.path.join(self._directory, name), "w", encoding="utf-8"):
                pass

    def has_all(self, timeout_s: float) -> bool:
        """Wait until every rank has left what it knows; return False when one has not."""
        names = [os.path.join(self._directory, f"rank-{rank}.left") for rank in range(self._world_size)]
        return _wait(lambda: all(map(os.path.exists, names)), timeout_s)

    def wait_for_report(self, timeout_s: float) -> None:
        """Wait until rank 0 or the watchdog has everything: the directory goes with it."""
        _wait(lambda: not os.path.isdir(self._directory), timeout_s)

    def hand_over(self, *, is_stopped: bool = False) -> None:
        """Let the watchdog report, and end this process; do nothing where rank 0 reports already."""
        if self._watchdog is None or self._watchdog.ask(is_stopped=is_stopped):
            self.linger()

    def linger(self) -> NoReturn:
        """End the process once the watchdog has reported: torchrun, and what it runs in, end with its last rank."""
        self.wait_for_report(_LINGER_S)
        os._exit(_EXIT_FINDINGS)

    def _listen(self, signals: int) -> None:
        while numbers := os.read(signals, 1):
            if numbers[0] == signal.SIGTERM:
                self.hand_over(is_stopped=True)
        os.close(signals)

    def _watch(self) -> None:
        seen, last = 0, time.monotonic()
        failed = os.path.join(self._directory, "failed")
        while not self._is_over.wait(_POLL_S):
            if len(self._journal.events) != seen:
                seen, last = len(self._journal.events), time.monotonic()
            elif time.monotonic() - last > self._timeout_s:
                self._journal.fact(HUNG, self._timeout_s)
                self._abandon()
            if os.path.exists(failed) and not self._is_over.wait(_GRACE_S):
                self._abandon()

    def _abandon(self) -> None:
        """Leave what this rank knows, and end the process, whatever its main thread does."""
        frame = sys._current_frames().get(self._main)  # noqa: SLF001 - documented, for debuggers
        frames = [] if frame is None else traceback.extract_stack(frame)[::-1]
        self._journal.fact(
            STACK, tuple(StackFrame(file=one.filename, line=str(one.lineno), name=one.name) for one in frames)
        )
        self.leave(failed=True)
        if self._watchdog is not None:
            self.has_all(_GRACE_S)
        self.hand_over()


def _wait(is_there: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not is_there():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True
