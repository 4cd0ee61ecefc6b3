"""What a library that is too old is told, and to whom: never as a diagnosis of the user's model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from samples import write_model

from ckpt_tools.floors import FLOORS, NF4_TORCH, TESTED_TORCH, is_older

ROOT = Path(__file__).parents[2]


def ckpt(tmp_path: Path, versions: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command where other releases of libraries are installed, as their metadata says."""
    installed = tmp_path / "site"
    for name, version in versions.items():
        record = installed / f"{name}-{version}.dist-info"
        record.mkdir(parents=True, exist_ok=True)
        (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(installed), str(ROOT)]))
    command = [sys.executable, "-m", "ckpt_tools", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    write_model(directory)
    return directory


@pytest.mark.full(but=["smoke"])
@pytest.mark.parametrize(
    ("versions", "arguments", "needed"),
    [
        ({"torch": "2.6.0+cpu"}, ("shard", "{model}", "{out}", "--mesh", "dp_shard=2", "--engine", "dtensor"), "2.10"),
        ({"torch": "2.9.1"}, ("smoke", "{model}"), "2.10"),
        ({"torch": "2.11.0"}, ("smoke", "{model}", "--lora", "--quantize", "nf4"), "2.12"),
    ],
    ids=["dtensor", "smoke", "nf4"],
)
def test_torch_that_is_too_old_is_named_at_start(tmp_path: Path, model: Path, versions, arguments, needed: str):
    filled = [argument.format(model=model, out=tmp_path / "out") for argument in arguments]
    done = ckpt(tmp_path, versions, *filled, "--json")
    assert done.returncode == 2
    error = json.loads(done.stderr)["error"]
    assert error["what"].startswith(f"torch {versions['torch']} is installed; ")
    assert error["what"].endswith(f"needs {needed} or newer")
    assert error["hint"] == f"pip install 'torch>={needed}'"
    assert not (tmp_path / "out").exists()


@pytest.mark.full
def test_torch_that_is_too_old_does_not_matter_where_none_is_needed(tmp_path: Path, model: Path):
    versions = {"torch": "2.1.0", "transformers": "4.40.0"}
    for arguments in (("shard", model, tmp_path / "dcp", "--mesh", "dp_shard=2"), ("verify", tmp_path / "dcp"),
                      ("gather", tmp_path / "dcp", tmp_path / "back")):  # fmt: skip
        done = ckpt(tmp_path, versions, *arguments)
        assert (done.returncode, done.stderr.count("torch")) == (0, 0)


def test_env_names_what_is_too_old_and_what_was_tested(tmp_path: Path):
    done = ckpt(tmp_path, {"torch": "2.8.0", "peft": "0.15.2"}, "env", "--json")
    document = json.loads(done.stdout)
    assert document["env"]["torch"] == "2.8.0"
    assert document["too_old"] == {"torch": "2.10", "peft": "0.21"}
    assert document["tested_torch"] == list(TESTED_TORCH)
    text = ckpt(tmp_path, {}, "env").stdout
    assert re.search(r"^torch +2\.8\.0  \(too old: ckpt needs 2\.10\)$", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("version", "expected"),
    [("2.9.1+cu128", True), ("2.10.0", False), ("2.10.0a0+git1", False), ("2.11.0.dev20260101", False), ("3", False),
     ("2", True), ("unknown", False)],
)  # fmt: skip
def test_is_older(version: str, expected: bool):
    assert is_older(version, (2, 10)) is expected


def test_floors_are_those_of_the_package_and_of_the_page():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = dict(
        match.groups()
        for line in (*project["dependencies"], *extras["hf"], *extras["qlora"], *extras["diffusers"])
        if (match := re.match(r"([a-z-]+)>=([\d.]+)", line))
    )
    for library, oldest in FLOORS.items():
        if library != "torch":
            assert required[library] == ".".join(map(str, oldest))
    assert f"torch>={'.'.join(map(str, FLOORS['torch']))}" in project["dependencies"]
    assert f"torch>={'.'.join(map(str, NF4_TORCH))}" in extras["qlora"]
    page = (ROOT / "docs" / "dev" / "compatibility.md").read_text()
    for release in TESTED_TORCH:
        assert re.search(rf"`py3\.\d+-torch{re.escape(release)}\.\d+\S*` \| 20", page)
