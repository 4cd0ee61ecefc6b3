"""Meshes, placements, boxes and blocks, with literal numbers."""

from __future__ import annotations

import pytest

from ckpt_tools.checkpoint.layout import (
    Box,
    Mesh,
    Replicate,
    Shard,
    cut,
    cut_tensor,
    parse_mesh,
    parse_placement,
    split_blocks,
)
from ckpt_tools.errors import UsageError

S0, S1, R = Shard(0), Shard(1), Replicate()
FSDP_TP = Mesh((("dp_shard", 2), ("tp", 2)))
HSDP = Mesh((("dp_replicate", 2), ("dp_shard", 2)))


def test_mesh_rank_varies_fastest_along_the_last_axis():
    mesh = Mesh((("dp_replicate", 2), ("dp_shard", 3), ("tp", 2)))
    assert mesh.world_size == 12
    assert [mesh.coordinate(rank) for rank in (0, 1, 2, 6, 11)] == [
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 0),
        (1, 0, 0),
        (1, 2, 1),
    ]
    assert [mesh.rank(mesh.coordinate(rank)) for rank in range(12)] == list(range(12))


def test_mesh_size_of_an_absent_axis_is_one():
    assert (FSDP_TP.size("tp"), FSDP_TP.size("ep")) == (2, 1)


def test_mesh_prints_as_it_is_parsed():
    assert str(parse_mesh("dp_replicate=2, dp_shard=4,tp=2")) == "dp_replicate=2,dp_shard=4,tp=2"


@pytest.mark.parametrize(("alias", "axis"), [("fsdp", "dp_shard"), ("dp", "dp_shard"), ("ddp", "dp_replicate")])
def test_parse_mesh_alias_gives_the_axis(alias, axis):
    assert parse_mesh(f"{alias}=3") == Mesh(((axis, 3),))


def test_parse_mesh_minus_one_is_inferred_from_the_world_size():
    assert parse_mesh("dp_shard=-1,tp=2", world_size=16) == Mesh((("dp_shard", 8), ("tp", 2)))


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


def test_placements_print_as_they_are_written():
    assert (str(S1), str(R)) == ("S(1)", "R")


@pytest.mark.parametrize(
    ("length", "num_parts", "parts"),
    [
        (8, 4, [(0, 2), (2, 2), (4, 2), (6, 2)]),
        (10, 4, [(0, 3), (3, 3), (6, 3), (9, 1)]),
        (5, 4, [(0, 2), (2, 2), (4, 1), (5, 0)]),
        (1, 3, [(0, 1), (1, 0), (1, 0)]),
        (0, 2, [(0, 0), (0, 0)]),
    ],
)
def test_cut_uneven_leaves_the_last_parts_short_or_empty(length, num_parts, parts):
    assert cut(length, num_parts) == parts


def test_box_intersect_touching_boxes_share_nothing():
    assert Box((0, 0), (2, 4)).intersect(Box((2, 0), (2, 4))) is None
    assert Box((0, 0), (3, 4)).intersect(Box((2, 1), (2, 9))) == Box((2, 1), (1, 3))
    assert Box((), ()).intersect(Box((), ())) == Box((), ())
    assert Box((0,), (0,)).intersect(Box((0,), (4,))) is None


def test_cut_tensor_same_dim_cuts_tp_first_and_fsdp_inside():
    grid = cut_tensor((8, 3), FSDP_TP, {"dp_shard": S0, "tp": S0})
    # Ranks (dp, tp): TP halves are rows 0..4 and 4..8; FSDP halves each of them.
    assert [grid.local_box(rank).offsets for rank in range(4)] == [(0, 0), (4, 0), (2, 0), (6, 0)]
    assert {grid.local_box(rank).sizes for rank in range(4)} == {(2, 3)}


def test_cut_tensor_same_dim_does_not_depend_on_the_order_of_the_axes_but_ranks_do():
    grid = cut_tensor((8,), Mesh((("tp", 2), ("dp_shard", 2))), {"dp_shard": S0, "tp": S0})
    assert [grid.local_box(rank).offsets for rank in range(4)] == [(0,), (2,), (4,), (6,)]


def test_cut_tensor_different_dims_give_a_grid():
    grid = cut_tensor((4, 6), FSDP_TP, {"dp_shard": S0, "tp": S1})
    assert [grid.local_box(rank) for rank in range(4)] == [
        Box((0, 0), (2, 3)),
        Box((0, 3), (2, 3)),
        Box((2, 0), (2, 3)),
        Box((2, 3), (2, 3)),
    ]


def test_cells_replicas_belong_to_the_lowest_rank():
    cells = cut_tensor((4,), HSDP, {"dp_shard": S0}).cells
    assert cells == ((0, Box((0,), (2,))), (1, Box((2,), (2,))))


def test_cells_tensor_off_the_tp_axis_belongs_to_tp_rank_zero():
    cells = cut_tensor((4,), FSDP_TP, {"dp_shard": S0}).cells
    assert [rank for rank, _ in cells] == [0, 2]


def test_cells_empty_shards_share_one_box_at_the_end():
    cells = cut_tensor((3, 2), Mesh((("dp_shard", 5),)), {"dp_shard": S0}).cells
    assert cells[-1] == (3, Box((3, 0), (0, 2)))
    assert len(cells) == 4


def test_cells_zero_dim_tensor_is_one_box():
    assert cut_tensor((), HSDP, {}).cells == ((0, Box((), ())),)


def test_cells_zero_size_tensor_is_one_empty_box():
    assert cut_tensor((0, 4), HSDP, {"dp_shard": S0}).cells == ((0, Box((0, 0), (0, 4))),)


def test_cut_tensor_packed_dtype_is_cut_between_torch_elements():
    # 6 logical F4 elements are 3 bytes in torch: chunks of 2 and 1 bytes, so 4 and 2 elements.
    grid = cut_tensor((2, 6), Mesh((("dp_shard", 2),)), {"dp_shard": S1}, pack=2)
    assert [box for _, box in grid.cells] == [Box((0, 0), (2, 4)), Box((0, 4), (2, 2))]


def test_cut_tensor_packed_dtype_leaves_other_dims_alone():
    grid = cut_tensor((3, 6), Mesh((("dp_shard", 2),)), {"dp_shard": S0}, pack=2)
    assert [box for _, box in grid.cells] == [Box((0, 0), (2, 6)), Box((2, 0), (1, 6))]


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


def test_split_blocks_small_tensor_is_one_block():
    assert list(split_blocks((3, 4), 32, block_bytes=48)) == [Box((0, 0), (3, 4))]
    assert list(split_blocks((), 64, block_bytes=1)) == [Box((), ())]


def test_split_blocks_zero_size_tensor_has_none():
    assert list(split_blocks((4, 0), 32, block_bytes=64)) == []


def test_split_blocks_last_dim_steps_by_whole_bytes():
    blocks = split_blocks((32,), 4, block_bytes=3, granule=2)
    assert [box.sizes for box in blocks] == [(6,)] * 5 + [(2,)]


def test_blocks_index_past_the_end_raises():
    with pytest.raises(IndexError):
        split_blocks((4,), 8, block_bytes=2)[2]
