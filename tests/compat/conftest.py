"""What the tests against the world share: real ranks, and PyTorch's own readers."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

WORLD = Path(__file__).parent / "world"


@pytest.fixture(scope="session")
def run_world():
    """Run one of the scripts that start real gloo ranks; fail with what it said."""

    def run(script, *arguments):
        command = [sys.executable, str(WORLD / script), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-6000:]

    return run


@pytest.fixture(scope="session")
def models():
    """The module that those scripts take their models from."""
    spec = importlib.util.spec_from_file_location("world_models", WORLD / "models.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def read_dcp():
    """Read a whole DCP checkpoint with PyTorch's own reader, without a process group: its nested state dict."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    def read(directory, keys=None):
        state = {}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
            _load_state_dict(
                state,
                storage_reader=FileSystemReader(directory),
                planner=_EmptyStateDictLoadPlanner(keys=keys),
                no_dist=True,
            )
        return state

    return read


@pytest.fixture(scope="session")
def assert_same():
    """Assert that two nested state dicts are equal, tensors bit for bit."""
    import torch

    def compare(one, other, where="state"):
        assert type(one) is type(other), where
        if isinstance(one, dict):
            assert one.keys() == other.keys(), where
            for key in one:
                compare(one[key], other[key], f"{where}.{key}")
        elif isinstance(one, list | tuple):
            assert len(one) == len(other), where
            for index, pair in enumerate(zip(one, other, strict=True)):
                compare(*pair, f"{where}.{index}")
        elif isinstance(one, torch.Tensor):
            assert (one.dtype, one.shape) == (other.dtype, other.shape), where
            left, right = (t.detach().contiguous().flatten().view(torch.uint8) for t in (one, other))
            assert torch.equal(left, right), where
        else:
            assert one == other, where

    return compare
