"""Many small ranges of remote files, fetched at once by few requests: neighbours are joined, and all are under way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from typing import NamedTuple

Range = tuple[str, int, int]
"""File, first byte, number of bytes."""


class Joined(NamedTuple):
    """Ranges of one file that one request fetches."""

    file: str
    start: int
    nbytes: int
    parts: list[tuple[int, int]]
    """First byte in the file and number of bytes of each of them, what overlaps being one; in order."""


def join(ranges: Iterable[Range], *, max_gap: int, max_bytes: int) -> Iterator[Joined]:
    """Join ranges of a file that lie no more than `max_gap` bytes apart, up to `max_bytes` at once."""
    for file, group in groupby(sorted(each for each in ranges if each[2] > 0), key=lambda each: each[0]):
        parts: list[tuple[int, int]] = []
        first = end = 0
        for _, start, nbytes in group:
            if parts and (start - end > max_gap or start + nbytes - first > max_bytes) and start >= end:
                yield Joined(file, first, end - first, parts)
                parts = []
            if not parts:
                first = end = start
            if parts and start <= end:  # touches the one before, or lies in it
                begun, _ = parts.pop()
                parts.append((begun, max(end, start + nbytes) - begun))
            else:
                parts.append((start, nbytes))
            end = max(end, start + nbytes)
        yield Joined(file, first, end - first, parts)


def fetch_joined(
    ranges: Iterable[Range],
    fetch: Callable[[str, int, memoryview], None],
    keep: Callable[[str, int, bytes], None],
    *,
    max_gap: int,
    max_bytes: int,
    workers: int,
) -> None:
    """Fetch ranges, in any order, and keep just them; for `max_gap` and `max_bytes` see `join`.

    `fetch` fills a buffer with the bytes of a file that begin at an offset, and `keep` is given those from an offset
    on; both are called from several threads. What `fetch` raised first is raised, and the rest is left.
    """

    def work(joined: Joined) -> None:
        run = bytearray(joined.nbytes)
        fetch(joined.file, joined.start, memoryview(run))
        for start, nbytes in joined.parts:
            keep(joined.file, start, bytes(memoryview(run)[start - joined.start :][:nbytes]))

    found = list(join(ranges, max_gap=max_gap, max_bytes=max_bytes))
    if not found:
        return
    pool = ThreadPoolExecutor(min(workers, len(found)), thread_name_prefix="ckpt-ahead")
    try:
        for _ in pool.map(work, found):
            pass
    finally:
        pool.shutdown(cancel_futures=True)
