"""Merges into quantised releases: what `gather --dequantize` makes of them, and the adapter added to that."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
import transformers
from adapters.peft_world import randomise
from adapters.test_merge import tensors_of
from quantised.test_dequantize import BLOCK, SIZES, hub_model, in_blocks, write

from ckpt_tools import api
from ckpt_tools.cli import main


def fp8(path):
    tensors = in_blocks(hub_model(transformers.Qwen3MoeForCausalLM, path))
    return write(path, tensors, {"quant_method": "fp8", "weight_block_size": BLOCK})


def mxfp4(path):
    tensors = hub_model(transformers.GptOssForCausalLM, path)
    made = torch.Generator().manual_seed(7)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        shape = (experts, rows, columns // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=made, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(110, 125, shape, generator=made, dtype=torch.uint8)
    return write(path, tensors, {"quant_method": "mxfp4"})


def nf4(path):
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    hub_model(transformers.LlamaForCausalLM, path)
    settings = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    transformers.LlamaForCausalLM.from_pretrained(path, quantization_config=settings).save_pretrained(path)
    return str(path)


def adapt(kind, path) -> None:
    """Write an adapter of attention, and of the experts where there are any."""
    from peft import LoraConfig, get_peft_model

    parameters = [] if kind is transformers.LlamaForCausalLM else ["experts.gate_up_proj", "experts.down_proj"]
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj"], target_parameters=parameters)
    with warnings.catch_warnings(action="ignore"):
        model = get_peft_model(kind(kind.config_class(**SIZES)), config)
        randomise(model, lambda name: "lora_" in name, 1)
        model.save_pretrained(path)


@pytest.mark.parametrize(
    ("scheme", "kind"),
    [
        (fp8, transformers.Qwen3MoeForCausalLM),  # experts one by one, 8-bit blocks
        pytest.param(mxfp4, transformers.GptOssForCausalLM, marks=pytest.mark.full),  # stacked, and turned
        pytest.param(nf4, transformers.LlamaForCausalLM, marks=pytest.mark.full),
    ],
)
def test_a_quantised_base_is_decoded_and_merged_into(tmp_path, capsys, scheme, kind):
    base = scheme(tmp_path / "base")
    adapt(kind, tmp_path / "adapter")
    assert main(["merge-lora", base, str(tmp_path / "adapter"), str(tmp_path / "out")]) == 0
    assert "decoded to BF16" in capsys.readouterr().err
    assert main(["gather", base, str(tmp_path / "plain"), "--dequantize", "-q"]) == 0
    api.merge_lora(tmp_path / "plain", tmp_path / "adapter", tmp_path / "expected")
    found, expected, before = (tensors_of(tmp_path / each) for each in ("out", "expected", "plain"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    changed = {name.partition("self_attn.")[2] for name in found if not torch.equal(found[name], before[name])}
    assert "q_proj.weight" in changed
    assert scheme is nf4 or "" in changed  # the experts
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    loaded = kind.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(loaded[name], found[name])
