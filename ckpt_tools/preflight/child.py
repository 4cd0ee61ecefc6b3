"""Run one function that needs torch in a process of its own: the caller stays light, and nothing of it is left."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from ckpt_tools.errors import CkptError, LimitError, StorageError, UnreadableError, UsageError

TIMEOUT_S = 300.0
"""What a call may take. It builds a model on the meta device, reads headers, and perhaps counts memory."""
_BOOT = """
import json, sys
with open(sys.argv[1] + "/job.json") as file:
    job = json.load(file)
sys.path[:] = job["path"]
from ckpt_tools.preflight.child import serve
serve(sys.argv[1], job)
"""
_CLASSES: Mapping[str, type[CkptError]] = {
    kind.__name__: kind for kind in (CkptError, StorageError, UsageError, UnreadableError, LimitError)
}


class Child:
    """A call of "module:function" in a process of its own; use as a context, which ends it whatever happens.

    The process has one thread for computing, no network for model hubs, and writes below a directory that is removed.

    Args:
        function: A function of this package that takes one mapping, of what JSON holds, and returns one.
        job: Its argument.
    """

    def __init__(self, function: str, job: Mapping[str, object]) -> None:
        self._function = function
        self._directory = tempfile.TemporaryDirectory(prefix="ckpt-preflight-", ignore_cleanup_errors=True)
        with open(os.path.join(self._directory.name, "job.json"), "w", encoding="utf-8") as file:
            # Not the current directory, which may be somebody's checkpoint, with a torch.py in it.
            path = [entry for entry in sys.path if entry]
            json.dump({"function": function, "job": dict(job), "path": path, "parent": os.getpid()}, file)
        self._log = os.path.join(self._directory.name, "child.log")
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(  # noqa: S603 - this Python, with arguments of our own
                [sys.executable, "-P", "-c", _BOOT, self._directory.name],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(self._directory.name),
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._directory.cleanup()

    def result(self, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """Wait for what the function returns.

        Raises:
            CkptError: What the function raised, or that the process took longer, or ended without a word.
        """
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise CkptError(f"it took more than {timeout_s:.0f} s", where=self._function) from error
        return _result(self._directory.name, self._process.returncode, self._log)


def call_in_child(function: str, job: Mapping[str, object]) -> dict[str, Any]:
    """Call "module:function" with `job` in a new process, and return the mapping that it returns.

    Raises:
        CkptError: As `Child.result`.
    """
    with Child(function, job) as child:
        return child.result()


def _environment(directory: str) -> dict[str, str]:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("CKPT_", "TORCHELASTIC_"))}
    return plain | threads | quiet | {"CUDA_VISIBLE_DEVICES": "", "TMPDIR": directory}


def _result(directory: str, returncode: int, log_path: str) -> dict[str, Any]:
    try:
        with open(os.path.join(directory, "result.json"), encoding="utf-8") as file:
            answer: dict[str, Any] = json.load(file)
    except FileNotFoundError:
        with open(log_path, encoding="utf-8", errors="replace") as log:
            tail = log.read()[-3000:].strip()
        last = tail.splitlines()[-1] if tail else f"exit status {returncode}"
        failed = CkptError(f"the process that describes the model has failed: {last}")
        if tail:
            failed.add_note(tail)
        raise failed from None
    if "error" in answer:
        error = answer["error"]
        raise _CLASSES.get(error["class"], CkptError)(error["what"], where=error["where"], hint=error["hint"])
    result: dict[str, Any] = answer["result"]
    return result


def serve(directory: str, job: Mapping[str, Any]) -> None:
    """Be the child: call what the job names, and leave the answer in `directory`."""
    import warnings

    from ckpt_tools.smoke.world import die_with_parent

    die_with_parent(job["parent"])
    warnings.simplefilter("ignore")
    module, _, name = job["function"].partition(":")
    answer: dict[str, object]
    try:
        answer = {"result": getattr(importlib.import_module(module), name)(job["job"])}
    except CkptError as error:
        parts = {"what": error.what, "where": error.where, "hint": error.hint}
        answer = {"error": {"class": type(error).__name__, **parts}}
    path = os.path.join(directory, "result.json")
    with open(path + ".part", "w", encoding="utf-8") as file:
        json.dump(answer, file)
    os.replace(path + ".part", path)
