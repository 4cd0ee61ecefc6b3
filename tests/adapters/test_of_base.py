"""The base decides what model an adapter is for; names that several models have decide nothing."""

from __future__ import annotations

import re
import shutil

import pytest
import torch
from adapters import families, image_models
from adapters.image_models import adapter, linears, lora, to_target
from safetensors.torch import load_file, save_file

from ckpt_tools import api
from ckpt_tools.adapters.architectures import ARCHITECTURES
from ckpt_tools.adapters.architectures.choose import choose_families, model_family_of
from ckpt_tools.adapters.base.reading import read_base
from ckpt_tools.errors import UsageError

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")


def qwen_image():
    torch.manual_seed(4)
    return image_models.qwen_image()


def bria():
    from diffusers import BriaTransformer2DModel

    return BriaTransformer2DModel(
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=20,
        axes_dims_rope=[4, 4, 8],
    )


def others():
    """Models that ckpt has no tables for."""
    import diffusers as d

    yield "BriaTransformer2DModel", bria()
    yield (
        "AllegroTransformer3DModel",
        d.AllegroTransformer3DModel(
            num_layers=1, attention_head_dim=12, num_attention_heads=2, cross_attention_dim=24, caption_channels=8
        ),
    )
    yield (
        "UNet2DConditionModel",  # of fewer blocks than SD's
        d.UNet2DConditionModel(
            block_out_channels=(8, 16),
            layers_per_block=1,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=8,
            attention_head_dim=2,
            norm_num_groups=4,
        ),
    )


def saved_adapter(model, path, targets, *, dora=False):
    """Save the model with a random PEFT adapter as a trainer does; return the adapted model."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=6, target_modules=list(targets), use_dora=dora))
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
            elif "lora_magnitude" in name:
                parameter.mul_(1 + 0.3 * torch.rand(parameter.shape, generator=generator))
    factors = {name: tensor for name, tensor in adapted.state_dict().items() if "lora_" in name}
    families.save_dcp({"model": factors}, path)
    return adapted.eval()


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    root = tmp_path_factory.mktemp("qwen")
    qwen_image().save_pretrained(root / "base")
    return root, saved_adapter(qwen_image(), root / "dcp", ATTENTION)


def test_qwen_image_is_not_taken_for_flux1(qwen, tmp_path):
    root, adapted = qwen
    assert api.export_lora(root / "dcp", tmp_path / "k", to="kohya", alpha=6, base=root / "base").ok
    names = {name.partition(".")[0] for name in load_file(next((tmp_path / "k").iterdir()))}
    assert names == {
        f"lora_unet_transformer_blocks_{i}_attn_{x.replace('.', '_')}" for i in range(2) for x in ATTENTION
    }
    # ComfyUI calls its modules as diffusers does.
    assert api.export_lora(root / "dcp", tmp_path / "c", to="comfyui", alpha=6, base=root / "base").ok
    written = load_file(next((tmp_path / "c").iterdir()))
    state = adapted.state_dict()
    paths = {name.rpartition(".lora_")[0] for name in written if ".lora_" in name}
    assert len(paths) == 2 * len(ATTENTION)
    for path in paths:
        own = path.removeprefix("diffusion_model.")
        assert own in linears(qwen_image())
        down, up = written[f"{path}.lora_down.weight"], written[f"{path}.lora_up.weight"]
        scale = float(written[f"{path}.alpha"]) / down.shape[0]
        whole = [state[f"base_model.model.{own}.lora_{side}.default.weight"] for side in "BA"]
        torch.testing.assert_close(scale * up @ down, 1.5 * whole[0] @ whole[1])


def test_qwen_image_goes_to_diffusers_under_its_own_names(qwen, tmp_path):
    from diffusers import QwenImagePipeline

    root, adapted = qwen
    result = api.export_lora(root / "dcp", tmp_path / "d", to="diffusers", alpha=6, base=root / "base")
    assert result.ok
    plain = qwen_image()
    state, metadata = QwenImagePipeline.lora_state_dict(tmp_path / "d", return_lora_metadata=True)
    QwenImagePipeline.load_lora_into_transformer(state, transformer=plain, metadata=metadata)
    inputs = {
        "hidden_states": torch.randn(1, 4, 16),
        "encoder_hidden_states": torch.randn(1, 3, 24),
        "encoder_hidden_states_mask": torch.ones(1, 3, dtype=torch.bool),
        "timestep": torch.tensor([0.5]),
        "img_shapes": [[(1, 2, 2)]],
        "return_dict": False,
    }
    with torch.no_grad():
        expected, before = adapted(**inputs)[0], qwen_image()(**inputs)[0]
        torch.testing.assert_close(plain(**inputs)[0], expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(before, expected, atol=1e-2)


@pytest.mark.parametrize("target", ["kohya", "comfyui"])
def test_names_that_several_models_have_are_not_guessed(qwen, tmp_path, target):
    root, _ = qwen
    with pytest.raises(UsageError) as caught:
        api.export_lora(root / "dcp", tmp_path / "out", to=target, alpha=6)
    assert "--base" in caught.value.hint


def test_a_base_of_another_model_is_never_one_with_tables(tmp_path):
    for title, model in others():
        model.save_pretrained(tmp_path / title)
        by_config = read_base(tmp_path / title).family
        assert (by_config.title, by_config.name) == (title, None)
        by_weights = model_family_of({name: tuple(tensor.shape) for name, tensor in model.state_dict().items()})
        assert by_weights.name is None, title
        # Whatever its modules are called, nothing is written under the names of another model.
        modules = [lora(path, shape) for path, shape in linears(model).items() if len(shape) == 2][:6]
        for target in ("kohya", "comfyui"):
            with pytest.raises(UsageError, match="no tables"):
                to_target(adapter(modules), target, base=by_config)


@pytest.mark.parametrize("name", image_models.MODELS)
def test_a_base_with_tables_is_told_by_its_class_and_by_its_weights(name, tmp_path):
    model = image_models.MODELS[name][0]()
    model.save_pretrained(tmp_path / "base")
    assert read_base(tmp_path / "base").family.name == name
    (tmp_path / "base/config.json").unlink()
    assert read_base(tmp_path / "base").family.name == name
    # A part of the weights is evidence of nothing: other models have them as well.
    shapes = {f"{path}.weight": shape for path, shape in linears(model).items() if "attn" in path}
    assert name in model_family_of(shapes).possible


def test_the_base_goes_before_the_header():
    modules = [lora(f"transformer_blocks.0.attn.{name}", (32, 32)) for name in ATTENTION]
    family = model_family_of({}, {"_class_name": "QwenImageTransformer2DModel"})
    assert choose_families(adapter(modules), base=family) == ("qwen_image",)
    family = model_family_of({}, {"_class_name": "SD3Transformer2DModel"})
    assert choose_families(adapter(modules), base=family) == ("sd3",)


def test_names_of_a_file_that_comfyui_loads_pass_through(tmp_path):
    paths = [f"mystery_blocks.{i}.core.to_z" for i in range(2)]
    weights = {f"{path}.weight": torch.randn(8, 8) for path in paths}
    save_file(weights, tmp_path / "base.safetensors")
    factors = {f"diffusion_model.{path}.lora_{a}.weight": torch.randn(8, 8) for path in paths for a in "AB"}
    save_file(factors, tmp_path / "lora.safetensors")
    options = {"to": "comfyui", "alpha": 8, "base": tmp_path / "base.safetensors"}
    result = api.export_lora(tmp_path / "lora.safetensors", tmp_path / "own", **options)
    assert any("no loader has proven" in note for note in result.conversion.notes)
    written = load_file(tmp_path / "own" / result.conversion.files[0][0])
    assert {name.removesuffix(".alpha") for name in written if name.endswith("alpha")} == {
        f"diffusion_model.{path}" for path in paths
    }


def test_an_architecture_that_the_base_is_not_of_is_refused_or_noted(qwen, tmp_path):
    root, _ = qwen
    shutil.copytree(root / "base", tmp_path / "base")
    config = tmp_path / "base/config.json"
    config.write_text(config.read_text().replace("QwenImageTransformer2DModel", "MysteryTransformer2DModel"))
    options = {"alpha": 6, "base": tmp_path / "base"}
    result = api.export_lora(root / "dcp", tmp_path / "out", to="comfyui", architecture="flux1", **options)
    assert any("not proven" in note for note in result.conversion.notes)
    with pytest.raises(UsageError, match="no tables to convert the module names of MysteryTransformer2DModel"):
        api.export_lora(root / "dcp", tmp_path / "own", to="comfyui", **options)
    image_models.sd3().save_pretrained(tmp_path / "sd3")
    with pytest.raises(UsageError, match="the base is SD3Transformer2DModel"):
        api.export_lora(
            root / "dcp", tmp_path / "no", to="comfyui", alpha=6, base=tmp_path / "sd3", architecture="flux1"
        )


def flux1_blocks(double, single, width):
    paths = [f"transformer_blocks.{i}.attn.{name}" for i in range(double) for name in ATTENTION]
    paths += [f"single_transformer_blocks.{i}.attn.to_q" for i in range(single)]
    return [lora(path, (width, width), rank=1) for path in paths]


def test_flux1_is_told_by_its_depth_and_width():
    assert choose_families(adapter(flux1_blocks(19, 38, 3072)), base=None) == ("flux1", "chroma")
    assert choose_families(adapter(flux1_blocks(20, 40, 3072)), base=None) == ("hunyuan_video",)
    for other in ((19, 37, 3072), (19, 38, 2048)):
        assert choose_families(adapter(flux1_blocks(*other)), base=None) == ()


def test_every_rival_has_names_that_the_family_has():
    """Held against diffusers' own class: what tells the family from a rival is really not the rival's."""
    own = linears(bria())
    for name, lacks in (("flux1", "Bria"), ("sd3", "Bria")):
        (pattern,) = [each for title, each in ARCHITECTURES[name].rivals.items() if lacks in title]
        telling = {path for path in linears(image_models.MODELS[name][0]()) if re.fullmatch(pattern, path)}
        assert telling
        assert telling.isdisjoint(own)


def test_the_refusal_of_an_unknown_model_does_not_call_it_a_language_model():
    modules = [lora("mystery_stages.0.attn1.to_q", (8, 8))]
    with pytest.raises(UsageError, match="do not belong to a model family that ckpt has tables for") as caught:
        to_target(adapter(modules), "kohya")
    assert all(each.title in caught.value.what for each in ARCHITECTURES.values())
