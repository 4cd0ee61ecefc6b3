"""Adapters of image and video models under other names, compared with diffusers' conversions and ComfyUI's key map."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from itertools import product

import pytest
import torch
from adapters.comfyui_keys import patched
from adapters.image_models import ALL, MODELS, adapter, delta, linears, lora, to_target
from adapters.test_diffusers import read_back
from adapters.test_names import model, native_weights
from safetensors import safe_open
from safetensors.torch import save_file

from ckpt_tools import api
from ckpt_tools.adapters.adapter import Adapter, AdapterModule
from ckpt_tools.adapters.architectures import ARCHITECTURES, candidates
from ckpt_tools.adapters.architectures.choose import model_family_of
from ckpt_tools.adapters.architectures.names import is_language_model_path, readings
from ckpt_tools.adapters.base.model import module_finder
from ckpt_tools.errors import UsageError


def flux1_at_its_real_width() -> dict[str, tuple[int, ...]]:
    """One block of each kind: diffusers' conversions of FLUX.1 have its widths written in."""
    h = 3072
    block, single = "transformer_blocks.0", "single_transformer_blocks.0"
    square = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "attn.to_add_out"]
    square += ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"]
    shapes = {f"{block}.{name}": (h, h) for name in square}
    for stream in ("ff", "ff_context"):
        shapes |= {f"{block}.{stream}.net.0.proj": (4 * h, h), f"{block}.{stream}.net.2": (h, 4 * h)}
    shapes |= {f"{block}.{norm}.linear": (6 * h, h) for norm in ("norm1", "norm1_context")}
    shapes |= {f"{single}.attn.{name}": (h, h) for name in ("to_q", "to_k", "to_v")}
    return shapes | {
        f"{single}.proj_mlp": (4 * h, h),
        f"{single}.proj_out": (h, 5 * h),
        f"{single}.norm.linear": (3 * h, h),
        "x_embedder": (h, 64),
        "context_embedder": (h, 4096),
        "norm_out.linear": (2 * h, h),
        "proj_out": (64, h),
        "time_text_embed.timestep_embedder.linear_1": (h, 256),
        "time_text_embed.text_embedder.linear_2": (h, h),
        "time_text_embed.guidance_embedder.linear_1": (h, 256),
    }


def lumina2_at_its_real_width() -> dict[str, tuple[int, ...]]:
    """One block of each kind: diffusers' conversions have its widths written in."""
    width, shapes = 2304, {}
    for block in ("noise_refiner.0", "context_refiner.0", "layers.0"):
        shapes |= {f"{block}.attn.{path}": (width, width) for path in ("to_q", "to_out.0")}
        shapes |= {f"{block}.attn.{path}": (width // 3, width) for path in ("to_k", "to_v")}
        shapes |= {f"{block}.feed_forward.linear_{n}": (width, width) for n in (1, 2, 3)}
        if block != "context_refiner.0":
            shapes[f"{block}.norm1.linear"] = (4 * width, 1024)
    return shapes


def same_change(got: dict[str, torch.Tensor], want: AdapterModule[torch.Tensor]) -> bool:
    """Do two loras map the same vector to the same one? float32 sums in another order differ in the last bits."""
    x = torch.randn(want.factors["A"].shape[1], dtype=torch.float64)
    a, b = want.factors["A"].double(), want.factors["B"].double()
    expected = want.alpha.value / a.shape[0] * (b @ (a @ x))
    result = got["lora_B"].double() @ (got["lora_A"].double() @ x)
    return bool((result - expected).abs().max() <= 1e-5 * expected.abs().max())


CONVERSIONS = {
    ("flux1", "kohya"): ("kohya_flux", ""),
    ("flux1", "comfyui"): ("kohya_flux", ""),
    ("chroma", "comfyui"): ("kohya_flux", r".*(?:norm|time_text|_embedder).*|proj_out"),
    ("flux2", "kohya"): ("kohya_flux2", r"(?!.*blocks\.).*"),
    ("flux2", "comfyui"): ("non_diffusers_flux2", r"norm_out\.linear"),
    ("lumina2", "bare"): ("non_diffusers_lumina2", ""),
    ("hidream", "bare"): ("non_diffusers_hidream", ""),
    ("qwen_image", "kohya"): ("non_diffusers_qwen", ""),
    ("z_image", "kohya"): ("non_diffusers_z_image", r"siglip.*"),
    ("wan", "comfyui"): ("non_diffusers_wan", r"(?!blocks\.).*"),
    ("wan", "kohya"): ("musubi_wan", r"(?!blocks\.).*"),
    ("ltx2", "bare"): ("non_diffusers_ltx2", ""),
}
"""(family, whose names) → (diffusers' conversion, pattern of what it does not read). Bare: ComfyUI's, no alpha."""


@pytest.mark.parametrize(("name", "target"), CONVERSIONS)
def test_native_loras_are_what_diffusers_converts(name: str, target: str) -> None:
    from diffusers.loaders import lora_conversion_utils

    torch.manual_seed(0)
    conversion, unread = CONVERSIONS[name, target]
    real = {"flux1": flux1_at_its_real_width, "chroma": flux1_at_its_real_width, "lumina2": lumina2_at_its_real_width}
    shapes = real[name]() if name in real else linears(ALL[name][1]())
    # diffusers ignores the alpha of FLUX.1's last layer: a scale of 1 leaves that aside.
    modules = [lora(path, each, rank=2, alpha=2.0) for path, each in shapes.items() if not re.fullmatch(unread, path)]
    tensors = dict(to_target(adapter(modules), target.replace("bare", "comfyui"), architecture=name).tensors)
    if target == "bare":
        tensors = {
            key.replace("lora_down", "lora_A").replace("lora_up", "lora_B"): tensor
            for key, tensor in tensors.items()
            if not key.endswith(".alpha")
        }
    converted = getattr(lora_conversion_utils, f"_convert_{conversion}_lora_to_diffusers")(tensors)
    # Outside FLUX.1's blocks diffusers forgets its own prefix, and would not load what it has converted.
    read = {key.removeprefix("transformer."): tensor for key, tensor in converted.items()}
    for module in modules:
        pair = {side: read[f"{module.path}.{side}.weight"] for side in ("lora_A", "lora_B")}
        assert same_change(pair, module), module.path
    assert len(read) == 2 * len(modules)


@pytest.mark.parametrize(
    ("name", "target"),
    # ComfyUI reads SDXL's diffusers names in their spelling before PEFT alone: no such pair.
    [pair for pair in product(MODELS, ("kohya", "comfyui", "diffusers")) if pair != ("sdxl", "diffusers")],
)
def test_comfyui_patches_every_native_weight_by_the_delta(name: str, target: str) -> None:
    """ComfyUI's key map, simulated after its source, patches a native checkpoint as the tables say."""
    torch.manual_seed(0)
    model = MODELS[name][0]()
    modules = [lora(path, shape) for path, shape in linears(model).items()]
    if target == "diffusers":
        # ComfyUI's own map of diffusers' names lacks these of FLUX.2.
        modules = [m for m in modules if "time_guidance" not in m.path and "stream_modulation" not in m.path]
    before = native_weights(name, model)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for module in modules:
            weight = changed.get_submodule(module.path).weight
            weight.copy_((weight.double() + delta(module)).float())
    expected = native_weights(name, changed)
    written = to_target(adapter(modules), target, architecture=name)
    got, unused = patched(name, before, written.tensors)
    assert not unused
    for key, tensor in expected.items():
        # One float32 product and sum, in another order.
        assert torch.allclose(got[key], tensor, atol=2e-6, rtol=1e-5), key


def test_candidates_for_shared_names_are_several() -> None:
    assert len(candidates(["transformer_blocks.0.attn.to_q"])) > 1
    shared = ["transformer_blocks.0.attn.to_q", "single_transformer_blocks.0.norm.linear"]
    assert candidates(shared) == ("flux1", "hunyuan_video")
    assert candidates(["lora_unet_joint_blocks_3_x_block_attn_qkv"]) == ("sd3",)
    assert candidates(["a.b"]) == candidates([]) == candidates(["model.layers.0.self_attn.q_proj"]) == ()
    assert is_language_model_path("model.layers.0.self_attn.q_proj")
    assert not is_language_model_path("a.b")


def test_ambiguous_family_is_asked_for_only_where_it_matters() -> None:
    modules = [lora("transformer_blocks.0.attn.to_q", (32, 32))]
    assert (
        "transformer.transformer_blocks.0.attn.to_q.lora_A.weight" in to_target(adapter(modules), "diffusers").tensors
    )
    with pytest.raises(UsageError, match=r"SD3 or FLUX\.1 or FLUX\.2"):
        to_target(adapter(modules), "kohya")
    shapes = {f"{path}.weight": shape for path, shape in linears(MODELS["sd3"][0]()).items()}
    written = to_target(adapter(modules), "kohya", base=model_family_of(shapes))
    assert "lora_unet_joint_blocks_0_x_block_attn_qkv.lora_up.weight" in written.tensors


def test_flux_families_are_told_apart_by_the_width_of_their_mlp() -> None:
    wide = [lora("diffusion_model.double_blocks.0.img_mlp.0", (6 * 32, 32))]
    assert (
        "transformer.transformer_blocks.0.ff.linear_in.lora_A.weight"
        in to_target(adapter(wide, "ai-toolkit"), "diffusers").tensors
    )
    narrow = [lora("diffusion_model.double_blocks.0.img_mlp.0", (4 * 32, 32))]
    assert (
        "transformer.transformer_blocks.0.ff.net.0.proj.lora_A.weight"
        in to_target(adapter(narrow, "ai-toolkit"), "diffusers").tensors
    )


OF_COGVIDEOX = [lora("patch_embed.text_proj", (16, 8))]
REFUSED = {
    "a language model": ([lora("model.layers.0.mlp.up_proj", (8, 8))], "kohya", "llm", "language model", "--to peft"),
    "an unknown model": ([lora("a.0.attn1.to_q", (8, 8))], "kohya", None, "do not belong", "--to peft"),
    "an unknown module": (
        [lora("single_transformer_blocks.0.proj_mlp", (128, 32)), lora("unknown.0", (8, 8))], "diffusers", None,
        "do not belong", "--to peft",
    ),
    "a module under two names": (
        [
            lora("lora_unet_double_blocks_0_img_attn_qkv", (96, 32)), lora("transformer_blocks.0.attn.to_q", (32, 32)),
            lora("lora_unet_double_blocks_0_img_mod_lin", (192, 32)),
        ],
        "diffusers", "flux1", "twice", "remove one",
    ),
    "no names in ComfyUI": (OF_COGVIDEOX, "comfyui", "cogvideox", "ComfyUI.* CogVideoX", "--to diffusers"),
    "no names in kohya's tools": (OF_COGVIDEOX, "kohya", "cogvideox", "musubi-tuner.* CogVideoX", "--to diffusers"),
}  # fmt: skip
"""What is refused → modules, target, family, and the error."""


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_target_has_no_names_for_is_refused_with_the_way_out(case: str) -> None:
    modules, target, family, what, hint = REFUSED[case]
    with pytest.raises(UsageError, match=what) as caught:
        to_target(adapter(modules), target, architecture=family)
    assert hint in caught.value.hint
    assert case != "an unknown module" or caught.value.where == "unknown.0"
    assert case != "an unknown model" or all(each.title in caught.value.what for each in ARCHITECTURES.values())


def test_flat_names_find_the_one_module_of_the_base() -> None:
    find = module_finder(["model.layers.0.q_proj.weight", "model.layers.0.q_proj.bias", "a_b.c.weight", "a.b_c.weight"])
    found = [find(f"lora_unet_{name}") for name in ("model_layers_0_q_proj", "a_b_c", "other")]
    assert found == ["model.layers.0.q_proj", None, None]


def test_sd15_names_are_not_taken_for_sdxl() -> None:
    outermost = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
    assert readings(outermost, ARCHITECTURES["sdxl"]) == ()


def test_fused_adapter_that_was_put_together_from_parts_gives_them_back() -> None:
    torch.manual_seed(0)
    parts = [lora(f"transformer_blocks.0.attn.{name}", (32, 32), rank=2) for name in ("to_q", "to_v")]
    parts.append(lora("transformer_blocks.0.norm1.linear", (192, 32)))
    fused = to_target(adapter(parts), "comfyui", architecture="flux1")
    a = fused.tensors["diffusion_model.double_blocks.0.img_attn.qkv.lora_down.weight"]
    assert a.shape == (4, 32)
    back = to_target(read_back(fused, "comfyui"), "diffusers", architecture="flux1").tensors
    assert {key.rpartition(".lora_")[0] for key in back} == {f"transformer.{part.path}" for part in parts}
    assert torch.equal(back["transformer.transformer_blocks.0.attn.to_v.lora_A.weight"], parts[1].factors["A"])


@pytest.mark.parametrize("scale", [(2.0, 2.0), (2.0, 3.0)])
def test_parts_with_one_input_factor_keep_their_rank_when_fused(scale: tuple[float, float]) -> None:
    torch.manual_seed(0)
    first = lora("transformer_blocks.0.attn.to_q", (32, 32), alpha=scale[0])
    second = lora("transformer_blocks.0.attn.to_k", (32, 32), alpha=scale[1])
    second = replace(second, factors={"A": first.factors["A"], "B": second.factors["B"]})
    written = to_target(adapter([first, second]), "kohya", architecture="sd3").tensors
    name = "lora_unet_joint_blocks_0_x_block_attn_qkv"
    a, b = written[f"{name}.lora_down.weight"].double(), written[f"{name}.lora_up.weight"].double()
    assert a.shape == (4, 32)
    got = float(written[f"{name}.alpha"]) / 4 * (b @ a)
    want = torch.cat([delta(first), delta(second), torch.zeros(32, 32)])
    assert torch.allclose(got, want, atol=1e-6)  # one rounding of B to float32 where the scales differ


def test_file_name_is_no_trap_for_diffusers() -> None:
    modules = [lora("single_transformer_blocks.0.proj_mlp", (128, 32))]
    named = Adapter(modules=tuple(modules), convention="peft", name="my-checkpoint-12")
    assert to_target(named, "kohya", architecture="flux1").file == "lora.safetensors"
    named = Adapter(modules=tuple(modules), convention="peft", name="style")
    assert to_target(named, "kohya", architecture="flux1").file == "style.safetensors"


# Video models


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
