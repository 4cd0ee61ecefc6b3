"""Figures of tensors against torch in float64: every dtype, blocks in any order, values that are hard to add."""

from __future__ import annotations

import math
import random

import pytest
import torch

from ckpt_tools.checkpoint.dtypes import BY_TORCH_NAME
from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.checkpoint.layout import split_blocks
from ckpt_tools.transfer.statistics import Moments, Tally
from ckpt_tools.transfer.value_counts import count_values

_DTYPES = [
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"),
    *("bool", "uint8", "int8", "int16", "int32", "int64"),
]


def _tally(tensor: torch.Tensor, *, block_bytes: int = 1 << 20) -> Tally:
    entry = TensorEntry(
        fqn="w", dtype=BY_TORCH_NAME[str(tensor.dtype).removeprefix("torch.")], shape=tuple(tensor.shape), chunks=()
    )
    tally = Tally(entry)
    blocks = list(split_blocks(entry.shape, entry.dtype.bits, block_bytes=block_bytes))
    random.Random(0).shuffle(blocks)
    for block in blocks:
        part = tensor
        for dim, (offset, size) in enumerate(zip(block.offsets, block.sizes, strict=True)):
            part = part.narrow(dim, offset, size)
        tally.see(block, memoryview(part.contiguous().view(torch.uint8).numpy().tobytes()))
    tally.finish()
    return tally


def _histogram(values: torch.Tensor) -> list[tuple[int, int, int]]:
    found = {}
    for value in values[values != 0].tolist():
        exponent = min(127, max(-127, math.frexp(value)[1] - 1))
        key = (1 if value > 0 else -1, exponent)
        found[key] = found.get(key, 0) + 1
    order = sorted(found, key=lambda key: key[0] * (key[1] + 1000))
    return [(*key, found[key]) for key in order]


@pytest.mark.parametrize("name", _DTYPES)
def test_figures_are_those_of_torch_in_float64(name) -> None:
    torch.manual_seed(0)
    dtype = getattr(torch, name)
    if dtype.is_floating_point:
        tensor = (torch.randn(37, 501) * torch.logspace(-9, 1, 501)).to(dtype)
        tensor[3, :40] = 0.0
        tensor[4, 1] = 0.0 if name.endswith("uz") else -0.0  # the pattern of -0 is its NaN
    else:
        tensor = torch.randint(0, 2 if name == "bool" else 100, (37, 501)).to(dtype)
        tensor = tensor if name in ("bool", "uint8") else tensor - 50
    tally = _tally(tensor, block_bytes=8000)
    found, exact = tally.moments, tensor.double()
    assert found.num_elems == exact.numel()
    assert (found.min, found.max, found.absmax) == (exact.min(), exact.max(), exact.abs().max())
    assert found.mean == pytest.approx(exact.mean().item(), rel=1e-12, abs=1e-15)
    assert found.std == pytest.approx(exact.std(correction=0).item(), rel=1e-12)
    assert found.rms == pytest.approx(exact.square().mean().sqrt().item(), rel=1e-12)
    assert list(found.histogram) == _histogram(exact.flatten())
    assert tally.counts.num_zero == int((exact == 0).sum())
    assert tally.counts.is_finite


@pytest.mark.parametrize("name", ["float64", "float32", "bfloat16", "float16", "float8_e5m2"])
def test_what_is_not_finite_is_counted_and_left_out_of_the_figures(name) -> None:
    torch.manual_seed(1)
    tensor = torch.randn(2000).to(getattr(torch, name))
    tensor[[5, 700]] = float("nan")
    tensor[6], tensor[1999] = float("inf"), float("-inf")
    tally = _tally(tensor, block_bytes=1000)
    finite = tensor.double()[tensor.double().isfinite()]
    content = memoryview(tensor.view(torch.uint8).numpy().tobytes())
    assert tally.counts == count_values(content, BY_TORCH_NAME[name])
    assert (tally.counts.num_nan, tally.counts.num_inf, tally.counts.first_bad) == (2, 2, 5)
    assert tally.moments.num_elems == 1996
    assert tally.moments.mean == pytest.approx(finite.mean().item(), rel=1e-12)
    assert tally.moments.std == pytest.approx(finite.std(correction=0).item(), rel=1e-12)
    assert sum(n for _, _, n in tally.moments.histogram) == int((finite != 0).sum())


def test_spread_survives_a_mean_that_is_far_larger() -> None:
    torch.manual_seed(2)
    tensor = 1e6 + torch.randn(300_000).float()
    exact = tensor.double()
    found = _tally(tensor, block_bytes=100_000).moments
    assert found.std == pytest.approx(exact.std(correction=0).item(), rel=1e-9)
    assert found.mean == pytest.approx(exact.mean().item(), rel=1e-15)


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_figures_are_the_same_whichever_blocks_come_first(name) -> None:
    tensor = torch.randn(100_000, generator=torch.Generator().manual_seed(3)).to(getattr(torch, name))
    entry = TensorEntry(fqn="w", dtype=BY_TORCH_NAME[name], shape=(100_000,), chunks=())
    blocks = list(split_blocks(entry.shape, entry.dtype.bits, block_bytes=10_000))
    found = set()
    for seed in range(4):
        tally = Tally(entry)
        for block in random.Random(seed).sample(blocks, len(blocks)):
            part = tensor[block.offsets[0] : block.offsets[0] + block.sizes[0]]
            tally.see(block, memoryview(part.view(torch.uint8).numpy().tobytes()))
        tally.finish()
        found.add(tally.moments)
    assert len(found) == 1


def test_nothing_and_one_number_everywhere() -> None:
    empty = Moments(num_elems=0, min=0.0, max=0.0, mean=0.0, std=0.0, histogram=())
    assert _tally(torch.full((9,), float("nan"))).moments == empty
    assert _tally(torch.full((9,), float("nan"), dtype=torch.bfloat16)).moments == empty
    assert Tally(TensorEntry(fqn="w", dtype=BY_TORCH_NAME["float32"], shape=(0,), chunks=())).moments == empty
    for dtype in (torch.float32, torch.bfloat16):
        same = _tally(torch.full((100_000,), 0.1, dtype=dtype)).moments
        assert (same.mean, same.std, same.min) == (same.min, 0.0, same.max)
        assert same.rms == pytest.approx(abs(same.min))


def test_extremes_of_float64_do_not_overflow_into_other_figures() -> None:
    found = _tally(torch.tensor([1e300, -1e300, 1e-310], dtype=torch.float64)).moments
    assert (found.min, found.max, found.std) == (-1e300, 1e300, math.inf)
    assert found.histogram == ((-1, 127, 1), (1, -127, 1), (1, 127, 1))
