"""Adapters of experts that are stacked in parameters (PEFT's target_parameters), out of trainable-only checkpoints."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from adapters import families
from adapters.peft_world import randomise

from ckpt_tools import api
from ckpt_tools.errors import UsageError

INPUTS = torch.arange(12)[None]


def gpt_oss():
    import transformers as t

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts = {"num_key_value_heads": 1, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = t.GptOssConfig(vocab_size=40, layer_types=["full_attention"], **sizes, **experts)
    return t.GptOssForCausalLM(config).float().eval()


def answer(model):
    with torch.no_grad():
        return model(INPUTS).logits


@pytest.mark.parametrize("parameters", [("gate_up_proj",), ("down_proj",), ("gate_up_proj", "down_proj")])
@pytest.mark.parametrize("targets", [[], ["q_proj"]])
def test_gpt_oss_is_exported_with_its_base_and_refused_without(tmp_path, parameters, targets):
    from peft import LoraConfig, PeftModel, get_peft_model

    names = [f"mlp.experts.{name}" for name in parameters]
    gpt_oss().save_pretrained(tmp_path / "base")
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, target_parameters=names)
    with warnings.catch_warnings(action="ignore"):
        adapted = get_peft_model(gpt_oss(), config)
    randomise(adapted, lambda name: "lora_" in name)
    expected = answer(adapted.eval())
    assert not torch.allclose(expected, answer(gpt_oss()), atol=1e-2)
    factors = {name: tensor for name, tensor in adapted.state_dict().items() if "lora_" in name}
    families.save_dcp({"model": factors}, tmp_path / "dcp")
    with pytest.raises(UsageError, match="target_parameters") as caught:
        api.export_lora(tmp_path / "dcp", tmp_path / "none", alpha=8)
    assert "--base" in caught.value.hint
    options = [{"base": tmp_path / "base"}, {"config": (f"target_parameters={json.dumps(names)}", "r=4")}]
    for number, given in enumerate(options):
        assert api.export_lora(tmp_path / "dcp", tmp_path / f"out{number}", alpha=8, **given).ok
        with warnings.catch_warnings(action="ignore"):  # FutureWarning of transformers about PEFT's calls
            warnings.simplefilter("error", UserWarning)
            loaded = PeftModel.from_pretrained(gpt_oss(), tmp_path / f"out{number}").eval()
        torch.testing.assert_close(answer(loaded), expected, rtol=0, atol=0)
