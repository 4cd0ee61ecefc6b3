"""`merge_lora` against PEFT's merge_and_unload, on real files."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path

import pytest
import torch
import toys
from adapters.families import loras, save_dcp, write_peft
from adapters.peft_world import randomise
from safetensors.torch import load_file, save_file
from torch import nn

from ckpt_tools import api
from ckpt_tools.cli import main
from ckpt_tools.errors import CkptError, UnreadableError, UsageError

TOLERANCE = 1e-6
"""Of float32 sums in another order."""


def llama(**options):
    return toys.build("llama", **{"intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 40} | options)


def save_model(model, path):
    with warnings.catch_warnings(action="ignore"):
        model.save_pretrained(path)
    return path


def adapt(model, config, path, *, seed=0):
    """Write a random adapter of `model`; return what PEFT merges."""
    from peft import get_peft_model

    with warnings.catch_warnings(action="ignore"):
        peft_model = get_peft_model(copy.deepcopy(model), config)
        markers = ("lora_", "hada_", "lokr_", "oft_R", "oft_embedding_R", "boft_", "modules_to_save")
        randomise(peft_model, lambda name: any(marker in name for marker in markers), seed)
        peft_model.save_pretrained(path)
        merged = peft_model.merge_and_unload()
    return {name: tensor.detach().clone() for name, tensor in merged.state_dict().items()}


def world(tmp_path, config="lora", model=None):
    """Save a base and an adapter of it; return the model, the base and what PEFT merges."""
    model = model or llama()
    base = save_model(model, tmp_path / "base")
    return model, base, adapt(model, configs()[config] if isinstance(config, str) else config, tmp_path / "adapter")


def tensors_of(path):
    return {
        name: tensor for file in sorted(Path(path).glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


def assert_merged(destination, expected, base):
    found = tensors_of(destination)
    before = tensors_of(base)
    assert found.keys() == before.keys()
    changed = [name for name in found if not torch.equal(found[name], before[name])]
    assert changed
    for name, tensor in found.items():
        assert float((tensor - expected[name]).abs().max()) <= TOLERANCE, name
        if torch.equal(expected[name], before[name]):
            assert torch.equal(tensor, before[name]), name


def configs():
    from peft import BOFTConfig, LoHaConfig, LoKrConfig, LoraConfig, OFTConfig

    all_linear = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    loha = {"init_weights": False, "target_modules": all_linear}
    return {
        "lora": LoraConfig(r=4, lora_alpha=6, target_modules=[*all_linear, "embed_tokens"]),
        "rslora": LoraConfig(r=4, lora_alpha=6, target_modules=all_linear, use_rslora=True),
        "dora": LoraConfig(r=4, lora_alpha=6, target_modules=[*all_linear, "embed_tokens"], use_dora=True),
        "patterns": LoraConfig(
            r=4, lora_alpha=6, target_modules=all_linear, rank_pattern={"q_proj": 2}, alpha_pattern={"q_proj": 7}
        ),
        "saved": LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj"], modules_to_save=["lm_head"]),
        "loha": LoHaConfig(r=3, alpha=5, **loha),
        "lokr": LoKrConfig(r=2, alpha=5, decompose_both=True, **loha),
        "lokr full": LoKrConfig(r=64, alpha=5, **loha),
        "oft": OFTConfig(oft_block_size=8, target_modules=all_linear, use_cayley_neumann=False),
        "oft neumann": OFTConfig(oft_block_size=8, target_modules=all_linear, use_cayley_neumann=True),
        "coft": OFTConfig(oft_block_size=8, target_modules=all_linear, coft=True, eps=1e-2),
        "boft": BOFTConfig(boft_block_size=4, init_weights=False, target_modules=all_linear),
    }


FAMILIES = (
    "lora", "rslora", "dora", "patterns", "saved", "loha", "lokr", "lokr full", "oft", "oft neumann", "coft", "boft",
)  # fmt: skip


@pytest.mark.parametrize("case", [*FAMILIES, "lora, float64", "dora, float64"])
def test_merge_equals_merge_and_unload(tmp_path, case):
    family, _, dtype = case.partition(", ")
    _, base, expected = world(tmp_path, family, llama().double() if dtype else None)
    result = api.merge_lora(base, tmp_path / "adapter", tmp_path / "out")
    assert result.verified
    assert_merged(tmp_path / "out", expected, base)
    assert api.verify(tmp_path / "out").ok


def test_setting_that_nothing_tells_is_asked_for_and_taken(tmp_path):
    _, base, expected = world(tmp_path, "oft neumann")
    (tmp_path / "adapter" / "adapter_config.json").unlink()
    with pytest.raises(UsageError, match="use_cayley_neumann"):
        api.merge_lora(base, tmp_path / "adapter", tmp_path / "out")
    said = ("use_cayley_neumann=true", "num_cayley_neumann_terms=5", "coft=false", "peft_version=0.21.0")
    api.merge_lora(base, tmp_path / "adapter", tmp_path / "out", config=said)
    assert_merged(tmp_path / "out", expected, base)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("family", ["lora", "dora", "oft"])
def test_result_is_cast_once(tmp_path, family, dtype):
    model = llama()
    adapt(model, configs()[family], tmp_path / "adapter")
    kind = torch.bfloat16 if dtype == "bf16" else torch.float16
    base = save_model(model.to(kind), tmp_path / "base")
    api.merge_lora(base, tmp_path / "adapter", tmp_path / "kept")
    api.merge_lora(base, tmp_path / "adapter", tmp_path / "wide", dtype="f32")
    kept, wide = tensors_of(tmp_path / "kept"), tensors_of(tmp_path / "wide")
    assert all(torch.equal(kept[name], wide[name].to(kind)) for name in kept)
    assert {tensor.dtype for tensor in wide.values()} == {torch.float32}
    other = "f16" if dtype == "bf16" else "bf16"
    api.merge_lora(base, tmp_path / "adapter", tmp_path / "other", dtype=other)
    cast = tensors_of(tmp_path / "other")
    assert all(torch.equal(cast[name], wide[name].to(cast[name].dtype)) for name in cast)


def test_bf16_merge_is_bitwise_that_of_peft(tmp_path):
    """PEFT keeps the factors in float32 and adds them to the bf16 weight with one rounding."""
    _, base, expected = world(tmp_path, "lora", llama().to(torch.bfloat16))
    api.merge_lora(base, tmp_path / "adapter", tmp_path / "out")
    found = tensors_of(tmp_path / "out")
    linear = [name for name in found if "proj" in name]
    assert linear
    assert all(torch.equal(found[name], expected[name]) for name in linear)


class Wide(nn.Module):
    """Weights of several blocks of 4 MiB: by rows, long rows, a convolution, a stack."""

    def __init__(self) -> None:
        super().__init__()
        self.tall = nn.Linear(700, 3000, bias=False)
        self.conv = nn.Conv2d(64, 1024, 5)
        self.config = {"model_type": "wide"}


@pytest.mark.parametrize("family", ["lora", "dora", "loha", "lokr", "oft"])
def test_weights_of_many_blocks_equal_peft(tmp_path, family):
    from peft import LoHaConfig, LoKrConfig, LoraConfig, OFTConfig

    targets = {"target_modules": ["tall", "conv"]}
    config = {
        "lora": LoraConfig(r=3, lora_alpha=4, **targets),
        "dora": LoraConfig(r=3, lora_alpha=4, use_dora=True, **targets),
        "loha": LoHaConfig(r=3, alpha=4, init_weights=False, **targets),
        "lokr": LoKrConfig(r=3, alpha=4, init_weights=False, **targets),
        "oft": OFTConfig(oft_block_size=20, use_cayley_neumann=False, target_modules=["tall"]),
    }[family]
    torch.manual_seed(3)
    model = Wide()
    (tmp_path / "base").mkdir()
    save_file(model.state_dict(), tmp_path / "base" / "model.safetensors", {"format": "pt"})
    expected = adapt(model, config, tmp_path / "adapter")
    api.merge_lora(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", num_workers=4)
    assert_merged(tmp_path / "out", expected, tmp_path / "base")


# Bases


def test_single_file_base_keeps_names_of_files_and_header(tmp_path):
    _, base, expected = world(tmp_path)
    file = base / "model.safetensors"
    api.merge_lora(file, tmp_path / "adapter", tmp_path / "out")
    assert_merged(tmp_path / "out", expected, base)
    written = (tmp_path / "out" / "model.safetensors").read_bytes()
    head = 8 + int.from_bytes(written[:8], "little")
    assert written[:head] == file.read_bytes()[:head]


def test_max_shard_size_splits_files(tmp_path):
    _, base, expected = world(tmp_path)
    api.merge_lora(base, tmp_path / "adapter", tmp_path / "out", max_shard_size="20KB")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    assert_merged(tmp_path / "out", expected, base)


PLAN = ["**.{q,k,v,gate,up}_proj.weight=tp:S(0)", "**.{o,down}_proj.weight=tp:S(1)"]
"""Tensor parallelism as `tp_plan="auto"` finds it, which asks transformers in a process of its own."""


def test_dcp_base_keeps_mesh_chunks_and_names(tmp_path):
    _, base, expected = world(tmp_path)
    api.shard(base, tmp_path / "dcp", mesh="dp_shard=2,tp=2", set=PLAN, prefix="model.")
    result = api.merge_lora(tmp_path / "dcp", tmp_path / "adapter", tmp_path / "out")
    before, after = api.open_checkpoint(tmp_path / "dcp"), api.open_checkpoint(tmp_path / "out")
    layouts = [
        {(e.fqn, e.dtype.name, tuple((c.box, c.span.file) for c in e.chunks)) for e in checkpoint.tensors}
        for checkpoint in (before, after)
    ]
    assert layouts[0] == layouts[1]
    assert (before.mesh, before.placements) == (after.mesh, after.placements)
    assert result.checked["digests"] == len(after.tensors)  # what was read was what the manifest says
    assert api.verify(tmp_path / "out").ok
    api.gather(tmp_path / "out", tmp_path / "gathered")
    assert_merged(tmp_path / "gathered", expected, base)


def test_merged_dcp_does_not_claim_the_files_it_came_from(tmp_path):
    _, base, _ = world(tmp_path)
    api.shard(base, tmp_path / "dcp", mesh="dp_shard=2")
    api.merge_lora(tmp_path / "dcp", tmp_path / "adapter", tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "ckpt_manifest.json").read_text())
    assert manifest["origin"] is None
    with pytest.raises(UsageError):
        api.gather(tmp_path / "dcp", tmp_path / "x", like=tmp_path / "out")


def test_trainer_checkpoint_loses_its_optimizer_and_says_so(tmp_path):
    model, base, expected = world(tmp_path)
    optimizer = {f"state.{name}.exp_avg": torch.zeros_like(p) for name, p in model.named_parameters()}
    state = {"model": model.state_dict(), "optim": optimizer, "step": 7}
    save_dcp(state, tmp_path / "run")
    result = api.merge_lora(tmp_path / "run", tmp_path / "adapter", tmp_path / "out")
    assert any("of optimizer state: it belongs to the weights before" in note for note in result.notes)
    fqns = [entry.fqn for entry in api.open_checkpoint(tmp_path / "out").tensors]
    assert fqns == [f"model.{name}" for name in model.state_dict()]
    api.gather(tmp_path / "out", tmp_path / "gathered")
    assert_merged(tmp_path / "gathered", expected, base)


# Names and shapes


def write_adapter(path, factors, **config):
    fields = {"r": 2, "lora_alpha": 3, "target_modules": ["x"], "bias": "none"} | config
    return write_peft(path, {f"base_model.model.{name}": factor for name, factor in factors.items()}, **fields)


def write_base(path, tensors):
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def pair(out, columns, seed=0, r=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(r, columns, generator=generator), torch.randn(out, r, generator=generator)


def test_split_adapter_merges_into_fused_base(tmp_path):
    """Grouped-query attention: k and v are narrower, and only q and v are adapted."""
    weight = torch.randn(8 + 4 + 4, 6)
    gate_up = torch.randn(10, 6)
    base = write_base(tmp_path / "base", {"l.qkv_proj.weight": weight, "l.gate_up_proj.weight": gate_up})
    (qa, qb), (va, vb), (ua, ub) = pairs = pair(8, 6, 1), pair(4, 6, 2), pair(5, 6, 3)
    factors = loras(dict(zip(("l.q_proj", "l.v_proj", "l.up_proj"), pairs, strict=True)))
    adapter = write_adapter(tmp_path / "adapter", factors)
    api.merge_lora(base, adapter, tmp_path / "out")
    found = tensors_of(tmp_path / "out")
    weight[:8] += 1.5 * qb @ qa
    weight[12:] += 1.5 * vb @ va
    gate_up[5:] += 1.5 * ub @ ua
    assert torch.allclose(found["l.qkv_proj.weight"], weight, atol=TOLERANCE)
    assert torch.allclose(found["l.gate_up_proj.weight"], gate_up, atol=TOLERANCE)


@pytest.mark.parametrize("use_dora", [False, True])
def test_fused_adapter_merges_into_split_base(tmp_path, use_dora):
    parts = {name: torch.randn(rows, 6) for name, rows in (("q", 8), ("k", 4), ("v", 4))}
    base = write_base(tmp_path / "base", {f"l.{name}_proj.weight": tensor for name, tensor in parts.items()})
    a, b = pair(16, 6)
    factors = loras({"l.qkv_proj": (a, b)})
    whole = torch.cat(list(parts.values())) + 1.5 * b @ a
    if use_dora:
        magnitude = 1 + torch.rand(16)
        factors["l.qkv_proj.lora_magnitude_vector"] = magnitude
        whole = magnitude[:, None] * whole / whole.norm(dim=1, keepdim=True)
    adapter = write_adapter(tmp_path / "adapter", factors, use_dora=use_dora)
    api.merge_lora(base, adapter, tmp_path / "out")
    found = tensors_of(tmp_path / "out")
    for (name, _), expected in zip(parts.items(), whole.split([8, 4, 4]), strict=True):
        assert torch.allclose(found[f"l.{name}_proj.weight"], expected, atol=TOLERANCE)


def test_gpt2_with_its_transposed_weights_equals_peft(tmp_path):
    from peft import LoraConfig

    model = toys.build("gpt2", n_embd=16, n_layer=1, vocab_size=20, n_positions=8)
    config = LoraConfig(r=2, lora_alpha=3, target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True)
    _, base, expected = world(tmp_path, config, model)
    api.merge_lora(base, tmp_path / "adapter", tmp_path / "out")
    assert_merged(tmp_path / "out", expected, base)


def test_square_weights_that_may_be_transposed_are_refused_when_nothing_is_sure(tmp_path):
    tensors = {"a.weight": torch.randn(4, 6), "b.weight": torch.randn(6, 6), "c.weight": torch.randn(6, 4)}
    base = write_base(tmp_path / "base", tensors)
    adapter = write_adapter(tmp_path / "adapter", loras({"a": pair(6, 4), "b": pair(6, 6), "c": pair(6, 4)}))
    with pytest.raises(UsageError, match="the weight is square"):
        api.merge_lora(base, adapter, tmp_path / "out")


def moe_model():
    return toys.build("qwen3-moe", hidden_size=16, moe_intermediate_size=12, num_hidden_layers=1, num_experts=3)


@pytest.mark.parametrize("stacked", [False, True])
def test_experts_equal_peft_whether_the_base_stacks_them_or_not(tmp_path, stacked):
    from peft import LoraConfig

    model = moe_model()
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj"], target_parameters=names)
    expected = adapt(model, config, tmp_path / "adapter")
    if stacked:
        base = write_base(tmp_path / "base", {name: t.clone() for name, t in model.state_dict().items()})
    else:
        base = save_model(model, tmp_path / "base")
    assert any("experts.0." in name for name in tensors_of(base)) != stacked
    api.merge_lora(base, tmp_path / "adapter", tmp_path / "out")
    found = tensors_of(tmp_path / "out")
    path = "model.layers.0.mlp.experts"
    if not stacked:
        for part in ("gate_proj", "up_proj", "down_proj"):
            found[f"{path}.{part}"] = torch.stack([found.pop(f"{path}.{i}.{part}.weight") for i in range(3)])
        gate_up = torch.cat([found.pop(f"{path}.gate_proj"), found.pop(f"{path}.up_proj")], dim=1)
        found[f"{path}.gate_up_proj"] = gate_up
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert float((tensor - expected[name]).abs().max()) <= TOLERANCE, name


def test_kohya_names_find_their_modules(tmp_path):
    weight = torch.randn(8, 6)
    base = write_base(tmp_path / "base", {"blocks.0.attn.to_q.weight": weight, "other.weight": torch.randn(3)})
    a, b = pair(8, 6)
    name = "lora_unet_blocks_0_attn_to_q"
    factors = {f"{name}.lora_down.weight": a, f"{name}.lora_up.weight": b, f"{name}.alpha": torch.tensor(1.0)}
    save_file(factors, tmp_path / "lora.safetensors")
    api.merge_lora(base, tmp_path / "lora.safetensors", tmp_path / "out")
    found = tensors_of(tmp_path / "out")["blocks.0.attn.to_q.weight"]
    assert torch.allclose(found, weight + 0.5 * b @ a, atol=TOLERANCE)


def test_names_of_another_implementation_are_understood(tmp_path):
    """An adapter in the names of FLUX' authors, q, k and v fused, on a base in diffusers' names."""
    from adapters.image_models import flux1

    base = write_base(tmp_path / "base", flux1().state_dict())
    weights = tensors_of(base)
    name = "transformer_blocks.1.attn.to_{}.weight"
    width = weights[name.format("q")].shape[1]
    a, b = pair(3 * width, width)
    state = {"lora_unet_double_blocks_1_img_attn_qkv.lora_down.weight": a}
    state |= {"lora_unet_double_blocks_1_img_attn_qkv.lora_up.weight": b}
    state |= {"lora_unet_double_blocks_1_img_attn_qkv.alpha": torch.tensor(4.0)}
    # The last layer's two halves change places between the two.
    oa, ob = pair(2 * width, width, 4)
    state |= {"lora_unet_final_layer_adaLN_modulation_1.lora_down.weight": oa}
    state |= {"lora_unet_final_layer_adaLN_modulation_1.lora_up.weight": ob}
    state |= {"lora_unet_final_layer_adaLN_modulation_1.alpha": torch.tensor(2.0)}
    save_file(state, tmp_path / "lora.safetensors")
    result = api.merge_lora(base, tmp_path / "lora.safetensors", tmp_path / "out")
    assert any("diffusers' FLUX" in note for note in result.notes)
    found = tensors_of(tmp_path / "out")
    for part, rows in zip("qkv", (2 * b @ a).split(width), strict=True):
        assert torch.allclose(found[name.format(part)], weights[name.format(part)] + rows, atol=2e-5)
    first, second = (ob @ oa).split(width)
    expected = weights["norm_out.linear.weight"] + torch.cat([second, first])
    assert torch.allclose(found["norm_out.linear.weight"], expected, atol=2e-5)
    changed = {name for name, tensor in found.items() if not torch.equal(tensor, weights[name])}
    assert changed == {*(name.format(part) for part in "qkv"), "norm_out.linear.weight"}


@pytest.mark.parametrize("algorithm", ["diag-oft", "dora by column"])
def test_what_mixes_rows_is_computed_over_many_blocks(tmp_path, algorithm):
    from adapters.maths import new_weight

    from ckpt_tools.adapters.adapter import AdapterModule, Sourced
    from ckpt_tools.adapters.families.family import Setting

    weight = torch.randn(2560, 640)
    base = write_base(tmp_path / "base", {"blocks.to_q.weight": weight})
    if algorithm == "diag-oft":
        factors = {"blocks": 0.1 * torch.randn(320, 8, 8)}
        module = AdapterModule(path="x", family="oft", factors=factors, alpha=Sourced(0.0, ""))
        state = {"lora_unet_blocks_to_q.oft_blocks": factors["blocks"]}
    else:
        a, b = pair(2560, 640)
        factors = {"A": a, "B": b, "magnitude": 1 + torch.rand(1, 640)}
        module = AdapterModule(path="x", family="lora", factors=factors, alpha=Sourced(2.0, ""))
        names = {"A": "lora_down.weight", "B": "lora_up.weight", "magnitude": "dora_scale"}
        state = {f"lora_unet_blocks_to_q.{names[role]}": tensor for role, tensor in factors.items()}
    save_file(state | {"lora_unet_blocks_to_q.alpha": torch.tensor(module.alpha.value)}, tmp_path / "x.safetensors")
    api.merge_lora(base, tmp_path / "x.safetensors", tmp_path / "out", num_workers=3)
    expected = new_weight(module, weight, Setting(convention="kohya"))
    assert torch.allclose(tensors_of(tmp_path / "out")["blocks.to_q.weight"], expected, atol=TOLERANCE)


def test_scale_multiplies_what_is_added(tmp_path):
    weight = torch.randn(8, 6)
    base = write_base(tmp_path / "base", {"x.weight": weight})
    a, b = pair(8, 6)
    adapter = write_adapter(tmp_path / "adapter", loras({"x": (a, b)}))
    api.merge_lora(base, adapter, tmp_path / "out", scale=-0.5, alpha=8)
    found = tensors_of(tmp_path / "out")["x.weight"]
    assert torch.allclose(found, weight - 2 * b @ a, atol=TOLERANCE)


# What is refused


def simple(tmp_path, weight=None):
    weight = torch.randn(8, 6) if weight is None else weight
    base = write_base(tmp_path / "base", {"x.weight": weight, "y.weight": torch.randn(8, 6)})
    return base, loras({"x": pair(8, 6), "y": pair(8, 6, 5)})


def refused(kind, code, match, *args, **options):
    with pytest.raises(kind, match=match) as caught:
        api.merge_lora(*args, **options)
    assert caught.value.exit_code == code
    assert not Path(args[2]).exists()
    return caught.value


def broken_at_one_element(factor, value):
    factor = factor.clone()
    factor[3, 1] = value
    return factor


UP = "x.lora_B.weight"
REFUSED = {
    "rounded away": (
        torch.full((8, 6), 100.0).bfloat16(), lambda f: {UP: f[UP] * 1e-3}, {}, {},
        (CkptError, 3, "1 of 2 adapted tensors come out unchanged.*x.weight"),
    ),
    "zeros": (
        None, lambda f: {name: torch.zeros_like(t) for name, t in f.items() if "lora_B" in name}, {}, {},
        (CkptError, 3, "the result equals the base"),
    ),
    "not a number": (
        None, lambda f: {UP: broken_at_one_element(f[UP], float("nan"))}, {}, {},
        (CkptError, 1, "values that are not finite"),
    ),
    "infinite": (
        None, lambda f: {UP: broken_at_one_element(f[UP], float("inf"))}, {}, {},
        (CkptError, 1, "values that are not finite"),
    ),
    "too large": (
        torch.full((8, 6), 6e4), lambda f: {UP: f[UP] * 1e5}, {}, {"dtype": "f16"},
        (CkptError, 1, "too large for float16"),
    ),
    "a module more": (
        None, lambda _: loras({"z.q": pair(8, 6)}), {}, {},
        (UsageError, 2, "1 of 3 adapted tensors are not in the base: z.q.weight"),
    ),
    "another shape": (
        None, lambda _: {"x.lora_A.weight": torch.randn(2, 7)}, {}, {},
        (UsageError, 2, r"x: it changes 8 × 7 elements, the base's weight is \[8, 6\]"),
    ),
    "quantised": (
        torch.randint(0, 9, (8, 6), dtype=torch.uint8), lambda _: {}, {}, {},
        (UsageError, 2, "the base's weight is U8: quantised"),
    ),
    "no alpha": (None, lambda _: {}, {"lora_alpha": None}, {}, (UsageError, 2, "alpha")),
    "truncated": (None, lambda _: {UP: torch.zeros(0)}, {}, {}, (CkptError, 3, "adapter-truncated")),
    "multiple of DoRA": (
        None, lambda _: {f"{name}.lora_magnitude_vector": torch.ones(8) for name in "xy"}, {"use_dora": True},
        {"scale": 0.5}, (UsageError, 2, "DoRA cannot be scaled"),
    ),
}  # fmt: skip
"""What is wrong → the base's weight, other factors, PEFT's configuration, options, and the error."""
TAKEN = {"rounded away": {"dtype": "f32"}, "no alpha": {"alpha": 3}}
"""With which of these options it is merged."""


@pytest.mark.parametrize("case", REFUSED)
def test_merge_that_would_give_something_else_is_refused(tmp_path, case):
    weight, change, config, options, (kind, code, match) = REFUSED[case]
    base, factors = simple(tmp_path, weight)
    adapter = write_adapter(tmp_path / "adapter", factors | change(factors), **config)
    error = refused(kind, code, match, base, adapter, tmp_path / "out", **options)
    assert (error.code == "merge-unchanged") is (case in ("rounded away", "zeros"))
    assert case != "no alpha" or "--alpha" in error.hint
    if case in TAKEN:
        api.merge_lora(base, adapter, tmp_path / "out", **TAKEN[case])


def test_modules_with_zero_factors_beside_others_are_said(tmp_path):
    base, factors = simple(tmp_path)
    factors["x.lora_B.weight"].zero_()
    adapter = write_adapter(tmp_path / "adapter", factors)
    result = api.merge_lora(base, adapter, tmp_path / "out")
    assert any("1 of 2 tensors do not change" in note for note in result.notes)


def test_tied_head_is_explained(tmp_path):
    base = write_base(tmp_path / "base", {"model.embed_tokens.weight": torch.randn(8, 6)})
    adapter = write_adapter(tmp_path / "adapter", loras({"lm_head": pair(8, 6)}))
    error = refused(UsageError, 2, "lm_head.weight", base, adapter, tmp_path / "out")
    assert "ties lm_head" in error.hint


def test_destination_around_the_adapter_is_refused(tmp_path):
    base, factors = simple(tmp_path)
    adapter = write_adapter(tmp_path / "runs" / "adapter", factors)
    with pytest.raises(UsageError, match="must not contain each other"):
        api.merge_lora(base, adapter, tmp_path / "runs", overwrite=True)
    assert (adapter / "adapter_model.safetensors").exists()


def test_damage_of_the_base_is_found_in_adapted_tensors_too(tmp_path):
    model, base, _ = world(tmp_path)
    api.shard(base, tmp_path / "dcp", mesh="dp_shard=2")
    api.gather(tmp_path / "dcp", tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    content = bytearray(file.read_bytes())
    at = content.index(model.model.layers[0].mlp.up_proj.weight.detach().numpy().tobytes())
    content[at + 4] ^= 1
    file.write_bytes(content)
    what, given = "up_proj.*not what the manifest recorded", (tmp_path / "adapter", tmp_path / "out")
    refused(UnreadableError, 4, what, tmp_path / "hf", *given)
    chunk = tmp_path / "dcp" / "__1_0.distcp"
    content = bytearray(chunk.read_bytes())
    rows = model.model.layers[0].mlp.up_proj.weight.detach()[24:].numpy().tobytes()
    content[content.index(rows)] ^= 1
    chunk.write_bytes(content)
    refused(UnreadableError, 4, "CRC-32", tmp_path / "dcp", *given)


# Interruptions


class Interrupt:
    """A receiver of progress that presses Ctrl-C once so much is done."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, total):
        def advance(nbytes):
            self.left -= nbytes
            if self.left < 0:
                raise KeyboardInterrupt

        return advance


def interrupted_base(tmp_path):
    tensors = {f"l.{i}.weight": torch.randn(2048, 1024) for i in range(3)} | {"head": torch.randn(1024, 1024)}
    base = write_base(tmp_path / "base", tensors)
    return base, write_adapter(tmp_path / "adapter", loras({f"l.{i}": pair(2048, 1024, i) for i in range(3)}))


def test_interrupted_merge_continues_and_gives_the_same_bytes(tmp_path):
    base, adapter = interrupted_base(tmp_path)
    api.merge_lora(base, adapter, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        api.merge_lora(base, adapter, tmp_path / "out", num_workers=1, progress=Interrupt(20 << 20))
    result = api.merge_lora(base, adapter, tmp_path / "out", num_workers=1)
    assert any("continued an interrupted run" in note for note in result.notes)
    for name in ("model.safetensors", "ckpt_manifest.json"):
        written = [(tmp_path / place / name).read_bytes() for place in ("whole", "out")]
        assert written[0] == written[1]


@pytest.mark.parametrize("change", ["scale", "adapter"])
def test_interrupted_merge_of_something_else_is_not_continued(tmp_path, change):
    base, adapter = interrupted_base(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        api.merge_lora(base, adapter, tmp_path / "out", num_workers=1, progress=Interrupt(20 << 20))
    scale = 0.5 if change == "scale" else 1.0
    if change == "adapter":
        factors = load_file(adapter / "adapter_model.safetensors")
        factors["base_model.model.l.0.lora_B.weight"][0, 0] += 1
        save_file(factors, adapter / "adapter_model.safetensors")
    result = api.merge_lora(base, adapter, tmp_path / "out", scale=scale)
    assert not any("continued" in note for note in result.notes)
    assert any("removed the remains of an interrupted run" in note for note in result.notes)
    api.merge_lora(base, adapter, tmp_path / "whole", scale=scale)
    assert (tmp_path / "whole" / "model.safetensors").read_bytes() == (
        tmp_path / "out" / "model.safetensors"
    ).read_bytes()


# The command


def test_command_reports_as_the_contract_says(tmp_path, capsys):
    base, factors = simple(tmp_path)
    adapter = write_adapter(tmp_path / "adapter", factors)
    args = ["merge-lora", str(base), str(adapter), str(tmp_path / "out"), "--json"]
    assert main([*args, "--dry-run"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["plan"]["bytes"] > 0
    assert 64 << 20 < planned["plan"]["peak_bytes"] < 256 << 20
    assert not (tmp_path / "out").exists()
    assert main(args) == 0
    document = json.loads(capsys.readouterr().out)
    fields = ("source", "destination", "num_tensors", "bytes_read", "bytes_written", "seconds", "files", "verified")
    assert all(field in document for field in fields)
    assert main(args) == 5
    assert json.loads(capsys.readouterr().err)["error"]["code"] == "destination-exists"
    assert main([*args, "--overwrite", "--scale", "nan"]) == 2
    assert main([*args, "--overwrite", "--scale", "1e-30"]) == 3
    assert json.loads(capsys.readouterr().err.splitlines()[-1])["error"]["code"] == "merge-unchanged"
