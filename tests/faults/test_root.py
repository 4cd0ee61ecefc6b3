"""Real file systems that fail: full, failing (FUSE), cut from power. They mount, so they run with `-m root` only."""

from __future__ import annotations

import contextlib
import errno
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.conftest import OPTIONS
from faults.harness import Server, assert_clean, assert_complete, assert_told
from samples import files_of, staging_left, tensor, write_model

from ckpt_tools import api

pytestmark = pytest.mark.root

FUSE = Path(__file__).parent / "fuse.py"
MODEL = {f"layers.{i}.weight": tensor("F32", 64, 1024, seed=i) for i in range(24)}
"""6 MiB."""
MESH = ("--mesh", "dp_shard=4")


def _command(*argv: object) -> None:
    done = subprocess.run([str(word) for word in argv], capture_output=True, text=True, timeout=60)
    if done.returncode:
        pytest.fail(f"{argv}: {done.stderr}")


@contextlib.contextmanager
def _mounted(where: Path, *arguments: object) -> Iterator[Path]:
    where.mkdir(exist_ok=True)
    _command("mount", *arguments, where)
    try:
        yield where
    finally:
        _command("umount", where)


@pytest.fixture(scope="session")
def model(memory: Path) -> Path:
    return write_model(memory / "root-model", MODEL, num_files=2)


@pytest.fixture(scope="session")
def expected(memory: Path, model: Path) -> dict[str, str]:
    api.shard(model, memory / "root-reference", mesh="dp_shard=4")
    return files_of(memory / "root-reference", manifest=True)


# A full disk


@pytest.mark.parametrize("preallocates", [True, False], ids=["fallocate", "sparse"])
@pytest.mark.parametrize("mebibytes", [1, 3, 5, 6])
def test_full_disk_is_an_error_and_room_lets_the_run_continue(
    server: Server, model, expected, tmp_path, mebibytes, preallocates
):
    with _mounted(tmp_path / "disk", "-t", "tmpfs", "-o", f"size={mebibytes}m", "none") as disk:
        argv = ("shard", model, disk / "out", *MESH)
        # Nobody is told how full it is; without preallocation it is found out by the writes.
        deny = "" if preallocates else f"fallocate={errno.EOPNOTSUPP}"
        result = server.run(*argv, below=disk, only="statvfs", free=1 << 40, deny=deny)
        assert result.code == 1
        assert "No space left on device" in result.err
        assert str(disk / "out") in result.err
        assert_told(result)
        assert not (disk / "out").exists()
        assert_clean(disk, allowed=1)
        _command("mount", "-o", "remount,size=64m", disk)
        result = server.run(*argv)
        assert result.code == 0, result
        assert ("continued an interrupted run" in result.err) == (not preallocates)
        assert_complete(disk / "out", expected)
        assert_clean(disk)


def test_full_disk_is_refused_before_the_first_byte(server: Server, model, tmp_path):
    with _mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=20m", "none") as disk:
        result = server.run("shard", model, disk / "out", *MESH, below=disk, only="fallocate")
        assert result.code == 1
        assert "are needed" in result.err
        assert result.count == 0
        assert list(disk.iterdir()) == []


def test_read_only_mount_is_enough_for_a_source(server: Server, model, expected, tmp_path):
    with _mounted(tmp_path / "source", "--bind", model) as source:
        _command("mount", "-o", "remount,bind,ro", source)
        assert server.run("shard", source, tmp_path / "out", *MESH).code == 0
        assert api.verify(tmp_path / "out", against=model).ok
        result = server.run("shard", model, source / "out", *MESH)
        assert result.code in (1, 2)
        assert_told(result)


# A power cut: what the disk holds at one moment, mounted by somebody else later


class Disk:
    """An ext4 image on a loop device that commits only when it is asked to."""

    def __init__(self, directory: Path, options: str) -> None:
        self.image, self.directory = directory / "image", directory
        self.options = options
        subprocess.run(["truncate", "-s", "48M", str(self.image)], check=True)
        _command("mkfs.ext4", "-q", "-F", "-J", "size=4", self.image)
        self.cuts = 0

    def mounted(self) -> contextlib.AbstractContextManager[Path]:
        return _mounted(self.directory / "disk", "-o", f"loop,commit=300,{self.options}", self.image)

    @contextlib.contextmanager
    def after_a_cut(self) -> Iterator[Path]:
        """The disk as it would be after a power cut now, mounted: its journal is replayed."""
        self.cuts += 1
        copy = self.directory / "copy"
        _command("cp", "--sparse=always", self.image, copy)
        with _mounted(self.directory / "later", "-o", "loop", copy) as later:
            yield later
        copy.unlink()


@pytest.fixture(params=["data=ordered", "data=writeback"])
def disk(memory: Path, request) -> Iterator[Disk]:
    directory = memory / f"cut-{request.param[5:]}-{abs(hash(request.node.name))}"
    directory.mkdir()
    yield Disk(directory, request.param)
    shutil.rmtree(directory)


@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
def test_power_cut_at_any_sync_or_rename_leaves_nothing_or_all(
    server: Server, model, expected, disk, overwrite, record_property
):
    with disk.mounted() as here:
        old: dict[str, str] | None = None
        if overwrite:
            api.shard(model, here / "old", mesh="dp_shard=2")
            old = files_of(here / "old", manifest=True)
        for nth in range(1, 100):
            out = here / f"out{nth}"
            if overwrite:
                shutil.copytree(here / "old", out)
            subprocess.run(["sync", "-f", str(here)], check=True)
            argv = ["shard", model, out, *MESH, "-j", "2", *(["--overwrite"] if overwrite else [])]

            def cut(name: str = out.name) -> None:
                with disk.after_a_cut() as later:
                    if (later / name).exists():
                        assert files_of(later / name, manifest=True) in (expected, old)
                    else:
                        assert old is None
                    # Whoever comes back to this disk gives the same command.
                    assert len(staging_left(later)) <= 1
                    api.shard(model, later / name, mesh="dp_shard=4", overwrite=True)
                    assert_complete(later / name, expected)
                    assert_clean(later)

            result = server.run(*argv, below=here, only="fsync renameat2 unlink", nth=nth, while_stopped=cut)
            assert result.code == 0, result
            # The program has said that it is done: it is.
            with disk.after_a_cut() as later:
                assert_complete(later / out.name, expected)
            shutil.rmtree(out)
            if not result.hit:
                break
        assert nth >= 8
        record_property("points", disk.cuts)


def test_power_cut_at_random_moments_leaves_nothing_or_all(model, expected, disk, record_property):
    with disk.mounted() as here:
        for seed in range(8):
            out = here / f"out{seed}"
            argv = [sys.executable, "-m", "ckpt_tools", "shard", str(model), str(out), *MESH, "-q"]
            process = subprocess.Popen(argv)
            while not staging_left(here) and process.poll() is None:
                time.sleep(0.001)
            time.sleep(random.Random(seed).uniform(0, 0.08))
            # Stopped, so that the copy is of one moment.
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.05)
            with disk.after_a_cut() as later:
                if (later / out.name).exists():
                    assert_complete(later / out.name, expected)
            process.send_signal(signal.SIGCONT)
            assert process.wait(60) == 0
            with disk.after_a_cut() as later:
                assert_complete(later / out.name, expected)
            shutil.rmtree(out)
        record_property("points", disk.cuts)


# Devices that fail, through FUSE: the kernel's own errors


@contextlib.contextmanager
def _flaky(backing: Path, where: Path, **rules: object) -> Iterator[Path]:
    if not Path("/dev/fuse").exists():
        pytest.skip("no /dev/fuse here")
    where.mkdir(exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, str(FUSE), str(backing), str(where), json.dumps(rules)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "mounted\n"
        yield where
    finally:
        with contextlib.suppress(Exception):
            _command("umount", where)
        process.communicate(timeout=30)


@pytest.mark.parametrize("verb", OPTIONS)
@pytest.mark.parametrize("offset", [0, 300, 2000])
def test_source_on_a_device_that_cannot_be_read_is_an_error(server: Server, sources, tmp_path, verb, offset):
    names = sorted(path.name for path in sources[verb].iterdir() if path.suffix in (".distcp", ".safetensors"))
    name = names[-1]
    if offset > (sources[verb] / name).stat().st_size:
        offset = (sources[verb] / name).stat().st_size
    with _flaky(sources[verb], tmp_path / "source", read=[name, offset]) as source:
        result = server.run(verb, source, tmp_path / "out", *OPTIONS[verb])
        assert result.code == 1, result
        assert "Input/output error" in result.err
        assert str(source / name) in result.err
        assert_told(result)
        assert not (tmp_path / "out").exists()
        said = server.run("verify", source)
        assert said.code in (1, 3, 4), said
        assert "Traceback" not in said.said
        assert "Input/output error" in said.said
    result = server.run(verb, sources[verb], tmp_path / "out", *OPTIONS[verb])
    assert result.code == 0, result
    assert_clean(tmp_path)


FAILING = {
    "write": {"write": [".distcp", 500_000]},
    "write-metadata": {"write": [".metadata", 0]},
    "fsync": {"fsync": "__3_0.distcp"},
    "fsync-manifest": {"fsync": "ckpt_manifest.json"},
    "fsync-directory": {"fsyncdir": ""},
}


@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
@pytest.mark.parametrize("kind", FAILING)
def test_destination_on_a_device_that_fails_stays_as_it_was(server: Server, model, expected, tmp_path, kind, overwrite):
    backing = tmp_path / "backing"
    backing.mkdir()
    old = None
    if overwrite:
        api.shard(model, backing / "out", mesh="dp_shard=2")
        old = files_of(backing / "out", manifest=True)
    flags = ["--overwrite"] if overwrite else []
    with _flaky(backing, tmp_path / "disk", **FAILING[kind]) as disk:
        result = server.run("shard", model, disk / "out", *MESH, *flags)
        assert result.code == 1, result
        assert "Input/output error" in result.err
        assert str(disk / "out") in result.err
        assert_told(result)
    assert (files_of(backing / "out", manifest=True) if (backing / "out").exists() else None) == old
    assert_clean(backing, allowed=1)
    with _flaky(backing, tmp_path / "disk") as disk:
        result = server.run("shard", model, disk / "out", *MESH, *flags)
        assert result.code == 0, result
        assert_complete(disk / "out", expected)
        assert_clean(disk)


@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
def test_file_system_without_exclusive_renames_is_enough(server: Server, model, expected, tmp_path, overwrite):
    backing = tmp_path / "backing"
    backing.mkdir()
    with _flaky(backing, tmp_path / "disk", rename2=False) as disk:
        if overwrite:
            assert server.run("shard", model, disk / "out", "--mesh", "dp_shard=2").code == 0
        result = server.run("shard", model, disk / "out", *MESH, *(["--overwrite"] if overwrite else []))
        assert result.code == 0, result
        assert_complete(disk / "out", expected)
        assert_clean(disk)
        assert server.run("shard", model, disk / "out", *MESH).code == 5
