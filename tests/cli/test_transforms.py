"""`ckpt extract` and `rename`, and `--dtype-for`: parts, names and dtypes, of safetensors and DCP."""

from __future__ import annotations

import json

import pytest
import torch
import toys
from safetensors.torch import load_file, save_file

from ckpt_tools import extract, gather, open_checkpoint, rename, reshard, shard, verify
from ckpt_tools.cli import main
from ckpt_tools.errors import UsageError

_PAIRS = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "o"}
PLAIN = [
    "[llama]",
    "model.embed_tokens.weight = tok_embeddings.weight",
    "model.norm.weight = norm.weight",
    "lm_head.weight = output.weight",
    "model.layers.*.mlp.down_proj.weight = layers.*.ffn.d.weight",
    "model.layers.*.input_layernorm.weight = layers.*.n1.weight",
    "model.layers.*.post_attention_layernorm.weight = layers.*.n2.weight",
    *(f"model.layers.*.self_attn.{hub}.weight = layers.*.attention.{own}.weight" for hub, own in _PAIRS.items()),
]
GATES = ("model.layers.*.mlp.gate_proj.weight", "model.layers.*.mlp.up_proj.weight")
MAP = "\n".join([*PLAIN, f"{', '.join(GATES)} = layers.*.ffn.gu.weight : cat 0"])
LAYERS = 3


def llama(path, *, layers: int = LAYERS) -> str:
    """Write a Llama of transformers' names, without transformers."""
    torch.manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.randn(64, 32)}
    shapes = {"q_proj": (32, 32), "k_proj": (16, 32), "v_proj": (16, 32), "o_proj": (32, 32)}
    for i in range(layers):
        for name, shape in shapes.items():
            tensors[f"model.layers.{i}.self_attn.{name}.weight"] = torch.randn(shape)
        for name, shape in {"gate_proj": (48, 32), "up_proj": (48, 32), "down_proj": (32, 48)}.items():
            tensors[f"model.layers.{i}.mlp.{name}.weight"] = torch.randn(shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{name}.weight"] = torch.randn(32)
    tensors |= {"model.norm.weight": torch.randn(32), "lm_head.weight": torch.randn(64, 32)}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": layers,
    }
    config |= {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    config |= {"layer_types": ["full_attention"] * layers, "eos_token_id": [1, 2, 3], "torch_dtype": "float32"}
    path.mkdir()
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text("{}")
    return str(path)


def same(path, expected) -> None:
    found = load_file(path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("kind", ["hf", "dcp"])
def test_first_layers_are_a_model_of_their_own(tmp_path, kind, capsys) -> None:
    source = llama(tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    if kind == "dcp":
        shard(source, str(tmp_path / "dcp"), mesh="dp_shard=2")
        source = str(tmp_path / "dcp")
    assert main(["extract", source, str(tmp_path / "out"), "--layers", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["warnings"] == []
    if kind == "hf":
        assert document["architecture"] == "LlamaForCausalLM"
    assert "the first 2 of 3 layers; config.json has new values of layer_types, num_hidden_layers" in document["notes"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["num_hidden_layers"], len(config["layer_types"]), config["eos_token_id"]) == (2, 2, [1, 2, 3])
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert verify(str(tmp_path / "out")).ok
    out = tmp_path / "out"
    if kind == "dcp":
        gather(str(out), str(tmp_path / "hf"))
        out = tmp_path / "hf"
    same(out / "model.safetensors", {name: t for name, t in tensors.items() if ".layers.2." not in name})


@pytest.mark.full
def test_layers_of_a_model_that_sees_are_those_of_its_language_model(tmp_path) -> None:
    toys.save("llava", tmp_path / "m")
    result = extract(str(tmp_path / "m"), str(tmp_path / "out"), layers=1)
    assert result.architecture == "LlavaForConditionalGeneration"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert [config[part]["num_hidden_layers"] for part in ("text_config", "vision_config")] == [1, 2]
    toys.save("t5", tmp_path / "t5")
    with pytest.raises(UsageError, match=r"2 stacks of layers: decoder\.block"):
        extract(str(tmp_path / "t5"), str(tmp_path / "no"), layers=1)


@pytest.mark.full
def test_transformers_loads_the_first_layers(tmp_path) -> None:
    import transformers

    extract(llama(tmp_path / "m"), str(tmp_path / "out"), layers=1)
    model, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    assert len(model.model.layers) == 1


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (None, {"layers": 4}, "config.json has 3"),
        ("config", {"layers": 1}, "no config.json beside the weights"),
        ("unknown", {"layers": 1}, "NoSuchModel, unknown to ckpt"),
        ("names", {"layers": 1}, r"no tensor is named model\.layers"),
        (None, {}, "nothing is selected to extract"),
        (None, {"include": ["nothing"]}, "--include nothing matches no tensor"),
    ],
)
def test_what_cannot_be_extracted_is_refused(tmp_path, change, options, message) -> None:
    source = llama(tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    if change == "config":
        path.unlink()
    elif change == "unknown":
        path.write_text(path.read_text().replace("LlamaForCausalLM", "NoSuchModel"))
    elif change == "names":
        tensors = load_file(tmp_path / "m" / "model.safetensors")
        save_file({n.replace("layers", "blocks"): t for n, t in tensors.items()}, tmp_path / "m" / "model.safetensors")
    with pytest.raises(UsageError, match=message):
        extract(source, str(tmp_path / "out"), **options)
    assert not (tmp_path / "out").exists()


def test_chosen_tensors_of_dcp_keep_ranks_and_optimizer_state(tmp_path) -> None:
    shard(llama(tmp_path / "m"), str(tmp_path / "dcp"), mesh="dp_shard=4")
    result = extract(str(tmp_path / "dcp"), str(tmp_path / "out"), include=["model.layers.1.**"], exclude=["**norm**"])
    assert result.num_tensors == 7
    found, before = open_checkpoint(tmp_path / "out"), open_checkpoint(tmp_path / "dcp")
    boxes = {entry.fqn: [chunk.box for chunk in entry.chunks] for entry in before.tensors}
    assert all([chunk.box for chunk in entry.chunks] == boxes[entry.fqn] for entry in found.tensors)
    assert found.mesh == before.mesh
    assert verify(str(tmp_path / "out")).ok


def test_names_of_a_map_are_written_and_turned_back(tmp_path, capsys) -> None:
    source = llama(tmp_path / "m")
    (tmp_path / "own.map").write_text(MAP)
    args = ["--map", str(tmp_path / "own.map"), "--json"]
    assert main(["rename", source, str(tmp_path / "own"), *args]) == 0
    document = json.loads(capsys.readouterr().out)
    assert "names were not compared with an architecture" in document["not_checked"][0]
    found, tensors = load_file(tmp_path / "own" / "model.safetensors"), load_file(tmp_path / "m" / "model.safetensors")
    both = torch.cat([tensors[name.replace("*", "1")] for name in GATES])
    assert torch.equal(found["layers.1.ffn.gu.weight"], both)
    assert torch.equal(found["layers.2.ffn.d.weight"], tensors["model.layers.2.mlp.down_proj.weight"])
    assert main(["gather", str(tmp_path / "own"), str(tmp_path / "back"), *args]) == 0
    assert json.loads(capsys.readouterr().out)["architecture"] == "LlamaForCausalLM"
    same(tmp_path / "back" / "model.safetensors", tensors)
    assert main(["rename", str(tmp_path / "own"), str(tmp_path / "no"), *args]) == 2
    assert "needs a line for every tensor" in capsys.readouterr().err


def test_renamed_dcp_keeps_its_ranks_and_a_join_is_for_reshard(tmp_path) -> None:
    shard(llama(tmp_path / "m"), str(tmp_path / "dcp"), mesh="dp_shard=2")
    lines = [*PLAIN, *(f"{name} = layers.*.ffn.{own}" for name, own in zip(GATES, "gu", strict=True))]
    (tmp_path / "plain.map").write_text("\n".join(lines))
    (tmp_path / "own.map").write_text(MAP)
    rename(str(tmp_path / "dcp"), str(tmp_path / "own"), map=str(tmp_path / "plain.map"))
    found, before = open_checkpoint(tmp_path / "own"), open_checkpoint(tmp_path / "dcp")
    assert len(found.tensors) == len(before.tensors)
    assert found.mesh == before.mesh
    assert set(found.placements["layers.0.attention.q.weight"]) == {"dp_shard"}
    assert verify(str(tmp_path / "own")).ok
    gather(str(tmp_path / "own"), str(tmp_path / "hf"), map=str(tmp_path / "plain.map"))
    same(tmp_path / "hf" / "model.safetensors", load_file(tmp_path / "m" / "model.safetensors"))
    with pytest.raises(UsageError, match="joins or splits tensors that are sharded"):
        rename(str(tmp_path / "dcp"), str(tmp_path / "no"), map=str(tmp_path / "own.map"))


def test_dtypes_by_glob_on_every_conversion(tmp_path) -> None:
    source = llama(tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    wanted = {"dtype": "f16", "dtype_for": ["**norm**=f32", "model.embed_tokens.weight=keep", "**=bf16"]}
    expected = {name: tensor.float() if "norm" in name else tensor for name, tensor in tensors.items()}
    extract(source, str(tmp_path / "hf"), exclude=["lm_head.weight"], **wanted)
    same(tmp_path / "hf" / "model.safetensors", {n: t for n, t in expected.items() if n != "lm_head.weight"})
    shard(source, str(tmp_path / "dcp"), mesh="dp_shard=2", **wanted)
    reshard(str(tmp_path / "dcp"), str(tmp_path / "other"), mesh="dp_shard=3", dtype_for=["**mlp**=f16"])
    gather(str(tmp_path / "other"), str(tmp_path / "back"), dtype_for=["**mlp**=bf16"])
    expected = {n: t.half().bfloat16() if ".mlp." in n else t for n, t in expected.items()}
    same(tmp_path / "back" / "model.safetensors", expected)


@pytest.mark.parametrize("text", ["**norm**", "=f32", "**norm**=int8", "nothing=f32"])
def test_dtype_of_no_glob_is_refused(tmp_path, text, capsys) -> None:
    source = llama(tmp_path / "m")
    assert main(["shard", source, str(tmp_path / "out"), "--mesh", "dp_shard=2", "--dtype-for", text]) == 2
    assert "--dtype-for" in capsys.readouterr().err
    assert main(["gather", source, str(tmp_path / "out"), "--dtype-for", text]) == 2
