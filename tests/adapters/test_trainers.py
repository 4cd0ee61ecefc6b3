"""LoRA of torchtitan, torchtune and Megatron-Bridge: their own modules and row orders, against PEFT on the hub's model.

Every case is made in the trainer's form: its weight's rows, W + s·B·A there, and these rows back in the hub's order.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import toys
from adapters.families import save_dcp
from safetensors.torch import load_file
from torch import Tensor

from ckpt_tools import api
from ckpt_tools.adapters.read.opening import read_adapter
from ckpt_tools.cli import main
from ckpt_tools.errors import UsageError

HEADS, GROUPS, DIM, RANK, SCALE = 4, 2, 8, 3, 2.0
Tensors = dict[str, Tensor]
TEXT = torch.tensor([[1, 5, 3, 7, 9, 1]])


def pairs(weight: Tensor, heads: int) -> Tensor:
    """Rows as complex rotary embeddings have them: the halves of a head in turn."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def halves(weight: Tensor, heads: int) -> Tensor:
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)


def fuse(parts: list[Tensor]) -> Tensor:
    return torch.cat([part for group in zip(*(part.chunk(GROUPS) for part in parts), strict=True) for part in group])


def unfuse(fused: Tensor) -> list[Tensor]:
    sizes = [HEADS // GROUPS * DIM, DIM, DIM]
    return [torch.cat(parts) for parts in zip(*(group.split(sizes) for group in fused.chunk(GROUPS)), strict=True)]


ATTENTION = [f"self_attn.{part}_proj" for part in "qkvo"]
MLP = [f"mlp.{part}_proj" for part in ("gate", "down", "up")]
TITAN = [*(f"attention.w{part}" for part in "qkvo"), *(f"feed_forward.w{part}" for part in "123")]
TUNE = [*(f"attn.{part}_proj" for part in ("q", "k", "v", "output")), *(f"mlp.w{part}" for part in "123")]
FUSED = {
    "self_attention.linear_qkv": (ATTENTION[:3], fuse, unfuse),
    "self_attention.linear_proj": (ATTENTION[3:], torch.cat, lambda whole: [whole]),
    "mlp.linear_fc1": ([MLP[0], MLP[2]], torch.cat, lambda whole: list(whole.chunk(2))),
    "mlp.linear_fc2": ([MLP[1]], torch.cat, lambda whole: [whole]),
}
CANONICAL = {
    "self_attention.linear_qkv.adapter.adapter_q": ATTENTION[0],
    "self_attention.linear_qkv.adapter.adapter_v": ATTENTION[2],
    "mlp.linear_fc1.adapter.adapter_up": MLP[2],
    "mlp.linear_fc2.adapter": MLP[1],
}


class Run:
    """Adapts weights, and keeps what a trainer saves and what the hub's model should become."""

    def __init__(self, model: torch.nn.Module, *, is_dora: bool) -> None:
        self.weights = model.state_dict()
        self.wanted = dict(self.weights)
        self.saved: Tensors = {}
        self.is_dora = is_dora
        self.generator = torch.Generator().manual_seed(1)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator) * 0.2

    def adapt(self, weight: Tensor, names: list[str]) -> Tensor:
        down, up = self.random(RANK, weight.shape[1]), self.random(weight.shape[0], RANK)
        self.saved |= {names[0]: down, names[1]: up}
        new = weight + SCALE * up @ down
        if not self.is_dora:
            return new
        self.saved[names[2]] = magnitude = 1 + self.random(weight.shape[0]).abs()
        return magnitude[:, None] * new / new.norm(dim=1, keepdim=True)


def plain(run: Run, layer: int, modules: list[str]) -> None:
    for hub, own in zip([*ATTENTION, *MLP], modules, strict=True):
        name, heads = f"model.layers.{layer}.{hub}.weight", {ATTENTION[0]: HEADS, ATTENTION[1]: GROUPS}.get(hub)
        weight, at = run.weights[name], f"layers.{layer}.{own}"
        names = [f"{at}.lora_a.weight", f"{at}.lora_b.weight", f"{at}.magnitude"]
        new = run.adapt(pairs(weight, heads) if heads else weight, names)
        run.wanted[name] = halves(new, heads) if heads else new


def megatron(at: str) -> list[str]:
    return [f"{at}.linear_in.weight", f"{at}.linear_out.weight", f"{at}.weight_magnitude"]


def fused(run: Run, layer: int) -> None:
    for own, (parts, join, split) in FUSED.items():
        names = [f"model.layers.{layer}.{part}.weight" for part in parts]
        new = run.adapt(join([run.weights[name] for name in names]), megatron(f"decoder.layers.{layer}.{own}.adapter"))
        run.wanted |= dict(zip(names, split(new), strict=True))


def canonical(run: Run, layer: int) -> None:
    for own, part in CANONICAL.items():
        name = f"model.layers.{layer}.{part}.weight"
        run.wanted[name] = run.adapt(run.weights[name], megatron(f"decoder.layers.{layer}.{own}"))


def stacked(saved: Tensors) -> Tensors:
    """As torch_dist has layers that are alike."""
    firsts = [name for name in saved if ".0." in name]
    return {
        name.replace(".0.", "."): torch.stack([saved[name.replace(".0.", f".{layer}.")] for layer in range(2)])
        for name in firsts
    }


CASES: dict[str, tuple[Callable[[Run, int], None], bool, Callable[[Tensors], Tensors]]] = {
    "torchtitan": (lambda run, layer: plain(run, layer, TITAN), False, dict),
    "torchtune": (lambda run, layer: plain(run, layer, TUNE), False, lambda saved: {"model": saved}),
    "torchtune, DoRA": (lambda run, layer: plain(run, layer, TUNE), True, dict),
    "Megatron": (fused, False, dict),
    "Megatron, DoRA": (fused, True, dict),
    "Megatron, stacked": (fused, True, stacked),
    "Megatron, canonical": (canonical, False, dict),
}


def world(path: Path, name: str, **sizes: int) -> tuple[torch.nn.Module, Run]:
    adapt, is_dora, form = CASES[name]
    torch.manual_seed(0)
    model = toys.build("llama", **{"num_attention_heads": HEADS, "num_key_value_heads": GROUPS} | sizes).eval()
    with warnings.catch_warnings(action="ignore"):
        model.save_pretrained(path / "base")
    run = Run(model, is_dora=is_dora)
    for layer in range(2):
        adapt(run, layer)
    save_dcp(form(run.saved), path / "dcp")
    return model, run


QUICK = ("torchtune, DoRA", "Megatron, stacked")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in CASES])
def test_a_trainer_s_lora_does_in_peft_and_merged_what_it_did_there(name: str, tmp_path: Path) -> None:
    from peft import PeftModel

    model, run = world(tmp_path, name)
    alpha = SCALE * RANK
    result = api.export_lora(tmp_path / "dcp", tmp_path / "out", alpha=alpha, base=tmp_path / "base", strict=True)
    assert not result.assumed
    trained = copy.deepcopy(model)
    trained.load_state_dict(run.wanted)
    with warnings.catch_warnings(action="ignore"):
        loaded = PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "out").eval()
    with torch.no_grad():
        assert (loaded(TEXT).logits - trained(TEXT).logits).abs().max() <= 1e-5
        assert (loaded(TEXT).logits - model(TEXT).logits).abs().max() > 0.1
    assert api.check_lora(tmp_path / "out", base=tmp_path / "base").verdict == "loads"
    api.merge_lora(tmp_path / "base", tmp_path / "dcp", tmp_path / "merged", alpha=alpha)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert max((merged[each] - run.wanted[each]).abs().max() for each in merged) <= 1e-6
    checked = api.check_lora(tmp_path / "dcp", base=tmp_path / "base")
    assert checked.verdict == "unknown"
    assert "model.layers.*.mlp.down_proj" in checked.targets


def broken(path: Path) -> Iterator[tuple[str, Path, str]]:
    """Yield (case, base, what is said) of what cannot be converted."""
    shutil.copytree(path / "base", path / "bare", ignore=shutil.ignore_patterns("config.json"))
    yield "no config", path / "bare", "cannot map them"
    for case, fields, what in (
        ("another model", {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "type gpt2"),
        ("other heads", {"num_attention_heads": 3}, "rows"),
        ("no heads", {"num_key_value_heads": None}, "num_key_value_heads"),
    ):
        base = shutil.copytree(path / "base", path / case)
        config = json.loads((base / "config.json").read_text()) | fields
        (base / "config.json").write_text(json.dumps(config))
        yield case, base, what


@pytest.mark.full
@pytest.mark.parametrize("name", ["torchtitan", "Megatron", "Megatron, canonical"])
def test_a_base_that_does_not_tell_the_rows_is_refused(name: str, tmp_path: Path) -> None:
    world(tmp_path, name)
    for case, base, what in broken(tmp_path):
        for do in (
            lambda base: api.export_lora(tmp_path / "dcp", tmp_path / "out", alpha=6, base=base),
            lambda base: api.merge_lora(base, tmp_path / "dcp", tmp_path / "out", alpha=6),
        ):
            with pytest.raises(UsageError, match=what):
                do(base)
            assert not (tmp_path / "out").exists(), case


def test_half_a_pair_and_experts_that_share_one_lora_are_refused(tmp_path: Path) -> None:
    _, run = world(tmp_path, "Megatron")
    first = next(iter(run.saved))
    save_dcp({name: tensor for name, tensor in run.saved.items() if name != first}, tmp_path / "half")
    shared = {re.sub("mlp.linear", "mlp.experts.linear", name): tensor for name, tensor in run.saved.items()}
    save_dcp(shared, tmp_path / "experts")
    for source, what in (("half", "has only B"), ("experts", "cannot map them")):
        with pytest.raises(UsageError, match=what):
            api.export_lora(tmp_path / source, tmp_path / "out", alpha=6, base=tmp_path / "base")


def test_names_of_other_models_with_a_linear_in_are_no_lora(tmp_path: Path) -> None:
    save_dcp({"blocks.0.ff.linear_in.weight": torch.ones(4, 2), "blocks.0.ff.lora_A.weight": torch.ones(2, 4),
              "blocks.0.ff.lora_B.weight": torch.ones(4, 2)}, tmp_path / "dcp")  # fmt: skip
    with read_adapter(str(tmp_path / "dcp")) as (_, adapter):
        assert adapter.convention == "peft"


@pytest.mark.full
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_torchtune_s_names_of_weights_go_both_ways(kind: str, tmp_path: Path) -> None:
    model = toys.build(kind)
    with warnings.catch_warnings(action="ignore"):
        model.save_pretrained(tmp_path / "base")
    base, there, back = (str(tmp_path / each) for each in ("base", "dcp", "back"))
    assert main(["shard", base, there, "--mesh", "dp_shard=2", "--names", "torchtune", "-q"]) == 0
    names = dcp.FileSystemReader(there).read_metadata().state_dict_metadata.keys()
    assert {"layers.0.attn.output_proj.weight", "layers.1.mlp_norm.scale", "norm.scale"} <= names
    assert main(["gather", there, back, "--assets", base, "-q"]) == 0
    old, new = load_file(f"{base}/model.safetensors"), load_file(f"{back}/model.safetensors")
    assert old.keys() == new.keys()
    assert all(torch.equal(old[name], new[name]) for name in old)
