"""Nothing outside of the root is read, whoever changes what meanwhile."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_tools.errors import CkptError, UnreadableError
from ckpt_tools.storage import safe_open
from ckpt_tools.storage.source import LocalSource


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "root" / "sub").mkdir(parents=True)
    (tmp_path / "root" / "file").write_bytes(b"inside")
    (tmp_path / "root" / "sub" / "file").write_bytes(b"inside")
    return tmp_path / "root"


@pytest.fixture(params=["openat2", "without"])
def _kernel(request, monkeypatch) -> Iterator[None]:
    """With and without openat2, as on an old kernel or in a sandbox that forbids it."""
    if request.param == "without":
        monkeypatch.setattr(safe_open, "is_available", lambda: False)
    elif not safe_open.is_available():
        pytest.skip("this kernel has no openat2, or the sandbox forbids it")
    return


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize(
    "target", ["file", "./file", "sub/../file", "{root}/file", "sub/link"], ids=lambda target: target.replace("/", "-")
)
def test_link_inside_is_followed(root: Path, target: str) -> None:
    (root / "sub" / "link").symlink_to("../file")
    (root / "link").symlink_to(target.format(root=root))
    with LocalSource(str(root)) as source:
        assert source.read("link", 0, 6) == b"inside"
        source.check_unchanged()


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize(
    "target", ["../secret", "sub/../../secret", "{root}/../secret", "/etc/passwd", "/proc/self/maps", "on"]
)
def test_link_outside_is_refused(root: Path, target: str) -> None:
    (root / "link").symlink_to(target.format(root=root))
    (root / "on").symlink_to("../secret")
    with LocalSource(str(root)) as source, pytest.raises(UnreadableError, match="leads out"):
        source.read("link", 0, 1)


@pytest.mark.usefixtures("_kernel")
def test_link_in_a_circle_is_refused(root: Path) -> None:
    (root / "a").symlink_to("b")
    (root / "b").symlink_to("a")
    with LocalSource(str(root)) as source, pytest.raises(UnreadableError, match="circle"):
        source.size("a")


@pytest.mark.usefixtures("_kernel")
def test_pipe_is_refused_without_waiting_and_without_a_reader(root: Path) -> None:
    os.mkfifo(root / "pipe")
    with LocalSource(str(root)) as source, pytest.raises(UnreadableError, match="not a regular file"):
        source.size("pipe")
    with pytest.raises(OSError, match="No such device"):  # nobody has it open
        os.open(root / "pipe", os.O_WRONLY | os.O_NONBLOCK)


@pytest.mark.usefixtures("_kernel")
def test_device_is_refused(root: Path) -> None:
    try:
        os.mknod(root / "device", stat.S_IFCHR | 0o666, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("only root makes devices")
    with LocalSource(str(root)) as source, pytest.raises(UnreadableError, match="not a regular file"):
        source.size("device")


@pytest.mark.usefixtures("_kernel")
def test_snapshot_of_the_hub_reads_its_blobs_and_no_more(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / "abc"
    (snapshot / "sub").mkdir(parents=True)
    blobs = tmp_path / "models--org--name" / "blobs"
    (blobs / "deep").mkdir(parents=True)
    (blobs / "1").write_bytes(b"inside")
    (blobs / "deep" / "2").write_bytes(b"secret")
    (blobs / "3").symlink_to("../refs")
    (tmp_path / "models--org--name" / "refs").write_bytes(b"secret")
    for name, target in {
        "good": "../../blobs/1",
        "sub/good": "../../../blobs/1",
        "deep": "../../blobs/deep/2",
        "refs": "../../refs",
        "on": "../../blobs/3",
    }.items():
        (snapshot / name).symlink_to(target)
    with LocalSource(str(snapshot)) as source:
        assert source.read("good", 0, 6) == source.read("sub/good", 0, 6) == b"inside"
        for name in ("deep", "refs", "on"):
            with pytest.raises(UnreadableError, match="leads out"):
                source.size(name)


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("what", ["file", "directory"])
def test_link_put_there_in_between_is_never_followed(root: Path, what: str) -> None:
    """A rival swaps a file (or the directory that it lies in) for a link out, again and again."""
    outside = root.parent / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"secret")
    name = root / ("sub/file" if what == "file" else "sub")
    honest, link = root / "honest", root / "link"
    link.symlink_to(outside / "file" if what == "file" else outside)
    stop = threading.Event()

    def rival() -> None:
        while not stop.is_set():
            os.rename(name, honest)
            os.rename(link, name)
            os.rename(name, link)
            os.rename(honest, name)

    thread = threading.Thread(target=rival)
    thread.start()
    seen = set()
    try:
        for _ in range(1500):
            with LocalSource(str(root)) as source:
                try:
                    seen.add(source.read("sub/file", 0, 6))
                except CkptError as error:
                    seen.add(type(error).__name__)
    finally:
        stop.set()
        thread.join()
    assert b"secret" not in seen
    assert b"inside" in seen
    assert len(seen) > 1, "the rival was never in time"


def test_open_beneath_reports_to_audit_hooks(root: Path) -> None:
    """An embedder's hook sees what is opened, though the system call is made by hand."""
    import subprocess
    import sys

    script = f"""
import sys
from ckpt_tools.storage.source import LocalSource
source = LocalSource({str(root)!r})
seen = []
sys.addaudithook(lambda event, args: seen.append(args[0]) if event == "open" else None)
source.read("sub/file", 0, 1)
print({str(root / "sub" / "file")!r} in seen)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "True"
