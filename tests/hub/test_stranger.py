"""What a stranger loads: by PEFT, from the hub, by the adapter's own config; and what no library could read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fsdp2.ranks import execute, run_ranks
from hub.local_hub import Hub
from hub.test_card import write_adapter
from samples import write_model

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

MAKE = """
import json, os, sys, torch
os.chdir(sys.argv[3])
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM
shape = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
torch.manual_seed(0)
LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained("base")
found = {}
for name, more in json.loads(KINDS).items():
    base = LlamaForCausalLM.from_pretrained("base")  # a path of the trainer's, as its config will say
    options = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    model = get_peft_model(base, LoraConfig(**options | more, init_lora_weights=False))
    with torch.no_grad():
        for each in model.parameters():
            if each.requires_grad:
                each.add_(torch.randn_like(each) / 8)
    model.save_pretrained(name)
    found[name] = model.eval()(torch.arange(8)[None]).logits.flatten().tolist()
print(json.dumps(found))
"""
LOAD = """
import json, sys, torch
from peft import AutoPeftModelForCausalLM
found = {}
for name in sys.argv[1:]:
    model = AutoPeftModelForCausalLM.from_pretrained(f"me/{name}").eval()
    found[name] = model(torch.arange(8)[None]).logits.flatten().tolist()
print(json.dumps(found))
"""
KINDS = {
    "lora": {},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "saved": {"modules_to_save": ["lm_head"]},
    "tokens": {"trainable_token_indices": [1, 5]},
    "patterns": {"alpha_pattern": {"layers.0.self_attn.q_proj": 32}, "rank_pattern": {"v_proj": 2}},
}


@pytest.mark.full
def test_adapters_of_peft_load_by_their_own_config_from_the_hub(hub: Hub, push_json, environment, tmp_path: Path):
    """The trainer's path is in each config and card; a stranger's AutoPeft finds the base all the same."""
    (made,) = run_ranks(1, execute, f"KINDS = {json.dumps(KINDS)!r}\n{MAKE}", tmp_path, backend=None)
    expected = json.loads(made.splitlines()[-1])
    assert len({tuple(each) for each in expected.values()}) == len(KINDS)
    push_json(tmp_path / "base", "org/base", "--no-card")
    for name in KINDS:
        assert json.loads((tmp_path / name / "adapter_config.json").read_text())["base_model_name_or_path"] == "base"
        push_json(tmp_path / name, f"me/{name}", "--base-model", "org/base")
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *KINDS],
        env=os.environ | environment,
        cwd=hub_free(tmp_path),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == expected


def hub_free(tmp_path: Path) -> Path:
    """A directory in which no path of the trainer's leads anywhere."""
    (tmp_path / "elsewhere").mkdir()
    return tmp_path / "elsewhere"


@pytest.mark.parametrize("options", [(), ("-n",)])
def test_config_that_peft_cannot_read_is_refused(hub: Hub, push_json, tmp_path: Path, options):
    adapter = write_adapter(tmp_path / "a", base_model_name_or_path="org/base", arrow_config=3)
    error = push_json(adapter, "me/a", *options, code=4)
    assert (error["where"], "peft cannot read" in error["what"], hub.writes) == ("adapter_config.json", True, [])


def test_card_that_model_card_cannot_read_is_refused(hub: Hub, push_json, tmp_path: Path):
    adapter = write_adapter(tmp_path / "a", base_model_name_or_path="org/base")
    (adapter / "README.md").write_text("---\nmodel-index:\n- name: x\n  results: 3\n---\n")
    for options in ((), ("--no-card",)):
        error = push_json(adapter, "me/a", *options, code=4)
        assert (error["where"], "huggingface_hub cannot read" in error["what"], hub.writes) == ("README.md", True, [])


def test_config_that_transformers_cannot_read_is_refused(hub: Hub, push_json, tmp_path: Path):
    config = {"config.json": b'{"model_type": "llama", "hidden_size": "many"}'}
    model = write_model(tmp_path / "m", assets=config)
    error = push_json(model, "me/m", code=4)
    assert (error["where"], "transformers cannot read" in error["what"], hub.writes) == ("config.json", True, [])
    config = {"config.json": b'{"model_type": "new", "auto_map": {"AutoConfig": "a.B"}}'}
    notes = push_json(write_model(tmp_path / "own", assets=config), "me/own")["notes"]
    assert any(note.startswith("not checked: config.json as transformers") for note in notes)


def test_base_that_does_not_answer_is_said(hub: Hub, push_json, tmp_path: Path):
    adapter = write_adapter(tmp_path / "a", base_model_name_or_path="org/base")
    assert any("org/base: private, or not known" in note for note in push_json(adapter, "me/a", "-n")["notes"])
    hub.make("org/base")
    assert not any("org/base" in note for note in push_json(adapter, "me/a", "-n")["notes"])


def test_library_that_is_away_is_said(hub: Hub, push_json, tmp_path: Path, monkeypatch):
    find = "ckpt_tools.hub.stranger.find_spec"
    monkeypatch.setattr(find, lambda name: None if name == "peft" else name)
    adapter = write_adapter(tmp_path / "a", base_model_name_or_path="org/base")
    notes = push_json(adapter, "me/a", "-n")["notes"]
    assert "not checked: adapter_config.json as peft reads it: install peft" in notes
