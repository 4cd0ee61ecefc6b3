"""What AutoRound has packed, as floats: bit for bit what its layers multiply with.

Not a dependency: pip install --no-deps --target DIR auto-round py-cpuinfo threadpoolctl, `datasets` with what it needs,
and DIR in PYTHONPATH.
"""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpt_tools.cli import main

as_they_are = pytest.importorskip("auto_round_extension.torch.qlinear_torch", reason="AutoRound is not installed")
from auto_round_extension.torch import qlinear_torch_zp as less_one  # noqa: E402

IN, OUT = 96, 64
pytestmark = pytest.mark.filterwarnings("ignore:To copy construct")  # its packing of 3 bits
KINDS = {"auto_round:auto_gptq": less_one, "auto_round:gptq": less_one, "auto_round": as_they_are}


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("packing", KINDS)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_weights_are_what_auto_round_multiplies_with(tmp_path, bits, packing, sym):
    made = torch.Generator().manual_seed(bits)
    scales = torch.rand(OUT, IN // 32, generator=made) * 0.01 + 0.001
    zeros = 1 << (bits - 1) if sym else torch.randint(0, 1 << bits, scales.shape, generator=made).float()
    layer = KINDS[packing].QuantLinear(bits, 32, IN, OUT, bias=False)
    layer.device = "cpu"
    layer.pack(torch.nn.Linear(IN, OUT, bias=False), scales, zeros, None, device="cpu")
    wanted = layer(torch.eye(IN, dtype=torch.float16)).T
    hub, out = tmp_path / "hub", tmp_path / "out"
    hub.mkdir()
    tensors = {f"a.{name}": tensor for name, tensor in layer.state_dict().items()}
    save_file(tensors, hub / "model.safetensors")
    own = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": sym, "packing_format": packing}
    own |= {"data_type": "int", "extra_config": {"a": {"bits": bits}}}
    (hub / "config.json").write_text(json.dumps({"quantization_config": own}))
    assert main(["gather", str(hub), str(out), "--dequantize", "--dtype", "f16", "-q"]) == 0
    assert torch.equal(load_file(out / "model.safetensors")["a.weight"], wanted)
