"""Take part in torchrun's ranks: the same phases, in processes that are there already. Imports torch.

A thread in each rank watches it: when no phase ends for too long, or another rank has failed, it leaves what it knows
in torchrun's store, rank 0 reports, and the process ends. What no rank can tell, having died, the witness tells.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.processes import wire
from ckpt_tools.processes.hang import Place, describe_hang
from ckpt_tools.processes.journal import Event, Journal, RankLog, events_path
from ckpt_tools.processes.ranks import Outcome
from ckpt_tools.smoke.messages import Launch, Launched, OnPhase, Saved, tell
from ckpt_tools.smoke.options import SmokeOptions
from ckpt_tools.smoke.rank import run_rank
from ckpt_tools.smoke.report import SmokeReport, assemble, first_error
from ckpt_tools.smoke.setting import Setting, other_world, resolve
from ckpt_tools.smoke.witness import Witness, register
from ckpt_tools.walls import aside

OnReport = Callable[[SmokeReport], None]
RunLocal = Callable[[Launch], Launched]
"""Runs the world that reloads."""
_POLL_S = 0.2
_GRACE_S = 5.0
"""What the other ranks get to say what they know once one has failed."""
_EXIT_FINDINGS = 3


_LINGER_S = 20.0
"""How long torchrun is kept waiting for the witness; it kills after 30."""


def run_in_torchrun(
    options: SmokeOptions,
    *,
    witness: Witness | None,
    on_phase: OnPhase | None,
    on_abandoned: OnReport,
    run_local: RunLocal,
) -> SmokeReport:
    """Be one of torchrun's ranks.

    Args:
        options: The same on every rank.
        witness: On rank 0.
        on_phase: Told about this rank's phases.
        on_abandoned: Given the report on rank 0 when this process has to be ended, because its main thread hangs.
        run_local: Runs the world of another size.

    Returns:
        The report; `is_primary` on rank 0.

    Raises:
        CkptError: Options or a source that cannot be meant.
    """
    if dist.is_initialized():
        raise UsageError(
            "there is a process group already", hint="run smoke before it is made, or after it is destroyed"
        )
    setting = resolve(options, world_size=int(os.environ["WORLD_SIZE"]))
    store, rank, world_size = next(rendezvous("env://", timeout=timedelta(seconds=60)))
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    board = _Board(PrefixStore("ckpt-smoke", store), rank, world_size)
    directory = board.share("directory", "" if witness is None else witness.directory)
    is_shared = os.path.isdir(directory)
    journal = _ToldJournal(on_phase, events_path(directory, rank) if is_shared else None)
    if is_shared:
        register(directory, rank)
    guard = _Guard(board, journal, setting, witness, directory, on_abandoned)
    with guard.watching():
        done = run_rank(
            setting,
            rank=rank,
            num_local=num_local,
            local_rank=int(os.environ.get("LOCAL_RANK", rank)),
            directory=directory,
            journal=journal,
            store=PrefixStore("ckpt-smoke-group", store),
        )
        guard.stop()
        board.leave(journal.events, failed=not done)
        error = first_error({rank: RankLog(rank=rank, events=journal.events)})
        if error is not None:
            raise error
        left = board.collect(setting.timeout_s if done else _GRACE_S)
        if len(left) < world_size:
            guard.hand_over()
            guard.linger()
        outcome = Outcome(logs={number: each.log for number, each in left.items()})
        report = assemble(setting, outcome)
        if rank == 0 and done and not report.failed:
            report = _with_reload(setting, outcome, run_local)
        if witness is not None:
            if not witness.dismiss():
                guard.linger()
            board.say("reported")
        else:
            # Torchrun ends every process once one has failed: rank 0 speaks first.
            board.wait_for("reported", setting.timeout_s * 10 if done else setting.timeout_s)
        return replace(report, is_primary=rank == 0)


def _with_reload(setting: Setting, trained: Outcome, run_local: RunLocal) -> SmokeReport:
    """Return the report with the phase that needs ranks of its own, which the launcher starts."""
    reloading, why_not = other_world(setting, trained.logs[0])
    if reloading is None:
        return assemble(setting, trained, reload_skipped=why_not)
    saved = trained.logs[0].fact("saved", Saved)
    return assemble(setting, trained, run_local(Launch(options=reloading.options, saved=saved)).reloaded)


class _ToldJournal(Journal):
    """A journal whose phases somebody is told about."""

    def __init__(self, on_phase: OnPhase | None, path: str | None) -> None:
        super().__init__(path)
        self._on_phase = on_phase

    def _add(self, event: Event) -> None:
        super()._add(event)
        with aside():  # the caller's own code
            tell(self._on_phase, event)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Left:
    """What a rank leaves for the others."""

    log: RankLog
    stack: tuple[Place, ...] = ()
    """Of its main thread, innermost first, when it hung."""


class _Board:
    """Where ranks leave what others can read without their help: torchrun's store."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        # A connection of its own: a process group that waits in the store must not keep the watching thread out.
        clone = getattr(store, "clone", None)  # since torch 2.7, and not in its stubs
        self._store: Store = store if clone is None else clone()
        self._lock = threading.Lock()
        self.rank = rank
        self.world_size = world_size

    def say(self, key: str, value: str = "1") -> None:
        """Leave a text."""
        with self._lock:
            self._store.set(key, value)

    def read(self, key: str) -> str | None:
        """Return a text, None when it is not there."""
        with self._lock:
            if not self._store.check([key]):
                return None
            text: bytes = self._store.get(key)
        return text.decode()

    def wait_for(self, key: str, timeout_s: float) -> str | None:
        """Return a text as soon as it is there, None after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while (text := self.read(key)) is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return text

    def share(self, key: str, text: str) -> str:
        """Return rank 0's text on every rank."""
        if self.rank == 0:
            self.say(key, text)
        return self.wait_for(key, 60.0) or text  # without rank 0 the process group will fail, and say so

    def leave(self, events: list[Event], *, failed: bool, stack: tuple[Place, ...] = ()) -> None:
        """Leave everything that this rank knows."""
        left = _Left(log=RankLog(rank=self.rank, events=events), stack=stack)
        self.say(f"rank-{self.rank}", wire.dumps(left))
        if failed:
            self.say("failed")

    def collect(self, timeout_s: float) -> dict[int, _Left]:
        """Return rank → what it left, of those that leave something in time; rank 0 only."""
        deadline = time.monotonic() + timeout_s
        found: dict[int, _Left] = {}
        for rank in range(self.world_size):
            text = self.wait_for(f"rank-{rank}", max(0.0, deadline - time.monotonic()))
            if text:
                found[rank] = wire.loads(_Left, text)
        return found


class _Guard:
    """Watches the main thread of this rank from a thread of its own."""

    def __init__(
        self,
        board: _Board,
        journal: Journal,
        setting: Setting,
        witness: Witness | None,
        directory: str,
        on_abandoned: OnReport,
    ) -> None:
        self._board = board
        self._directory = directory
        self._witness = witness
        self._journal = journal
        self._setting = setting
        self._on_abandoned = on_abandoned
        self._is_over = threading.Event()
        self._main = threading.get_ident()

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

    def _listen(self, signals: int) -> None:
        while numbers := os.read(signals, 1):
            if numbers[0] == signal.SIGTERM:
                self.hand_over(is_stopped=True)
        os.close(signals)

    def _watch(self) -> None:
        timeout_s = self._setting.timeout_s
        seen, last = 0, time.monotonic()
        while not self._is_over.wait(_POLL_S):
            if len(self._journal.events) != seen:
                seen, last = len(self._journal.events), time.monotonic()
            elif time.monotonic() - last > timeout_s:
                self._abandon(is_hanging=True)
            if self._board.read("failed") is not None and not self._is_over.wait(_GRACE_S):
                self._abandon(is_hanging=False)

    def hand_over(self, *, is_stopped: bool = False) -> None:
        """Let the witness report, and end this process; do nothing where rank 0 reports already."""
        if self._witness is None or self._witness.ask(is_stopped=is_stopped):
            self.linger()

    def linger(self) -> NoReturn:
        """End the process once the witness has reported: torchrun, and what it runs in, end with its last rank."""
        deadline = time.monotonic() + _LINGER_S
        while os.path.isdir(self._directory) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        os._exit(_EXIT_FINDINGS)

    def _abandon(self, *, is_hanging: bool) -> None:
        """Leave what this rank knows, report on rank 0, and end the process, whatever its main thread does."""
        frame = sys._current_frames().get(self._main)  # noqa: SLF001 - documented, for debuggers
        frames = [] if frame is None else traceback.extract_stack(frame)[::-1]
        stack = tuple(Place(file=one.filename, line=str(one.lineno), name=one.name) for one in frames)
        self._board.leave(self._journal.events, failed=True, stack=stack)
        if self._witness is not None:
            found = self._board.collect(_GRACE_S)
            if not is_hanging and len(found) < self._board.world_size:
                self.hand_over()
            places = {rank: left.stack for rank, left in found.items()}
            stacks = {rank: "\n".join(map(str, frames)) for rank, frames in places.items() if frames}
            logs = {rank: RankLog(rank=rank) for rank in range(self._board.world_size)}
            outcome = Outcome(logs=logs | {rank: left.log for rank, left in found.items()}, stacks=stacks)
            if is_hanging and not any(log.has_said for log in outcome.logs.values()):
                running = {rank: bool(places.get(rank)) for rank in logs}
                hang = describe_hang(outcome.logs, places, running, self._setting.timeout_s)
                outcome.findings.append(hang.finding)
            if not self._witness.dismiss():
                self.linger()
            with suppress(CkptError), aside():
                self._on_abandoned(assemble(self._setting, outcome))
            sys.stdout.flush()
            sys.stderr.flush()
            self._board.say("reported")
        else:
            self._board.wait_for("reported", 2 * _GRACE_S)
        os._exit(_EXIT_FINDINGS)
