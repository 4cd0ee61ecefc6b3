"""Where ranks were when they were ended: from Python's own stack dumps to a finding that people can read."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.sandbox.journal import RankLog
from ckpt_tools.text import escape_name

_THREAD = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):")
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<name>.*)')
_LIBRARY = re.compile(r"/(torch|ckpt_tools|threading\.py|multiprocessing|concurrent)(/|$)")
_WAITS = re.compile(
    r"all_gather|all_reduce|reduce_scatter|barrier|broadcast|_object|gather|scatter|send|recv|wait|monitored"
)
MAX_STACK_CHARS = 20_000  # Of a dump that is kept


@dataclass(frozen=True, slots=True, kw_only=True)
class StackFrame:
    """One frame."""

    file: str
    line: str
    name: str

    def __str__(self) -> str:
        return f"{escape_name(self.name)} ({escape_name(os.path.basename(self.file))}:{self.line})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """Ranks that do not go on."""

    finding: Finding
    culprits: tuple[int, ...]  # Ranks that do not wait for the others, but do something else


def parse_stack(text: str) -> tuple[StackFrame, ...]:
    """Return the frames of the main thread in a dump of `faulthandler`, innermost first."""
    threads: list[tuple[bool, list[StackFrame]]] = []
    for line in text.splitlines():
        if head := _THREAD.match(line):
            threads.append((head[1].startswith("Current"), []))
        elif threads and (frame := _FRAME.fullmatch(line)):
            threads[-1][1].append(StackFrame(file=frame["file"], line=frame["line"], name=frame["name"]))
    for is_current, frames in threads:
        if is_current and frames:
            return tuple(frames)
    return tuple(threads[0][1]) if threads else ()


def waits_in(frames: tuple[StackFrame, ...]) -> str | None:
    """Return the collective that a rank waits in, None when it is elsewhere."""
    for place in frames[:12]:
        if "distributed" in place.file and _WAITS.search(place.name):
            return place.name
    return None


def own_place(frames: tuple[StackFrame, ...]) -> StackFrame | None:
    """Return the innermost frame outside of torch and ckpt: the model's own code."""
    return next((place for place in frames if not _LIBRARY.search(place.file)), None)


def describe_hang(
    logs: Mapping[int, RankLog],
    stacks: Mapping[int, tuple[StackFrame, ...]],
    hanging: Mapping[int, bool],
    timeout_s: float,
) -> Hang:
    """Say where ranks did not go on; `stacks` are the frames of their main threads, innermost first."""
    parts = []
    culprits = []
    for rank, is_running in hanging.items():
        phase = logs[rank].phase
        if not is_running or phase is None:
            parts.append(f"rank {rank} has finished phase {logs[rank].last_phase}")
            continue
        frames = stacks.get(rank, ())
        collective = waits_in(frames)
        place = own_place(frames) or (frames[0] if frames else None)
        at = f", called from {place}" if collective is not None and place is not None else ""
        if collective is not None:
            parts.append(f"rank {rank} is waiting in phase {phase} for the other ranks in {collective}{at}")
        else:
            culprits.append(rank)
            parts.append(f"rank {rank} is in phase {phase} in {place or 'native code'}, not in a collective")
    names = {log.phase or log.last_phase for log in logs.values()}
    where = ", ".join(f"rank {rank}" for rank in culprits) or f"phase {', '.join(sorted(n for n in names if n))}"
    if culprits and len(culprits) < len(hanging):
        hint = "check what that rank does differently: data, branches on the rank, a lock; -v shows all stacks"
    elif culprits:
        hint = "if it is only slow, give it more time: --timeout SECONDS; -v shows all stacks"
    else:
        hint = "the ranks wait in different collectives: check that all ranks make the same calls; -v shows all stacks"
    what = f"no rank made progress for {timeout_s:g} s: {'; '.join(parts)}"
    return Hang(finding=Finding.error(code="hang", where=where, what=what, hint=hint), culprits=tuple(culprits))
