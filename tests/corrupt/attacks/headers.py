"""Attacks through safetensors headers, alone and as DCP's HF writer leaves them."""

from __future__ import annotations

import json

from corrupt.attacks import opcodes
from corrupt.attacks.recipe import Case, add, attack, found, harmless


def _file(title: str, tries: str, raw: bytes, codes=None, **options) -> None:
    def build(case: Case) -> None:
        case.source.mkdir()
        (case.source / "model.safetensors").write_bytes(raw)

    add(f"header-{title}", tries, build, codes, mesh_verb="shard", **options)


def framed(head: bytes, data: bytes = b"") -> bytes:
    return len(head).to_bytes(8, "little") + head + data


def of(document: object, data: bytes = b"") -> bytes:
    return framed(json.dumps(document).encode(), data)


def entry(shape=(4,), offsets=(0, 16), dtype="F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


W = json.dumps(entry())
DATA = bytes(range(16))

for length in (0, 2, 17, 100_000_001, 1 << 31, 1 << 63, (1 << 64) - 1):
    _file(
        f"length-{length}", f"a header of {length} bytes", length.to_bytes(8, "little") + of({"w": entry()}, DATA)[8:]
    )
_file("hundred-megabytes", "a header of 99 MB, mostly absent", (99_000_000).to_bytes(8, "little") + b"{")
_file("empty-file", "nothing", b"")
_file("seven-bytes", "less than a length", bytes(7))
# fmt: off
_file("overlap", "two tensors share bytes", of({"a": entry(), "b": entry(offsets=(8, 24))}, bytes(24)),
    words="overlaps")
_file("same-bytes", "two tensors in the same bytes", of({"a": entry(), "b": entry()}, DATA), words="overlaps")
_file("hole", "a hole between two tensors", of({"a": entry(), "b": entry(offsets=(20, 36))}, bytes(36)), words="hole")
_file("hole-first", "a hole before the first", of({"a": entry(offsets=(4, 20))}, bytes(20)), words="hole")
_file("trailing", "bytes behind the data", of({"w": entry()}, DATA + b"x"), words="unknown bytes")
_file("truncated", "less data than described", of({"w": entry()}, DATA[:-1]), words="truncated")
_file("offsets-negative", "negative offsets", of({"w": entry(offsets=(-16, 0))}, DATA))
_file("offsets-reversed", "reversed offsets", of({"w": entry(offsets=(16, 0))}, DATA))
_file("offsets-huge", "offsets beyond 2^63", of({"w": entry(offsets=(0, 1 << 64))}, DATA))
_file("offsets-float", "offsets that are floats", of({"w": entry(offsets=(0, 16.0))}, DATA))
_file("offsets-text", "offsets that are text", of({"w": entry(offsets=("0", "16"))}, DATA))
_file("shape-negative", "a negative dim", of({"w": entry(shape=(-4,))}, DATA))
_file("shape-overflow", "a shape whose size overflows to 16 bytes", of({"w": entry(shape=(1 << 32, 1 << 32, 4))}, DATA))
_file("shape-empty-huge", "an empty shape with huge dims", of({"w": entry((0, 1 << 62, 1 << 62), (0, 0))}),
    words="impossible")
_file("shape-dims", "two thousand dims", of({"w": entry([1] * 2000, (0, 4))}, DATA[:4]), words="impossible")
_file("shape-nested", "a nested shape", of({"w": {"dtype": "F32", "shape": [[4]], "data_offsets": [0, 16]}}, DATA))
_file("shape-bool", "a boolean dim", of({"w": entry(shape=(True,), offsets=(0, 4))}, DATA[:4]))
_file("size-lies", "a size that does not go with dtype and shape", of({"w": entry(shape=(5,))}, DATA))
_file("dtype-unknown", "an unknown dtype that drives the terminal", of({"w": entry(dtype="\x1b[2J\u202e")}, DATA),
    words="dtype")
_file("dtype-long", "a dtype of a megabyte", of({"w": entry(dtype="F" * 10**6)}, DATA), words="dtype")
_file("dtype-nested", "a dtype that is a deep list",
    framed(b'{"w":{"dtype":' + b"[" * 900 + b"]" * 900 + b',"shape":[4],"data_offsets":[0,16]}}', DATA), words="dtype")
_file("fields-more", "a field too many", of({"w": {**entry(), "x": 1}}, DATA))
_file("fields-fewer", "a field too few", of({"w": {"dtype": "F32", "shape": [4]}}, DATA))
_file("not-utf8", "a header in Latin-1", framed(b'{"\xe9":' + W.encode() + b"}", DATA), words="utf-8")
_file("utf16", "a header in UTF-16", framed(json.dumps({"w": entry()}).encode("utf-16"), DATA))
_file("bom", "a byte order mark", framed(b"\xef\xbb\xbf" + json.dumps({"w": entry()}).encode(), DATA))
_file("key-twice", "a tensor twice, with equal offsets", framed(f'{{"w":{W},"w":{W}}}'.encode(), DATA), words="twice")
_file("field-twice", "a field twice",
    framed(b'{"w":{"dtype":"F64","dtype":"F32","shape":[4],"data_offsets":[0,16]}}', DATA), words="twice")
_file("metadata-twice", "the metadata twice",
    framed(f'{{"__metadata__":{{}},"__metadata__":{{}},"w":{W}}}'.encode(), DATA), words="twice")
_file("metadata-number", "metadata that is no text", of({"__metadata__": {"a": 1}, "w": entry()}, DATA))
_file("deep", "a hundred thousand nested arrays", framed(b'{"w":' + b"[" * 100_000), words="")
_file("deep-objects", "a hundred thousand nested objects", framed(b'{"w":' * 100_000))
_file("many-containers", "three million empty arrays", framed(b'{"w":[' + b"[]," * (3 << 20) + b"[]]}"),
    words="objects and arrays")
_file("number-long", "a number of a million digits", framed(b'{"w":' + b"9" * 10**6 + b"}"))
_file("number-float", "1e999 for an offset",
    framed(b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,1e999]}}', DATA))
_file("number-nan", "NaN for an offset", framed(b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,NaN]}}', DATA))
_file("number-infinity", "-Infinity for a dim",
    framed(b'{"w":{"dtype":"F32","shape":[-Infinity],"data_offsets":[0,16]}}', DATA))
_file("number-negative-zero", "-0 for an offset, a float to some",
    framed(b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[-0,16]}}', DATA))
_file("list", "a list for a header", of([entry()], DATA))
_file("tensor-is-list", "a list for a tensor", of({"w": []}))
_file("name-nul", "a name with a NUL", of({"a\0b": entry()}, DATA), words="nul")
_file("name-surrogate", "a lone surrogate, which cannot be written again", framed(f'{{"\\ud800":{W}}}'.encode(), DATA),
    words="surrogate")
_file("name-long", "a name of 100 kB", of({"x" * 100_000: entry()}, DATA), words="the limit is 4096")
_file("name-dots", "a name of a hundred thousand components", of({"." * 100_000: entry()}, DATA),
    words="the limit is 4096")
_file("empty-tensors", "a thousand empty tensors: the 1.6 million of a 92 MB header, scaled",
    of({f"t{i}": entry((0,), (0, 0)) for i in range(1_000)}), found(diff=0))
_file("pickle", "a pickle in the place of safetensors", b"\x80\x04cos\nsystem\n(X\x02\0\0\0idtR.")
_file("metadata-sharding", "claims to be a part of DCP's HF writer, in a file of another name",
    of({"__metadata__": {"DCP_SHARDING_INFO": "{"}, "w": entry()}, DATA), harmless())
# fmt: on


# DCP's HF writer


def _sharded(title: str, tries: str, text: str, codes=None, **options) -> None:
    def build(case: Case) -> None:
        source = case.start_from("sharded")
        (source / "shard-00002-model-00001-of-00001.safetensors").write_bytes(opcodes.hf_shard(1, text))

    add(f"sharded-{title}", tries, build, codes, **options)


_sharded("deep", "nested JSON inside of JSON", "[" * 100_000)
_sharded("empty", "no table", "")
_sharded("list", "a list for the table", "[]")
_sharded("not-a-tensor", "no offsets for the tensor", "{}")
_sharded("text", "text for offsets", '{"w": {"saved_offsets": "ab"}}')
_sharded("negative", "a negative offset", '{"w": {"saved_offsets": [-2, 0]}}')
_sharded(
    "huge",
    "offsets that make the tensor too large to exist",
    '{"w": {"saved_offsets": [4611686018427387903, 0]}}',
    words="too large",
)
_sharded(
    "far", "an offset far away: all in between is missing", '{"w": {"saved_offsets": [1000000000, 0]}}', found(diff=3)
)
_sharded("fewer", "fewer offsets than dims", '{"w": {"saved_offsets": [2]}}')
_sharded("many", "a hundred thousand offsets", json.dumps({"w": {"saved_offsets": [0] * 100_000}}))
_sharded("same", "both files have the same part", '{"w": {"saved_offsets": [0, 0]}}', words="different saves")
_sharded("overlap", "parts that overlap", '{"w": {"saved_offsets": [1, 0]}}', found(diff=3))
_sharded("twice", "a key twice", '{"w": {"saved_offsets": [2, 0]}, "w": {"saved_offsets": [0, 0]}}', words="twice")
_sharded("surrogate", "a lone surrogate", '{"\ud800": {}}')


@attack("sharded-rank", "a file name with a rank of a thousand digits", words="different saves")
def _rank(case: Case) -> None:
    source = case.start_from("sharded")
    (source / f"shard-{'9' * 200}-model-00001-of-00001.safetensors").write_bytes(opcodes.hf_shard(1))
