"""`ckpt export-lora --push`: written first, then sent; a card that says where every setting came from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hub.conftest import states
from hub.local_hub import Hub
from samples import safetensors_bytes, tensor

# The client uploads with an argument that its own HTTP library finds old-fashioned.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

KNOWN = ("--accept-assumed",)


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
    options = ("--alpha", 8, *KNOWN, "--base-model", "org/base", "--push", "me/lora", "--license", "mit", "--private")
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


@pytest.mark.parametrize("target", ["comfyui", "diffusers", "peft"])
def test_export_for_picture_models_has_their_card(hub: Hub, run, tmp_path: Path, target: str):
    """All from default facts; a base that is a path is nowhere in it, and what the run left behind is."""
    source = tmp_path / "run" / "step-5"
    source.mkdir(parents=True)
    names = [
        f"transformer.{name}.0.attn.to_q.lora_{{}}.weight"
        for name in ("transformer_blocks", "single_transformer_blocks")
    ]
    factors = {name.format(f): tensor("F32", *shape) for name in names for f, shape in (("A", (4, 8)), ("B", (8, 4)))}
    (source / "pytorch_lora_weights.safetensors").write_bytes(safetensors_bytes(factors))
    (source / "trainer_state.json").write_text('{"global_step": 5}')
    options = f"--to {target} --architecture flux1 --alpha 4 --push me/{target} --instance-prompt sks".split()
    for base in ("/home/me/flux", "black-forest-labs/FLUX.1-dev"):
        out = tmp_path / base.rpartition("/")[2]
        more = ("--accept-assumed",) if base[0] == "/" else ()
        code, _, error = run("export-lora", source, out, *options, "--base-model", base, "--overwrite", *more)
        assert code == 0, error
        card = hub.files(f"me/{target}")["README.md"].decode()
        assert "/home/me" not in card
        assert "| steps | 5 | trainer&#95;state.json |" in card
    keys = yaml.safe_load(card.split("---\n")[1])
    assert keys["instance_prompt"] == "sks"
    assert keys["base_model"] == "black-forest-labs/FLUX.1-dev"
    assert keys["base_model_relation"] == "adapter"
    assert keys["library_name"] == ("peft" if target == "peft" else "diffusers")
    assert ("ComfyUI/models/loras" in card) == (target == "comfyui")


def test_export_of_a_dead_adapter_sends_nothing(hub: Hub, run, tmp_path: Path):
    source = write_source(tmp_path / "run", is_dead=True)
    code, text, _ = run("export-lora", source, tmp_path / "out", "--alpha", 8, *KNOWN, "--push", "me/lora", "--json")
    assert code == 3
    assert "push" not in json.loads(text)
    assert not (tmp_path / "out").exists()
    assert hub.writes == []


def test_export_whose_push_fails_keeps_what_was_written_and_says_so(hub: Hub, run, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    source, out = write_source(tmp_path / "run"), tmp_path / "out"
    code, _, error = run("export-lora", source, out, "--alpha", 8, *KNOWN, "--push", "me/lora")
    assert code == 1
    assert (out / "adapter_config.json").exists()
    assert f"ckpt push {out} me/lora" in error


def test_export_with_options_of_a_push_alone_is_refused(run, tmp_path: Path):
    source = write_source(tmp_path / "run")
    code, _, error = run("export-lora", source, tmp_path / "out", "--alpha", 8, "--private")
    assert code == 2, error
    assert "--push" in error
    assert not (tmp_path / "out").exists()


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch) -> Path:
    """Where temporary directories are made."""
    path = tmp_path / "scratch"
    path.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(path))
    return path


def test_dry_run_says_what_the_push_would_send_and_leaves_nothing(hub: Hub, run, tmp_path: Path, scratch: Path):
    source, out = write_source(tmp_path / "run"), tmp_path / "out"
    options = ("--base-model", "org/base", "--push", "me/lora", "--json")
    code, shown, error = run("export-lora", source, out, "--alpha", 8, *KNOWN, *options[:-1], "-n")
    assert code == 0, error
    assert "would create it; 3 new" in shown
    assert str(scratch) not in shown + error
    code, text, error = run("export-lora", source, out, "--alpha", 8, *KNOWN, *options, "--dry-run")
    assert code == 0, error
    planned = json.loads(text)
    assert planned["destination"] == str(out)
    assert planned["push"]["dry_run"] is True
    assert set(states(planned["push"]).values()) == {"new"}
    assert hub.writes == []
    assert not out.exists()
    assert not list(scratch.iterdir())
    code, text, error = run("export-lora", source, out, "--alpha", 8, *KNOWN, *options)
    assert code == 0, error
    assert states(json.loads(text)["push"]) == states(planned["push"])
    assert {each["file"] for each in planned["plan"]["files"]} == {path.name for path in out.iterdir()}
    num_writes = len(hub.writes)
    # Once more, with another alpha: that is in the configuration, and in the card, which is there already.
    code, text, error = run("export-lora", source, tmp_path / "other", "--alpha", 4, *KNOWN, *options, "--dry-run")
    assert code == 0, error
    again = states(json.loads(text)["push"])
    assert again["adapter_model.safetensors"] == "unchanged"
    assert again["adapter_config.json"] == "changed"
    assert len(hub.writes) == num_writes
    assert not list(scratch.iterdir())


def test_dry_run_of_a_push_finds_what_the_export_would(hub: Hub, run, tmp_path: Path, scratch: Path, monkeypatch):
    source = write_source(tmp_path / "run", is_dead=True)
    options = ("--alpha", 8, *KNOWN, "--push", "me/lora", "--dry-run")
    code, text, _ = run("export-lora", source, tmp_path / "out", *options, "--json")
    assert code == 3
    document = json.loads(text)
    assert "adapter-zero" in {each["code"] for each in document["findings"]}
    assert "push" not in document
    (tmp_path / "there").mkdir()
    assert run("export-lora", source, tmp_path / "there", *options)[0] == 5
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    code, _, error = run("export-lora", write_source(tmp_path / "live"), tmp_path / "out", *options)
    assert code == 1
    assert "is written" not in error
    assert not list(scratch.iterdir())
    assert not (tmp_path / "out").exists()


def test_assumed_settings_are_not_published(hub: Hub, run, push_json, tmp_path: Path):
    """A run's factors without their configuration: with rsLoRA the scale would be another."""
    source, out = write_source(tmp_path / "run"), tmp_path / "out"
    options = ("--alpha", 8, "--base-model", "org/base", "--push", "me/lora")
    for more in ((), ("-n",)):
        code, shown, error = run("export-lora", source, out, *options, *more)
        error += shown
        assert code == 3
        for field in ("use_rslora", "init_lora_weights", "alpha_pattern"):
            assert f"{field} is assumed" in error
        assert "--config use_rslora=false" in error
        assert "--accept-assumed" in error
        assert not out.exists()
    assert run("export-lora", source, out, *options[:4])[0] == 0  # here it may be written, and says so
    error = push_json(out, "me/lora", code=2)
    assert ("use_rslora=false" in error["what"], "--accept-assumed" in error["hint"]) == (True, True)
    assert hub.writes == []
    push_json(out, "me/lora", "--accept-assumed")
    config = json.loads((out / "adapter_config.json").read_text()) | {"use_rslora": True}
    (source.parent / "adapter_config.json").write_text(json.dumps(config))
    code, _, error = run("export-lora", source, tmp_path / "known", *options[4:])
    assert code == 0, error
    assert json.loads(hub.files("me/lora")["adapter_config.json"])["use_rslora"] is True
