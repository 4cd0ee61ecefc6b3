"""A base in the names that its trainer's implementation has: neither ComfyUI's nor diffusers'."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ckpt_tools import api
from ckpt_tools.adapters.check import check_lora

WIDTH, RANK = 8, 2
TENCENT = {
    "double_blocks.0.img_attn_qkv": (3 * WIDTH, WIDTH),
    "double_blocks.0.txt_attn_proj": (WIDTH, WIDTH),
    "double_blocks.0.img_mlp.fc1": (4 * WIDTH, WIDTH),
    "single_blocks.0.linear1": (7 * WIDTH, WIDTH),
}
"""HunyuanVideo as Tencent and musubi-tuner call it. Source: hyvideo/modules/models.py."""


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Path, Path, dict[str, np.ndarray]]:
    """Base, adapter as musubi-tuner writes it, and the weights that it makes."""
    rng = np.random.default_rng(0)
    base = {f"{name}.weight": rng.normal(size=shape).astype(np.float32) for name, shape in TENCENT.items()}
    merged, factors = {}, {}
    for name, (rows, columns) in TENCENT.items():
        flat = f"lora_unet_{name.replace('.', '_')}"
        up, down = (rng.normal(size=shape).astype(np.float32) for shape in ((rows, RANK), (RANK, columns)))
        factors |= {f"{flat}.lora_up.weight": up, f"{flat}.lora_down.weight": down}
        factors[f"{flat}.alpha"] = np.array(1.0, np.float32)
        merged[f"{name}.weight"] = base[f"{name}.weight"] + up @ down / RANK
    save_file(base, tmp_path / "base.safetensors")
    save_file(factors, tmp_path / "lora.safetensors")
    return tmp_path / "base.safetensors", tmp_path / "lora.safetensors", merged


def test_adapter_fits_the_base_of_its_trainer(trained) -> None:
    base, lora, _ = trained
    result = check_lora(lora, base=base)
    assert (result.architecture, result.verdict) == ("hunyuan_video", "loads"), result.findings


@pytest.mark.parametrize("target", ["", "diffusers", "comfyui", "kohya", "peft"])
def test_every_spelling_is_merged_into_it(trained, tmp_path: Path, target: str) -> None:
    base, lora, merged = trained
    if target:
        api.export_lora(lora, tmp_path / target, to=target, base=base)
    api.merge_lora(base, tmp_path / target if target else lora, tmp_path / "out")
    found = load_file(tmp_path / "out" / "base.safetensors")
    assert all(np.allclose(found[name], weight, rtol=0, atol=1e-5) for name, weight in merged.items())
