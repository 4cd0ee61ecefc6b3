"""Quantised releases as floats: bit for bit what transformers makes of them when it loads."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Quantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ckpt_tools.cli import main
from ckpt_tools.transfer.quantised.decoded import SCHEMES, load_scheme

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
}
BLOCK = [16, 16]


def hub_model(kind: type, directory: Path) -> dict[str, torch.Tensor]:
    """Save a small model; return its tensors by the hub's names."""
    torch.manual_seed(3)
    model = kind(kind.config_class(**SIZES)).to(torch.bfloat16)
    model.save_pretrained(directory)
    return load_file(directory / "model.safetensors")


def write(directory: Path, tensors: dict[str, torch.Tensor], settings: dict[str, object]) -> str:
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return str(directory)


def in_blocks(tensors: dict[str, torch.Tensor], scale_fmt: str = "float") -> dict[str, torch.Tensor]:
    """What transformers itself makes of the weights of layers."""
    config = SimpleNamespace(weight_block_size=BLOCK, scale_fmt=scale_fmt)
    quantise = Fp8Quantize(SimpleNamespace(quantization_config=config))
    made = {}
    for name, tensor in tensors.items():
        is_weight = name.endswith("_proj.weight")
        made |= quantise.convert({name: tensor}) if is_weight else {name: tensor}
    return made


def assert_loaded(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    assert {t.dtype for t in found.values()} == {t.dtype for t in wanted.values()}
    assert [name for name, tensor in wanted.items() if not torch.equal(tensor, found[name])] == []


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_fp8_blocks_are_what_transformers_loads(tmp_path, scale_fmt) -> None:
    tensors = hub_model(transformers.Qwen3MoeForCausalLM, tmp_path / "hub")
    settings = {"quant_method": "fp8", "weight_block_size": BLOCK, "activation_scheme": "dynamic"}
    hub = write(tmp_path / "hub", in_blocks(tensors, scale_fmt), settings | {"scale_fmt": scale_fmt})
    wanted = transformers.Qwen3MoeForCausalLM.from_pretrained(
        hub, quantization_config=transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=BLOCK)
    )
    out = str(tmp_path / "out")
    assert main(["shard", hub, out, "--mesh", "dp_shard=2", "--dequantize", "-q"]) == 0
    state = {name: torch.zeros_like(tensor) for name, tensor in wanted.state_dict().items()}
    dcp.load(state, checkpoint_id=out, no_dist=True)
    assert_loaded(state, dict(wanted.state_dict()))
    back = str(tmp_path / "back")
    assert main(["gather", out, back, "-q"]) == 0
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    loaded = transformers.Qwen3MoeForCausalLM.from_pretrained(back, dtype="auto")
    assert_loaded(dict(loaded.state_dict()), dict(wanted.state_dict()))


def test_what_was_sharded_as_it_was_is_decoded_when_it_is_gathered(tmp_path) -> None:
    tensors = hub_model(transformers.LlamaForCausalLM, tmp_path / "hub")
    stored = in_blocks(tensors)
    hub = write(tmp_path / "hub", stored, {"quant_method": "fp8", "weight_block_size": BLOCK})
    out, back = str(tmp_path / "out"), str(tmp_path / "back")
    assert main(["shard", hub, out, "--mesh", "dp_shard=4", "-q"]) == 0  # cuts inside of blocks
    assert main(["gather", out, back, "--dequantize", "--dtype", "f32", "-q"]) == 0
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name in tensors:
        scale = stored.get(f"{name}_scale_inv")
        own = stored[name].float()
        if scale is not None:
            own *= scale.repeat_interleave(16, 0).repeat_interleave(16, 1)
        assert torch.equal(found[name], own), name
        assert found[name].dtype == torch.float32
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == "float32"


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu, torch.uint8])
@pytest.mark.parametrize("block", [[16, 16], [7, 5], [64, 1], None])
def test_blocks_at_the_ends_are_smaller_and_scales_have_any_dtype(tmp_path, capsys, block, scale_dtype) -> None:
    made = torch.Generator().manual_seed(5)
    rows, columns = 37, 18
    height, width = block or (rows, columns)
    grid = (-(-rows // height), -(-columns // width)) if block else (1,)
    weight = torch.randn(rows, columns, generator=made).to(torch.float8_e4m3fn)
    exponents = torch.randint(120, 135, grid, generator=made, dtype=torch.uint8)
    scale = torch.exp2(exponents.float() - 127)
    if scale_dtype in (torch.float32, torch.bfloat16):
        scale = (scale * 1.3).to(scale_dtype)
    stored = exponents if scale_dtype == torch.uint8 else scale.to(scale_dtype)
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "config.json").write_text("{}")
    hub = write(
        tmp_path / "hub", {"a": weight, "a_scale_inv": stored}, {"quant_method": "fp8", "weight_block_size": block}
    )
    assert main(["gather", hub, str(tmp_path / "out"), "--dequantize", "--dtype", "f32"]) == 0
    assert "1 tensors of 8-bit floats" in capsys.readouterr().err
    spread = scale.float().reshape(-1, grid[-1]).repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)
    wanted = weight.float() * spread[:, :columns]
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["a"], wanted)


def test_mxfp4_is_what_transformers_loads(tmp_path) -> None:
    tensors = hub_model(transformers.GptOssForCausalLM, tmp_path / "hub")
    made = torch.Generator().manual_seed(7)
    stored = {}
    for name, tensor in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = tensor.shape
            shape = (experts, rows, columns // 32)
            stored[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), generator=made, dtype=torch.uint8)
            stored[f"{name}_scales"] = torch.randint(110, 125, shape, generator=made, dtype=torch.uint8)
        else:
            stored[name] = tensor
    hub = write(tmp_path / "hub", stored, {"quant_method": "mxfp4"})
    wanted = transformers.GptOssForCausalLM.from_pretrained(
        hub, quantization_config=transformers.Mxfp4Config(dequantize=True), dtype=torch.bfloat16
    )
    out = str(tmp_path / "out")
    assert main(["shard", hub, out, "--mesh", "dp_shard=2", "--dequantize", "-q"]) == 0
    state = {name: torch.zeros_like(tensor) for name, tensor in wanted.state_dict().items()}
    dcp.load(state, checkpoint_id=out, no_dist=True)
    assert_loaded(state, dict(wanted.state_dict()))
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert torch.equal(state[name], convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"]))


@pytest.mark.parametrize(
    ("stored", "settings", "what"),
    [
        ({"a": torch.zeros(4, 4)}, None, "config.json beside the weights has a quantization_config"),
        ({"a": torch.zeros(4, 4)}, {"quant_method": "exl2"}, "does not decode 'exl2'"),
        (
            {"a": torch.zeros(4, 4)},
            {"quant_method": "fp8", "weight_block_size": [2, 2]},
            "no tensor is stored that way",
        ),
        ({"a": (4, 4)}, {"quant_method": "fp8", "weight_block_size": [2, 2]}, "'a_scale_inv' is missing"),
        ({"a": (4, 4)}, {"quant_method": "fp8", "weight_block_size": 2}, "two positive numbers"),
        ({"a": (4,)}, {"quant_method": "fp8"}, "'a_scale_inv' is missing"),
        (
            {"a": (4, 4), "a_scale_inv": torch.ones(2, 3)},
            {"quant_method": "fp8", "weight_block_size": [2, 2]},
            "is [2, 3], 'a' of [4, 4] needs [2, 2]",
        ),
        (
            {"a": (4, 4), "a_scale_inv": torch.ones(2, 2), "b_scale_inv": torch.ones(2, 2)},
            {"quant_method": "fp8", "weight_block_size": [2, 2]},
            "'b_scale_inv' is a scale without an 8-bit tensor",
        ),
        ({"a": (4, 4), "a_scale_inv": torch.ones(1)}, {"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"a_blocks": torch.zeros(1, 2, 1, 16)}, {"quant_method": "mxfp4"}, "'a_scales' is missing"),
        (
            {"a_blocks": torch.zeros(1, 2, 1, 8).byte(), "a_scales": torch.zeros(1, 2, 1).byte()},
            {"quant_method": "mxfp4"},
            "groups of 16, not of 32",
        ),
    ],
)
def test_what_cannot_be_decoded_is_refused(tmp_path, capsys, stored, settings, what) -> None:
    tensors = {n: torch.zeros(t, dtype=torch.float8_e4m3fn) if isinstance(t, tuple) else t for n, t in stored.items()}
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "config.json").write_text("{}")
    hub = write(tmp_path / "hub", tensors, settings or {})
    if settings is None:
        (tmp_path / "hub" / "config.json").write_text("{}")
    assert main(["gather", hub, str(tmp_path / "out"), "--dequantize"]) in (2, 4)
    assert what in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", SCHEMES)
def test_scheme_has_a_row_on_the_page(method) -> None:
    page = (Path(__file__).parents[2] / "docs/dev/formats.md").read_text(encoding="utf-8")
    assert load_scheme(method).method == method
    assert f"| `{method}` |" in page
