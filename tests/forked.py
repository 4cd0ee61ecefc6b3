"""Children of ckpt's that are forked from a rank which has imported torch and transformers, not started anew.

Everything else of them is what it is: their own session, walls, environment, job and answer. For tests that start many
and are about something else; `unit/test_children.py` and the commands' own tests start them as ckpt does.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO
from unittest.mock import patch

from ckpt_tools.processes import child


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
    with patch.object(child.subprocess, "Popen", _Forked):
        yield
