"""Times a whole process and reads the peak memory of the largest process in its tree."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One run of one command."""

    seconds: float
    """Wall time from start to exit."""
    peak_rss_bytes: int
    """Largest resident set of any single process of its tree."""
    cpu_seconds: float = 0.0
    """Processor time of its tree, user and system: hardly changes when others use the machine."""


class CommandError(Exception):
    """A measured command failed; the message ends with what it said last."""


def measure(command: list[str], log: Path) -> Sample:
    """Run `command` with its output in `log`.

    The kernel starts a child's peak at the memory of whoever spawned it. So this process must stay small (it
    imports neither numpy nor torch), and nothing below `floor_rss_bytes` can be told apart.

    Raises:
        CommandError: The command ended with another code than 0.
    """
    os.sync()  # nobody pays for what the run before left to be written
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, str(log), flags, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    start = time.perf_counter()
    pid = os.posix_spawnp(command[0], command, os.environ, file_actions=actions)
    _, status, usage = os.wait4(pid, 0)
    seconds = time.perf_counter() - start
    code = os.waitstatus_to_exitcode(status)
    if code != 0:
        tail = log.read_text(errors="replace")[-1500:].strip()
        raise CommandError(f"exit code {code}: {' '.join(command)}\n{tail}")
    cpu_seconds = usage.ru_utime + usage.ru_stime
    return Sample(seconds=seconds, peak_rss_bytes=usage.ru_maxrss * 1024, cpu_seconds=cpu_seconds)


def floor_rss_bytes() -> int:
    """Peak memory of this process, below which `measure` cannot see."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
