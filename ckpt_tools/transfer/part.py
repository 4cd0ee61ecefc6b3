"""Which one of several processes this is, as whoever started it says: no process asks another."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ckpt_tools.errors import UsageError
from ckpt_tools.transfer.share_record import MAX_PARTS
from ckpt_tools.transfer.split import Part

_STARTERS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "torchrun": (("RANK", "WORLD_SIZE"),),
    "slurm": (("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT"), ("SLURM_PROCID", "SLURM_NTASKS")),
    "k8s": (("JOB_COMPLETION_INDEX", "CKPT_PARTS"),),
    "mpi": (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"), ("PMIX_RANK", "PMI_SIZE")),
}
"""Variables with index and count; the first pair that is set counts."""
_OF_TORCHRUN = "TORCHELASTIC_RUN_ID"
_FIRST = {"SLURM_ARRAY_TASK_ID": "SLURM_ARRAY_TASK_MIN"}  # Index → variable with the smallest one


def parse_part(text: str) -> Part:
    """Parse "3/16": an index from 0 on, and how many parts there are."""
    index, slash, count = text.partition("/")
    if not (slash and _is_number(index) and _is_number(count)) or not int(index) < int(count) <= MAX_PARTS:
        what = f"--part must be I/N with 0 ≤ I < N ≤ {MAX_PARTS}, got {text!r}"
        raise UsageError(what, hint="the first of 16 is --part 0/16")
    return Part(index=int(index), count=int(count))


def find_part(environ: Mapping[str, str], parts: str) -> Part | None:
    """Return which part the process is by the variables of what started it; None for one process alone.

    `auto` asks torchrun alone, and only where it has started this very process: a command that a rank starts inherits
    its variables, as one in an interactive shell has those of a scheduler, and nobody starts the other parts.
    """
    if parts == "none" or (parts == "auto" and not (_OF_TORCHRUN in environ and _is_started_by_torchrun())):
        return None
    starter = "torchrun" if parts == "auto" else parts
    pairs = _STARTERS[starter]
    pair = next((pair for pair in pairs if all(name in environ for name in pair)), None)
    if pair is None:
        wanted = " or ".join(" and ".join(pair) for pair in pairs)
        what = f"--parts {starter} needs {wanted} in the environment"
        raise UsageError(what, hint="start it by that, or say which part this is: --part I/N")
    index, count = (environ[name] for name in pair)
    first = environ.get(_FIRST.get(pair[0], ""), "0")
    if not all(map(_is_number, (index, count, first))) or not 0 <= int(index) - int(first) < int(count) <= MAX_PARTS:
        hint = "number the array from 0 or 1 in steps of 1" if first != "0" else "say which part this is: --part I/N"
        raise UsageError(f"{pair[0]}={index} and {pair[1]}={count} are not an index and a count", hint=hint)
    found = Part(index=int(index) - int(first), count=int(count))
    return found if found.count > 1 else None


def _is_started_by_torchrun() -> bool:
    """Is the parent torchrun's agent, which does not have the variable that it sets for its children?"""
    try:
        with open(f"/proc/{os.getppid()}/environ", "rb") as file:
            return _OF_TORCHRUN.encode() + b"=" not in file.read()
    except OSError:  # of another user, or no /proc: nobody else says more
        return True


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10
