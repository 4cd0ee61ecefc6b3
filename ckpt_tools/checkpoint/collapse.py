"""What a summary comes to in few words: ranges of numbers, equal blocks in one row, the cuts of a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckpt_tools.checkpoint.infer import block_of
from ckpt_tools.checkpoint.layout import Replicate
from ckpt_tools.checkpoint.summarise import BlockSummary, Summary

_MAX_RANGES = 6


def format_ranges(numbers: Iterable[int]) -> str:
    """Return ascending numbers as ranges ("0-3,8"), the first few of them."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    return ",".join(texts[:_MAX_RANGES]) + (",..." if len(texts) > _MAX_RANGES else "")


def fold_blocks(blocks: Sequence[BlockSummary]) -> list[tuple[str, int, tuple[int, ...]]]:
    """Fold equal neighbours into rows of (name, blocks, bytes of each by rank): "model.layers.0-31"."""
    runs: dict[str, list[tuple[int, BlockSummary]]] = {}
    order: list[str | BlockSummary] = []
    for block in blocks:
        numbered = block_of(block.name)
        if numbered is None:
            order.append(block)
            continue
        if numbered[0] not in runs:
            order.append(numbered[0])
        runs.setdefault(numbered[0], []).append((numbered[1], block))
    rows: list[tuple[str, int, tuple[int, ...]]] = []
    for item in order:
        if isinstance(item, BlockSummary):
            rows.append((item.name, 1, item.bytes_by_rank))
            continue
        numbered_blocks = sorted(runs[item], key=lambda pair: pair[0])
        first = 0
        for i in range(1, len(numbered_blocks) + 1):
            here = numbered_blocks[first][1].bytes_by_rank
            if i < len(numbered_blocks) and numbered_blocks[i][1].bytes_by_rank == here:
                continue
            numbers = format_ranges(number for number, _ in numbered_blocks[first:i])
            rows.append((f"{item}.{numbers}" if item else numbers, i - first, here))
            first = i
    return rows


def format_placement(summary: Summary, fqn: str) -> str:
    """Return the cuts of a tensor ("dp_shard:S(0) tp:S(1)"), "R" for none, "-" when they are not known."""
    placements = summary.placements_of(fqn)
    if placements is None:
        return "-"
    cuts = [f"{axis}:{placement}" for axis, placement in placements.items() if placement != Replicate()]
    return " ".join(cuts) or "R"
