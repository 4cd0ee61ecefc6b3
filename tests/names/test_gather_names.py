"""gather refuses names that from_pretrained would answer with random weights, and no others; it is the judge."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import toys
import transformers
from names.worlds import config_beside, loading_problems, save_live, tiny

from ckpt_tools import api
from ckpt_tools.checkpoint.formats.manifest import MANIFEST_NAME
from ckpt_tools.cli import main
from ckpt_tools.errors import UsageError

TITAN = {
    "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output", "model.layers": "layers",
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
MEGATRON = {
    "model.embed_tokens": "embedding.word_embeddings", "model.norm": "decoder.final_layernorm",
    "lm_head": "output_layer", "model.layers": "decoder.layers", "self_attn.q_proj": "self_attention.linear_qkv",
    "self_attn.o_proj": "self_attention.linear_proj", "mlp.gate_proj": "mlp.linear_fc1",
    "mlp.down_proj": "mlp.linear_fc2",
}  # fmt: skip
GGUF = {
    "model.embed_tokens": "token_embd",
    "model.layers": "blk",
    "self_attn.q_proj": "attn_q",
    "mlp.up_proj": "ffn_up",
}
NEW = torch.ones(4, 4)


def renamed(state, table):
    """Every name with its parts replaced."""
    named = {}
    for name, value in state.items():
        new_name = name
        for old, new in table.items():
            new_name = new_name.replace(old, new)
        named[new_name] = value
    return named


def adapter(state, *, whole):
    """A LoRA on the queries, beside the model or alone."""
    layers = [name for name in state if name.endswith("q_proj.weight")]
    lora = {name.replace("weight", f"lora_{half}.default.weight"): NEW for name in layers for half in "AB"}
    if not whole:
        return {f"base_model.model.{name}": value for name, value in lora.items()}
    return {name.replace("q_proj.weight", "q_proj.base_layer.weight"): value for name, value in state.items()} | lora


def without(state, pattern):
    """All but what matches."""
    return {name: value for name, value in state.items() if not re.search(pattern, name)}


WRONG = {
    "torchtitan": (lambda s: renamed(s, TITAN) | {"mtp_layers.0.enorm.weight": NEW}, "torchtitan's or Meta's"),
    "megatron": (lambda s: renamed(s, MEGATRON), "Megatron's"),
    "gguf": (lambda s: renamed(s, GGUF), "llama.cpp's"),
    "nanotron": (lambda s: renamed(s, {"self_attn.": "pp_block.attn."}), "nanotron's"),
    "adapter": (lambda s: adapter(s, whole=False), "ckpt export-lora"),
    "adapter-beside": (lambda s: adapter(s, whole=True), "ckpt merge-lora"),
    "no-head": (lambda s: without(s, "lm_head"), "lm_head.weight"),
    "no-embedding": (lambda s: without(s, "embed_tokens"), "model.embed_tokens.weight"),
    "no-norm": (lambda s: without(s, r"model\.norm"), "model.norm.weight"),
    "hole": (lambda s: without(s, r"layers\.1\."), "model.layers.*.self_attn"),
    "one-tensor": (lambda s: without(s, r"layers\.1\.mlp\.up_proj"), "1 weight is missing"),
    "no-last-layer": (lambda s: without(s, r"layers\.2\."), "num_hidden_layers = 3"),
    "another-layer": (
        lambda s: s | {n.replace(".2.", ".3."): v for n, v in s.items() if ".2." in n},
        "num_hidden_layers = 3",
    ),
    "prefix": (lambda s: {f"policy.actor.{name}": value for name, value in s.items()}, "--strip-prefix policy.actor"),
    "renamed": (lambda s: renamed(s, {"self_attn": "attn"}), "model.layers.*.attn.q_proj.weight"),
    "bert": (lambda _: tiny("BertForMaskedLM").state_dict(), "BertForMaskedLM"),
    "diffusers": (lambda _: {"transformer_blocks.0.attn.to_q.weight": NEW}, "diffusers"),
    "value-head": (lambda s: s | {"v_head.summary.weight": NEW}, "--exclude 'v_head.**'"),
    "average": (lambda s: s | {f"ema.{name}": value for name, value in s.items()}, "ema.model.embed_tokens.weight"),
    "bare": (lambda s: {n.removeprefix("model."): v for n, v in without(s, "lm_head").items()}, "lm_head.weight"),
    "half-a-bias": (lambda s: s | {"model.layers.0.self_attn.q_proj.bias": NEW[0]}, "k_proj.bias"),
}
RIGHT = {
    "live": lambda s: s,
    "without-the-prefix": lambda s: {n.removeprefix("model."): v for n, v in s.items()},
    "compiled": lambda s: {f"_orig_mod.{n}": v for n, v in s.items()},
    "old-buffers": lambda s: s | {"model.layers.0.self_attn.rotary_emb.inv_freq": NEW[0]},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A model, its state dict, and a directory with its config."""
    root = tmp_path_factory.mktemp("llama")
    model = toys.build("llama", num_hidden_layers=3)
    transformers.utils.logging.disable_progress_bar()
    return model, model.state_dict(), config_beside(model, root / "assets"), root


@pytest.mark.full(but=["megatron", "adapter", "no-head", "one-tensor", "prefix", "half-a-bias"])
@pytest.mark.parametrize("case", WRONG)
def test_names_that_load_as_random_weights_are_refused(llama, tmp_path, capsys, case):
    model, state, assets, _ = llama
    make, hint = WRONG[case]
    source = save_live(make(state), tmp_path / "dcp")
    for more in ([], ["--dry-run"]):
        assert main(["gather", source, str(tmp_path / "out"), "--assets", assets, *more]) == 2
        error = capsys.readouterr().err
        assert hint in error
        assert "--allow-foreign-names" in error
        assert not (tmp_path / "out").exists()
    if case == "half-a-bias":  # transformers has the bias or not by the config: what matters is that it is named
        return
    done = api.gather(source, tmp_path / "out", assets=assets, allow_foreign_names=True)
    assert done.warnings
    assert done.architecture is None
    assert loading_problems(type(model), tmp_path / "out")


@pytest.mark.parametrize("case", RIGHT)
def test_names_that_load_are_accepted(llama, tmp_path, case):
    model, state, assets, _ = llama
    done = api.gather(save_live(RIGHT[case](state), tmp_path / "dcp"), tmp_path / "out", assets=assets)
    assert (done.architecture, done.warnings, done.not_checked) == ("LlamaForCausalLM", (), ())
    assert not loading_problems(type(model), tmp_path / "out")


def test_a_tied_head_may_be_there_or_not(tmp_path):
    model = tiny("GPT2LMHeadModel")
    assets = config_beside(model, tmp_path / "assets")
    for state in (model.state_dict(), without(model.state_dict(), "lm_head")):
        api.gather(save_live(state, tmp_path / "dcp"), tmp_path / "out", assets=assets, overwrite=True)
        assert not loading_problems(type(model), tmp_path / "out")


def test_an_unknown_architecture_is_said_not_to_be_checked(llama, tmp_path, capsys):
    _, state, assets, _ = llama
    shutil.copytree(assets, tmp_path / "assets")
    config = json.loads((tmp_path / "assets/config.json").read_text()) | {"architectures": ["MyModel"]}
    (tmp_path / "assets/config.json").write_text(json.dumps(config))
    source = save_live(state, tmp_path / "dcp")
    assert main(["gather", source, str(tmp_path / "out"), "--assets", str(tmp_path / "assets"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["not_checked"] == ["names were not compared with MyModel: not known to ckpt"]
    assert document["architecture"] is None


def test_the_weights_beside_an_unknown_architecture_are_what_its_names_are_held_against(llama, tmp_path):
    model, state, _, _ = llama
    model.save_pretrained(tmp_path / "hf")
    config = json.loads((tmp_path / "hf/config.json").read_text()) | {"architectures": ["MyModel"]}
    (tmp_path / "hf/config.json").write_text(json.dumps(config))
    done = api.gather(save_live(state, tmp_path / "dcp"), tmp_path / "out", assets=tmp_path / "hf")
    assert "MyModel" in done.architecture
    wrong = save_live(renamed(state, TITAN), tmp_path / "wrong")
    with pytest.raises(UsageError, match="torchtitan"):
        api.gather(wrong, tmp_path / "other", assets=tmp_path / "hf")


def test_an_adapter_alone_is_called_one_without_a_config_too(llama, tmp_path):
    source = save_live(adapter(llama[1], whole=False), tmp_path / "dcp")
    with pytest.raises(UsageError, match="of an adapter") as refusal:
        api.gather(source, tmp_path / "out")
    assert "ckpt export-lora" in refusal.value.hint


@pytest.mark.full
def test_what_is_odd_in_the_original_comes_back_with_a_warning(llama, tmp_path):
    model, state, _, _ = llama
    model.save_pretrained(tmp_path / "hf", state_dict=state | {"cls.seq_relationship.weight": NEW})
    api.shard(tmp_path / "hf", tmp_path / "dcp", mesh="dp_shard=2")
    done = api.gather(tmp_path / "dcp", tmp_path / "out")
    assert "cls.seq_relationship.weight" in done.warnings[0]
    assert done.architecture is None
    name = "model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()


@pytest.mark.parametrize(
    ("model_type", "fate"), [("llama", "would be filled with random values"), ("other", "by the names of transformers")]
)
def test_random_values_are_claimed_only_where_the_installed_transformers_was_asked(llama, tmp_path, model_type, fate):
    _, state, assets, _ = llama
    config = json.loads(Path(assets, "config.json").read_text()) | {"model_type": model_type}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=f"1 weight is missing, {fate}"):
        api.gather(save_live(without(state, r"model\.norm"), tmp_path / "dcp"), tmp_path / "out", assets=tmp_path)


def test_what_is_left_out_on_purpose_is_a_warning(llama, tmp_path):
    source = save_live(llama[1], tmp_path / "dcp")
    done = api.gather(source, tmp_path / "out", assets=llama[2], exclude=["lm_head.*"])
    assert "lm_head.weight" in done.warnings[0]
    hole = save_live(without(llama[1], "model.norm"), tmp_path / "hole")
    with pytest.raises(UsageError, match=r"1 weight is missing.*model\.norm\.weight"):
        api.gather(hole, tmp_path / "other", assets=llama[2], exclude=["lm_head.*"])


def test_like_leaves_out_tied_names_that_are_byte_for_byte_another(tmp_path):
    model = tiny("T5ForConditionalGeneration")
    model.save_pretrained(tmp_path / "hf")
    done = api.gather(save_live(model.state_dict(), tmp_path / "dcp"), tmp_path / "out", like=tmp_path / "hf")
    assert sum("byte for byte" in text for text in done.notes) == 3
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "hf/model.safetensors").read_bytes()


@pytest.mark.full
def test_hints_of_restoring_name_only_what_was_given(llama, tmp_path):
    model, state, _, _ = llama
    model.save_pretrained(tmp_path / "hf")
    source = save_live(state, tmp_path / "dcp")
    with pytest.raises(UsageError, match="--like already sets") as caught:
        api.gather(source, tmp_path / "out", like=tmp_path / "hf", dtype="bf16", names="live")
    assert caught.value.hint == "leave out --dtype, --names"
    api.gather(source, tmp_path / "out", like=tmp_path / "hf")
    api.shard(tmp_path / "hf", tmp_path / "made", mesh="dp_shard=2")
    manifest = tmp_path / "made" / MANIFEST_NAME
    stale = manifest.read_bytes()
    save_live(without(state, "norm"), tmp_path / "made")
    manifest.write_bytes(stale)
    with pytest.raises(UsageError, match="does not have") as caught:
        api.gather(tmp_path / "made", tmp_path / "new")
    assert "--like" not in caught.value.hint
    manifest.unlink()
    api.gather(tmp_path / "made", tmp_path / "new", allow_foreign_names=True)


def test_names_that_nothing_is_known_of_are_said_to_be_unchecked(llama, tmp_path):
    for name, table in (("own", {"self_attn": "attn"}), ("megatron", MEGATRON)):
        torch.save(renamed(llama[1], table), tmp_path / f"{name}.pt")
        done = api.gather(tmp_path / f"{name}.pt", tmp_path / name, allow_foreign_names=True)
        assert "not compared with" in done.not_checked[0] if name == "own" else "Megatron's" in done.warnings[0]
    llama[0].save_pretrained(tmp_path / "hf")
    for name in ("own", "hf"):
        done = api.shard(tmp_path / name, tmp_path / f"dcp-{name}", mesh="dp_shard=2", names="hub")
        assert any("not known to be the hub's" in note for note in done.notes) == (name == "own")


@pytest.mark.parametrize("difference", ["one-element", "constant"])
def test_like_keeps_refusing_what_is_not_proven_to_be_tied(llama, tmp_path, difference):
    model, state, _, _ = llama
    model.save_pretrained(tmp_path / "hf")
    extra = state["lm_head.weight"].clone()
    if difference == "one-element":
        extra[-1, -1] += 1
        state = dict(state)
    else:  # every norm of a fresh model is ones: that proves nothing
        extra = torch.ones_like(state["model.norm.weight"])
    with pytest.raises(UsageError, match="has 1 that the reference does not have"):
        api.gather(save_live(state | {"other.weight": extra}, tmp_path / "dcp"), tmp_path / "out", like=tmp_path / "hf")


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_configuration_that_the_table_does_not_know_is_asked_of_transformers(tmp_path, capsys) -> None:
    """BLIP-2 with T5: the table knows it with OPT alone."""
    tiny = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    text = {"model_type": "t5", "num_layers": 1, "d_model": 32, "d_ff": 64, "num_heads": 4, "d_kv": 8, "vocab_size": 9}
    config = transformers.Blip2Config(
        vision_config=tiny | {"image_size": 32, "patch_size": 16},
        qformer_config=tiny | {"encoder_hidden_size": 32, "vocab_size": 9},
        text_config=text,
    )
    model = transformers.Blip2ForConditionalGeneration(config)
    model.save_pretrained(tmp_path / "hub")
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "run")
    args = ["gather", str(tmp_path / "run"), str(tmp_path / "out"), "--assets", str(tmp_path / "hub"), "-q"]
    assert main(args) == 0
    _, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert {what: names for what, names in info.items() if names} == {}
