"""A child process that loads checkpoints with stock libraries: mutants may crash or hang these, or take all memory."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import resource
import signal
import warnings
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Self

from formats.saved import Flat
from oracle.seeds import SEEDS

_TIMEOUT_S = 30
_MEMORY_BYTES = 2 << 30


class Stock:
    """Answers in turn; started anew when it has died."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")  # torch is imported already, and nothing else runs
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._pipe), daemon=True)
        self._process.start()
        theirs.close()

    def load(self, name: str, path: Path, keys: AbstractSet[str] | None = None) -> Flat | str:
        """Return what the stock library loads of a mutant of a seed, or what it raised or did."""
        self._pipe.send((name, str(path), keys))
        with contextlib.suppress(EOFError):
            if self._pipe.poll(_TIMEOUT_S):
                return self._pipe.recv()
        self.__exit__(None, None, None)
        self._start()
        return "crashed or hung"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _serve(pipe, parents) -> None:
    parents.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    warnings.simplefilter("ignore")
    logging.disable()
    while True:
        try:
            name, path, keys = pipe.recv()
        except EOFError:
            return
        try:
            answer: Flat | str = SEEDS[name].load(Path(path), keys)
        except BaseException as error:
            answer = f"{type(error).__name__}: {str(error).strip().splitlines()[-1:]}"[-200:]
        pipe.send(answer)
