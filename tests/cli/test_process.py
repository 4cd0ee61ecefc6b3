"""The installed program: scripts, streams, signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from samples import files_of, staging_left, tensor, write_model

from ckpt_tools import api

SCRIPTS = Path(sys.executable).parent


def _run(*argv: object, program: str = "ckpt", env=None, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPTS / program), *map(str, argv)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | (env or {}),
        check=False,
        **options,
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def test_scripts_and_module_are_one_program(tmp_path: Path) -> None:
    versions = {
        _run("--version").stdout,
        _run("--version", program="ckpt-tools").stdout,
        _run("-m", "ckpt_tools", "--version", program=Path(sys.executable).name).stdout,
    }
    assert len(versions) == 1
    assert versions.pop().startswith("ckpt ")


@pytest.mark.parametrize("flags", [(), ("-P",)])
@pytest.mark.parametrize("is_checkout", [False, True])
def test_module_takes_none_from_the_current_directory(model: Path, flags: tuple[str, ...], is_checkout: bool) -> None:
    """Not its typer, typing or numpy, also where the directory is the one that ckpt itself lies in."""
    for name in ("typer", "typing", "numpy", "click", "json", "gc"):
        (model / f"{name}.py").write_text("print('run', __name__)")
    if is_checkout:
        (model / "ckpt_tools").symlink_to(Path(api.__file__).parents[1])
    done = _run(*flags, "-m", "ckpt_tools", "inspect", ".", program=Path(sys.executable).name, cwd=model)
    assert (done.returncode, done.stderr, re.search(r"^run \w", done.stdout, re.MULTILINE)) == (0, "", None), done


def test_module_runs_where_the_current_directory_is_gone(tmp_path: Path) -> None:
    line = f"mkdir gone && cd gone && rmdir ../gone && {SCRIPTS / 'python'} -m ckpt_tools --version"
    done = subprocess.run(["sh", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done


def test_whole_walk_through_the_script(model: Path, tmp_path: Path) -> None:
    for argv in (
        ("shard", model, "run", "--mesh", "dp_shard=2"),
        ("verify", "run", "--level", "values"),
        ("reshard", "run", "again", "--mesh", "dp_shard=3"),
        ("gather", "again", "back"),
        ("diff", "model", "back"),
    ):
        done = _run(*argv, cwd=tmp_path)
        assert (done.returncode, done.stderr.count("\n") < 3) == (0, True), argv
        assert done.stdout
    assert files_of(tmp_path / "back") == files_of(model)


@pytest.mark.full
def test_exit_codes_reach_the_shell(model: Path, tmp_path: Path) -> None:
    assert _run("shard", model, tmp_path / "x").returncode == 2
    assert _run("inspect", tmp_path / "gone").returncode == 4
    assert _run("shard", model, model.parent, "--mesh", "dp_shard=2").returncode in (2, 5)
    assert _run("diff", model, write_model(tmp_path / "b", {"x": tensor("U8", 1)})).returncode == 3


def test_json_of_an_error_is_on_stderr_alone(tmp_path: Path) -> None:
    done = _run("inspect", tmp_path / "gone", "--json")
    assert done.stdout == ""
    assert json.loads(done.stderr)["exit_code"] == 4


@pytest.mark.full
def test_output_in_an_ascii_locale_is_no_traceback(tmp_path: Path) -> None:
    model = write_model(
        tmp_path / "mod\u00e8le", {"\u00fcber.w\u00e9ight\U0001f600": tensor("F32", 4), "z\x1b[31m": tensor("U8", 2)}
    )
    for argv in (("inspect", model, "--tensors"), ("verify", model), ("inspect", model, "--json", "--tensors")):
        done = _run(*argv, env={"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout.isascii()
        assert "\x1b" not in done.stdout


@pytest.mark.full
def test_reader_that_goes_away_is_no_traceback(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", {f"layers.{i}.weight": tensor("U8", 1) for i in range(4000)})
    process = subprocess.Popen(
        [str(SCRIPTS / "ckpt"), "inspect", str(model), "--tensors"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) in (0, 1, 141, -signal.SIGPIPE)
    assert b"Traceback" not in err
    assert b"Exception" not in err


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A model of 384 MiB that takes no disk space."""
    nbytes = 384 << 20
    header = json.dumps({"w": {"dtype": "U8", "shape": [1024, nbytes >> 10], "data_offsets": [0, nbytes]}}).encode()
    path = tmp_path / "large" / "model.safetensors"
    path.parent.mkdir()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + nbytes)
    return path.parent


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_leaves_no_destination_and_the_next_run_completes(large: Path, tmp_path: Path, number: int) -> None:
    argv = [str(SCRIPTS / "ckpt"), "shard", str(large), str(tmp_path / "out"), "--mesh", "dp_shard=2", "-j", "1"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".ckpt-tmp-*/*.distcp")) and time.monotonic() < deadline:
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode in (130, 128 + number, -number), err
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "interrupted; nothing was published" in err
    assert "Traceback" not in err
    assert out == ""
    assert not (tmp_path / "out").exists()
    done = _run("shard", large, tmp_path / "out", "--mesh", "dp_shard=2", "--progress", "none")
    assert done.returncode == 0, done.stderr
    assert staging_left(tmp_path) == []
    assert api.verify(tmp_path / "out", level="structure").ok


@pytest.mark.full
def test_two_writers_of_one_destination_make_one(large: Path, tmp_path: Path) -> None:
    argv = [str(SCRIPTS / "ckpt"), "shard", str(large), str(tmp_path / "out"), "--mesh", "dp_shard=2", "--json"]
    processes = [subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    ends = [(process.communicate(timeout=120), process.returncode) for process in processes]
    assert sorted(code for _, code in ends) == [0, 5, 5], ends
    assert staging_left(tmp_path) == []
    assert api.verify(tmp_path / "out", level="structure").ok


@pytest.mark.full
def test_file_that_shrinks_while_it_is_read_is_an_error(large: Path, tmp_path: Path) -> None:
    argv = [str(SCRIPTS / "ckpt"), "shard", str(large), str(tmp_path / "out"), "--mesh", "dp_shard=2", "-j", "1"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not list(tmp_path.glob(".ckpt-tmp-*/*.distcp")) and process.poll() is None:
        time.sleep(0.002)
    os.truncate(large / "model.safetensors", 5000)
    out, err = process.communicate(timeout=60)
    assert process.returncode in (1, 4), err
    assert err.startswith("error: ")
    assert out == ""
    assert not (tmp_path / "out").exists()
