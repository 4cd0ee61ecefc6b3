"""By which names a smoke run finds the tensors, and whether stock `dcp.load` would: judged without ranks."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
import toys
from torch.distributed.checkpoint.api import CheckpointException

from ckpt_tools import api
from ckpt_tools.fsdp2 import load_checkpoint
from ckpt_tools.models.builtin import SmallTransformer
from ckpt_tools.preflight.smoke.blueprint import Blueprint
from ckpt_tools.preflight.smoke.checks import judge_names
from ckpt_tools.preflight.smoke.options import SmokeOptions
from ckpt_tools.preflight.smoke.setting import resolve

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
SAME = "names as in the file"
MAPPED = "names of the live Qwen3MoeForCausalLM of transformers 5."


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """The files of a model with experts."""
    path = tmp_path_factory.mktemp("names") / "hub"
    toys.save("qwen3-moe", str(path), dtype=torch.float32, num_hidden_layers=1)
    return path


def live(hub):
    model = toys.build("qwen3-moe", num_hidden_layers=1)
    load_checkpoint(model, hub)
    return model


def judged(model, source, **options):
    setting = resolve(SmokeOptions(source=str(source), **options))
    return judge_names(model, Blueprint(setting=setting, recipe=setting.recipe, source=str(source)))


def loads(model, source, nest=lambda state: state):
    """Does the guide's `dcp.load` find everything?"""
    try:
        dcp.load(nest(model.state_dict()), checkpoint_id=str(source), no_dist=True)
    except CheckpointException:
        return False
    return True


def saved(state, hub, path):
    dcp.save(state, checkpoint_id=str(path), no_dist=True)
    shutil.copy(hub / "config.json", path)
    return path


def test_files_of_the_hub_are_renamed_and_nothing_is_found(hub):
    found = judged(live(hub), hub)
    assert found.title.startswith(MAPPED)
    assert found.title.endswith(": 2 of 14 tensors are renamed, joined or split")
    assert (found.finding, found.note) == (None, "")


def test_live_names_are_those_of_the_file(hub, tmp_path):
    model = live(hub)
    api.shard(hub, tmp_path / "dcp", mesh="dp_shard=2")
    found = judged(model, tmp_path / "dcp")
    assert (found.title, found.finding, found.note) == (SAME, None, "")
    assert loads(model, tmp_path / "dcp")


@pytest.mark.full(but=["model."])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_names_of_the_hub_in_a_dcp_checkpoint_are_an_error_that_says_what_helps(hub, tmp_path, prefix):
    model, source = live(hub), tmp_path / "dcp"
    api.shard(hub, source, mesh="dp_shard=2", names="hub", prefix=prefix)
    finding = judged(model, source, mesh="dp_shard=1").finding
    assert (finding.code, finding.severity) == ("live-names", "error")
    assert finding.what == (
        "dcp.load(model.state_dict(), ...) would fail: 2 of the live model's 14 tensors are not in the checkpoint by "
        "their names: model.layers.0.mlp.experts.gate_up_proj, model.layers.0.mlp.experts.down_proj"
    )
    assert f"`ckpt reshard {source} DST --mesh dp_shard=1 --names live`" in finding.hint
    assert not loads(model, source)
    api.reshard(source, tmp_path / "live", mesh="dp_shard=1", names="live")
    assert judged(model, tmp_path / "live").finding is None


def test_other_shapes_are_an_error(hub, tmp_path):
    model = live(hub)
    state = dict(model.state_dict())
    name = "model.norm.weight"
    state[name] = state[name][None]
    finding = judged(model, saved(state, hub, tmp_path / "dcp")).finding
    assert f"1 of the live model's 14 tensors are not in the checkpoint in their shapes: {name}" in finding.what
    assert finding.hint.startswith("load with ckpt_tools.fsdp2.load_checkpoint")
    assert not loads(model, tmp_path / "dcp")


def test_names_that_from_pretrained_completes_are_an_error_for_dcp(hub, tmp_path):
    model = live(hub)
    state = {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}
    found = judged(model, saved(state, hub, tmp_path / "dcp"))
    assert found.title.startswith(MAPPED)
    assert found.finding.code == "live-names"
    assert not loads(model, tmp_path / "dcp")


@pytest.mark.parametrize(
    ("prefix", "nest", "note"),
    [
        (
            "model.",
            lambda state: {"model": state},
            "below 'model.': dcp.load finds them in a state dict nested",
        ),
        ("state.model.", lambda state: {"state": {"model": state}}, "below 'state.model.': dcp.load finds them in a"),
        ("_orig_mod.", lambda state: {f"_orig_mod.{name}": one for name, one in state.items()}, "wrapper prefixes"),
        ("module._orig_mod.", lambda state: {"module": {f"_orig_mod.{n}": t for n, t in state.items()}}, "wrapper"),
    ],
)
def test_names_that_a_script_may_nest_or_wrap_are_a_note(hub, tmp_path, prefix, nest, note):
    model = live(hub)
    source = saved(nest(model.state_dict()), hub, tmp_path / "dcp")
    found = judged(model, source)
    assert found.title.startswith(f"{SAME}, ")
    assert found.title.endswith(f" ({prefix}model.embed_tokens.weight is model.embed_tokens.weight)")
    assert found.finding is None
    assert note in found.note
    assert loads(model, source, nest)
    assert not loads(model, source)


def test_another_root_of_a_model_that_nobody_knows_is_an_error(tmp_path):
    model = SmallTransformer()
    state = {f"inner.{name}": tensor for name, tensor in model.state_dict().items()}
    dcp.save(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    found = judged(model, tmp_path / "dcp", factory="ckpt_tools.models.builtin:SmallTransformer")
    assert found.finding.code == "live-names"
    assert found.finding.hint.startswith("load with ckpt_tools.fsdp2.load_checkpoint")
    assert not loads(model, tmp_path / "dcp")


def test_tied_name_that_is_not_there_is_an_error(tmp_path):
    toys.save("llama", str(tmp_path / "hub"), dtype=torch.float32, num_hidden_layers=1, tie_word_embeddings=True)
    assert json.loads((tmp_path / "hub" / "config.json").read_text())["tie_word_embeddings"]
    model = toys.build("llama", num_hidden_layers=1, tie_word_embeddings=True)
    api.shard(tmp_path / "hub", tmp_path / "dcp", mesh="dp_shard=2", names="hub")
    found = judged(model, tmp_path / "dcp")
    assert found.title == SAME
    assert "lm_head.weight" in found.finding.what
    assert not loads(model, tmp_path / "dcp")
