"""Headers: what is parsed, what is refused, what is built."""

import json

import pytest
from safetensors import deserialize
from samples import MODEL, safetensors_bytes, tensor

from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.checkpoint.formats.safetensors import build_header, data_order, parse_header, parse_length
from ckpt_tools.errors import LimitError, UnreadableError, UsageError


def _parse(document: object, *, nbytes: int | None = None):
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return parse_header(text, file="m.safetensors", file_nbytes=None if nbytes is None else 8 + len(text) + nbytes)


def _tensor(dtype="F32", shape=(2, 3), offsets=(0, 24)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_header_gives_tensors_in_the_order_of_their_data() -> None:
    header = _parse({"b": _tensor(offsets=(24, 48)), "a": _tensor(), "__metadata__": {"format": "pt"}}, nbytes=48)
    assert [entry.fqn for entry in header.tensors] == ["a", "b"]
    assert header.metadata == {"format": "pt"}
    first, second = (entry.chunks[0].span for entry in header.tensors)
    assert second.offset - first.offset == first.nbytes == 24
    assert second.offset + 24 == header.nbytes
    assert _parse({}, nbytes=0).tensors == ()


@pytest.mark.parametrize("dtype", [d.name for d in BY_NAME.values() if d.in_safetensors])
def test_header_of_every_dtype_is_understood(dtype: str) -> None:
    nbytes = BY_NAME[dtype].num_bytes(8)
    (entry,) = _parse({"w": _tensor(dtype, (2, 4), (0, nbytes))}, nbytes=nbytes).tensors
    assert (entry.dtype.name, entry.shape, entry.nbytes) == (dtype, (2, 4), nbytes)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 1 << 40), (5, 0, 7), (1,) * 64])
def test_header_of_odd_shapes_is_understood(shape) -> None:
    nbytes = 0 if 0 in shape else 4 * (1 if not shape else shape[0])
    (entry,) = _parse({"w": _tensor("F32", shape, (0, nbytes))}, nbytes=nbytes).tensors
    assert entry.shape == shape


@pytest.mark.parametrize(
    ("document", "word"),
    [
        (b"", "JSON"),
        (b"nope", "JSON"),
        (b"\xff{}", "header"),
        (b"{" * 100_000, "JSON"),
        (b'{"a":' * 100_000, "JSON"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}', "JSON"),
        (b'{"\\ud800": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', "Unicode"),
        ([], "object"),
        ({"__metadata__": []}, "__metadata__"),
        ({"__metadata__": {"a": None}}, "__metadata__"),
        ({"__metadata__": {"a": "\ud800"}}, "Unicode"),
        ({"__metadata__": {"\udc00": ""}}, "Unicode"),
        (b'{"w": {"dtype": "F32", "shape": [-0], "data_offsets": [0, 0]}}', "-0 is not a whole number"),
        ({"w": []}, "exactly"),
        ({"w": {"dtype": "F32", "shape": [1]}}, "exactly"),
        ({"w": _tensor() | {"more": 1}}, "exactly"),
        ({"w": _tensor("f32")}, "dtype"),
        ({"w": _tensor("C32", (6,))}, "dtype"),
        ({"w": _tensor(None)}, "dtype"),
        ({"w": _tensor("C128", (1,), (0, 16))}, "dtype"),
        ({"w": _tensor(shape=(-2, -3))}, "shape"),
        ({"w": _tensor(shape=(2.0, 3))}, "shape"),
        ({"w": _tensor(shape="23")}, "shape"),
        ({"w": _tensor(shape=(10**30,))}, "shape"),
        ({"w": _tensor(shape=(True, 6))}, "shape"),
        ({"w": _tensor(shape=(1 << 63, 0), offsets=(0, 0))}, "shape"),
        ({"w": _tensor(shape=(0, 1 << 62, 1 << 62), offsets=(0, 0))}, "shape"),
        ({"w": _tensor(shape=(1,) * 65, offsets=(0, 4))}, "shape"),
        ({"w": _tensor(offsets=(24, 0))}, "data_offsets"),
        ({"w": _tensor(offsets=(0,))}, "data_offsets"),
        ({"w": _tensor() | {"data_offsets": None}}, "data_offsets"),
        ({"w": _tensor(offsets=(-24, 0))}, "data_offsets"),
        ({"w": _tensor(offsets=(0, 20))}, "need 24"),
        ({"w": _tensor(offsets=(4, 28))}, "hole"),
        ({"v": _tensor(), "w": _tensor(offsets=(12, 36))}, "overlaps"),
        ({"v": _tensor(), "w": _tensor()}, "overlaps"),
        ({"w": _tensor("F4", (3,), (0, 1))}, "need 1.5"),
    ],
)
def test_header_that_lies_is_refused(document, word: str) -> None:
    with pytest.raises(UnreadableError) as caught:
        _parse(document)
    assert word in caught.value.what
    assert caught.value.where == "m.safetensors"


@pytest.mark.parametrize("key", ["w", "__metadata__", "shape"])
def test_header_with_a_key_twice_is_refused(key: str) -> None:
    one = json.dumps(_tensor())
    text = {
        "w": f'{{"w": {one}, "w": {one}}}',
        "__metadata__": f'{{"__metadata__": {{}}, "__metadata__": {{}}, "w": {one}}}',
        "shape": f'{{"w": {one[:-1]}, "shape": [6]}}}}',
    }[key]
    with pytest.raises(UnreadableError, match="twice"):
        _parse(text.encode())


@pytest.mark.parametrize(("nbytes", "word"), [(23, "truncated"), (25, "unknown bytes")])
def test_header_of_a_file_of_another_size_is_refused(nbytes: int, word: str) -> None:
    with pytest.raises(UnreadableError, match=word):
        _parse({"w": _tensor()}, nbytes=nbytes)


@pytest.mark.parametrize(
    ("name", "dtype"), [("a\x1b[2J", "?"), ("a", "\x1b[2J"), ("a", ["\x1b[31m"]), ("a", {"\u202e": 1})]
)
def test_header_names_and_dtypes_are_escaped_in_messages(name: str, dtype) -> None:
    with pytest.raises(UnreadableError) as caught:
        _parse({name: _tensor(dtype)})
    assert str(caught.value).isprintable()
    assert isinstance(dtype, str) == ("\\x1b" in str(caught.value))


def test_length_is_little_endian_and_bounded() -> None:
    assert parse_length(b"\x10\0\0\0\0\0\0\0", where="f") == 16
    assert parse_length((100_000_000).to_bytes(8, "little"), where="f") == 100_000_000
    with pytest.raises(LimitError):
        parse_length((100_000_001).to_bytes(8, "little"), where="f")
    with pytest.raises(UnreadableError):
        parse_length(b"1234567", where="f")


def _entries(*specs) -> list[TensorEntry]:
    return [TensorEntry(fqn=n, dtype=BY_NAME[d], shape=s, chunks=()) for n, d, s in specs]


def test_build_header_is_read_by_the_reference_implementation() -> None:
    entries = _entries(("a.\u00fc", "F32", (2, 3)), ("b", "BF16", ()), ("c", "F4", (2, 4)), ("d", "I64", (0, 3)))
    prefix, starts = build_header(entries, metadata={"format": "pt"})
    assert len(prefix) % 8 == 0
    assert starts == (len(prefix), len(prefix) + 24, len(prefix) + 26, len(prefix) + 30)
    found = dict(deserialize(prefix + bytes(30)))
    assert {name: (entry["dtype"], entry["shape"]) for name, entry in found.items()} == {
        "a.\u00fc": ("F32", [2, 3]), "b": ("BF16", []), "c": ("F4", [2, 4]), "d": ("I64", [0, 3]),
    }  # fmt: skip


def test_build_header_is_parsed_back() -> None:
    entries = _entries(("a", "F32", (2, 3)), ("b", "U8", (5,)))
    prefix, starts = build_header(entries)
    header = parse_header(prefix[8:], file="x", file_nbytes=len(prefix) + 29)
    assert [(e.fqn, e.dtype, e.shape, e.chunks[0].span.offset) for e in header.tensors] == [
        (e.fqn, e.dtype, e.shape, start) for e, start in zip(entries, starts, strict=True)
    ]


@pytest.mark.parametrize(("name", "dtype"), [("w", "C128"), ("w", "C32"), ("__metadata__", "U8")])
def test_build_header_of_what_it_cannot_hold_is_refused(name: str, dtype: str) -> None:
    with pytest.raises(UsageError, match=dtype if name == "w" else name):
        build_header(_entries((name, dtype, (1,))))


def test_data_order_is_that_of_the_reference_implementation() -> None:
    import numpy as np
    from safetensors.numpy import save

    kinds = {"b": (3, np.uint8), "a": (2, np.float32), "z": (1, np.int64), "c": (2, np.int32)}
    raw = save({name: np.zeros(*kind) for name, kind in kinds.items()})
    theirs = parse_header(raw[8 : 8 + int.from_bytes(raw[:8], "little")], file="x", file_nbytes=len(raw)).tensors
    assert [entry.fqn for entry in data_order(sorted(theirs, key=lambda e: e.fqn))] == [entry.fqn for entry in theirs]


def test_samples_are_sound() -> None:
    """What the other tests call intact is so for the reference implementation."""
    assert {name for name, _ in deserialize(safetensors_bytes(MODEL))} == MODEL.keys()
    assert tensor("F32", 2) == tensor("F32", 2)
