"""Machines that we do not have, compared with what runs need; and this one, looked at."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ckpt_tools.cli import main
from ckpt_tools.preflight.configs import read_config
from ckpt_tools.preflight.host import Device, Host, HostPath, Needs, check_host, look_at, needs_of
from ckpt_tools.preflight.model_facts import ModelFacts

GIB = 2**30
H100 = Device(name="NVIDIA H100 80GB HBM3", total_bytes=80 * GIB, used_bytes=0)
SAVES = "/shared/out"


def place(**changes: Any) -> HostPath:
    fields = {"path": SAVES, "exists": True, "filesystem": "lustre", "free_bytes": 10_000 * GIB} | changes
    return HostPath(**fields)


def host(**changes: Any) -> Host:
    fields: dict[str, Any] = {
        "devices": (H100,) * 8,
        "driver": "550.54.15",
        "torch": "2.8.0",
        "torch_cuda": "12.8",
        "memory_bytes": 1000 * GIB,
        "shm_bytes": 500 * GIB,
        "open_files": 65_536,
        "locked_bytes": -1,
        "has_infiniband": True,
        "places": {SAVES: place()},
        "addresses": ("10.0.0.1",),
        "port_is_free": True,
    }
    return Host(**fields | changes)


NEEDS = Needs(
    ranks=8, world_size=16, nodes=2, saves=(SAVES,), checkpoint_bytes=100 * GIB, kept=3, meeting=("node0", 29500)
)


def codes(one: Host, needs: Needs = NEEDS) -> list[tuple[str, str]]:
    return [(found.severity, found.code) for found in check_host(one, needs).findings]


def needs(**changes: Any) -> Needs:
    return Needs(**{name: getattr(NEEDS, name) for name in Needs.__slots__} | changes)


def test_machine_that_has_all_is_silent() -> None:
    result = check_host(host(), NEEDS)
    assert result.findings == ()
    assert result.not_checked == ()
    assert result.what.startswith("8 GPUs (NVIDIA H100 80GB HBM3), driver 550.54.15, torch 2.8.0 for CUDA 12.8")


BROKEN: tuple[tuple[dict[str, Any], str, str, str], ...] = (
    ({"devices": (H100,) * 7}, "error", "host-gpus", "8 ranks start here, but only 7 GPUs"),
    ({"devices": ()}, "error", "host-gpus", "0 GPUs"),
    ({"devices": (*(H100,) * 7, Device(name=H100.name, total_bytes=80 * GIB, used_bytes=40 * GIB))}, "warning",
     "host-gpus", "GPU 7 has 40.0 GiB in use"),
    ({"devices": (*(H100,) * 7, Device(name="NVIDIA A100", total_bytes=40 * GIB))}, "warning", "host-gpus", "differ"),
    ({"driver": "520.61.05"}, "error", "host-driver", "needs driver 525.60"),
    ({"driver": "550.54.15", "torch_cuda": "13.0"}, "error", "host-driver", "needs driver 580.65"),
    ({"torch_cuda": ""}, "error", "host-driver", "without CUDA"),
    ({"shm_bytes": 64 * 2**20}, "warning", "host-shm", "64.0 MiB"),
    ({"open_files": 256}, "warning", "host-limit", "256 files"),
    ({"locked_bytes": 65_536}, "error", "host-limit", "64.0 KiB"),
    ({"processes_left": 100}, "error", "host-limit", "8 ranks need 256"),
    ({"places": {SAVES: place(problem="Read-only file system")}}, "error", "host-write", "Read-only"),
    ({"places": {SAVES: place(is_rootless=True)}}, "warning", "host-write", "top directory"),
    ({"places": {SAVES: place(free_bytes=50 * GIB)}}, "error", "host-disk", "100 GiB"),
    ({"places": {SAVES: place(free_bytes=200 * GIB)}}, "warning", "host-disk", "3 are kept"),
    ({"places": {SAVES: place(filesystem="ext4")}}, "warning", "host-write", "may not be shared"),
    ({"places": {SAVES: place(filesystem="tmpfs")}}, "warning", "host-write", "in memory"),
    ({"places": {SAVES: place(seconds_ahead=-300.0)}}, "warning", "host-clock", "300 s"),
    ({"addresses": ()}, "error", "host-port", "cannot be resolved"),
    ({"port_is_free": False}, "error", "host-port", "29500 is in use"),
)  # fmt: skip


@pytest.mark.parametrize(("change", "severity", "code", "words"), BROKEN)
def test_machine_that_lacks_something_is_told_of_it_alone(
    change: Mapping[str, Any], severity: str, code: str, words: str
) -> None:
    (found,) = check_host(host(**change), NEEDS).findings
    assert (found.severity, found.code) == (severity, code)
    assert words in found.what
    assert found.hint


def test_what_a_machine_does_well_enough_is_silent() -> None:
    assert codes(host(driver="535.104.05")) == []
    assert codes(host(driver="470.0", has_compat_libraries=True)) == []
    assert codes(host(locked_bytes=65_536, has_infiniband=False)) == []
    assert codes(host(devices=(H100,) * 9)) == []
    assert codes(host(port_is_free=False), needs(is_first=False)) == []
    assert codes(host(places={SAVES: place(filesystem="ext4")}), needs(nodes=1)) == []
    assert codes(host(shm_bytes=64 * 2**20), needs(ranks=1)) == []


def test_memory_of_a_gather_and_of_offloading_is_counted_together() -> None:
    assert codes(host(), needs(gathered_bytes=600 * GIB, resident_bytes=300 * GIB)) == []
    assert codes(host(), needs(gathered_bytes=600 * GIB, resident_bytes=500 * GIB)) == [("error", "host-memory")]


def test_what_nobody_could_look_at_is_said_and_not_found_wrong() -> None:
    result = check_host(Host(), needs(checkpoint_bytes=None))
    assert result.findings == ()
    text = "\n".join(result.not_checked)
    for word in ("GPUs", "size of the model", "in time"):
        assert word in text


def config_of(tmp_path: Path, values: Mapping[str, Any], framework: Any) -> Any:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    return read_config(str(path), framework=framework)


def test_needs_come_from_the_config_and_the_scheduler(tmp_path: Path) -> None:
    values = {
        "base_model": "/models/m",
        "datasets": [{"path": "/data/a.jsonl", "type": "alpaca"}, {"path": "org/data", "type": "alpaca"}],
        "output_dir": "out",
        "save_total_limit": 4,
        "bf16": True,
        "micro_batch_size": 1,
        "fsdp_version": 2,
        "fsdp_config": {"offload_params": True, "state_dict_type": "FULL_STATE_DICT"},
    }
    config = config_of(tmp_path, values, "axolotl")
    facts = ModelFacts(where="", shapes={"w": (1000, 1000)})
    environment = {"WORLD_SIZE": "16", "SLURM_NNODES": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "1234"}
    found = needs_of((config,), facts, environment)
    assert (found.ranks, found.nodes, found.kept, found.meeting) == (8, 2, 4, ("node0", 1234))
    assert found.saves == ("out",)
    assert found.reads == ("/data/a.jsonl", "/models/m")
    assert found.checkpoint_bytes == 6_000_000  # bf16, as axolotl's FSDP2 keeps it: parameters and two moments
    assert found.gathered_bytes == 12_000_000
    assert found.resident_bytes == 3_000_000


def test_needs_of_a_launcher_are_those_of_its_file(tmp_path: Path) -> None:
    values = {"distributed_type": "MULTI_GPU", "num_processes": 16, "num_machines": 2, "machine_rank": 0,
              "main_process_ip": "10.0.0.1", "main_process_port": 29501}  # fmt: skip
    found = needs_of((config_of(tmp_path, values, "accelerate"),), None, {})
    assert (found.ranks, found.nodes, found.meeting) == (8, 2, ("10.0.0.1", 29501))


def test_ranks_of_a_machine_are_not_known_without_its_number_of_machines(tmp_path: Path) -> None:
    """Thirty-two ranks on eight GPUs may be four machines."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"base_model": "org/m", "bf16": True, "micro_batch_size": 1, "output_dir": "out"}))
    config = read_config(str(path), framework="axolotl", world_size=32)
    assert needs_of((config,), None, {}).ranks is None
    assert needs_of((config,), None, {"SLURM_NNODES": "4"}).ranks == 8
    assert needs_of((config,), None, {"LOCAL_WORLD_SIZE": "4"}).ranks == 4


def test_needs_of_a_script_that_hides_options_are_those_that_it_shows(tmp_path: Path) -> None:
    path = tmp_path / "train.sh"
    command = "torchrun --nproc_per_node=8 -m openrlhf.cli.train_sft --save_path /s --train_batch_size $N"
    path.write_text(command + ' "${MORE[@]}"\n')
    found = needs_of((read_config(str(path), framework="openrlhf"),), None, {})
    assert (found.saves, found.ranks, found.uses_gpus) == (("/s",), None, True)


def test_run_on_processors_needs_no_gpus(tmp_path: Path) -> None:
    values = {"distributed_type": "MULTI_CPU", "num_processes": 8, "use_cpu": True}
    found = needs_of((config_of(tmp_path, values, "accelerate"),), None, {})
    assert codes(host(devices=()), found) == []


def test_needs_leave_patterns_lists_and_names_of_the_hub_alone(tmp_path: Path) -> None:
    values = {"actor_rollout_ref": {"model": {"path": "org/m"}, "actor": {"strategy": "fsdp2"}},
              "data": {"train_files": ["/data/*.parquet", "/data/a.parquet"], "val_files": "s3://b/x.parquet"},
              "trainer": {"n_gpus_per_node": 4, "nnodes": 2, "default_local_dir": "s3://b/out"}}  # fmt: skip
    found = needs_of((config_of(tmp_path, values, "verl"),), None, {})
    assert (found.ranks, found.nodes, found.reads, found.saves) == (4, 2, ("/data/a.parquet",), ())


def test_look_at_this_machine(tmp_path: Path) -> None:
    target, missing = str(tmp_path / "not" / "yet"), str(tmp_path / "missing.jsonl")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = look_at(Needs(saves=(target,), reads=(missing,), meeting=("127.0.0.1", port)))
    assert (found.memory_bytes or 0) > 0
    assert found.torch is not None
    saves = found.places[target]
    assert (saves.exists, saves.problem) == (False, "")
    assert saves.free_bytes is not None
    assert saves.filesystem is not None
    assert not found.places[missing].exists
    assert (found.addresses, found.port_is_free) == (("127.0.0.1",), False)
    assert os.listdir(tmp_path) == []


def test_paths_that_are_none_are_not_looked_at_and_nothing_fails() -> None:
    paths = ("a\0b", "x" * 5000, *(f"/nowhere/{number}" for number in range(100)))
    found = look_at(Needs(reads=paths))
    assert 50 < len(found.places) <= 64
    text = "\n".join(check_host(found, Needs(reads=paths)).not_checked)
    assert "/nowhere/99: it did not answer" in text


def test_directory_of_nothing_that_is_here_is_not_written_to() -> None:
    found = look_at(Needs(saves=("/nowhere-of-ckpt/out",))).places["/nowhere-of-ckpt/out"]
    assert (found.is_rootless, found.problem, found.seconds_ahead) == (True, "", None)


def test_probe_of_a_directory_that_takes_no_files_says_why(tmp_path: Path) -> None:
    target = "/proc/ckpt"
    assert look_at(Needs(saves=(target,))).places[target].problem


@pytest.mark.parametrize(("missing", "code"), [(False, 0), (True, 3)])
def test_host_in_a_prolog_says_it_in_json(
    missing: bool, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [one for one in os.environ if one.startswith(("SLURM", "MASTER", "WORLD", "LOCAL"))]:
        monkeypatch.delenv(name)
    data = tmp_path / "d.jsonl"
    if not missing:
        data.write_text("{}\n")
    values = {"base_model": "org/m", "bf16": True, "micro_batch_size": 1, "output_dir": str(tmp_path / "out"),
              "datasets": [{"path": str(data), "type": "alpaca"}]}  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    assert main(["preflight", "--host", str(path), "--json"]) == code
    document = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in document["checks"]] == ["config", "rules", "host", "memory", "checkpoint", "smoke"]
    assert [one["code"] for one in document["findings"]] == (["host-path"] if missing else [])
    assert any("a GPU for each rank" in text for text in document["not_checked"])


def test_host_needs_no_config_and_everything_else_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preflight"]) == 2
    assert "CONFIG" in capsys.readouterr().err
    assert main(["preflight", "--host", "--json"]) in (0, 3)
    assert [one["name"] for one in json.loads(capsys.readouterr().out)["checks"]] == ["config", "host"]
    page = tmp_path / "page.html"
    main(["preflight", "--host", "--html", str(page)])
    assert "this machine" in [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert "<h1>this machine</h1>" in page.read_text()
    assert "mesh not known" not in page.read_text()
