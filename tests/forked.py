"""Children of ckpt's that are forked from a rank which has imported torch and transformers, not started anew.

Everything else of them is what it is: their own session, walls, environment, job and answer. For tests that start many
and are about something else; `unit/test_children.py` and the commands' own tests start them as ckpt does.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import IO, ParamSpec, TypeVar
from unittest.mock import patch

from fsdp2.ranks import run_ranks

from ckpt_tools import cli
from ckpt_tools.errors import CkptError
from ckpt_tools.sandbox import child
from ckpt_tools.sandbox.wire import error_from_json, error_to_json

P = ParamSpec("P")
T = TypeVar("T")
_TIMEOUT_S = 120


class _Forked:
    """What `Child` needs of a `Popen`."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stdin: int,
        stdout: IO[bytes],
        stderr: IO[bytes],
        env: Mapping[str, str],
        start_new_session: bool,
    ) -> None:
        assert start_new_session
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                os.dup2(stdout.fileno(), 1)
                os.dup2(stderr.fileno(), 2)
                os.environ.clear()
                os.environ.update(env)
                with open(os.path.join(command[-1], "job.json"), encoding="utf-8") as file:
                    child.serve(command[-1], json.load(file))
            finally:
                os._exit(0)

    def wait(self) -> int:
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


@contextmanager
def forked_children() -> Iterator[None]:
    """Fork them; for processes that nobody else uses, and before anything runs backward there."""
    with patch(f"{child.__name__}.subprocess.Popen", _Forked):
        yield


def main(argv: Sequence[str]) -> int:
    """Run a command in a rank, with what it starts forked there; return its exit code."""
    ((code, out, err),) = run_ranks(1, _main, argv, backend=None, timeout=_TIMEOUT_S)
    sys.stdout.write(out)
    sys.stderr.write(err)
    return code


def _main(rank: int, world_size: int, argv: list[str]) -> tuple[int, str, str]:
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err, forked_children():
        code = cli.main(argv)
    return code, out.getvalue(), err.getvalue()


def call(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in a rank, with what it starts forked there.

    Raises:
        CkptError: What it raised.
    """
    ((found, parts, notes),) = run_ranks(1, _call, function, args, kwargs, backend=None, timeout=_TIMEOUT_S)
    if parts is None:
        return found
    error = error_from_json(parts)
    for note in notes:
        error.add_note(note)
    raise error


def _call(rank: int, world_size: int, function: Callable[..., object], args: tuple, kwargs: dict) -> tuple:
    with forked_children():
        try:
            return function(*args, **kwargs), None, ()
        except CkptError as error:
            return None, error_to_json(error), getattr(error, "__notes__", ())
