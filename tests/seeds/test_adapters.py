"""Adapters before sharding: equal start values on meta and off it, the base under its own names, and refusals."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from seeds import ditty_model as small
from torch.distributed.device_mesh import init_device_mesh

from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.fsdp2 import adapter_state, add_lora, finish_adapters, load_base, quantise_linears, shard_model
from ckpt_tools.fsdp2.wrap import find_styles

TARGETS = ["a", "b"]


def on_meta():
    with torch.device("meta"):
        return small.Ditty()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = tmp_path_factory.mktemp("base") / "model.safetensors"
    save_file(small.build().state_dict(), path)
    return path


@pytest.mark.parametrize(
    "config",
    [
        {"peft_type": "LORA", "r": 4},
        {"peft_type": "LORA", "r": 4, "init_lora_weights": "gaussian", "use_rslora": True},
        {"peft_type": "LORA", "r": 4, "use_dora": True},
        {"peft_type": "LOHA", "r": 4},
        {"peft_type": "LOKR", "r": 1, "decompose_both": True, "init_weights": "lycoris"},
    ],
    ids=["lora", "gaussian", "dora", "loha", "lokr"],
)
def test_adapter_on_meta_starts_as_the_one_on_the_cpu(base, config):
    config = config | {"target_modules": TARGETS}
    real = add_lora(small.build(), config, seed=7)
    drawn = torch.random.get_rng_state()
    late = add_lora(on_meta(), config, seed=7)
    assert torch.equal(torch.random.get_rng_state(), drawn)
    report = load_base(late, base)
    assert report.missing == ()
    expected = real.state_dict()
    for name, tensor in late.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    other = add_lora(on_meta(), config, seed=8).state_dict()
    assert any(not torch.equal(expected[name], tensor) for name, tensor in other.items() if not tensor.is_meta)


def test_adapter_with_modules_trained_whole_loads_both_copies(base):
    config = {"peft_type": "LORA", "r": 4, "target_modules": TARGETS, "modules_to_save": ["bridge"]}
    model = add_lora(on_meta(), config)
    load_base(model, base)
    bridge = small.build().bridge.weight
    wrapper = model.get_base_model().bridge
    assert torch.equal(wrapper.original_module.weight, bridge)
    assert torch.equal(wrapper.modules_to_save["default"].weight, bridge)
    assert wrapper.modules_to_save["default"].weight.requires_grad
    torch.testing.assert_close(model(small.batch(0)), small.build()(small.batch(0)), rtol=0, atol=0)


def test_adapter_of_an_incomplete_base_is_refused_by_the_base_s_names(base, tmp_path):
    state = load_file(base)
    del state["encoder.0.a.weight"]
    save_file(state | {"extra": torch.zeros(1)}, tmp_path / "model.safetensors")
    model = add_lora(on_meta(), {"peft_type": "LORA", "r": 4, "target_modules": TARGETS})
    with pytest.raises(UnreadableError, match=r"1 missing: encoder\.0\.a\.base_layer\.weight; 1 unexpected: extra"):
        load_base(model, tmp_path / "model.safetensors")


def config_of(**changes):
    return {"peft_type": "LORA", "r": 4, "target_modules": TARGETS} | changes


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (config_of(init_lora_weights="pissa"), "the initialisation 'pissa' needs the base weights"),
        (config_of(peft_type="IA3", r=None), "rejects this configuration"),
        (
            {"peft_type": "IA3", "target_modules": TARGETS, "feedforward_modules": []},
            "initial values for IA3 are not supported",
        ),
        (config_of(peft_type="LORAX"), "peft_type is 'LORAX', which peft does not support"),
        ({"r": 4}, "peft_type is None"),
        (config_of(rank=4), "rejects this configuration"),
        (config_of(target_modules=["nowhere"]), "the adapter cannot be added: "),
    ],
)
def test_add_lora_that_cannot_be_meant_is_refused(config, what):
    with pytest.raises(UsageError) as caught:
        add_lora(on_meta(), config)
    assert what in caught.value.what


@pytest.fixture
def one_rank(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))
    torch.distributed.destroy_process_group()


def test_adapter_in_the_wrong_order_is_refused(one_rank, base):
    model = on_meta()
    shard_model(model, one_rank, blocks="ResidualBlock")
    with pytest.raises(UsageError, match="the model is already sharded") as caught:
        add_lora(model, config_of())
    assert caught.value.hint == "call add_lora before shard_model"
    with pytest.raises(UsageError, match="the model is already sharded"):
        quantise_linears(model)
    with pytest.raises(UsageError, match="has no adapters"):
        load_base(model, base)
    adapted = add_lora(on_meta(), config_of(use_dora=True))
    with pytest.raises(UsageError, match="still on the meta device"):
        finish_adapters(adapted)
    with pytest.raises(UsageError, match="already has adapters"):
        quantise_linears(adapted)
    with pytest.raises(UsageError, match="no adapter 'other'"):
        adapter_state(adapted, adapter_name="other")


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft 0.21 reads it
def test_adapter_hides_the_model_s_own_tp_plan_and_that_is_said():
    from seeds import test_openrlhf
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(test_openrlhf.config())
    assert find_styles(model, "auto")
    adapted = add_lora(model, {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]})
    with pytest.raises(UsageError, match="matches none of its modules"):
        find_styles(adapted, "auto")
