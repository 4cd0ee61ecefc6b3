"""Exports where torch cannot be imported: the bits are those that torch itself computes here."""

from __future__ import annotations

import json
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import torch
from adapters.image_models import adapter, to_target as to_target_of_tensors
from arrays import to_array, to_tensor
from safetensors.torch import load_file, save_file

from ckpt_tools.adapters.adapter import AdapterModule, Sourced
from ckpt_tools.adapters.ecosystems.forms import to_target

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
    path = tmp_path_factory.mktemp("source")
    tensors = {
        f"base_model.model.{module}.lora_{side}.weight": factor
        for module, pair in factors.items()
        for side, factor in zip("AB", pair, strict=True)
    }
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": sorted(factors)}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


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


def test_alpha_that_32_bits_do_not_hold_is_refused():
    from ckpt_tools.errors import UsageError

    module = lora("transformer_blocks.0.attn.to_out.0", A=normal(RANK, WIDTH), B=normal(WIDTH, RANK))
    module = AdapterModule(path=module.path, family="lora", factors=module.factors, alpha=Sourced(1e39, "test"))
    with pytest.raises(UsageError, match="too large for 32 bits"):
        to_target_of_tensors(adapter([module]), "kohya", architecture="flux1")


@pytest.mark.parametrize("target", ["diffusers", "kohya"])
def test_product_that_32_bits_do_not_hold_is_refused(target):
    """Once multiplied into B for diffusers; once for parts of different scales, that are fused."""
    from ckpt_tools.errors import UsageError

    modules = [
        AdapterModule(
            path=f"transformer_blocks.0.attn.{part}",
            family="lora",
            factors={"A": normal(RANK, WIDTH), "B": torch.full((WIDTH, RANK), 1e38)},
            alpha=Sourced(alpha, "test"),
        )
        for part, alpha in (("to_q", 1.0), ("to_k", 400.0))
    ]
    with pytest.raises(UsageError, match="B times alpha/r is too large for 32 bits"):
        to_target_of_tensors(adapter(modules), target, architecture="flux1")
