"""A child process that loads checkpoints with stock libraries: mutants may crash or hang these, or take all memory."""

from __future__ import annotations

import logging
import multiprocessing
import os
import resource
import sys
import warnings
from collections.abc import Set as AbstractSet
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from formats.saved import Flat
from oracle.seeds import load

_TIMEOUT_S = 30
_MEMORY_BYTES = 2 << 30


class Stock:
    """Answers in turn; started anew when it has died."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("fork")  # torch is imported already
        self._pool = ProcessPoolExecutor(1, context, initializer=_confine)

    def load(self, path: Path, keys: AbstractSet[str] | None = None) -> Flat | str:
        """Return what the stock library loads, or what it raised or did."""
        try:
            return self._pool.submit(_answer, path, keys).result(_TIMEOUT_S)
        except (BrokenProcessPool, TimeoutError):
            for process in list(self._pool._processes.values()):
                process.kill()
            self.close()
            self.__init__()
            return "crashed or hung"

    def close(self) -> None:
        """End the process."""
        self._pool.shutdown()


def _confine() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    warnings.simplefilter("ignore")
    logging.disable()
    # CPython 3.11 prints a SystemError here for a bytearray that a mutated `.metadata` makes too large (BYTEARRAY8):
    # it reads the exports of an object that it could not allocate. `_answer` returns the MemoryError.
    sys.excepthook = lambda *_: None


def _answer(path: Path, keys: AbstractSet[str] | None) -> Flat | str:
    try:
        return load(path, keys)
    except BaseException as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[-1:]}"[-200:]
