"""What is verified reaches the hub before anything that it follows is removed."""

from __future__ import annotations

import os

import pytest
from hub.conftest import environment as environment, hub as hub, run as ckpt  # noqa: F401

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")]
pytest.importorskip("huggingface_hub", reason="needs huggingface_hub")


def test_what_stays_is_gathered_and_pushed(hub, ckpt, run, tmp_path):  # noqa: F811
    options = ("--once", "--settle", "0", "--keep-last", "1", "--gather", tmp_path / "out", "--push", "me/model")
    code, out, _ = ckpt("watch", run, *options)
    assert code == 0, out
    assert "model.safetensors" in hub.files("me/model")
    assert sorted(each for each in os.listdir(run) if not each.startswith((".", "latest-good"))) == ["step-30"]
    assert ckpt("watch", run, *options)[0] == 0


def test_nothing_goes_while_the_hub_refuses(hub, ckpt, run, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("HF_TOKEN", "hf_nobody")
    options = ("--once", "--settle", "0", "--keep-last", "1", "--gather", tmp_path / "out", "--push", "me/model")
    code, _, err = ckpt("watch", run, *options)
    assert code == 1
    assert "step-30 was not delivered to me/model (hub)" in err
    there = sorted(each for each in os.listdir(run) if not each.startswith((".", "latest-good")))
    assert there == ["step-10", "step-20", "step-30"]
