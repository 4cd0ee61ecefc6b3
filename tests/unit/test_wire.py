"""What crosses between processes comes back as it was, and nothing else comes back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.checkpoint.entries import ByteSpan, Checkpoint, Chunk, Finding, TensorEntry
from ckpt_tools.checkpoint.layout import Box, Mesh, Replicate, Shard
from ckpt_tools.sandbox import wire


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    number: int | None = None
    share: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    kind: Literal["a", "b"] = "a"
    path: str = "caf\udce9"
    inner: Inner | None = None
    many: tuple[Inner, ...] = ()
    pair: tuple[str, int] = ("x", 1)
    names: frozenset[str] = frozenset()
    items: Sequence[int] = ()
    by_rank: Mapping[int, Inner] = field(default_factory=dict)
    keys: tuple[str | int, ...] = ()
    anything: object = None
    is_on: bool = False


@pytest.mark.parametrize(
    "value",
    [
        Outer(),
        Outer(kind="b", inner=Inner(number=0, share=math.inf), many=(Inner(), Inner(share=1e-300)), is_on=True),
        Outer(names=frozenset({"b", "a"}), items=(1, 2), by_rank={3: Inner(number=-1)}, keys=("a", 0, "0")),
        Outer(anything={"a": [1, None, {"b": "ä"}]}),
        Finding.warning(code="c", where="w", what="x"),
        Checkpoint(
            root="/tmp",
            format="dcp",
            tensors=(
                TensorEntry(
                    fqn="a",
                    dtype=BY_NAME["BF16"],
                    shape=(2, 3),
                    chunks=(Chunk(box=Box((0, 0), (2, 3)), span=ByteSpan(file="f", offset=8, nbytes=12)),),
                    path=("model", "a"),
                ),
            ),
            mesh=Mesh((("dp_shard", 2), ("tp", 2))),
            placements={"a": {"dp_shard": Shard(0), "tp": Replicate()}},
            files={"f": 20},
        ),
    ],
)
def test_value_comes_back_as_it_was(value):
    found = wire.loads(type(value), wire.dumps(value))
    assert found == value
    assert type(found) is type(value)


def test_path_comes_back_as_text():
    assert wire.loads(Outer, wire.dumps(Outer(path=Path("/a")))).path == "/a"


def test_number_that_is_none_comes_back():
    assert math.isnan(wire.loads(Inner, wire.dumps(Inner(share=math.nan))).share)


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("kind", "c"),
        ("path", 1),
        ("inner", {"number": 1}),
        ("inner", {"number": 1, "share": 0.0, "more": 1}),
        ("inner", {"number": True, "share": 0.0}),
        ("inner", []),
        ("many", {}),
        ("pair", ["x"]),
        ("pair", ["x", 1, 2]),
        ("names", [1]),
        ("by_rank", {"x": {"number": None, "share": 0.0}}),
        ("keys", [1.5]),
        ("is_on", 1),
        ("is_on", None),
    ],
)
def test_value_of_another_type_is_refused(change, value):
    with pytest.raises(ValueError, match=r"fit|fields|zip|literal"):
        wire.build(Outer, json.loads(wire.dumps(Outer())) | {change: value})


def test_what_no_json_holds_does_not_cross():
    with pytest.raises(TypeError, match="a complex cannot be sent"):
        wire.dumps({"a": 1j})
    value: Any = Outer(anything=object())
    with pytest.raises(TypeError, match="object cannot be sent"):
        wire.dumps(value)
