"""A model under the keys that trainers put it under is the same model, in every format and every command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from formats.saved import save_ranks
from safetensors.torch import load_file
from torch.distributed.tensor import Shard

from ckpt_tools import api

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.full(but=["model-dcp"])]

State = dict[str, torch.Tensor]
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8,
    "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 8, "tie_word_embeddings": False,
}  # fmt: skip
MATRICES = [f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"]
MATRICES += [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")] + ["model.embed_tokens", "lm_head"]
NORMS = ["model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"]
NORM = "model.norm.weight"
ROOTS: dict[str, tuple[str, ...]] = {
    "plain": (), "model": ("model",), "state": ("state", "model"), "module": ("module",), "app": ("app", "model"),
    "model_state": ("model_state",), "state_dict": ("state_dict",),
}  # fmt: skip


def under(root: tuple[str, ...], state: State) -> dict[str, Any]:
    """A state dict below keys."""
    found: dict[str, Any] = state
    for key in reversed(root):
        found = {key: found}
    return found


def in_dcp(directory: Path, root: tuple[str, ...], state: State) -> Path:
    moments = {"optimizer": {"state": {NORM: {"exp_avg": torch.ones(8), "step": torch.tensor(3.0)}}}} if root else {}
    dcp.save(under(root, state) | moments, checkpoint_id=directory)
    return directory


def in_flat_dcp(directory: Path, root: tuple[str, ...], state: State) -> Path:
    prefix = "".join(f"{key}." for key in root)
    dcp.save({f"{prefix}_orig_mod.{name}": tensor for name, tensor in state.items()}, checkpoint_id=directory)
    return directory


def in_torch_file(directory: Path, root: tuple[str, ...], state: State) -> Path:
    directory.mkdir()
    torch.save(under(root, state) | ({"epoch": 1, "optimizer_states": []} if root else {}), directory / "last.pt")
    return directory / "last.pt"


def in_ranks(directory: Path, root: tuple[str, ...], state: State) -> Path:
    prefix = "".join(f"{key}." for key in root)
    save_ranks(directory, {prefix + name: t for name, t in state.items()}, {"fsdp": 2}, lambda _: [Shard(0)])
    return directory


FORMATS: dict[str, Callable[[Path, tuple[str, ...], State], Path]] = {
    "dcp": in_dcp,
    "flat-dcp": in_flat_dcp,
    "torch": in_torch_file,
    "ranks": in_ranks,
}


CASES = [(kind, root) for number, root in enumerate(ROOTS) for at, kind in enumerate(FORMATS) if (number + at) % 4 < 2]
"""Of every root two formats, of every format four or three roots: `bin/pairs` has the others."""


@pytest.mark.parametrize(("kind", "root"), CASES, ids=[f"{root}-{kind}" for kind, root in CASES])
def test_model_under_a_root_is_the_model(kind: str, root: str, tmp_path: Path) -> None:
    made = torch.Generator().manual_seed(4)
    state = {f"{name}.weight": torch.randn(8, 8, generator=made) for name in MATRICES}
    state |= {f"{name}.weight": torch.randn(8, generator=made) for name in NORMS}
    assets = tmp_path / "assets"
    assets.mkdir()
    (assets / "config.json").write_text(json.dumps(LLAMA))
    source = FORMATS[kind](tmp_path / "run", ROOTS[root], state)
    plain = tmp_path / "plain"

    done = api.gather(source, plain, assets=assets)
    found = load_file(plain / "model.safetensors")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    assert done.architecture == "LlamaForCausalLM"

    assert api.diff(plain, source)
    assert not api.diff(source, plain, include=["**.up_proj.weight"]).changed
    assert api.verify(source, against=plain)
    rows = {row.fqn for row in api.stats(plain, against=source, frozen=[NORM]).tensors}
    assert rows == state.keys()

    api.gather(source, tmp_path / "cast", assets=assets, dtype="bf16", dtype_for=[f"{NORM}=f32"])
    cast = load_file(tmp_path / "cast" / "model.safetensors")
    assert {name for name, tensor in cast.items() if tensor.dtype == torch.float32} == {NORM}
    api.gather(source, tmp_path / "part", assets=assets, include=[NORM])
    assert load_file(tmp_path / "part" / "model.safetensors").keys() == {NORM}
    api.extract(source, tmp_path / "norm", include=["**norm.weight"])

    verb = api.shard if kind == "torch" else api.reshard
    verb(source, tmp_path / "cut", mesh="dp_shard=2,tp=2", set=["**.up_proj.weight=tp:S(1)"])
    api.gather(tmp_path / "cut", tmp_path / "back", assets=assets)
    assert api.diff(tmp_path / "back", plain)
