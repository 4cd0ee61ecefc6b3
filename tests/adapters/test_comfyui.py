"""What ComfyUI computes otherwise than the trainers: exact with the base, refused without, and said."""

from __future__ import annotations

import copy

import pytest
import torch
from adapters import image_models
from adapters.comfyui_keys import key_map
from adapters.comfyui_maths import weight_of
from adapters.image_models import adapter, linears, lora, to_target
from adapters.maths import new_weight
from adapters.test_names import native_weights
from adapters.test_of_base import saved_adapter
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ckpt_tools import api
from ckpt_tools.adapters.adapter import AdapterModule, Sourced
from ckpt_tools.errors import UsageError

TARGETS = ("to_q", "to_k", "to_v", "proj_mlp", "net.0.proj", "norm_out.linear")


def flux1():
    torch.manual_seed(4)
    return image_models.flux1()


@pytest.fixture(scope="module")
def dora(tmp_path_factory):
    root = tmp_path_factory.mktemp("dora")
    flux1().save_pretrained(root / "base")
    adapted = saved_adapter(flux1(), root / "dcp", TARGETS, dora=True)
    return root, adapted.merge_and_unload()


def error(got, want):
    return float((got - want).abs().max() / want.abs().max())


def test_dora_is_exact_in_comfyui_with_the_base(dora, tmp_path):
    root, merged = dora
    result = api.export_lora(root / "dcp", tmp_path / "out", to="comfyui", alpha=6, base=root / "base")
    assert result.ok
    assert any("for ComfyUI only" in note for note in result.conversion.notes)
    file = next((tmp_path / "out").iterdir())
    tensors, before, after = load_file(file), native_weights("flux1", flux1()), native_weights("flux1", merged)
    changed = {name.rpartition(".dora_scale")[0] for name in tensors if name.endswith(".dora_scale")}
    assert len(changed) == 9
    for path in changed:
        key = f"{path.removeprefix('diffusion_model.')}.weight"
        assert error(weight_of(tensors, path, before[key]), after[key]) < 1e-5, key
        assert error(before[key], after[key]) > 1e-2
    with safe_open(file, "pt") as opened:
        assert opened.metadata()["ckpt_dora_scale"] == "base-norm"


def test_dora_for_comfyui_takes_the_base_that_the_checkpoint_holds(dora, tmp_path):
    from adapters import families
    from peft import LoraConfig, get_peft_model

    root, _ = dora
    adapted = get_peft_model(flux1(), LoraConfig(r=4, lora_alpha=6, target_modules=["net.0.proj"], use_dora=True))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.add_(torch.randn(parameter.shape) * 0.3)
    families.save_dcp({"model": adapted.state_dict()}, tmp_path / "dcp")
    for number, base in enumerate((None, root / "base")):
        result = api.export_lora(tmp_path / "dcp", tmp_path / f"out{number}", to="comfyui", alpha=6, base=base)
        assert result.ok
    one, other = (load_file(next((tmp_path / f"out{number}").iterdir())) for number in (0, 1))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_dora_for_comfyui_without_the_base_is_refused(dora, tmp_path):
    root, _ = dora
    with pytest.raises(UsageError, match="ComfyUI divides dora_scale by the norm of W") as caught:
        api.export_lora(root / "dcp", tmp_path / "out", to="comfyui", alpha=6, architecture="flux1")
    assert "--base" in caught.value.hint


def test_dora_for_kohya_says_that_it_is_not_comfyui_s(dora, tmp_path):
    root, merged = dora
    result = api.export_lora(root / "dcp", tmp_path / "out", to="kohya", alpha=6, architecture="flux1")
    assert any("ComfyUI divides by that of W" in note for note in result.conversion.notes)
    tensors, after = load_file(next((tmp_path / "out").iterdir())), native_weights("flux1", merged)
    path = "lora_unet_final_layer_adaLN_modulation_1"
    before = native_weights("flux1", flux1())["final_layer.adaLN_modulation.1.weight"]
    assert error(weight_of(tensors, path, before), after["final_layer.adaLN_modulation.1.weight"]) > 1e-2


def test_a_file_made_for_comfyui_is_not_taken_for_lycoris_own(dora, tmp_path):
    root, _ = dora
    api.export_lora(root / "dcp", tmp_path / "out", to="comfyui", alpha=6, base=root / "base")
    for target in ("peft", "kohya", "diffusers"):
        with pytest.raises(UsageError, match="made its dora_scale for ComfyUI"):
            api.export_lora(tmp_path / "out", tmp_path / "again", to=target)
    with pytest.raises(UsageError, match="made its dora_scale for ComfyUI"):
        api.merge_lora(root / "base", tmp_path / "out", tmp_path / "merged")


def test_dora_by_column_is_comfyui_s_own(tmp_path):
    model = flux1()
    name = "single_transformer_blocks.0.proj_mlp"
    module = lora("single_blocks.0.linear2", (32, 160))
    module = module.with_factors({**module.factors, "magnitude": torch.rand(1, 160) + 0.5})
    written = to_target(adapter([module], "kohya"), "comfyui", architecture="flux1").tensors
    weight = model.get_submodule("single_transformer_blocks.0.proj_out").weight.detach()
    assert name in linears(model)
    new = weight + image_models.delta(module).float()
    expected = new * module.factors["magnitude"] / new.norm(dim=0, keepdim=True)
    assert error(weight_of(written, "diffusion_model.single_blocks.0.linear2", weight), expected) < 1e-5


@pytest.mark.parametrize("constraint", [0.0, 1e-4, 10.0])
@pytest.mark.parametrize("algorithm", ["diag-oft", "boft"])
def test_lycoris_rotations_are_exact_in_comfyui(tmp_path, algorithm, constraint):
    path = "lora_unet_single_blocks_0_linear2"
    module, weight = rotation(algorithm, constraint=constraint)
    save_file({f"{path}.{name}": tensor for name, tensor in module.state_dict().items()}, tmp_path / "a.safetensors")
    expected = module.get_merged_weight()[0].detach()
    assert error(weight, expected) > 1e-3
    assert api.export_lora(tmp_path / "a.safetensors", tmp_path / "out", to="comfyui", architecture="flux1").ok
    tensors = load_file(next((tmp_path / "out").iterdir()))
    got = weight_of(tensors, "diffusion_model.single_blocks.0.linear2", weight)
    assert error(got, expected) < 1e-5


def test_diag_oft_with_a_rescale_is_refused_for_comfyui(tmp_path):
    path = "lora_unet_single_blocks_0_linear2"
    module, _ = rotation("diag-oft", constraint=0.0, rescaled=True)
    save_file({f"{path}.{name}": tensor for name, tensor in module.state_dict().items()}, tmp_path / "a.safetensors")
    with pytest.raises(UsageError, match="ignores rescale"):
        api.export_lora(tmp_path / "a.safetensors", tmp_path / "out", to="comfyui", architecture="flux1")


def rotation(algorithm, **options):
    """One of LyCORIS' own modules with random blocks, and the weight that it is for."""
    import logging

    from lycoris.modules.boft import ButterflyOFTModule
    from lycoris.modules.diag_oft import DiagOFTModule

    logging.disable(logging.INFO)
    try:
        torch.manual_seed(3)
        layer = torch.nn.Linear(20, 32)
        kind = DiagOFTModule if algorithm == "diag-oft" else ButterflyOFTModule
        module = kind("a", copy.deepcopy(layer), lora_dim=4, **options)
    finally:
        logging.disable(logging.NOTSET)
    with torch.no_grad():
        module.oft_blocks.add_(torch.randn(module.oft_blocks.shape) * 0.2)
        if options.get("rescaled"):
            module.rescale.mul_(1.5)
    return module.eval(), layer.weight.detach()


def _lycoris(family, *, by_column=False, alpha=None):
    def make(path, shape):
        rows, columns = shape
        if family == "lora":
            made = lora(path, shape)
        else:
            each = {
                "lokr": {"w1": torch.randn(4, 4), "w2": torch.randn(rows // 4, columns // 4)},
                "oft": {"blocks": torch.randn(4, rows // 4, rows // 4) / 8},
            }
            made = AdapterModule(path=path, family=family, factors=each[family], alpha=alpha)
        magnitude = {"magnitude": torch.rand(1, columns) + 0.5} if by_column else {}
        return made.with_factors({**made.factors, **magnitude})

    return make


APART = {
    "LoKr of two full factors": _lycoris("lokr"),
    "DoRA by columns": _lycoris("lora", by_column=True),
    "DoRA of LoKr by columns": _lycoris("lokr", by_column=True),
    "OFT": _lycoris("oft", alpha=Sourced(0.0, "test")),
}
"""What no one module of a fused weight can say."""
FUSED = [f"transformer_blocks.0.attn.{name}" for name in ("to_q", "to_k", "to_v", "add_q_proj")]
FUSED += [f"single_transformer_blocks.1.{name}" for name in ("attn.to_q", "proj_mlp")]


@pytest.mark.parametrize("kind", APART)
def test_parts_of_fused_weights_stay_apart_where_comfyui_takes_them(kind, tmp_path):
    torch.manual_seed(2)
    shapes, native = linears(flux1()), native_weights("flux1", flux1())
    modules = [APART[kind](path, shapes[path]) for path in (*FUSED, "transformer_blocks.0.attn.to_out.0")]
    written = to_target(adapter(modules, "kohya"), "comfyui", architecture="flux1")
    names = key_map("flux1", native)
    spellings = [
        *(f"lycoris_{path.replace('.', '_')}" for path in FUSED),
        "diffusion_model.double_blocks.0.img_attn.proj",
    ]
    for module, spelling in zip(modules, spellings, strict=True):
        key, rows, _ = names[spelling]
        weight = native[key] if rows is None else native[key][rows]
        assert error(weight_of(written.tensors, spelling, weight), new_weight(module, weight)) < 1e-5
    assert {name.partition(".")[0] for name in written.tensors} == {*spellings[:-1], "diffusion_model"}
    save_file(dict(written.tensors), tmp_path / "x.safetensors", dict(written.metadata))
    assert api.check_lora(tmp_path / "x.safetensors", loaders=["comfyui"]).verdict == "loads"
    for target in ("kohya", "diffusers"):
        with pytest.raises(UsageError):
            to_target(adapter(modules, "kohya"), target, architecture="flux1")


def test_magnitudes_per_column_are_never_stacked():
    """Of a square weight they are as many as its rows."""
    parts = [_lycoris("lora", by_column=True)(path, (32, 32)) for path in FUSED[:3]]
    with pytest.raises(UsageError, match="per column"):
        to_target(adapter(parts, "kohya"), "kohya", architecture="flux1")
