"""Conversions that transformers does by the shapes in the model: the config says which these are."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from names.worlds import loading_problems
from safetensors.torch import load_file, save_file

from ckpt_tools.cli import main

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.full]


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
WIDTHS = {"hidden_size": 32, "intermediate_size": 64}
CONFIGS = {
    "Qwen3VLMoe": {
        "text_config": {
            **HEADS,
            **WIDTHS,
            "vocab_size": 99,
            "num_hidden_layers": 2,
            "num_experts": 4,
            "moe_intermediate_size": 24,
            "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]},
        },
        "vision_config": {
            **WIDTHS,
            "depth": 2,
            "num_heads": 4,
            "out_hidden_size": 32,
            "deepstack_visual_indexes": [0],
            "patch_size": 4,
            "num_position_embeddings": 16,
        },
    },
    "Molmo2": {
        "text_config": {**HEADS, **WIDTHS, "vocab_size": 100, "num_hidden_layers": 2, "additional_vocab_size": 4},
        "vision_config": {
            **HEADS,
            **WIDTHS,
            "num_hidden_layers": 2,
            "num_position_embeddings": 16,
            "patch_size": 8,
            "image_size": [32, 32],
        },
        "adapter_config": {**HEADS, **WIDTHS, "vision_feature_layer": [1, 0], "text_hidden_size": 32},
    },
}


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def model(request, tmp_path_factory):
    """A model, and a directory with it as its makers lay it out."""
    torch.manual_seed(0)
    config = getattr(transformers, request.param + "Config")(**CONFIGS[request.param])
    made = getattr(transformers, request.param + "ForConditionalGeneration")(config).eval()
    directory = tmp_path_factory.mktemp("hub") / request.param
    made.save_pretrained(directory)
    state = load_file(directory / "model.safetensors")
    for name in state:
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):  # saving leaves them as in the model
            assert state[name].shape[1] != state[name].shape[2]
            state[name] = state[name].transpose(1, 2).contiguous()
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    return made, directory, state


def test_released_weights_load_into_the_live_model_and_come_back(model, tmp_path) -> None:
    live, hub, _ = model
    assert main(["shard", str(hub), str(tmp_path / "dcp"), "--mesh", "dp_shard=2", "--names", "live", "-q"]) == 0
    state = {name: torch.zeros_like(tensor) for name, tensor in live.state_dict().items()}
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    assert [name for name, tensor in live.state_dict().items() if not torch.equal(tensor, state[name])] == []
    assert main(["gather", str(tmp_path / "dcp"), str(tmp_path / "back"), "-q"]) == 0
    assert (tmp_path / "back/model.safetensors").read_bytes() == (hub / "model.safetensors").read_bytes()


def test_trained_weights_are_as_the_released_ones(model, tmp_path) -> None:
    live, hub, released = model
    dcp.save({"model": live.state_dict()}, checkpoint_id=tmp_path / "run")
    assert main(["gather", str(tmp_path / "run"), str(tmp_path / "hf"), "--assets", str(hub), "-q"]) == 0
    found = load_file(tmp_path / "hf/model.safetensors")
    assert found.keys() == released.keys()
    assert [name for name, tensor in released.items() if not torch.equal(tensor, found[name])] == []
    assert loading_problems(type(live), str(tmp_path / "hf")) == {}
    loaded = type(live).from_pretrained(tmp_path / "hf").state_dict()
    assert [name for name, tensor in live.state_dict().items() if not torch.equal(tensor, loaded[name])] == []


def test_weights_in_the_released_form_stay_in_it(model, tmp_path) -> None:
    _, hub, released = model
    dcp.save(released, checkpoint_id=tmp_path / "run")
    assert main(["gather", str(tmp_path / "run"), str(tmp_path / "hf"), "--assets", str(hub), "-q"]) == 0
    found = load_file(tmp_path / "hf/model.safetensors")
    assert found.keys() == released.keys()
    assert [name for name, tensor in released.items() if not torch.equal(tensor, found[name])] == []


def test_shapes_that_the_config_does_not_say_are_refused(model, tmp_path, capsys) -> None:
    _, hub, released = model
    config = transformers.AutoConfig.from_pretrained(hub)
    config.text_config.head_dim = config.text_config.moe_intermediate_size = 7
    config.save_pretrained(tmp_path / "hub")
    save_file(released, tmp_path / "hub/model.safetensors", metadata={"format": "pt"})
    args = ["shard", str(tmp_path / "hub"), str(tmp_path / "dcp"), "--mesh", "dp_shard=2", "--names", "live"]
    assert main(args) == 2
    assert "of the model" in capsys.readouterr().err
