"""Base models of image families: diffusers' own conversions of single files are the judge, in both directions."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import diffusers
import pytest
import torch
import torch.distributed.checkpoint as dcp
from adapters.image_models import ALL, toy
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from names.keymaps import Tensors, assert_same, described, done
from safetensors.torch import load_file, save_file
from torch import nn

from ckpt_tools.adapters.architectures import ARCHITECTURES
from ckpt_tools.checkpoint.names import single_files
from ckpt_tools.checkpoint.names.single_files import convert
from ckpt_tools.cli import main
from ckpt_tools.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
ROOT = "model.diffusion_model."
PLAIN = {"gated_attn": False, "audio_gated_attn": False, "cross_attn_mod": False, "audio_cross_attn_mod": False}
SD3 = {"num_layers": 3, "dual_attention_layers": [0, 1], "qk_norm": "rms_norm"}
VAE = {"block_out_channels": (4, 8, 8, 8), "latent_channels": 2, "norm_num_groups": 2, "layers_per_block": 2}
BLOCKS = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
MAKERS: dict[str, Callable[[], nn.Module]] = {
    **{
        name: make
        for name, (_, make) in ALL.items()
        if name not in ("sana", "kolors", "hunyuan_video_1_5", "cogvideox")
        and (name not in ARCHITECTURES or ARCHITECTURES[name].is_known_elsewhere)
    },
    "flux1": partial(toy, "flux1", num_single_layers=3),
    "flux1-schnell": partial(toy, "flux1", guidance_embeds=False),
    "sd3.5": partial(toy, "sd3", **SD3),
    "z_image": partial(toy, "z_image", siglip_feat_dim=None),
    "z_image-omni": ALL["z_image"][1],
    "ltx2": partial(toy, "ltx2", **PLAIN),
    "vae": partial(diffusers.AutoencoderKL, **VAE, **BLOCKS),
    "vae-flux1": partial(diffusers.AutoencoderKL, **VAE, **BLOCKS, use_quant_conv=False, use_post_quant_conv=False),
}
WIDTHS = {"flux1": {3072: 32}, "chroma": {3072: 32}, "hunyuan_video": {3072: 20}, "lumina2": {2304: 48, 768: 16}}
"""Widths of the published models, written into diffusers' conversions, and those of the toys."""
PUBLISHED = """
flux1 img_in.bias double_blocks.1.img_attn.norm.key_norm.scale guidance_in.in_layer.bias
flux1 single_blocks.2.linear1.weight single_blocks.0.norm.query_norm.scale final_layer.adaLN_modulation.1.weight
flux2 double_stream_modulation_img.lin.weight double_blocks.0.txt_attn.norm.key_norm.scale
chroma distilled_guidance_layer.norms.1.scale distilled_guidance_layer.layers.0.in_layer.weight
sd3.5 ^pos_embed ^joint_blocks.1.x_block.attn2.ln_q.weight ^joint_blocks.2.context_block.adaLN_modulation.1.bias
sd1 ^input_blocks.1.1.transformer_blocks.0.norm3.bias ^output_blocks.8.2.conv.bias ^input_blocks.11.0.in_layers.0.bias
sdxl ^label_emb.0.2.weight ^output_blocks.5.2.conv.weight ^input_blocks.4.0.skip_connection.weight ^out.0.bias
vae encoder.down.1.block.0.nin_shortcut.weight decoder.up.3.upsample.conv.weight decoder.mid.attn_1.proj_out.weight
qwen_image txt_norm.weight transformer_blocks.0.attn.norm_added_q.weight
z_image x_pad_token layers.0.attention.qkv.weight context_refiner.1.attention.k_norm.weight final_layer.linear.bias
lumina2 cap_embedder.0.weight layers.1.attention_norm1.weight noise_refiner.0.adaLN_modulation.1.weight
hidream double_stream_blocks.0.block.ff_i.experts.1.w2.weight single_stream_blocks.0.block.attn1.q_rms_norm.weight
wan head.modulation blocks.1.modulation blocks.0.norm3.weight img_emb.proj.4.bias blocks.0.cross_attn.norm_k_img.weight
wan-vace vace_blocks.0.before_proj.weight vace_blocks.1.after_proj.bias vace_patch_embedding.weight
hunyuan_video txt_in.individual_token_refiner.blocks.0.norm1.weight double_blocks.0.img_attn_q_norm.weight
ltx ^patchify_proj.weight ^transformer_blocks.0.attn1.q_norm.weight ^scale_shift_table
ltx2 ^transformer_blocks.0.scale_shift_table_a2v_ca_video ^audio_adaln_single.linear.bias
""".replace("^", ROOT)
"""Keys of the files that ComfyUI loads, of each family those that no other line would give."""


@cache
def model(name: str) -> nn.Module:
    torch.manual_seed(0)
    made = MAKERS[name]()
    for tensor in made.state_dict().values():
        tensor.normal_()
    return made


def to_single_file(hub: Tensors, config: dict | None = None) -> Tensors:
    return done(convert(described(hub), config or {}, is_diffusers=True)[1], hub)


def to_diffusers(single: Tensors, config: dict | None = None) -> Tensors:
    return done(convert(described(single), config or {}, is_diffusers=False)[1], single)


def diffusers_own(name: str, single: Tensors) -> Tensors:
    """What diffusers' conversion makes of a single file; those that take tensors out must leave none."""
    own, widths = SINGLE_FILE_LOADABLE_CLASSES, WIDTHS.get(name.partition("-")[0], {})
    kind = "WanTransformer3DModel" if name.startswith("wan") else type(model(name)).__name__
    function, given = own[kind]["checkpoint_mapping_fn"], dict(single)

    def scaled(code: types.CodeType) -> types.CodeType:
        own = ((one, scaled(one) if isinstance(one, types.CodeType) else one) for one in code.co_consts)
        return code.replace(co_consts=tuple(widths.get(one, one) if type(one) is int else new for one, new in own))

    settings = (None, function.__defaults__, function.__closure__)
    made = types.FunctionType(scaled(function.__code__), function.__globals__, *settings)
    found = made(given, config=dict(model(name).config))
    assert found is given or not given or given.keys() == single.keys()
    return found


@pytest.mark.parametrize("name", MAKERS)
def test_single_file_is_what_diffusers_converts_and_leads_back(name: str) -> None:
    hub = model(name).state_dict()
    single = to_single_file(hub, dict(model(name).config))
    assert_same(to_diffusers(single, dict(model(name).config)), hub)
    assert_same(diffusers_own(name, single), hub)
    bare = {key.removeprefix(ROOT): tensor for key, tensor in single.items()}
    assert_same(to_diffusers(bare), hub)
    assert_same(to_diffusers({ROOT + key: tensor for key, tensor in bare.items()}), hub)


@pytest.mark.parametrize("line", PUBLISHED.strip().splitlines())
def test_keys_are_those_that_are_published(line: str) -> None:
    name, *keys = line.split()
    assert set(keys) <= to_single_file(model(name).state_dict()).keys()


@pytest.mark.full(but=["flux1", "vae"])
@pytest.mark.parametrize("name", ["flux1", "sd3.5", "sdxl", "wan", "z_image", "qwen_image", "vae"])
def test_no_tensor_may_be_lacking(name: str) -> None:
    hub = model(name).state_dict()
    for convert_one, whole in ((to_single_file, hub), (to_diffusers, to_single_file(hub))):
        for key in list(whole)[:: max(1, len(whole) // 30)]:
            with pytest.raises(UsageError, match=r"that are missing|also needs"):
                convert_one({other: tensor for other, tensor in whole.items() if other != key})


@pytest.mark.parametrize("part", ["x_block.attn2.", "context_block.mlp."])
def test_no_block_in_the_middle_may_lack_what_a_later_one_has(part: str) -> None:
    single = to_single_file(model("sd3.5").state_dict())
    assert any(f"joint_blocks.0.{part}" in name for name in single)
    with pytest.raises(UsageError, match="SD3 needs tensors that are missing"):
        to_diffusers({name: t for name, t in single.items() if f"joint_blocks.0.{part}" not in name})


@pytest.mark.parametrize(
    ("name", "key", "said"),
    [
        ("flux1", "guidance_embeds", False),
        ("flux1-schnell", "guidance_embeds", True),
        ("vae", "use_quant_conv", False),
        ("hunyuan_video", "guidance_embeds", False),
    ],
)
def test_config_that_says_otherwise_of_an_optional_part_is_refused(name: str, key: str, said: bool) -> None:
    """A loader would give random values to what is lacking, or leave out what is there."""
    own = model(name).state_dict()
    single = to_single_file(own, {key: not said})
    to_diffusers(single, {key: not said})
    for turn, tensors in ((to_single_file, own), (to_diffusers, single)):
        with pytest.raises(UsageError, match=f"config.json has {key} {said}, but its tensors are "):
            turn(tensors, {key: said})


def test_depth_and_what_stands_in_front_are_read_from_the_keys() -> None:
    single = to_single_file(model("flux1").state_dict())
    fewer = {key: tensor for key, tensor in single.items() if not key.startswith("single_blocks.2.")}
    assert len(to_diffusers(single)) - len(to_diffusers(fewer)) == 14
    with pytest.raises(UsageError, match=r"config\.json has num_single_layers 3, but there are 2"):
        to_diffusers(fewer, {"num_single_layers": 3})
    newer = {key.replace("_norm.scale", "_norm.weight"): tensor for key, tensor in single.items()}
    assert_same(to_diffusers(newer), model("flux1").state_dict())


def test_ambiguous_keys_and_a_hostile_number_of_blocks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    single = to_single_file(model("flux1").state_dict())
    experts = to_single_file(model("hidream").state_dict())
    for place in ("99999.block.ff_i.experts.0", "0.block.ff_i.experts.99999"):
        experts[f"double_stream_blocks.{place}.w1.weight"] = torch.ones(1)
    with pytest.raises(UsageError, match="that are missing"):  # 10¹⁰ names are not counted
        to_diffusers(experts)
    twins = (*single_files.load_families(), single_files.load_families()[0])
    monkeypatch.setattr(single_files, "load_families", lambda: twins)
    with pytest.raises(UsageError, match=r"those of FLUX\.1 and of FLUX\.1"):
        to_diffusers(single)


def test_what_authors_do_not_use_is_left_out_and_said() -> None:
    single = to_single_file(model("z_image").state_dict()) | {"norm_final.weight": torch.ones(32)}
    found = convert(described(single), {}, is_diffusers=False)[1]
    assert found.notes == ("left out norm_final.weight, which Z-Image does not use",)
    assert_same(done(found, single), model("z_image").state_dict())


SINGLE = {
    "mixed": (
        lambda keys: {ROOT * (at % 2) + key: keys[key] for at, key in enumerate(keys)},
        "FLUX.1 has no place for",
    ),
    "another model's": (lambda keys: keys | {"vae.decoder.conv_in.weight": torch.ones(1)}, "--include"),
    "adapter": (lambda _: {"double_blocks.0.img_mod.lin.lora_A.weight": torch.ones(2, 2)}, "ckpt export-lora"),
    "unknown": (
        lambda _: {"model.layers.0.mlp.up_proj.weight": torch.ones(2, 2)},
        "not a single file's of FLUX.1, Chroma",
    ),
    "diffusers'": (lambda _: model("flux1").state_dict(), "those that would be written"),
    "animate": (lambda _: to_single_file(model("wan").state_dict()) | {"face_adapter.x": torch.ones(1)}, "Wan has no"),
}


@pytest.mark.parametrize("case", SINGLE)
def test_keys_that_are_not_one_family_s_are_refused(case: str, tmp_path: Path, capsys) -> None:
    make, what = SINGLE[case]
    save_file(make(to_single_file(model("flux1").state_dict())), tmp_path / "one.safetensors")
    assert main(["gather", str(tmp_path / "one.safetensors"), str(tmp_path / "out"), "--names", "comfyui"]) == 2
    said = capsys.readouterr().err
    assert what in said
    assert "--names comfyui: " in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["sana", "hunyuan_video_1_5", "cogvideox", "kolors", "ltx2"])
def test_families_without_a_proven_map_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"not diffusers' of|has no place for|that are missing"):
        to_single_file(ALL[name][1]().state_dict())


@pytest.mark.parametrize(
    "name",
    [
        "vae",
        *(
            pytest.param(n, marks=pytest.mark.full)
            for n in ("flux1", "sdxl", "flux2", "sd3.5", "wan", "z_image", "qwen_image")
        ),
    ],
)
def test_commands_there_and_back_give_the_same_bytes(name: str, tmp_path: Path, capsys) -> None:
    hub, parts, single, back = (tmp_path / part for part in ("hub", "parts", "single", "back"))
    model(name).save_pretrained(hub)
    model(name).save_pretrained(parts, max_shard_size="40KB")
    assert len(list(parts.glob("*.safetensors"))) > 1
    assert main(["rename", str(parts), str(single), "--names", "comfyui", "-q"]) == 0
    assert [path.name for path in single.iterdir() if path.suffix != ".json"] == ["model.safetensors"]
    assert not (single / "config.json").exists()
    assert_same(diffusers_own(name, load_file(single / "model.safetensors")), model(name).state_dict())
    gather = ["gather", str(single / "model.safetensors"), str(back), "--names", "comfyui"]
    assert main([*gather, "--assets", str(hub)]) == 0
    assert "diffusers' " in capsys.readouterr().err or name == "qwen_image"  # whose keys are the same on both sides
    file = "diffusion_pytorch_model.safetensors"
    assert (back / file).read_bytes() == (hub / file).read_bytes()
    assert (back / "config.json").read_bytes() == (hub / "config.json").read_bytes()
    assert_same(type(model(name)).from_pretrained(back).state_dict(), model(name).state_dict())
    assert main(["verify", str(back), "--against", str(hub), "-q"]) == 0
    assert main([*gather, "--overwrite"]) == 0
    assert "no config.json: diffusers needs that of the model" in capsys.readouterr().err
    assert not (back / "config.json").exists()
    assert main(["verify", str(single), "-q"]) == main(["verify", str(back), "-q"]) == 0


def test_one_model_of_a_file_of_several_is_taken(tmp_path: Path) -> None:
    unet, vae = (to_single_file(model(name).state_dict()) for name in ("sd1", "vae"))
    assert vae["decoder.mid.attn_1.q.weight"].shape == (8, 8, 1, 1)  # a convolution
    whole = unet | {f"first_stage_model.{key}": tensor for key, tensor in vae.items()}
    save_file(whole, tmp_path / "whole.safetensors")
    for name, root in (("sd1", ROOT), ("vae", "first_stage_model.")):
        args = ["gather", str(tmp_path / "whole.safetensors"), str(tmp_path / name), "--names", "comfyui"]
        assert main([*args, "--include", f"{root}**", "-q"]) == 0
        made = load_file(tmp_path / name / "diffusion_pytorch_model.safetensors")
        assert_same(made, model(name).state_dict())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("chroma", "Chroma has no place for"),
        ("wan", "a single file's of Wan"),
        ("sana", "names SanaTransformer2DModel"),
    ],
)
def test_config_of_another_class_is_refused(name: str, said: str, tmp_path: Path, capsys) -> None:
    save_file(to_single_file(model("flux1").state_dict()), tmp_path / "one.safetensors")
    ALL[name][1]().save_pretrained(tmp_path / name)
    args = ["gather", str(tmp_path / "one.safetensors"), str(tmp_path / "out"), "--names", "comfyui"]
    assert main([*args, "--assets", str(tmp_path / name)]) == 2
    assert said in capsys.readouterr().err


def test_rename_takes_a_map_or_names_and_no_dcp(tmp_path: Path, capsys) -> None:
    model("flux1").save_pretrained(tmp_path / "hub")
    dcp.save(dict(model("flux1").state_dict()), checkpoint_id=tmp_path / "dcp")
    for source, options, said in (
        ("hub", [], "add --map FILE or --names comfyui"),
        ("hub", ["--map", "m.txt", "--names", "comfyui"], "--map sets the names itself"),
        ("dcp", ["--names", "comfyui"], "does not support DCP checkpoints"),
    ):
        assert main(["rename", str(tmp_path / source), str(tmp_path / "out"), *options]) == 2
        assert said in capsys.readouterr().err
