"""An adapter in a step: found in the model's part, with what the optimizer's part tells of what was trained."""

import shutil

import pytest
import torch
from steps.toy_steps import save, state_of

from ckpt_tools import api
from ckpt_tools.adapters.read.opening import read_adapter
from ckpt_tools.checkpoint.formats.step import open_optimizer
from ckpt_tools.cli import main
from ckpt_tools.errors import UnreadableError, UsageError

ROOT = "base_model.model.model.layers.0"


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """LoRA on one projection, and a norm that was trained with it."""
    path = tmp_path_factory.mktemp("adapter") / "step"
    trained = {
        f"{ROOT}.self_attn.q_proj.lora_A.default.weight": torch.randn(2, 8),
        f"{ROOT}.self_attn.q_proj.lora_B.default.weight": torch.randn(8, 2),
        f"{ROOT}.input_layernorm.bias": torch.randn(8),
    }
    frozen = {
        f"{ROOT}.self_attn.q_proj.base_layer.weight": torch.randn(8, 8),
        f"{ROOT}.input_layernorm.weight": torch.randn(8),
    }
    save({"model": trained | frozen}, path / "pytorch_model_fsdp_0")
    moments = {fqn: {"exp_avg": tensor, "step": torch.tensor(1.0)} for fqn, tensor in trained.items()}
    save({"optimizer": {"state": moments, "param_groups": [{"lr": 0.1}]}}, path / "optimizer_0")
    return path


def test_optimizers_part_tells_what_was_trained_beside_the_adapter(step) -> None:
    with read_adapter(str(step)) as (_, adapter):
        assert sorted(module.target for module in adapter.modules) == [
            "model.layers.0.input_layernorm",
            "model.layers.0.self_attn.q_proj",
        ]
    with read_adapter(str(step / "pytorch_model_fsdp_0")) as (_, alone):
        assert len(alone.modules) == 1


def test_adapter_of_a_step_whose_optimizer_is_lost_is_read_all_the_same(step, tmp_path) -> None:
    shutil.copytree(step, tmp_path / "step")
    (tmp_path / "step" / "optimizer_0" / ".metadata").unlink()
    with read_adapter(str(tmp_path / "step")) as (_, adapter):
        assert adapter.modules


def test_export_of_a_step_says_what_it_reads(step, tmp_path, capsys) -> None:
    argv = ["export-lora", str(step), str(tmp_path / "out"), "--to", "peft", "--alpha", "4"]
    assert main([*argv, "--exclude", "**input_layernorm**"]) == 0
    assert "reads pytorch_model_fsdp_0 of accelerate's step, and not optimizer_0" in capsys.readouterr().err


def test_open_optimizer_takes_the_part_of_a_step(saved, copy_of) -> None:
    with open_optimizer(str(saved / "accelerate")) as opened:
        assert opened.checkpoint.tensors[0].fqn.startswith("optimizer.state.")
    with open_optimizer(str(saved / "last.ckpt")) as opened:
        assert any(entry.fqn.startswith("optimizer_0.") for entry in opened.checkpoint.tensors)
    with pytest.raises(UsageError, match="2 optimizers"):
        open_optimizer(str(saved / "two"))
    step = copy_of("accelerate")
    shutil.rmtree(step / "optimizer_0")
    with pytest.raises(UnreadableError, match="without optimizer_0"):
        open_optimizer(str(step))


@pytest.mark.full
def test_model_and_optimizer_load_from_one_step(saved) -> None:
    from torch import nn

    from ckpt_tools.fsdp2 import load_checkpoint, load_optimizer

    model = nn.ModuleDict(
        {
            "model": nn.ModuleDict({"embed_tokens": nn.Embedding(12, 4), "layers": nn.ModuleList([nn.ModuleDict()])}),
            "lm_head": nn.Linear(4, 12, bias=False),
        }
    )
    model["model"]["layers"][0]["up"] = nn.Linear(4, 8, bias=False)
    load_checkpoint(model, saved / "accelerate")
    optimizer = torch.optim.AdamW(model.parameters())
    load_optimizer(model, optimizer, saved / "accelerate")
    name = "model.layers.0.up.weight"
    parameter = dict(model.named_parameters())[name]
    assert torch.equal(parameter, state_of(0)[name])
    assert torch.equal(optimizer.state[parameter]["exp_avg"], state_of(100)[name])
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert api.verify(saved / "accelerate").ok
