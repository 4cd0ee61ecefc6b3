"""Reading: contained in a root, exact, and watched for change."""

import errno
import os
import threading
from pathlib import Path

import pytest
from samples import MODEL, content, files_of, write_model

from ckpt_tools import api
from ckpt_tools.errors import CkptError, StorageError, UnreadableError
from ckpt_tools.storage.source import Descriptors, LocalSource


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "sub").mkdir(parents=True)
    (root / "a").write_bytes(content(100))
    (root / "sub" / "b").write_bytes(b"12345")
    return root


def test_read_gives_exactly_the_bytes(root: Path) -> None:
    with LocalSource(str(root)) as source:
        assert source.read("a", 10, 20) == content(100)[10:30]
        assert source.read("sub/b", 0, 5) == b"12345"
        assert source.read("a", 100, 0) == b""
        assert source.size("a") == 100
        buffer = bytearray(7)
        source.read_into("a", 93, memoryview(buffer))
        assert bytes(buffer) == content(100)[93:]


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 101), (100, 1), (101, 0), (-1, 5), (5, -1), (1 << 62, 1)])
def test_read_beyond_the_file_is_refused(root: Path, offset: int, nbytes: int) -> None:
    with LocalSource(str(root)) as source:
        with pytest.raises(UnreadableError):
            source.read("a", offset, nbytes)
        with pytest.raises(UnreadableError, match="the file has 100"):
            source.read_into("a", 99, memoryview(bytearray(2)))


@pytest.mark.parametrize("file", ["../outside", "sub/../../outside", "/etc/hostname", "a\0b", "..", ".", "sub"])
def test_name_that_leads_out_or_to_a_directory_is_refused(root: Path, tmp_path: Path, file: str) -> None:
    (tmp_path / "outside").write_bytes(b"secret")
    with LocalSource(str(root)) as source, pytest.raises(CkptError):
        source.read(file, 0, 1)


@pytest.mark.parametrize(("link", "file"), [("dir", "dir/b"), ("link", "link")])
def test_link_that_leads_out_is_refused(root: Path, tmp_path: Path, link: str, file: str) -> None:
    """To a directory, and to a file of a sibling whose name begins the same."""
    (tmp_path / "root2").mkdir()
    (tmp_path / "root2" / "b").write_bytes(b"secret")
    (root / link).symlink_to("../root2" if link == "dir" else "../root2/b")
    with LocalSource(str(root)) as source:
        assert "dir/b" not in source.list_files()
        with pytest.raises(UnreadableError, match="leads out"):
            source.read(file, 0, 1)


def test_root_that_is_a_symlink_is_followed(root: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to("root")
    with LocalSource(str(tmp_path / "alias")) as source:
        assert source.read("a", 0, 3) == content(100)[:3]


def test_missing_file_is_named(root: Path) -> None:
    with LocalSource(str(root)) as source, pytest.raises(UnreadableError, match="missing") as caught:
        source.size("gone")
    assert caught.value.where == str(root / "gone")


def test_list_files_leaves_out_what_cannot_hold_a_checkpoint(root: Path) -> None:
    (root / ".git").mkdir()
    (root / ".git" / "x").write_bytes(b"1")
    (root / ".metadata").write_bytes(b"12")
    (root / "dangling").symlink_to("nowhere")
    os.mkfifo(root / "fifo")
    deep = root / "1" / "2" / "3" / "4"
    deep.mkdir(parents=True)
    (deep / "x").write_bytes(b"1")
    (deep.parent / "y").write_bytes(b"123")
    with LocalSource(str(root)) as source:
        assert source.list_files() == {".metadata": 2, "1/2/3/y": 3, "a": 100, "sub/b": 5}
        assert source.list_files(max_depth=0) == {".metadata": 2, "a": 100}
        with pytest.raises(UnreadableError, match="more than 2 files"):
            source.list_files(max_files=2)


def test_what_a_volume_keeps_for_itself_hides_no_checkpoint(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A volume's lost+found is root's; any other directory that cannot be listed may hold a part."""
    scan = os.scandir

    def scandir(path: str) -> object:
        if path.endswith(("lost+found/", "private/")):
            raise PermissionError(errno.EACCES, "Permission denied")
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    (root / "lost+found").mkdir()
    with LocalSource(str(root)) as source:
        assert source.list_files() == {"a": 100, "sub/b": 5}
        (root / "private").mkdir()
        with pytest.raises(StorageError, match="cannot list: Permission denied"):
            source.list_files()


# Change


def _touch(path: Path) -> None:
    os.utime(path, ns=(0, 1))


def _grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def _replace(path: Path) -> None:
    status = path.stat()
    path.rename(path.with_name("old"))
    path.write_bytes(content(100))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("change", [_touch, _grow, _replace, os.unlink])
def test_change_while_reading_is_noticed(root: Path, change) -> None:
    with LocalSource(str(root)) as source:
        source.read("a", 0, 10)
        source.check_unchanged()
        change(root / "a")
        with pytest.raises(CkptError, match="changed while it was read"):
            source.check_unchanged()


def test_change_between_two_openings_is_noticed(root: Path) -> None:
    with LocalSource(str(root)) as source:
        source.read("a", 0, 1)
        source.close()
        _replace(root / "a")
        with pytest.raises(CkptError, match="changed"):
            source.read("a", 0, 1)


def test_truncation_while_reading_is_no_crash(root: Path) -> None:
    with LocalSource(str(root)) as source:
        source.size("a")
        os.truncate(root / "a", 50)
        with pytest.raises(UnreadableError):
            source.read("a", 0, 100)


def test_identities_name_what_was_opened(root: Path) -> None:
    with LocalSource(str(root)) as source:
        source.read("a", 0, 1)
        status = (root / "a").stat()
        identities = source.identities()
    assert identities.keys() == {"a"}
    assert identities["a"].items() >= {"nbytes": 100, "mtime_ns": status.st_mtime_ns, "inode": status.st_ino}.items()


# The hub's cache


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """models--org--name/{blobs,snapshots/<revision>}, as huggingface_hub lays it out."""
    repo = tmp_path / "hub" / "models--org--name"
    snapshot = repo / "snapshots" / "abc123"
    write_model(repo / "blobs.src")
    (repo / "blobs").mkdir()
    snapshot.mkdir(parents=True)
    for i, path in enumerate(sorted((repo / "blobs.src").iterdir())):
        path.rename(repo / "blobs" / f"{i:064x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{i:064x}")
    (repo / "blobs.src").rmdir()
    return snapshot


def test_hub_snapshot_works(snapshot: Path, tmp_path: Path) -> None:
    assert api.verify(snapshot).ok
    api.shard(snapshot, tmp_path / "run", mesh="dp_shard=2")
    api.gather(tmp_path / "run", tmp_path / "back")
    assert files_of(tmp_path / "back").keys() == {path.name for path in snapshot.iterdir()}
    assert api.diff(snapshot, tmp_path / "back").equal
    assert len(api.open_checkpoint(snapshot / "model.safetensors").tensors) == len(MODEL)


# Descriptors


class _Opener:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.opened = 0

    def __call__(self, file: str) -> int:
        self.opened += 1
        return os.open(self.root / file, os.O_RDONLY)


def test_descriptors_are_bounded_and_reused(tmp_path: Path) -> None:
    for i in range(20):
        (tmp_path / f"{i}").write_bytes(b"%d" % i)
    opener = _Opener(tmp_path)
    cache = Descriptors(opener, limit=4)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        for i in range(20):
            with cache.use(f"{i}") as descriptor:
                assert os.pread(descriptor, 9, 0) == b"%d" % i
            assert len(os.listdir("/proc/self/fd")) <= before + 4
    with cache.use("19"), cache.use("19"):
        pass
    assert opener.opened == 60
    cache.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_descriptors_in_use_are_not_closed(tmp_path: Path) -> None:
    """Many threads, few descriptors: everyone reads its own file."""
    for i in range(30):
        (tmp_path / f"{i}").write_bytes(b"%d" % i * 1000)
    cache = Descriptors(_Opener(tmp_path), limit=2)
    wrong = []

    def work(seed: int) -> None:
        for i in range(200):
            name = f"{(i * 7 + seed) % 30}"
            with cache.use(name) as descriptor:
                if os.pread(descriptor, len(name), 0) != name.encode():
                    wrong.append(name)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    cache.close()
    assert wrong == []


def test_descriptor_that_cannot_be_opened_leaves_nothing_behind(root: Path) -> None:
    with LocalSource(str(root)) as source:
        for _ in range(3):
            with pytest.raises(UnreadableError):
                source.size("gone")
        (root / "gone").write_bytes(b"here")
        assert source.size("gone") == 4
