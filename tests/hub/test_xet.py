"""Xet, which the client prefers wherever hf_xet is installed: used where the hub has it, never in the way."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hub.local_hub import READ_TOKEN, XET_TOKEN, Fault, Hub
from samples import write_model

pytestmark = pytest.mark.full


pytest.importorskip("hf_xet")

# The real client's, so that the local hub need not speak the storage's newest dialect.
PLAIN = {"HF_XET_CLIENT_LEGACY_DIRECT_XORB_UPLOAD": "1", "HF_XET_CLIENT_SHARD_API_VERSION": "1"}
USED = {"HF_HUB_DISABLE_XET": None, **PLAIN}
WEIGHTS = "model.safetensors"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", {"weight": ("F32", (50_000,), os.urandom(200_000))})


def large_paths(hub: Hub) -> list[str]:
    """Where large content went."""
    return [r.path for r in hub.requests if r.path.startswith(("/v1/xorbs/", "/store/"))]


def test_push_by_xet_arrives_whole(hub: Hub, push_process, model: Path):
    hub.has_xet = True
    done = push_process(model, "me/model", **USED)
    assert done.returncode == 0, done.stderr
    assert "checked: 4 files" in done.stdout
    assert hub.files("me/model")[WEIGHTS] == (model / WEIGHTS).read_bytes()
    assert [path.split("/")[2] for path in large_paths(hub)] == ["xorbs"]
    stored = [r for r in hub.requests if r.path.startswith(("/v1/xorbs/", "/v1/shards"))]
    assert {r.token for r in stored} == {XET_TOKEN}  # the hub's token is not for the storage
    assert "without Xet" not in done.stderr


def test_push_by_xet_that_was_cut_sends_nothing_twice(hub: Hub, push_process, model: Path):
    """What the storage has taken the client remembers by itself, beside its cache."""
    hub.has_xet = True
    hub.faults.append(Fault("/commit/main", status=413))
    assert push_process(model, "me/model", **USED).returncode == 1
    assert sum(r.nbytes for r in hub.requests if r.path.startswith("/v1/xorbs/")) >= 200_000
    hub.requests.clear()
    done = push_process(model, "me/model", **USED)
    assert done.returncode == 0, done.stderr
    assert large_paths(hub) == []
    assert hub.files("me/model")[WEIGHTS] == (model / WEIGHTS).read_bytes()


def test_push_hub_without_xet_is_sent_lfs_at_once(hub: Hub, push_process, model: Path):
    done = push_process(model, "me/model", **USED)
    assert done.returncode == 0, done.stderr
    assert [path.split("/")[1] for path in large_paths(hub)] == ["store"]
    assert "trying" not in done.stderr


@pytest.mark.zoo  # half a minute, in which the client waits
@pytest.mark.parametrize("fault", ["status", "cut"])
def test_push_storage_that_is_away_is_done_without(hub: Hub, push_process, model: Path, fault: str):
    hub.has_xet = True
    hub.faults.append(Fault("/v1/(xorbs|chunks)/", kind=fault, status=500, times=10_000))
    started = time.monotonic()
    done = push_process(model, "me/model", **USED)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - started < 90  # by itself the client tries for many minutes
    assert "uploading to Xet" in done.stderr
    assert "trying without Xet" in done.stderr
    assert hub.files("me/model")[WEIGHTS] == (model / WEIGHTS).read_bytes()
    assert large_paths(hub)[-1].startswith("/store/")


def test_push_xet_without_the_right_to_write_is_refused(hub: Hub, push_process, model: Path):
    hub.has_xet = True
    hub.make("org/model", {"config.json": b"{}"})
    done = push_process(model, "org/model", HF_TOKEN=READ_TOKEN, **USED)
    assert done.returncode == 1
    assert "may not write to org/model" in done.stderr
    assert "--create-pr" in done.stderr
    assert large_paths(hub) == []


def test_push_leaves_the_choice_of_xet_as_it_was(hub: Hub, push_json, model: Path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    before = dict(os.environ)
    with pytest.warns(DeprecationWarning, match="Use 'content="):  # the client's own
        push_json(model, "me/model")
    assert constants.HF_HUB_DISABLE_XET is False
    assert dict(os.environ) == before
