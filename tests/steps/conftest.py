"""What the tests of steps share: steps that none of them changes, and PyTorch's own reader."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest
import torch
from steps import toy_steps


@pytest.fixture(scope="session")
def saved(tmp_path_factory) -> Path:
    """Steps that no test changes."""
    root = tmp_path_factory.mktemp("saved")
    toy_steps.save_accelerate(root / "accelerate")
    toy_steps.save_accelerate(root / "two", models=2)
    toy_steps.save_trainer(root / "trainer")
    lightning = {f"model.{fqn}": tensor for fqn, tensor in toy_steps.state_of(0).items()}
    toy_steps.save({"state_dict": lightning, "optimizer_0": toy_steps.optimizer_of(100, "model.")}, root / "last.ckpt")
    torch.save({"epoch": 1}, root / "last.ckpt" / "meta.pt")
    titan = {
        **{fqn.removeprefix("model."): tensor for fqn, tensor in toy_steps.state_of(0).items()},
        "optimizer": {f"state.{fqn}.exp_avg": tensor for fqn, tensor in toy_steps.state_of(100).items()},
        "lr_scheduler": {"last_epoch": 3},
        "train_state": {"step": 3, "ntokens_seen": 48},
        "dataloader": {"dp_rank_0": b"zero", "dp_rank_1": b"one", "world_size": 2},
    }
    toy_steps.save(titan, root / "step-3")
    return root


@pytest.fixture
def copy_of(saved, tmp_path):
    """A step that the test may damage."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(saved / name, tmp_path / "runs" / name))

    return copy


@pytest.fixture(scope="session")
def read_dcp():
    """Read a DCP directory with PyTorch's own reader: its nested state dict."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    def read(directory) -> dict[str, object]:
        state: dict[str, object] = {}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is ")
            reader = FileSystemReader(directory)
            _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
        return state

    return read
