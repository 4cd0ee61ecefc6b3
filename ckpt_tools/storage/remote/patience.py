"""How long an outage of a store may last, and telling people that a store keeps them waiting.

Time decides, not tries. obstore tries again by itself and reports nothing meanwhile, so requests are watched from
outside: a thread looks at those that are under way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

DEFAULT_S = 170.0
LATE_S = 5.0  # Without an answer, people are told
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.5, 10.0
_LOOK_S = 1.0
_SLOW_S = {"GET": 30.0, "PUT": 30.0}  # A part of an object takes time on a slow network

_lock = threading.Lock()
_seconds = DEFAULT_S
_say: Callable[[str], None] = lambda _: None  # noqa: E731 - the library says nothing
_under_way: dict[object, tuple[float, str, str]] = {}  # Request → when it began, verb, store
_late: set[str] = set()  # Stores of which it was said that they do not answer
_watcher: threading.Thread | None = None


def set_patience(seconds: float, say: Callable[[str], None]) -> None:
    """Set for how long a request is tried again, for all that this process opens from now on, and who is told."""
    global _seconds, _say
    _seconds, _say = seconds, say


def patience_s() -> float:
    """Return the seconds for which a request is tried again."""
    return _seconds


def pause_s(tries: int, asked_s: float = 0.0) -> float:
    """Return the pause after so many tries that gained nothing; a server may ask for a longer one."""
    return max(min(_FIRST_PAUSE_S * 2.0 ** min(tries, 10), _LAST_PAUSE_S), asked_s)


def tell_late(store: str, waited_s: float) -> None:
    """Say once that a store keeps people waiting."""
    with _lock:
        if waited_s < LATE_S or store in _late:
            return
        _late.add(store)
    _say(f"{store} does not answer; it is asked again for up to {_seconds:.0f} s (--patience)")


def tell_answer(store: str) -> None:
    """Say that a store answers again, if it was late."""
    with _lock:
        if store not in _late:
            return
        _late.remove(store)
    _say(f"{store} answers again")


@contextmanager
def watched(verb: str, store: str) -> Iterator[None]:
    """Watch a request of obstore's, whose tries nobody sees: it is late when it takes too long."""
    global _watcher  # noqa: PLW0603
    request = object()
    with _lock:
        _under_way[request] = (time.monotonic(), verb, store)
        if _watcher is None:
            _watcher = threading.Thread(target=_watch, name="ckpt-store-watch", daemon=True)
            _watcher.start()
    try:
        yield
        tell_answer(store)
    finally:
        with _lock:
            del _under_way[request]


def _watch() -> None:
    global _watcher  # noqa: PLW0603
    while True:
        time.sleep(_LOOK_S)
        with _lock:
            requests = list(_under_way.values())
            if not requests:
                _watcher = None
                return
        for began, verb, store in requests:
            waited_s = time.monotonic() - began
            if waited_s > _SLOW_S.get(verb, LATE_S):
                tell_late(store, waited_s)
