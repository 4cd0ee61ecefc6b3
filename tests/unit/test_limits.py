"""Limits: the documented values are those of the code, and each holds exactly where it says."""

from __future__ import annotations

import importlib
import json
import pickle
import re
import tracemalloc
from functools import reduce
from pathlib import Path

import pytest
import torch
from samples import shard_model
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import ckpt_tools.checkpoint.formats.dcp
from ckpt_tools import api
from ckpt_tools.checkpoint.entries import MAX_DIMS, MAX_ELEMS, MAX_FQN_CHARS, fqn_problem, is_possible_shape
from ckpt_tools.checkpoint.formats import safetensors
from ckpt_tools.checkpoint.formats._json import parse_json
from ckpt_tools.checkpoint.formats._pickle_values import PickleLimits
from ckpt_tools.checkpoint.formats.dcp_metadata import parse_metadata
from ckpt_tools.checkpoint.formats.inert_pickle import parse_pickle
from ckpt_tools.errors import LimitError, UnreadableError
from ckpt_tools.memory import peak_rss_bytes
from ckpt_tools.text import MAX_COMPONENT_BYTES, MAX_PATH_BYTES, MAX_SHOWN_CHARS, escape_name, is_plain_path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "dev" / "limits.md"
ROW = re.compile(r"^\|.*\| ([^|]+) \| `(ckpt_tools[\w.]+)` \|$", re.MULTILINE)
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "MB": 10**6}


def _value(text: str) -> int:
    if text.startswith("2^"):
        return 1 << int(text[2:])
    number, _, unit = text.partition(" ")
    return int(number.replace(",", "")) * UNITS.get(unit, 1)


@pytest.mark.parametrize(("shown", "place"), ROW.findall(PAGE.read_text(encoding="utf-8")))
def test_limits_page_says_what_the_code_has(shown: str, place: str) -> None:
    parts = place.split(".")
    depth = next(i for i in range(len(parts), 0, -1) if _is_module(".".join(parts[:i])))
    module = importlib.import_module(".".join(parts[:depth]))
    assert reduce(getattr, parts[depth:], module) == _value(shown)


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def test_limits_page_has_every_field_of_a_pickles_limits() -> None:
    named = {place.rpartition(".")[2] for _, place in ROW.findall(PAGE.read_text(encoding="utf-8"))}
    assert set(PickleLimits.__dataclass_fields__) <= named
    assert len(named) > 30


def test_metadata_limits_set_by_a_program_hold(tmp_path: Path, monkeypatch) -> None:
    run = shard_model(tmp_path)
    assert api.open_checkpoint(run).tensors
    for limits in (PickleLimits(max_bytes=100), PickleLimits(max_string_bytes=3), PickleLimits(max_depth=1)):
        monkeypatch.setattr(ckpt_tools.checkpoint.formats.dcp, "METADATA_LIMITS", limits)
        with pytest.raises(LimitError):
            api.open_checkpoint(run)


# Names


@pytest.mark.parametrize(
    ("fqn", "words"),
    [
        *((fqn, None) for fqn in ("w", "", "x" * MAX_FQN_CHARS, "\x1b[2J", "\u202e", "../../x", "\U0001f600")),
        *(("x" * (MAX_FQN_CHARS + 1), "4097"), ("a\0b", "NUL"), ("\ud800", "surrogate")),
    ],
)
def test_fqn_is_kept_or_named_with_its_problem(fqn: str, words: str | None) -> None:
    problem = fqn_problem(fqn)
    assert problem is None if words is None else words in (problem or "")


LONGEST = "/".join(["x" * MAX_COMPONENT_BYTES] * (MAX_PATH_BYTES // (MAX_COMPONENT_BYTES + 1)))


INSIDE = ("a", "a/b", ".hidden", "...", "a..b", "-rf", "\x1b[2J", "\udcff", "é" * 127, LONGEST, "a\\..\\b")
OUTSIDE = ("", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/..", "a/../b", "./a", "a\0b", "\ud800")
TOO_LONG = ("x" * (MAX_COMPONENT_BYTES + 1), "é" * 128, LONGEST + "/x" * 200)


@pytest.mark.parametrize("file", [*INSIDE, *OUTSIDE, *TOO_LONG])
def test_path_is_plain_where_it_stays_inside(file: str) -> None:
    assert is_plain_path(file) == (file in INSIDE)


POSSIBLE = ((), (0,), (1,) * MAX_DIMS, (MAX_ELEMS,), (0, MAX_ELEMS), (1 << 31, 1 << 31))
IMPOSSIBLE = ((1,) * (MAX_DIMS + 1), (MAX_ELEMS + 1,), (0, MAX_ELEMS, 2), (1 << 31, 1 << 32), (3,) * 10**6)


@pytest.mark.parametrize("shape", [*POSSIBLE, *IMPOSSIBLE])
def test_shape_is_possible_within_limits(shape: tuple[int, ...]) -> None:
    assert is_possible_shape(shape) == (shape in POSSIBLE)


def test_escape_name_of_long_names_is_cut_visibly() -> None:
    assert escape_name("x" * MAX_SHOWN_CHARS) == "x" * MAX_SHOWN_CHARS
    for long in ("x" * (MAX_SHOWN_CHARS + 1), "\x1b" * MAX_SHOWN_CHARS, "x" * 10**7):
        shown = escape_name(long)
        assert len(shown) == MAX_SHOWN_CHARS
        assert shown.endswith("…")


# JSON


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'{"a": 1, "a": 1}', "twice"),
        (b'{"a": {"b": 1, "b": 2}}', "twice"),
        (b"[NaN]", "NaN is not a number"),
        (b"[-Infinity]", "not a number"),
        (b"[" * 100_000, "nested too deep"),
        (b"\xff", "not UTF-8"),
        (b"[" + b"9" * 5000 + b"]", "not valid JSON"),
        (b"", "not valid JSON"),
    ],
)
def test_json_that_readers_read_differently_is_refused(text: bytes, words: str) -> None:
    with pytest.raises(UnreadableError, match=words) as caught:
        parse_json(text, what="the index", where="x")
    assert caught.value.what.startswith("the index")


def test_json_at_its_limits_is_read_and_beyond_is_not() -> None:
    text = json.dumps([[1], {"a": []}]).encode()
    assert parse_json(text, what="it", where=None, max_bytes=len(text), max_containers=4) == [[1], {"a": []}]
    with pytest.raises(LimitError, match="bytes, the limit is"):
        parse_json(text, what="it", where=None, max_bytes=len(text) - 1)
    with pytest.raises(LimitError, match="up to 4 objects and arrays, the limit is 3"):
        parse_json(text, what="it", where=None, max_containers=3)


def test_header_longer_than_its_limit_is_refused_before_it_is_parsed(monkeypatch) -> None:
    monkeypatch.setattr(safetensors, "MAX_HEADER_BYTES", 10)
    with pytest.raises(LimitError):
        safetensors.parse_header(b"{}" + b" " * 9, file="x", file_nbytes=None)
    assert safetensors.parse_header(b"{}" + b" " * 8, file="x", file_nbytes=None).tensors == ()


# Pickles


def _parse(body: bytes, **limits: int) -> object:
    return parse_pickle(b"\x80\x04" + body + b".", allowed_globals=frozenset(), limits=PickleLimits(**limits))


def test_pickle_of_many_containers_is_refused_in_bounded_memory() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(LimitError, match="more containers"):
            _parse(b"(" + b"}" * 1_000_000 + b"t")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 150 << 20  # all of them would take 250 MB


@pytest.mark.full
def test_pickle_of_many_containers_with_content_is_read() -> None:
    value = _parse(b"](" + b"](K\x01K\x02K\x03e" * 100_000 + b"e")
    assert isinstance(value, list)
    assert len(value) == 100_000


def test_pickle_of_many_open_marks_is_refused() -> None:
    with pytest.raises(LimitError, match="nests more"):
        _parse(b"(" * 1_000_000)


@pytest.mark.parametrize("num_opcodes", [2, 65_534, 65_536, 65_538, 200_000])
def test_pickle_opcodes_are_counted_exactly(num_opcodes: int) -> None:
    """The limit is looked at in stretches; it must not matter where they end."""
    body = b"]" + b"Na" * ((num_opcodes - 2) // 2)
    opcodes = len(body) + 1  # STOP
    assert isinstance(_parse(body, max_opcodes=opcodes), list)
    with pytest.raises(LimitError, match="opcodes"):
        _parse(body, max_opcodes=opcodes - 1)


DENSE = {
    "dicts": b"}" * 20_000_000,
    "memoised dicts": b"}\x94" * 10_000_000,
    "tuples of dicts": b"(}}}t" * 4_000_000,
    "dicts of dicts": b"}K\x00}s" * 4_000_000,
    "lists": b"]" * 20_000_000,
    "calls": b"ctorch\nSize\nq\x00" + b"h\x00)R" * 5_000_000,
}


@pytest.mark.parametrize("kind", DENSE)
def test_twenty_megabytes_of_small_objects_are_refused_at_once(kind: str) -> None:
    data = b"\x80\x02](" + DENSE[kind] + b"e."
    before = peak_rss_bytes()
    with pytest.raises(LimitError, match="more containers and objects"):
        parse_pickle(data, allowed_globals=frozenset({"torch.Size"}))
    assert peak_rss_bytes() - before < 32 << 20


@pytest.mark.full
@pytest.mark.parametrize("protocol", [2, 4])
def test_real_metadata_with_short_names_is_far_from_the_limit(protocol: int) -> None:
    entries, paths, places = {}, {}, {}
    for i in range(3000):
        name, dims = str(i), torch.Size((i,))
        properties = TensorProperties(dtype=torch.float32)
        entries[name] = TensorStorageMetadata(properties, dims, [ChunkStorageMetadata(torch.Size((0,)), dims)])
        paths[name] = (name,)
        places[MetadataIndex(name, torch.Size((0,)), 0)] = _StorageInfo("__0_0.distcp", i << 20, 1 << 20)
    data = pickle.dumps(Metadata(entries, paths, places), protocol)
    assert len(parse_metadata(data).tensors) == 3000
    with pytest.raises(LimitError):
        parse_metadata(data, limits=PickleLimits(bytes_per_container=64))
