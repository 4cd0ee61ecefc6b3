"""Plans of random layouts: every destination byte is written exactly once, nothing is read outside of a span."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings, strategies as st
from samples import examples, small_blocks

from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.checkpoint.entries import BlobEntry, ByteSpan, Checkpoint, Chunk, TensorEntry
from ckpt_tools.checkpoint.formats import dcp_placing, hf
from ckpt_tools.checkpoint.formats.dcp_safetensors import describe_sharded, place_sharded
from ckpt_tools.checkpoint.formats.safetensors import HeaderFile, parse_header
from ckpt_tools.checkpoint.formats.torch_zip import item_frame
from ckpt_tools.checkpoint.layout import Box, Mesh, Shard, cut_tensor
from ckpt_tools.checkpoint.tiling import check_tiling
from ckpt_tools.transfer.box_bytes import byte_box, is_contiguous, start_of
from ckpt_tools.transfer.plan import FilePlan, Plan, blocks_of, chunk_index, group_by_tensor, plan_copies

AXES = ("dp_replicate", "dp_shard", "tp", "ep")


@st.composite
def meshes(draw) -> Mesh:
    names = draw(st.lists(st.sampled_from(AXES), min_size=1, max_size=3, unique=True))
    return Mesh(tuple((name, draw(st.integers(1, 4))) for name in names))


@st.composite
def shapes(draw) -> dict[str, tuple[str, tuple[int, ...]]]:
    tensors = {}
    for i in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from(("U8", "BF16", "F32", "C64", "F4")))
        shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
        tensors[f"t{i}"] = (dtype, (*shape, 4) if dtype == "F4" else shape)
    return tensors


def _placements(draw, mesh: Mesh, shape: tuple[int, ...]) -> dict[str, Shard]:
    if not shape:
        return {}
    return {name: Shard(draw(st.integers(0, len(shape) - 1))) for name, _ in mesh.axes if name != "dp_replicate"}


def _entries(shapes) -> list[TensorEntry]:
    return [TensorEntry(fqn=n, dtype=BY_NAME[d], shape=shape, chunks=()) for n, (d, shape) in shapes.items()]


def _raw_source(draw, shapes, mesh: Mesh) -> Checkpoint:
    """Raw chunks, one file per rank, items one after the other; replicas stored too."""
    ends: dict[str, int] = {}
    tensors = []
    for entry in _entries(shapes):
        grid = cut_tensor(entry.shape, mesh, _placements(draw, mesh, entry.shape), pack=entry.dtype.pack)
        chunks = []
        for rank in range(mesh.world_size):
            box, file = grid.local_box(rank), f"r{rank}"
            nbytes = entry.dtype.num_bytes(box.num_elems)
            chunks.append(Chunk(box=box, span=ByteSpan(file=file, offset=ends.get(file, 0), nbytes=nbytes)))
            ends[file] = ends.get(file, 0) + nbytes
        tensors.append(replace(entry, chunks=tuple(chunks)))
    return Checkpoint(root="", format="dcp", tensors=tuple(tensors), files=ends)


def _cells(draw, tensors: Sequence[TensorEntry], mesh: Mesh):
    cuts = ((entry, _placements(draw, mesh, entry.shape)) for entry in tensors)
    return {entry.fqn: cut_tensor(entry.shape, mesh, cut, pack=entry.dtype.pack).cells for entry, cut in cuts}


def _assert_tiles(ranges: list[tuple[int, int]], nbytes: int, *, slack: int = 0) -> None:
    """The ranges lie in [0, nbytes) in order, disjoint, with gaps smaller than `slack` at most."""
    filled = sorted(r for r in ranges if r[0] != r[1])
    for (_, end), (start, _) in pairwise([(0, 0), *filled, (nbytes, nbytes)]):
        assert 0 <= start - end <= slack


def _assert_reads_stay_inside(files: Sequence[FilePlan]) -> None:
    for entry, group in group_by_tensor(files):
        index = chunk_index(entry)
        for block in blocks_of(entry, group[0][1].dtype):
            if not any(copy.box.intersect(block) for _, copy in group):
                continue
            read = []
            for chunk, part in index.overlaps(block):
                piece, whole = byte_box(part, entry.dtype), byte_box(chunk.box, entry.dtype)
                assert is_contiguous(piece, whole)
                start = start_of(piece, whole)
                assert 0 <= start <= start + piece.num_elems <= chunk.span.nbytes
                read.append(part)
            for _, copy in group:
                wanted = copy.box.intersect(block)
                parts = [part.intersect(wanted) for part in read] if wanted else []
                assert sum(part.num_elems for part in parts if part) == (wanted.num_elems if wanted else 0)


def _assert_writes_tile(files: Sequence[FilePlan]) -> None:
    for _, group in group_by_tensor(files):
        for _, copy in group:
            ranges = []
            whole = byte_box(copy.box, copy.dtype)
            for block in blocks_of(copy.source, copy.dtype):
                part = block.intersect(copy.box)
                if part is not None:
                    piece = byte_box(part, copy.dtype)
                    assert is_contiguous(piece, whole)
                    start = start_of(piece, whole)
                    ranges.append((start, start + piece.num_elems))
            _assert_tiles(ranges, copy.nbytes)
    for file in files:
        spans = [(0, len(file.head))]
        for copy in file.copies:
            before = after = 0
            if copy.encoding == "torch_zip":
                frame = item_frame(copy.dtype, copy.box.sizes)
                assert frame.payload_nbytes == copy.nbytes
                before = frame.payload_offset
                after = frame.nbytes - before - copy.nbytes
            spans.append((copy.offset - before, copy.offset + copy.nbytes + after))
        _assert_tiles(spans, file.nbytes, slack=dcp_placing.ITEM_ALIGNMENT - 1)


def _assert_whole(files: Sequence[FilePlan], source: Checkpoint) -> None:
    """Every element of every tensor goes to exactly one place."""
    boxes: dict[str, list[Box]] = {}
    for file in files:
        for copy in file.copies:
            boxes.setdefault(copy.source.fqn, []).append(copy.box)
            needed = [chunk.box for chunk in copy.source.chunks]
            covered = sum(b.intersect(copy.box).num_elems for b in set(needed) if b.intersect(copy.box))
            assert covered == copy.box.num_elems or 0 in copy.box.sizes
    for entry in source.tensors:
        assert len(set(boxes[entry.fqn])) == len(boxes[entry.fqn])
        assert check_tiling(entry.shape, boxes[entry.fqn]) is None


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data(), shapes=shapes(), before=meshes(), after=meshes(), blobs=st.lists(st.integers(0, 90), max_size=2))
def test_plan_for_a_mesh_writes_every_byte_once_and_reads_inside_spans(data, shapes, before, after, blobs) -> None:
    source = _raw_source(data.draw, shapes, before)
    spans = [ByteSpan(file="r0", offset=i, nbytes=n) for i, n in enumerate(blobs)]
    source = replace(source, blobs=tuple(BlobEntry(fqn=f"b{i}", span=span) for i, span in enumerate(spans)))
    cells = _cells(data.draw, source.tensors, after)
    with small_blocks(data.draw(st.sampled_from((8, 24, 100, 4 << 20)))):
        plan = Plan(source, dcp_placing.place(source.tensors, cells, source.blobs), {})
        _assert_whole(plan.files, source)
        _assert_reads_stay_inside(plan.files)
        _assert_writes_tile(plan.files)


@settings(max_examples=examples(80), deadline=None)
@given(data=st.data(), shapes=shapes(), mesh=meshes(), limit=st.integers(1, 300))
def test_plan_for_hf_files_writes_every_byte_once_and_reads_inside_spans(data, shapes, mesh, limit) -> None:
    source = _raw_source(data.draw, shapes, mesh)
    placed, heads = hf.place(hf.arrange(source.tensors, max_file_nbytes=limit))
    with small_blocks(data.draw(st.sampled_from((8, 100, 4 << 20)))):
        plan = Plan(source, placed, heads)
        _assert_whole(plan.files, source)
        _assert_reads_stay_inside(plan.files)
        _assert_writes_tile(plan.files)
        for file in plan.files:  # no alignment between tensors of a safetensors file
            written = len(file.head) + sum(copy.nbytes for copy in file.copies)
            assert written == file.nbytes
    assert plan.total_bytes == sum(placed.files.values())


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data(), shapes=shapes(), mesh=meshes())
def test_safetensors_of_ranks_say_where_every_chunk_is(data, shapes, mesh) -> None:
    tensors = [entry for entry in _entries(shapes) if entry.dtype.name != "F4"]
    cells = _cells(data.draw, tensors, mesh)
    placed, heads = place_sharded(tensors, cells)
    assert [(entry.fqn, tuple(chunk.box for chunk in entry.chunks)) for entry in placed.tensors] == [
        (entry.fqn, tuple(box for _, box in cells[entry.fqn])) for entry in tensors
    ]
    files = []
    for name, head in heads.items():
        header = parse_header(head[8:], file=name, file_nbytes=placed.files[name])  # data without holes, to the end
        files.append(HeaderFile(name=name, header_text=head[8:], header=header))
    read = describe_sharded("", files)
    assert {entry.fqn: entry for entry in read.tensors} == {entry.fqn: entry for entry in placed.tensors}
    assert read.files == placed.files


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data(), shapes=shapes(), before=meshes(), after=meshes())
def test_plan_of_one_file_names_all_that_it_needs(data, shapes, before, after) -> None:
    source = _raw_source(data.draw, shapes, before)
    cells = _cells(data.draw, source.tensors, after)
    for file in plan_copies(source, dcp_placing.place(source.tensors, cells)):
        _assert_writes_tile([file])
        _assert_reads_stay_inside([file])
        for copy in file.copies:
            parts = {chunk.box.intersect(copy.box) for chunk in copy.source.chunks} - {None}
            assert sum(part.num_elems for part in parts) == (0 if 0 in copy.box.sizes else copy.box.num_elems)
