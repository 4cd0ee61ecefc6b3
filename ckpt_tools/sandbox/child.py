"""Run one function of this package in a process of its own: the caller stays light, and nothing of it is left.

A child reads what to do from a file and leaves its answer in another, whole or not at all: nothing that libraries print
can damage it, and no pipe fills up. It has a session of its own, so Ctrl-C reaches the caller alone, which then ends
everything in that session. A caller that is killed takes the child with it: the kernel tells it.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import typing
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field
from types import TracebackType
from typing import Any, Generic, NoReturn, Self, TypeVar

from ckpt_tools.errors import CkptError, StorageError
from ckpt_tools.sandbox import wire
from ckpt_tools.sandbox.audit import Sandbox
from ckpt_tools.sandbox.enclose import Limits, enter_sandbox
from ckpt_tools.sandbox.wire import error_from_json, error_to_json
from ckpt_tools.signals import hold_signals
from ckpt_tools.text import escape_name

TIMEOUT_S = 300.0
"""What a call may take when nobody says otherwise. Most build a model on the meta device, or read headers."""
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"  # Network interface that ranks of one machine talk over
_LOG_NAME = "log"
_RESULT_NAME = "result.json"
_POLL_S = 0.02
_GRACE_S = 3.0  # What a child gets to end what it has started itself; after that everything in its session is killed
_TAIL_BYTES = 3000
_PR_SET_PDEATHSIG = 1
_CRASHES = ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE")
_OF_TORCHRUN = re.compile(
    r"((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|"
    r"(TORCHELASTIC|TORCH_NCCL|CKPT)_.*"
)
"""Environment variables of ranks, and those that set options of ckpt."""
_OF_LIBRARIES = re.compile(
    r"PATH|HOME|USER|LOGNAME|LANG|LANGUAGE|LC_\w+|TZ|(LD|DYLD)_LIBRARY_PATH|LD_PRELOAD|VIRTUAL_ENV|CONDA_PREFIX|"
    r"NVIDIA_(VISIBLE_DEVICES|DRIVER_CAPABILITIES|TF32_OVERRIDE)|(PYTHON|TORCH|PYTORCH)\w*|(CUDA|CUDNN|CUBLAS|NCCL|RCCL|"
    r"GLOO|HIP|HSA|ROCR|ROCM|ZE|SYCL|MIOPEN|OMP|GOMP|KMP|MKL|OPENBLAS|MALLOC|TRITON|ATEN|DNNL|ONEDNN|UCX|FI)_\w+"
)
"""Environment variables that a child which handles strangers' files has a use for; nobody's secrets are among them."""
_BUILD_BYTES = 16 << 30
_BUILD_CPU_S = 1800
"""What building a model without data may take. PyTorch's tracker takes most: minutes for the largest models."""
_BOOT = """
import json, os, sys
with open(sys.argv[1] + "/job.json") as file:
    job = json.load(file)
sys.path[:] = job["path"]
from ckpt_tools.sandbox.child import serve
serve(sys.argv[1], job)
os._exit(0)  # the answer is there; libraries take their time to say goodbye, or crash over it
"""
A = TypeVar("A")


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """Where a child finds itself."""

    directory: str  # Private to it and the caller
    parent: int  # The caller's process


@dataclass(eq=False, repr=False)
class Child(Generic[A]):
    """A call of "module:function" in a process of its own; use as a context, which ends it whatever happens.

    It has one thread for computing, no network for model hubs, nothing of torchrun, and writes below a directory that
    is removed. The thread that enters the context has to live as long as it: the child ends with that thread.

    Args:
        function: Of this package: takes a job and a `Here`, annotated, and returns an answer. What crosses is what
            `wire` takes.
        job: Its first argument.
        answer: The type of what it returns.
        does: What the process does, for errors: "the process that …".
        relief: What to do when the machine runs out of memory.
        gpu: May it see GPUs?
        sandboxed: It handles a stranger's config: of the environment what libraries need, no caches of the user's, no
            modules from where the user is.
    """

    function: str
    job: object
    answer: type[A]
    _: KW_ONLY
    does: str
    relief: str = "stop other processes and try again"
    gpu: bool = False
    sandboxed: bool = False
    directory: str = field(init=False)  # Private to the child and the caller; there once the context is entered

    @property
    def _name(self) -> str:
        return f"the process that {self.does}"

    def __enter__(self) -> Self:
        try:
            self._private = tempfile.TemporaryDirectory(prefix="ckpt-child-", ignore_cleanup_errors=True)
            try:
                self.directory = self._private.name
                self._start()
            except BaseException:
                self._private.cleanup()
                raise
        except OSError as error:
            what = f"{self._name} cannot be started: {error.strerror or error}"
            raise StorageError(what, where=None if error.filename is None else str(error.filename)) from error
        return self

    def _start(self) -> None:
        # Not the current directory, which may be somebody's checkpoint, with a torch.py in it.
        path = [entry for entry in sys.path if entry and not (self.sandboxed and _is_here(entry))]
        job = {"function": self.function, "job": self.job, "path": path, "parent": os.getpid()}
        with open(os.path.join(self.directory, "job.json"), "w", encoding="utf-8") as file:
            file.write(wire.dumps(job))
        with open(os.path.join(self.directory, _LOG_NAME), "wb") as log, hold_signals():
            self._process = subprocess.Popen(  # noqa: S603 - this Python, with arguments of our own
                [sys.executable, "-P", "-X", "faulthandler", "-c", _BOOT, self.directory],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(self.directory, gpu=self.gpu, sandboxed=self.sandboxed),
                start_new_session=True,
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._end()
        finally:
            self._private.cleanup()

    def result(self, timeout_s: float | None = TIMEOUT_S, *, on_wait: Callable[[], None] | None = None) -> A:
        """Wait for what the function returns, or raise what it raised.

        With `timeout_s` None it waits for ever. `on_wait` is called often meanwhile, and once after the end.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        has_ended = False
        while not has_ended:
            has_ended = self._has_ended()
            if on_wait is not None:
                on_wait()
            if has_ended:
                break
            if deadline is not None and time.monotonic() > deadline:
                self._end()
                raise self._failure(f"took more than {timeout_s:.0f} s", "the machine may be busy: try again later")
            time.sleep(_POLL_S)
        self._end()
        try:
            return read_answer(self.directory, self.answer)
        except CkptError:
            raise  # the child's own, which may be a FileNotFoundError too
        except FileNotFoundError:
            returncode = self._process.returncode
            what, hint = describe_end(returncode, self.relief)
            raise self._failure(what if returncode < 0 else None, hint) from None
        except ValueError:
            raise self._failure("returned an answer that cannot be read") from None

    def _failure(self, what: str | None, hint: str | None = None) -> CkptError:
        """Return the error of a child without an answer: `what`, or else the last that it has printed."""
        tail = ""
        with suppress(OSError), open(os.path.join(self.directory, _LOG_NAME), "rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = log.read().decode(errors="replace").strip()
            tail = "\n".join(escape_name(line) for line in text.splitlines())
        last = tail.splitlines()[-1] if tail else f"exit status {self._process.returncode}"
        error = CkptError(f"{self._name} {what or f'failed: {last}'}", hint=hint)
        if tail:
            error.add_note(tail)
        return error

    def _has_ended(self) -> bool:
        """Has it ended? It is not collected yet: its number stays that of its session."""
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # the caller's program collects every child
            return True

    def _end(self) -> None:
        """End it and everything in its session."""
        if self._process.returncode is not None:
            return
        try:
            if not self._has_ended():
                with suppress(ProcessLookupError):
                    os.kill(self._process.pid, signal.SIGTERM)  # what it has started ends first
            deadline = time.monotonic() + _GRACE_S
            while not self._has_ended() and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        finally:  # of a second Ctrl-C, too
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _is_here(entry: str) -> bool:
    """Is this entry of `sys.path` the current directory, which may be a model's? ckpt's own home is none."""
    home = os.path.join(os.path.dirname(__file__), os.pardir, os.pardir)
    return os.path.realpath(entry) == os.path.realpath(os.curdir) != os.path.realpath(home)


def environment(directory: str, *, gpu: bool = False, sandboxed: bool = False) -> dict[str, str]:
    """Return a child's environment: one thread, no network, nothing of torchrun, nothing left outside `directory`."""
    kept = {name: value for name, value in os.environ.items() if not _OF_TORCHRUN.fullmatch(name)}
    if sandboxed:
        kept = {name: value for name, value in kept.items() if _OF_LIBRARIES.fullmatch(name)}
        kept |= {"HF_HOME": os.path.join(directory, "hub"), "TRITON_CACHE_DIR": os.path.join(directory, "triton")}
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
    # Asking whether there are GPUs must not begin to use them: ranks are forked.
    devices = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"} if gpu else {"CUDA_VISIBLE_DEVICES": ""}
    inside = {"TMPDIR": directory, "TORCHINDUCTOR_CACHE_DIR": os.path.join(directory, "inductor")}
    return kept | one_thread | quiet | devices | inside | {"GLOO_SOCKET_IFNAME": LOOPBACK}


def serve(directory: str, job: Mapping[str, Any]) -> None:
    """Be the child: call what the job names, and leave the answer in `directory`."""
    _end_when_told(directory, job["parent"])
    die_with_parent(job["parent"], signal.SIGTERM)
    warnings.simplefilter("ignore")
    module, _, name = job["function"].partition(":")
    gc.disable()  # while torch is imported, all of it would be looked through again and again
    function = getattr(importlib.import_module(module), name)
    gc.freeze()
    gc.enable()
    kind = next(iter(typing.get_type_hints(function).values()))
    answer: dict[str, object]
    try:
        here = Here(directory=directory, parent=job["parent"])
        answer = {"result": function(wire.build(kind, job["job"]), here)}
    except CkptError as error:
        answer = {"error": error_to_json(error)}
    _leave(directory, answer)


def _leave(directory: str, answer: Mapping[str, object]) -> None:
    path = os.path.join(directory, _RESULT_NAME)
    with open(path + ".part", "w", encoding="utf-8") as file:
        file.write(wire.dumps(answer))
    os.replace(path + ".part", path)


def build_in_sandbox(here: Here, *, subject: str, where: str, foreign: tuple[str, ...]) -> None:
    """Enter the sandbox in this child, before it builds a model; what it has to read it has read."""

    def leave(error: CkptError) -> NoReturn:
        _leave(here.directory, {"error": error_to_json(error)})
        os._exit(0)

    sandbox = Sandbox(subject=subject, where=where, scratch=here.directory, foreign=foreign, on_breach=leave)
    enter_sandbox(sandbox, Limits(memory_bytes=_BUILD_BYTES, cpu_s=_BUILD_CPU_S))


def _end_when_told(directory: str, parent: int) -> None:
    """Let SIGTERM end this process after everything in its session; without a parent nothing is left on disk."""
    me = os.getpid()

    def stop(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.getpid() == me:  # not what a library has forked
            is_leader = os.getpgrp() == me
            if is_leader:
                os.killpg(me, signal.SIGTERM)
            deadline = time.monotonic() + _GRACE_S / 2
            with suppress(ChildProcessError):
                while time.monotonic() < deadline:
                    if os.waitpid(-1, os.WNOHANG)[0] == 0:
                        time.sleep(_POLL_S)
            if os.getppid() != parent:
                shutil.rmtree(directory, ignore_errors=True)
                if is_leader:
                    os.killpg(me, signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])  # a caller's thread may have blocked it


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Let the kernel end this process when its parent is gone, also when that was killed.

    Elsewhere than on Linux this only looks whether the parent is there: call it again now and then.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:  # it was faster
        os.kill(os.getpid(), number)


def read_answer(directory: str, kind: type[A]) -> A:
    """Return what the child of a directory has answered, or raise what it raised; `FileNotFoundError` before that."""
    with open(os.path.join(directory, _RESULT_NAME), encoding="utf-8") as file:
        answer = json.load(file)
    if "error" in answer:
        raise error_from_json(answer["error"])
    result: A = wire.build(kind, answer["result"])
    return result


def describe_end(returncode: int, relief: str) -> tuple[str, str | None]:
    """Return how a process has ended, and what to do about it.

    `returncode` is an exit status, or the negative number of a signal; `relief` is the advice where memory ran out.
    """
    if returncode >= 0:
        return f"ended with exit status {returncode}", None
    known = {int(number): number.name for number in signal.Signals}
    name = known.get(-returncode, f"signal {-returncode}")
    hint = None
    if name == "SIGKILL":
        hint = f"the machine may have run out of memory: {relief}"
    elif name == "SIGXCPU":
        hint = f"it used more processor time than a valid config needs: {relief}"
    elif name in _CRASHES:
        hint = "a compiled library crashed: check that torch and the libraries it loads are compatible builds"
    return f"was killed by {name}", hint
