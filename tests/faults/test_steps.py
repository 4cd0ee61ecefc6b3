"""A whole step under the same sweeps: it appears with every part, or not at all, and a killed run is continued."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults.conftest import TINY
from faults.harness import assert_complete
from faults.test_sweep import FAULTS, Sweep
from samples import write_model

from ckpt_tools import api


@pytest.fixture(scope="module")
def step(memory: Path) -> Path:
    """A step in two parts, with a file beside."""
    hf = write_model(memory / "of-step", TINY)
    path = memory / "step"
    api.shard(hf, path / "pytorch_model_fsdp_0", mesh="dp_shard=2", prefix="model.")
    api.shard(hf, path / "optimizer_0", mesh="dp_shard=2", prefix="optimizer.state.")
    (path / "notes.txt").write_bytes(b"scheduler")
    return path


@pytest.fixture(scope="module")
def reference(step: Path, memory: Path) -> Path:
    path = memory / "reference-step"
    api.reshard(step, path, mesh="dp_shard=3", num_workers=2)
    assert api.verify(path).ok
    return path


ARRANGING = "mkdir unlink fsync renameat2"
"""What makes files and directories come and go; how bytes move, the sweeps of one checkpoint go through."""


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "overwrite"),
    [("fails", False), ("killed", True), ("interrupted", False)],
    ids=lambda value: str(value).lower(),
)
def test_sweep_of_a_step_nothing_is_lost(server, step, reference, case, kind, overwrite, record_property, pytestconfig):
    sweep = Sweep(server, {"reshard": step}, {"reshard": reference}, "reshard")
    every = 1 if pytestconfig.getoption("zoo") else 3  # with --zoo every call
    sweep.sweep(
        case, overwrite=overwrite, first=1 + len(kind) % every, step=every, **FAULTS[kind] | {"only": ARRANGING}
    )
    record_property("points", sum(sweep.points.values()))
    assert sum(sweep.points.values()) >= 30 // every


def test_every_file_of_a_step_is_synced_before_it_appears(server, step, reference, case) -> None:
    sweep = Sweep(server, {"reshard": step}, {"reshard": reference}, "reshard")
    calls = sweep.run(case, overwrite=False, only="fsync renameat2", trace=True).calls
    assert_complete(case / "out", sweep.expected)
    renames = [number for number, call in enumerate(calls) if call.startswith("renameat2")]
    assert len(renames) == 3
    synced = "\n".join(calls[: renames[-1]])
    for file in reference.rglob("*"):
        assert f"/{file.name}" in synced or file.is_dir(), file
    assert f"fsync {case}" in calls[renames[-1] :]
