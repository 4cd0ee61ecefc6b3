"""Tensors that are byte for byte another one of the same checkpoint: tied weights, written once for every name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import zip_longest

from ckpt_tools.description.checkpoint import TensorEntry
from ckpt_tools.formats.opening import Opened
from ckpt_tools.moving.plan import check_complete
from ckpt_tools.moving.read import read_blocks


def twin_of(
    entry: TensorEntry, others: Iterable[TensorEntry], opened: Opened, *, is_tie: Callable[[str, str], bool]
) -> TensorEntry | None:
    """Return the tensor of `others` that has the bytes of `entry`; None when none is proven to.

    Tensors of one value everywhere (zeros, ones) prove nothing: they count only where the architecture ties the names.

    Args:
        entry: The tensor in question.
        others: Those of the same checkpoint that it may be.
        opened: The checkpoint.
        is_tie: Does the architecture give both names to one tensor?

    Raises:
        UnreadableError: One of them is incomplete or damaged.
    """
    alike = [other for other in others if (other.shape, other.dtype) == (entry.shape, entry.dtype)]
    return next((other for other in alike if _is_same(entry, other, opened, is_tie(entry.fqn, other.fqn))), None)


def _is_same(one: TensorEntry, other: TensorEntry, opened: Opened, tied: bool) -> bool:
    for entry in (one, other):
        check_complete(entry)
    itemsize = max(1, one.dtype.num_bytes(1))
    left, right = (read_blocks(opened.resolve(entry), opened.source) for entry in (one, other))
    first: bytes | None = None
    varies = False
    for pair in zip_longest(left, right):
        if None in pair or pair[0][1] != pair[1][1]:
            return False
        content = pair[0][1]
        first = bytes(content[:itemsize]) if first is None else first
        varies = varies or content != memoryview(first * (len(content) // itemsize))
    return varies or (tied and first is not None)
