"""What ModelOpt has exported, as floats: bit for bit what it computes with itself.

Not a dependency: pip install --no-deps --target DIR nvidia-modelopt omegaconf antlr4-python3-runtime==4.9.3 pulp, and
DIR in PYTHONPATH.
"""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_tools.cli import main

with warnings.catch_warnings(action="ignore"):  # it asks for an older transformers
    qtensors = pytest.importorskip("modelopt.torch.quantization.qtensor", reason="ModelOpt is not installed")
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
    from modelopt.torch.export.quant_utils import from_quantized_weight, process_layer_quant_config, to_quantized_weight

ROWS, COLUMNS = 24, 96


def weight(*shape):
    return torch.randn(*shape or (ROWS, COLUMNS), generator=torch.Generator().manual_seed(3))


def four_bits(given):
    """Stored parts of NVFP4, and what they decode to as bfloat16."""
    each, of_all = qtensors.NVFP4QTensor.get_weights_scaling_factor(given, 16)
    packed = to_quantized_weight(given, each, "nvfp4", of_all, 16)
    wrapped = qtensors.NVFP4QTensor(given.shape, torch.bfloat16, packed)
    wanted = wrapped.dequantize(torch.bfloat16, scale=each, double_scale=of_all, block_sizes={-1: 16})
    return {"weight": packed, "weight_scale": each, "weight_scale_2": of_all}, wanted


def eight_bits(given):
    """Stored parts of FP8 with one scale, and what they decode to as float32."""
    scale = given.abs().amax() / 448
    packed = to_quantized_weight(given, scale, "fp8")
    return {"weight": packed, "weight_scale": scale}, from_quantized_weight(packed, scale, "fp8", torch.float32)


def layers(**parts):
    return {f"{name}.{part}": tensor for name, each in parts.items() for part, tensor in each.items()}


def gathered(directory, tensors, quantization, dtype, *, is_beside=False):
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    own = {"quantization": quantization, "producer": {"name": "modelopt"}}
    (directory / "hf_quant_config.json").write_text(json.dumps(own))
    config = {} if is_beside else {"quantization_config": convert_hf_quant_config_format(own)}
    (directory / "config.json").write_text(json.dumps(config))
    out = directory.parent / "out"
    assert main(["gather", str(directory), str(out), "--dequantize", "--dtype", dtype, "-q"]) == 0
    assert "quant" not in (out / "config.json").read_text()
    assert not (out / "hf_quant_config.json").exists()  # vLLM believes it
    return load_file(out / "model.safetensors")


@pytest.mark.parametrize("is_beside", [False, True])
def test_nvfp4_is_what_modelopt_computes_with(tmp_path, is_beside):
    stored, wanted = four_bits(weight())
    tensors = layers(
        a=stored | {"input_scale": torch.ones(()), "bias": torch.ones(2)}, k_proj={"k_scale": torch.ones(1)}
    )
    quantization = process_layer_quant_config({"a.quantization": "nvfp4", "a.awq_block_size": 16})
    found = gathered(tmp_path / "hub", tensors, quantization, "bf16", is_beside=is_beside)
    assert found.keys() == {"a.weight", "a.bias"}
    assert torch.equal(found["a.weight"], wanted)


def test_experts_have_a_scale_each(tmp_path):
    each = [four_bits(part) for part in weight(3, 8, 32)]
    stored = {name: torch.stack([parts[name] for parts, _ in each]) for name in each[0][0]}
    found = gathered(tmp_path / "hub", layers(a=stored), {"quant_algo": "NVFP4"}, "bf16")
    assert torch.equal(found["a.weight"], torch.stack([wanted for _, wanted in each]))


def test_layers_may_be_quantised_in_different_ways(tmp_path):
    (eight, of_eight), (four, _) = eight_bits(weight()), four_bits(weight())
    scale = weight().abs().amax(1) / 448
    rows = {"weight": to_quantized_weight(weight(), scale, "fp8_pc_pt"), "weight_scale": scale}
    exponents = qtensors.MXFP8QTensor.get_weights_scaling_factor(weight())
    mx = {"weight": to_quantized_weight(weight(), exponents, "mxfp8"), "weight_scale": exponents}
    kinds = {"a": "fp8", "b": "nvfp4", "c": "fp8_pc_pt", "d": "mxfp8"}
    quantization = process_layer_quant_config(
        {f"{name}.quantization": kind for name, kind in kinds.items()} | {"b.awq_block_size": 16}
    )
    assert quantization["quant_algo"] == "MIXED_PRECISION"
    found = gathered(tmp_path / "hub", layers(a=eight, b=four, c=rows, d=mx), quantization, "f32")
    assert torch.equal(found["a.weight"], of_eight)
    wrapped = qtensors.NVFP4QTensor(weight().shape, torch.float32, four["weight"])
    scales = {"scale": four["weight_scale"], "double_scale": four["weight_scale_2"], "block_sizes": {-1: 16}}
    assert torch.equal(found["b.weight"], wrapped.dequantize(torch.float32, **scales))
    assert torch.equal(found["c.weight"], rows["weight"].float() * scale[:, None])
    wrapped = qtensors.MXFP8QTensor(weight().shape, torch.float32, mx["weight"])
    assert torch.equal(found["d.weight"], wrapped.dequantize(torch.float32, scale=exponents))
