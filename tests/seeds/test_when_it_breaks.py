"""The walk of docs/when-it-breaks.md, on two ranks."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from fsdp2.breakages import Block, Net, shard, tokens, with_block
from fsdp2.ranks import run_ranks
from seeds import guide
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

pytestmark = pytest.mark.full


class Entered(Net):
    def forward(self, ids):
        h = self.emb(ids)
        for layer in self.layers:
            h = layer.encode(h)
        return self.head(h)


class Halting(Net):
    def forward(self, ids):
        with torch.no_grad():
            h = self.layers[0](self.emb(ids))
        return self.head(self.layers[1](h))


class Skipping(Net):
    def forward(self, ids):
        h = self.emb(ids)
        for index, layer in enumerate(self.layers):
            if index == 0 or dist.get_rank() == 0:
                h = layer(h)
        return self.head(h)


def _loss(model, batch):
    return model(batch).square().mean()


def _step(model, optimizer):
    _loss(model, tokens()).backward()
    optimizer.step()


def _names(kind, mesh):
    model = shard(kind(), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return {"model": model, "optimizer": optimizer, "train_step": _step, "compute_loss": _loss, "batch": tokens()}


def _walk(rank, world_size, path):
    os.chdir(path)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp_shard",))
    found = guide.run("../when-it-breaks", "catch", _names(Entered, mesh))["found"]
    names = guide.run("../when-it-breaks", "watch", _names(Halting, mesh))
    watched = [finding.code for finding in (*names["findings"], *names["seen"].findings)]
    healthy = guide.run("../when-it-breaks", "watch", _names(with_block(Block), mesh))
    silent = [*healthy["findings"], *healthy["seen"].findings]
    torch.manual_seed(rank)
    different = {"model": nn.Linear(2, 2)}
    ranks = [finding.code for finding in guide.run("../when-it-breaks", "ranks", different)["findings"]]
    return found, watched, silent, ranks


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    return run_ranks(2, _walk, tmp_path_factory.mktemp("walk"))


def test_walk_names_what_is_broken_and_is_silent_on_what_is_not(walked):
    for _, watched, silent, ranks in walked:
        assert watched == ["grad-disabled"]
        assert silent == []
        assert set(ranks) == {"rank-init"}


def test_walk_shows_the_diagnosis_that_is_printed(walked):
    found = walked[0][0]
    text = (guide.GUIDES.parent / "when-it-breaks.md").read_text(encoding="utf-8")
    assert f"{found.id} in {found.module}: {found.cause}\n" in text
    assert f"fix: {found.fix}\n" in text
    assert found.call.endswith("in forward: h = layer.encode(h)")


def _apart(rank, world_size, path):
    os.chdir(path)
    dist.init_process_group(
        "gloo", init_method=f"file://{path}/meet", rank=rank, world_size=world_size, timeout=timedelta(seconds=2)
    )
    guide.run("../when-it-breaks", "traces", _names(Skipping, init_device_mesh("cpu", (world_size,))))


def test_walk_of_ranks_that_part_is_compared_afterwards(tmp_path, capsys, monkeypatch):
    run_ranks(2, _apart, tmp_path, timeout=30, check=False, backend=None)
    monkeypatch.chdir(tmp_path)
    guide.run("../when-it-breaks", "compare", {})
    assert capsys.readouterr().out.startswith("rank-skip layers.1 ")
