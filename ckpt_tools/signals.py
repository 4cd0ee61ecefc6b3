"""Let signals wait while something must not be left half told."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What people, schedulers and closing terminals send to end a process."""


@contextmanager
def hold_signals() -> Iterator[None]:
    """Hold back `STOP_SIGNALS` that have a handler in Python; the first that came is raised again at the end.

    Does nothing in other threads than the main one, because handlers run in that one alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        del frame
        held.append(number)

    before = {}
    try:
        for number in STOP_SIGNALS:
            handler = signal.getsignal(number)
            if callable(handler):
                before[number] = handler
                signal.signal(number, hold)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if held:
            signal.raise_signal(held[0])
