"""How much memory this process has used."""

from __future__ import annotations

import resource


def peak_rss_bytes() -> int:
    """Return the peak resident set size of this process.

    `VmHWM` is preferred: `ru_maxrss` of a freshly started program can still show its parent's peak.
    """
    try:
        with open("/proc/self/status") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
