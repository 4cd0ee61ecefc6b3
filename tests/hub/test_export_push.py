"""`ckpt export-lora --push`: written first, then sent; a card that says where every setting came from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hub.conftest import states
from hub.local_hub import Hub
from samples import safetensors_bytes, tensor

# The client uploads with an argument that its own HTTP library finds old-fashioned.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


def write_source(directory: Path, *, is_dead: bool = False) -> Path:
    fqn = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    b = ("F32", (8, 4), bytes(128)) if is_dead else tensor("F32", 8, 4)
    factors = {fqn.format(layer, name): t for layer in range(2) for name, t in (("A", tensor("F32", 4, 8)), ("B", b))}
    directory.mkdir()
    path = directory / "adapter_model.safetensors"
    path.write_bytes(safetensors_bytes(factors))
    return path


def test_export_with_push_sends_what_was_written(hub: Hub, run, tmp_path: Path):
    source, out = write_source(tmp_path / "run"), tmp_path / "out"
    options = ("--alpha", 8, "--base-model", "org/base", "--push", "me/lora", "--license", "mit", "--private")
    code, text, error = run("export-lora", source, out, *options, "--json")
    assert code == 0, error
    document = json.loads(text)
    assert document["push"]["private"] is True
    assert set(states(document["push"]).values()) == {"new"}
    sent = hub.files("me/lora")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert sent[name] == (out / name).read_bytes()
    card = sent["README.md"].decode()
    assert "base_model: org/base" in card
    assert "license: mit" in card
    assert "| lora&#95;alpha | 8.0 | --alpha |" in card or "| lora&#95;alpha | 8 | --alpha |" in card, card


def test_export_of_a_dead_adapter_sends_nothing(hub: Hub, run, tmp_path: Path):
    source = write_source(tmp_path / "run", is_dead=True)
    code, text, _ = run("export-lora", source, tmp_path / "out", "--alpha", 8, "--push", "me/lora", "--json")
    assert code == 3
    assert "push" not in json.loads(text)
    assert not (tmp_path / "out").exists()
    assert hub.writes == []


def test_export_whose_push_fails_keeps_what_was_written_and_says_so(hub: Hub, run, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    source, out = write_source(tmp_path / "run"), tmp_path / "out"
    code, _, error = run("export-lora", source, out, "--alpha", 8, "--push", "me/lora")
    assert code == 1
    assert (out / "adapter_config.json").exists()
    assert f"ckpt push {out} me/lora" in error


def test_export_with_options_of_a_push_alone_is_refused(run, tmp_path: Path):
    source = write_source(tmp_path / "run")
    for options in (("--private",), ("--push", "me/lora", "--dry-run")):
        code, _, error = run("export-lora", source, tmp_path / "out", "--alpha", 8, *options)
        assert code == 2, error
        assert "--push" in error
    assert not (tmp_path / "out").exists()
