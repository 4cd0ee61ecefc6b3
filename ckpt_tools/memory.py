"""How much memory this process has used, and what Linux says of memory."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator


def peak_rss_bytes() -> int:
    """Return the peak resident set size of this process.

    `VmHWM` is preferred: `ru_maxrss` of a freshly started program can still show its parent's peak.
    """
    peak = proc_bytes("/proc/self/status", "VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if peak is None else peak


def rss_bytes() -> int | None:
    """Return the resident set size of this process now; None where Linux does not tell."""
    return proc_bytes("/proc/self/status", "VmRSS")


def proc_bytes(path: str, field: str) -> int | None:
    """Return the size that a file below /proc gives (in kB) for a field; None where it gives none."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return next((int(line.split()[1]) * 1024 for line in file if line.startswith(f"{field}:")), None)
    except (OSError, ValueError):
        return None


def available_bytes() -> int:
    """Return the bytes that can still be allocated on this machine, within the limits of its containers."""
    available = proc_bytes("/proc/meminfo", "MemAvailable")
    if available is None:
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    left = limit_left("memory.max", "memory.current")
    return available if left is None else min(available, left)


def limit_left(limit: str, used: str) -> int | None:
    """Return what the control groups of this process leave of a limit (`pids.max`, `pids.current`); None: no limit."""
    pairs = ((_number(os.path.join(at, limit)), _number(os.path.join(at, used))) for at in _control_groups())
    return min((max(0, most - now) for most, now in pairs if most is not None and now is not None), default=None)


def _control_groups() -> Iterator[str]:
    """Yield the directories of this process's control groups (version 2), innermost first."""
    root = "/sys/fs/cgroup"
    try:
        with open("/proc/self/cgroup", encoding="utf-8", errors="replace") as file:
            path = next((line[3:].strip() for line in file if line.startswith("0::/")), "/")
    except OSError:
        path = "/"
    while path.strip("/") and ".." not in path:
        yield root + path
        path = os.path.dirname(path)
    yield root


def _number(path: str) -> int | None:
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):  # no such limit, or "max"
        return None
