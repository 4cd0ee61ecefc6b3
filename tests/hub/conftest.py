"""A local hub, and `ckpt push` in this process or in one of its own; nothing ever leaves 127.0.0.1."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hub.local_hub import WRITE_TOKEN, Hub, local_hub
from huggingface_hub import constants
from safetensors.torch import load_file
from samples import write_model

from ckpt_tools.cli import main
from ckpt_tools.storage.remote import web

NOWHERE = "http://127.0.0.1:9"
"""The address that the client had when it was imported: whatever still goes there is a bug."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with local_hub() as running:
        yield running


@pytest.fixture
def naps(monkeypatch) -> list[float]:
    """Pauses between tries, which are noted and not made."""
    taken: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(taken), sleep=taken.append)
    monkeypatch.setattr(web, "time", clock)
    monkeypatch.setattr("time.sleep", taken.append)
    return taken


@pytest.fixture
def environment(hub: Hub, tmp_path: Path) -> dict[str, str]:
    """What a user sets to push to the local hub."""
    return {
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",  # tests/hub/test_xet.py does without
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "hf-home"),
        "HF_TOKEN": WRITE_TOKEN,
        "NO_PROXY": "127.0.0.1,localhost",
    }


@pytest.fixture
def run(environment, monkeypatch, tmp_path: Path, capsys):
    """Run a command in this process; returns (exit code, stdout, stderr)."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "ENDPOINT", NOWHERE)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", NOWHERE + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(tmp_path / "harnesses.json"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))

    def call(*argv: object) -> tuple[int, str, str]:
        code = main([*map(str, argv)])
        captured = capsys.readouterr()
        for text in (captured.out, captured.err):
            assert "Traceback" not in text or "-v" in argv
            assert WRITE_TOKEN not in text
            assert "secretsignature" not in text
        return code, captured.out, captured.err

    return call


@pytest.fixture
def push(run):
    """Run `ckpt push` in this process; returns (exit code, stdout, stderr)."""
    return functools.partial(run, "push")


@pytest.fixture
def push_json(push):
    """Run `ckpt push --json`; returns its document, or the error's."""

    def call(*argv: object, code: int = 0) -> dict:
        found, out, err = push(*argv, "--json")
        assert found == code, (out, err)
        if code in (0, 3) and out:
            assert err == ""
            return json.loads(out)
        assert out == ""
        return json.loads(err)["error"]

    return call


@pytest.fixture
def push_process(environment):
    """Run `ckpt push` in a process of its own, as a user does."""

    def call(*argv: object, **changes: str | None) -> subprocess.CompletedProcess[str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
        env = {name: value for name, value in {**inherited, **environment, **changes}.items() if value is not None}
        command = [sys.executable, "-m", "ckpt_tools", "push", *map(str, argv)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        assert WRITE_TOKEN not in done.stdout + done.stderr
        return done

    return call


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", num_files=2)


def states(document: dict) -> dict[str, str]:
    """Path → state of a plan."""
    return {file["path"]: file["state"] for file in document["files"]}


def strangers(
    environment: dict[str, str], directory: Path, *jobs: str, is_owner: bool = False
) -> dict[str, torch.Tensor]:
    """Let a process load what was published (`stranger.py`), without a token; returns what each job computed."""
    out = directory / "seen.safetensors"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    known = {name: value for name, value in environment.items() if is_owner or name != "HF_TOKEN"}
    env = {**inherited, **known, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "hub.stranger", str(out), *jobs]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found = load_file(out)
    return {job: found[str(number)] for number, job in enumerate(jobs)}
