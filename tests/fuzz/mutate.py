"""Mutations of valid files: random bytes are refused at once, a valid file with one lie in it gets much further."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

Operation = tuple[int, int, int]
"""(kind, where, what): any three numbers mean something, so that hypothesis can make them smaller."""

_BOUNDARIES = tuple(
    sorted({0, 1, 2, 7, 64, *(2**bits + d for bits in (7, 8, 15, 16, 31, 32, 53, 62, 63, 64) for d in (-1, 0, 1))})
)
_NUMBER = re.compile(rb"-?\d+")
_MAX_BYTES = 1 << 16


def mutate(data: bytes, operations: Sequence[Operation], *, tokens: Sequence[bytes], others: Sequence[bytes]) -> bytes:
    """Return `data` after every operation in turn.

    Args:
        data: A valid file.
        operations: What to do.
        tokens: Words of the format.
        others: Valid files to splice parts of.
    """
    raw = bytearray(data)
    for kind, where, what in operations:
        _OPERATIONS[kind % len(_OPERATIONS)](raw, where, what, tokens, others)
        del raw[_MAX_BYTES:]
    return bytes(raw)


def random_operations(rng: random.Random) -> list[Operation]:
    """Make up a few operations."""
    return [(rng.randrange(2**16), rng.randrange(2**32), rng.randrange(2**32)) for _ in range(rng.choice((1, 1, 2, 4)))]


def _flip(raw: bytearray, where: int, what: int, *_: object) -> None:
    if raw:
        raw[where % len(raw)] ^= 1 << what % 8


def _set(raw: bytearray, where: int, what: int, *_: object) -> None:
    if raw:
        raw[where % len(raw)] = what % 256


def _insert(raw: bytearray, where: int, what: int, *_: object) -> None:
    at = where % (len(raw) + 1)
    raw[at:at] = (what % 2**24).to_bytes(1 + what % 7 + 3, "big")


def _delete(raw: bytearray, where: int, what: int, *_: object) -> None:
    at = where % (len(raw) + 1)
    del raw[at : at + 1 + what % (1 + len(raw) // 4)]


def _repeat(raw: bytearray, where: int, what: int, *_: object) -> None:
    at = where % (len(raw) + 1)
    raw[at:at] = raw[at : at + 1 + what % 64] * (1 + what // 64 % 32)


def _truncate(raw: bytearray, where: int, *_: object) -> None:
    del raw[where % (len(raw) + 1) :]


def _splice(raw: bytearray, where: int, what: int, _: object, others: Sequence[bytes]) -> None:
    other = others[what % len(others)]
    at, start = where % (len(raw) + 1), what // 7 % (len(other) + 1)
    length = 1 + where // 11 % 96
    raw[at : at + (length if what % 2 else 0)] = other[start : start + length]


def _token(raw: bytearray, where: int, what: int, tokens: Sequence[bytes], _: object) -> None:
    token = tokens[what // 2 % len(tokens)]
    at = where % (len(raw) + 1)
    raw[at : at + (len(token) if what % 2 else 0)] = token


def _exchange(raw: bytearray, where: int, what: int, tokens: Sequence[bytes], _: object) -> None:
    """Put one word of the format in the place of another one."""
    found = [token for token in tokens if token in raw]
    if found:
        old, new = found[where % len(found)], tokens[what % len(tokens)]
        at = raw.find(old, where // 17 % len(raw))
        at = at if at >= 0 else raw.find(old)
        raw[at : at + len(old)] = new


def _binary(raw: bytearray, where: int, what: int, *_: object) -> None:
    """Overwrite a little-endian number of 1, 2, 4 or 8 bytes by one at the edge of some type."""
    width = (1, 2, 4, 8)[what % 4]
    at = where % (len(raw) + 1)
    number = _BOUNDARIES[what // 4 % len(_BOUNDARIES)] % 256**width
    raw[at : at + width] = number.to_bytes(width, "little")


def _decimal(raw: bytearray, where: int, what: int, *_: object) -> None:
    """Exchange a number in digits for one at the edge of some type, or for its neighbour."""
    found = list(_NUMBER.finditer(raw))
    if found:
        match = found[where % len(found)]
        old = int(match[0][:30])
        choices = (old + 1, old - 1, -old, 2 * old, *_BOUNDARIES, -1)
        raw[match.start() : match.end()] = b"%d" % choices[what % len(choices)]


_OPERATIONS: tuple[Callable[..., None], ...] = (
    *(_flip, _set, _insert, _delete, _repeat, _truncate, _splice, _token, _exchange, _binary, _decimal),
)
