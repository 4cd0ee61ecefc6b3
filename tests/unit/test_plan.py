"""Plans by example: literal numbers for a few conversions."""

import pytest

from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.checkpoint.entries import Asset, BlobEntry, ByteSpan, Checkpoint, Chunk, TensorEntry
from ckpt_tools.checkpoint.formats import dcp_placing, hf
from ckpt_tools.checkpoint.formats.safetensors import data_order
from ckpt_tools.checkpoint.formats.torch_zip import item_frame
from ckpt_tools.checkpoint.layout import Box, Mesh, Shard, cut_tensor
from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.transfer.plan import (
    Plan,
    asset_name,
    blob_name,
    blocks_of,
    plan_copies,
)


def _chunk(offsets, sizes, file: str, offset: int, nbytes: int) -> Chunk:
    return Chunk(box=Box(offsets, sizes), span=ByteSpan(file=file, offset=offset, nbytes=nbytes))


def _source() -> Checkpoint:
    """An F32 matrix of 4×6 in two files of two rows, and a scalar."""
    matrix = TensorEntry(
        fqn="w",
        dtype=BY_NAME["F32"],
        shape=(4, 6),
        chunks=(_chunk((0, 0), (2, 6), "a", 100, 48), _chunk((2, 0), (2, 6), "b", 0, 48)),
    )
    scalar = TensorEntry(fqn="s", dtype=BY_NAME["I64"], shape=(), chunks=(_chunk((), (), "a", 148, 8),))
    blob = BlobEntry(fqn="rng", span=ByteSpan(file="b", offset=48, nbytes=30))
    return Checkpoint(root="", format="dcp", tensors=(matrix, scalar), blobs=(blob,), files={"a": 156, "b": 78})


def _columns(source: Checkpoint) -> Checkpoint:
    mesh = Mesh((("tp", 2),))
    cells = {e.fqn: cut_tensor(e.shape, mesh, {"tp": Shard(1)} if e.shape else {}).cells for e in source.tensors}
    return dcp_placing.place(source.tensors, cells, source.blobs)


def test_plan_from_rows_to_columns_names_every_copy() -> None:
    source = _source()
    one, other = Plan(source, _columns(source), {}).files
    assert [file.file for file in (one, other)] == ["__0_0.distcp", "__1_0.distcp"]
    blob, left, scalar = (
        *(c for c in one.copies if "blob" in c.source.fqn),
        *(c for c in one.copies if "blob" not in c.source.fqn),
    )
    (right,) = other.copies
    assert (blob.offset, blob.nbytes, blob.encoding) == (0, 30, "raw")
    assert (left.box, right.box) == (Box((0, 0), (4, 3)), Box((0, 3), (4, 3)))
    assert (left.nbytes, right.nbytes, scalar.nbytes) == (48, 48, 8)
    frame = item_frame(BY_NAME["F32"], (4, 3))
    assert left.offset == 64 + frame.payload_offset
    assert right.offset == frame.payload_offset
    assert other.nbytes == frame.nbytes
    assert all(copy.offset % 64 == 0 for copy in (left, right, scalar))


def test_plan_for_safetensors_begins_behind_the_header() -> None:
    source = _source()
    placed, heads = hf.place({"m.safetensors": data_order(source.tensors)})
    plan = Plan(source, placed, heads)
    (file,) = plan.files
    assert file.head == heads["m.safetensors"]
    first, second = (copy.source for copy in file.copies)
    assert [first, second] == data_order(source.tensors)
    assert [copy.offset for copy in file.copies] == [len(file.head), len(file.head) + first.nbytes]
    assert file.nbytes == plan.total_bytes == len(file.head) + 104
    assert plan.read_bytes == 104


def test_names_of_assets_and_blobs_never_meet_those_of_tensors() -> None:
    names = {
        asset_name(Asset(file="x", nbytes=0)),
        blob_name(BlobEntry(fqn="x", span=ByteSpan(file="", offset=0, nbytes=0))),
    }
    assert len(names) == 2
    assert all("\0" in name for name in names)


def test_plan_into_another_shape_is_refused() -> None:
    source = _source()
    other = TensorEntry(fqn="w", dtype=BY_NAME["F32"], shape=(6, 4), chunks=())
    with pytest.raises(CkptError, match="cannot become"):
        plan_copies(source, Checkpoint(root="", format="hf", tensors=(other,)))


def test_plan_peak_is_bounded_by_blocks() -> None:
    chunk = _chunk((0,), (1 << 30,), "a", 0, 1 << 32)
    big = TensorEntry(fqn="w", dtype=BY_NAME["F32"], shape=(1 << 30,), chunks=(chunk,))
    source = Checkpoint(root="", format="hf", tensors=(big,), files={"a": 1 << 32})
    placed, heads = hf.place({"m": [big]})
    assert Plan(source, placed, heads).peak_bytes(4) == 4 * 2 * (4 << 20)
    assert Plan(_source(), _columns(_source()), {}).peak_bytes(1) == 2 * 96


@pytest.mark.parametrize(("dtype", "shape"), [("F4", (1 << 12, 1 << 12 | 1)), ("F6_E2M3", (1 << 12, 1 << 12 | 2))])
def test_blocks_that_would_end_inside_a_byte_are_refused(dtype: str, shape) -> None:
    with pytest.raises(UsageError, match="inside a byte"):
        blocks_of(TensorEntry(fqn="w", dtype=BY_NAME[dtype], shape=shape, chunks=()), BY_NAME[dtype])
