"""Registered methods that run inside one another: equal to one process where parameters stay, refused where not."""

from __future__ import annotations

import copy

import pytest
import torch
from fsdp2.breakages import Block, Net, tokens, with_block
from fsdp2.ranks import run_ranks

from ckpt_tools.checkpoint.layout import parse_mesh
from ckpt_tools.errors import UsageError
from ckpt_tools.fsdp2 import Policy, audit, build_device_mesh, parse_policy, shard_model, watch

pytestmark = pytest.mark.full


class Bagel(Net):
    """A root of three entries besides forward; the longer ones call the shorter, and use parameters afterwards."""

    def __init__(self):
        super().__init__()
        self.proj = torch.nn.Linear(8, 8)

    def forward_cache_update_text(self, ids):
        h = self.emb(ids)
        for layer in self.layers:
            h = layer(h)
        return self.proj(h)

    def generate_image(self, ids):
        first, second = self.forward_cache_update_text(ids), self.forward_cache_update_text(ids.flip(0))
        return self.head(self.proj(first + second))

    def chat(self, ids):
        return self.head(self.proj(self.generate_image(ids) @ self.emb.weight))

    def forward(self, ids):
        return self.head(self.forward_cache_update_text(ids))


class Twice(Block):
    def forward(self, x):
        return self.down(self.encode(self.encode(x)))


ROOT = ["forward_cache_update_text", "generate_image"]
ALLOWED = {
    "root": (Bagel, "full_shard", ROOT),
    "root, replicated": (Bagel, "no_shard", ROOT),
    "kept layers": (with_block(Twice), "shard_grad_op", {"Twice": ["encode"]}),
}
REFUSED = {
    "three deep": (Bagel, Policy(), [*ROOT, "chat"]),
    "root that reshards": (Bagel, Policy(reshard_root=True), ROOT),
    "layers that reshard": (with_block(Twice), Policy(), {"Twice": ["encode"]}),
}


def _nested(rank, world_size):
    said = {}
    for name, (kind, strategy, methods) in ALLOWED.items():
        torch.manual_seed(0)
        whole = kind()
        model = copy.deepcopy(whole)
        axis = "dp_replicate" if strategy == "no_shard" else "dp_shard"
        mesh = build_device_mesh(parse_mesh(f"{axis}={world_size}"))
        shard_model(model, mesh, parse_policy(strategy), blocks=["layers.*"], forward_methods=methods)
        said[name] = found = [finding.code for finding in audit(model, phase="sharded")]
        for entry in ("forward", "generate_image") if kind is Bagel else ("forward",):
            with watch(model) as seen:
                one = (whole if entry == "forward" else whole.generate_image)(tokens())
                other = (model if entry == "forward" else model.generate_image)(tokens())
                found += [finding.code for finding in audit(model, phase="forward")]
                one.square().mean().backward()
                other.square().mean().backward()
                found += [finding.code for finding in (*seen.findings, *audit(model, phase="backward"))]
            assert torch.equal(one, other), name
            for (fqn, a), (_, b) in zip(whole.named_parameters(), model.named_parameters(), strict=True):
                assert torch.equal(a.grad, b.grad.full_tensor()), (name, entry, fqn)
            whole.zero_grad()
            model.zero_grad()  # while everything is sharded: a gathered parameter is not the one with the gradient
            with torch.no_grad():
                assert torch.equal(one, (model if entry == "forward" else model.generate_image)(tokens())), name
    mesh = build_device_mesh(parse_mesh(f"dp_shard={world_size}"))
    for name, (kind, policy, methods) in REFUSED.items():
        try:
            shard_model(kind(), mesh, policy, blocks=["layers.*"], forward_methods=methods)
        except UsageError as error:
            said[name] = error.what
    return said


@pytest.fixture(scope="module")
def said():
    return run_ranks(2, _nested)[0]


@pytest.mark.parametrize("case", ALLOWED)
def test_nested_methods_of_a_unit_that_keeps_its_parameters_are_equal_and_silent(said, case):
    assert said[case] == []


@pytest.mark.parametrize(
    ("case", "path"),
    [
        ("three deep", "chat → generate_image → forward_cache_update_text"),
        ("root that reshards", "forward → forward_cache_update_text"),
        ("layers that reshard", "forward → encode"),
    ],
)
def test_nested_methods_that_would_release_too_early_are_refused_with_their_path(said, case, path):
    assert said[case].startswith(f"double-wrap: {path} ")
