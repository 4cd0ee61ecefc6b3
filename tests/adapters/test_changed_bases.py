"""Merges that the model's class or the checkpoint decides: square experts, and bases changed before training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
import transformers
from adapters.families import save_dcp
from safetensors.torch import load_file

from ckpt_tools import api
from ckpt_tools.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
SIZES = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32,
    "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "gpt-oss": lambda: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(**SIZES, **MOE, sliding_window=8, layer_types=["full_attention"])
    ),
    "mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, **MOE)),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
}


def fill(model: peft.PeftModel) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter) / 8)


def merged(directory: Path) -> dict[str, torch.Tensor]:
    return transformers.AutoModelForCausalLM.from_pretrained(directory).state_dict()


@pytest.mark.parametrize("targets", [["experts.gate_up_proj"], ["mlp.experts.down_proj"]], ids=str)
@pytest.mark.parametrize("name", ["gpt-oss", "mixtral"])
def test_experts_are_merged_as_peft_does(name: str, targets: list[str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    base, source = tmp_path / "base", tmp_path / "adapter"
    MODELS[name]().save_pretrained(base)
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], target_parameters=targets)
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base), config)
    fill(model)
    model.save_pretrained(source)
    loaded = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), source)
    assert api.check_lora(source, base=base).verdict == "loads"
    api.merge_lora(base, source, tmp_path / "merged")
    got, want = merged(tmp_path / "merged"), loaded.merge_and_unload().state_dict()
    assert {name for name in want if not torch.allclose(got[name], want[name], atol=1e-6)} == set()
    (base / "config.json").rename(base / "other.json")
    if name == "gpt-oss" and "down_proj" in targets[0]:
        with pytest.raises(UsageError, match="are square"):
            api.merge_lora(base, source, tmp_path / "blind")


@pytest.fixture(params=["pissa", "olora"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, dict[str, torch.Tensor]]:
    """A training checkpoint of an adapter that takes its start out of the base, and PEFT's merge of it."""
    torch.manual_seed(0)
    MODELS["llama"]().save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=request.param)
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base"), config)
    fill(model)
    save_dcp({"model": model.state_dict()}, tmp_path / "run")
    return request.param, tmp_path, copy.deepcopy(model).merge_and_unload().state_dict()


def test_base_changed_before_training_is_taken_from_the_checkpoint(
    run: tuple[str, Path, dict[str, torch.Tensor]],
) -> None:
    init, root, want = run
    with pytest.raises(UsageError, match="differs from the base's") as caught:
        api.merge_lora(root / "base", root / "run", root / "merged", alpha=8)
    assert "init_lora_weights=pissa" in str(caught.value.hint)
    assert "--include" not in str(caught.value.hint)  # which leads to another model
    api.merge_lora(root / "base", root / "run", root / "merged", alpha=8, config=[f"init_lora_weights={init}"])
    got = load_file(next((root / "merged").glob("*.safetensors")))
    assert {name for name, tensor in got.items() if not torch.allclose(tensor, want[name], atol=1e-6)} == set()
    with pytest.raises(UsageError, match="cannot be scaled"):
        api.merge_lora(
            root / "base", root / "run", root / "half", alpha=8, scale=0.5, config=[f"init_lora_weights={init}"]
        )
