"""The whole script of the guide, started as torchrun starts it: it trains as one process does."""

from __future__ import annotations

import os
import socket

import pytest
import torch
from fsdp2.ranks import run_ranks
from safetensors.torch import load_file, save_file
from seeds import guide
from seeds.test_torch_compile import VOCAB, Transformer

from ckpt_tools import api

pytestmark = pytest.mark.full

STEPS = 3
TP = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
MESH = "dp_shard=-1,tp=2"


def batches(part, parts):
    """The batches of one of several parts of the data."""
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(step)
        yield {"tokens": torch.randint(0, VOCAB, (4, 8), generator=draw).chunk(parts)[part]}


def train(rank, world_size, directory):
    os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": f"{world_size}", "LOCAL_RANK": f"{rank}"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": (directory / "port").read_text()}
    names = {"Model": Transformer, "batches": batches, "mesh_text": MESH, "tp_plan": TP}
    names |= {"path": directory / "model.safetensors", "checkpoint": directory / "step"}
    guide.run("trainers/own-loop", "script", names)
    rendezvous = f"file://{directory}/again"
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    from ckpt_tools.fsdp2 import build_device_mesh, compare_ranks

    names["mesh"] = build_device_mesh(MESH)
    guide.run("trainers/own-loop", "fresh", names)
    findings = [finding.code for finding in compare_ranks(names["model"])]
    pairs = zip(names["model"].parameters(), fresh().parameters(), strict=True)
    whole = all(torch.equal(p.full_tensor(), other) for p, other in pairs)
    torch.distributed.destroy_process_group()
    return names["loss"].item(), findings, whole


def fresh():
    torch.manual_seed(0)
    return Transformer()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("script")
    save_file(fresh().state_dict(), path / "model.safetensors")
    with socket.create_server(("127.0.0.1", 0)) as server:
        (path / "port").write_text(str(server.getsockname()[1]))
    return path


@pytest.fixture(scope="module")
def reference():
    """Weights after the steps of one process, which sees all parts of the data."""
    model = fresh()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in batches(0, 1):
        model(**batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def test_script_of_the_guide_trains_as_one_process_does(directory, reference):
    for _, findings, is_whole in run_ranks(4, train, directory, backend=None):
        assert findings == []
        assert is_whole
    api.gather(directory / "step", directory / "full")
    weights = load_file(directory / "full" / "model.safetensors")
    assert set(weights) == set(reference)
    for name, weight in weights.items():
        # AdamW divides by the root of the second moment: a gradient near zero carries its relative error on.
        torch.testing.assert_close(weight, reference[name], rtol=1e-4, atol=1e-5)
