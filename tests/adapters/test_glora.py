"""GLoRA, against LyCORIS' own forward and ComfyUI's rules."""

from __future__ import annotations

import pytest
import torch
from adapters import lycoris_worlds
from safetensors.torch import load_file, save_file

from ckpt_tools.adapters.check import check_lora
from ckpt_tools.api import export_lora, merge_lora
from ckpt_tools.errors import UnreadableError, UsageError


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the adapter's file, the base's, and what the adapted model computes."""
    model, network = lycoris_worlds.adapt("glora")
    root = tmp_path_factory.mktemp("glora")
    with torch.no_grad():
        meant = model(*lycoris_worlds.inputs())
    save_file({name: tensor.contiguous() for name, tensor in network.state_dict().items()}, root / "x.safetensors")
    save_file(lycoris_worlds.build().state_dict(), root / "base.safetensors")
    return root / "x.safetensors", root / "base.safetensors", meant


def test_merge_is_lycoris_own(trained, tmp_path):
    adapter, base, meant = trained
    merge_lora(base, adapter, tmp_path / "out")
    merged = lycoris_worlds.build()
    merged.load_state_dict(load_file(next((tmp_path / "out").glob("*.safetensors"))))
    for found, wanted in zip(merged(*lycoris_worlds.inputs()), meant, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_what_is_no_sum_is_no_lora(trained, tmp_path):
    adapter, base, _ = trained
    with pytest.raises(UsageError, match="PEFT has no form for GLoRAs"):
        export_lora(adapter, tmp_path / "out", base=base)
    with pytest.raises(UsageError, match="cannot be scaled"):
        merge_lora(base, adapter, tmp_path / "out", scale=0.5)


@pytest.mark.parametrize("role", ["a1", "b2"])
def test_half_a_product_is_said(trained, tmp_path, role):
    tensors = load_file(trained[0])
    del tensors[next(name for name in tensors if f".{role}." in name)]
    save_file(tensors, tmp_path / "x.safetensors")
    assert any(f"factor {role} is missing" in each.what for each in check_lora(tmp_path / "x.safetensors").findings)


def test_names_of_a_base_model_are_no_glora(tmp_path):
    save_file({f"layer.{role}.weight": torch.ones(4, 4) for role in ("a1", "a2")}, tmp_path / "x.safetensors")
    with pytest.raises(UnreadableError):
        merge_lora(tmp_path / "x.safetensors", tmp_path / "x.safetensors", tmp_path / "out")


def test_comfyui_gets_it_as_it_is(tmp_path):
    shapes = {"a1": (8, 2), "a2": (2, 8), "b1": (24, 2), "b2": (2, 8)}
    path = "double_blocks_0_img_attn_qkv"
    tensors = {f"lycoris_{path}.{role}.weight": torch.randn(shape) for role, shape in shapes.items()}
    tensors[f"lycoris_{path}.alpha"] = torch.tensor(1.0)
    save_file(tensors, tmp_path / "x.safetensors")
    for to, prefix in (("comfyui", "diffusion_model.double_blocks.0.img_attn.qkv"), ("kohya", f"lora_unet_{path}")):
        export_lora(tmp_path / "x.safetensors", tmp_path / to, to=to, architecture="flux1")
        file = next((tmp_path / to).glob("*.safetensors"))
        written = load_file(file)
        assert all(
            torch.equal(written[f"{prefix}.{role}.weight"], tensors[f"lycoris_{path}.{role}.weight"]) for role in shapes
        )
        assert written[f"{prefix}.alpha"].item() == 1
        report = {each.loader: each for each in check_lora(file, architecture="flux1").loaders}
        assert report["comfyui"].is_whole
        assert to != "kohya" or report["kohya"].is_whole
