"""Files of ranks as the trainers' own code writes them, on gloo ranks, against what PyTorch gathers of the same state.

verl's checkpoint manager is not among what the tests install: with its package on PYTHONPATH it is imported alone, and
what it needs of the rest of verl (Ray, devices, file systems of clusters) is replaced by the lines that a CPU needs.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from formats.saved import flat, read
from fsdp2.ranks import run_ranks

from ckpt_tools import api

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]
VERL = importlib.util.find_spec("verl")


def model_of(*, tied: bool):
    """A model of transformers whose dims two and four ranks do not divide."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 20, "intermediate_size": 37, "num_hidden_layers": 2, "vocab_size": 99}
    return Qwen2ForCausalLM(
        Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=tied)
    )


def train(model, optimizer, schedule=None):
    """Train two steps; return the logits that follow."""
    tokens = torch.arange(12).reshape(2, 6)
    for _ in range(2):
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
    model.eval()
    with torch.no_grad():
        return model(input_ids=tokens).logits


def whole_of(model, optimizer):
    """What PyTorch gathers; of FSDP1 from its shards, for its full exp_avg has other values (torch 2.13 on CPUs)."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            whole = {"model": model.state_dict()}
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
        state = {name: {key: gathered(value) for key, value in inner.items()} for name, inner in state.items()}
        return whole | {"optimizer": {"state": state}}
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = {"model": get_model_state_dict(model, options=options)}
    return state | {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}


def gathered(value):
    """A tensor of all ranks, by the means of PyTorch."""
    from torch.distributed.tensor import DTensor

    if isinstance(value, DTensor):
        return value.full_tensor()
    if not hasattr(value, "local_shards"):
        return value
    whole = torch.empty(value.size(), dtype=value.dtype) if torch.distributed.get_rank() == 0 else None
    value.gather(0, whole)
    return whole


def judge(directory: Path, saved: Path, whole: Path, *, has_optimizer: bool, **options) -> None:
    """What ckpt makes of a directory is what PyTorch gathered."""
    from transformers import AutoModelForCausalLM

    expected = torch.load(whole, weights_only=False)
    assert api.verify(saved, **options).findings == ()
    api.gather(saved, directory / "hf", **options)
    assert read(directory / "hf") == flat(expected["model"])
    if (directory / "hf/config.json").exists():
        model = AutoModelForCausalLM.from_pretrained(directory / "hf").eval()
        with torch.no_grad():
            assert torch.equal(model(input_ids=torch.arange(12).reshape(2, 6)).logits, expected["logits"])
    api.reshard(saved, directory / "dcp", mesh="dp_shard=3", **options)
    found = {name: value for name, value in read(directory / "dcp").items() if name.startswith("optimizer.")}
    wanted = flat({"optimizer": {"state": expected["optimizer"]["state"]}})
    assert found == (wanted if has_optimizer else {})


# accelerate


def as_accelerate(rank, world_size, directory, mode):
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer
    from trainers.worlds import let_accelerate_use_cpu

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    let_accelerate_use_cpu()
    version, kind, *more = mode.split("-")
    own = {"use_orig_params": "orig" in more} if version == "fsdp1" else {}
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=int(version[-1]),
        auto_wrap_policy="transformer_based_wrap",
        state_dict_type=f"{kind.upper()}_STATE_DICT",
        **own,
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    model = model_of(tied=False)
    if rank == 0:
        torch.save(model.state_dict(), directory / f"{mode}-shapes.bin")
    if version == "fsdp1":  # has other parameters than the model before
        model = accelerator.prepare(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    logits = train(model, optimizer)
    inner = optimizer.optimizer
    save_fsdp_model(plugin, accelerator, model, str(directory / mode), use_dcp=False)
    save_fsdp_optimizer(plugin, accelerator, inner, model, str(directory / mode), use_dcp=False)
    whole = whole_of(model, inner)
    if rank == 0:
        torch.save({**whole, "logits": logits}, directory / f"{mode}.pt")


@pytest.mark.parametrize("mode", ["fsdp2-sharded", "fsdp1-sharded-orig", "fsdp1-sharded", "fsdp1-local-orig"])
def test_accelerate_without_dcp(mode: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="needs accelerate")
    run_ranks(2, as_accelerate, tmp_path, mode, timeout=120)
    options = {"shapes_from": tmp_path / f"{mode}-shapes.bin"} if "local" in mode else {}
    judge(tmp_path, tmp_path / mode, tmp_path / f"{mode}.pt", has_optimizer="sharded" in mode, **options)


# verl


def import_verl():
    """Return verl's own checkpoint manager."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    def stub(name: str, **what: object) -> None:
        module = sys.modules[name] = types.ModuleType(name)
        module.__path__ = []
        vars(module).update(what)

    def real(name: str):
        path = Path(VERL.submodule_search_locations[0], "..", *name.split(".")).resolve().with_suffix(".py")
        spec = importlib.util.spec_from_file_location(name, path)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def version_of(model) -> int:
        return 1 if isinstance(model, FullyShardedDataParallel) else 2

    def made(path: str) -> str:
        os.makedirs(path, exist_ok=True)
        return path

    def context(model, *args):
        return (
            FullyShardedDataParallel.state_dict_type(model, *args)
            if isinstance(model, FullyShardedDataParallel)
            else nullcontext()
        )

    for package in ("verl", "verl.utils", "verl.utils.checkpoint", "verl.trainer"):
        stub(package)
    stub("omegaconf", DictConfig=dict)
    stub("verl.trainer.config", CheckpointConfig=dict)
    stub("verl.utils.fs", copy_to_local=str, is_non_local=bool, local_mkdir_safe=made)
    stub("verl.utils.fsdp_utils", fsdp_version=version_of, get_fsdp_full_state_dict=None, get_fsdp_state_ctx=context)
    stub("verl.utils.logger", log_with_rank=lambda *_, **__: None)
    stub("verl.utils.transformers_compat", drop_tied_target_keys=None, get_auto_model_for_vision2seq=None)
    device = {"get_device_name": lambda: "cpu", "get_torch_device": lambda: torch, "is_device_available": lambda: False}
    stub("verl.utils.device", is_cuda_available=False, **device)
    real("verl.utils.checkpoint.checkpoint_manager")
    return real("verl.utils.checkpoint.fsdp_checkpoint_manager").FSDPCheckpointManager


def shared(model, version, sizes):
    """A model as verl shares it on a mesh."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    layers = model.model.layers
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if version == 2:
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return FullyShardedDataParallel(
        model,
        device_mesh=mesh,
        device_id=torch.device("cpu"),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD if len(sizes) > 1 else ShardingStrategy.FULL_SHARD,
        auto_wrap_policy=ModuleWrapPolicy({type(layers[0])}),
    )


def as_verl(rank, world_size, directory, version):
    manager = import_verl()
    model = shared(model_of(tied=world_size == 2), version, {2: {"fsdp": 2}, 4: {"ddp": 2, "fsdp": 2}}[world_size])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    logits = train(model, optimizer, schedule)
    own = manager(model, optimizer, schedule, checkpoint_config={})
    own.save_checkpoint(str(directory / "global_step_2/actor"), global_step=2)
    whole = whole_of(model, optimizer)
    if rank == 0:
        torch.save({**whole, "logits": logits}, directory / "whole.pt")


@pytest.mark.skipif(VERL is None, reason="needs verl: pip install --no-deps --target DIR verl, and PYTHONPATH=DIR")
@pytest.mark.parametrize(("world_size", "version"), [(2, 2), (4, 2), (2, 1), (4, 1)])
def test_verls_own_checkpoint_manager(world_size: int, version: int, tmp_path: Path) -> None:
    run_ranks(world_size, as_verl, tmp_path, version, timeout=120)
    judge(tmp_path, tmp_path / "global_step_2", tmp_path / "whole.pt", has_optimizer=version == 2)


def as_verl_again(rank, world_size, directory, version):
    """Resume with verl's own manager on another number of ranks."""
    manager = import_verl()
    model = model_of(tied=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    model = shared(model, version, {"fsdp": world_size})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    config = {} if version == 2 else {"load_contents": ["model", "extra"]}
    manager(model, optimizer, schedule, checkpoint_config=config).load_checkpoint(str(directory / "on-3/actor"))
    assert schedule.last_epoch == 2
    model.eval()
    with torch.no_grad():
        logits = model(input_ids=torch.arange(12).reshape(2, 6)).logits
    whole = whole_of(model, optimizer)
    if rank == 0:
        torch.save({**whole, "logits": logits}, directory / "again.pt")


@pytest.mark.skipif(VERL is None, reason="needs verl: pip install --no-deps --target DIR verl, and PYTHONPATH=DIR")
@pytest.mark.parametrize("version", [2, 1])
def test_verl_resumes_on_other_ranks_from_what_reshard_writes(version: int, tmp_path: Path) -> None:
    run_ranks(2, as_verl, tmp_path, version, timeout=120)
    done = api.reshard(tmp_path / "global_step_2", tmp_path / "on-3", mesh="dp_shard=3", trainer="verl")
    assert bool(done.warnings) == (version == 1)
    run_ranks(3, as_verl_again, tmp_path, version, timeout=120)
    expected, found = (torch.load(tmp_path / name, weights_only=False) for name in ("whole.pt", "again.pt"))
    assert torch.equal(found["logits"], expected["logits"])
    assert flat(found["model"]) == flat(expected["model"])
    if version == 2:
        assert flat(found["optimizer"]["state"]) == flat(expected["optimizer"]["state"])
        (group, *_), (wanted, *_) = found["optimizer"]["param_groups"], expected["optimizer"]["param_groups"]
        assert group["lr"] == wanted["lr"]
