"""Copies of a process that has imported torch and transformers: each builds one config in the sandbox of its own."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

STAND = "test.walls-stand"
"""In the log: from here on the walls stand."""
WATCHED = (
    STAND, "open", "import", "pickle.", "subprocess.", "socket.", "os.", "ctypes.dlopen", "shutil.", "pty.", "urllib.",
)  # fmt: skip
_OF_THE_WALLS = ("os.chdir", "os.listdir", "os.scandir", "os.walk")


def build_in_a_copy(build, config, *, foreign, log=None, where="config.json", timeout_s=60):
    """Fork; raise the walls there; build. Return what `children` would read, with "status", and "events" of the log."""
    with tempfile.TemporaryDirectory(prefix="ckpt-copy-") as scratch:
        stream = tempfile.TemporaryFile("w+", buffering=1) if log else None  # noqa: SIM115 - the copy writes to it
        pid = os.fork()
        if pid == 0:
            _be_copy(build, config, foreign, scratch, stream, where, timeout_s)
        _, status = os.waitpid(pid, 0)
        answer = {"status": os.waitstatus_to_exitcode(status)}
        path = Path(scratch, "result.json")
        if path.exists():
            answer |= json.loads(path.read_text())
        if stream is not None:
            stream.seek(0)
            answer["events"] = [json.loads(line) for line in stream]
            stream.close()
        return answer


def _be_copy(build, config, foreign, scratch, stream, where, timeout_s):
    import signal

    from ckpt_tools.errors import CkptError
    from ckpt_tools.sandbox.child import Here, build_in_sandbox
    from ckpt_tools.sandbox.wire import error_to_json

    try:
        signal.alarm(timeout_s)
        if stream is not None:
            sys.addaudithook(_logger(stream))
        here = Here(directory=scratch, parent=os.getppid())
        build_in_sandbox(here, subject="the model", where=where, foreign=foreign)
        sys.audit(STAND)
        try:
            result = {"result": build(config)}
        except CkptError as error:
            result = {"error": error_to_json(error)}
        except BaseException as error:
            result = {"raised": f"{type(error).__name__}: {error}"}
        Path(scratch, "result.json").write_text(json.dumps(result))
        os._exit(0)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(9)


def _logger(stream):
    def hook(event, args):
        if event.startswith(WATCHED) and event not in _OF_THE_WALLS:
            told = [
                arg if isinstance(arg, (str, int)) else os.fsdecode(arg) if isinstance(arg, bytes) else repr(arg)[:80]
                for arg in args[:3]
            ]
            os.write(stream.fileno(), (json.dumps([event, told]) + "\n").encode())

    return hook
