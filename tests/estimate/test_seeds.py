"""The case studies of docs/dev/calibration.md, and what others have published, by the formula."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ckpt_tools import api
from ckpt_tools.checkpoint.layout import parse_mesh
from ckpt_tools.estimate import Case, formula
from ckpt_tools.estimate.model_sizes import figures_from_shapes

GB = 10**9
GUIDE = Path(__file__).parents[2] / "docs" / "dev" / "calibration.md"


def flux2_shapes():
    """Names and shapes of FLUX.2's transformer in diffusers 0.42: 8 double and 48 single blocks of width 6144."""
    h, inner = 6144, 3 * 6144
    shapes = {
        "double_stream_modulation_img.linear.weight": (6 * h, h),
        "double_stream_modulation_txt.linear.weight": (6 * h, h),
        "single_stream_modulation.linear.weight": (3 * h, h),
        "time_guidance_embed.timestep_embedder.linear_1.weight": (h, 256),
        "time_guidance_embed.timestep_embedder.linear_2.weight": (h, h),
        "time_guidance_embed.guidance_embedder.linear_1.weight": (h, 256),
        "time_guidance_embed.guidance_embedder.linear_2.weight": (h, h),
        "x_embedder.weight": (h, 128),
        "context_embedder.weight": (h, 15360),
        "norm_out.linear.weight": (2 * h, h),
        "proj_out.weight": (128, h),
    }
    for number in range(8):
        at = f"transformer_blocks.{number}"
        for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"):
            shapes[f"{at}.attn.{name}.weight"] = (h, h)
        for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            shapes[f"{at}.attn.{name}.weight"] = (128,)
        for name in ("ff", "ff_context"):
            shapes[f"{at}.{name}.linear_in.weight"] = (2 * inner, h)
            shapes[f"{at}.{name}.linear_out.weight"] = (h, inner)
    for number in range(48):
        at = f"single_transformer_blocks.{number}.attn"
        shapes[f"{at}.to_qkv_mlp_proj.weight"] = (3 * h + 2 * inner, h)
        shapes[f"{at}.to_out.weight"] = (h, h + inner)
        shapes[f"{at}.norm_q.weight"] = shapes[f"{at}.norm_k.weight"] = (128,)
    return shapes


def flux2(tokens=4608, **fields):
    figures, _ = figures_from_shapes(flux2_shapes())
    fields = {"mesh": "dp_shard=4", "lora": 64, "seq_len": tokens} | fields
    return formula.estimate(figures, Case(**{**fields, "mesh": parse_mesh(fields["mesh"])}))


def test_7b_on_four_gpus_gives_the_published_table():
    """14 + 14 + 56 GB copied to every GPU, or 3.5 + 3.5 + 14 = 21 GB cut over four."""
    seven = {"params": 7 * GB, "layers": 32, "hidden": 4096, "world_size": 4}
    dtypes = {"master_dtype": "bf16", "state_dtype": "f32"}
    copied = api.estimate(**seven, **dtypes, strategy="no_shard").per_rank
    assert (copied.params, copied.grads, copied.optimizer) == (14 * GB, 14 * GB, 56 * GB)
    cut = api.estimate(**seven, **dtypes, strategy="full_shard").per_rank
    assert (cut.params, cut.grads, cut.optimizer) == (3.5 * GB, 3.5 * GB, 14 * GB)
    # What the table leaves out: gathered blocks and activations.
    assert cut.peak > 21 * GB


def test_7b_in_pytorch_has_other_dtypes_than_the_published_table():
    seven = {"params": 7 * GB, "layers": 32, "hidden": 4096, "world_size": 4, "strategy": "full_shard"}
    all_bf16 = api.estimate(**seven, master_dtype="bf16").per_rank
    assert (all_bf16.params, all_bf16.grads, all_bf16.optimizer) == (3.5 * GB, 3.5 * GB, 7 * GB)
    mixed = api.estimate(**seven).per_rank
    assert (mixed.params, mixed.grads, mixed.optimizer) == (7 * GB, 7 * GB, 14 * GB)


def test_flux2_shapes_are_those_of_diffusers():
    diffusers = pytest.importorskip("diffusers")
    torch = pytest.importorskip("torch")
    with torch.device("meta"):
        model = diffusers.Flux2Transformer2DModel()
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == flux2_shapes()


def test_flux2_fits_no_single_gpu_and_no_copies():
    """The published "OOM", on one GPU and on four with copies."""
    assert flux2(mesh="dp_shard=1").peak > 80 * GB
    assert flux2(strategy="no_shard", mesh="dp_replicate=4").peak > 80 * GB


def test_flux2_on_four_gpus_before_activations_is_the_published_figure():
    """~20 GB: a quarter of the weights, adapters, and what is gathered; without any activations."""
    found = flux2(tokens=1)
    assert found.peak == pytest.approx(20 * GB, rel=0.20)
    assert flux2().peak > 100 * GB  # 1024 × 1024 pixels, every activation kept


def test_flux2_with_offload_and_checkpointing_is_the_published_figure():
    """~12 GB: gathered blocks, and the activations of 1024 × 1024 pixels with checkpointing."""
    assert flux2(offload=True, activation_checkpointing=True).peak == pytest.approx(12 * GB, rel=0.05)


def rows(title):
    """The rows of the guide's table below a heading: label → numbers."""
    text = GUIDE.read_text(encoding="utf-8")
    part = text.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]
    table = [line.strip("| ").split("|") for line in part.splitlines() if line.startswith("|")]
    return {row[0].strip(): [float(n) for n in re.findall(r"\d+\.?\d*", " ".join(row[1:]))] for row in table[2:]}


def test_guide_7b_table_is_what_the_formula_says():
    options = {
        "no_shard": {"strategy": "no_shard"},
        "full_shard": {"strategy": "full_shard"},
        "full_shard, checkpointing": {"strategy": "full_shard", "activation_checkpointing": True},
        "full_shard, all bf16": {"strategy": "full_shard", "master_dtype": "bf16"},
        "no_shard, as published": {"strategy": "no_shard", "master_dtype": "bf16", "state_dtype": "f32"},
        "full_shard, as published": {"strategy": "full_shard", "master_dtype": "bf16", "state_dtype": "f32"},
    }
    table = rows("7B with AdamW on four GPUs")
    assert set(table) == set(options)
    for label, numbers in table.items():
        found = api.estimate(params=7 * GB, layers=32, hidden=4096, world_size=4, **options[label]).per_rank
        parts = (found.params, found.grads, found.optimizer, found.activations, found.gathered, found.peak)
        assert numbers == pytest.approx([part / GB for part in parts], abs=0.051), label


def test_guide_flux2_table_is_what_the_formula_says():
    options = {
        "one GPU": {"mesh": "dp_shard=1"},
        "no_shard": {"strategy": "no_shard", "mesh": "dp_replicate=4"},
        "full_shard": {},
        "full_shard, offload": {"offload": True},
        "full_shard, checkpointing": {"activation_checkpointing": True},
        "full_shard, checkpointing, offload": {"activation_checkpointing": True, "offload": True},
    }
    table = rows("FLUX.2 on four GPUs")
    assert set(table) == set(options)
    for label, numbers in table.items():
        small, large = flux2(tokens=1, **options[label]), flux2(**options[label])
        assert numbers == pytest.approx([small.peak / GB, large.peak / GB], abs=0.051), label
