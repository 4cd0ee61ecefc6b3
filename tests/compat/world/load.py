"""Load checkpoints with stock `dcp.load` into spread models. usage: CASES.json OUT.json

A case has a name, a checkpoint, the full tensors it must give ("reference"), a nesting root ("" or "model") and
the axes of the mesh to load on. With "save", DCP's HF writer writes there what was loaded. The answer lists what went
wrong on any rank, per name.
"""

import json
import sys
import tempfile
import traceback
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import llama, spread
from ranks import run_ranks
from safetensors.torch import load_file
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import DTensor, distribute_tensor


def load_case(case):
    """Return what is wrong after loading."""
    model = spread(llama(seed=1), **case["axes"])
    expected = load_file(case["reference"])
    state = model.state_dict()
    items = Path(case["checkpoint"], ".metadata").exists()
    reader = None if items else dcp.HuggingFaceStorageReader(case["checkpoint"])
    where = {"checkpoint_id": case["checkpoint"]} if items else {"storage_reader": reader}
    dcp.load({case["root"]: state} if case["root"] else state, **where)
    if "save" in case:
        writer = dcp.HuggingFaceStorageWriter(case["save"], save_distributed=True)
        planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        dcp.save(state, storage_writer=writer, planner=planner)
    wrong = sorted(state.keys() ^ expected.keys())
    for fqn, tensor in state.items():
        assert isinstance(tensor, DTensor), fqn
        part = distribute_tensor(expected[fqn], tensor.device_mesh, tensor.placements, src_data_rank=None)
        ours, theirs = tensor.to_local().contiguous(), part.to_local().contiguous()
        if ours.dtype != theirs.dtype or ours.numpy().tobytes() != theirs.numpy().tobytes():
            wrong.append(fqn)
    return wrong


def load_cases(rank, cases, out):
    for case in cases:
        dist.barrier()
        try:
            wrong = load_case(case)
        except BaseException:  # dcp's CheckpointException is one
            wrong = [traceback.format_exc()]
        (out / f"{case['name']}.{rank}").write_text(json.dumps(wrong))


if __name__ == "__main__":
    all_cases = json.loads(Path(sys.argv[1]).read_text())
    by_world = {}
    for one in all_cases:
        size = 1
        for axis in one["axes"].values():
            size *= axis
        by_world.setdefault(size, []).append(one)
    answers = {}
    with tempfile.TemporaryDirectory() as directory:
        for size, group in by_world.items():
            run_ranks(size, load_cases, group, Path(directory))
        for one in all_cases:
            files = sorted(Path(directory).glob(f"{one['name']}.*"))
            answers[one["name"]] = [problem for file in files for problem in json.loads(file.read_text())]
    Path(sys.argv[2]).write_text(json.dumps(answers))
