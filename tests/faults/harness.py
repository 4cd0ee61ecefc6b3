"""Commands under fault: what is asked of the server, and what must hold whatever happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from samples import files_of, staging_left

SERVER = Path(__file__).parent / "server.py"
MAX_CASE_SECONDS = 60


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    code: int
    """Exit code; a negative number is the signal that ended it."""
    out: str
    err: str
    hit: str
    """Kind and path of the call that was hit; empty when none was."""
    count: int
    """Calls that counted; -1 when the process was killed."""
    calls: list[str]
    """Kind and path of every call that counted, when asked for."""

    @property
    def said(self) -> str:
        """Everything that it printed."""
        return self.out + self.err


def request(
    *argv: object,
    below: Path | str = "",
    only: str = "",
    nth: int = 0,
    error: int = 0,
    signal_number: int = 0,
    on: bool = False,
    short: int = 0,
    free: int = -1,
    deny: str = "",
    trace: bool = False,
    limits: dict[str, int] | None = None,
    uid: int = 0,
    block_bytes: int = 0,
) -> dict:
    """A command for the server.

    The `nth` file call below `below` fails with `error`, or the process gets a signal there; `only` names the kinds of
    calls that count, `on` hits all later ones as well. Calls in `deny` ("flock=37") always fail. Reads and writes move
    at most `short` bytes, `free` bytes are said to be free. `limits` are resource limits by name (RLIMIT_AS beyond
    what is in use), `uid` whom to be, `block_bytes` the size of blocks.
    """
    return {
        "argv": [str(argument) for argument in argv],
        "below": str(below),
        "only": only,
        "nth": nth,
        "errno": error,
        "signal": int(signal_number),
        "on": on,
        "short": short,
        "free": free,
        "deny": deny,
        "trace": trace,
        "limits": limits or {},
        "uid": uid,
        "block_bytes": block_bytes,
    }


class Server:
    """A process with the shim preloaded that forks one process per command."""

    def __init__(self, shim: Path, warm_up: list[list[str]]) -> None:
        environment = os.environ | {"LD_PRELOAD": str(shim), "CKPT_PROGRESS": "none"}
        self._process = subprocess.Popen(
            [sys.executable, str(SERVER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        )
        self._ask(warm_up)

    def _ask(self, request: object) -> dict:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the server has died"
        return json.loads(answer)

    def run(self, *argv: object, while_stopped: Callable[[], Iterable[int] | None] | None = None, **fault) -> Result:
        """Run a command under a fault (see `request`).

        With `while_stopped`, the process is stopped at the call that is hit, `while_stopped` called (it may return
        signals to send), and continued.
        """
        if while_stopped is not None:
            fault["signal_number"] = signal.SIGSTOP
        answer = self._ask(request(*argv, **fault))
        while "stopped" in answer:
            assert while_stopped is not None
            answer = self._ask([int(number) for number in while_stopped() or ()])
        return Result(**answer)

    def run_crowd(self, requests: list[dict]) -> list[Result]:
        """Run several commands at the same time."""
        return [Result(**answer) for answer in self._ask(requests)["results"]]

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=MAX_CASE_SECONDS)


# Every kind that a run needs: which of them exist beside these is up to libc.
MOVING = "open read write fallocate ftruncate fsync rename renameat2 mkdir unlink flock"
LOOKING = "stat list statvfs"


def assert_told(result: Result, *, names_file: bool = True) -> None:
    """A failed command says so in words, with a place, and never with a traceback."""
    assert "Traceback" not in result.said, result
    assert "bug in ckpt" not in result.said, result
    if result.code == 130:
        assert "interrupted" in result.err, result
    elif result.code > 0:
        assert "error: " in result.err, result
        assert not names_file or "   at: " in result.err, result


def assert_complete(destination: Path, expected: dict[str, str]) -> None:
    """The destination is complete: the very files of a reference, which `verify --level data` has passed."""
    assert files_of(destination, manifest=True) == expected


def assert_clean(parent: Path, allowed: int = 0) -> None:
    """No more staging directories than `allowed`, and nothing else that is hidden."""
    left = staging_left(parent)
    assert len(left) <= allowed, left
    assert sorted(name for name in os.listdir(parent) if name.startswith(".")) == sorted(left)
