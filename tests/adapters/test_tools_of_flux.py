"""FLUX.1's adapters in the names of X-Labs, fal, Black Forest Labs and OneTrainer: diffusers' own conversions judge."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapters.image_models import ALL, delta
from adapters.test_check_effect import in_diffusers
from diffusers.loaders import lora_conversion_utils as diffusers
from safetensors.torch import load_file, save_file

from ckpt_tools import api
from ckpt_tools.adapters.adapter import AdapterModule, Sourced
from ckpt_tools.adapters.check import check_lora

Tensors = dict[str, torch.Tensor]
PARTS = {
    "qkv_lora1": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "qkv_lora2": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "proj_lora1": ("attn.to_out.0",),
    "proj_lora2": ("attn.to_add_out",),
}


def save(tensors: Tensors, file: Path) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    return file


def xlabs() -> tuple[Tensors, list[AdapterModule[torch.Tensor]]]:
    torch.manual_seed(0)
    tensors: Tensors = {}
    modules = []
    for block in range(2):
        for part, paths in PARTS.items():
            a, b = torch.randn(4, 32), torch.randn(32 * len(paths), 4)
            stem = f"double_blocks.{block}.processor.{part}"
            tensors |= {f"{stem}.down.weight": a, f"{stem}.up.weight": b}
            rank = {"rank": Sourced(4, "test"), "alpha": Sourced(4.0, "test"), "family": "lora"}
            modules += [
                AdapterModule(path=f"transformer_blocks.{block}.{path}", factors={"A": a, "B": rows}, **rank)
                for path, rows in zip(paths, b.chunk(len(paths)), strict=True)
            ]
    return tensors, modules


def test_names_of_xlabs_are_read_judged_merged_and_exported(tmp_path: Path) -> None:
    tensors, modules = xlabs()
    model = ALL["flux1"][1]()
    model.save_pretrained(tmp_path / "base")
    before = {name: tensor.double() for name, tensor in model.state_dict().items()}
    file = save(tensors, tmp_path / "xlabs.safetensors")
    result = check_lora(file)
    assert (result.architecture, result.judges, result.verdict) == ("flux1", ("diffusers",), "loads")
    added = in_diffusers("flux1", file, model)
    assert added is not None
    assert {*added} == {module.path for module in modules}
    assert all(torch.allclose(added[module.path], delta(module), atol=1e-5) for module in modules)
    api.merge_lora(tmp_path / "base", file, tmp_path / "merged")
    got = load_file(next((tmp_path / "merged").glob("*.safetensors")))
    for module in modules:
        name = f"{module.path}.weight"
        assert torch.allclose(got[name].double() - before[name], delta(module), atol=1e-5)
    api.export_lora(file, tmp_path / "out", to="comfyui")
    exported = check_lora(next((tmp_path / "out").glob("*.safetensors")), loaders=["comfyui"], architecture="flux1")
    assert exported.verdict == "loads"


def fal() -> Tensors:
    """Every module that fal trains, at the published sizes, of rank 1."""
    h = 3072
    tensors: Tensors = {}

    def add(path: str, out: int, columns: int) -> None:
        stem = f"base_model.model.{path}"
        tensors.update({f"{stem}.lora_A.weight": torch.ones(1, columns), f"{stem}.lora_B.weight": torch.ones(out, 1)})

    for block in range(19):
        for stream in ("img", "txt"):
            stem = f"double_blocks.{block}.{stream}"
            add(f"{stem}_attn.qkv", 3 * h, h), add(f"{stem}_attn.proj", h, h), add(f"{stem}_mod.lin", 6 * h, h)
            add(f"{stem}_mlp.0", 4 * h, h), add(f"{stem}_mlp.2", h, 4 * h)
    for block in range(38):
        stem = f"single_blocks.{block}"
        add(f"{stem}.linear1", 7 * h, h), add(f"{stem}.linear2", h, 5 * h), add(f"{stem}.modulation.lin", 3 * h, h)
    add("final_layer.linear", 64, h)
    return tensors


@pytest.mark.parametrize("lost", [None, "double_blocks.7.img_mlp.2", "single_blocks.37.linear1", "final_layer.linear"])
def test_names_of_fal_load_whole_or_not_at_all(lost: str | None, tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in fal().items() if lost is None or f".{lost}." not in name}
    (report,) = check_lora(
        save(tensors, tmp_path / "x.safetensors"), architecture="flux1", loaders=["diffusers"]
    ).loaders
    try:
        diffusers._convert_fal_kontext_lora_to_diffusers(dict(tensors))
        loads = True
    except KeyError:
        loads = False
    assert (report.loads, loads) == (lost is None, lost is None)


def control() -> Tensors:
    tensors: Tensors = {}
    for path in ("img_in", "double_blocks.0.img_attn.proj", "single_blocks.0.linear2"):
        tensors |= {f"{path}.lora_A.weight": torch.ones(2, 8), f"{path}.lora_B.weight": torch.ones(8, 2)}
        tensors[f"{path}.lora_B.bias"] = torch.ones(8)
    norms = ("double_blocks.0.img_attn.norm", "single_blocks.0.norm")
    return tensors | {f"{norm}.{each}_norm.scale": torch.ones(4) for norm in norms for each in ("key", "query")}


def test_control_lora_of_bfl_is_what_comfyui_recognises(tmp_path: Path) -> None:
    """ComfyUI converts it by two of its names; what diffusers makes of it ckpt does not know."""
    result = check_lora(save(control(), tmp_path / "x.safetensors"), loaders=["comfyui"])
    assert (result.architecture, result.verdict) == ("flux1", "loads")
    assert check_lora(tmp_path / "x.safetensors").verdict == "unknown"
    part = {name: tensor for name, tensor in control().items() if "single_blocks.0.norm" not in name}
    assert check_lora(save(part, tmp_path / "y.safetensors"), loaders=["comfyui"]).verdict == "fails"


def test_bundled_embeddings_do_not_hide_the_lora(tmp_path: Path) -> None:
    name = "lora_unet_double_blocks_0_img_attn_proj"
    tensors = {f"{name}.lora_down.weight": torch.randn(2, 32), f"{name}.lora_up.weight": torch.randn(32, 2)}
    tensors |= {f"{name}.alpha": torch.tensor(2.0), "bundle_emb.ohwx.clip_l": torch.randn(1, 8)}
    file = save(tensors, tmp_path / "x.safetensors")
    result = check_lora(file, architecture="flux1", loaders=["comfyui"])
    assert (result.verdict, [finding.code for finding in result.findings]) == ("loads", ["loader-needs"])
    api.export_lora(file, tmp_path / "out", to="diffusers", architecture="flux1")
    assert len(load_file(next((tmp_path / "out").glob("*.safetensors")))) == 2
