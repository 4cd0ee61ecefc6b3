"""Publishing: whole or not at all, never over something else, as readable as the umask says."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path

import pytest
from samples import content, staging_left

from ckpt_tools.errors import CkptError, DestinationExistsError, UnreadableError, UsageError
from ckpt_tools.storage import publish
from ckpt_tools.storage.staging import Staging, check_destination, free_bytes


def _fill(staging: Staging) -> None:
    staging.begin()
    staging.create("sub/data", 10)
    staging.write("sub/data", 4, [b"456", memoryview(b"789")])
    staging.write("sub/data", 0, [b"0123"])
    staging.sync("sub/data")
    staging.write_document("marker", b"done")


def _read(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


FILES = {"sub/data": b"0123456789", "marker": b"done"}
OLD = {"old": b"old"}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A destination that is there."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_bytes(b"old")
    return tmp_path / "out"


@pytest.fixture
def _no_flags(monkeypatch) -> None:
    """renameat2 knows no flags, as on some network file systems."""

    def refuse(old: str, new: str, flags: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), new)

    monkeypatch.setattr(publish, "_rename", refuse)


@pytest.fixture(params=["renameat2", "rename"])
def _any_rename(request) -> None:
    if request.param == "rename":
        request.getfixturevalue("_no_flags")


@pytest.mark.usefixtures("_any_rename")
def test_publish_makes_everything_appear_at_once(tmp_path: Path) -> None:
    staging = Staging(str(tmp_path / "out"), overwrite=False)
    _fill(staging)
    assert not (tmp_path / "out").exists()
    staging.publish()
    assert _read(tmp_path / "out") == FILES
    assert staging_left(tmp_path) == []
    staging.discard()
    assert _read(tmp_path / "out") == FILES


def test_discard_leaves_nothing(tmp_path: Path) -> None:
    staging = Staging(str(tmp_path / "out"), overwrite=False)
    _fill(staging)
    staging.discard()
    assert list(tmp_path.iterdir()) == []
    staging.discard()


def test_staging_lies_beside_the_destination_and_looks_like_no_checkpoint(tmp_path: Path) -> None:
    staging = Staging(str(tmp_path / "step-10"), overwrite=False)
    directory = Path(staging.directory)
    assert directory.parent == tmp_path
    assert directory.name.startswith(".ckpt-tmp-")
    assert "step" not in directory.name
    staging.discard()


def test_relative_destination_is_published_there(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    staging = Staging("out", overwrite=False)
    _fill(staging)
    staging.publish()
    assert _read(tmp_path / "out") == FILES


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_modes_follow_the_umask(tmp_path: Path, umask: int) -> None:
    old = os.umask(umask)
    try:
        staging = Staging(str(tmp_path / "out"), overwrite=False)
        _fill(staging)
        staging.publish()
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o777 & ~umask
    assert stat.S_IMODE((tmp_path / "out" / "sub").stat().st_mode) == 0o777 & ~umask
    for name in FILES:
        assert stat.S_IMODE((tmp_path / "out" / name).stat().st_mode) == 0o666 & ~umask


# Destinations


def test_destination_that_exists_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(DestinationExistsError):
        Staging(str(tmp_path / "out"), overwrite=False)
    assert staging_left(tmp_path) == []


def test_missing_parents_are_removed_with_what_was_discarded_and_stay_with_what_is_kept(tmp_path: Path) -> None:
    for is_kept in (False, True):
        staging = Staging(str(tmp_path / "gone" / "deep" / "out"), overwrite=False)
        staging.begin("fingerprint")
        if is_kept:
            staging.keep()
        else:
            staging.discard()
        assert (tmp_path / "gone").exists() == is_kept


def test_destination_below_a_file_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UsageError, match="not a directory"):
        Staging(str(tmp_path / "file" / "out"), overwrite=False)


@pytest.mark.parametrize("overwrite", [False, True])
def test_destination_that_is_a_file_or_a_link_is_refused(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("file", "link", "dangling"):
        with pytest.raises(UsageError if overwrite else DestinationExistsError):
            check_destination(str(tmp_path / name), overwrite=overwrite)


@pytest.mark.parametrize("theirs", [{"theirs": b"theirs"}, {}], ids=["full", "empty"])
def test_destination_that_appears_meanwhile_wins(tmp_path: Path, theirs: dict[str, bytes]) -> None:
    """A plain rename would replace an empty directory without a word."""
    staging = Staging(str(tmp_path / "out"), overwrite=False)
    _fill(staging)
    (tmp_path / "out").mkdir()
    for name, raw in theirs.items():
        (tmp_path / "out" / name).write_bytes(raw)
    inode = (tmp_path / "out").stat().st_ino
    with pytest.raises(DestinationExistsError):
        staging.publish()
    staging.discard()
    assert (tmp_path / "out").stat().st_ino == inode
    assert _read(tmp_path / "out") == theirs
    assert staging_left(tmp_path) == []


def test_concurrent_runs_have_one_winner(tmp_path: Path) -> None:
    results: list[str] = []
    barrier = threading.Barrier(8)

    def work(i: int) -> None:
        barrier.wait()
        try:
            staging = Staging(str(tmp_path / "out"), overwrite=False)
        except DestinationExistsError:
            results.append("refused")
            return
        try:
            staging.begin()
            staging.write_document("who", b"%d" % i)
            staging.publish()
            results.append("won")
        except DestinationExistsError:
            results.append("refused")
        finally:
            staging.discard()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["refused"] * 7 + ["won"]
    assert (tmp_path / "out" / "who").read_bytes().isdigit()
    assert staging_left(tmp_path) == []


# Overwrite


@pytest.mark.usefixtures("_any_rename")
def test_overwrite_exchanges_and_removes_the_old(tmp_path: Path, old: Path) -> None:
    staging = Staging(str(old), overwrite=True)
    _fill(staging)
    assert _read(old) == OLD
    staging.publish()
    assert _read(old) == FILES
    assert staging_left(tmp_path) == []


def test_overwrite_of_nothing_creates(tmp_path: Path) -> None:
    staging = Staging(str(tmp_path / "out"), overwrite=True)
    _fill(staging)
    staging.publish()
    assert _read(tmp_path / "out") == FILES


def test_overwrite_that_is_discarded_leaves_the_old(tmp_path: Path, old: Path) -> None:
    staging = Staging(str(old), overwrite=True)
    _fill(staging)
    staging.discard()
    assert _read(old) == OLD
    assert staging_left(tmp_path) == []


@pytest.mark.usefixtures("_no_flags")
def test_publish_without_renameat2_refuses_what_appears_meanwhile(tmp_path: Path, monkeypatch) -> None:
    staging = Staging(str(tmp_path / "out"), overwrite=False)
    _fill(staging)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "theirs").write_text("theirs")
    # The last look before publishing came a moment too early.
    real = os.path.lexists
    monkeypatch.setattr(os.path, "lexists", lambda path: False if path == str(tmp_path / "out") else real(path))
    with pytest.raises(DestinationExistsError):
        staging.publish()
    monkeypatch.undo()
    staging.discard()
    assert _read(tmp_path / "out") == {"theirs": b"theirs"}
    assert staging_left(tmp_path) == []


@pytest.mark.parametrize("overwrite", [False, True])
def test_rename_that_fails_leaves_things_as_they_were(tmp_path: Path, request, monkeypatch, overwrite: bool) -> None:
    if overwrite:
        request.getfixturevalue("old")
    staging = Staging(str(tmp_path / "out"), overwrite=overwrite)
    _fill(staging)

    def fail(old: str, new: str, flags: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), new)

    monkeypatch.setattr(publish, "_rename", fail)
    with pytest.raises(CkptError, match="cannot publish"):
        staging.publish()
    staging.discard()
    assert _read(tmp_path / "out") == (OLD if overwrite else {})
    assert (tmp_path / "out").exists() == overwrite
    assert staging_left(tmp_path) == []


# Files


@pytest.mark.parametrize("name", ["../out2", "/tmp/absolute", "a/../../b", "a\0b"])
def test_name_that_leads_out_is_refused(tmp_path: Path, name: str) -> None:
    staging = Staging(str(tmp_path / "out"), overwrite=False)
    staging.begin()
    with pytest.raises(UnreadableError, match="leads out"):
        staging.create(name, 3)
    staging.discard()
    assert list(tmp_path.iterdir()) == []


def test_created_file_has_its_size_and_its_space(tmp_path: Path) -> None:
    staging = Staging(str(tmp_path / "out"), overwrite=False)
    staging.begin()
    staging.create("a", 1 << 20)
    status = os.stat(Path(staging.directory) / "a")
    assert status.st_size == 1 << 20
    assert status.st_blocks * 512 >= 1 << 20
    assert staging.allocated_bytes() >= 1 << 20
    staging.discard()


def test_many_files_are_written_with_few_descriptors(tmp_path: Path) -> None:
    staging = Staging(str(tmp_path / "out"), overwrite=False)
    staging.begin()
    for i in range(400):
        staging.create(f"{i}", 8)
    for part in range(2):
        for i in range(400):
            staging.write(f"{i}", 4 * part, [b"%04d" % (i + part)])
    staging.publish()
    assert (tmp_path / "out" / "7").read_bytes() == b"00070008"
    assert (tmp_path / "out" / "399").read_bytes() == b"03990400"


def test_large_write_in_parts_is_whole(tmp_path: Path) -> None:
    raw = content(3 << 20)
    staging = Staging(str(tmp_path / "out"), overwrite=False)
    staging.begin()
    staging.create("a", len(raw))
    assert staging.write("a", 0, [raw[:10], memoryview(raw)[10:]]) == len(raw)
    staging.publish()
    assert (tmp_path / "out" / "a").read_bytes() == raw


def test_full_disk_is_said_with_a_hint(tmp_path: Path) -> None:
    staging = Staging(str(tmp_path / "out"), overwrite=False)
    staging.begin()
    with pytest.raises(CkptError) as caught:
        staging.create("a", free_bytes(str(tmp_path / "out")) + (1 << 40))
    assert caught.value.exit_code == 1
    staging.discard()
    assert list(tmp_path.iterdir()) == []


def test_staging_taken_by_something_else_is_refused(tmp_path: Path) -> None:
    staging = Staging(str(tmp_path / "out"), overwrite=False)
    path = Path(staging.directory)
    staging.discard()
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "precious").write_text("mine")
    path.symlink_to("victim")
    with pytest.raises(CkptError):
        Staging(str(tmp_path / "out"), overwrite=False)
    assert (tmp_path / "victim" / "precious").read_text() == "mine"


def test_staging_that_another_run_left_is_cleared(tmp_path: Path) -> None:
    staging = Staging(str(tmp_path / "out"), overwrite=False)
    path = Path(staging.directory)
    staging.discard()
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "precious").write_text("mine")
    path.mkdir()
    (path / "leftover").write_text("x")
    (path / "link").symlink_to(tmp_path / "victim")
    staging = Staging(str(tmp_path / "out"), overwrite=False)
    _fill(staging)
    staging.publish()
    assert _read(tmp_path / "out") == FILES
    assert (tmp_path / "victim" / "precious").read_text() == "mine"
