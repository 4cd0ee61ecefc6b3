"""The whole sandbox, and limits, around a process that was made for building one model."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from ckpt_tools.memory import proc_bytes
from ckpt_tools.sandbox.audit import Sandbox, code_directories, raise_audit


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a process may take. None: as much as there is."""

    memory_bytes: int | None = None  # Of its own memory, above what it has now
    cpu_s: int | None = None  # Seconds of computing, beyond those it has used


def enter_sandbox(sandbox: Sandbox, limits: Limits, *, kernel: bool = True) -> tuple[str, ...]:
    """Confine this process for the rest of its life; it works in the scratch directory from here on.

    With `kernel`, compiled code is confined, too, where this machine can. Return the parts that stand beside Python's
    own: "landlock", "seccomp".
    """
    os.chdir(sandbox.scratch)
    _limit(limits)
    readable = (*code_directories(), *sandbox.sources)
    stands = confine(readable=readable, writable=(os.path.realpath(sandbox.scratch),)) if kernel else ()
    sys.dont_write_bytecode = True
    raise_audit(sandbox)
    return stands


def _limit(limits: Limits) -> None:
    _lower(resource.RLIMIT_CORE, 0)
    if limits.memory_bytes is not None:
        own_bytes = proc_bytes("/proc/self/status", "VmData") or 0
        _lower(resource.RLIMIT_DATA, own_bytes + limits.memory_bytes)
    if limits.cpu_s is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        _lower(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + limits.cpu_s)


def _lower(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    with suppress(OSError, ValueError):
        resource.setrlimit(kind, (value, hard if kind == resource.RLIMIT_CPU else value))


# The wall that Linux holds: Landlock for files, seccomp for sockets and programs. Compiled code cannot pass it.
#
# Both are for good: this process, and all it starts, keep them. What the kernel does not offer is left out, and said.
#
# Source: landlock(7) and linux/landlock.h up to ABI 7; seccomp(2), linux/filter.h.

_SYS_CREATE_RULESET, _SYS_ADD_RULE, _SYS_RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_VERSION = 1
_PATH_BENEATH = 1
_PR_SET_NO_NEW_PRIVS = 38
_WRITE_FILE, _READ_FILE, _READ_DIR, _IOCTL_DEV = 1 << 1, 1 << 2, 1 << 3, 1 << 15
_EXECUTE = 1 << 0
_READ = _READ_FILE | _READ_DIR
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | 1 << 14 | _IOCTL_DEV
"""Accesses that a rule on a file, and no directory, may name."""
_NUM_ACCESSES = {1: 13, 2: 14, 3: 15, 4: 15}  # ABI → number of file accesses that it knows; 16 from the fifth on
_TCP = 1 << 0 | 1 << 1
_SCOPES = 1 << 0 | 1 << 1
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
_SYSTEM = (
    "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/local/cuda", "/proc", "/sys/devices",
    "/sys/fs/cgroup", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime",
    "/usr/share/zoneinfo",
)  # fmt: skip
"""What the dynamic linker and libraries read. Broader than what Python's own opens may touch."""
_SYSCALLS = {"x86_64": (0xC000003E, (41, 59, 101, 322, 425)), "aarch64": (0xC00000B7, (198, 221, 117, 281, 425))}
"""Machine → its audit number, and those of socket, execve, ptrace, execveat and io_uring_setup."""
_SYS_SECCOMP = {"x86_64": 317, "aarch64": 277}
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EACCES
_libc = ctypes.CDLL(None, use_errno=True)


def confine(*, readable: Iterable[str], writable: Iterable[str]) -> tuple[str, ...]:
    """Confine this process: it reads and writes what is named, and opens no socket and no program.

    Return which parts of it stand: "landlock", "seccomp".
    """
    if sys.platform != "linux" or _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return ()
    stands = (("landlock", _landlock((*readable, *_SYSTEM), (*writable, *_DEVICES))), ("seccomp", _seccomp()))
    return tuple(name for name, stand in stands if stand)


def landlock_version() -> int:
    """Return the version of Landlock's interface, 0 where the kernel has none or has it switched off."""
    if sys.platform != "linux":
        return 0
    return max(0, int(_syscall(_SYS_CREATE_RULESET, None, 0, _VERSION)))


def _syscall(number: int, *args: object) -> int:
    return int(_libc.syscall(ctypes.c_long(number), *(ctypes.c_long(a) if isinstance(a, int) else a for a in args)))


def _landlock(readable: Iterable[str], writable: Iterable[str]) -> bool:
    version = landlock_version()
    if not version:
        return False
    handled = (1 << _NUM_ACCESSES.get(version, 16)) - 1
    attributes = struct.pack("<QQQ", handled, 0 if version < 4 else _TCP, _SCOPES if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = _syscall(_SYS_CREATE_RULESET, ctypes.c_char_p(attributes), size, 0)
    if ruleset < 0:
        return False
    try:
        for path in readable:
            _allow(ruleset, path, _READ & handled)
        for path in writable:
            _allow(ruleset, path, handled & ~_EXECUTE)
        return _syscall(_SYS_RESTRICT_SELF, ruleset, 0) == 0
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, accesses: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # what is not there need not be allowed
        return
    try:
        if not os.path.isdir(path):
            accesses &= _OF_FILES
        rule = struct.pack("<Qi", accesses, descriptor)
        _syscall(_SYS_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.c_char_p(rule), 0)
    finally:
        os.close(descriptor)


class _Program(ctypes.Structure):
    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def _seccomp() -> bool:
    """Refuse new sockets and programs, in every thread."""
    machine = platform.machine()
    if machine not in _SYSCALLS:
        return False
    architecture, numbers = _SYSCALLS[machine]
    load, equal, answer = 0x20, 0x15, 0x06
    steps = [(load, 0, 0, 4), (equal, 1, 0, architecture), (answer, 0, 0, _REFUSE), (load, 0, 0, 0)]
    steps += [(equal, len(numbers) - index, 0, number) for index, number in enumerate(numbers)]
    steps += [(answer, 0, 0, _ALLOW), (answer, 0, 0, _REFUSE)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *step) for step in steps))
    program = _Program(len(steps), ctypes.addressof(code))
    return _syscall(_SYS_SECCOMP[machine], 1, 1, ctypes.byref(program)) == 0
