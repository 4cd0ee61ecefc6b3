"""Meta's names of llama: the permutation of transformers' conversion script, and whole walks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import toys
from names.keymaps import Tensors, assert_same, backward, forward
from safetensors.torch import load_file

from ckpt_tools.checkpoint.names.keymap import KeyMap, load_key_maps, parse_key_maps
from ckpt_tools.cli import main
from ckpt_tools.models import conventions

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
MAPS = load_key_maps("meta")


def sliced(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """`permute` of convert_llama_weights_to_hf.py (transformers 4.46)."""
    rows, width = weight.shape
    return weight.view(heads, rows // heads // 2, 2, width).transpose(1, 2).reshape(rows, width)


def hub_of(meta: Tensors) -> Tensors:
    """What the script makes of Meta's tensors."""
    made = {
        "model.embed_tokens.weight": meta["tok_embeddings.weight"],
        "model.norm.weight": meta["norm.weight"],
        "lm_head.weight": meta["output.weight"],
    }
    for layer in range(2):
        theirs, ours = f"layers.{layer}.", f"model.layers.{layer}."
        for name, heads in (("q", 4), ("k", 2)):
            made[f"{ours}self_attn.{name}_proj.weight"] = sliced(meta[f"{theirs}attention.w{name}.weight"], heads)
        for name in "vo":
            made[f"{ours}self_attn.{name}_proj.weight"] = meta[f"{theirs}attention.w{name}.weight"]
        for name, other in (("w1", "gate"), ("w2", "down"), ("w3", "up")):
            made[f"{ours}mlp.{other}_proj.weight"] = meta[f"{theirs}feed_forward.{name}.weight"]
        made[f"{ours}input_layernorm.weight"] = meta[f"{theirs}attention_norm.weight"]
        made[f"{ours}post_attention_layernorm.weight"] = meta[f"{theirs}ffn_norm.weight"]
    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> tuple[Path, Tensors, Tensors]:
    """(directory on the hub, its tensors, Meta's)"""
    directory = tmp_path_factory.mktemp("hub") / "llama"
    toys.save("llama", directory)
    hub = load_file(directory / "model.safetensors")
    return directory, hub, forward(MAPS["llama"], hub, toys.config_of("llama").to_dict())


def test_names_are_those_that_the_script_makes_the_hub_s_of(model) -> None:
    _, hub, meta = model
    assert_same(hub_of(meta), hub)
    assert_same(backward(MAPS["llama"], meta, toys.config_of("llama").to_dict()), hub)


def test_sharded_by_meta_s_names_comes_back(model, tmp_path) -> None:
    directory, _, meta = model
    made, back = str(tmp_path / "dcp"), tmp_path / "back"
    assert main(["shard", str(directory), made, "--mesh", "dp_shard=2", "--names", "meta", "-q"]) == 0
    state = {name: torch.zeros_like(tensor) for name, tensor in meta.items()}
    dcp.load(state, checkpoint_id=made)
    assert_same(state, meta)
    assert main(["verify", made, "--against", str(directory), "-q"]) == 0
    assert main(["gather", made, str(back), "-q"]) == 0
    assert (back / "model.safetensors").read_bytes() == (directory / "model.safetensors").read_bytes()


def test_what_is_computed_is_left_out_and_said(model, tmp_path, capsys) -> None:
    """torchtitan's old names are the same, and mean the same: nobody is asked."""
    directory, hub, meta = model
    dcp.save(meta, checkpoint_id=tmp_path / "one")
    dcp.save({**meta, "rope.freqs": torch.ones(4)}, checkpoint_id=tmp_path / "two")
    for name, said in (("one", False), ("two", True)):
        out = tmp_path / f"hf-{name}"
        assert main(["gather", str(tmp_path / name), str(out), "--assets", str(directory)]) == 0
        assert ("left out rope.freqs, which the model computes" in capsys.readouterr().err) is said
        assert_same(load_file(out / "model.safetensors"), hub)


@pytest.fixture
def other_meta(monkeypatch) -> None:
    """A map of the same names that means other rows."""
    text = (Path(conventions.__file__).parents[1] / "checkpoint" / "names" / "meta.txt").read_text()
    other = parse_key_maps(text.replace(" : rope num_attention_heads", ""), where="meta.txt")

    def load(name: str) -> dict[str, KeyMap]:
        return dict(other if name == "meta" else load_key_maps(name))

    monkeypatch.setattr(conventions, "load_key_maps", load)


@pytest.mark.usefixtures("other_meta")
def test_names_that_mean_different_tensors_are_asked_for(model, tmp_path, capsys) -> None:
    directory, hub, meta = model
    dcp.save(meta, checkpoint_id=tmp_path / "step")
    args = ["gather", str(tmp_path / "step"), str(tmp_path / "hf"), "--assets", str(directory)]
    assert main(args) == 2
    error = capsys.readouterr().err
    assert "names of torchtitan and of meta" in error
    assert "--names torchtitan or --names meta" in error
    assert main([*args, "--names", "torchtitan"]) == 0
    assert_same(load_file(tmp_path / "hf" / "model.safetensors"), hub)


def test_names_that_are_said_and_are_not_there_are_refused(model, tmp_path, capsys) -> None:
    directory, _, meta = model
    dcp.save(meta, checkpoint_id=tmp_path / "step")
    args = ["gather", str(tmp_path / "step"), str(tmp_path / "hf"), "--assets", str(directory)]
    assert main([*args, "--names", "megatron"]) == 2
    assert "--names megatron: the map megatron.txt [llama] has no place for" in capsys.readouterr().err
