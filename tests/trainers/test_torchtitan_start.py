"""torchtitan's own CheckpointManager starts from what `shard --for torchtitan` wrote, with every tensor."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
import toys
from fsdp2.ranks import run_ranks
from trainers import titan_models, worlds

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]
for _needed in ("torchtitan", "torchdata", "spmd_types", "tyro"):
    pytest.importorskip(_needed, reason=f"needs {_needed}: see tests/names/test_torchtitan_own.py")


def save_gpt_oss(directory):
    import transformers

    sizes = toys.TEXT | {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 16}
    torch.manual_seed(0)
    config = transformers.GptOssConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)
    transformers.GptOssForCausalLM(config).save_pretrained(directory)


def start(_rank, _world_size, kind, directory):
    """Let torchtitan load the model alone; return what it then writes for the hub, and its biases of experts."""
    from trainers.test_torchtitan import let_torchtitan_use_cpu, llama

    let_torchtitan_use_cpu()
    from torchtitan.components.checkpoint import CheckpointManager

    save_gpt_oss(directory / "hub") if kind == "gpt-oss" else toys.save(kind, directory / "hub", **SIZES.get(kind, {}))
    worlds.run_ckpt("shard", directory / "hub", directory / "start", "--mesh", "dp_shard=2", "--for", "torchtitan")
    config = {"llama": lambda: llama().model, "qwen3-moe": titan_models.moe, "gpt-oss": titan_models.gpt_oss}[kind]()
    model = config.build()
    for tensor in model.state_dict().values():
        tensor.detach().fill_(torch.nan)
    manager = CheckpointManager.Config(enable=True, initial_load_path=str(directory / "start"))
    folder, nothing = str(directory / "run"), dict.fromkeys(("dataloader", "optimizers", "lr_schedulers", "sd_adapter"))
    assert CheckpointManager(manager, **nothing, model_parts=[model], states={}, base_folder=folder).load()
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    module = {"llama": "llama3", "qwen3-moe": "qwen3", "gpt-oss": "gpt_oss"}[kind]
    entry = import_module(f"torchtitan.models.{module}").model_registry("debugmodel")
    known = {titan_models.AXES.sub(r"\1", name) if kind == "gpt-oss" else name: t for name, t in state.items()}
    biases = {name: tensor for name, tensor in state.items() if name.endswith("expert_bias_E")}
    return entry.state_dict_adapter(config, None).to_hf(known), biases


SIZES = {"llama": worlds.SIZES}


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe", "gpt-oss"])
def test_torchtitan_s_checkpoint_manager_starts_from_what_ckpt_wrote(kind, tmp_path) -> None:
    hub, biases = run_ranks(1, start, kind, tmp_path, timeout=200)[0]
    found = titan_models.of_transformers(hub, kind)
    wanted = worlds.weights_of(tmp_path / "hub")
    assert found.keys() == wanted.keys()
    assert [name for name, tensor in wanted.items() if not tensor.equal(found[name])] == []
    assert [bias.tolist() for bias in biases.values()] == [] if kind == "llama" else [[0.0] * 4] * 2
