"""The closed form against `distribute_tensor`, rank by rank, and the partitions that plans rely on."""

from __future__ import annotations

import math
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings, strategies as st
from samples import examples
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate as TorchReplicate, Shard as TorchShard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from ckpt_tools.checkpoint.layout import Box, Mesh, Replicate, Shard, cut_tensor, split_blocks

S0, S1 = Shard(0), Shard(1)


def oracle_placements(mesh, placements):
    """Torch's placements as `fully_shard` writes them: strided where axes to the right cut the same dim."""
    result = []
    for i, (axis, _) in enumerate(mesh.axes):
        placement = placements.get(axis, Replicate())
        if isinstance(placement, Replicate):
            result.append(TorchReplicate())
            continue
        inside = [size for name, size in mesh.axes[i + 1 :] if placements.get(name) == placement]
        if axis == "dp_shard" and inside:
            result.append(_StridedShard(placement.dim, split_factor=math.prod(inside)))
        else:
            result.append(TorchShard(placement.dim))
    return result


def assert_equals_torch(shape, mesh, placements):
    """Every rank: torch's sizes and offsets, and the very elements that it holds."""
    full = torch.arange(math.prod(shape)).reshape(shape)
    names = tuple(name for name, _ in mesh.axes)
    ranks = torch.arange(mesh.world_size).reshape([size for _, size in mesh.axes])
    torch_placements = oracle_placements(mesh, placements)
    grid = cut_tensor(shape, mesh, placements)
    table = {}
    for rank in range(mesh.world_size):
        device_mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)
        box = grid.local_box(rank)
        sizes, offsets = compute_local_shape_and_global_offset(shape, device_mesh, torch_placements)
        assert box == Box(tuple(offsets), tuple(sizes)), f"rank {rank}"
        distributed = distribute_tensor(full, device_mesh, torch_placements, src_data_rank=None)
        local = distributed.to_local()
        region = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
        assert local.shape == box.sizes, f"rank {rank}"
        assert torch.equal(local, full[region]), f"rank {rank}"
        table.setdefault(box.offsets, (rank, box))
    assert {box.offsets: (rank, box) for rank, box in grid.cells} == table


def mesh_of(**axes):
    return Mesh(tuple(axes.items()))


EP_TP = mesh_of(dp_shard=2, ep=2, tp=3)


@pytest.mark.parametrize(
    ("shape", "mesh", "placements"),
    [
        pytest.param((16, 4), mesh_of(dp_shard=4), {"dp_shard": S0}, id="fsdp"),
        pytest.param((10, 3), mesh_of(dp_shard=4), {"dp_shard": S0}, id="fsdp-uneven"),
        pytest.param((5,), mesh_of(dp_shard=8), {"dp_shard": S0}, id="fsdp-empty-ranks"),
        pytest.param((4, 6), mesh_of(dp_shard=3), {"dp_shard": S1}, id="fsdp-on-dim-1"),
        pytest.param((7, 3), mesh_of(dp_replicate=2, dp_shard=3), {"dp_shard": S0}, id="hsdp"),
        pytest.param((9, 4), mesh_of(tp=4), {"tp": S0}, id="tp-colwise-uneven"),
        pytest.param((4, 9), mesh_of(tp=4), {"tp": S1}, id="tp-rowwise-uneven"),
        pytest.param((12, 5), mesh_of(dp_shard=4, tp=2), {"dp_shard": S0, "tp": S0}, id="same-dim"),
        pytest.param((6, 5), mesh_of(dp_shard=4, tp=2), {"dp_shard": S0, "tp": S0}, id="same-dim-empty"),
        pytest.param((7, 9), mesh_of(dp_shard=3, tp=2), {"dp_shard": S0, "tp": S1}, id="different-dims"),
        pytest.param((3, 12), mesh_of(dp_shard=3, tp=2), {"dp_shard": S1, "tp": S1}, id="same-dim-1"),
        pytest.param((7, 4), mesh_of(dp_shard=3, tp=2), {"dp_shard": S0}, id="off-the-tp-axis"),
        pytest.param((8, 6), mesh_of(dp_replicate=2, dp_shard=2, tp=2), {"dp_shard": S0, "tp": S0}, id="hsdp-tp"),
        pytest.param((8, 3, 5), mesh_of(dp_shard=2, ep=4), {"dp_shard": S0, "ep": S0}, id="ep-same-dim"),
        pytest.param((8, 3, 5), mesh_of(dp_shard=2, ep=4), {"dp_shard": S1, "ep": S0}, id="ep-fsdp-dim-1"),
        pytest.param((8, 6, 4), EP_TP, {"dp_shard": S0, "ep": S0, "tp": S1}, id="ep-tp"),
        pytest.param((12,), EP_TP, dict.fromkeys(("dp_shard", "ep", "tp"), S0), id="three"),
        pytest.param((8,), mesh_of(tp=2, dp_shard=3), {"dp_shard": S0, "tp": S0}, id="tp-outside"),
        pytest.param((), mesh_of(dp_shard=3), {}, id="0-d"),
        pytest.param((0, 4), mesh_of(dp_shard=3), {"dp_shard": S0}, id="zero-size"),
        pytest.param((4, 0), mesh_of(dp_shard=3), {"dp_shard": S0}, id="zero-size-elsewhere"),
        pytest.param((0, 6), mesh_of(dp_shard=3, tp=2), {"dp_shard": S0, "tp": S1}, id="zero-size-fsdp-tp"),
        pytest.param((0,), mesh_of(dp_shard=3, tp=2), {"dp_shard": S0, "tp": S0}, id="zero-size-same-dim"),
        pytest.param((1, 1, 1, 2), mesh_of(dp_shard=2), {"dp_shard": Shard(3)}, id="last-dim"),
    ],
)
def test_cut_tensor_named_layout_equals_distribute_tensor(shape, mesh, placements):
    assert_equals_torch(shape, mesh, placements)


@st.composite
def layouts(draw):
    """(shape, mesh, placements) that PyTorch can save and load."""
    names = draw(st.lists(st.sampled_from(["dp_shard", "tp", "ep", "cp"]), min_size=1, max_size=3, unique=True))
    if draw(st.booleans()):
        names.insert(0, "dp_replicate")
    mesh = Mesh(tuple((name, draw(st.integers(1, 4))) for name in names))
    shape = draw(st.lists(st.integers(0, 9), max_size=4))
    placements = {}
    for name in names:
        if shape and name != "dp_replicate" and draw(st.integers(0, 3)):
            placements[name] = Shard(draw(st.integers(0, len(shape) - 1)))
    fsdp = placements.get("dp_shard")
    if fsdp is not None:
        # FSDP inside another cut of the same dim: PyTorch needs that cut to be even.
        outer = math.prod(mesh.size(n) for n, p in placements.items() if p == fsdp and n != "dp_shard")
        shape[fsdp.dim] = -(-shape[fsdp.dim] // outer) * outer
    return tuple(shape), mesh, placements


@given(layouts())
@settings(deadline=None, max_examples=examples(150))
def test_cut_tensor_any_layout_equals_distribute_tensor(layout):
    shape, mesh, placements = layout
    assert_equals_torch(shape, mesh, placements)


@st.composite
def any_layouts(draw):
    """As `layouts`, and also the cuts that PyTorch cannot load."""
    names = draw(st.lists(st.sampled_from(["dp_replicate", "dp_shard", "tp", "ep"]), max_size=4, unique=True))
    mesh = Mesh(tuple((name, draw(st.integers(1, 4))) for name in names))
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=4)))
    placements = {name: Shard(draw(st.integers(0, len(shape) - 1))) for name in names if shape and draw(st.booleans())}
    return shape, mesh, placements


@given(any_layouts(), st.sampled_from([1, 2]))
@settings(deadline=None, max_examples=examples(200))
def test_cells_distinct_boxes_tile_the_shape_and_the_lowest_rank_owns(layout, pack):
    shape, mesh, placements = layout
    if shape:
        shape = (*shape[:-1], shape[-1] * pack)
    else:
        pack = 1
    grid = cut_tensor(shape, mesh, placements, pack=pack)
    seen = torch.zeros(shape, dtype=torch.int64)
    for rank, box in grid.cells:
        seen[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))] += 1
        assert box == grid.local_box(rank)
        assert not any(grid.local_box(lower).offsets == box.offsets for lower in range(rank))
        if shape:
            assert box.offsets[-1] % pack == box.sizes[-1] % pack == 0
    assert bool((seen == 1).all())
    assert [rank for rank, _ in grid.cells] == sorted(rank for rank, _ in grid.cells)
    assert {grid.local_box(rank).offsets for rank in range(mesh.world_size)} == {box.offsets for _, box in grid.cells}


def runs_of(box, shape):
    """Row-major positions of the elements of `box` inside a tensor (or chunk) of `shape`."""
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    ranges = [range(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True)]
    return [sum(i * s for i, s in zip(index, strides, strict=True)) for index in product(*ranges)]


def is_contiguous(positions):
    return all(b == a + 1 for a, b in pairwise(positions))


@given(st.lists(st.integers(0, 7), max_size=4).map(tuple), st.sampled_from([4, 6, 8, 16, 64]), st.integers(1, 200))
@settings(deadline=None, max_examples=examples(300))
def test_split_blocks_tile_in_row_major_order_contiguously(shape, element_bits, block_bytes):
    granule = {4: 2, 6: 4}.get(element_bits, 1)
    if shape:
        shape = (*shape[:-1], shape[-1] * granule)
    blocks = split_blocks(shape, element_bits, block_bytes=block_bytes, granule=granule)
    positions = []
    for block in blocks:
        block_positions = runs_of(block, shape)
        assert block_positions
        assert is_contiguous(block_positions)
        if shape:
            assert (block.num_elems * element_bits) % 8 == 0
            assert block.num_elems * element_bits <= max(block_bytes * 8, granule * element_bits)
        positions += block_positions
    assert positions == list(range(math.prod(shape)))
    assert len(blocks) == len(list(blocks))


@given(any_layouts(), st.integers(1, 64))
@settings(deadline=None, max_examples=examples(200))
def test_split_blocks_part_of_any_chunk_is_one_run_of_it(layout, block_bytes):
    shape, mesh, placements = layout
    for _, chunk in cut_tensor(shape, mesh, placements).cells:
        covered = 0
        for block in split_blocks(shape, 8, block_bytes=block_bytes):
            part = block.intersect(chunk)
            if part is None:
                continue
            inside = Box(tuple(a - b for a, b in zip(part.offsets, chunk.offsets, strict=True)), part.sizes)
            assert is_contiguous(runs_of(inside, chunk.sizes))
            covered += part.num_elems
        assert covered == chunk.num_elems
