"""Pieces of a file in any order, through parts of any size, give the file; what a worker may run ahead is bounded."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
from hypothesis import given, strategies as st

from ckpt_tools.checkpoint.entries import ByteSpan
from ckpt_tools.errors import CkptError
from ckpt_tools.storage.remote.upload import PartStream
from ckpt_tools.transfer import threads
from ckpt_tools.transfer.execute import front_to_back
from ckpt_tools.transfer.plan import Copy, copy_span

Pieces = list[tuple[int, bytes]]


@st.composite
def files(draw: st.DrawFn) -> tuple[bytes, Pieces, list[tuple[int, int]]]:
    """A file, its pieces in any order (empty ones too), and the zeros that nobody writes."""
    content, pieces, gaps = b"", [], []
    for number, (length, is_gap) in enumerate(draw(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=12))):
        if is_gap:
            gaps.append((len(content), length))
            content += bytes(length)
        else:
            pieces.append((len(content), bytes([number + 1]) * length))
            content += pieces[-1][1]
    return content, draw(st.permutations(pieces)), gaps


@given(files(), st.integers(1, 7))
def test_any_order_gives_the_file_in_equal_parts(file: tuple[bytes, Pieces, list[tuple[int, int]]], part: int) -> None:
    content, pieces, gaps = file
    parts: list[bytes] = []
    stream = PartStream(len(content), part, lambda each: parts.append(bytes(each)), gaps)
    for offset, piece in pieces:
        buffer = bytearray(piece)
        assert stream.add(offset, [memoryview(buffer)[:1], memoryview(buffer)[1:]]) == len(piece)
        buffer[:] = b"\xff" * len(buffer)  # it is the caller's again
        assert stream.held_bytes <= sum(map(len, (p for _, p in pieces))) + part
    stream.close()
    assert b"".join(parts) == content
    assert {len(each) for each in parts[:-1]} <= {part}
    assert all(parts)
    assert stream.held_bytes == 0


@given(files(), st.data())
def test_nothing_is_written_twice_or_left_out(
    file: tuple[bytes, Pieces, list[tuple[int, int]]], data: st.DataObject
) -> None:
    content, pieces, gaps = file
    solid = [each for each in pieces if each[1]]
    if not solid:
        return
    odd = data.draw(st.sampled_from(solid))
    without = [each for each in pieces if each is not odd]
    with pytest.raises(CkptError, match=r"nothing was written from byte"):
        _send(content, without, gaps)
    shifted = (odd[0] + data.draw(st.integers(0, len(odd[1]) - 1)), odd[1])
    with pytest.raises(CkptError, match=r"twice"):
        _send(content, data.draw(st.permutations([*pieces, shifted])), gaps)


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_nothing_is_written_beyond_the_end(offset: int) -> None:
    """Nor kept, until the end comes: nobody would ask for it."""
    with pytest.raises(CkptError, match="beyond the end"):
        PartStream(4, 3, lambda part: None).add(offset, [bytes(5 - offset)])


def _send(content: bytes, pieces: Pieces, gaps: list[tuple[int, int]]) -> None:
    stream = PartStream(len(content), 3, lambda part: None, gaps)
    for offset, piece in pieces:
        stream.add(offset, [piece])
    stream.close()


@given(st.integers(1, 4), st.data())
def test_nobody_runs_far_ahead_of_a_slow_unit(num_workers: int, data: st.DataObject) -> None:
    slow = data.draw(st.sets(st.integers(0, 99), max_size=2))
    done: set[int] = set()
    lock = threading.Lock()
    ahead = 0

    def begin():
        def work(unit: int) -> None:
            nonlocal ahead
            with lock:
                ahead = max(ahead, unit - next(i for i in itertools.count() if i not in done))
            if unit in slow:
                time.sleep(0.003)
            with lock:
                done.add(unit)

        return work

    threads.Crew(iter(range(100)), begin).run(num_workers)
    assert done == set(range(100))
    assert ahead < 4 * num_workers


def test_an_error_ends_those_who_wait() -> None:
    """The others wait for the first unit, which never finishes but fails."""

    def begin():
        def work(unit: int) -> None:
            if unit == 0:
                time.sleep(0.05)
                raise CkptError("no")

        return work

    with pytest.raises(CkptError, match="no"):
        threads.Crew(iter(range(1000)), begin).run(3)


@st.composite
def layouts(draw: st.DrawFn) -> list[list[tuple[str, Copy]]]:
    """Tensors with copies in files, each file in an order of its own or in the tensors'."""
    count = draw(st.integers(1, 8))
    groups: list[list[tuple[str, Copy]]] = [[] for _ in range(count)]
    everywhere = draw(st.permutations(range(count)))
    for file in "abc":
        held = draw(st.sets(st.integers(0, count - 1)))
        for at, number in enumerate(each for each in everywhere if each in held):
            copy = copy_span(str(number), ByteSpan(file="", offset=0, nbytes=1), at)
            groups[number].append((file, copy))
    return groups


@given(layouts())
def test_files_that_agree_are_each_written_from_their_beginning(groups: list[list[tuple[str, Copy]]]) -> None:
    order = front_to_back(groups)
    assert sorted(order) == list(range(len(groups)))
    for file in "abc":
        offsets = [copy.offset for number in order for name, copy in groups[number] if name == file]
        assert offsets == sorted(offsets)


def test_files_that_disagree_are_written_all_the_same() -> None:
    first, second = (copy_span("t", ByteSpan(file="", offset=0, nbytes=1), at) for at in (0, 9))
    assert sorted(front_to_back([[("a", first), ("b", second)], [("a", second), ("b", first)]])) == [0, 1]
