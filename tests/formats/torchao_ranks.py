"""What torchao leaves in a checkpoint, saved by two ranks on gloo: float8 all-gather as torchtitan has it, and int8.

torchao is no dependency: `pip install --no-deps --target DIR torchao==0.18.0`, and DIR on PYTHONPATH. The sample
`torchao-0.18.0.tar.xz` is what `python -m formats.torchao_ranks DIR` (in `tests`) left in DIR: `float8` and `int8` by
`dcp.save`, `ranks` by `torch.save` on every rank, `full.pt` with the weights before, and `copied.pt` with what stock
torch makes of `float8` (`dcp.load` into plain tensors).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.Linear(16, 16))


def work(rank: int, root: Path) -> None:
    from torch.distributed.fsdp import fully_shard
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29677")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    sharded = fully_shard(convert_to_float8_training(model(), config=config), mesh=dist.init_device_mesh("cpu", (2,)))
    dcp.save(sharded.state_dict(), checkpoint_id=root / "float8")
    (root / "ranks").mkdir(exist_ok=True)
    torch.save(dict(sharded.state_dict()), root / "ranks" / f"model_world_size_2_rank_{rank}.pt")
    dist.destroy_process_group()


def main(root: Path) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    root.mkdir()
    torch.save(model().state_dict(), root / "full.pt")
    mp.spawn(work, (root,), 2)
    copied = {name: torch.zeros_like(tensor) for name, tensor in model().state_dict().items()}
    dcp.load(copied, checkpoint_id=root / "float8", no_dist=True)
    torch.save(copied, root / "copied.pt")
    layer = torch.nn.Linear(128, 64)
    quantize_(layer, Int8WeightOnlyConfig())
    dcp.save(layer.state_dict(), checkpoint_id=root / "int8", no_dist=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
