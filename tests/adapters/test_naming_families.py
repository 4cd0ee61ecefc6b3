"""Families that a target lacks: said exactly in one that it has, approximated when asked, or refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapters import lycoris_worlds
from adapters.image_models import MODELS, adapter, lora, to_target
from adapters.test_diffusers import TOLERANCE, load, save
from safetensors.torch import load_file, save_file
from torch import nn

from ckpt_tools.adapters.adapter import AdapterModule, FamilyName, Sourced
from ckpt_tools.adapters.check import check_lora
from ckpt_tools.api import export_lora, merge_lora
from ckpt_tools.errors import UnreadableError, UsageError

ATTN = "double_blocks.0.img_attn"
PARTS = [f"transformer.transformer_blocks.0.attn.{name}" for name in ("to_q", "to_k", "to_v")]


def module(path: str, family: FamilyName, alpha: float | None = 2.0, rank: int | None = None, **factors: torch.Tensor):
    return AdapterModule(
        path=path, family=family, factors=factors, rank=None if rank is None else Sourced(rank, "test"),
        alpha=None if alpha is None else Sourced(alpha, "test"),
    )  # fmt: skip


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape) / 2


def loha(path: str = f"{ATTN}.qkv", out: int = 96) -> AdapterModule[torch.Tensor]:
    factors = {"w1_a": randn(out, 2), "w1_b": randn(2, 32), "w2_a": randn(out, 2), "w2_b": randn(2, 32)}
    return module(path, "loha", rank=2, **factors)


def product(tensors: dict[str, torch.Tensor], path: str) -> torch.Tensor:
    """What a lora without an alpha adds."""
    return tensors[f"{path}.lora_B.weight"].double() @ tensors[f"{path}.lora_A.weight"].double()


def close(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal but for rounding factors to float32."""
    return bool((got - want).abs().max() <= 2e-6 * want.abs().max())


def test_loha_is_split_and_becomes_an_exact_lora_of_its_squared_rank() -> None:
    torch.manual_seed(0)
    one = loha()
    f = {role: factor.double() for role, factor in one.factors.items()}
    want = 2.0 / 2 * (f["w1_a"] @ f["w1_b"]) * (f["w2_a"] @ f["w2_b"])
    written = to_target(adapter([one]), "diffusers", architecture="flux1")
    got = torch.cat([product(dict(written.tensors), path) for path in PARTS])
    assert close(got, want)
    assert written.tensors[f"{PARTS[0]}.lora_A.weight"].shape == (4, 32)
    assert any("LoHa as LoRA of rank 4" in note for note in written.notes)
    assert written.errors == {}


@pytest.mark.parametrize("height", [8, 6], ids=["blocks fit the parts", "blocks straddle the parts"])
def test_lokr_of_low_rank_is_split_exactly(height: int) -> None:
    torch.manual_seed(0)
    one = module(
        f"{ATTN}.qkv", "lokr", rank=2, w1=randn(96 // height, 4), w2_a=randn(height, 2), w2_b=randn(2, 8), alpha=3.0
    )
    want = 1.5 * torch.kron(one.factors["w1"].double(), one.factors["w2_a"].double() @ one.factors["w2_b"].double())
    written = to_target(adapter([one]), "diffusers", architecture="flux1")
    assert close(torch.cat([product(dict(written.tensors), path) for path in PARTS]), want)


def test_lokr_of_full_factors_is_refused_or_approximated_with_its_error() -> None:
    torch.manual_seed(0)
    one = module(f"{ATTN}.proj", "lokr", alpha=None, w1=randn(4, 4), w2=randn(8, 8))
    with pytest.raises(UsageError, match="as large as the weight"):
        to_target(adapter([one]), "diffusers", architecture="flux1")
    written = to_target(adapter([one]), "diffusers", architecture="flux1", svd_rank=8)
    want = torch.kron(one.factors["w1"], one.factors["w2"]).double()
    got = product(dict(written.tensors), "transformer.transformer_blocks.0.attn.to_out.0")
    error = float((got - want).abs().max() / want.abs().max())
    (path, said), *others = written.errors.items()
    assert not others
    assert "attn.to_out.0" in path
    assert said == pytest.approx(error, rel=1e-3)
    assert error > 0.01


@pytest.mark.parametrize(
    ("one", "target", "reason"),
    [
        (module(f"{ATTN}.proj", "full", diff=torch.ones(32, 32)), "diffusers", "full difference"),
        (module(f"{ATTN}.proj", "full", diff_b=torch.ones(32)), "diffusers", "a bias or a norm"),
        (module(f"{ATTN}.proj", "saved", weight=torch.ones(32, 32)), "diffusers", "replaces the weight"),
        (module(f"{ATTN}.proj", "saved", weight=torch.ones(32, 32)), "kohya", "no name for weight"),
        (module(f"{ATTN}.proj", "oft", blocks=torch.ones(4, 8, 8)), "diffusers", "rotates"),
        (module(f"{ATTN}.proj", "oft", R=torch.ones(4, 28)), "kohya", "no name for R"),
        (module(f"{ATTN}.qkv", "oft", blocks=torch.ones(4, 24, 24)), "diffusers", "split"),
        (module("text_encoder_2.encoder.block.0.layer.0.SelfAttention.q", "lora", A=randn(2, 8), B=randn(8, 2)),
         "diffusers", "does not load adapters of text_encoder_2"),
        (module(f"{ATTN}.proj", "lora", alpha=None, A=randn(2, 32), B=randn(32, 2)), "diffusers", "alpha"),
        (module(f"{ATTN}.proj", "lora", A=randn(2, 32), B=randn(32, 2), magnitude=torch.ones(1, 32)),
         "diffusers", "one per column"),
        (module(f"{ATTN}.qkv", "lora", A=randn(2, 32), B=randn(96, 2), magnitude=torch.ones(1, 32)),
         "diffusers", "one per column"),
        (module(f"{ATTN}.qkv", "lora", A=randn(2, 32), B=randn(95, 2)), "diffusers", "95 rows"),
    ],
)  # fmt: skip
def test_what_a_target_cannot_say_is_refused_with_the_reason(
    one: AdapterModule[torch.Tensor], target: str, reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        to_target(adapter([one], "kohya"), target, architecture="flux1")


def test_kohya_keeps_the_families_that_it_has() -> None:
    torch.manual_seed(0)
    modules = [
        loha(f"{ATTN}.proj", 32),
        module("double_blocks.1.img_attn.proj", "oft", alpha=0.0, blocks=randn(4, 8, 8)),
        module("double_blocks.2.img_attn.proj", "full", alpha=None, diff=randn(32, 32)),
        module("double_blocks.2.img_attn.proj", "full", alpha=None, diff_b=randn(32)),
        module("double_blocks.3.img_attn.proj", "lora", A=randn(2, 32), B=randn(32, 2), magnitude=torch.ones(1, 32)),
    ]
    written = to_target(adapter(modules, "kohya"), "kohya", architecture="flux1")
    name = "lora_unet_double_blocks_{}_img_attn_proj"
    assert torch.equal(written.tensors[name.format(0) + ".hada_w1_a"], modules[0].factors["w1_a"])
    assert float(written.tensors[name.format(0) + ".alpha"]) == 2.0
    assert torch.equal(written.tensors[name.format(1) + ".oft_blocks"], modules[1].factors["blocks"])
    assert {f"{name.format(2)}.diff", f"{name.format(2)}.diff_b"} <= written.tensors.keys()
    assert written.tensors[name.format(3) + ".dora_scale"].shape == (1, 32)
    assert written.metadata["ss_network_module"] == "lycoris.kohya"
    assert written.metadata["ss_base_model_version"] == "flux1"


def test_lokr_of_two_full_factors_has_the_alpha_that_lycoris_looks_up() -> None:
    from lycoris.kohya import create_network_from_weights

    torch.manual_seed(0)
    whole = module(f"{ATTN}.proj", "lokr", alpha=None, w1=randn(2, 2), w2=randn(4, 4))
    tensors = to_target(adapter([whole], "peft"), "kohya", architecture="flux1").tensors
    block = type("DoubleStreamBlock", (nn.Module,), {})()
    block.proj = nn.Linear(8, 8, bias=False)
    model = nn.ModuleDict({"double_blocks": nn.ModuleDict({"0": nn.ModuleDict({"img_attn": block})})})
    before = block.proj(torch.eye(8)).T.detach()
    network, _ = create_network_from_weights(1.0, None, None, None, model, weights_sd=dict(tensors))
    network.load_state_dict(tensors, strict=False)
    network.apply_to(None, model, False, True)
    added = block.proj(torch.eye(8)).T.detach() - before
    assert torch.allclose(added, torch.kron(whole.factors["w1"], whole.factors["w2"]), atol=1e-6)


def test_rslora_and_peft_lokr_scales_are_written_so_that_lycoris_reads_them() -> None:
    torch.manual_seed(0)
    stable = AdapterModule(
        path=f"{ATTN}.proj", family="lora", factors={"A": randn(4, 32), "B": randn(32, 4)}, alpha=Sourced(6.0, "test"),
        use_rslora=True,
    )  # fmt: skip
    full = module("double_blocks.1.img_attn.proj", "lokr", alpha=3.0, rank=2, w1=randn(4, 4), w2=randn(8, 8))
    written = to_target(adapter([stable, full]), "comfyui", architecture="flux1")
    assert float(written.tensors[f"diffusion_model.{ATTN}.proj.alpha"]) == pytest.approx(12.0)
    name = "diffusion_model.double_blocks.1.img_attn.proj"
    assert f"{name}.alpha" not in written.tensors  # LyCORIS scales no LoKr of two full factors
    assert torch.allclose(written.tensors[f"{name}.lokr_w1"], 1.5 * full.factors["w1"])


def test_scale_that_16_bits_would_round_makes_b_float32() -> None:
    torch.manual_seed(0)
    plain = lora(f"{ATTN}.proj", (32, 32), alpha=2.0)
    odd = lora("double_blocks.1.img_attn.proj", (32, 32), alpha=3.3)
    half = [
        each.with_factors({role: factor.bfloat16() for role, factor in each.factors.items()}) for each in (plain, odd)
    ]
    written = to_target(adapter(half), "diffusers", architecture="flux1")
    name = "transformer.transformer_blocks.{}.attn.to_out.0.lora_B.weight"
    exact, wide = (written.tensors[name.format(i)] for i in range(2))
    assert (exact.dtype, wide.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(exact, half[0].factors["B"] / 2)
    assert torch.allclose(wide, half[1].factors["B"].float() * (3.3 / 4), rtol=1e-6)
    assert written.errors == {}


def test_dora_of_some_parts_cannot_be_fused_of_all_it_can() -> None:
    torch.manual_seed(0)
    parts = [lora(path.removeprefix("transformer."), (32, 32), dora=True) for path in PARTS]
    with pytest.raises(UsageError, match="magnitude"):
        to_target(adapter(parts[:2]), "kohya", architecture="flux1")
    written = to_target(adapter(parts), "kohya", architecture="flux1").tensors
    scale = written["lora_unet_double_blocks_0_img_attn_qkv.dora_scale"]
    assert torch.equal(scale.reshape(-1), torch.cat([part.factors["magnitude"] for part in parts]))
    assert scale.shape == (96, 1)


@pytest.mark.parametrize("low_rank", [False, True])
def test_flux2_lokr_is_loaded_by_diffusers_and_changes_output_by_its_delta(low_rank: bool, tmp_path: Path) -> None:
    """ai-toolkit's LoKr of FLUX.2: fused projections, which diffusers fuses in the model as well."""
    torch.manual_seed(0)
    make, inputs = MODELS["flux2"]
    base = make()
    w2 = {"w2_a": randn(8, 1), "w2_b": randn(1, 8)} if low_rank else {"w2": randn(8, 8)}
    shapes = {"double_blocks.0.img_attn.qkv": 12, "double_blocks.0.img_attn.proj": 4}
    modules = [
        module(f"diffusion_model.{path}", "lokr", rank=1 if low_rank else None, alpha=2.0, w1=randn(rows, 4), **w2)
        for path, rows in shapes.items()
    ]
    if not low_rank:
        # One factor has to give the halves of all: 12 does not for a height of 32.
        modules = modules[1:]
    expected = make()
    expected.load_state_dict(base.state_dict())
    block = expected.transformer_blocks[0].attn
    with torch.no_grad():
        for each in modules:
            second = each.factors["w2"] if not low_rank else each.factors["w2_a"] @ each.factors["w2_b"]
            change = torch.kron(each.factors["w1"], second) * (2.0 if low_rank else 1.0)
            if each.path.endswith("proj"):
                block.to_out[0].weight += change
            else:
                for target, part in zip((block.to_q, block.to_k, block.to_v), change.chunk(3), strict=True):
                    target.weight += part
    written = to_target(adapter(modules, "ai-toolkit"), "diffusers", architecture="flux2")
    if not low_rank:
        assert "transformer.transformer_blocks.0.attn.to_out.0.lokr_w1" in written.tensors
    given = inputs()
    with torch.no_grad():
        before = base(**given, return_dict=False)[0]
        want = expected(**given, return_dict=False)[0]
    load("flux2", save(written, tmp_path), transformer=base)
    with torch.no_grad():
        got = base(**given, return_dict=False)[0]
    change = (want - before).abs().max()
    assert change > 1e-3
    assert (got - want).abs().max() <= TOLERANCE * change


def test_flux2_lokr_of_fused_projections_stays_lokr_for_diffusers_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    one = module("diffusion_model.double_blocks.0.img_attn.qkv", "lokr", alpha=None, w1=randn(4, 4), w2=randn(24, 8))
    written = to_target(adapter([one], "ai-toolkit"), "diffusers", architecture="flux2")
    assert "transformer.transformer_blocks.0.attn.to_qkv.lokr_w1" in written.tensors
    model = MODELS["flux2"][0]()
    load("flux2", save(written, tmp_path), transformer=model)
    assert torch.equal(model.transformer_blocks[0].attn.to_qkv.lokr_w2["default_0"], one.factors["w2"])
    with pytest.raises(UsageError, match=r"blocks are 24 rows high|as large as the weight"):
        to_target(adapter([one], "ai-toolkit"), "diffusers", architecture="flux2", may_fuse=False)


# GLoRA, against LyCORIS' own forward and ComfyUI's rules


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the adapter's file, the base's, and what the adapted model computes."""
    model, network = lycoris_worlds.adapt("glora")
    root = tmp_path_factory.mktemp("glora")
    with torch.no_grad():
        meant = model(*lycoris_worlds.inputs())
    save_file({name: tensor.contiguous() for name, tensor in network.state_dict().items()}, root / "x.safetensors")
    save_file(lycoris_worlds.build().state_dict(), root / "base.safetensors")
    return root / "x.safetensors", root / "base.safetensors", meant


def test_merge_is_lycoris_own(trained, tmp_path):
    adapter, base, meant = trained
    merge_lora(base, adapter, tmp_path / "out")
    merged = lycoris_worlds.build()
    merged.load_state_dict(load_file(next((tmp_path / "out").glob("*.safetensors"))))
    for found, wanted in zip(merged(*lycoris_worlds.inputs()), meant, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_what_is_no_sum_is_no_lora(trained, tmp_path):
    adapter, base, _ = trained
    with pytest.raises(UsageError, match="PEFT has no format for GLoRA"):
        export_lora(adapter, tmp_path / "out", base=base)
    with pytest.raises(UsageError, match="cannot be scaled"):
        merge_lora(base, adapter, tmp_path / "out", scale=0.5)


@pytest.mark.parametrize("role", ["a1", "b2"])
def test_half_a_product_is_said(trained, tmp_path, role):
    tensors = load_file(trained[0])
    del tensors[next(name for name in tensors if f".{role}." in name)]
    save_file(tensors, tmp_path / "x.safetensors")
    assert any(f"factor {role} is missing" in each.what for each in check_lora(tmp_path / "x.safetensors").findings)


def test_names_of_a_base_model_are_no_glora(tmp_path):
    save_file({f"layer.{role}.weight": torch.ones(4, 4) for role in ("a1", "a2")}, tmp_path / "x.safetensors")
    with pytest.raises(UnreadableError):
        merge_lora(tmp_path / "x.safetensors", tmp_path / "x.safetensors", tmp_path / "out")


def test_comfyui_gets_it_as_it_is(tmp_path):
    shapes = {"a1": (8, 2), "a2": (2, 8), "b1": (24, 2), "b2": (2, 8)}
    path = "double_blocks_0_img_attn_qkv"
    tensors = {f"lycoris_{path}.{role}.weight": torch.randn(shape) for role, shape in shapes.items()}
    tensors[f"lycoris_{path}.alpha"] = torch.tensor(1.0)
    save_file(tensors, tmp_path / "x.safetensors")
    for to, prefix in (("comfyui", "diffusion_model.double_blocks.0.img_attn.qkv"), ("kohya", f"lora_unet_{path}")):
        export_lora(tmp_path / "x.safetensors", tmp_path / to, to=to, architecture="flux1")
        file = next((tmp_path / to).glob("*.safetensors"))
        written = load_file(file)
        assert all(
            torch.equal(written[f"{prefix}.{role}.weight"], tensors[f"lycoris_{path}.{role}.weight"]) for role in shapes
        )
        assert written[f"{prefix}.alpha"].item() == 1
        report = {each.loader: each for each in check_lora(file, architecture="flux1").loaders}
        assert report["comfyui"].is_whole
        assert to != "kohya" or report["kohya"].is_whole
