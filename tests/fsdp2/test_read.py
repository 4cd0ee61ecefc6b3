"""Boxes of tensors, out of every format, bit for bit and byte for byte."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import save_file
from samples import examples

from ckpt_tools import api
from ckpt_tools.checkpoint.formats.opening import open_path
from ckpt_tools.checkpoint.layout import Box
from ckpt_tools.checkpoint.names import mosaic
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.fsdp2.read import BoxReader, Whole, as_whole
from ckpt_tools.transfer.box_bytes import MAX_WASTE

SHAPES = {"matrix": (13, 12), "cube": (5, 6, 8), "vector": (17,), "scalar": (), "strided": (6, 10)}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The same tensors as safetensors, and as DCP cut along rows, columns and both; one stored column-major."""
    import torch.distributed.checkpoint as dcp

    directory = tmp_path_factory.mktemp("boxes")
    draw = torch.Generator().manual_seed(1)
    state = {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
    save_file(state, directory / "model.safetensors")
    source = directory / "model.safetensors"
    api.shard(source, directory / "rows", mesh="dp_shard=4")
    api.shard(source, directory / "columns", mesh="dp_shard=1,tp=3", set=["{matrix,cube}=tp:S(1)"])
    both = ["matrix=tp:S(1)", "cube=tp:S(2)"]
    api.shard(source, directory / "both", mesh="dp_shard=3,tp=2", set=both)
    stored = state | {"strided": state["strided"].t().contiguous().t()}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save(stored, checkpoint_id=directory / "torch", no_dist=True)
    return directory, state


@pytest.mark.parametrize("form", ["model.safetensors", "rows", "columns", "both", "torch"])
@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_box_of_any_format_is_that_of_the_tensor(made, form, data):
    directory, state = made
    name = data.draw(st.sampled_from(sorted(SHAPES)))
    offsets, sizes = [], []
    for length in SHAPES[name]:
        start = data.draw(st.integers(0, length))
        offsets.append(start)
        sizes.append(data.draw(st.integers(0, length - start)))
    part = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
    with open_path(str(directory / form)) as opened:
        entry = next(entry for entry in opened.checkpoint.tensors if entry.fqn == name)
        reader = BoxReader(opened)
        found = reader.read(as_whole(entry), Box(tuple(offsets), tuple(sizes)), torch.float32)
        assert torch.equal(found, state[name][part])
        assert found.is_contiguous()
        assert found.numel() * 4 <= reader.bytes_read <= MAX_WASTE * found.numel() * 4
        half = reader.read(as_whole(entry), Box(tuple(offsets), tuple(sizes)), torch.bfloat16)
        assert torch.equal(half, state[name][part].bfloat16())


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_box_of_tensors_that_are_put_together_is_that_of_the_whole(made, data):
    directory, state = made
    with open_path(str(directory / "rows")) as opened:
        entry = next(entry for entry in opened.checkpoint.tensors if entry.fqn == "matrix")
        # Three in a list, each beside its own transposed last rows: (3, 25, 12)
        matrix = mosaic.whole("matrix", entry.dtype, entry.shape)
        rest = mosaic.transpose(mosaic.part_of(matrix, 0, 1, 12), 0, 1)
        whole = Whole(fqn="w", mosaic=mosaic.stack([mosaic.join([matrix, rest], 0)] * 3, 0), entries={"matrix": entry})
        expected = torch.stack([torch.cat([state["matrix"], state["matrix"][1:].t()])] * 3)
        reader = BoxReader(opened)
        box = []
        for length in whole.shape:
            start = data.draw(st.integers(0, length))
            box.append((start, data.draw(st.integers(0, length - start))))
        found = reader.read(whole, Box(*map(tuple, zip(*box, strict=True))), torch.float32)
        assert found.numel() * 4 <= reader.bytes_read <= MAX_WASTE * found.numel() * 4
        assert torch.equal(found, expected[tuple(slice(o, o + n) for o, n in box)])


def test_block_larger_than_one_piece_is_read_in_order(tmp_path):
    tensor = torch.arange(3_000_000, dtype=torch.float32).reshape(1500, 2000)
    save_file({"big": tensor}, tmp_path / "model.safetensors")
    with open_path(str(tmp_path)) as opened:
        whole = as_whole(opened.checkpoint.tensors[0])
        for box in (Box((1, 0), (1499, 2000)), Box((3, 7), (1400, 1900))):
            part = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
            assert torch.equal(BoxReader(opened).read(whole, box, torch.float32), tensor[part])


def test_damaged_chunk_is_refused_when_it_is_read_whole(made, tmp_path):
    import shutil

    shutil.copytree(made[0] / "rows", tmp_path / "rows")
    with open_path(str(tmp_path / "rows")) as opened:
        entry = next(entry for entry in opened.checkpoint.tensors if entry.fqn == "matrix")
        chunk = opened.resolve(entry).chunks[0]
    file = tmp_path / "rows" / chunk.span.file
    data = bytearray(file.read_bytes())
    data[chunk.span.offset + 3] ^= 1
    file.write_bytes(data)
    with open_path(str(tmp_path / "rows")) as opened, pytest.raises(UnreadableError, match="'matrix' is damaged"):
        BoxReader(opened).read(as_whole(entry), Box((0, 0), (13, 12)), torch.float32)
    stacked = mosaic.stack([mosaic.whole("matrix", entry.dtype, entry.shape)] * 2, 0)
    stack = Whole(fqn="w", mosaic=stacked, entries={"matrix": entry})
    with open_path(str(tmp_path / "rows")) as opened:
        reader = BoxReader(opened)
        reader.read(stack, Box((0, 12, 0), (2, 1, 12)), torch.float32)
        with pytest.raises(UnreadableError, match="'w' is damaged"):
            reader.read(stack, Box((1, 0, 0), (1, 13, 12)), torch.float32)


def test_incomplete_tensor_is_refused_by_its_name_in_the_checkpoint(made):
    with open_path(str(made[0] / "rows")) as opened:
        entry = next(entry for entry in opened.checkpoint.tensors if entry.fqn == "matrix")
        entry = replace(entry, chunks=entry.chunks[1:])
        turned = mosaic.transpose(mosaic.whole("matrix", entry.dtype, entry.shape), 0, 1)
        whole = Whole(fqn="w", mosaic=turned, entries={"matrix": entry})
        with pytest.raises(UnreadableError, match="'matrix' is incomplete"):
            BoxReader(opened).read_whole(whole, torch.float32)


def test_integers_are_not_cast(tmp_path):
    save_file({"ids": torch.arange(4)}, tmp_path / "model.safetensors")
    with open_path(str(tmp_path)) as opened, pytest.raises(UsageError, match="only floating-point types are cast"):
        BoxReader(opened).read(as_whole(opened.checkpoint.tensors[0]), Box((0,), (4,)), torch.float32)
