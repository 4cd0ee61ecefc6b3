"""All walls at once, and limits, around a process that was made for building one model."""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass

from ckpt_tools.memory import proc_bytes
from ckpt_tools.walls.audit import Walls, code_directories, raise_audit
from ckpt_tools.walls.kernel import confine


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a process may take. None: as much as there is."""

    memory_bytes: int | None = None
    """Of its own memory, above what it has now."""
    cpu_s: int | None = None
    """Seconds of computing, beyond those it has used."""


def raise_walls(walls: Walls, limits: Limits, *, kernel: bool = True) -> tuple[str, ...]:
    """Confine this process for the rest of its life; it works in the scratch directory from here on.

    With `kernel`, compiled code is confined, too, where this machine can. Return the walls that stand beside Python's
    own: "landlock", "seccomp".
    """
    os.chdir(walls.scratch)
    _limit(limits)
    readable = (*code_directories(), *walls.sources)
    stands = confine(readable=readable, writable=(os.path.realpath(walls.scratch),)) if kernel else ()
    sys.dont_write_bytecode = True
    raise_audit(walls)
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
