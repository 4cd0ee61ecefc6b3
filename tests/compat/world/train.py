"""What trainers write: every kind of checkpoint, saved by real ranks."""

import os
from dataclasses import dataclass
from datetime import datetime

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import save_fsdp_model, save_fsdp_optimizer
from compat.world.models import llama, spread
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemWriter, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, get_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

UNEVEN = (5, 9, 13, 17, 18)


@dataclass
class App(Stateful):
    """Model and optimizer as one object, as in PyTorch's own tutorial."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    step: int = 1

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer, "step": self.step}

    def load_state_dict(self, state_dict):
        raise NotImplementedError


class Notes:
    """Something that only this program can unpickle."""

    def __init__(self):
        self.text = "kept as it is"


def trained(**axes):
    """A Llama after one step of AdamW, and its optimizer."""
    model = spread(llama(), **axes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tp = axes.get("tp", 1)  # ranks of one tp group see the same tokens
    tokens = torch.arange(24).reshape(2, 12) + dist.get_rank() // tp
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    return model, optimizer


def keep_reference(rank, model, path):
    """The model's full tensors, put together by torch."""
    full = {fqn: t.full_tensor() if isinstance(t, DTensor) else t for fqn, t in model.state_dict().items()}
    if rank == 0:
        save_file({fqn: tensor.detach().clone() for fqn, tensor in full.items()}, path)


def renamed(state, old, new):
    return {fqn.replace(old, new): tensor for fqn, tensor in state.items()}


def save_fsdp(rank, out):
    model, optimizer = trained(dp_shard=4)
    keep_reference(rank, model, out / "fsdp.safetensors")
    model_state, optimizer_state = get_state_dict(model, optimizer)
    extra = {"epoch": 3, "date": datetime(2026, 1, 2), "lr_scheduler": {"last_lr": [0.1], "betas": (0.9, 0.999)}}
    dcp.save({"model": model_state, "optimizer": optimizer_state, **extra}, checkpoint_id=out / "nested")
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    train_state = {"step": torch.tensor(7, dtype=torch.int32), "ntokens_seen": torch.tensor(99)}
    titan = {**model_state, "optimizer": flat, "train_state": train_state, "lr_scheduler": {"last_epoch": 7}}
    dcp.save(titan, checkpoint_id=out / "titan")
    dcp.save(model_state, storage_writer=FileSystemWriter(out / "threads", thread_count=3))
    dcp.save(model_state, storage_writer=FileSystemWriter(out / "per-tensor", single_file_per_rank=False))
    dcp.save(model_state, storage_writer=HuggingFaceStorageWriter(str(out / "hf-sharded"), save_distributed=True))
    compiled = renamed(model_state, ".layers.0.", ".layers.0._orig_mod.")
    compiled = renamed(compiled, ".layers.1.", ".layers.1._orig_mod._checkpoint_wrapped_module.")
    dcp.save(renamed(compiled, "model.", "_orig_mod.model."), checkpoint_id=out / "wrapped")
    dcp.save({f"module.{fqn}": tensor for fqn, tensor in model_state.items()}, checkpoint_id=out / "module")
    compiled_ddp = {f"_orig_mod.module.{fqn}": tensor for fqn, tensor in model_state.items()}
    dcp.save(compiled_ddp, checkpoint_id=out / "compiled-module")
    lightning = {f"model.{fqn}": tensor for fqn, tensor in model_state.items()}
    steps = {"global_step": 1, "loops": {"epoch": torch.tensor(1)}}
    dcp.save({"model": lightning, "optimizer_0": optimizer_state, **steps}, checkpoint_id=out / "lightning")
    average = {fqn: tensor * 0.5 for fqn, tensor in model_state.items()}
    dcp.save({"ema": average, "model": model_state}, checkpoint_id=out / "average")
    PartialState(cpu=True)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    save_fsdp_model(plugin, PartialState(), model, out / "accelerate")
    save_fsdp_optimizer(plugin, PartialState(), optimizer, model, out / "accelerate")


def save_hsdp(rank, out):
    model, optimizer = trained(dp_replicate=2, dp_shard=2)
    keep_reference(rank, model, out / "hsdp.safetensors")
    dcp.save({"app": App(model, optimizer)}, checkpoint_id=out / "app")


def save_fsdp_tp(rank, out):
    model, optimizer = trained(dp_shard=2, tp=2)
    keep_reference(rank, model, out / "fsdp-tp.safetensors")
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=out / "fsdp-tp")


def save_odd(rank, out):
    """Tensors that models rarely have and files must still hold."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
    numbers = torch.arange(7 * 12, dtype=torch.float32).reshape(7, 12)
    cut = distribute_tensor(numbers, mesh, [Shard(0)], src_data_rank=None).to_local()
    local = cut.t().contiguous().t()
    strided = DTensor.from_local(local, mesh, [Shard(0)], shape=numbers.shape, stride=(12, 1), run_check=False)
    state = {
        "strided.sharded": strided,
        "strided.plain": torch.arange(24.0).reshape(4, 6).t(),
        "strided.three": torch.arange(60, dtype=torch.int16).reshape(3, 4, 5).permute(2, 0, 1),
        "sliced": torch.arange(100.0)[20:50],
        "stepped": torch.arange(40.0).reshape(8, 5)[::2],
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 5),
        "empty.sharded": distribute_tensor(torch.zeros(4, 0), mesh, [Shard(0)], src_data_rank=None),
        "narrow.sharded": distribute_tensor(torch.arange(2.0), mesh, [Shard(0)], src_data_rank=None),
        "half": distribute_tensor(numbers.to(torch.float16), mesh, [Shard(1)], src_data_rank=None),
        "flags": torch.tensor([True, False, True]),
        "wide": torch.tensor([1 + 2j, 3 - 4j]),
        "notes": Notes(),
        "plain": {"list": [1, 2], "none": None},
    }
    dcp.save(state, checkpoint_id=out / "odd")
    del state["notes"], state["plain"]
    dcp.async_save(state, checkpoint_id=out / "async").result()
    dcp.save(state, checkpoint_id=out / "no-collectives", use_collectives=False)
    del state["wide"]  # safetensors' writer makes no file of complex numbers
    plain = {fqn: tensor for fqn, tensor in state.items() if not fqn.startswith(("strided", "expanded", "stepped"))}
    mapping = {fqn: 1 + i % 2 for i, fqn in enumerate(plain)}
    writer = HuggingFaceStorageWriter(str(out / "hf-mapped"), fqn_to_index_mapping=mapping, save_distributed=True)
    dcp.save(plain, storage_writer=writer)
    if rank == 0:
        full = {**plain, "half": numbers.to(torch.float16), "narrow.sharded": torch.arange(2.0)}
        full["empty.sharded"] = torch.zeros(4, 0)
        save_file({fqn: tensor.clone() for fqn, tensor in full.items()}, out / "hf-mapped.safetensors")


def save_uneven(rank, world_size, out):
    """FSDP on top of tensor parallelism, on the same dim, with lengths that two ranks cannot share evenly."""
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp_shard", "tp"))
    for length in UNEVEN:
        full = torch.arange(length * 3.0).reshape(length, 3)
        tp = distribute_tensor(full, mesh["tp"], [Shard(0)], src_data_rank=None).to_local()
        local = distribute_tensor(tp.clone(), mesh["dp_shard"], [Shard(0)], src_data_rank=None).to_local()
        placements = [_StridedShard(0, split_factor=2), Shard(0)]
        tensor = DTensor.from_local(local, mesh, placements, shape=full.shape, stride=(3, 1), run_check=False)
        dcp.save({"w": tensor}, checkpoint_id=out / f"uneven-{length}")


def save_all(rank, world_size, out):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # never dialled; accelerate wants them set
    for save in (save_fsdp, save_hsdp, save_fsdp_tp, save_odd):
        save(rank, out)
