"""Layouts of torchtitan's experts, made by its own parallelisation: read, gathered, and written as it cuts them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fsdp2.ranks import run_ranks
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import DTensor
from trainers import titan_models, worlds

from ckpt_tools import api
from ckpt_tools.cli import main

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]
for _needed in ("torchtitan", "torchdata", "spmd_types", "tyro"):
    pytest.importorskip(_needed, reason=f"needs {_needed}: see tests/names/test_torchtitan_own.py")
CASES = {
    "ep-inside": (4, {"dp_shard": 4, "ep": 2}, ("**.inner_experts.*=ep:S(0)", "**=ep:F")),
    "ep-inside-dim-1": (2, {"dp_shard": 4, "ep": 2}, ("**.inner_experts.*=ep:S(0),dp_shard:S(1)", "**=ep:F")),
    "no-ep-dim-1": (2, {"dp_shard": 4}, ("**.inner_experts.*=dp_shard:S(1)",)),
}


def save(path, num_experts, degrees):
    """Save the state of a live model."""
    dcp.save(titan_models.parallel_moe(num_experts, seed=0, **degrees).state_dict(), checkpoint_id=path)


def load(path, saved, num_experts, degrees):
    """Load into another live model what ckpt wrote, and what torchtitan saved; return where they differ."""
    states = []
    for step, seed in ((path, 1), (saved, 2)):
        states.append(titan_models.parallel_moe(num_experts, seed=seed, **degrees).state_dict())
        dcp.load(states[-1], checkpoint_id=step)
    pairs = [(n, *(s[n].full_tensor() if isinstance(s[n], DTensor) else s[n] for s in states)) for n in states[0]]
    return [name for name, one, other in pairs if not torch.equal(one, other)]


def walk(_rank, _world_size, directory, num_experts, degrees, mesh, rules):
    """Everything with one import of torchtitan."""
    from trainers.test_torchtitan import let_torchtitan_use_cpu

    worlds.import_once()
    let_torchtitan_use_cpu()
    saved, written = directory / "saved", directory / "written"
    worlds.run_ranks(4, save, str(saved), num_experts, degrees)
    worlds.run_ckpt("reshard", saved, written, "--mesh", mesh, *(arg for rule in rules for arg in ("--set", rule)))
    return worlds.run_ranks(4, load, str(written), str(saved), num_experts, degrees)


def table_of(path):
    """Boxes of every tensor → the file of the rank that has it; without what torchtitan saves whole (fused q, k, v)."""
    found = FileSystemReader(path).read_metadata()
    places = {(index.fqn, tuple(index.offset)): one.relative_path for index, one in found.storage_data.items()}
    return {
        (fqn, tuple(c.offsets), tuple(c.sizes)): places[fqn, tuple(c.offsets)]
        for fqn, item in found.state_dict_metadata.items()
        if "qkv_linear" not in fqn and "expert_bias" not in fqn
        for c in item.chunks
        if 0 not in c.sizes
    }


@pytest.mark.parametrize("case", CASES)
def test_layout_is_recognised_gathered_and_written_as_torchtitan_cuts_it(case, tmp_path) -> None:
    num_experts, degrees, rules = CASES[case]
    mesh = "dp_shard=2,ep=2" if "ep" in degrees else "dp_shard=4"
    assert run_ranks(1, walk, tmp_path, num_experts, degrees, mesh, rules, timeout=200, backend=None) == [[]]
    saved, written = tmp_path / "saved", tmp_path / "written"
    assert table_of(written) == table_of(saved)
    for path in (saved, written):
        (path / "ckpt_manifest.json").unlink(missing_ok=True)
        found = api.inspect(path)
        assert (str(found.mesh), found.mesh_source) == (mesh, "inferred")
    assert main(["gather", str(saved), str(tmp_path / "whole"), "-q"]) == 0
    assert main(["diff", str(tmp_path / "whole"), str(written), "-q"]) == 0
