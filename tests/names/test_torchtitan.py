"""torchtitan's names: what its own adapters make of the hub's tensors, in formulas, and every spelling back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import toys
from safetensors.torch import load_file, save_file

from ckpt_tools.checkpoint.names.keymap import parse_key_maps
from ckpt_tools.cli import main
from ckpt_tools.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
EARLIER = (
    ("attention.qkv_linear.w", "attention.w"), ("lm_head.weight", "output.weight"),
    ("moe.routed_experts.inner_experts.", "moe.experts."), ("w1_EFD", "w1"), ("w2_EDF", "w2"), ("w3_EFD", "w3"),
)  # fmt: skip


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a head's first and second half in turn: what complex rotary embeddings take."""
    dim, width = weight.shape
    return weight.view(heads, 2, dim // heads // 2, width).transpose(1, 2).reshape(dim, width)


def expected_of(hub: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """The tensors as torchtitan's state_dict_adapter makes them, written out."""
    made = {
        "tok_embeddings.weight": hub["model.embed_tokens.weight"],
        "norm.weight": hub["model.norm.weight"],
        "lm_head.weight": hub.get("lm_head.weight", hub["model.embed_tokens.weight"]),
    }
    for layer in range(2):
        theirs, ours = f"layers.{layer}.", f"model.layers.{layer}."
        for name, heads in (("q", 4), ("k", 2), ("v", None)):
            weight = hub[f"{ours}self_attn.{name}_proj.weight"]
            turned = weight if kind != "llama" or heads is None else interleaved(weight, heads)
            made[f"{theirs}attention.qkv_linear.w{name}.weight"] = turned
        made[f"{theirs}attention.wo.weight"] = hub[f"{ours}self_attn.o_proj.weight"]
        made[f"{theirs}attention_norm.weight"] = hub[f"{ours}input_layernorm.weight"]
        made[f"{theirs}ffn_norm.weight"] = hub[f"{ours}post_attention_layernorm.weight"]
        if kind == "llama":
            for name, other in (("w1", "gate"), ("w3", "up"), ("w2", "down")):
                made[f"{theirs}feed_forward.{name}.weight"] = hub[f"{ours}mlp.{other}_proj.weight"]
            continue
        for name in ("q_norm", "k_norm"):
            made[f"{theirs}attention.{name}.weight"] = hub[f"{ours}self_attn.{name}.weight"]
        made[f"{theirs}moe.expert_bias_E"] = torch.zeros(4)  # as torchtitan begins
        made[f"{theirs}moe.router.gate.weight"] = hub[f"{ours}mlp.gate.weight"]
        for name, other in (("w1_EFD", "gate"), ("w3_EFD", "up"), ("w2_EDF", "down")):
            experts = [hub[f"{ours}mlp.experts.{expert}.{other}_proj.weight"] for expert in range(4)]
            made[f"{theirs}moe.routed_experts.inner_experts.{name}"] = torch.stack(experts)
    return made


@pytest.fixture(scope="module", params=["llama", "llama-tied", "qwen3-moe"])
def model(request, tmp_path_factory):
    """(directory on the hub, its tensors, torchtitan's)"""
    kind = request.param.removesuffix("-tied")
    directory = tmp_path_factory.mktemp("hub") / request.param
    toys.build(kind, tie_word_embeddings=request.param == "llama-tied").save_pretrained(directory)
    hub = load_file(directory / "model.safetensors")
    return directory, hub, expected_of(hub, kind)


@pytest.mark.full(but=["llama-tied", "qwen3-moe"])
def test_sharded_for_torchtitan_is_what_its_adapter_makes_and_comes_back(model, tmp_path) -> None:
    directory, _, expected = model
    args = ["shard", str(directory), str(tmp_path / "dcp"), "--mesh", "dp_shard=2", "--names", "torchtitan", "-q"]
    assert main(args) == 0
    state = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    assert [name for name, tensor in expected.items() if not torch.equal(tensor, state[name])] == []
    assert main(["gather", str(tmp_path / "dcp"), str(tmp_path / "back"), "-q"]) == 0
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (directory / "model.safetensors").read_bytes()


@pytest.mark.full(but=["llama-tied-earlier", "qwen3-moe-earlier"])
@pytest.mark.parametrize("era", ["now", "earlier"])
def test_trained_by_torchtitan_gathers_to_the_hub_s_names(model, tmp_path, era) -> None:
    directory, hub, expected = model
    state = dict(expected)
    for new, old in EARLIER if era == "earlier" else ():
        state = {name.replace(new, old): tensor for name, tensor in state.items()}
    dcp.save({"model": state}, checkpoint_id=tmp_path / "step-10")
    assert main(["gather", str(tmp_path / "step-10"), str(tmp_path / "hf"), "--assets", str(directory), "-q"]) == 0
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert found.keys() == hub.keys()
    assert [name for name, tensor in hub.items() if not torch.equal(tensor, found[name])] == []


def test_trained_by_torchtitan_without_a_config_is_warned_of(model, tmp_path, capsys) -> None:
    _, _, expected = model
    dcp.save(dict(expected), checkpoint_id=tmp_path / "step-10")
    assert main(["gather", str(tmp_path / "step-10"), str(tmp_path / "hf")]) == 0
    assert "the names are torchtitan's" in capsys.readouterr().err
    assert load_file(tmp_path / "hf" / "model.safetensors").keys() == expected.keys()


def test_model_without_a_map_is_refused_with_those_that_there_are(tmp_path, capsys) -> None:
    toys.build("gpt2").save_pretrained(tmp_path / "hub")
    args = ["shard", str(tmp_path / "hub"), str(tmp_path / "dcp"), "--mesh", "dp_shard=2", "--names", "torchtitan"]
    assert main(args) == 2
    assert (
        "no map of torchtitan for gpt2: there are deepseek_v3, FluxTransformer2DModel, gpt_oss"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a = b", "start the map with a section"),
        ("[x]\na b", "an invalid line"),
        ("[x]\na = b : turn", "not an operation"),
        ("[x]\na = b : rope", "not an operation"),
        ("[x]\na = b.*", "do not match each other"),
        ("[x]\na.* = b.{*+k}", "do not match each other"),
        ("[x]\na = b.+", "do not match each other"),
        ("[x]\na, b = c", "do not match each other"),
        ("[x]\na, b = c : qkv 1 1", "not an operation on 2 tensors"),
        ("[x]\na = b\nc = b", "cannot be reversed"),
        ("[x]\na = b\na = c", "cannot be reversed"),
        ("[x]\n[x]", "two sections"),
    ],
)
def test_map_that_cannot_be_turned_round_is_refused(text: str, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        parse_key_maps(text, where="file")


def test_fused_rows_of_groups_lead_back() -> None:
    from ckpt_tools.checkpoint.dtypes import BY_NAME
    from ckpt_tools.checkpoint.names.mosaic import invert, whole

    maps = parse_key_maps("[*]\nl.*.q, l.*.k, l.*.v = x.*.qkv : qkv num_attention_heads 2", where="file")
    shapes = {"l.0.q": (16, 3), "l.0.k": (8, 3), "l.0.v": (8, 3)}
    tensors = {name: whole(name, BY_NAME["F32"], shape) for name, shape in shapes.items()}
    made = maps["*"].forward(tensors, {"num_attention_heads": 4}).mosaics
    first = [(piece.source, piece.box.offsets[0], piece.box.sizes[0]) for piece in made["x.0.qkv"].pieces]
    group = [("l.0.q", 0, 8), ("l.0.k", 8, 4), ("l.0.v", 12, 4)]
    assert first == [*group, *((name, 16 + start, rows) for name, start, rows in group)]
    fused = {"x.0.qkv": whole("x.0.qkv", BY_NAME["F32"], (32, 3))}
    back = maps["*"].backward(fused, {"num_attention_heads": 4}).mosaics
    turned, _ = invert(made, shapes)
    for name in shapes:
        assert {(p.box, p.starts) for p in back[name].pieces} == {(p.box, p.starts) for p in turned[name].pieces}


def test_names_that_have_no_line_and_lines_that_lack_a_name_are_said() -> None:
    from ckpt_tools.checkpoint.dtypes import BY_NAME
    from ckpt_tools.checkpoint.names.mosaic import whole

    maps = parse_key_maps("[*]\nl.*.e.+.w = x.*.w", where="/maps/mine.txt")

    def tensors(*names: str):
        return {name: whole(name, BY_NAME["F32"], (2, 2)) for name in names}

    with pytest.raises(UsageError, match=r"the map mine.txt has no place for 'y'|no place for y"):
        maps["*"].forward(tensors("l.0.e.0.w", "y"), {})
    with pytest.raises(UsageError, match="without number 1"):
        maps["*"].forward(tensors("l.0.e.0.w", "l.0.e.2.w"), {})


def test_maps_of_torchtitan_are_read_whole() -> None:
    text = (Path(__file__).parents[2] / "ckpt_tools" / "checkpoint" / "names" / "torchtitan.txt").read_text()
    assert {"llama", "qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss", "llama4"} <= parse_key_maps(
        text, where="torchtitan.txt"
    ).keys()


MINE = """
[*]
model.embed_tokens.weight = wte
model.norm.weight = final.scale
lm_head.weight = out
model.layers.*.input_layernorm.weight = h.*.n1
model.layers.*.post_attention_layernorm.weight = h.*.n2
model.layers.*.self_attn.q_proj.weight, model.layers.*.self_attn.k_proj.weight, model.layers.*.self_attn.v_proj.weight = h.*.qkv : qkv num_attention_heads num_key_value_heads
model.layers.*.self_attn.o_proj.weight = h.*.o : transpose
model.layers.*.mlp.gate_proj.weight, model.layers.*.mlp.up_proj.weight = h.*.fc1 : cat 0
model.layers.*.mlp.down_proj.weight = h.*.fc2
"""  # noqa: E501 - a line of the map


def test_map_of_one_s_own_goes_both_ways(tmp_path, capsys) -> None:
    toys.build("llama").save_pretrained(tmp_path / "hub")
    (tmp_path / "mine.txt").write_text(MINE)
    hub, dcp_, own = str(tmp_path / "hub"), str(tmp_path / "dcp"), str(tmp_path / "mine.txt")
    assert main(["shard", hub, dcp_, "--mesh", "dp_shard=2,tp=2", "--map", own, "-q"]) == 0
    tensors = load_file(tmp_path / "hub" / "model.safetensors")
    attention = [tensors[f"model.layers.1.self_attn.{name}_proj.weight"].chunk(2) for name in "qkv"]
    state = {"h.1.qkv": torch.zeros(64, 32), "h.1.o": torch.zeros(32, 32), "h.0.fc1": torch.zeros(128, 32)}
    dcp.load(state, checkpoint_id=dcp_)
    assert torch.equal(state["h.1.qkv"], torch.cat([part for group in zip(*attention, strict=True) for part in group]))
    assert torch.equal(state["h.1.o"], tensors["model.layers.1.self_attn.o_proj.weight"].T)
    both = [tensors[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(state["h.0.fc1"], torch.cat(both))
    assert main(["gather", dcp_, str(tmp_path / "back"), "-q"]) == 2
    assert "--map FILE" in capsys.readouterr().err
    assert main(["gather", dcp_, str(tmp_path / "back"), "--map", own, "-q"]) == 0
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (
        tmp_path / "hub" / "model.safetensors"
    ).read_bytes()
    (tmp_path / "dcp" / "ckpt_manifest.json").unlink()
    assert main(["gather", dcp_, str(tmp_path / "out"), "--map", own, "--assets", hub, "-q"]) == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in found.items())


SHAPES = """
[*]
emb = wte : pad 6 8
kv = kv : repeat 2 4
conv = linear : flatten 1 3 2 2
heads = flat : transpose; unflatten 0 rest 2
"""


def test_map_that_pads_repeats_and_reshapes_goes_both_ways(tmp_path, capsys) -> None:
    made = torch.Generator().manual_seed(1)
    shapes = {"emb": (6, 4), "kv": (4, 4), "conv": (4, 3, 2, 2), "heads": (4, 6)}
    hub = {name: torch.randn(*shape, generator=made) for name, shape in shapes.items()}
    save_file(hub, tmp_path / "hub.safetensors")
    (tmp_path / "mine.txt").write_text(SHAPES)
    own, file, dcp_ = (str(tmp_path / name) for name in ("mine.txt", "hub.safetensors", "dcp"))
    cut = ["--mesh", "dp_shard=2,tp=2", "--set", "linear=tp:S(1)"]
    assert main(["shard", file, dcp_, *cut, "--map", own, "-q"]) == 0
    wanted = {
        "wte": torch.cat([hub["emb"], hub["emb"][5:], hub["emb"][5:]]),
        "kv": hub["kv"][[0, 1, 0, 1, 2, 3, 2, 3]],
        "linear": hub["conv"].reshape(4, 12),
        "flat": hub["heads"].T.reshape(3, 2, 4),
    }
    state = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    dcp.load(state, checkpoint_id=dcp_)
    assert all(torch.equal(tensor, state[name]) for name, tensor in wanted.items())
    assert main(["gather", dcp_, str(tmp_path / "back"), "--map", own, "-q"]) == 0
    assert (tmp_path / "back" / "hub.safetensors").read_bytes() == (tmp_path / "hub.safetensors").read_bytes()

    def gather(tensors: dict[str, torch.Tensor], name: str) -> int:
        dcp.save(tensors, checkpoint_id=str(tmp_path / name), no_dist=True)
        out = str(tmp_path / f"{name}-out")
        return main(["gather", str(tmp_path / name), out, "--map", own])

    assert gather(wanted, "trained") == 0
    found = load_file(tmp_path / "trained-out" / "model.safetensors")
    assert found.keys() == hub.keys()
    assert all(torch.equal(hub[name], tensor) for name, tensor in found.items())
    assert "2 rows of padding of wte" in capsys.readouterr().err
    wanted["kv"][3] += 1
    assert gather(wanted, "apart") == 2
    assert "kv: copies of the same rows in the map, but they differ" in capsys.readouterr().err
    assert not (tmp_path / "apart-out").exists()


@pytest.mark.parametrize(
    ("text", "more", "what"),
    [
        (MINE, ("--names", "hub"), "--map sets the names itself"),
        ("nonsense", (), "start the map with a section"),
        ("[gpt2]\na = b", (), "no map in the file for llama"),
        ("[*]\na = b", (), "has no place for"),
        (MINE.replace("num_attention_heads", "heads_of_nobody"), (), "needs heads_of_nobody"),
    ],
)
def test_map_of_one_s_own_that_cannot_be_meant_is_refused(tmp_path, capsys, text, more, what) -> None:
    toys.build("llama").save_pretrained(tmp_path / "hub")
    (tmp_path / "mine.txt").write_text(text)
    args = ["shard", str(tmp_path / "hub"), str(tmp_path / "dcp"), "--mesh", "dp_shard=2"]
    assert main([*args, "--map", str(tmp_path / "mine.txt"), *more]) == 2
    assert what in capsys.readouterr().err
