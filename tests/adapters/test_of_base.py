"""The base decides what model an adapter is for, and what ComfyUI must be given; several models of a pipeline."""

from __future__ import annotations

import copy
import json
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from adapters import families, image_models
from adapters.comfyui_keys import key_map, weight_of
from adapters.families import save_dcp
from adapters.image_models import adapter, linears, lora, to_target
from adapters.maths import new_weight
from adapters.peft_world import randomise
from adapters.test_diffusers import clip
from adapters.test_names import native_weights
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ckpt_tools import api
from ckpt_tools.adapters.adapter import AdapterModule, Sourced
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
        num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2, joint_attention_dim=20,
        axes_dims_rope=[4, 4, 8],
    )  # fmt: skip


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


def saved_adapter(model, path, targets, *, dora=False, of="lora_"):
    """Save what is `of` a random PEFT adapter as a trainer does; return the adapted model."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=6, target_modules=list(targets), use_dora=dora))
    randomise(adapted, lambda name: "lora_" in name, seed=8)
    factors = {name: tensor for name, tensor in adapted.state_dict().items() if of in name}
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
    assert any("tested with no loader" in note for note in result.conversion.notes)
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


def test_every_rival_has_names_that_the_family_has():
    """Held against diffusers' own class: what tells the family from a rival is really not the rival's."""
    own = linears(bria())
    for name, lacks in (("flux1", "Bria"), ("sd3", "Bria")):
        (pattern,) = [each for title, each in ARCHITECTURES[name].rivals.items() if lacks in title]
        telling = {path for path in linears(image_models.MODELS[name][0]()) if re.fullmatch(pattern, path)}
        assert telling
        assert telling.isdisjoint(own)


# What ComfyUI computes otherwise than the trainers: exact with the base, refused without, and said

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
    root, _ = dora
    saved_adapter(flux1(), tmp_path / "dcp", ["net.0.proj"], dora=True, of="")
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
        with pytest.raises(UsageError, match="wrote its dora_scale for ComfyUI"):
            api.export_lora(tmp_path / "out", tmp_path / "again", to=target)
    with pytest.raises(UsageError, match="wrote its dora_scale for ComfyUI"):
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


@pytest.mark.parametrize("options", [{}, {"constraint": 1e-4}, {"constraint": 10.0}, {"rescaled": True}], ids=str)
@pytest.mark.parametrize("algorithm", ["diag-oft", "boft"])
def test_lycoris_rotations_are_exact_in_comfyui_or_refused(tmp_path, algorithm, options):
    path = "lora_unet_single_blocks_0_linear2"
    module, weight = rotation(algorithm, **({"constraint": 0.0} | options))
    save_file({f"{path}.{name}": tensor for name, tensor in module.state_dict().items()}, tmp_path / "a.safetensors")
    expected = module.get_merged_weight()[0].detach()
    assert error(weight, expected) > 1e-3
    if algorithm == "diag-oft" and "rescaled" in options:
        with pytest.raises(UsageError, match="ignores rescale"):
            api.export_lora(tmp_path / "a.safetensors", tmp_path / "out", to="comfyui", architecture="flux1")
        return
    assert api.export_lora(tmp_path / "a.safetensors", tmp_path / "out", to="comfyui", architecture="flux1").ok
    tensors = load_file(next((tmp_path / "out").iterdir()))
    got = weight_of(tensors, "diffusion_model.single_blocks.0.linear2", weight)
    assert error(got, expected) < 1e-5


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


# Adapters of several models of a pipeline in one training checkpoint: a text encoder's beside the transformer's

FLUX = [f"transformer.{kind}.0.attn.to_q" for kind in ("transformer_blocks", "single_transformer_blocks")]
CLIP = [f"text_encoder.encoder.layers.{layer}.self_attn.q_proj" for layer in range(2)]


def save(path: Path, modules: list[str], *, root: str = "") -> Path:
    """Save random factors as PEFT calls them in the models themselves, or with `root` in its wrappers."""
    generator = torch.Generator().manual_seed(0)

    def factors() -> Iterator[tuple[str, torch.Tensor]]:
        for module in modules:
            component, _, rest = module.partition(".")
            for side, shape in (("A", (2, 32)), ("B", (32, 2))):
                name = f"{component}.{root}{rest}.lora_{side}.default.weight"
                yield name, torch.randn(shape, generator=generator)

    save_dcp(dict(factors()), path)
    return path


def names_in(path: Path) -> set[str]:
    (file,) = path.glob("*.safetensors")
    return {name.rpartition(".lora_")[0] for name in load_file(file)}


@pytest.mark.full
@pytest.mark.parametrize("root", ["", "base_model.model."], ids=["injected", "wrapped"])
def test_every_model_of_a_pipeline_is_exported_for_its_own_loader(root: str, tmp_path: Path) -> None:
    source = save(tmp_path / "dcp", [*FLUX, *CLIP], root=root)
    with pytest.raises(UsageError, match="for 2 models"):
        api.export_lora(source, tmp_path / "both", alpha=4)
    base = clip(with_projection=False)
    with warnings.catch_warnings(action="ignore"):
        base.save_pretrained(tmp_path / "clip")
    for include, options, names in (
        ("text_encoder.**", {"base": tmp_path / "clip"}, CLIP),
        ("text_encoder.**", {}, CLIP),
        ("transformer.**", {}, FLUX),
    ):
        out = tmp_path / f"peft-{len(options)}-{include[:4]}"
        assert api.export_lora(source, out, alpha=4, include=[include], **options).ok
        assert names_in(out) == {f"base_model.model.{name.partition('.')[2]}" for name in names}
        targets = json.loads((out / "adapter_config.json").read_text())["target_modules"]
        assert not any(target.startswith(("text_encoder", "transformer.")) for target in targets)
    for to, example in (
        ("diffusers", "text_encoder.text_model.encoder.layers.0.self_attn.q_proj"),
        ("comfyui", "text_encoders.clip_l.transformer.text_model.encoder.layers.0.self_attn.q_proj"),
        ("kohya", "lora_te1_text_model_encoder_layers_0_self_attn_q_proj"),
    ):
        out = tmp_path / to
        assert api.export_lora(source, out, alpha=4, to=to, architecture="flux1").ok
        found = {name.partition(".lora")[0] for name in load_file(next(out.glob("*.safetensors")))}
        assert example in found
        assert api.check_lora(out, loaders=[to], architecture="flux1").verdict != "fails"


@pytest.mark.parametrize(
    ("module", "inner"),
    [
        ("transformer.blocks.0.attn1.to_q", "blocks.0.attn1.to_q"),  # Wan's
        ("transformer.h.0.attn.c_attn", "transformer.h.0.attn.c_attn"),  # GPT-2's
        ("transformer.blocks.0.attn.Wqkv", "transformer.blocks.0.attn.Wqkv"),  # MPT's
        ("unet.mid_block.attentions.0.proj_in", "mid_block.attentions.0.proj_in"),
    ],
)
def test_a_transformer_is_a_pipeline_s_where_its_modules_are(module: str, inner: str, tmp_path: Path) -> None:
    source = save(tmp_path / "dcp", [module])
    api.export_lora(source, tmp_path / "out", alpha=4)
    assert names_in(tmp_path / "out") == {f"base_model.model.{inner}"}
