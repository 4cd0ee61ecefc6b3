"""`summarise`, `overlay` and `to_json` on small descriptions with literal numbers."""

import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest

from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.checkpoint.entries import Asset, BlobEntry, ByteSpan, Checkpoint, Chunk, TensorEntry
from ckpt_tools.checkpoint.layout import Box, Layout, Mesh, Shard
from ckpt_tools.checkpoint.summarise import MAX_BLOCKS, MAX_PREFIXES, OTHER, overlay, summarise
from ckpt_tools.errors import UsageError


def _chunk(file: str, offsets, sizes, *, at: int = 0, nbytes: int = 0) -> Chunk:
    span = ByteSpan(file=file, offset=at, nbytes=nbytes)
    return Chunk(box=Box(tuple(offsets), tuple(sizes)), span=span, encoding="torch_zip")


def _tensor(fqn: str, shape, *chunks: Chunk, dtype: str = "F32") -> TensorEntry:
    return TensorEntry(fqn=fqn, dtype=BY_NAME[dtype], shape=tuple(shape), chunks=chunks)


@pytest.fixture
def two_ranks() -> Checkpoint:
    """Two ranks of FSDP: a matrix of 4 × 2, a vector of 3, a step; one blob, one asset."""
    return Checkpoint(
        root="/runs/step-9",
        format="dcp",
        tensors=(
            _tensor(
                "model.layers.0.w",
                (4, 2),
                _chunk("__0_0.distcp", (0, 0), (2, 2), at=0, nbytes=720),
                _chunk("__1_0.distcp", (2, 0), (2, 2), at=0, nbytes=720),
            ),
            _tensor(
                "model.layers.0.b",
                (3,),
                _chunk("__0_0.distcp", (0,), (2,), at=720, nbytes=708),
                _chunk("__1_1.distcp", (2,), (1,), at=0, nbytes=706),
                dtype="BF16",
            ),
            _tensor("step", (), _chunk("__0_0.distcp", (), (), at=1428, nbytes=708), dtype="I64"),
        ),
        blobs=(BlobEntry(fqn="rng", span=ByteSpan(file="__0_0.distcp", offset=2136, nbytes=99)),),
        assets=(Asset(file="config.json", nbytes=12),),
        files={"__0_0.distcp": 2235, "__1_0.distcp": 720, "__1_1.distcp": 706},
    )


def test_summarise_two_ranks_counts_everything(two_ranks: Checkpoint) -> None:
    summary = summarise(two_ranks, path="step-9")
    assert summary.path == "step-9"
    assert (summary.num_tensors, summary.num_elems, summary.total_bytes, summary.num_chunks) == (3, 12, 46, 5)
    assert list(summary.dtypes.items()) == [("F32", 32), ("I64", 8), ("BF16", 6)]
    assert [(r.rank, r.files, r.num_chunks, r.num_bytes) for r in summary.ranks] == [
        (0, ("__0_0.distcp",), 3, 28),
        (1, ("__1_0.distcp", "__1_1.distcp"), 2, 18),
    ]
    assert [(f.file, f.file_bytes, f.num_chunks, f.num_bytes) for f in summary.files] == [
        ("__0_0.distcp", 2235, 3, 28),
        ("__1_0.distcp", 720, 1, 16),
        ("__1_1.distcp", 706, 1, 2),
    ]
    assert summary.imbalance == 28 / 23
    assert str(summary.mesh) == "dp_shard=2"
    assert summary.mesh_source == "inferred"
    assert [(b.name, b.bytes_by_rank) for b in summary.blocks] == [("model.layers.0", (20, 18)), ("step", (8, 0))]


def test_to_json_two_ranks_is_the_contract(two_ranks: Checkpoint) -> None:
    census = Counter({"tensors": 1, "bytes": 8, "a.B": 2})
    summary = replace(summarise(two_ranks), inside={"rng": census}, census=census)
    document = summary.to_json(tensors=two_ranks.tensors[1:])

    def chunk(*values):
        return dict(zip(("rank", "offsets", "sizes", "file", "offset", "nbytes"), values, strict=True))

    assert document == {
        "path": "/runs/step-9",
        "format": "dcp",
        "identity": None,
        "names": None,
        "num_tensors": 3,
        "num_elements": 12,
        "total_bytes": 46,
        "num_chunks": 5,
        "num_files": 3,
        "dtypes": {"F32": 32, "I64": 8, "BF16": 6},
        "ranks": [
            {"rank": 0, "files": ["__0_0.distcp"], "num_chunks": 3, "bytes": 28},
            {"rank": 1, "files": ["__1_0.distcp", "__1_1.distcp"], "num_chunks": 2, "bytes": 18},
        ],
        "imbalance": 28 / 23,
        "files": [
            {"file": "__0_0.distcp", "nbytes": 2235, "num_chunks": 3, "bytes": 28},
            {"file": "__1_0.distcp", "nbytes": 720, "num_chunks": 1, "bytes": 16},
            {"file": "__1_1.distcp", "nbytes": 706, "num_chunks": 1, "bytes": 2},
        ],
        "blobs": [
            {"fqn": "rng", "file": "__0_0.distcp", "offset": 2136, "nbytes": 99}
            | {"holds": "1 tensor, 8 B; 2 × a.B", "census": {"tensors": 1, "bytes": 8, "a.B": 2}}
        ],
        "objects": {"tensors": 1, "bytes": 8, "a.B": 2},
        "assets": [{"file": "config.json", "nbytes": 12}],
        "prefixes": [
            {"prefix": "model.layers.*.w", "num_tensors": 1, "num_elements": 8, "bytes": 32},
            {"prefix": "model.layers.*.b", "num_tensors": 1, "num_elements": 3, "bytes": 6},
            {"prefix": "step", "num_tensors": 1, "num_elements": 1, "bytes": 8},
        ],
        "mesh": {"dp_shard": 2},
        "mesh_source": "inferred",
        "virtual": False,
        "contents": [],
        "tensors": [
            {
                "fqn": "model.layers.0.b",
                "dtype": "BF16",
                "shape": [3],
                "placements": {"dp_shard": "S(0)"},
                "chunks": [chunk(0, [0], [2], "__0_0.distcp", 720, 708), chunk(1, [2], [1], "__1_1.distcp", 0, 706)],
            },
            {
                "fqn": "step",
                "dtype": "I64",
                "shape": [],
                "placements": {"dp_shard": "R"},
                "chunks": [chunk(0, [], [], "__0_0.distcp", 1428, 708)],
            },
        ],
    }
    assert "tensors" not in summary.to_json()


def _named(*fqns: str) -> Checkpoint:
    tensors = tuple(_tensor(fqn, (2,), _chunk("__0_0.distcp", (0,), (2,))) for fqn in fqns)
    return Checkpoint(root="m", format="dcp", tensors=tensors)


def test_summarise_prefixes_fold_numbers_and_open_the_heaviest() -> None:
    fqns = [f"model.layers.{i}.{part}.{p}" for i in range(3) for part in "abcdefg" for p in ("w", "v")]
    summary = summarise(_named("model.embed.w", *fqns, "head.w"))
    assert [(row.prefix, row.num_tensors, row.num_bytes) for row in summary.prefixes] == [
        ("model.embed.w", 1, 8),
        *((f"model.layers.*.{part}.{p}", 3, 24) for part in "abc" for p in "wv"),
        *((f"model.layers.*.{part}", 6, 48) for part in "defg"),
        ("head.w", 1, 8),
    ]


def test_summarise_odd_names_keep_branches_together_and_are_all_counted() -> None:
    summary = summarise(_named("b.y.w", "a.x.w", "b.z.w", "a.v.w"))
    assert [row.prefix for row in summary.prefixes] == ["b.y.w", "b.z.w", "a.x.w", "a.v.w"]
    summary = summarise(_named("a.b", "a.b.c", ""))
    assert sorted((row.prefix, row.num_tensors) for row in summary.prefixes) == [("", 1), ("a.b", 2)]


def test_summarise_many_names_stay_few_rows() -> None:
    summary = summarise(_named(*(f"n{i}.w" for i in range(MAX_BLOCKS + 50))))
    assert len(summary.prefixes) == MAX_PREFIXES
    assert next(row for row in summary.prefixes if row.prefix == OTHER).num_tensors == MAX_BLOCKS + 50 - 11
    assert len(summary.blocks) == MAX_BLOCKS + 1
    assert summary.blocks[-1].name == OTHER
    assert sum(row.num_tensors for row in summary.prefixes) == MAX_BLOCKS + 50


def test_summarise_endless_name_is_cut_short() -> None:
    summary = summarise(_named("a." * 200_000 + "b", "a." * 200_000 + "c"))
    assert [row.prefix for row in summary.prefixes] == ["a.a.a.a.a.a.a.a"]


def test_overlay_two_ranks_shows_what_shard_would_write(two_ranks: Checkpoint) -> None:
    mesh = Mesh((("dp_shard", 2), ("tp", 2)))
    placements = {
        "model.layers.0.w": {"dp_shard": Shard(0), "tp": Shard(1)},
        "model.layers.0.b": {"dp_shard": Shard(0)},
    }
    imagined = overlay(two_ranks, Layout(mesh=mesh, placements=placements))
    assert [(c.box.offsets, c.box.sizes, c.span.file) for c in imagined.tensors[0].chunks] == [
        ((0, 0), (2, 1), "__0_0.distcp"),
        ((0, 1), (2, 1), "__1_0.distcp"),
        ((2, 0), (2, 1), "__2_0.distcp"),
        ((2, 1), (2, 1), "__3_0.distcp"),
    ]
    assert [(c.box.offsets, c.span.file) for c in imagined.tensors[1].chunks] == [
        ((0,), "__0_0.distcp"),
        ((2,), "__2_0.distcp"),
    ]
    summary = summarise(imagined, mesh_source="overlay")
    assert summary.is_virtual
    assert [rank.num_bytes for rank in summary.ranks] == [8 + 4 + 8, 8, 8 + 2, 8]
    document = summary.to_json(tensors=imagined.tensors)
    assert (document["mesh_source"], document["virtual"]) == ("overlay", True)
    assert document["tensors"][0]["chunks"][0]["offset"] is None


def test_overlay_dim_that_is_not_there_is_refused(two_ranks: Checkpoint) -> None:
    layout = Layout(mesh=Mesh((("dp_shard", 2),)), placements={"model.layers.0.w": {"dp_shard": Shard(2)}})
    with pytest.raises(UsageError, match=r"S\(2\)"):
        overlay(two_ranks, layout)


def test_overlay_of_thousands_of_ranks_counts_equal_layers_once() -> None:
    tensors = tuple(_tensor(f"model.layers.{i}.w", (8192, 64)) for i in range(MAX_BLOCKS + 500))
    layout = Layout(mesh=Mesh((("dp_shard", 4096),)), placements={t.fqn: {"dp_shard": Shard(0)} for t in tensors})
    summary = summarise(overlay(Checkpoint(root="m", format="hf", tensors=tensors), layout), mesh_source="overlay")
    assert summary.num_chunks == 4096 * len(tensors)
    assert {rank.num_bytes for rank in summary.ranks} == {2 * 64 * 4 * len(tensors)}
    assert sum(sum(block.bytes_by_rank) for block in summary.blocks) == summary.total_bytes


def test_inspect_modules_import_no_heavy_library() -> None:
    heavy = "{'torch', 'numpy', 'rich', 'typer', 'safetensors'}"
    code = f"import sys, ckpt_tools.checkpoint.summarise\nprint(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")
