"""Single files of 8-bit floats, as ComfyUI stores image and video models: without a config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ckpt_tools import api
from ckpt_tools.errors import CkptError, UsageError

PATH = "blocks.0.self_attn.q"
Tensors = dict[str, torch.Tensor]


def text(value: object) -> torch.Tensor:
    return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)


def stored(kind: str) -> tuple[Tensors, Tensors]:
    """What is in the file, and what it stands for (float32)."""
    torch.manual_seed(0)
    floats = torch.float8_e5m2 if kind == "e5m2" else torch.float8_e4m3fn
    weight, bias = torch.randn(24, 16).to(floats), torch.randn(24)
    scale = torch.tensor(0.0125) if kind in ("scaled", "layers") else None
    tensors = {f"{PATH}.weight": weight, f"{PATH}.bias": bias, "query_norm.scale": torch.randn(8).to(floats)}
    meant = {name: tensor.float() for name, tensor in tensors.items()}
    if scale is not None:
        meant[f"{PATH}.weight"] *= scale
    if kind == "scaled":
        tensors |= {f"{PATH}.scale_weight": scale, f"{PATH}.scale_input": torch.ones(())}
        tensors["scaled_fp8"] = torch.zeros(2, dtype=floats)
    if kind == "layers":
        tensors |= {f"{PATH}.weight_scale": scale, f"{PATH}.comfy_quant": text({"format": "float8_e4m3fn"})}
    return tensors, meant


@pytest.mark.parametrize("kind", ["plain", "e5m2", "scaled", "layers"])
def test_file_is_decoded_and_merged_into(kind: str, tmp_path: Path) -> None:
    tensors, meant = stored(kind)
    save_file(tensors, tmp_path / "base.safetensors", metadata={"_quantization_metadata": "{}"})
    api.gather(tmp_path / "base.safetensors", tmp_path / "plain", dequantize=True, dtype="f32")
    assert_equal(tmp_path / "plain", meant)
    up, down = torch.randn(24, 2), torch.randn(2, 16)
    flat = f"lora_unet_{PATH.replace('.', '_')}"
    lora = {f"{flat}.lora_up.weight": up, f"{flat}.lora_down.weight": down, f"{flat}.alpha": torch.tensor(1.0)}
    save_file(lora, tmp_path / "lora.safetensors")
    merged = api.merge_lora(tmp_path / "base.safetensors", tmp_path / "lora.safetensors", tmp_path / "out", dtype="f32")
    assert any("decoded to F32" in note for note in merged.notes)
    assert_equal(tmp_path / "out", {**meant, f"{PATH}.weight": meant[f"{PATH}.weight"] + up @ down / 2})


def assert_equal(directory: Path, wanted: Tensors) -> None:
    (file,) = directory.glob("*.safetensors")
    found = load_file(file)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)
    with safe_open(file, "pt") as opened:  # by which ComfyUI would quantise it again
        assert "_quantization_metadata" not in (opened.metadata() or {})


@pytest.mark.parametrize(
    ("companions", "what"),
    [
        ({f"{PATH}.weight_scale_inv": torch.ones(1, 1)}, "that only a config.json defines"),
        ({f"{PATH}.weight_scale": torch.ones(24)}, "must be one number"),
        ({f"{PATH}.comfy_quant": text({"format": "nvfp4"})}, "the format 'nvfp4', which ckpt does not decode"),
        ({f"{PATH}.comfy_quant": text([])}, "not ComfyUI's description"),
    ],
)
def test_what_is_not_known_is_refused(companions: Tensors, what: str, tmp_path: Path) -> None:
    tensors, _ = stored("plain")
    save_file({**tensors, **companions}, tmp_path / "base.safetensors")
    with pytest.raises(CkptError, match=what):
        api.gather(tmp_path / "base.safetensors", tmp_path / "plain", dequantize=True)


def test_file_of_floats_has_nothing_to_decode(tmp_path: Path) -> None:
    save_file({f"{PATH}.weight": torch.randn(4, 4)}, tmp_path / "base.safetensors")
    with pytest.raises(UsageError, match=r"no config.json beside the weights"):
        api.gather(tmp_path / "base.safetensors", tmp_path / "plain", dequantize=True)
