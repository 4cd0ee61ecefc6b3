"""Reading by ranges: exact, with few requests, and only of plain names."""

from __future__ import annotations

import random
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings, strategies as st
from samples import content

from ckpt_tools.errors import LimitError, UnreadableError
from ckpt_tools.storage.remote import source as module
from ckpt_tools.storage.remote.source import HEAD_BYTES, MAX_RUN_BYTES, Kept, RemoteFile, RemoteSource

MIB = 1 << 20
LONG = content(40 * MIB)


class Memory(RemoteSource):
    """Files in memory, and the requests that were made for them."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__("mem://place/")
        self.contents = files
        self.asked: list[tuple[str, int, int]] = []

    def _list(self) -> Iterable[tuple[str, RemoteFile]]:
        for name, held in self.contents.items():
            yield name, RemoteFile(nbytes=len(held), version={"etag": f"of {name}"})

    def _fetch(self, file: str, facts: RemoteFile, offset: int, buffer: memoryview) -> None:
        self.asked.append((file, offset, len(buffer)))
        buffer[:] = self.contents[file][offset : offset + len(buffer)]


def test_header_then_tensors_near_it_are_one_request() -> None:
    source = Memory({"a": content(3 * MIB)})
    for offset, nbytes in [(0, 8), (8, 5000), (5008, 100), (MIB - 10, 10)]:
        assert source.read("a", offset, nbytes) == source.contents["a"][offset : offset + nbytes]
    assert source.asked == [("a", 0, MIB)]


def test_large_read_goes_straight_and_takes_what_is_kept() -> None:
    source = Memory({"a": content(6 * MIB)})
    source.read("a", 0, 8)
    assert source.read("a", 100, 5 * MIB) == source.contents["a"][100 : 100 + 5 * MIB]
    assert source.asked == [("a", 0, MIB), ("a", MIB, 4 * MIB + 100)]


def test_small_reads_in_a_row_are_joined_and_leaps_are_not() -> None:
    source = Memory({"a": LONG})
    for offset in range(2 * MIB, 38 * MIB, 64 << 10):
        assert source.read("a", offset, 60 << 10) == source.contents["a"][offset : offset + (60 << 10)]
    assert len(source.asked) <= 14  # 576 reads
    assert max(nbytes for _, _, nbytes in source.asked) <= MAX_RUN_BYTES
    assert sum(nbytes for _, _, nbytes in source.asked) <= 38 * MIB
    for stop in range(3, 36, 3):  # whoever ends early has asked for less than twice what it took
        source = Memory({"a": LONG})
        for offset in range(2 * MIB, stop * MIB, 64 << 10):
            source.read("a", offset, 64 << 10)
        assert sum(nbytes for _, _, nbytes in source.asked) <= 2 * (stop - 2) * MIB
    source = Memory({"a": LONG})
    for offset in range(2 * MIB, 38 * MIB, 3 * MIB):
        source.read("a", offset, 100)
    assert sum(nbytes for _, _, nbytes in source.asked) == 12 * 100


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_reads_are_exact(data: st.DataObject) -> None:
    """Of sizes around the limits, shrunk a thousandfold."""
    with pytest.MonkeyPatch.context() as patch:
        for name, nbytes in [
            ("HEAD_BYTES", 1000),
            ("MAX_GAP_BYTES", 1000),
            ("MAX_RUN_BYTES", 16000),
            ("MAX_KEPT_BYTES", 64000),
        ]:
            patch.setattr(module, name, nbytes)
        files = {name: random.Random(name).randbytes(30_000) for name in ("a", "b")}
        source = Memory(files)
        for _ in range(data.draw(st.integers(1, 20))):
            file = data.draw(st.sampled_from(["a", "b"]))
            offset = data.draw(st.integers(0, 29_000))
            step = data.draw(st.integers(1, 1500))
            for start in range(offset, min(offset + 10 * step, 30_000), step):
                nbytes = min(data.draw(st.integers(0, 1200)), 30_000 - start)
                assert source.read(file, start, nbytes) == files[file][start : start + nbytes]
        assert all(nbytes > 0 for _, _, nbytes in source.asked)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40), st.booleans()), max_size=40))
def test_kept_gives_right_bytes_within_its_limit(steps: list[tuple[int, int, bool]]) -> None:
    whole = bytes(range(100))
    kept = Kept(50)
    for offset, nbytes, puts in steps:
        if puts:
            kept.put("a", offset, whole[offset : offset + nbytes])
            assert kept.find("a", offset, nbytes) == whole[offset : offset + nbytes]
        found = kept.find("a", offset, nbytes)
        assert found is None or bytes(found) == whole[offset : offset + len(found)]
        assert found is None or len(found) > 0
        assert sum(map(len, kept._runs.values())) == kept._nbytes <= 50


def test_many_threads_get_exact_bytes() -> None:
    source = Memory({name: random.Random(name).randbytes(3 * MIB) for name in "abc"})
    draws = random.Random(0)
    spans = [(draws.choice("abc"), draws.randrange(2 * MIB), draws.randrange(1, MIB // 4)) for _ in range(300)]

    def check(span: tuple[str, int, int]) -> bool:
        file, offset, nbytes = span
        return source.read(file, offset, nbytes) == source.contents[file][offset : offset + nbytes]

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(check, spans))


@pytest.mark.parametrize("name", ["../a", "a/../../b", "/etc/passwd", "a//b", "a/", "", "a\0b", "./a"])
def test_listing_with_a_name_that_leads_out_is_refused(name: str) -> None:
    with pytest.raises(UnreadableError, match="leads out"):
        Memory({name: b"1"}).list_files()


def test_listing_leaves_out_hidden_directories_and_depths_but_can_read_them() -> None:
    source = Memory({"a": b"1", ".ckpt/claim": b"22", ".metadata": b"333", "1/2/3/4/deep": b"4444", "1/2/3/b": b"5"})
    assert source.list_files() == {".metadata": 3, "1/2/3/b": 1, "a": 1}
    assert source.read(".ckpt/claim", 0, 2) == b"22"
    assert source.identities() == {".ckpt/claim": {"nbytes": 2, "etag": "of .ckpt/claim"}}


def test_endless_listing_ends(monkeypatch) -> None:
    monkeypatch.setattr(module, "MAX_FILES", 100)

    class Endless(Memory):
        def _list(self) -> Iterable[tuple[str, RemoteFile]]:
            number = 0
            while True:
                number += 1
                yield f"file-{number}", RemoteFile(nbytes=1)

    with pytest.raises(LimitError, match="more than 100 files"):
        Endless({}).list_files()


def test_read_beyond_the_listed_size_and_of_what_is_not_there_is_refused() -> None:
    source = Memory({"a": b"12345"})
    with pytest.raises(UnreadableError, match="the file has 5"):
        source.read_into("a", 3, memoryview(bytearray(3)))
    with pytest.raises(UnreadableError, match="missing"):
        source.size("b")
    assert source.asked == []
    assert source.read("a", 5, 0) == b""
    assert HEAD_BYTES == MIB
