"""What the tests against the world share: PyTorch's own readers."""

from __future__ import annotations

import warnings

import pytest


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
