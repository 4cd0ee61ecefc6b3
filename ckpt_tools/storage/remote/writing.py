"""How to write to buckets: what was asked for, in which passes, and what that takes. Pure; nothing is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpt_tools.storage.remote.upload import held_bytes_of, part_bytes_of
from ckpt_tools.units import format_size

MEMORY_BYTES = 1 << 30  # For the parts of open objects, where nobody says otherwise
_PASS_BYTES = 64 << 30  # More are too much to lose: what a killed pass has written is written again
_FEW_REQUESTS = 8  # Of each kind, for the claim, records, documents and the marker
_DOLLARS_PER_PUT, _DOLLARS_PER_GET, _DOLLARS_PER_BYTE_MONTH = 5e-6, 4e-7, 0.023e-9
"""S3 Standard, us-east-1, within the region."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteSettings:
    """How to write to buckets."""

    memory_bytes: int = MEMORY_BYTES  # For the parts of open objects
    needs_conditions: bool = True  # Refuse a store that overwrites where it should create
    verify_all: bool = False  # Read everything back, not the ends of some objects


def describe_writing(sizes: Sequence[int], memory_bytes: int, *, num_sampled: int) -> str:
    """Say what writing files of these sizes takes: requests, passes, memory, and about what that costs."""
    parts = [-(-nbytes // part_bytes_of(nbytes)) for nbytes in sizes]
    puts = _FEW_REQUESTS + sum(1 if count <= 1 else count + 2 for count in parts)
    gets = _FEW_REQUESTS + len(sizes) + 2 * num_sampled
    passes = len(cut_passes(sizes, memory_bytes))
    again = f" in {passes} passes (a block that two passes need is read twice)" if passes > 1 else ""
    part = format_size(max(map(part_bytes_of, sizes), default=0))
    dollars = puts * _DOLLARS_PER_PUT + gets * _DOLLARS_PER_GET
    return (
        f"about {puts} PUT and {gets} GET requests for {format_size(sum(sizes))}{again}, in parts of {part}, "
        f"with at most {format_size(memory_bytes)} of memory for parts; at the list prices of S3 Standard about "
        f"${dollars:.2f}, and ${sum(sizes) * _DOLLARS_PER_BYTE_MONTH:.2f} a month to keep"
    )


def cut_passes(sizes: Sequence[int], memory_bytes: int) -> list[range]:
    """Cut files of these sizes into runs that fit into memory when all are open, and are not too much to lose."""
    cuts, held, total = [0], 0, 0
    for i, nbytes in enumerate(sizes):
        held, total = held + held_bytes_of(nbytes), total + nbytes
        if i > cuts[-1] and (held > memory_bytes or total > _PASS_BYTES):
            cuts.append(i)
            held, total = held_bytes_of(nbytes), nbytes
    return [range(start, end) for start, end in zip(cuts, [*cuts[1:], len(sizes)], strict=True)]
