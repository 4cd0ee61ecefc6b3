"""What GPTQModel has packed, as floats: bit for bit what it computes with itself.

Not a dependency: its source and `logbar pypcre device-smi tokenicer threadpoolctl defuser`, each with
pip install --no-deps --target DIR, and DIR in PYTHONPATH.
"""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ckpt_tools.cli import main

torch_kernel = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch", reason="GPTQModel is not installed")
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm, pack_awq  # noqa: E402
from gptqmodel.utils.model import (  # noqa: E402
    convert_gptq_v1_to_v2_format_module,
    convert_gptq_v2_to_v1_format_module,
)

IN, OUT = 96, 64


def packed(bits, group, *, zeros=None, order=None, form="gptq", layer=None, dtype=torch.float16):
    """A layer as GPTQModel packs it, and what it decodes to: [out, in]."""
    made = torch.Generator().manual_seed(bits)
    layer = layer or torch.nn.Linear(IN, OUT, bias=False)
    out, width = (layer.nf, layer.nx) if hasattr(layer, "nf") else (layer.out_features, layer.in_features)
    groups = -(-width // (width if group == -1 else group))
    scales = torch.rand(out, groups, generator=made) * 0.01 + 0.001
    zeros = torch.full((out, groups), 2.0 ** (bits - 1)) if zeros is None else zeros(made, (out, groups), bits)
    module = torch_kernel.TorchLinear(
        bits=bits, group_size=group, sym=False, desc_act=False, in_features=width, out_features=out, bias=False,
        pack_dtype=torch.int32, register_buffers=True,
    )  # fmt: skip
    index = torch.arange(width, dtype=torch.int32) // (width if group == -1 else group) if order is None else order
    module.pack_original(layer, scales, zeros, index)
    module.scales = module.scales.to(dtype)
    if form == "gptq":
        convert_gptq_v2_to_v1_format_module(module, type("Config", (), {"bits": bits, "pack_dtype": torch.int32}))
    names = ("qweight", "qzeros", "scales", "g_idx")
    stored = {f"a.{name}": getattr(module, name).clone() for name in names}
    if form == "gptq":
        convert_gptq_v1_to_v2_format_module(module, bits, torch.int32)
    module.post_init()
    return stored, module.dequantize_weight().T.contiguous()


def settings(bits, group, **others):
    own = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "checkpoint_format": "gptq"}
    return own | {"meta": {"quantizer": ["gptqmodel:7.7.0"]}} | others


def gathered(directory, tensors, quantization, dtype="f16", model_type="llama"):
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    config = {"model_type": model_type, "quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(config))
    out = directory.parent / "out"
    assert main(["gather", str(directory), str(out), "--dequantize", "--dtype", dtype, "-q"]) == 0
    assert "quantization_config" not in (out / "config.json").read_text()
    return load_file(out / "model.safetensors")


def any_zeros(made, shape, bits):
    return torch.randint(0, 1 << bits, shape, generator=made).float()


@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("zeros", [None, any_zeros])
@pytest.mark.parametrize("group", [32, -1, 64])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_is_what_gptqmodel_computes_with(tmp_path, bits, group, zeros, form):
    stored, wanted = packed(bits, group, zeros=zeros, form=form)
    tensors = stored | {"a.bias": torch.ones(OUT)}
    found = gathered(tmp_path / "hub", tensors, settings(bits, group, checkpoint_format=form))
    assert found.keys() == {"a.weight", "a.bias"}
    assert torch.equal(found["a.weight"], wanted)


@pytest.mark.parametrize("bits", [3, 4])
def test_inputs_of_a_group_may_be_anywhere(tmp_path, bits):
    order = (torch.randperm(IN, generator=torch.Generator().manual_seed(3)) // 32).int()
    stored, wanted = packed(bits, 32, zeros=any_zeros, order=order)
    found = gathered(tmp_path / "hub", stored, settings(bits, 32, desc_act=True))
    assert torch.equal(found["a.weight"], wanted)


def test_scales_may_be_bfloat16(tmp_path):
    stored, wanted = packed(4, 32, zeros=any_zeros, dtype=torch.bfloat16)
    assert torch.equal(gathered(tmp_path / "hub", stored, settings(4, 32), "bf16")["a.weight"], wanted)


def test_layers_of_gpt2_are_the_other_way_around(tmp_path):
    layer = transformers.pytorch_utils.Conv1D(64, 64)  # a square: the shape would not show it
    layer.bias = None
    stored, wanted = packed(4, 32, zeros=any_zeros, layer=layer)
    found = gathered(tmp_path / "hub", stored, settings(4, 32), model_type="gpt2")
    assert torch.equal(found["a.weight"], wanted.T)


def test_bits_differ_by_layer_where_the_config_says_so(tmp_path):
    stored, wanted = packed(8, 32, zeros=any_zeros)
    found = gathered(tmp_path / "hub", stored, settings(4, 32, dynamic={"+:a": {"bits": 8}}))
    assert torch.equal(found["a.weight"], wanted)


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "GEMM", "zero_point": True}


def awq(num_inputs, num_outputs, group):
    """A layer as AutoAWQ packs it, and what it decodes to."""
    made = torch.Generator().manual_seed(5)
    rows = (num_inputs, num_inputs // group)
    numbers, zeros = (torch.randint(0, 16, (count, num_outputs), generator=made) for count in rows)
    scales = (torch.rand(rows[1], num_outputs, generator=made) * 0.01).half()
    qweight, qzeros = pack_awq(numbers, zeros, 4)
    wanted = dequantize_gemm(qweight, qzeros, scales, 4, group).T
    return {"a.qweight": qweight, "a.qzeros": qzeros, "a.scales": scales}, wanted


@pytest.mark.parametrize("group", [32, -1])
def test_awq_is_what_the_library_computes_with(tmp_path, group):
    stored, wanted = awq(IN, OUT, IN if group == -1 else group)
    found = gathered(tmp_path / "hub", stored, AWQ | {"group_size": group})
    assert torch.equal(found["a.weight"], wanted)
