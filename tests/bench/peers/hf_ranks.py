"""N gloo processes that each load every file, cut and save, as most scripts do. usage: HF_DIR DCP_DIR N"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def run_rank(rank: int, num_ranks: int, rendezvous: str, source: str, destination: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=num_ranks)
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("dp_shard",))
    state = {}
    for file in sorted(Path(source).glob("*.safetensors")):
        # Sorted: distribute_tensor is a collective, and load_file's order is not the same everywhere.
        for name, tensor in sorted(load_file(file).items()):
            state[name] = distribute_tensor(tensor, mesh, [Shard(0)])
    dcp.save(state, checkpoint_id=destination)
    dist.destroy_process_group()


if __name__ == "__main__":
    hf_dir, dcp_dir, ranks = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with tempfile.TemporaryDirectory() as meeting:
        arguments = (ranks, f"file://{meeting}/ranks", hf_dir, dcp_dir)
        torch.multiprocessing.spawn(run_rank, arguments, nprocs=ranks)
