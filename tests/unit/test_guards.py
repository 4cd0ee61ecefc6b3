"""Guards of safety, each broken once by hand: what fails here would be noticed nowhere else in the quick tier."""

from __future__ import annotations

import io
import os
import re
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from samples import (
    content,
    files_of,
    memory_directory,
    shard_model,
    small_blocks,
    staging_left,
    stop_after,
    tensor,
    write_model,
)

from ckpt_tools import api
from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.checkpoint.entries import ByteSpan, Chunk, TensorEntry
from ckpt_tools.checkpoint.formats.digest import digest_block
from ckpt_tools.checkpoint.formats.item_frames import digest_frames
from ckpt_tools.checkpoint.formats.torch_zip import END64, LOCATOR, archive_frame, parse_archive
from ckpt_tools.checkpoint.layout import Box
from ckpt_tools.convert.run import merge
from ckpt_tools.errors import CkptError, DestinationExistsError, UnreadableError
from ckpt_tools.storage import claim, publish
from ckpt_tools.storage.claim import claim_directory, staging_path
from ckpt_tools.storage.journal import JOURNAL_NAME, BlockRecord, JournalWriter, read_journal
from ckpt_tools.storage.shared_staging import SharedStaging
from ckpt_tools.storage.source import LocalSource
from ckpt_tools.storage.staging import Staging
from ckpt_tools.storage.virtual import VirtualFile, VirtualSource
from ckpt_tools.transfer.execute import Sealing, digest_planned_frames, execute
from ckpt_tools.transfer.plan import Copy, FilePlan, blocks_of, check_names, chunk_index, copy_span
from ckpt_tools.transfer.read import Buffers, Checksums, combine_crcs, read_block
from ckpt_tools.transfer.share_record import PartFile, ShareRecord, TensorPart, build_record, parse_record
from ckpt_tools.transfer.tensor_digest import DisagreementError, Seen

# What is durable, and in which order


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that are fsynced, and "rename", as they come; all of it is done."""
    seen: list[str] = []
    fsync, rename, replace = os.fsync, publish._rename, os.replace

    def note(what: Callable[..., str], call: Callable[..., object]) -> Callable[..., None]:
        def noted(*arguments: object) -> None:
            seen.append(what(*arguments))
            call(*arguments)

        return noted

    monkeypatch.setattr(os, "fsync", note(lambda fd: os.readlink(f"/proc/self/fd/{fd}"), fsync))
    monkeypatch.setattr(publish, "_rename", note(lambda *_: "rename", rename))
    monkeypatch.setattr(os, "replace", note(lambda *_: "replace", replace))
    return seen


def test_everything_is_synced_before_the_rename_and_what_leads_there_as_well(tmp_path: Path, calls: list[str]) -> None:
    staging = Staging(str(tmp_path / "made" / "deep" / "out"), overwrite=False)
    assert calls == [str(tmp_path), str(tmp_path / "made")]
    staging.begin("fingerprint")
    for file in ("a/b/data", "top"):
        staging.create(file, 1)
        staging.write(file, 0, [b"x"])
        staging.sync(file)
    staging.publish()
    before, after = calls[: calls.index("rename")], calls[calls.index("rename") + 1 :]
    inside = [os.path.join(staging.directory, name) for name in ("a/b/data", "top", "a", "a/b")]
    assert {staging.directory, *inside} <= set(before)
    assert after == [str(tmp_path / "made" / "deep" / "out"), str(tmp_path / "made" / "deep")]


def test_every_file_of_a_conversion_is_synced_before_the_rename(tmp_path: Path, calls: list[str]) -> None:
    source = write_model(tmp_path / "model")
    for verb, options in (("shard", {"mesh": "dp_shard=2"}), ("gather", {})):
        calls.clear()
        getattr(api, verb)(source, tmp_path / verb, **options)
        before = {os.path.basename(path) for path in calls[: calls.index("rename")]}
        assert {path.name for path in (tmp_path / verb).iterdir()} <= before


def test_small_file_is_synced_before_it_replaces_and_its_directory_after(tmp_path: Path, calls: list[str]) -> None:
    publish.replace_file(str(tmp_path / "record"), b"x", str(tmp_path / "part"))
    assert calls == [str(tmp_path / "part"), "replace", str(tmp_path)]


def test_record_of_a_part_is_written_after_its_files_and_directories_are_durable(
    tmp_path: Path, calls: list[str]
) -> None:
    sink = _shared(tmp_path)
    sink.create("sub/data", 1)
    calls.clear()
    sink.put_record("share-00000-of-00002-pass-000.json", b"{}")
    assert calls[0] == os.path.join(sink.directory, "sub")
    assert calls.index("replace") > 1
    sink.discard()


# Whose directory it is


def test_staging_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(staging_path(str(tmp_path / "out")))
    path.mkdir()
    if os.geteuid() == 0:
        os.chown(path, 65534, 65534)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 65534)
    with pytest.raises(CkptError, match="belongs to another user"):
        Staging(str(tmp_path / "out"), overwrite=False)
    assert path.exists()


def test_directory_that_is_replaced_before_its_lock_is_not_the_one_that_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run publishes what this one has just opened: what is locked is a checkpoint by then."""
    lock, turns = claim._lock, []

    def late(descriptor: int, destination: str) -> bool:
        if not turns:
            turns.append(os.rename(staging_path(destination), tmp_path / "published"))
            os.mkdir(staging_path(destination))
        return lock(descriptor, destination)

    monkeypatch.setattr(claim, "_lock", late)
    path, descriptor = claim_directory(str(tmp_path / "out"))
    assert os.fstat(descriptor).st_ino == os.stat(path).st_ino
    os.close(descriptor)


def test_old_checkpoint_is_locked_while_it_changes_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the staging directory's name for a moment, in which another run must not take it for one."""
    (tmp_path / "out").mkdir()
    staging = Staging(str(tmp_path / "out"), overwrite=True)
    staging.begin()
    rmtree, refused = publish.shutil.rmtree, []

    def look(path: str) -> None:
        with pytest.raises(DestinationExistsError):
            claim_directory(str(tmp_path / "out"))
        refused.append(path)
        rmtree(path)

    monkeypatch.setattr(publish, "shutil", SimpleNamespace(rmtree=look))
    staging.publish()
    assert refused == [staging.directory]


def test_old_checkpoint_that_was_put_aside_is_put_back(tmp_path: Path) -> None:
    """A run without RENAME_EXCHANGE was killed between its two renames."""
    aside = Path(staging_path(str(tmp_path / "out")) + ".old")
    aside.mkdir()
    (aside / "old").write_bytes(b"old")
    with Staging(str(tmp_path / "out"), overwrite=True) as staging:
        staging.begin()
    assert (tmp_path / "out" / "old").read_bytes() == b"old"
    assert not aside.exists()


def test_second_rename_that_fails_brings_the_old_checkpoint_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_bytes(b"old")
    staging = Staging(str(tmp_path / "out"), overwrite=True)
    staging.begin()
    rename = os.rename

    def refuse(*_: object) -> None:
        raise OSError(22, "Invalid argument")

    def fail(old: str, new: str) -> None:
        if old == staging.directory:
            raise OSError(5, "Input/output error")
        rename(old, new)

    monkeypatch.setattr(publish, "_rename", refuse)
    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(CkptError, match="cannot publish"):
        staging.publish()
    staging.discard()
    assert (tmp_path / "out" / "old").read_bytes() == b"old"


# What is found there


RECORD = BlockRecord("0" * 32, ())


def test_record_after_a_torn_line_counts(tmp_path: Path) -> None:
    writer = JournalWriter(str(tmp_path), "mine", continues=False)
    writer.append(0, 0, RECORD)
    writer.append(0, 1, RECORD)
    writer.close()
    os.truncate(tmp_path / JOURNAL_NAME, (tmp_path / JOURNAL_NAME).stat().st_size - 7)
    writer = JournalWriter(str(tmp_path), "mine", continues=True)
    writer.append(0, 2, RECORD)
    writer.close()
    assert (read_journal(str(tmp_path), "mine") or {}).keys() == {(0, 0), (0, 2)}
    assert read_journal(str(tmp_path), "other") is None


@pytest.mark.parametrize("kind", ["flipped", "link", "hard-link"])
def test_journal_that_is_not_its_writers_counts_for_nothing(tmp_path: Path, kind: str) -> None:
    writer = JournalWriter(str(tmp_path), "mine", continues=False)
    writer.append(0, 0, RECORD)
    writer.close()
    journal = tmp_path / JOURNAL_NAME
    if kind == "flipped":
        journal.write_bytes(journal.read_bytes().replace(b"000", b"100", 1))
    else:
        journal.rename(tmp_path / "victim")
        (journal.symlink_to if kind == "link" else journal.hardlink_to)(tmp_path / "victim")
    assert not read_journal(str(tmp_path), "mine")


def _interrupted(root: Path) -> tuple[Path, dict[str, str]]:
    """Stop a conversion half-way; return its staging directory, and what a whole one makes."""
    source = write_model(root / "model", {"a": tensor("F32", 64, 8, seed=1), "b": tensor("F32", 64, 8, seed=2)})
    api.shard(source, root / "whole", mesh="dp_shard=2", num_workers=1)
    with pytest.raises(KeyboardInterrupt):
        api.shard(source, root / "out", mesh="dp_shard=2", num_workers=1, progress=stop_after(2048))
    return root / staging_left(root)[0], files_of(root / "whole")


@pytest.mark.parametrize("what", ["nothing", "bytes", "link", "hard-link", "longer", "foreign"])
def test_only_what_is_right_is_kept_of_an_interrupted_run(what: str) -> None:
    with memory_directory() as name, small_blocks(256):
        root = Path(name)
        staging, expected = _interrupted(root)
        file, victim = staging / "__0_0.distcp", root / "victim"
        raw = file.read_bytes()
        victim.write_bytes(bytes(len(raw)))
        if what == "bytes":
            at = raw.index(tensor("F32", 64, 8, seed=1)[2][:64])
            file.write_bytes(raw[:at] + bytes(8) + raw[at + 8 :])
        elif what == "longer":
            file.write_bytes(raw + b"x")
        elif what == "foreign":
            (staging / "foreign" / "deep").mkdir(parents=True)
            (staging / "foreign.distcp").symlink_to(victim)
        elif what != "nothing":
            file.unlink()
            (file.symlink_to if what == "link" else file.hardlink_to)(victim)
        result = api.shard(root / "model", root / "out", mesh="dp_shard=2", num_workers=1)
        assert any(note.startswith("continued an interrupted run") for note in result.notes) or what != "nothing"
        assert files_of(root / "out") == expected
        assert not any(path.is_symlink() for path in (root / "out").iterdir())
        assert victim.read_bytes() == bytes(len(raw))


def test_link_that_takes_the_place_of_a_staged_file_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "victim").write_bytes(b"precious")
    with Staging(str(tmp_path / "out"), overwrite=False) as staging:
        staging.begin()
        staging.create("data", 8)
        os.remove(os.path.join(staging.directory, "data"))
        os.symlink(tmp_path / "victim", os.path.join(staging.directory, "data"))
        with pytest.raises(OSError, match="symbolic links"):
            staging.write("data", 0, [b"x"])
    assert (tmp_path / "victim").read_bytes() == b"precious"


def _shared(root: Path) -> SharedStaging:
    sink = SharedStaging(str(root / "out"))
    sink.join("fingerprint", 2)
    sink.begin("share-00000-of-00002-pass-000.json")
    return sink


def test_hard_link_is_no_finished_file_of_a_part(tmp_path: Path) -> None:
    with _shared(tmp_path) as sink:
        sink.create("data", 1)
        assert sink.identity("data") is not None
        os.link(os.path.join(sink.directory, "data"), tmp_path / "elsewhere")
        assert sink.identity("data") is None


def test_part_is_written_by_one_process_at_a_time(tmp_path: Path) -> None:
    with _shared(tmp_path), pytest.raises(DestinationExistsError, match="another process is writing this part"):
        _shared(tmp_path)


# What is read


@pytest.mark.parametrize("kernel", [True, False], ids=["openat2", "open"])
def test_file_that_is_swapped_before_it_is_opened_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: bool
) -> None:
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "b").write_bytes(b"2")
    if not kernel:
        monkeypatch.setattr("ckpt_tools.storage.safe_open.is_available", lambda: False)
    with LocalSource(str(tmp_path)) as source:
        opens = source._open

        def swap(path: str, flags: int) -> int:
            descriptor = opens(path, flags)
            if flags & os.O_PATH:
                os.replace(tmp_path / "b", tmp_path / "a")
            return descriptor

        monkeypatch.setattr(source, "_open", swap)
        with pytest.raises(CkptError, match="changed while it was read"):
            source.read("a", 0, 1)


@pytest.mark.parametrize("kernel", [True, False], ids=["openat2", "open"])
def test_link_that_comes_after_the_path_was_resolved_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: bool
) -> None:
    (tmp_path / "root" / "sub").mkdir(parents=True)
    (tmp_path / "root" / "sub" / "a").write_bytes(b"1")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a").write_bytes(b"secret")
    if not kernel:
        monkeypatch.setattr("ckpt_tools.storage.safe_open.is_available", lambda: False)
    with LocalSource(str(tmp_path / "root")) as source:
        resolve = source.path

        def late(file: str) -> str:
            real = resolve(file)
            os.rename(tmp_path / "root" / "sub", tmp_path / "gone")
            os.symlink(tmp_path / "other", tmp_path / "root" / "sub")
            return real

        monkeypatch.setattr(source, "path", late)
        with pytest.raises(UnreadableError, match="changed meanwhile"):
            source.read("sub/a", 0, 1)


def test_source_that_changes_while_it_is_moved_is_noticed(tmp_path: Path) -> None:
    """Also where nothing else looks at it again: files that are carried along come from sources of their own."""
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "a").write_bytes(content(64))
    plan = FilePlan(file="a", nbytes=64, copies=(copy_span("a", ByteSpan(file="a", offset=0, nbytes=64), 0),))

    def change(_: int) -> None:
        os.utime(tmp_path / "root" / "a", ns=(0, 1))

    with LocalSource(str(tmp_path / "root")) as source, Staging(str(tmp_path / "out"), overwrite=False) as staging:
        staging.begin()
        with pytest.raises(CkptError, match="changed while it was read"):
            execute([plan], source, staging, num_workers=1, progress=change)


def test_source_with_made_files_is_watched_as_the_one_below(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    with VirtualSource(LocalSource(str(tmp_path)), {"made": VirtualFile.of(b"y")}) as source:
        assert (source.read("a", 0, 1), source.read("made", 0, 1)) == (b"x", b"y")
        assert source.identities()["a"]["mtime_ns"] == (tmp_path / "a").stat().st_mtime_ns
        os.utime(tmp_path / "a", ns=(0, 1))
        with pytest.raises(CkptError, match="changed while it was read"):
            source.check_unchanged()


def test_item_that_was_not_written_whole_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "a").write_bytes(content(64))
    copy = copy_span("a", ByteSpan(file="a", offset=0, nbytes=64), 512)
    wider = Copy(copy.source, copy.dtype, Box((0,), (80,)), 512, "torch_zip")
    with LocalSource(str(tmp_path / "root")) as source, Staging(str(tmp_path / "out"), overwrite=False) as staging:
        staging.begin()
        with pytest.raises(CkptError, match="wrote 64 of 80 bytes"):
            execute([FilePlan(file="a", nbytes=4096, copies=(wider,))], source, staging, num_workers=1)


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (["a", "a/b"], "also be a directory"),
        (["a/b/c", "a/b"], "also be a directory"),
        (["a", "b", "a"], "same name"),
        *((["a", name], "leads out") for name in ("../b", "/b", "")),
    ],
)
def test_names_that_cannot_be_files_of_one_destination_are_refused(names: list[str], what: str) -> None:
    check_names(["a", "b/c", "b/d/e", "ab", "b/cc", "b/a"])
    with pytest.raises(UnreadableError, match=what):
        check_names(names)


class _Edit:
    """Leaves everything as it is."""

    def __init__(self, *, is_settled: bool) -> None:
        self.is_settled = is_settled

    def apply(self, block: Box, content: memoryview, result: memoryview) -> None:
        result[:] = content

    def finish(self) -> None:
        pass


@pytest.mark.parametrize("is_settled", [True, False])
def test_blocks_are_kept_only_once_an_edit_has_seen_what_it_must(tmp_path: Path, is_settled: bool) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "a").write_bytes(content(64))
    plan = FilePlan(file="a", nbytes=64, copies=(copy_span("a", ByteSpan(file="a", offset=0, nbytes=64), 0),))
    kept = []
    for _ in range(2):
        with LocalSource(str(tmp_path / "root")) as source, Staging(str(tmp_path / "out"), overwrite=False) as staging:
            staging.begin("fingerprint")
            edits = {"a": _Edit(is_settled=is_settled)}
            kept.append(execute([plan], source, staging, num_workers=1, resumable=True, edits=edits).bytes_kept)
            staging.keep()
    assert kept == [0, 64 if is_settled else 0]


def test_crcs_of_runs_with_a_hole_or_an_overlap_are_those_of_nothing() -> None:
    raw = content(9)
    runs = [(0, 4, zlib.crc32(raw[:4])), (4, 5, zlib.crc32(raw[4:]))]
    assert combine_crcs(runs[::-1]) == (zlib.crc32(raw), 9)
    for wrong in (runs[1:], [runs[0], (5, 4, 0)], [*runs, (3, 1, 0)], [*runs, runs[0]]):
        assert combine_crcs(wrong)[1] == -1


def test_crc_of_a_strided_chunk_is_compared(tmp_path: Path) -> None:
    raw = content(24)
    (tmp_path / "a").write_bytes(raw)
    chunk = Chunk(
        box=Box((0, 0), (2, 3)), span=ByteSpan(file="a", offset=0, nbytes=24), strides=(1, 2), crc32=zlib.crc32(raw)
    )
    entry = TensorEntry(fqn="w", dtype=BY_NAME["F32"], shape=(2, 3), chunks=(chunk,))
    with LocalSource(str(tmp_path)) as source:
        assert Checksums().check(entry, chunk, source)
    (tmp_path / "a").write_bytes(raw[:-1] + b"?")
    with LocalSource(str(tmp_path)) as source, pytest.raises(UnreadableError, match="CRC-32 of its bytes"):
        Checksums().check(entry, chunk, source)


@pytest.mark.parametrize(
    ("box", "strides", "what"),
    [
        (Box((0, 0), (1, 3)), None, "its chunks hold 3 of 6 elements"),
        (Box((0, 0), (2, 3)), (1, 3), "strides lead out of the item"),
        (Box((0, 0), (2, 3)), (-3, 1), "strides lead out of the item"),
    ],
)
def test_block_that_is_not_all_there_is_not_read(tmp_path: Path, box: Box, strides, what: str) -> None:
    (tmp_path / "a").write_bytes(content(99))
    chunk = Chunk(box=box, span=ByteSpan(file="a", offset=24, nbytes=4 * box.num_elems), strides=strides)
    entry = TensorEntry(fqn="w", dtype=BY_NAME["F32"], shape=(2, 3), chunks=(chunk,))
    whole = Box((0, 0), (2, 3))
    with LocalSource(str(tmp_path)) as source, pytest.raises(CkptError, match=what):
        read_block(entry, chunk_index(entry), entry.dtype, whole, source, Buffers())


def test_directory_of_an_archive_that_is_out_of_order_is_refused() -> None:
    """Where each entry ends is looked up among the places of all: they must come in order."""
    frame = archive_frame(b"x", [4, 4])
    raw = bytearray(frame.before)
    for offset, piece in frame.seal([zlib.crc32(bytes(4))] * 2):
        raw += bytes(offset - len(raw)) + piece
    assert len(parse_archive(len(raw), lambda at, n: bytes(raw[at : at + n]))) > 4
    starts = [at.start() for at in re.finditer(rb"PK\x01\x02", raw)]
    first, second, third = starts[:3]
    raw[first:third] = raw[second:third] + raw[first:second]
    with pytest.raises(UnreadableError, match="overlaps what lies around it"):
        parse_archive(len(raw), lambda at, n: bytes(raw[at : at + n]))


def test_digest_of_what_lies_around_payloads_is_the_same_planned_and_read(tmp_path: Path) -> None:
    raw = b"head" + bytes(6) + content(20) + bytes(7)
    (tmp_path / "a").write_bytes(raw)
    span = ByteSpan(file="a", offset=10, nbytes=20)
    plan = FilePlan(file="a", nbytes=len(raw), copies=(copy_span("a", span, 10),), head=b"head")
    with LocalSource(str(tmp_path)) as source:
        assert {"a": digest_planned_frames(plan, {})} == digest_frames({"a": len(raw)}, [span], [], source)


def test_archive_is_closed_in_order_whichever_payload_is_done_first() -> None:
    frame = archive_frame(b"x", [4, 4])
    copies = tuple(copy_span(f"t{at}", ByteSpan(file="a", offset=0, nbytes=4), at) for at in frame.starts)
    sealing = Sealing(FilePlan(file="a", nbytes=frame.nbytes, copies=copies, seal=frame.seal), frame.seal)
    assert sealing.add(frame.starts[1], 2) == []
    assert sealing.add(frame.starts[0], 1) == list(frame.seal([1, 2]))


# Shares


def _seen() -> tuple[Seen, TensorEntry, bytes]:
    span = ByteSpan(file="f", offset=0, nbytes=64)
    entry = TensorEntry(
        fqn="w", dtype=BY_NAME["F32"], shape=(4, 4), chunks=(Chunk(box=Box((0, 0), (4, 4)), span=span),)
    )
    return Seen(entry, entry.dtype, blocks_of(entry, entry.dtype), counting=False), entry, content(64)


def _part(raw: bytes, *runs: tuple[int, int], owner: bool = False) -> TensorPart:
    """What a share that has read `raw` tells of a tensor of one block, of runs (from, to) of it."""
    return TensorPart(
        digests={0: digest_block(raw).hex()} if owner else {},
        runs={0: tuple((at, to - at, zlib.crc32(raw[at:to])) for at, to in runs)},
    )


def test_shares_that_read_different_bytes_are_told_apart() -> None:
    seen, entry, raw = _seen()
    other = bytes([raw[0] ^ 1]) + raw[1:]
    index, owner, all_of_it = chunk_index(entry), _part(raw, (0, 32), (0, 64), owner=True), (0, 64)
    assert seen.merge([("a", owner), ("b", _part(raw, (32, 64)))], index) == 0
    assert seen.digest()
    column = _part(raw, all_of_it, owner=True)
    assert _seen()[0].merge([("a", column), ("b", _part(raw, all_of_it))], index) == 0
    for untold in ([("a", owner)], [("a", column), ("b", _part(raw, (16, 32)))]):  # nobody tells of the rest
        assert _seen()[0].merge(untold, index) == 1
    quiet = _part(raw, owner=True)  # and here the owner of nothing
    assert _seen()[0].merge([("a", replace(quiet, runs={})), ("b", _part(raw, all_of_it))], index) == 1
    wrong = {
        "a whole block": _part(other, all_of_it),
        "a run": _part(raw[:32] + other[::-1][:32], (32, 64)),
        "the owner's run": _part(other, (0, 32), (32, 64)),
        "an owner": _part(other, owner=True),
    }
    for what, part in wrong.items():
        with pytest.raises(DisagreementError) as caught:
            _seen()[0].merge([("a", owner), ("b", part)], index)
        assert {"b"} <= set(caught.value.shares) <= {"a", "b"}, what
    with pytest.raises(CkptError, match="no part has read its blocks"):
        _seen()[0].merge([("b", _part(raw, (0, 32)))], index)


@pytest.mark.parametrize(
    "wrong",
    [
        {"schema_version": 1},
        {"files": {"../out": PartFile(identity={})}},
        {"index": 2},
        {"digests": {"w": "../" + "0" * 29}},
        {"parts": {"w": TensorPart(digests={0: "no digest"})}},
        {"number": "0"},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_record_that_no_part_writes_counts_for_nothing(wrong: dict[str, object]) -> None:
    record = ShareRecord(fingerprint="0" * 32, index=1, count=2, parts={"w": TensorPart(digests={0: "1" * 32})})
    assert parse_record(build_record(record), where="x") == record
    with pytest.raises(UnreadableError, match="malformed, or of another version"):
        parse_record(build_record(replace(record, **wrong)), where="x")  # type: ignore[arg-type]


def test_parts_that_have_read_a_whole_tensor_differently_publish_nothing() -> None:
    records = [ShareRecord(fingerprint="0" * 32, index=i, count=2, digests={"w": f"{i}" * 32}) for i in range(2)]
    with pytest.raises(CkptError, match="two parts have read different bytes of 'w'"):
        merge(None, records)  # type: ignore[arg-type] - the records are enough to see it


# Continuing, and what is believed


def test_average_with_other_weights_does_not_go_on_with_the_old_blocks() -> None:
    with memory_directory() as name, small_blocks(256):
        root = Path(name)
        one, two = (write_model(root / str(seed), {"w": tensor("F32", 64, 8, seed=seed)}) for seed in (1, 2))
        api.average([one, two], root / "expected", weights="0.25,0.75")

        with pytest.raises(KeyboardInterrupt):
            api.average([one, two], root / "out", weights="0.75,0.25", progress=stop_after(768), num_workers=1)
        assert staging_left(root)
        notes = api.average([one, two], root / "out", weights="0.25,0.75").notes
        assert any(note.startswith("removed the remains of an interrupted run with other arguments") for note in notes)
        assert files_of(root / "out") == files_of(root / "expected")


def test_mesh_of_a_manifest_is_not_that_of_what_was_saved_over_it(tmp_path: Path) -> None:
    run = shard_model(tmp_path, "dp_shard=2")
    assert api.open_checkpoint(run).mesh is not None
    api.shard(tmp_path / "model", tmp_path / "other", mesh="dp_shard=3")
    for file in (tmp_path / "other").iterdir():
        if file.name != "ckpt_manifest.json":
            (run / file.name).write_bytes(file.read_bytes())
    assert api.open_checkpoint(run).mesh is None


# Numbers at their limits


@pytest.mark.parametrize("below", [1, 0])
def test_payload_of_the_largest_short_length_has_long_fields(tmp_path: Path, below: int) -> None:
    """2³² - 1 in a short field says that a long one follows; real zip readers and the specification agree."""
    nbytes = 0xFFFFFFFF - below
    frame = archive_frame(b"x", [nbytes, 1])
    file = tmp_path / "archive"
    with file.open("wb") as stream:
        stream.write(frame.before)
        for offset, piece in frame.seal([7, 9]):
            stream.seek(offset)
            stream.write(piece)
        assert stream.tell() == frame.nbytes  # sparse
        assert os.fstat(stream.fileno()).st_blocks < 1 << 16
    with zipfile.ZipFile(file) as archive:
        infos = {info.filename: info for info in archive.infolist()}
        payload, next_one = infos["archive/data/0"], infos["archive/data/1"]
        assert (payload.file_size, payload.CRC) == (nbytes, 7)
        assert bool(payload.extra) == (below == 0)
        assert payload.extract_version == (20 if below else 45)
        archive.open("archive/version").close()
    with file.open("rb") as stream:
        stream.seek(frame.starts[0] + nbytes)
        descriptor = stream.read(24)
        wide = int.from_bytes(descriptor[8:16], "little") if below == 0 else int.from_bytes(descriptor[8:12], "little")
        assert wide == nbytes
        stream.seek(payload.header_offset + 4)
        assert int.from_bytes(stream.read(2), "little") == payload.extract_version
        assert next_one.header_offset == frame.starts[0] + nbytes + (24 if below == 0 else 16)


def test_directory_that_begins_at_the_largest_short_place_has_long_fields() -> None:
    small = archive_frame(b"x", [64])
    ((at, rest),) = small.seal([0])
    with zipfile.ZipFile(io.BytesIO(small.before + bytes(at - len(small.before)) + rest)) as archive:
        nbytes = 64 + 0xFFFFFFFF - archive.start_dir
    shorter, exact = (archive_frame(b"x", [nbytes - less]).nbytes for less in (1, 0))
    assert exact - shorter == 1 + END64.size + LOCATOR.size
