"""From a training checkpoint into every ecosystem, and back to PEFT; the header of single files; without torch."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import warnings

import ml_dtypes
import numpy as np
import pytest
import torch
from adapters import families, image_models
from adapters.families import save_dcp
from adapters.image_models import adapter, to_target as to_target_of_tensors
from adapters.peft_world import randomise
from arrays import to_array, to_tensor
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file

from ckpt_tools import api
from ckpt_tools.adapters.adapter import AdapterModule, Sourced
from ckpt_tools.adapters.ecosystems.to_target import to_target
from ckpt_tools.adapters.export import export_lora
from ckpt_tools.errors import UsageError

MODELS = {
    "flux1": (image_models.flux1, image_models.flux1_inputs, ["to_q", "add_k_proj", "proj_mlp", "norm_out.linear"]),
    "flux2": (image_models.flux2, image_models.flux2_inputs, ["to_q", "to_k", "to_v", "linear_in"]),
    "sd3": (image_models.sd3, image_models.sd3_inputs, ["to_q", "to_k", "to_v", "proj"]),
}


def build(kind):
    torch.manual_seed(4)
    return MODELS[kind][0]()


def answer(model, kind):
    torch.manual_seed(6)
    with torch.no_grad():
        return model(**MODELS[kind][1](), return_dict=False)[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Per model: PEFT's own adapted model saved as DCP, and what it answered."""
    from peft import LoraConfig, get_peft_model

    found = {}
    for kind in MODELS:
        with warnings.catch_warnings(action="ignore"):
            model = get_peft_model(build(kind), LoraConfig(r=4, lora_alpha=6, target_modules=MODELS[kind][2]))
        randomise(model, lambda name: "lora_" in name, seed=8)
        path = tmp_path_factory.mktemp(kind) / "dcp"
        families.save_dcp({"model": model.eval().state_dict()}, path)
        found[kind] = path, answer(model, kind)
    return found


def of_peft(path, kind):
    from peft import PeftModel

    with warnings.catch_warnings(action="error"):
        return answer(PeftModel.from_pretrained(build(kind), path).eval(), kind)


@pytest.mark.parametrize("target", ["diffusers", "kohya", "comfyui"])
@pytest.mark.parametrize("kind", MODELS)
def test_adapter_goes_into_every_ecosystem_and_back(trained, tmp_path, kind, target):
    source, expected = trained[kind]
    assert not torch.allclose(answer(build(kind), kind), expected, atol=1e-2)
    result = api.export_lora(source, tmp_path / "there", to=target, alpha=6, architecture=kind)
    assert result.ok, result.findings
    (file,) = (tmp_path / "there").iterdir()
    assert [name for name, _ in result.conversion.files] == [file.name]
    assert result.conversion.num_tensors == len(load_file(file))
    assert result.config["alpha"].value == 6
    back = api.export_lora(tmp_path / "there", tmp_path / "back", architecture=kind)
    assert back.ok, back.findings
    # Fused modules come back with factors of a higher rank: sums in another order.
    torch.testing.assert_close(of_peft(tmp_path / "back", kind), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", MODELS)
def test_adapter_of_a_diffusion_model_goes_to_peft_as_it_is(trained, tmp_path, kind):
    source, expected = trained[kind]
    assert api.export_lora(source, tmp_path / "out", alpha=6).ok
    torch.testing.assert_close(of_peft(tmp_path / "out", kind), expected, rtol=0, atol=0)


def test_header_says_what_the_target_needs(trained, tmp_path):
    source, _ = trained["flux1"]
    api.export_lora(source, tmp_path / "out", to="kohya", alpha=6, dtype="bf16")
    (file,) = (tmp_path / "out").iterdir()
    with safe_open(file, "pt") as opened:
        assert opened.metadata()["ss_network_dim"] == "4"
        assert {opened.get_tensor(name).dtype for name in opened.keys()} == {torch.bfloat16}  # noqa: SIM118


def test_kohya_s_names_without_a_base_or_a_family_are_refused(tmp_path):
    from safetensors.torch import save_file

    tensors = {"lora_unet_a_b.lora_down.weight": torch.randn(4, 8), "lora_unet_a_b.lora_up.weight": torch.randn(6, 4)}
    save_file(tensors, tmp_path / "k.safetensors")
    with pytest.raises(UsageError) as caught:
        api.export_lora(tmp_path / "k.safetensors", tmp_path / "out")
    assert "--architecture" in caught.value.hint or "--base" in caught.value.hint
    save_file({"a.b.weight": torch.ones(6, 8)}, tmp_path / "base.safetensors")
    result = api.export_lora(tmp_path / "k.safetensors", tmp_path / "out", base=tmp_path / "base.safetensors")
    assert result.config["target_modules"].value == ["b"]


# The header: what kohya's tools and managers read, compared with safetensors' own writer

_BLOCK = "lora_unet_double_blocks_0_img_attn_proj"


def _source(path, metadata, *, rows=48, name=_BLOCK):
    torch.manual_seed(0)
    tensors = {
        f"{name}.lora_down.weight": torch.randn(4, 32),
        f"{name}.lora_up.weight": torch.randn(rows, 4),
        f"{name}.alpha": torch.tensor(2.0),
    }
    save_file(tensors, path, metadata)
    return path


def _header(path):
    with safe_open(path, "pt") as file:
        return file.metadata() or {}


def _as_sd_scripts(path):
    """Hashes of a file by sd-scripts' recipe: of what safetensors' own writer makes with the ss_ part of the header."""
    training = {key: value for key, value in _header(path).items() if key.startswith("ss_")}
    content = save(load_file(path), training)
    start = 8 + int.from_bytes(content[:8], "little")
    reader = io.BytesIO(content)
    reader.seek(0x100000)
    return hashlib.sha256(content[start:]).hexdigest(), hashlib.sha256(reader.read(0x10000)).hexdigest()[:8]


@pytest.mark.parametrize("target", ["kohya", "comfyui"])
@pytest.mark.parametrize("dtype", ["keep", "bf16"])
@pytest.mark.parametrize("rows", [48, 100_000])  # the older hash begins at 1 MiB
def test_hashes_are_those_of_sd_scripts(tmp_path, target, dtype, rows):
    source = _source(tmp_path / "in.safetensors", {"ss_tag_frequency": json.dumps({"1_düne": {"düne": 1}})}, rows=rows)
    export_lora(source, tmp_path / "out", to=target, architecture="flux1", dtype=dtype)
    (written,) = (tmp_path / "out").glob("*.safetensors")
    header = _header(written)
    assert (header["sshs_model_hash"], header["sshs_legacy_hash"]) == _as_sd_scripts(written)
    content = written.read_bytes()
    data = content[8 + int.from_bytes(content[:8], "little") :]
    assert header["modelspec.hash_sha256"] == f"0x{hashlib.sha256(data).hexdigest()}"


def test_what_the_trainer_said_stays_where_it_is_true(tmp_path):
    said = {
        "ss_tag_frequency": json.dumps({"1_ohwx": {"ohwx": 1}}), "ss_output_name": "ohwx-v2",
        "ss_resolution": "(768, 512)", "ss_training_finished_at": "1770000000.25", "ss_network_dim": "999",
        "ss_network_alpha": "999", "ss_network_module": "networks.loha", "ss_base_model_version": "flux1",
        "sshs_model_hash": "0" * 64, "modelspec.architecture": "flux-1-dev/lora", "modelspec.hash_sha256": "0x00",
        "modelspec.implementation": "diffusers", "modelspec.trigger_phrase": "ohwx", "modelspec.author": "somebody",
        "training_info": '{"step": 7, "epoch": 1}', "software": "unknown",
    }  # fmt: skip
    export_lora(_source(tmp_path / "in.safetensors", said), tmp_path / "out", to="comfyui")
    header = _header(next((tmp_path / "out").glob("*.safetensors")))
    for key in ("ss_tag_frequency", "ss_output_name", "modelspec.trigger_phrase", "modelspec.author", "training_info"):
        assert header[key] == said[key]
    assert header["modelspec.architecture"] == "flux-1-dev/lora"  # closer than "flux-1"
    assert header["modelspec.title"] == "ohwx-v2"
    assert header["modelspec.resolution"] == "768x512"
    assert header["modelspec.date"] == "2026-02-02T02:40:00+00:00"
    assert (header["ss_network_dim"], header["ss_network_alpha"]) == ("4", "2")
    assert header["ss_network_module"] == "networks.lora"
    assert header["modelspec.implementation"] == "https://github.com/black-forest-labs/flux"
    assert header["sshs_model_hash"] != said["sshs_model_hash"]
    assert "software" not in header


@pytest.mark.parametrize(
    ("said", "key", "right"),
    [
        ({"ss_base_model_version": "sdxl_base_v1-0"}, "ss_base_model_version", "flux1"),
        ({"modelspec.architecture": "Flex.1-alpha"}, "modelspec.architecture", "flux-1/lora"),
        ({"ss_resolution": "None"}, "modelspec.resolution", "1024x1024"),
        ({"ss_output_name": "None"}, "modelspec.title", "lora"),
        ({"ss_training_finished_at": "nan"}, "modelspec.date", None),
        ({"ss_training_finished_at": "1e300"}, "modelspec.date", None),
    ],
)
def test_what_is_not_known_or_not_true_is_not_written(tmp_path, said, key, right):
    export_lora(_source(tmp_path / "in.safetensors", said), tmp_path / "out", to="kohya", architecture="flux1")
    assert _header(next((tmp_path / "out").glob("*.safetensors"))).get(key) == right


def test_a_checkpoint_without_a_header_gets_hashes_and_no_training(tmp_path):
    module = "base_model.model.transformer_blocks.0.attn.to_out.0"
    tensors = {f"{module}.lora_A.weight": torch.randn(4, 32), f"{module}.lora_B.weight": torch.randn(48, 4)}
    save_dcp(tensors, tmp_path / "in")
    export_lora(tmp_path / "in", tmp_path / "out", to="comfyui", architecture="flux1", alpha=4)
    written = next((tmp_path / "out").glob("*.safetensors"))
    header = _header(written)
    assert (header["sshs_model_hash"], header["sshs_legacy_hash"]) == _as_sd_scripts(written)
    training = {key for key in header if key.startswith("ss_")}
    assert training == {"ss_network_module", "ss_network_dim", "ss_network_alpha", "ss_base_model_version"}


# Exports where torch cannot be imported: the bits are those that torch itself computes here

RANK, ALPHA = 4, 3
PARTS = ("to_q", "to_k", "to_v")
WIDTH, MLP = 16, 64


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


@pytest.fixture(scope="module")
def factors():
    """Of FLUX.1: three projections that its authors fuse, and a layer whose halves they swap; scale 3/4, bfloat16."""
    shapes = {f"transformer_blocks.0.attn.{part}": (WIDTH, WIDTH) for part in PARTS}
    shapes["norm_out.linear"] = (2 * WIDTH, WIDTH)
    shapes["single_transformer_blocks.0.proj_mlp"] = (MLP, WIDTH)
    generator = torch.Generator().manual_seed(7)
    return {
        path: tuple(torch.randn(shape, generator=generator).bfloat16() for shape in ((RANK, columns), (rows, RANK)))
        for path, (rows, columns) in shapes.items()
    }


@pytest.fixture(scope="module")
def source(factors, tmp_path_factory):
    config = {"r": RANK, "lora_alpha": ALPHA, "target_modules": sorted(factors)}
    tensors = families.loras(factors, "base_model.model.")
    return families.write_peft(tmp_path_factory.mktemp("source"), tensors, **config)


def in_peft(factors):
    for path, (down, up) in factors.items():
        yield f"base_model.model.{path}.lora_A.weight", down
        yield f"base_model.model.{path}.lora_B.weight", up


def in_diffusers(factors):
    for path, (down, up) in factors.items():
        yield f"transformer.{path}.lora_A.weight", down
        yield f"transformer.{path}.lora_B.weight", (up.double() * ALPHA / RANK).float()


def in_native(factors, root, separator):
    """Names, factors and alphas as the authors have them."""
    q, k, v = (factors[f"transformer_blocks.0.attn.{part}"] for part in PARTS)
    upper, lower = factors["norm_out.linear"][1].chunk(2)
    modules = {
        "double_blocks.0.img_attn.qkv": (torch.cat([q[0], k[0], v[0]]), torch.block_diag(q[1], k[1], v[1]), 3 * ALPHA),
        "final_layer.adaLN_modulation.1": (factors["norm_out.linear"][0], torch.cat([lower, upper]), ALPHA),
    }
    down, up = factors["single_transformer_blocks.0.proj_mlp"]
    padded = torch.zeros(3 * WIDTH + MLP, RANK, dtype=up.dtype)
    padded[3 * WIDTH :] = up
    modules["single_blocks.0.linear1"] = (down, padded, ALPHA)
    for path, (down, up, alpha) in modules.items():
        name = root + path.replace(".", separator)
        yield f"{name}.lora_down.weight", down
        yield f"{name}.lora_up.weight", up
        yield f"{name}.alpha", torch.tensor(float(alpha))


EXPECTED = {
    "peft": in_peft,
    "diffusers": in_diffusers,
    "kohya": lambda factors: in_native(factors, "lora_unet_", "_"),
    "comfyui": lambda factors: in_native(factors, "diffusion_model.", "."),
}


def bits(tensor):
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.full(but=["peft"])
@pytest.mark.parametrize("target", EXPECTED)
def test_export_where_torch_cannot_be_imported_has_torch_s_bits(factors, source, tmp_path, target):
    out = tmp_path / "out"
    arguments = ["export-lora", str(source), str(out), "--to", target, "--architecture", "flux1", "-q"]
    code = f"import sys; sys.modules['torch'] = None; from ckpt_tools.cli import main; sys.exit(main({arguments!r}))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    (file,) = out.glob("*.safetensors")
    found, expected = load_file(file), dict(EXPECTED[target](factors))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(bits(tensor), bits(expected[name])), name


def lora(path, **factors):
    rank = factors["A"].shape[0]
    return AdapterModule(
        path=path, family="lora", factors=factors, rank=Sourced(rank, "test"), alpha=Sourced(float(rank), "test")
    )


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (torch.bfloat16, torch.float16, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float16, torch.float64, torch.float64),
        (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e4m3fn),
        (torch.float8_e4m3fn, torch.bfloat16, torch.float32),
    ],
    ids=str,
)
def test_parts_of_several_types_are_fused_in_one_that_holds_both(one, other, both):
    kinds = dict(zip(PARTS, (one, other, one), strict=True))
    modules = [
        lora(f"transformer_blocks.0.attn.{part}", A=normal(RANK, WIDTH).to(kind), B=normal(WIDTH, RANK).to(kind))
        for part, kind in kinds.items()
    ]
    written = to_target_of_tensors(adapter(modules), "kohya", architecture="flux1").tensors
    up = written["lora_unet_double_blocks_0_img_attn_qkv.lora_up.weight"]
    assert up.dtype == both
    down = written["lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight"]
    for number, module in enumerate(modules):
        rows = slice(number * WIDTH, (number + 1) * WIDTH)
        assert torch.equal(
            up.double()[rows] @ down.double(), module.factors["B"].double() @ module.factors["A"].double()
        )


def test_arrays_that_are_written_can_be_saved_by_safetensors_and_the_adapter_s_stay(tmp_path):
    from safetensors.numpy import save_file as save_arrays

    given = {"A": to_array(normal(RANK, WIDTH)), "B": to_array(normal(WIDTH, RANK))}
    before = {role: array.copy() for role, array in given.items()}
    for array in given.values():
        array.flags.writeable = False
    module = AdapterModule(
        path="transformer_blocks.0.attn.to_out.0", family="lora", factors=given, alpha=Sourced(1.0, "test")
    )
    written = to_target(adapter([module]), "diffusers", architecture="flux1")
    save_arrays(dict(written.tensors), tmp_path / "a.safetensors")
    loaded = load_file(tmp_path / "a.safetensors")
    assert torch.equal(
        loaded["transformer.transformer_blocks.0.attn.to_out.0.lora_B.weight"], to_tensor(given["B"]) / 4
    )
    assert all(np.array_equal(given[role], before[role]) for role in given)
    assert given["A"].dtype == ml_dtypes.bfloat16


PARTS_OF_TWO_SCALES = {"to_q": 1.0, "to_k": 400.0}


@pytest.mark.parametrize(
    ("target", "alphas", "what"),
    [
        ("kohya", {"to_out.0": 1e39}, r"alpha of 1e\+39 is"),
        ("diffusers", PARTS_OF_TWO_SCALES, "B times alpha/r is"),
        ("kohya", PARTS_OF_TWO_SCALES, "B times alpha/r is"),  # as they are fused
    ],
)
def test_what_32_bits_do_not_hold_is_refused(target, alphas, what):
    factors = {"A": normal(RANK, WIDTH), "B": torch.full((WIDTH, RANK), 1e38)}
    modules = [
        AdapterModule(
            path=f"transformer_blocks.0.attn.{part}", family="lora", factors=factors, alpha=Sourced(alpha, "test")
        )
        for part, alpha in alphas.items()
    ]
    with pytest.raises(UsageError, match=f"{what} too large for 32 bits"):
        to_target_of_tensors(adapter(modules), target, architecture="flux1")
