"""Threads that share a queue of work: the first error of any is the error of all."""

from __future__ import annotations

import mmap
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from ckpt_tools.errors import StorageError

U = TypeVar("U")

_STACK_BYTES = 8 << 20  # Address space of a thread's stack where nobody has set another
_THREAD_BYTES = 4 << 20  # Address space that Python takes for a thread beside its stack

_NUMPY_BYTES = 96 << 20  # Address space of numpy's libraries, and of OpenBLAS's one buffer

_POLL_S = 0.0001
_WINDOW = 4
"""Units that may be under way for every worker, the finished ones that came after an unfinished one among them."""


def make_room_for_numpy() -> None:
    """Raise `MemoryError` where numpy would not find the address space for its import: OpenBLAS ends the process."""
    if "numpy" not in sys.modules:
        try:
            mmap.mmap(-1, _NUMPY_BYTES).close()
        except OSError as error:
            raise MemoryError from error


class Crew(Generic[U]):
    """Threads that take units of work until none is left or one has failed; one thread at a time asks for a unit.

    Every thread calls `begin` once, which returns what does one unit, with whatever memory that thread keeps. Nobody
    runs far ahead of a unit that takes long: what is written to a store in the order of the units waits for it.
    """

    def __init__(self, units: Iterator[U], begin: Callable[[], Callable[[U], None]]) -> None:
        self._units = units
        self._begin = begin
        self._lock = threading.Lock()
        self._moved = threading.Condition(self._lock)
        self._errors: list[BaseException] = []
        self._window = 0
        self._next = 0
        """Number of the next unit."""
        self._oldest = 0
        """Number of the first unit that is not finished."""
        self._finished: set[int] = set()
        """Of those after it."""
        self._all_started = False
        """A plain flag: an interrupt in the middle of setting an Event would leave everybody waiting for ever."""

    def run(self, num_workers: int) -> None:
        """Work until nothing is left; raise the first error of any thread."""
        threads: list[threading.Thread] = []
        self._all_started = num_workers == 1  # who is alone takes it from nobody
        self._window = _WINDOW * num_workers
        try:
            try:
                for i in range(num_workers):
                    thread = threading.Thread(target=self._work, name=f"ckpt-{i}")
                    if not _start(thread, needed=not threads):
                        break
                    threads.append(thread)
            finally:
                self._all_started = True
            for thread in threads:
                thread.join()
        except BaseException as error:  # Ctrl-C: let the workers finish their unit and go
            self._errors.append(error)
            self._all_started = True
            for thread in threads:
                thread.join()
            raise
        if self._errors:
            raise self._errors[0]

    def _work(self) -> None:
        while not self._all_started:  # until then nobody takes the memory that the others start with
            time.sleep(_POLL_S)
        try:
            do = self._begin()
            number = None
            while True:
                with self._lock:  # once for every unit: this one is finished, give me another
                    if number is not None:
                        self._finish(number)
                    while not self._errors and self._next - self._oldest >= self._window:
                        self._moved.wait()
                    if self._errors:
                        return
                    try:
                        unit = next(self._units)
                    except StopIteration:
                        return
                    number = self._next
                    self._next += 1
                do(unit)
        except BaseException as error:  # noqa: BLE001 - any worker's error is the run's error
            with self._lock:
                self._errors.append(error)
                self._moved.notify_all()

    def _finish(self, number: int) -> None:
        if number != self._oldest:
            self._finished.add(number)
            return
        self._oldest += 1
        while self._oldest in self._finished:
            self._finished.remove(self._oldest)
            self._oldest += 1
        self._moved.notify_all()


def _start(thread: threading.Thread, *, needed: bool) -> bool:
    """Start a worker; False when the system gives no more threads and it is not `needed`, else an error."""
    try:
        # A thread that finds no memory to begin with leaves `start` waiting for ever (CPython 3.11): ask before.
        mmap.mmap(-1, (threading.stack_size() or _STACK_BYTES) + _THREAD_BYTES).close()
        thread.start()
    except (RuntimeError, OSError) as error:
        if needed:
            what = "cannot start a thread: the system's limit of threads or of memory is reached"
            raise StorageError(what, hint="raise it (ulimit -u, -v), or see docs/how-it-works.md#limits") from error
        return False
    return True
