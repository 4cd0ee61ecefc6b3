"""What bitsandbytes has packed, as floats: bit for bit what it computes with itself."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_tools.cli import main

functional = pytest.importorskip(
    "bitsandbytes.functional", reason="needs bitsandbytes (pip install 'ckpt-tools[qlora]')"
)


def gathered(directory, tensors, dtype="f32", model_type="llama"):
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    config = {"model_type": model_type, "quantization_config": {"quant_method": "bitsandbytes"}}
    (directory / "config.json").write_text(json.dumps(config))
    out = directory.parent / "out"
    assert main(["gather", str(directory), str(out), "--dequantize", "--dtype", dtype, "-q"]) == 0
    return load_file(out / "model.safetensors")


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", [(96, 64), (40, 36)])  # 1440 elements: the last block is half a block
def test_four_bits_are_what_bitsandbytes_computes_with(tmp_path, shape, kind, nested, storage):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    packed, state = functional.quantize_4bit(
        weight, blocksize=64, compress_statistics=nested, quant_type=kind, quant_storage=storage
    )
    tensors = {"a.weight": packed, "a.bias": torch.ones(3)}
    tensors |= {f"a.weight.{name}": value.contiguous() for name, value in state.as_dict(packed=True).items()}
    found = gathered(tmp_path / "hub", tensors)
    assert found.keys() == {"a.weight", "a.bias"}
    assert torch.equal(found["a.weight"], functional.dequantize_4bit(packed, state))


def test_layers_of_gpt2_are_the_other_way_around(tmp_path):
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))  # a square: the shape would not show it
    packed, state = functional.quantize_4bit(weight.T.contiguous(), blocksize=64, quant_type="nf4")  # as transformers
    tensors = {"a.weight": packed}
    tensors |= {f"a.weight.{name}": value.contiguous() for name, value in state.as_dict(packed=True).items()}
    found = gathered(tmp_path / "hub", tensors, model_type="gpt2")
    assert torch.equal(found["a.weight"], functional.dequantize_4bit(packed, state).T)


def test_eight_bits_are_what_bitsandbytes_computes_with(tmp_path):
    weight = torch.randn(40, 36, generator=torch.Generator().manual_seed(1)).half()
    packed, scales, _ = functional.int8_vectorwise_quant(weight)
    tensors = {"a.weight": packed, "a.SCB": scales, "a.weight_format": torch.tensor(0, dtype=torch.uint8)}
    found = gathered(tmp_path / "hub", tensors)
    assert found.keys() == {"a.weight"}
    assert torch.equal(found["a.weight"], functional.int8_vectorwise_dequant(packed, scales))


def test_what_is_not_whole_is_refused(tmp_path, capsys):
    packed, state = functional.quantize_4bit(torch.randn(8, 64), blocksize=64, quant_type="nf4")
    tensors = {"a.weight": packed}
    tensors |= {f"a.weight.{name}": value.contiguous() for name, value in state.as_dict(packed=True).items()}
    for at, (lost, what) in enumerate(
        [
            ("a.weight", "'a.weight' is missing"),
            ("a.weight.absmax", "'a.weight.absmax' is missing"),
            ("a.weight.quant_state.bitsandbytes__nf4", "belongs to no tensor"),
        ]
    ):
        hub = tmp_path / str(at)
        hub.mkdir()
        save_file({name: tensor for name, tensor in tensors.items() if name != lost}, hub / "model.safetensors")
        (hub / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "bitsandbytes"}}))
        assert main(["gather", str(hub), str(tmp_path / "out"), "--dequantize"]) == 4
        assert what in capsys.readouterr().err
