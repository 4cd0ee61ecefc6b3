"""`ckpt smoke` as a program: documents, exit codes, damaged sources, signals, torchrun, and what it leaves behind."""

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

from ckpt_tools import api
from ckpt_tools.cli import main
from ckpt_tools.preflight.smoke.report import PHASES

TESTS = str(Path(__file__).parent.parent)
CKPT = [sys.executable, "-m", "ckpt_tools", "smoke"]
FIELDS = {
    "schema_version", "ok", "source", "model", "world_size", "mesh", "strategy", "device", "losses",
    "reference_losses", "max_grad_error", "tolerances", "phases", "reload", "memory", "memory_measured", "notes",
    "findings", "stacks", "step_seconds", "compared", "grad_errors", "phase_memory_measured",
}  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The built-in model's weights, as safetensors without a config."""
    import torch
    from safetensors.torch import save_file

    from ckpt_tools.models.builtin import SmallTransformer

    path = tmp_path_factory.mktemp("small")
    torch.manual_seed(1)
    save_file(SmallTransformer().state_dict(), path / "model.safetensors", metadata={"format": "pt"})
    return path


def environment(tmp_path):
    return os.environ | {"PYTHONPATH": TESTS, "TMPDIR": str(tmp_path)}


def left_in(work):
    """What is left in the temporary directory, but for what torchrun and torch leave there on their own."""
    return [path.name for path in work.iterdir() if not path.name.startswith(("torchelastic", "torchinductor"))]


def run(tmp_path, *argv, timeout=120, command=CKPT):
    work = tmp_path / "tmp"
    work.mkdir(exist_ok=True)
    done = subprocess.run(
        [*command, *map(str, argv)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(work),
        cwd=tmp_path,
    )
    assert not left_in(work)
    return done


LIGHT = "import sys; from ckpt_tools.cli import main; sys.exit(main(sys.argv[1:]) or 100 * ('torch' in sys.modules))"


@pytest.mark.full
def test_smoke_of_sound_weights_prints_one_document_and_imports_no_torch_itself(small, tmp_path):
    done = run(tmp_path, "smoke", small, "--json", "--steps", "2", command=[sys.executable, "-c", LIGHT])
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert set(document) == FIELDS
    assert document["ok"]
    assert [phase["name"] for phase in document["phases"]] == list(PHASES)
    assert all(phase["ok"] for phase in document["phases"])
    assert document["reload"]["same_world"]["bitwise"]
    assert document["reload"]["other_world"]["mesh"] == "dp_shard=1"
    assert len(document["losses"]) == 2
    assert document["losses"] == pytest.approx(document["reference_losses"], abs=1e-6)
    assert document["max_grad_error"] <= 1e-5
    assert {"rank", "params", "grads", "optimizer", "peak"} == set(document["memory"][0])
    assert done.stderr == ""


@pytest.mark.full
def test_smoke_beside_full_copies_shows_memory_and_steps_of_both(small, tmp_path):
    done = run(tmp_path, small, "--steps", "2", "--compare", "no_shard")
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("full_shard / no_shard, per rank: params "))
    assert " a step " in line
    own, full = re.search(r"params ([\d.]+) KiB / ([\d.]+) KiB", line).groups()
    assert 1.8 < float(full) / float(own) < 2.2


@pytest.mark.full
def test_smoke_of_a_flipped_byte_names_the_file_and_prints_a_table(small, tmp_path):
    api.shard(small, tmp_path / "dcp", mesh="dp_shard=2")
    file = tmp_path / "dcp" / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    done = run(tmp_path, tmp_path / "dcp")
    assert done.returncode == 3
    lines = done.stdout.splitlines()
    assert any(line.split()[:2] == ["source", "FAILED"] for line in lines)
    assert any(line.split()[:2] == ["load", "FAILED"] for line in lines)
    assert any(line.startswith("error: ") for line in lines)
    assert any("__1_0.distcp" in line for line in lines)
    assert lines[-1] == "NOT ok: source, load"


def test_smoke_of_a_truncated_source_starts_nothing(small, tmp_path, capsys):
    (tmp_path / "model.safetensors").write_bytes((small / "model.safetensors").read_bytes()[:-100])
    assert main(["smoke", str(tmp_path), "--json"]) == 4
    error = json.loads(capsys.readouterr().err)
    assert error["exit_code"] == 4


def test_smoke_of_a_pipe_for_a_config_starts_nothing(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    before = os.times().children_user
    assert main(["smoke", "--model", str(tmp_path / "pipe")]) == 2
    assert "a pipe" in capsys.readouterr().err
    assert os.times().children_user == before


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (["--device", "tpu"], "'tpu' is not a device"),
        (["--param-dtype", "int8"], "'int8' is not a dtype"),
        (["--quantize", "nf4"], "quantised weights cannot be trained"),
        (["--adapter", "glora", "--lora"], "'glora' is not an adapter"),
        (["--target", "**.q_proj"], "--adapter and --target need --lora"),
        (["--lora", "--adapter", "lokr", "--quantize", "nf4"], "lokr does not support quantised weights"),
        (["--quantize", "int3", "--lora"], "'int3' is not a quantisation"),
        (["--factory", "module"], "is not a callable"),
        (["--factory", "a:b", "--model", "c"], "--model and --factory"),
        (["--mesh", "dp_shard=2,ep=2"], "the axis ep is not supported"),
        (["--mesh", "dp_shard=2", "--nproc", "4"], "has 2 ranks, but --nproc is 4"),
        (["--mesh", "dp_shard"], "is not an axis of a mesh"),
        (["--compare", "full_shard"], "--compare full_shard"),
        (["--compare", "no_shard", "--strategy", "no_shard"], "cannot be used with no_shard"),
        (["--compare", "no_shard", "--mesh", "dp_shard=2,tp=2"], "drop tp"),
        (["--memory", "much"], "'much' is not a size"),
        (["--timeout", "soon"], "--timeout must be a number of seconds, got 'soon'"),
        (["--timeout", "0"], "--timeout must be positive"),
    ],
)
def test_smoke_with_an_impossible_option_is_refused(capsys, argv, what):
    assert main(["smoke", *argv]) == 2
    assert what in capsys.readouterr().err


@pytest.mark.full
def test_smoke_finds_what_breaks_a_factory_of_the_current_directory(tmp_path):
    (tmp_path / "mine.py").write_text("from smoke.factories import CustomMethod\n")
    (tmp_path / "torch.py").write_text("raise SystemExit('imported from the current directory')\n")
    done = run(
        tmp_path, "--factory", "mine:CustomMethod", "--quiet", command=[Path(sys.executable).with_name("ckpt"), "smoke"]
    )
    assert done.returncode == 3, done.stderr
    assert done.stdout.startswith("error: custom-method: layers.0.run(...) was called")
    assert len(done.stdout.splitlines()) == 3


def descendants(pid):
    """Every living process below `pid`."""
    found = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, thread.read_text().split()):
            found += [child, *descendants(child)]
    return found


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130), (signal.SIGTERM, 130)]
)
def test_smoke_that_is_ended_leaves_no_process(tmp_path, number, code):
    work = tmp_path / "tmp"
    work.mkdir()
    process = subprocess.Popen(
        [*CKPT, "--factory", "smoke.factories:Hangs", "--verbose"],
        env=environment(work),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        for line in process.stderr:  # the ranks are there, and on their way into the phase that hangs
            if line.startswith("states: done"):
                break
        pids = descendants(process.pid)
        assert len(pids) >= 3  # the launcher and two ranks
        process.send_signal(number)
        assert process.wait(timeout=20) == code
    deadline = time.monotonic() + 10
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
    while left_in(work) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left_in(work)


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]


@pytest.mark.full
def test_smoke_under_torchrun_runs_in_its_ranks_and_speaks_once(small, tmp_path, free_port):
    done = run(tmp_path, "smoke", small, "--json", "--steps", "1", command=[*TORCHRUN, free_port, "-m", "ckpt_tools"])
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["ok"]
    assert document["world_size"] == 2
    assert [phase["name"] for phase in document["phases"] if phase["ok"]] == list(PHASES)


@pytest.mark.full
@pytest.mark.parametrize(
    ("factory", "code"),
    [
        ("Hangs", "hang"),
        ("CustomMethod", "custom-method"),
        pytest.param("DiesFirst", "rank-died", marks=pytest.mark.zoo),  # rank 0, without a word
        ("Dies", "rank-died"),  # rank 1, and gloo aborts rank 0 or makes it raise
    ],
)
def test_smoke_under_torchrun_reports_what_breaks(tmp_path, free_port, factory, code):
    argv = ["smoke", "--factory", f"smoke.factories:{factory}", "--json", "--timeout", "8"]
    done = run(tmp_path, *argv, command=[*TORCHRUN, free_port, "-m", "ckpt_tools"])
    assert done.returncode != 0
    document = json.loads(done.stdout)
    assert not document["ok"]
    assert [finding["code"] for finding in document["findings"]] == [code]


@pytest.fixture
def free_port():
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])
