"""What compressed-tensors has packed, as floats: bit for bit what the library decompresses to.

Not a dependency: pip install --no-deps --target DIR compressed-tensors loguru, and DIR in PYTHONPATH.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_tools.cli import main

quantization = pytest.importorskip("compressed_tensors.quantization", reason="compressed-tensors is not installed")
from compressed_tensors.compressors import BaseCompressor  # noqa: E402
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam  # noqa: E402

ROWS = 24
CASES = {
    "tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "block": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [8, 20]}),
    "int8": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "int8 zero": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}),
    "w4": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8}),
    "w4 channel": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel"}),
    "w4 zero": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 8, "symmetric": False},
    ),
    "w8": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 20}),
    "nvfp4": ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
    "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
    "mxfp8": ("mxfp8-quantized", {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}),
    "w2": ("pack-quantized", {"num_bits": 2, "type": "int", "strategy": "group", "group_size": 20}),
}


def reduced(weight: torch.Tensor, arguments: dict[str, object]) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest element of what shares a scale."""
    columns = weight.shape[1]
    grid = {
        "tensor": (ROWS, columns),
        "channel": (1, columns),
        "group": (1, arguments.get("group_size")),
        "tensor_group": (1, arguments.get("group_size")),
        "block": arguments.get("block_structure"),
    }[arguments["strategy"]]
    parts = weight.reshape(ROWS // grid[0], grid[0], columns // grid[1], grid[1])
    low, high = parts.amin((1, 3)), parts.amax((1, 3))
    return (low.reshape(1), high.reshape(1)) if low.numel() == 1 else (low, high)


def compressed(case: str, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], torch.Tensor, dict[str, object]]:
    """A weight as the library stores it, what it decompresses to, and the config."""
    form, arguments = CASES[case]
    own = quantization.QuantizationArgs(**arguments)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=own)
    columns = 64 if "fp" in form else 40
    weight = torch.randn(ROWS, columns, generator=torch.Generator().manual_seed(3)).to(dtype)
    of_all = generate_gparam(weight.min(), weight.max()) if case == "nvfp4" else None
    scale, zero = calculate_qparams(*reduced(weight, arguments), own, global_scale=of_all)
    given = {"weight": weight, "weight_scale": scale.to(dtype), "weight_zero_point": zero}
    given |= {} if of_all is None else {"weight_global_scale": of_all}
    compressor = BaseCompressor.get_value_from_registry(form)
    stored = compressor.compress(given, scheme)
    wanted = compressor.decompress(stored, scheme)["weight"]
    settings = {"quant_method": "compressed-tensors", "format": form}
    settings["config_groups"] = {"group_0": json.loads(scheme.model_dump_json())}
    return {name: tensor.contiguous() for name, tensor in stored.items()}, wanted, settings


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_weights_are_what_the_library_decompresses(tmp_path, case, dtype):
    stored, wanted, settings = compressed(case, dtype)
    hub = tmp_path / "hub"
    hub.mkdir()
    tensors = {f"a.{name}": tensor for name, tensor in stored.items()} | {"a.bias": torch.ones(2)}
    save_file(tensors, hub / "model.safetensors")
    (hub / "config.json").write_text(json.dumps({"quantization_config": settings}))
    name = {torch.float32: "f32", torch.bfloat16: "bf16"}[wanted.dtype]
    assert main(["gather", str(hub), str(tmp_path / "out"), "--dequantize", "--dtype", name, "-q"]) == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == {"a.weight", "a.bias"}
    assert torch.equal(found["a.weight"], wanted)
