"""Full disks, tight limits, signals, rivals, and sources that change or cannot be written."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from faults.conftest import OPTIONS
from faults.harness import MOVING, Server, assert_clean, assert_complete, assert_told, request
from samples import content, files_of, staging_left, tensor, write_model

from ckpt_tools import api
from ckpt_tools.errors import CkptError, DestinationExistsError

LARGE = {f"layers.{i}.weight": tensor("F32", 64, 1024, seed=i) for i in range(24)}
"""6 MiB: more than one buffer, and enough to be met under way."""
NOBODY = 65534


@pytest.fixture(scope="session")
def large(memory: Path) -> Path:
    return write_model(memory / "large", LARGE, num_files=3)


@pytest.fixture(scope="session")
def large_reference(memory: Path, large: Path) -> dict[str, str]:
    api.shard(large, memory / "large-reference", mesh="dp_shard=4")
    return files_of(memory / "large-reference", manifest=True)


def _run(*argv: object, limit: str = "true", **options) -> subprocess.CompletedProcess[str]:
    """The program itself, started by a shell that sets a limit first."""
    command = ["bash", "-c", f'{limit} && exec "$@"', "bash", sys.executable, "-m", "ckpt_tools", *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


# Limits


@pytest.mark.full(but=["70000"])
@pytest.mark.parametrize("nbytes", [1000, 70_000, 1_000_000])
def test_file_size_limit_is_an_error_that_names_the_file(server, large, large_reference, tmp_path, nbytes):
    argv = ("shard", large, tmp_path / "out", "--mesh", "dp_shard=4")
    result = server.run(*argv, limits={"RLIMIT_FSIZE": nbytes})
    assert result.code == 1
    assert "File too large" in result.err
    assert str(tmp_path / "out") in result.err
    assert_told(result)
    assert not (tmp_path / "out").exists()
    assert server.run(*argv).code == 0
    assert_complete(tmp_path / "out", large_reference)
    assert_clean(tmp_path)


def test_disk_without_room_is_refused_before_the_first_byte(server, large, case):
    result = server.run(
        "shard", large, case / "out", "--mesh", "dp_shard=4", below=case, only="fallocate", free=20 << 20, trace=True
    )
    assert result.code == 1
    assert result.calls == []
    assert re.search(r"6\.\d+ MiB are needed, 20\.0 MiB are free", result.err), result.err
    assert "   at: " in result.err
    assert list(case.iterdir()) == []


@pytest.mark.full
def test_few_open_files_are_enough_for_many(tmp_path):
    model = write_model(tmp_path / "model", {f"t{i}": tensor("F32", 64, 2, seed=i) for i in range(8)})
    limit = "ulimit -n 20"
    jobs = ("-j", 4, "--progress", "none")
    done = _run("shard", model, tmp_path / "run", "--mesh", "dp_shard=64", *jobs, limit=limit)
    assert done.returncode == 0, done.stderr
    done = _run("reshard", tmp_path / "run", tmp_path / "again", "--mesh", "dp_shard=63", *jobs, limit=limit)
    assert done.returncode == 0, done.stderr
    done = _run("gather", tmp_path / "again", tmp_path / "back", *jobs, limit=limit)
    assert done.returncode == 0, done.stderr
    assert files_of(tmp_path / "back") == files_of(model)
    assert staging_left(tmp_path) == []


@pytest.mark.full
def test_too_few_open_files_are_an_error_that_says_what_to_raise(tmp_path):
    model = write_model(tmp_path / "model", {"t": tensor("F32", 64, 2)})
    codes = set()
    for limit in (8, 11, 14, 18):
        done = _run(
            "shard", model, tmp_path / f"run{limit}", "--mesh", "dp_shard=64", "-j", "4", limit=f"ulimit -n {limit}"
        )
        codes.add(done.returncode)
        assert "Traceback" not in done.stderr
        if done.returncode:
            assert done.returncode == 1
            assert "Too many open files" in done.stderr
            assert not (tmp_path / f"run{limit}").exists()
    assert codes == {0, 1}


@pytest.mark.full
def test_address_space_that_is_too_small_is_an_error_and_not_half_a_checkpoint(
    server, large, large_reference, tmp_path
):
    codes = set()
    for mebibytes in (0, 1, 2, 4, 8, 9, 10, 12, 16, 17, 18, 20, 24, 32, 48, 64, 1024):
        result = server.run(
            *("shard", large, tmp_path / "out", "--mesh", "dp_shard=4", "-j", "4"),
            limits={"RLIMIT_AS": mebibytes << 20},
        )
        codes.add(result.code)
        assert_told(result, names_file=False)
        assert_clean(tmp_path, allowed=1)
        if result.code:
            assert not (tmp_path / "out").exists()
        else:
            assert_complete(tmp_path / "out", large_reference)
            shutil.rmtree(tmp_path / "out")
    assert codes == {0, 1}
    assert_clean(tmp_path)


# Signals


@pytest.mark.full(but=["3"])
@pytest.mark.parametrize("seed", range(7))
def test_signal_at_a_random_time_leaves_nothing_or_all(large, large_reference, tmp_path, seed):
    chance = random.Random(seed)
    number = chance.choice([signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    argv = [sys.executable, "-m", "ckpt_tools", "shard", str(large), str(tmp_path / "out"), "--mesh", "dp_shard=4"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not staging_left(tmp_path) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(chance.uniform(0, 0.06))
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    if (tmp_path / "out").exists():
        # It may come after everything, when the interpreter is already leaving.
        assert process.returncode in (0, 130, -number), err
        assert "nothing was published" not in err
    else:
        assert process.returncode == 130, err
        assert "interrupted; nothing was published" in err
        assert_clean(tmp_path, allowed=1)
        api.shard(large, tmp_path / "out", mesh="dp_shard=4")
    assert_complete(tmp_path / "out", large_reference)
    assert_clean(tmp_path)


# Sources that change, sources that are not ours


def _truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _replace(file: Path) -> None:
    other = file.with_name("other")
    other.write_bytes(content(file.stat().st_size, 1))
    other.replace(file)


def _write_over(file: Path) -> None:
    with file.open("r+b") as stream:
        stream.write(content(file.stat().st_size, 2))


def _remove(file: Path) -> None:
    file.unlink()


@pytest.mark.full(but=["gather-_truncate"])
@pytest.mark.parametrize("change", [_truncate, _replace, _write_over, _remove])
@pytest.mark.parametrize("verb", OPTIONS)
def test_source_that_changes_at_any_read_is_refused(server, sources, case, verb, change, record_property):
    reads = 0
    for nth in range(1, 200):
        source = case / f"source-{nth}"
        shutil.copytree(sources[verb], source)
        victim = min(source.glob("*.distcp" if verb != "shard" else "*.safetensors"))
        os.utime(victim, ns=(0, 0))  # a clock that ticks too slowly to tell is not the subject here
        argv = (verb, source, case / "out", *OPTIONS[verb], "-j", "2")
        result = server.run(*argv, below=victim, only="read", nth=nth, while_stopped=lambda path=victim: change(path))
        shutil.rmtree(source)
        if not result.hit:
            break
        reads += 1
        assert result.code in (1, 4), result
        assert_told(result)
        assert not (case / "out").exists()
        assert staging_left(case) == []
    assert reads >= 4
    record_property("points", reads)


def _as_nobody(directory: Path) -> int:
    """Make way for somebody else to work in a directory; 0 without root, who alone can become another."""
    if os.geteuid() != 0:
        return 0
    for path in (directory, directory.parent):
        path.chmod(0o755)
    os.chown(directory, NOBODY, NOBODY)
    return NOBODY


def test_source_that_changes_after_the_last_read_publishes_nothing(tmp_path, monkeypatch):
    weights = write_model(tmp_path / "model", {"w": tensor("F32", 4, 4)}) / "model.safetensors"
    monkeypatch.setattr("ckpt_tools.convert.finish._check_result", lambda *_: os.utime(weights, ns=(0, 1)))
    with pytest.raises(CkptError, match="changed while it was read"):
        api.shard(tmp_path / "model", tmp_path / "out", mesh="dp_shard=2")
    assert not (tmp_path / "out").exists()


def test_read_only_source_is_enough(server, sources, references, case):
    source = case / "source"
    shutil.copytree(sources["shard"], source)
    uid = _as_nobody(case)
    for path in (*source.rglob("*"), source):
        path.chmod(0o555 if path.is_dir() else 0o444)
    result = server.run("shard", source, case / "out", *OPTIONS["shard"], uid=uid)
    source.chmod(0o755)
    assert result.code == 0, result
    assert api.verify(case / "out", against=source).ok


@pytest.mark.parametrize("mode", [0o555, 0o333], ids=["not-writable", "not-readable"])
def test_destination_in_a_directory_without_permission_is_refused_at_once(server, sources, case, mode):
    uid = _as_nobody(case)
    case.parent.chmod(0o755)
    source, parent = case / "source", case / "parent"
    shutil.copytree(sources["shard"], source)
    parent.mkdir()
    if uid:
        os.chown(parent, uid, uid)
    parent.chmod(mode)
    result = server.run("shard", source, parent / "out", *OPTIONS["shard"], uid=uid)
    parent.chmod(0o755)
    assert result.code == 1
    assert "Permission denied" in result.err
    assert f"   at: {parent}\n" in result.err
    assert list(parent.iterdir()) == []


def test_source_without_permission_names_the_file(server, sources, case):
    uid = _as_nobody(case)
    source = case / "source"
    shutil.copytree(sources["shard"], source)
    victim = min(source.glob("*.safetensors"))
    victim.chmod(0)
    result = server.run("shard", source, case / "out", *OPTIONS["shard"], uid=uid)
    assert result.code == 1
    assert "cannot open: Permission denied" in result.err
    assert victim.name in result.err
    assert not (case / "out").exists()


# Rivals


@pytest.mark.full(but=["2"])
@pytest.mark.parametrize("number", [2, 10])
def test_concurrent_writers_exactly_one_wins(server: Server, large, large_reference, tmp_path, number):
    for i in range(4):
        out = tmp_path / f"out{i}"
        results = server.run_crowd([request("shard", large, out, "--mesh", "dp_shard=4", "-j", "2")] * number)
        assert sorted(result.code for result in results) == [0, *[5] * (number - 1)], results
        assert all(result.code == 0 or "error: " in result.err for result in results)
        assert_complete(out, large_reference)
        assert_clean(tmp_path)


@pytest.mark.full
def test_concurrent_overwriters_leave_a_whole_one(server: Server, large, large_reference, tmp_path):
    out = tmp_path / "out"
    api.shard(large, out, mesh="dp_shard=2")
    for _ in range(6):
        results = server.run_crowd([request("shard", large, out, "--mesh", "dp_shard=4", "--overwrite")] * 6)
        codes = {result.code for result in results}
        assert 0 in codes
        assert codes <= {0, 5}, results
        assert_complete(out, large_reference)
        assert_clean(tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "overwrite"])
def test_rival_that_runs_while_another_is_stopped_at_any_call(
    server, sources, references, case, overwrite, record_property
):
    expected = files_of(references["shard"], manifest=True)
    codes: list[int] = []

    def rival(out: Path):
        try:
            api.shard(sources["shard"], out, mesh="dp_shard=2", overwrite=overwrite, num_workers=1)
            codes.append(0)
        except DestinationExistsError:
            codes.append(5)

    seen = set()
    for nth in range(1, 400):
        directory = case / str(nth)
        directory.mkdir()
        out = directory / "out"
        if overwrite:
            shutil.copytree(sources["gather"], out)
        codes.clear()
        argv = ("shard", sources["shard"], out, *OPTIONS["shard"], *(["--overwrite"] if overwrite else []))
        result = server.run(*argv, below=directory, only=MOVING, nth=nth, while_stopped=lambda path=out: rival(path))
        assert_told(result)
        if not result.hit:
            break
        pair = (result.code, *codes)
        seen.add(pair)
        assert pair in ({(0, 5), (5, 0), (0, 0)} if overwrite else {(0, 5), (5, 0)})
        assert_complete(out, expected)
        assert_clean(directory)
    assert (0, 5) in seen
    record_property("points", nth - 1)
