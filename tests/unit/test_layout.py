"""Meshes, placements, boxes and blocks, with literal numbers."""

from __future__ import annotations

import pytest

from ckpt_tools.checkpoint.layout import (
    Box,
    Mesh,
    Replicate,
    Shard,
    cut_tensor,
    parse_mesh,
    parse_placement,
    split_blocks,
)
from ckpt_tools.errors import UsageError

S0, S1, R = Shard(0), Shard(1), Replicate()
FSDP_TP = Mesh((("dp_shard", 2), ("tp", 2)))
HSDP = Mesh((("dp_replicate", 2), ("dp_shard", 2)))


def fsdp(num_ranks):
    return Mesh((("dp_shard", num_ranks),))


def test_mesh_rank_varies_fastest_along_the_last_axis():
    mesh = Mesh((("dp_replicate", 2), ("dp_shard", 3), ("tp", 2)))
    assert (mesh.world_size, mesh.size("dp_shard"), mesh.size("ep")) == (12, 3, 1)  # an absent axis has size one
    corners = {0: (0, 0, 0), 1: (0, 0, 1), 2: (0, 1, 0), 6: (1, 0, 0), 11: (1, 2, 1)}
    assert {rank: mesh.coordinate(rank) for rank in corners} == corners
    assert [mesh.rank(mesh.coordinate(rank)) for rank in range(12)] == list(range(12))


def test_meshes_and_placements_print_as_they_are_written():
    assert str(parse_mesh("dp_replicate=2, dp_shard=4,tp=2")) == "dp_replicate=2,dp_shard=4,tp=2"
    assert (str(S1), str(R)) == ("S(1)", "R")


@pytest.mark.parametrize(
    ("text", "world_size", "fragment"),
    [
        ("", None, "is not an axis"),
        ("dp_shard", None, "is not an axis"),
        ("dp_shard=two", None, "is not an axis"),
        ("dp_shard=4,", None, "is not an axis"),
        ("rows=4", None, "unknown mesh axis 'rows'"),
        ("dp_shard=0", None, "at least 1"),
        ("dp_shard=-2", None, "at least 1"),
        ("tp=2,tp=2", None, "named twice"),
        ("fsdp=2,dp_shard=2", None, "named twice"),
        ("dp_shard=-1,tp=-1", 4, "only one axis"),
        ("dp_shard=-1", None, "needs --world-size"),
        ("dp_shard=-1,tp=3", 8, "not a multiple of 3"),
        ("dp_shard=-1,tp=0", 8, "not a multiple of 0"),
        ("dp_shard=4", 8, "has 4 ranks"),
    ],
)
def test_parse_mesh_impossible_text_is_refused(text, world_size, fragment):
    with pytest.raises(UsageError, match=fragment):
        parse_mesh(text, world_size=world_size)


@pytest.mark.parametrize(
    ("text", "placement"),
    [("S(0)", S0), ("Shard(1)", S1), (" S(12) ", Shard(12)), ("R", R), ("Replicate", R), ("Replicate()", R)],
)
def test_parse_placement_known_spelling_is_understood(text, placement):
    assert parse_placement(text) == placement


@pytest.mark.parametrize(
    "text", ["", "S", "S()", "S(-1)", "S(0", "S(0))", "s(0)", "S(0.0)", "P", "R(0)", "_StridedShard(0)"]
)
def test_parse_placement_unknown_spelling_is_refused(text):
    with pytest.raises(UsageError, match="is not a placement"):
        parse_placement(text)


def test_box_intersect_touching_boxes_share_nothing():
    assert Box((0, 0), (2, 4)).intersect(Box((2, 0), (2, 4))) is None
    assert Box((0, 0), (3, 4)).intersect(Box((2, 1), (2, 9))) == Box((2, 1), (1, 3))
    assert Box((), ()).intersect(Box((), ())) == Box((), ())
    assert Box((0,), (0,)).intersect(Box((0,), (4,))) is None


@pytest.mark.parametrize(
    ("shape", "mesh", "placements", "pack", "cells"),
    [
        ((4,), HSDP, {"dp_shard": S0}, 1, {0: ((0,), (2,)), 1: ((2,), (2,))}),  # replicas: the lowest rank
        ((4,), FSDP_TP, {"dp_shard": S0}, 1, {0: ((0,), (2,)), 2: ((2,), (2,))}),  # off the tp axis: its rank 0
        # Empty shards share one box at the end.
        ((3, 2), fsdp(5), {"dp_shard": S0}, 1, {n: ((n, 0), (int(n < 3), 2)) for n in range(4)}),
        ((), HSDP, {}, 1, {0: ((), ())}),
        ((0, 4), HSDP, {"dp_shard": S0}, 1, {0: ((0, 0), (0, 4))}),
        # 6 logical F4 elements are 3 bytes in torch: chunks of 2 and 1 bytes, so 4 and 2 elements.
        ((2, 6), fsdp(2), {"dp_shard": S1}, 2, {0: ((0, 0), (2, 4)), 1: ((0, 4), (2, 2))}),
        ((3, 6), fsdp(2), {"dp_shard": S0}, 2, {0: ((0, 0), (2, 6)), 1: ((2, 0), (1, 6))}),
    ],
)
def test_cells_belong_to_the_lowest_rank_that_has_them(shape, mesh, placements, pack, cells):
    found = cut_tensor(shape, mesh, placements, pack=pack).cells
    assert found == tuple((rank, Box(*box)) for rank, box in cells.items())


@pytest.mark.parametrize("shape", [(4, 5), (3,), ()])
def test_cut_tensor_half_filled_torch_element_is_refused(shape):
    with pytest.raises(UsageError, match="not a multiple of 2"):
        cut_tensor(shape, HSDP, {}, pack=2)


def test_cut_tensor_absent_dim_is_refused():
    with pytest.raises(UsageError, match=r"dp_shard=S\(2\)"):
        cut_tensor((4, 4), HSDP, {"dp_shard": Shard(2)})
    with pytest.raises(UsageError, match=r"dp_shard=S\(0\)"):
        cut_tensor((), HSDP, {"dp_shard": S0})


def test_cut_tensor_equal_shapes_share_one_grid():
    assert cut_tensor((4, 4), HSDP, {"dp_shard": S0}) is cut_tensor((4, 4), HSDP, {"dp_shard": S0})


def test_split_blocks_range_along_the_first_dim_that_does_not_fit():
    blocks = split_blocks((3, 10, 4), 8, block_bytes=16)
    assert (blocks.dim, blocks.step, len(blocks)) == (1, 4, 9)
    assert list(blocks)[:4] == [
        Box((0, 0, 0), (1, 4, 4)),
        Box((0, 4, 0), (1, 4, 4)),
        Box((0, 8, 0), (1, 2, 4)),
        Box((1, 0, 0), (1, 4, 4)),
    ]


def test_split_blocks_of_little_and_of_nothing_and_at_whole_bytes():
    assert list(split_blocks((3, 4), 32, block_bytes=48)) == [Box((0, 0), (3, 4))]
    assert list(split_blocks((), 64, block_bytes=1)) == [Box((), ())]
    assert list(split_blocks((4, 0), 32, block_bytes=64)) == []
    blocks = split_blocks((32,), 4, block_bytes=3, granule=2)
    assert [box.sizes for box in blocks] == [(6,)] * 5 + [(2,)]


def test_blocks_index_past_the_end_raises():
    with pytest.raises(IndexError):
        split_blocks((4,), 8, block_bytes=2)[2]
