"""How much memory this process has used, and what Linux says of memory."""

from __future__ import annotations

import resource


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
