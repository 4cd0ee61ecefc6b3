"""The pickle reader against CPython's pickler, and against damaged metadata."""

from __future__ import annotations

import contextlib
import pickle
import random

from hypothesis import assume, given, settings, strategies as st
from samples import examples

from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.checkpoint.entries import BlobEntry, ByteSpan, Chunk, TensorEntry
from ckpt_tools.checkpoint.formats import inert_pickle
from ckpt_tools.checkpoint.formats._pickle_values import GlobalName, Record
from ckpt_tools.checkpoint.formats.dcp_metadata import ALLOWED_GLOBALS, build_metadata, parse_metadata
from ckpt_tools.checkpoint.formats.inert_pickle import parse_pickle
from ckpt_tools.checkpoint.layout import Box
from ckpt_tools.errors import UnreadableError

INT64 = st.integers(-(2**63), 2**63 - 1)
SCALARS = st.none() | st.booleans() | INT64 | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.text() | INT64 | st.none() | st.binary()
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=5) | st.lists(inner, max_size=5).map(tuple) | st.dictionaries(KEYS, inner, max_size=5)
    ),
    max_leaves=25,
)


def example_metadata() -> bytes:
    """Metadata with every feature: several dtypes, ranks of dims, blobs, paths, zero-size and 0-d tensors."""

    def span(file: str, offset: int) -> ByteSpan:
        return ByteSpan(file=file, offset=offset, nbytes=1 << 20)

    tensors = []
    for i, (name, shape) in enumerate([("F32", (6, 4)), ("BF16", (6,)), ("F4", (3, 8)), ("I64", ()), ("F16", (0, 3))]):
        halves = [(0, 3), (3, 3)] if shape and shape[0] == 6 else [(0, shape[0])] if shape else []
        boxes = [Box((start, *[0] * (len(shape) - 1)), (size, *shape[1:])) for start, size in halves] or [Box((), ())]
        chunks = tuple(
            Chunk(box=box, span=span(f"__{rank}_0.distcp", (i + 1) << 33), encoding="torch_zip")
            for rank, box in enumerate(boxes)
        )
        tensors.append(
            TensorEntry(
                fqn=f"layers.{i}.weight", dtype=BY_NAME[name], shape=shape, chunks=chunks, path=("layers", str(i))
            )
        )
    return build_metadata(tensors, [BlobEntry(fqn="step", span=span("__0_0.distcp", 0), path=("step",))])


METADATA = example_metadata()


@given(VALUES, st.sampled_from([2, 3, 4, 5]), st.booleans())
@settings(max_examples=examples(150))
def test_parse_plain_value_equals_what_was_pickled(value: object, protocol: int, with_c: bool) -> None:
    data = (pickle.dumps if with_c else pickle._dumps)(value, protocol)
    # Protocol 2 writes bytes as calls.
    assume(protocol > 2 or not (b"c_codecs\n" in data or b"c__builtin__\n" in data))
    parsed = parse_pickle(data, allowed_globals=frozenset())
    assert parsed == value
    assert repr(parsed) == repr(value)  # 1, 1.0 and True are equal too


@given(st.lists(st.tuples(st.integers(0, len(METADATA) - 1), st.integers(0, 255)), min_size=1, max_size=3))
@settings(max_examples=examples(400))
def test_parse_metadata_with_changed_bytes_is_read_or_refused(changes: list[tuple[int, int]]) -> None:
    damaged = bytearray(METADATA)
    for position, value in changes:
        damaged[position] = value
    read_or_refuse(bytes(damaged))


@given(st.integers(0, len(METADATA)), st.integers(0, len(METADATA)), st.binary(max_size=8))
@settings(max_examples=examples(200))
def test_parse_metadata_with_parts_replaced_is_read_or_refused(start: int, end: int, new: bytes) -> None:
    read_or_refuse(METADATA[:start] + new + METADATA[end:])


OPCODES = [bytes([code]) for code in range(256)] + [b"h%c" % i for i in range(30)]


@given(st.integers(0, 2**32))
@settings(max_examples=examples(200))
def test_parse_random_opcodes_are_read_or_refused(seed: int) -> None:
    rng = random.Random(seed)
    body = b"".join(rng.choice(OPCODES) for _ in range(60))
    with contextlib.suppress(UnreadableError):
        parse_pickle(b"\x80\x04" + body + b".", allowed_globals=ALLOWED_GLOBALS, persistent_ids=True)


def read_or_refuse(data: bytes) -> None:
    """Parse with and without the fast path: both refuse, or both give the same."""
    outcomes = []
    fast = inert_pickle.ObjectRuns.match
    for match in (fast, lambda *_: 0):
        inert_pickle.ObjectRuns.match = match
        try:
            outcomes.append(to_plain(parse_pickle(data, allowed_globals=ALLOWED_GLOBALS)))
        except UnreadableError:
            outcomes.append("refused")
        finally:
            inert_pickle.ObjectRuns.match = fast
    assert outcomes[0] == outcomes[1]
    try:
        parsed = parse_metadata(data)
    except UnreadableError:
        return
    for tensor in parsed.tensors:
        for chunk in tensor.chunks:
            assert len(chunk.box.offsets) == len(chunk.box.sizes) == len(tensor.shape)
            assert ".." not in chunk.span.file.split("/")


def to_plain(value: object) -> object:
    if isinstance(value, Record):
        return ("record", value.name, to_plain(value.args), to_plain(value.state))
    if isinstance(value, GlobalName):
        return ("global", value.name)
    if isinstance(value, dict):
        return [(to_plain(key), to_plain(item)) for key, item in value.items()]
    if isinstance(value, tuple | list):
        return type(value)(map(to_plain, value))
    return ("scalar", type(value), repr(value))
