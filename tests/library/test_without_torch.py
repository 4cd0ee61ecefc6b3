"""Without torch, transformers, PEFT or diffusers what does not compute with them works; the rest says what it needs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

COMMANDS = [
    "shard model parts --mesh dp_shard=2",
    "reshard parts four --mesh dp_shard=4",
    "gather four whole",
    "verify four",
    "inspect four",
    "diff model whole",
    "stats model",
    "export-lora adapter exported --to peft",
    "check-lora adapter --base model",
    "merge-lora model adapter merged",
    "average model whole averaged",
    "scan model",
]
NEEDY = ["extract-lora model merged extracted --rank 2"]
SCRIPT = """
import json, sys
sys.modules |= dict.fromkeys(("torch", "transformers", "peft", "diffusers", "accelerate"))
from ckpt_tools.cli import main
for line in json.loads(sys.argv[1]):
    print("RC", line, main(line.split()), flush=True)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, rng = tmp_path_factory.mktemp("bare"), np.random.default_rng(0)
    names = [f"model.layers.{i}.self_attn.{name}_proj.weight" for i in range(2) for name in "qv"]
    for name in ("model", "adapter"):
        (root / name).mkdir()
    save_file({name: rng.normal(size=(8, 8)).astype("f4") for name in names}, root / "model/model.safetensors")
    factors = {
        f"base_model.model.{name.removesuffix('.weight')}.lora_{side}.weight": rng.normal(size=shape).astype("f4")
        for name in names
        for side, shape in (("A", (2, 8)), ("B", (8, 2)))
    }
    save_file(factors, root / "adapter/adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}
    (root / "adapter/adapter_config.json").write_text(json.dumps(config))
    (root / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    return root


def test_commands_do_without_torch(place: Path) -> None:
    lines = [*COMMANDS, *NEEDY]
    done = subprocess.run([sys.executable, "-c", SCRIPT, json.dumps(lines)], cwd=place, capture_output=True, text=True)
    found = dict(each[3:].rsplit(" ", 1) for each in done.stdout.splitlines() if each.startswith("RC "))
    assert found == dict.fromkeys(COMMANDS, "0") | dict.fromkeys(NEEDY, "2"), done.stderr
    assert done.stderr.count("needs torch, which is not installed") == len(NEEDY)
    one, other = (load_file(place / name / "model.safetensors") for name in ("model", "whole"))
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name]) for name in one)
