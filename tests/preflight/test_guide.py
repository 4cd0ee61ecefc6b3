"""What docs/guides/preflight.md shows is what happens."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import toys

from ckpt_tools import api
from ckpt_tools.cli import main
from ckpt_tools.preflight.configs import read_config
from ckpt_tools.preflight.match import check_checkpoint

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "preflight.md").read_text(encoding="utf-8")
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def config():
    """The guide's config."""
    return re.search(r"```yaml accelerate\.yaml\n(.*?)```", GUIDE, re.DOTALL)[1]


def shown(command):
    """What the guide shows for a command."""
    return re.search(rf"```console\n\$ {re.escape(command)}\n(.*?)```", GUIDE, re.DOTALL)[1]


@pytest.mark.full
def test_guide_shows_what_is_wrong_with_the_wrong_config(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama-8b").mkdir()
    (tmp_path / "llama-8b" / "config.json").write_text(json.dumps(LLAMA_8B))
    wrong = config().replace("dp_shard_size: 16", "dp_shard_size: 24")
    wrong = wrong.replace("reshard_after_forward: true", "reshard_after_forward: FULL_SHARD")
    (tmp_path / "wrong.yaml").write_text(wrong.replace("LlamaDecoderLayer", "LlamaDecoder"))
    argv = "preflight wrong.yaml --model llama-8b --no-smoke --quiet"
    assert main(argv.split()) == 3
    assert capsys.readouterr().out == shown(f"ckpt {argv}")


def test_guide_shows_what_is_said_of_a_config_that_is_not_read(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sft.yaml").write_text("recipe: x\nstep_scheduler: {max_steps: 10}\noutput_dir: saves\n")
    argv = "preflight sft.yaml --no-smoke --quiet"
    assert main(argv.split()) == 3
    assert capsys.readouterr().out == shown(f"ckpt {argv}")


@pytest.mark.full
def test_guide_shows_what_is_wrong_with_the_names_of_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    toys.save("llama", "tiny-llama", num_hidden_layers=3)
    api.shard("tiny-llama", "run", mesh="dp_shard=4")
    (tmp_path / "accelerate.yaml").write_text(config())
    spec = read_config("accelerate.yaml").spec
    found = [f for f in check_checkpoint("run", spec, model="tiny-llama").findings if f.severity == "error"]
    lines = [f"{f.severity}: {f.code}: {f.what}\n   at: {f.where}\n hint: {f.hint}\n" for f in found]
    command = "ckpt preflight accelerate.yaml --model tiny-llama --checkpoint run --no-smoke --quiet"
    assert "".join(lines) == shown(command)
