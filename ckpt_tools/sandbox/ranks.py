"""Ranks as children of this process: forked, watched, and ended, whatever happens."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.sandbox.child import Here, describe_end, die_with_parent
from ckpt_tools.sandbox.hang_report import MAX_STACK_CHARS, describe_hang, parse_stack
from ckpt_tools.sandbox.journal import Journal, RankLog, events_path, read_events

_POLL_S = 0.05
_GRACE_S = 4.0  # What the other ranks get to end once one has failed: mostly they wait for it


@dataclass(slots=True)
class RanksOutcome:
    """What became of a world."""

    logs: dict[int, RankLog]
    findings: list[Finding] = field(default_factory=list)
    stacks: dict[int, str] = field(default_factory=dict)  # After a hang
    has_parted: bool = False
    """Ranks waited for each other in different places, or aborted: gloo does when they send what does not fit."""
    has_lost_rank: bool = False  # A rank was ended from outside, or has crashed

    def add_ends(
        self, ended: Mapping[int, int | None], *, relief: str, tail: Callable[[int], str] = lambda _: ""
    ) -> None:
        """Take how ranks have ended: findings about those that have not told what is wrong themselves.

        `ended` has exit statuses or negative numbers of signals; None when nobody knows. A rank that gloo has aborted
        because another one was gone is no finding. `tail` returns the last line that a rank has printed.
        """
        silent = {
            rank: code
            for rank, code in ended.items()
            if not self.logs[rank].has_said and (code != 0 or self.logs[rank].phase is not None)
        }
        lost = {rank: code for rank, code in silent.items() if code != -signal.SIGABRT}
        self.has_lost_rank |= bool(lost)
        self.has_parted |= bool(silent) and not lost
        for rank, code in (lost or silent).items():
            how, hint = ("has ended", None) if code is None else describe_end(code, relief)
            phase = self.logs[rank].phase or self.logs[rank].last_phase or "start"
            said = tail(rank)
            what = f"the process {how}" + (f": {said}" if said else "")
            self.findings.append(Finding.error("rank-died", f"rank {rank}, phase {phase}", what, hint))


class World:
    """Ranks on this machine; use as a context, after which none is left.

    Args:
        directory: Private; the ranks' journals, stacks and output go there.
        world_size: Number of ranks.
        function: What a rank does, given its number and its journal; True for success.
        relief: What to do when the machine runs out of memory.
    """

    def __init__(
        self, directory: str, world_size: int, function: Callable[[int, Journal], bool], *, relief: str
    ) -> None:
        self._directory = directory
        self._world_size = world_size
        self._function = function
        self._relief = relief
        self._pids: dict[int, int] = {}
        self._status: dict[int, int] = {}
        os.makedirs(directory, exist_ok=True)

    def __enter__(self) -> Self:
        """Fork the ranks. Nothing may have started a thread in this process."""
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        try:
            for rank in range(self._world_size):
                pid = os.fork()
                if pid == 0:
                    self._be_rank(rank, parent)
                self._pids[rank] = pid
        except BaseException:  # the system forks no more, or somebody has lost patience
            self._kill()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._kill()

    def _be_rank(self, rank: int, parent: int) -> None:
        try:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
            die_with_parent(parent)
            log = os.open(self._file(rank, "log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            stacks = open(self._file(rank, "stacks"), "w", encoding="utf-8")  # noqa: SIM115 - as long as the process
            faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
            faulthandler.enable(file=stacks)
            done = self._function(rank, Journal(events_path(self._directory, rank)))
            sys.stderr.flush()
            # Without a farewell: after a failure the other ranks may never answer.
            os._exit(0 if done else 3)
        except BaseException:  # noqa: BLE001 - this process must not go on as its parent
            import traceback

            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)

    def watch(self, here: Here, *, timeout_s: float | None) -> RanksOutcome:
        """Wait until all ranks have ended, or one has failed and the others had their grace, or nobody goes on.

        Ranks count as hanging after `timeout_s` seconds without any event; None waits for ever.
        """
        outcome = RanksOutcome(logs=self._read_logs())
        last_count, last_event = -1, time.monotonic()
        deadline: float | None = None
        while self._collect():
            die_with_parent(here.parent, signal.SIGTERM)
            outcome.logs = self._read_logs()
            count = sum(len(log.events) for log in outcome.logs.values())
            now = time.monotonic()
            if count != last_count:
                last_count, last_event = count, now
            failed = any(self._status.values()) or any(log.failed for log in outcome.logs.values())
            if failed and deadline is None:
                deadline = now + _GRACE_S
            if deadline is not None and now > deadline:
                break
            if deadline is None and timeout_s is not None and now - last_event > timeout_s:
                self._add_hang(outcome, timeout_s)
                break
            time.sleep(_POLL_S)
        running = [rank for rank in self._pids if rank not in self._status]
        self._kill()
        outcome.logs = self._read_logs()
        ended = {rank: os.waitstatus_to_exitcode(s) for rank, s in self._status.items() if rank not in running}
        outcome.add_ends(ended, relief=self._relief, tail=self._tail)
        return outcome

    def _collect(self) -> bool:
        """Take note of the ranks that have ended; return whether one is left."""
        for rank, pid in self._pids.items():
            if rank not in self._status:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self._status[rank] = status
        return len(self._status) < len(self._pids)

    def _add_hang(self, outcome: RanksOutcome, timeout_s: float) -> None:
        running = {rank: rank not in self._status for rank in self._pids}
        for rank, is_running in running.items():
            if is_running:
                with suppress(ProcessLookupError):
                    os.kill(self._pids[rank], signal.SIGUSR1)
        time.sleep(0.3)
        for rank in running:
            with suppress(OSError), open(self._file(rank, "stacks"), encoding="utf-8", errors="replace") as file:
                outcome.stacks[rank] = file.read(MAX_STACK_CHARS)
        frames = {rank: parse_stack(text) for rank, text in outcome.stacks.items()}
        hang = describe_hang(outcome.logs, frames, running, timeout_s)
        outcome.findings.append(hang.finding)
        outcome.has_parted = not hang.culprits

    def _tail(self, rank: int) -> str:
        """Return the last line that a rank has printed."""
        with suppress(OSError), open(self._file(rank, "log"), encoding="utf-8", errors="replace") as file:
            lines = [line.strip() for line in file.read()[-4096:].splitlines() if line.strip()]
            return lines[-1][:300] if lines else ""
        return ""

    def _read_logs(self) -> dict[int, RankLog]:
        """Return what every rank has reported so far."""
        return {
            rank: RankLog(rank=rank, events=read_events(events_path(self._directory, rank)))
            for rank in range(self._world_size)
        }

    def _kill(self) -> None:
        """End every rank, and wait until it is gone."""
        for rank, pid in self._pids.items():
            if rank not in self._status:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                self._status[rank] = os.waitpid(pid, 0)[1]

    def _file(self, rank: int, name: str) -> str:
        return os.path.join(self._directory, f"rank-{rank}.{name}")
