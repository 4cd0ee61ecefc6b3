"""Adapters of video models, held against diffusers' conversions and loaders."""

from __future__ import annotations

import pytest
import torch
from adapters.image_models import adapter, delta, linears, lora, to_target
from adapters.test_diffusers import read_back
from adapters.test_names import model
from safetensors import safe_open
from safetensors.torch import save_file

from ckpt_tools import api
from ckpt_tools.errors import UsageError


def test_musubis_names_of_hunyuan_video_go_in_and_out():
    torch.manual_seed(0)
    for name in ("hunyuan_video", "hunyuan_video_1_5"):
        modules = [lora(path, shape) for path, shape in linears(model(name)).items() if "blocks.0" in path]
        written = to_target(adapter(modules), "kohya", architecture=name)
        names = {key.partition(".")[0] for key in written.tensors}
        block = "lora_unet_double_blocks_0"
        expected = {f"{block}_img_mlp_fc1", f"{block}_txt_mod_linear"}
        is_split = name == "hunyuan_video_1_5"
        expected |= {f"{block}_img_attn_{part}" for part in "qkv"} if is_split else {f"{block}_img_attn_qkv"}
        assert expected <= names
        assert not any("img_mlp_0" in key or (is_split and "img_attn_qkv" in key) for key in names)
        back = to_target(read_back(written, "kohya"), "diffusers", architecture=name).tensors
        for module in modules:
            a, b = (back[f"transformer.{module.path}.lora_{side}.weight"].double() for side in "AB")
            assert torch.allclose(b @ a, delta(module), atol=1e-6)
        assert len(back) == 2 * len(modules)


def test_models_that_a_target_does_not_have_are_refused_by_name():
    modules = [lora("transformer_blocks.0.attn1.to_q", (16, 16)), lora("patch_embed.text_proj", (16, 8))]
    for target, who in (("comfyui", "ComfyUI"), ("kohya", "musubi-tuner")):
        with pytest.raises(UsageError, match=rf"{who}.* CogVideoX"):
            to_target(adapter(modules), target, architecture="cogvideox")
    with pytest.raises(UsageError, match=r"musubi-tuner.* LTX-2"):
        to_target(adapter([lora("patchify_proj", (16, 4))]), "kohya", architecture="ltx2")


FOREIGN = {
    "diffusion-pipe": ("hunyuan_video", "transformer.double_blocks.0.{}_attn_qkv", "lora_A", "lora_B", ("img", "txt")),
    "VideoX-Fun": ("wan", "lora_unet__blocks_0_cross_attn_{}", "lora_down", "lora_up", ("k", "v", "q", "o")),
}
"""Tool → family, its names, and what they are of."""


@pytest.mark.parametrize("tool", FOREIGN)
def test_names_of_other_trainers_are_read(tool, tmp_path):
    family, name, down, up, parts = FOREIGN[tool]
    rows = 60 if family == "hunyuan_video" else 20
    tensors = {}
    for part in parts:
        tensors[f"{name.format(part)}.{down}.weight"] = torch.randn(2, 20)
        tensors[f"{name.format(part)}.{up}.weight"] = torch.randn(rows, 2)
    save_file(tensors, tmp_path / "x.safetensors")
    result = api.check_lora(tmp_path / "x.safetensors", loaders=["comfyui"])
    assert (result.architecture, result.verdict) == (family, "loads")
    made = api.export_lora(tmp_path / "x.safetensors", tmp_path / "peft", to="peft", alpha=2)
    with safe_open(tmp_path / "peft" / "adapter_model.safetensors", "pt") as file:
        names = {key.removeprefix("base_model.model.").partition(".lora_")[0] for key in file.keys()}  # noqa: SIM118
    assert made.ok
    assert names <= set(linears(model(family)))  # diffusers' own: of no other model does PEFT know these
