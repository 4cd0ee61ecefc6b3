"""HF directories: indexes, arrangement, placement, and the sharded files of DCP's writer."""

import json

import pytest
from samples import safetensors_bytes, tensor

from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.checkpoint.formats.dcp_safetensors import SHARDED_FILE, describe_sharded
from ckpt_tools.checkpoint.formats.hf import arrange, build_index, describe, parse_index, place
from ckpt_tools.checkpoint.formats.safetensors import HeaderFile, parse_header
from ckpt_tools.errors import UnreadableError


def _entry(fqn: str, num_elems: int, dtype: str = "U8") -> TensorEntry:
    return TensorEntry(fqn=fqn, dtype=BY_NAME[dtype], shape=(num_elems,), chunks=())


def _file(name: str, tensors, **metadata: str) -> HeaderFile:
    raw = safetensors_bytes(tensors, metadata=metadata)
    text = raw[8 : 8 + int.from_bytes(raw[:8], "little")]
    return HeaderFile(name=name, header_text=text, header=parse_header(text, file=name, file_nbytes=len(raw)))


def test_index_is_parsed() -> None:
    text = b'{"metadata": {"total_size": 3}, "weight_map": {"a": "x.safetensors", "b": "sub/y.safetensors"}}'
    assert parse_index(text, where="i") == {"a": "x.safetensors", "b": "sub/y.safetensors"}


@pytest.mark.parametrize(
    "text",
    [b"", b"{", b"[]", b"{}", b'{"weight_map": 1}', b'{"weight_map": []}', b'{"weight_map": {"a": ""}}',
     b'{"weight_map": {"a": null}}', b"\xff", b"[" * 100_000,
     b'{"weight_map": {"a": "../x"}}', b'{"weight_map": {"a": "/x"}}', b'{"weight_map": {"a": "y/../../x"}}',
     b'{"weight_map": {"a": "x\\u0000y"}}'],
)  # fmt: skip
def test_index_of_another_kind_is_refused(text: bytes) -> None:
    with pytest.raises(UnreadableError):
        parse_index(text, where="i")


def test_build_index_is_as_transformers_writes_it() -> None:
    raw = build_index({"x": [_entry("b", 3), _entry("a", 4, "F32")], "y": [_entry("c", 1)]})
    assert json.loads(raw) == {"metadata": {"total_size": 20}, "weight_map": {"a": "x", "b": "x", "c": "y"}}
    assert raw == (json.dumps(json.loads(raw), indent=2, sort_keys=True) + "\n").encode()


@pytest.mark.parametrize(
    ("sizes", "limit", "groups"),
    [
        ([3, 3, 3], 9, [3]),
        ([3, 3, 3], 8, [2, 1]),
        ([3, 3, 3], 6, [2, 1]),
        ([3, 3, 3], 3, [1, 1, 1]),
        ([3, 3, 3], 1, [1, 1, 1]),
        ([9, 1, 1], 2, [1, 2]),
        ([0, 0, 0], 1, [3]),
        ([], 5, [0]),
    ],
)
def test_arrange_fills_files_in_order(sizes, limit: int, groups) -> None:
    files = arrange([_entry(f"t{i}", n) for i, n in enumerate(sizes)], max_file_nbytes=limit)
    assert [len(entries) for entries in files.values()] == groups
    count = len(groups)
    several = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    assert list(files) == (several if count > 1 else ["model.safetensors"])
    flat = [entry.fqn for entries in files.values() for entry in entries]
    assert flat == [f"t{i}" for i in range(len(sizes))]


def test_place_gives_every_tensor_its_bytes() -> None:
    files = {"x": [_entry("a", 4, "F32"), _entry("b", 3)], "y": [_entry("c", 2, "BF16")]}
    checkpoint, heads = place(files)
    assert checkpoint.files == {"x": len(heads["x"]) + 19, "y": len(heads["y"]) + 4}
    for name, entries in files.items():
        position = len(heads[name])
        for entry in entries:
            placed = next(e for e in checkpoint.tensors if e.fqn == entry.fqn)
            (chunk,) = placed.chunks
            assert (chunk.span.file, chunk.span.offset, chunk.span.nbytes) == (name, position, entry.nbytes)
            assert chunk.box.sizes == entry.shape
            position += entry.nbytes
        assert b'"format":"pt"' in heads[name]


@pytest.mark.parametrize(
    ("index", "word"),
    [
        ({"a": "x"}, "not in the index"),
        ({"a": "x", "b": "x"}, "it is in y"),
        ({"a": "x", "b": "y", "c": "y"}, "no file contains it"),
    ],
)
def test_describe_with_an_index_that_disagrees_is_refused(index, word: str) -> None:
    files = [_file("x", {"a": tensor("U8", 3)}), _file("y", {"b": tensor("U8", 2)})]
    with pytest.raises(UnreadableError, match=word):
        describe("r", files, index)


def test_describe_without_an_index_takes_what_is_there_once() -> None:
    checkpoint = describe("r", [_file("x", {"a": tensor("U8", 3)}), _file("y", {"b": tensor("U8", 2)})], None)
    assert [e.fqn for e in checkpoint.tensors] == ["a", "b"]
    assert checkpoint.total_bytes == 5
    with pytest.raises(UnreadableError, match="two files"):
        describe("r", [_file("x", {"a": tensor("U8", 3)}), _file("y", {"a": tensor("U8", 2)})], None)


def _info(**offsets) -> str:
    return json.dumps({fqn: {"saved_offsets": list(at)} for fqn, at in offsets.items()})


def test_sharded_files_give_the_hull_of_their_chunks() -> None:
    files = [
        _file("x", {"w": tensor("F32", 3, 2), "s": tensor("F32")}, DCP_SHARDING_INFO=_info(w=(0, 0), s=())),
        _file("y", {"w": tensor("F32", 2, 2)}, DCP_SHARDING_INFO=_info(w=(3, 0))),
        _file("z", {"w": tensor("F32", 0, 2)}, DCP_SHARDING_INFO=_info(w=(5, 0))),
    ]
    checkpoint = describe_sharded("r", files)
    shapes = {entry.fqn: entry.shape for entry in checkpoint.tensors}
    assert shapes == {"w": (5, 2), "s": ()}
    assert [chunk.box.offsets for chunk in checkpoint.tensors[0].chunks] == [(0, 0), (3, 0), (5, 0)]


@pytest.mark.parametrize(
    ("second", "info"),
    [
        ({"w": tensor("F16", 3, 2)}, _info(w=(3, 0))),
        ({"w": tensor("F32", 6)}, _info(w=(3,))),
        ({"w": tensor("F32", 3, 2)}, _info(w=(3,))),
        ({"w": tensor("F32", 3, 2)}, _info(v=(3, 0))),
        ({"w": tensor("F32", 3, 2)}, _info(w=(3, 1 << 62))),
        ({"w": tensor("F32", 3, 2)}, "nope"),
    ],
)
def test_sharded_files_that_disagree_are_refused(second, info: str) -> None:
    first = _file("x", {"w": tensor("F32", 3, 2)}, DCP_SHARDING_INFO=_info(w=(0, 0)))
    with pytest.raises(UnreadableError):
        describe_sharded("r", [first, _file("y", second, DCP_SHARDING_INFO=info)])


def test_sharded_file_without_info_is_refused() -> None:
    with pytest.raises(UnreadableError, match="DCP_SHARDING_INFO"):
        describe_sharded("r", [_file("x", {"w": tensor("F32", 3)}, format="pt")])


def test_sharded_file_names_are_torchs() -> None:
    from torch.distributed.checkpoint._hf_utils import _gen_file_name

    match = SHARDED_FILE.fullmatch(_gen_file_name(2, 7, 3))
    assert match is not None
    assert tuple(map(int, match.groups())) == (3, 2, 7)
    assert not SHARDED_FILE.fullmatch(_gen_file_name(2, 7))
