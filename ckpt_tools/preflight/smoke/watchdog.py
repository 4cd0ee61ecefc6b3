"""A process beside torchrun's that reports when rank 0 cannot.

Gloo aborts a rank whose neighbour dies, and torchrun ends every rank as soon as one has failed. The watchdog is forked
by rank 0 before torch is imported, and is in no process group of torchrun's. It sees how the ranks of this machine end,
and reads their journals, which lie in a directory that all ranks share.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

from ckpt_tools.preflight.smoke.messages import RELIEF
from ckpt_tools.sandbox.hang_report import StackFrame, describe_hang
from ckpt_tools.sandbox.journal import RankLog, events_path, read_events
from ckpt_tools.sandbox.ranks import RanksOutcome

STACK, HUNG = "stack", "hung"
"""Facts of a rank that has given up: frames of its main thread, and after how many seconds without any event."""
Speak = Callable[[RanksOutcome, str], None]  # Report what became of the ranks, given their directory
_DONE, _STOPPED, _HELP = b"d", b"s", b"h"
_POLL_S = 0.1
_GRACE_S = 4.0  # What the other ranks get to end once one has
_STOPPED_S = 1.0  # The same when torchrun ends them: whoever was first has ended before
_INTERRUPTED = (130, 143, -signal.SIGINT, -signal.SIGTERM)  # How a rank ends that somebody has stopped


def register(directory: str, rank: int) -> None:
    """Tell the watchdog which process a rank is."""
    path = os.path.join(directory, f"rank-{rank}.pid")
    with open(path + ".new", "w", encoding="utf-8") as file:
        file.write(f"{os.getpid()} {socket.gethostname()}")
    os.replace(path + ".new", path)


class Watchdog:
    """The watchdog's handle in rank 0, made while nothing has started a thread; `speak` is called in the watchdog."""

    def __init__(self, world_size: int, speak: Speak) -> None:
        self._lock = threading.Lock()
        self._has_word = False
        self.directory = tempfile.mkdtemp(prefix="ckpt-smoke-")
        heard, self._told = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._told)
                os.setsid()
                _watch(self.directory, world_size, heard, speak)
            except BaseException:  # noqa: BLE001 - this process must not go on as its parent
                traceback.print_exc()
            finally:
                shutil.rmtree(self.directory, ignore_errors=True)
                os._exit(0)
        os.close(heard)

    def dismiss(self) -> bool:
        """Say that rank 0 reports itself; return False when the watchdog does so already."""
        return self._tell(_DONE)

    def ask(self, *, is_stopped: bool) -> bool:
        """Let the watchdog report and wait for it; return False when it was dismissed or asked before.

        `is_stopped`: torchrun ends the ranks, because one has failed or because somebody has stopped torchrun itself.
        """
        return self._tell(_STOPPED if is_stopped else _HELP)

    def _tell(self, word: bytes) -> bool:
        with self._lock:
            if self._has_word:
                return False
            self._has_word = True
        with suppress(OSError):
            os.write(self._told, word)
        os.waitpid(self._pid, 0)
        return True


def _watch(directory: str, world_size: int, heard: int, speak: Speak) -> None:
    ranks: dict[int, tuple[int, int]] = {}
    ended: dict[int, int | None] = {}
    word = None
    deadline = float("inf")
    while time.monotonic() < deadline and len(ended) < world_size:
        for rank in range(world_size):
            if rank not in ranks and (found := _find(directory, rank)) is not None:
                ranks[rank] = found
        waiting = {handle: rank for rank, (_, handle) in ranks.items() if rank not in ended}
        ready, _, _ = select.select([*([heard] if word is None else []), *waiting], [], [], _POLL_S)
        for handle in ready:
            if handle == heard:
                word = os.read(heard, 1)  # nothing: rank 0 is gone
                if word == _DONE:
                    return
                deadline = time.monotonic() + (_STOPPED_S if word == _STOPPED else _GRACE_S)
            else:
                rank = waiting[handle]
                ended[rank] = _exit_code(ranks[rank][0])
                if rank == 0:
                    deadline = time.monotonic() + _GRACE_S
    outcome = RanksOutcome(logs=read_logs(directory, world_size))
    is_stopped = word == _STOPPED or any(code in _INTERRUPTED for code in ended.values())
    outcome.add_ends({rank: code for rank, code in ended.items() if code not in _INTERRUPTED}, relief=RELIEF)
    if not outcome.findings and not any(log.has_said for log in outcome.logs.values()):
        if is_stopped:
            return
        _add_hang(outcome)
    speak(outcome, directory)


def read_logs(directory: str, world_size: int) -> dict[int, RankLog]:
    """Return what every rank has reported so far."""
    ranks = range(world_size)
    return {rank: RankLog(rank=rank, events=read_events(events_path(directory, rank))) for rank in ranks}


def _add_hang(outcome: RanksOutcome) -> None:
    """Say where the ranks are that do not go on."""
    places = {rank: log.fact(STACK, tuple[StackFrame, ...]) or () for rank, log in outcome.logs.items()}
    outcome.stacks = {rank: "\n".join(map(str, frames)) for rank, frames in places.items() if frames}
    hung = [seconds for log in outcome.logs.values() if (seconds := log.fact(HUNG, float)) is not None]
    hang = describe_hang(outcome.logs, places, dict.fromkeys(outcome.logs, True), max(hung, default=_GRACE_S))
    outcome.findings.append(hang.finding)
    outcome.has_parted = not hang.culprits


def _find(directory: str, rank: int) -> tuple[int, int] | None:
    """Return a rank's process, and a handle that is ready when it ends; None while it is not known, or elsewhere."""
    try:
        with open(os.path.join(directory, f"rank-{rank}.pid"), encoding="utf-8") as file:
            pid, host = file.read().split(" ", 1)
        return (int(pid), os.pidfd_open(int(pid))) if host == socket.gethostname() else None
    except (OSError, AttributeError):  # only Linux has such handles
        return None


def _exit_code(pid: int) -> int | None:
    """Return how a process has ended; None when its parent was faster to ask."""
    with suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return os.waitstatus_to_exitcode(int(file.read().rpartition(")")[2].split()[-1]))
    return None
