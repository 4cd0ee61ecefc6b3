"""The wall that Python itself holds: an audit hook that stops what the building of a model has no business with.

Source: PEP 578 and the table of audit events in Python's documentation. Compiled code that opens files or sockets by
itself raises no events: `kernel` is for that.
"""

from __future__ import annotations

import os
import site
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from ckpt_tools.errors import RefusedConfigError
from ckpt_tools.text import escape_name

HINT = "a config.json must not name files, code or hosts; for code that you trust, use --factory pkg.mod:callable"
SYSTEM_FILES = (
    *(f"/proc/self/{name}" for name in ("cgroup", "maps", "mountinfo", "mounts", "stat", "statm", "status", "task")),
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/stat",
    "/proc/sys",
    "/sys/devices/system",
    "/sys/fs/cgroup",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/usr/share/zoneinfo",
    "/dev/null",
    "/dev/zero",
    "/dev/random",
    "/dev/urandom",
)
"""What libraries read about the machine they run on."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_IMPORTERS = ("importlib", "_frozen_importlib", "zipimport")  # Modules that open what they import
_READERS = ("ckpt_tools.storage.source", "ckpt_tools.storage.safe_open")  # Modules that may read a checkpoint
_STARTERS = frozenset(f"multiprocessing.popen_{kind}" for kind in ("fork", "forkserver", "spawn_posix", "spawn_win32"))
"""Modules that are imported when a process is to be started; what they call then raises no event."""
_UNPICKLERS = "torch.distributed."
"""Modules that may unpickle: ranks exchange objects, and read back what they have saved themselves."""


class Breach(BaseException):
    """What is built tried to get out. Not an Exception: libraries catch those."""

    def __init__(self, error: RefusedConfigError) -> None:
        super().__init__(error.what)
        self.error = error


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    """Where the sandbox ends."""

    subject: str  # What is built, for errors: "a LlamaForCausalLM"
    where: str  # The config, for errors; escaped
    scratch: str  # The one directory that may be written to
    sources: tuple[str, ...] = ()  # Checkpoints that ckpt's own readers may read
    foreign: tuple[str, ...] = ()  # Directories of strangers: nothing of them may be opened, wherever they lie
    on_breach: Callable[[RefusedConfigError], NoReturn] | None = None  # Ends the process; None raises `Breach`


@dataclass(frozen=True, slots=True, kw_only=True)
class _Standing:
    sandbox: Sandbox
    grounds: Mapping[str, str]
    """Directory or file → whose it is: "code", "system", "scratch", "source" or "foreign". The innermost decides."""

    def owner(self, path: str) -> str | None:
        """Return whose a path is, None for everybody else's."""
        real = os.path.realpath(path)
        inside = [ground for ground in self.grounds if real == ground or real.startswith(ground.rstrip("/") + "/")]
        return self.grounds[max(inside, key=len)] if inside else None


class _Aside(threading.local):
    is_on = False


_standing: _Standing | None = None
_is_installed = False
_aside = _Aside()


def code_directories() -> tuple[str, ...]:
    """Return where Python finds modules: the standard library, installed packages, and `sys.path`."""
    return tuple(sorted(_installed() | {os.path.realpath(path) for path in sys.path if path}))


def _installed() -> set[str]:
    """Return the directories of the standard library, of installed packages, and of ckpt itself."""
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {*site.getsitepackages(), os.path.join(sys.base_prefix, "lib")}
    paths |= {os.path.join(os.path.dirname(__file__), os.pardir, os.pardir), sys.pycache_prefix or ""}
    return {os.path.realpath(path) for path in paths if path}


def _grounds(sandbox: Sandbox) -> dict[str, str]:
    found = dict.fromkeys(code_directories(), "code")
    found |= dict.fromkeys(map(os.path.realpath, SYSTEM_FILES), "system")
    found |= dict.fromkeys(map(os.path.realpath, sandbox.foreign), "foreign")
    found |= dict.fromkeys(map(os.path.realpath, sandbox.sources), "source")
    found |= dict.fromkeys(_installed(), "code")
    return found | {os.path.realpath(sandbox.scratch): "scratch"}


def raise_audit(sandbox: Sandbox) -> _Standing | None:
    """Enter the sandbox in every thread of this process; return those that stood before."""
    global _standing, _is_installed  # noqa: PLW0603 - audit hooks belong to the process, and cannot be taken back
    before, standing = _standing, _Standing(sandbox=sandbox, grounds=_grounds(sandbox))
    if not _is_installed:
        sys.addaudithook(_hook)
        _is_installed = True
    _standing = standing
    return before


@contextmanager
def in_sandbox(sandbox: Sandbox) -> Iterator[None]:
    """Hold the sandbox while the block runs, in every thread of this process; for processes that go on afterwards."""
    global _standing
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    before = raise_audit(sandbox)
    try:
        yield
    finally:
        _standing, sys.dont_write_bytecode = before, writes


def demand_sandbox() -> None:
    """Raise when there are none: models of strangers' configs are built in the sandbox only."""
    if _standing is None:
        raise RuntimeError("a model is built from a config.json outside of the sandbox")


@contextmanager
def aside() -> Iterator[None]:
    """Let the caller's own code out of the sandbox, in this thread, while the block runs."""
    before, _aside.is_on = _aside.is_on, True
    try:
        yield
    finally:
        _aside.is_on = before


def _hook(event: str, args: tuple[object, ...]) -> None:
    standing = _standing
    if standing is None or _aside.is_on:
        return
    judge = _JUDGES.get(event)
    if judge is None:
        return
    deed = judge(standing, args)
    if deed is not None:
        _stop(standing.sandbox, deed)


def _stop(sandbox: Sandbox, deed: str) -> NoReturn:
    frame = _caller()
    place = f" ({_module_of(frame)}, line {frame.f_lineno})" if frame is not None else ""
    what = f"building {sandbox.subject} from its config tried to {deed}{place}; refused"
    error = RefusedConfigError(what, where=sandbox.where, hint=HINT)
    if sandbox.on_breach is not None:
        _aside.is_on = True
        sandbox.on_breach(error)
    raise Breach(error)


def _caller() -> FrameType | None:
    """Return the frame that did what is judged."""
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - documented, for debuggers
    while frame is not None and frame.f_globals is globals():
        frame = frame.f_back
    return frame


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "?"))


def _judge_open(standing: _Standing, args: tuple[object, ...]) -> str | None:
    path, mode, flags = args
    if not isinstance(path, (str, bytes, os.PathLike)):  # a descriptor, which was judged when it was opened
        return None
    name = os.fsdecode(path)
    owner = standing.owner(name)
    if (isinstance(flags, int) and flags & _WRITES) or (isinstance(mode, str) and set(mode) & set("wax+")):
        return None if owner == "scratch" or name == os.devnull else f"write {name}"
    if owner in ("code", "system"):
        return None
    frame = _caller()
    reader = "" if frame is None else _module_of(frame)
    if owner == "scratch" and not reader.startswith(_IMPORTERS):
        return None
    if owner == "source" and reader.startswith(_READERS):
        return None
    return f"open {name}"


def _judge_import(standing: _Standing, args: tuple[object, ...]) -> str | None:
    # Of compiled modules alone the file is known; those of Python code are opened.
    module, file = args[:2]
    if module in _STARTERS:
        return f"start a process: {module}"
    if not isinstance(file, str) or standing.owner(file) == "code":
        return None
    return f"import {escape_name(str(module))} from {escape_name(file)}"


def _judge_library(standing: _Standing, args: tuple[object, ...]) -> str | None:
    name = os.fsdecode(args[0]) if isinstance(args[0], (str, bytes)) else ""
    if os.sep not in name or standing.owner(name) == "code":
        return None
    return f"load the library {name}"


def _judge_unpickling(standing: _Standing, args: tuple[object, ...]) -> str | None:  # noqa: ARG001 - as all judges
    frame = _caller()
    while frame is not None and _module_of(frame) == "pickle":
        frame = frame.f_back
    if frame is not None and _module_of(frame).startswith(_UNPICKLERS):
        return None
    return f"unpickle {args[0]}.{args[1]}"


def _judge_change(standing: _Standing, args: tuple[object, ...]) -> str | None:
    base = os.readlink(f"/proc/self/fd/{args[-1]}") if isinstance(args[-1], int) and args[-1] > 2 else ""
    for path in args:
        if isinstance(path, (str, bytes, os.PathLike)):
            # Not what a link leads to: that stays as it is.
            parent, name = os.path.split(os.path.abspath(os.path.join(base, os.fsdecode(path))))
            if standing.owner(parent) != "scratch" and standing.owner(os.path.join(parent, name)) != "scratch":
                return f"change {os.fsdecode(path)}"
    return None


def _judge_process(standing: _Standing, args: tuple[object, ...]) -> str | None:  # noqa: ARG001 - as all judges
    told = next((os.fsdecode(arg) for arg in args if isinstance(arg, (str, bytes)) and arg), None)
    return "start a process" + ("" if told is None else f": {told}")


def _judge_network(standing: _Standing, args: tuple[object, ...]) -> str | None:  # noqa: ARG001 - as all judges
    told = [str(arg) for arg in args if isinstance(arg, (str, bytes, tuple))]
    return "use the network" + (f": {told[0]}" if told else "")


_Judge = Callable[[_Standing, tuple[object, ...]], str | None]
_PROCESSES = (
    "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.startfile", "os.system", "pty.spawn",
    "subprocess.Popen", "ftplib.connect", "webbrowser.open",
)  # fmt: skip
_NETWORK = (
    "socket.bind", "socket.connect", "socket.getaddrinfo", "socket.gethostbyaddr", "socket.gethostbyname",
    "socket.getnameinfo", "socket.sendmsg", "socket.sendto", "urllib.Request", "http.client.connect",
)  # fmt: skip
_CHANGES = (
    "os.chflags", "os.chmod", "os.chown", "os.link", "os.mkdir", "os.mkfifo", "os.mknod", "os.remove", "os.removexattr",
    "os.rename", "os.rmdir", "os.setxattr", "os.symlink", "os.truncate", "os.utime", "shutil.move", "shutil.rmtree",
    "sqlite3.connect",
)  # fmt: skip
_JUDGES: Mapping[str, _Judge] = {
    "open": _judge_open,
    "import": _judge_import,
    "ctypes.dlopen": _judge_library,
    "pickle.find_class": _judge_unpickling,
    **dict.fromkeys(_PROCESSES, _judge_process),
    **dict.fromkeys(_NETWORK, _judge_network),
    **dict.fromkeys(_CHANGES, _judge_change),
}
"""Audit event → what says whether it is a deed, and which."""
