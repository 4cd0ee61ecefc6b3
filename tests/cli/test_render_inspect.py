"""What `ckpt inspect` prints, line by line."""

import io
from collections import Counter
from dataclasses import replace
from textwrap import dedent

import pytest

from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.checkpoint.entries import BlobEntry, ByteSpan, Checkpoint, Chunk, TensorEntry
from ckpt_tools.checkpoint.layout import Box, Layout, Mesh, Shard
from ckpt_tools.checkpoint.summarise import overlay, summarise
from ckpt_tools.cli.inspection import render
from ckpt_tools.cli.screen import Screen
from ckpt_tools.cli.views.layouts import format_ranges


def _whole(fqn: str, shape, *, dtype: str = "F32", file: str = "model.safetensors") -> TensorEntry:
    entry = BY_NAME[dtype]
    span = ByteSpan(file=file, offset=64, nbytes=TensorEntry(fqn="", dtype=entry, shape=shape, chunks=()).nbytes)
    return TensorEntry(fqn=fqn, dtype=entry, shape=shape, chunks=(Chunk(box=Box((0,) * len(shape), shape), span=span),))


@pytest.fixture
def model() -> Checkpoint:
    """A plain model: an embedding, three layers, a norm."""
    layers = [
        _whole(f"model.layers.{i}.{name}", shape, dtype="BF16")
        for i in range(3)
        for name, shape in (("up.weight", (64, 16)), ("norm.weight", (16,)))
    ]
    tensors = (_whole("model.embed.weight", (32, 16)), *layers, _whole("model.norm.weight", (16,)))
    return Checkpoint(root="base", format="hf", tensors=tensors, files={"model.safetensors": 9000})


def _sharded(model: Checkpoint, mesh: Mesh, tp_dim: int | None = None) -> Checkpoint:
    """As found on disk: no mesh recorded, every file there."""
    placements = {}
    for tensor in model.tensors:
        placements[tensor.fqn] = {"dp_shard": Shard(0)}
        if tp_dim is not None and len(tensor.shape) == 2:
            placements[tensor.fqn]["tp"] = Shard(tp_dim)
    return replace(overlay(model, Layout(mesh=mesh, placements=placements)), mesh=None, placements=None, root="run")


def _drawn(checkpoint: Checkpoint, *, mesh_source=None, width=100, colour=False, inside=None, **options) -> str:
    stream = io.StringIO()
    screen = Screen(stream=stream, width=width, colour=colour)
    found = {} if inside is None else {"inside": inside, "census": sum(inside.values(), Counter())}
    render(replace(summarise(checkpoint, mesh_source=mesh_source), **found), screen, **options)
    return stream.getvalue()


def _text(text: str) -> str:
    return dedent(text).lstrip("\n")


def test_render_four_ranks_shows_header_ranks_modules_blobs(model: Checkpoint) -> None:
    checkpoint = _sharded(model, Mesh((("dp_shard", 4),)))
    blob = BlobEntry(fqn="rng", span=ByteSpan(file="__0_0.distcp", offset=0, nbytes=1234))
    assert _drawn(replace(checkpoint, blobs=(blob,)), inside={"rng": Counter(tensors=1, bytes=8)}) == _text(
        """
        path      run
        format    dcp
        tensors   8: 3,648 elements, 8.16 KiB
        chunks    32 in 4 files, 8.16 KiB on disk
        dtypes    BF16 6.09 KiB, F32 2.06 KiB
        mesh      dp_shard=4, 4 ranks (inferred from the chunks)
        blobs     1 (not tensors, never unpickled): 1 tensor, 8 B
        ranks     4, fullest rank ÷ mean 1.00

        modules
          module                      tensors  elements     bytes  share
          model.embed.weight                1       512  2.00 KiB  24.5%  ████████
          model.layers.*.up.weight          3     3,072  6.00 KiB  73.6%  ████████████████████████
          model.layers.*.norm.weight        3        48      96 B   1.1%  ▍
          model.norm.weight                 1        16      64 B   0.8%  ▎

        blobs: 1
          name  bytes  file          holds
          rng   1,234  __0_0.distcp  1 tensor, 8 B
        """
    )


def test_render_plain_model_shows_files(model: Checkpoint) -> None:
    assert _drawn(model) == _text(
        """
        path      base
        format    hf
        tensors   8: 3,648 elements, 8.16 KiB
        chunks    8 in model.safetensors, 8.79 KiB on disk
        dtypes    BF16 6.09 KiB, F32 2.06 KiB

        modules
          module                      tensors  elements     bytes  share
          model.embed.weight                1       512  2.00 KiB  24.5%  ████████
          model.layers.*.up.weight          3     3,072  6.00 KiB  73.6%  ████████████████████████
          model.layers.*.norm.weight        3        48      96 B   1.1%  ▍
          model.norm.weight                 1        16      64 B   0.8%  ▎
        """
    )


@pytest.mark.parametrize(("width", "bar"), [(84, "  " + "█" * 18), (75, "")], ids=["room", "no room"])
def test_render_modules_bars_take_the_room_that_is_left(model: Checkpoint, width: int, bar: str) -> None:
    row = next(line for line in _drawn(model, width=width).splitlines() if "up.weight" in line)
    assert row == f"  model.layers.*.up.weight          3     3,072  6.00 KiB  73.6%{bar}"


def test_render_by_module_maps_ranks_and_folds_equal_layers(model: Checkpoint) -> None:
    checkpoint = _sharded(model, Mesh((("dp_shard", 12),)))
    drawn = _drawn(checkpoint, by="module")
    assert drawn[drawn.index("bytes by") :] == _text(
        """
        bytes by module and rank: a column is one rank, a row is scaled to its fullest
                            0       8
          model.embed       ██████████▓   2.00 KiB
          model.layers.0-2  ██████████▓   2.03 KiB each
          model.norm        ████████      64 B
        """
    )


def test_render_by_module_many_ranks_share_columns(model: Checkpoint) -> None:
    # 32 rows of the embedding over 64 ranks: ten full columns of three ranks, then two ranks of three.
    drawn = _drawn(_sharded(model, Mesh((("dp_shard", 64),))), by="module", width=60)
    assert drawn[drawn.index("bytes by") :] == _text(
        """
        bytes by module and rank: a column is 3 ranks (their mean), a row is scaled to its fullest
                            0       24      48
          model.embed       ██████████▓             2.00 KiB
          model.layers.0-2  ██████████████████████  2.03 KiB each
          model.norm        █████░                  64 B
        """
    )


def test_render_above_32_ranks_folds_equal_ranks(model: Checkpoint) -> None:
    drawn = _drawn(_sharded(model, Mesh((("dp_shard", 64),))), by="rank")
    assert drawn[drawn.index("ranks: ") :] == _text(
        """
        ranks: 64, fullest rank ÷ mean 1.30
          min 96 B, median 128 B, max 170 B per rank
          ranks  count  bytes each                   chunks each
          0-15      16       170 B  ████  high +30%            8
          16         1       160 B  ████  high +23%            8
          17-31     15       160 B  ████  high +23%            4
          32         1        96 B  ▒▒▒▒  low -26%             4
          33-63     31        96 B  ▒▒▒▒  low -26%             3
        """
    )


def test_render_many_unlike_ranks_shows_fullest_and_emptiest() -> None:
    chunks = tuple(
        Chunk(box=Box((r * 100,), (100 + r,)), span=ByteSpan(file=f"__{r}_0.distcp", offset=0, nbytes=1))
        for r in range(50)
    )
    tensor = TensorEntry(fqn="w", dtype=BY_NAME["U8"], shape=(5000,), chunks=chunks)
    lines = _drawn(Checkpoint(root="r", format="dcp", tensors=(tensor,)), by="rank").splitlines()
    assert "  the fullest and the emptiest, 18 ranks between them left out" in lines
    assert [line.split()[0] for line in lines[-32:]] == [str(r) for r in (*range(49, 33, -1), *range(15, -1, -1))]


def test_render_uneven_ranks_are_flagged_in_words() -> None:
    chunks = tuple(
        Chunk(box=Box((at,), (size,)), span=ByteSpan(file=f"__{rank}_0.distcp", offset=0, nbytes=size))
        for rank, (at, size) in enumerate([(0, 6), (6, 2)])
    )
    tensor = TensorEntry(fqn="w", dtype=BY_NAME["U8"], shape=(8,), chunks=chunks)
    drawn = _drawn(Checkpoint(root="r", format="dcp", tensors=(tensor,)), by="rank")
    assert drawn.partition("ranks: ")[2] == _text(
        """
        2, fullest rank ÷ mean 1.50
          rank  bytes                   chunks  files
             0    6 B  ████  high +50%       1  __0_0.distcp
             1    2 B  ░░░░  low -50%        1  __1_0.distcp
        """
    )
    assert drawn.startswith(
        "missing: 2 of 2 files: __0_0.distcp, __1_0.distcp\n"
        "uneven: rank 0 holds 6 B, the mean is 4 B\n"
        "mesh not known: none explains every chunk\n"
    )


def test_render_by_dtype_and_file_show_that_table_alone(model: Checkpoint) -> None:
    assert _drawn(model, by="dtype").partition("\n\n")[2] == _text(
        """
        dtypes: 2
          dtype     bytes  share
          BF16   6.09 KiB  74.7%
          F32    2.06 KiB  25.3%
        """
    )
    assert _drawn(replace(model, files={}), by="file").partition("\n\n")[2] == _text(
        """
        files: 1
          file               on disk  tensor bytes  chunks
          model.safetensors  missing      8.16 KiB       8
        """
    )


def test_render_by_rank_without_ranks_says_so(model: Checkpoint) -> None:
    drawn = _drawn(model, by="rank")
    assert drawn.endswith("\nranks: the names of these files carry none; see --by file\n")


def test_render_tensors_lists_placements(model: Checkpoint) -> None:
    checkpoint = _sharded(model, Mesh((("dp_shard", 2), ("tp", 2))), tp_dim=1)
    drawn = _drawn(checkpoint, tensors=checkpoint.tensors[:3])
    assert drawn.partition("\n\n")[2] == _text(
        """
        tensors: 3
          name                        dtype  shape     placement              chunks  bytes
          model.embed.weight          F32    [32, 16]  dp_shard:S(0) tp:S(1)       4  2,048
          model.layers.0.up.weight    BF16   [64, 16]  dp_shard:S(0) tp:S(1)       4  2,048
          model.layers.0.norm.weight  BF16   [16]      dp_shard:S(0)               2     32
        """
    )


def test_render_grid_two_cut_dims_is_drawn(model: Checkpoint) -> None:
    checkpoint = _sharded(model, Mesh((("dp_shard", 2), ("tp", 2))), tp_dim=1)
    assert _drawn(checkpoint, grids=checkpoint.tensors[:1]) == _text(
        r"""
        model.embed.weight  F32 [32, 16]
          placement: S(0) on dp_shard, S(1) on tp (inferred)

          dim 0 \ dim 1  0  8
                      0  0  1
                     16  2  3

          rank  offsets  sizes    file          offset  bytes
             0  [0, 0]   [16, 8]  __0_0.distcp       0    512
             1  [0, 8]   [16, 8]  __1_0.distcp       0    512
             2  [16, 0]  [16, 8]  __2_0.distcp       0    512
             3  [16, 8]  [16, 8]  __3_0.distcp       0    512
        """
    )


def test_render_grid_same_dim_shows_ranks_in_the_order_of_elements(model: Checkpoint) -> None:
    checkpoint = _sharded(model, Mesh((("dp_shard", 2), ("tp", 2))), tp_dim=0)
    drawn = _drawn(checkpoint, grids=checkpoint.tensors[:1])
    assert "\n  dim 0 from  0  8  16  24\n        rank  0  2   1   3\n" in drawn


def test_render_grid_empty_chunk_is_said(model: Checkpoint) -> None:
    mesh = Mesh((("dp_shard", 5),))
    tensor = _whole("w", (3,))
    checkpoint = _sharded(Checkpoint(root="m", format="hf", tensors=(tensor,)), mesh)
    drawn = _drawn(checkpoint, grids=checkpoint.tensors)
    assert "\n  dim 0 from  0  1  2\n        rank  0  1  2\n  and 1 empty: chunk without elements\n" in drawn
    assert "\n     3  [3]      [0]    __3_0.distcp       0      0\n" in drawn


def test_render_grid_hole_is_a_question_mark(model: Checkpoint) -> None:
    checkpoint = _sharded(model, Mesh((("dp_shard", 2), ("tp", 2))), tp_dim=1)
    tensor = checkpoint.tensors[0]
    holed = replace(checkpoint, tensors=(replace(tensor, chunks=tensor.chunks[:3]),))
    drawn = _drawn(holed, grids=holed.tensors)
    assert "             16  2  ?\n" in drawn
    assert "placement" not in drawn


def test_render_grid_many_columns_keep_to_the_width(model: Checkpoint) -> None:
    checkpoint = _sharded(model, Mesh((("dp_shard", 32),)))
    drawn = _drawn(checkpoint, grids=checkpoint.tensors[:1], width=50)
    rank_line = next(line for line in drawn.splitlines() if line.startswith("        rank"))
    assert len(rank_line) <= 50
    assert rank_line.split()[-2:] == ["...", "31"]


def test_render_overlay_says_that_nothing_is_written(model: Checkpoint) -> None:
    fsdp = {tensor.fqn: {"dp_shard": Shard(0)} for tensor in model.tensors}
    imagined = overlay(model, Layout(mesh=Mesh((("dp_shard", 2),)), placements=fsdp))
    drawn = _drawn(imagined, mesh_source="overlay", by="file")
    assert "mesh      dp_shard=2, 2 ranks, planned layout (nothing written)\n" in drawn
    assert "chunks    16 in 2 files\n" in drawn
    assert "  __0_0.distcp  virtual      4.08 KiB       8\n" in drawn


def test_render_hostile_names_are_escaped(model: Checkpoint) -> None:
    evil = "model.\x1b[31m\u202e[bold]x\n"
    tensor = _whole(evil, (2,), file="a\x07.safetensors")
    blob = BlobEntry(fqn="b\x9b", span=ByteSpan(file="c\u2028", offset=0, nbytes=1))
    checkpoint = Checkpoint(root="r\x1b]0;", format="hf", tensors=(tensor,), blobs=(blob,))
    inside = {"b\x9b": Counter({"os\x1b[31m.system": 1})}
    drawn = "".join(
        [
            _drawn(checkpoint, inside=inside),
            _drawn(checkpoint, inside=inside, tensors=checkpoint.tensors),
            _drawn(checkpoint, inside=inside, grids=checkpoint.tensors),
            _drawn(checkpoint, inside=inside, by="module"),
            _drawn(checkpoint, inside=inside, by="file"),
        ]
    )
    assert drawn.replace("\n", "").isprintable()
    assert "model.\\x1b[31m\\u202e[bold]x\\x0a" in drawn


def test_render_colour_adds_styles_and_nothing_else(model: Checkpoint) -> None:
    plain, styled = _drawn(model), _drawn(model, colour=True)
    assert "\x1b" not in plain
    assert "\x1b[1mmodules\x1b[0m\n" in styled
    for code in ("\x1b[1m", "\x1b[2m", "\x1b[33m", "\x1b[0m"):
        styled = styled.replace(code, "")
    assert styled == plain


def test_render_ascii_stream_gets_ascii(model: Checkpoint) -> None:
    checkpoint = _sharded(model, Mesh((("dp_shard", 2),)))
    tensor = replace(checkpoint.tensors[0], fqn="wörter.权")
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", newline="\n")
    render(summarise(replace(checkpoint, tensors=(tensor,))), Screen(stream=stream), by="rank")
    stream.flush()
    drawn = raw.getvalue().decode("ascii")
    assert "  ####  " in drawn
    render(summarise(replace(checkpoint, tensors=(tensor,))), Screen(stream=stream))
    stream.flush()
    assert "w\\xf6rter.\\u6743" in raw.getvalue().decode("ascii")


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 7], "0-2,7"), (range(0, 20, 2), "0,2,4,6,8,10,...")]
)
def test_format_ranges_numbers_become_ranges(numbers, text: str) -> None:
    assert format_ranges(numbers) == text
