"""The pickle reader: equal to CPython's on plain data, and never more than a reader on anything else."""

from __future__ import annotations

import collections
import os
import pickle
import struct
import subprocess
from dataclasses import dataclass

import pytest

from ckpt_tools.checkpoint.formats import inert_pickle
from ckpt_tools.checkpoint.formats._pickle_values import PERSISTENT_ID, GlobalName, PickleLimits, Record
from ckpt_tools.checkpoint.formats.inert_pickle import parse_pickle
from ckpt_tools.errors import LimitError, UnreadableError

SIZE = b"\x8c\x05torch\x94\x8c\x04Size\x94\x93\x94"


@dataclass
class Point:
    """Pickled by CPython as NEWOBJ and BUILD."""

    x: int
    y: str


class Reduced:
    """Pickled as REDUCE of a function."""

    def __init__(self, function, *args) -> None:
        self.function = function
        self.args = args

    def __reduce__(self):
        return self.function, self.args


POINT = f"{Point.__module__}.Point"


def to_plain(value):
    """Turn records into nested tuples, which compare by value."""
    if isinstance(value, Record):
        return ("record", value.name, to_plain(value.args), to_plain(value.state))
    if isinstance(value, GlobalName):
        return ("global", value.name)
    if isinstance(value, dict):
        return {"dict": [(to_plain(k), to_plain(v)) for k, v in value.items()]}
    if isinstance(value, tuple | list):
        return type(value)(map(to_plain, value))
    return value


def parse(data: bytes, *allowed: str, **options):
    return parse_pickle(data, allowed_globals=frozenset(allowed), **options)


def assemble(body: bytes) -> bytes:
    return b"\x80\x04" + body + b"."


def test_protocols_are_as_expected() -> None:
    # A new default protocol would make the list in the next test too short.
    assert pickle.HIGHEST_PROTOCOL == 5


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("with_c", [True, False], ids=["c", "python"])
def test_parse_plain_object_returns_what_cpython_returns(protocol: int, with_c: bool) -> None:
    shared = ("shared", [1, 2])
    value = {
        "ints": [0, 1, 255, 256, 65535, 65536, 2**31 - 1, 2**31, -1, -(2**31), -(2**31) - 1, 2**63 - 1, -(2**63)],
        "others": (None, True, False, 1.5, float("-inf"), -0.0),
        "text": ["", "ä€𝄞", "x" * 300, "x" * 70000, "tail"],
        "tuples": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)),
        "empty": [[], {}, ()],
        "many": list(range(2500)),
        "table": {i: str(i) for i in range(2500)},
        "shared": [shared, shared],
        3: {None: 1, True: 2, 2.5: 3},
    }
    if protocol >= 3:  # protocol 2 writes bytes as a call
        value["bytes"] = [b"", b"\x94\x00", b"y" * 300]
    dumps = pickle.dumps if with_c else pickle._dumps
    parsed = parse(dumps(value, protocol))
    assert parsed == value
    assert list(parsed) == list(value)
    assert parsed["shared"][0] is parsed["shared"][1]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_parse_instance_and_call_return_records_and_a_class_one_name(protocol: int) -> None:
    record = parse(pickle.dumps(Point(3, "a"), protocol), POINT, "copyreg._reconstructor")
    assert to_plain(record) == ("record", POINT, (), {"dict": [("x", 3), ("y", "a")]})
    record = parse(pickle.dumps(Reduced(os.getcwd), protocol), "posix.getcwd")
    assert to_plain(record) == ("record", "posix.getcwd", (), None)
    first, second = parse(pickle.dumps([Point, Point], protocol), POINT)
    assert first is second
    assert first.name == POINT


def test_parse_persistent_id_needs_the_flag() -> None:
    data = assemble(b"K\x07Q")
    assert to_plain(parse(data, persistent_ids=True)) == ("record", PERSISTENT_ID, (7,), None)
    with pytest.raises(UnreadableError, match="BINPERSID"):
        parse(data)


def test_parse_malicious_call_names_it_and_runs_nothing(tmp_path) -> None:
    target = tmp_path / "executed"
    for call in (
        Reduced(os.system, f"touch {target}"),
        Reduced(subprocess.call, ["touch", str(target)]),
        Reduced(eval, f"open({str(target)!r}, 'w')"),
        Reduced(__import__, "this"),
    ):
        for protocol in range(2, 6):
            with pytest.raises(UnreadableError, match=r"names '.*', which is not allowed here; it was not executed"):
                parse(pickle.dumps(call, protocol), POINT)
    assert not target.exists()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "PROTO"),
        (b"not a pickle", "PROTO"),
        (pickle.dumps([1], 0), "PROTO"),
        (pickle.dumps([1], 1), "PROTO"),
        (b"\x80\x01N.", "protocol 1"),
        (b"\x80\x06N.", "protocol 6"),
        (assemble(b"\x80\x04N"), "opcode PROTO"),
        (assemble(b"(S'id'\nios\nsystem\n"), "opcode STRING"),
        (assemble(b"(ios\nsystem\n"), "opcode INST"),
        (assemble(b"(cos\nsystem\no"), "'os.system'"),
        (assemble(b"(o"), "opcode OBJ"),
        (assemble(b"\x82\x01"), "opcode EXT1"),
        (assemble(b"\x83\x01\x00"), "opcode EXT2"),
        (assemble(b"\x84\x01\x00\x00\x00"), "opcode EXT4"),
        (assemble(b"Pid\n"), "opcode PERSID"),
        (assemble(b"N0"), "opcode POP"),
        (assemble(b"(N1"), "opcode POP_MARK"),
        (assemble(b"N2"), "opcode DUP"),
        (assemble(b"Np0\n"), "opcode PUT"),
        (assemble(b"g0\n"), "opcode GET"),
        (assemble(b"I1\n"), "opcode INT"),
        (assemble(b"(l"), "opcode LIST"),
        (assemble(b"(d"), "opcode DICT"),
        (assemble(b"\x8f"), "opcode EMPTY_SET"),
        (assemble(b"(\x91"), "opcode FROZENSET"),
        (assemble(b")}\x92"), "opcode NEWOBJ_EX"),
        (assemble(b"\x96" + bytes(8)), "opcode BYTEARRAY8"),
        (assemble(b"\x97"), "opcode NEXT_BUFFER"),
        (assemble(b"\xff"), "byte 0xff, which is not a pickle opcode"),
        (assemble(b"N") + b".", "1 bytes follow"),
        (assemble(b"NN"), "more or less than one value"),
        (assemble(b""), "more or less than one value"),
        (assemble(b"(N"), "more or less than one value"),
        (b"\x80\x04N", "ends early"),
        (assemble(b"X\xff\xff\x00\x00abc"), "ends early"),
        (assemble(b"\x95" + struct.pack("<Q", 9) + b"N"), "ends early"),
        (assemble(b"h\x00" + bytes(30)), "never stored"),
        (assemble(b"j\xff\xff\xff\xff" + bytes(30)), "never stored"),
        (assemble(b"\x85" + bytes(30)), "never stored"),
        (assemble(b"K\x01(\x85t" + bytes(30)), "never stored"),
        (assemble(b"t" + bytes(30)), "never stored"),
        (assemble(b"K\x01K\x02a"), "APPEND on int"),
        (assemble(b"K\x01(K\x02e"), "APPENDS on int"),
        (assemble(b"K\x01K\x02K\x03s"), "SETITEM on int"),
        (assemble(b"](K\x01K\x02u"), "SETITEMS on list"),
        (assemble(b"}(K\x01u"), "no value"),
        (assemble(b"}]Ns"), "dict key is a list"),
        (assemble(b"}}Ns"), "dict key is a dict"),
        (assemble(b"})Ns"), "dict key is a tuple"),
        (assemble(b"}(K\x01NK\x01Nu"), "same key twice"),
        (assemble(b"}K\x01Ns\x88Ns"), "same key twice"),
        (assemble(b"K\x01)R"), "REDUCE on int"),
        (assemble(b"K\x01)\x81"), "NEWOBJ on int"),
        (assemble(b"K\x01Nb"), "BUILD on int"),
        (assemble(b"K\x01K\x02\x93"), "not made of two strings"),
        (assemble(SIZE + b"K\x01R"), "for arguments"),
        (assemble(SIZE + b")R}b}b"), "BUILD twice"),
        (assemble(SIZE + b"}b"), "BUILD on a global name"),
        (assemble(SIZE + b"h\x02)R)R"), "REDUCE on Record"),
        (assemble(b"ctorch\nSize"), "without an end"),
        (assemble(b"\x8c\x01\xff"), "not UTF-8"),
        (assemble(b"\x8c\x03\xed\xa0\x80"), "not UTF-8"),
        (assemble(b"Nq\x01"), "memo index 1, the next one is 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_parse_malformed_pickle_is_refused_by_name(data: bytes, message: str) -> None:
    with pytest.raises(UnreadableError, match=message):
        parse(data, "torch.Size")


@pytest.mark.parametrize(
    "body",
    [
        b"]\x94h\x00a",  # a list in itself
        b"]\x94(h\x00e",
        b"}\x94K\x01h\x00s",  # a dict in itself
        b"}\x94(K\x01h\x00u",
        b"]\x94h\x00\x85\x94h\x00h\x01aa",  # through a tuple
        b"\x8c\x05torch\x94\x8c\x01X\x94\x93)\x81\x94}K\x01h\x02sb",  # a record in its own state
        b"\x8c\x05torch\x94\x8c\x01X\x94\x93)\x81\x94h\x02b",
    ],
)
def test_parse_cyclic_pickle_is_refused(body: bytes) -> None:
    with pytest.raises(UnreadableError, match="perhaps of itself"):
        parse(assemble(body), "torch.X")


def test_parse_cyclic_object_from_cpython_is_refused() -> None:
    looped: list[object] = []
    looped.append({"me": (looped,)})
    with pytest.raises(UnreadableError):
        parse(pickle.dumps(looped, 4))


@pytest.mark.parametrize(
    ("data", "limits", "message"),
    [
        (pickle.dumps(list(range(99)), 4), PickleLimits(max_bytes=100), "bytes long"),
        (pickle.dumps(list(range(99)), 4), PickleLimits(max_opcodes=50), "opcodes"),
        (pickle.dumps([[[[]]]], 4), PickleLimits(max_depth=3), "nests"),
        (pickle.dumps({1: {2: ({3: 4},)}}, 4), PickleLimits(max_depth=3), "nests"),
        (pickle.dumps("x" * 101, 4), PickleLimits(max_string_bytes=100), "string of 101"),
        (pickle.dumps(b"x" * 101, 4), PickleLimits(max_string_bytes=100), "string of 101"),
        (assemble(b"X\xff\xff\xff\xff"), PickleLimits(), "string of 4294967295"),
        (assemble(b"\x8d" + b"\xff" * 8), PickleLimits(), "string of 18446744073709551615"),
        (pickle.dumps(2**63, 4), PickleLimits(), "integer of 9 bytes"),
        (pickle.dumps(2**15, 2), PickleLimits(max_int_bytes=1), None),
        (assemble(b"\x8b\xff\xff\xff\x7f"), PickleLimits(), "integer of 2147483647 bytes"),
        (assemble(b"\x8b\xff\xff\xff\xff"), PickleLimits(), "integer of -1 bytes"),
    ],
)
def test_parse_beyond_a_limit_raises_limit_error(data: bytes, limits: PickleLimits, message: str | None) -> None:
    if message is None:  # the bound is on LONG1 and LONG4; shorter opcodes are bounded by themselves
        parse(data, limits=limits)
        return
    with pytest.raises(LimitError, match=message):
        parse(data, limits=limits)


def test_parse_at_the_limits_succeeds() -> None:
    value = [[[1]], "x" * 100, 2**39]
    data = pickle.dumps(value, 4)
    limits = PickleLimits(max_bytes=len(data), max_depth=3, max_string_bytes=100, max_int_bytes=6)
    assert parse(data, limits=limits) == value


@pytest.mark.parametrize(
    "body",
    [
        b")" + b"\x85" * 1_000_000,
        b"]" * 1_000_000 + b"a" * 999_999,
        b"(" * 1_000_000 + b"t" * 1_000_000,
        b"}" + b"K\x01}" * 500_000 + b"s" * 500_000,
        b")\x94" + b"h\x00\x85\x94" * 300_000,
    ],
    ids=["tuples", "lists", "marks", "dicts", "empty-tuples"],
)
def test_parse_deep_nesting_is_refused_without_recursion(body: bytes) -> None:
    with pytest.raises(UnreadableError):
        parse(assemble(body))


def test_parse_depth_through_the_memo_is_counted() -> None:
    steps = b"".join(b"j" + struct.pack("<I", i) + b"\x85\x94" for i in range(2000))
    with pytest.raises(LimitError, match="nests"):
        parse(assemble(b"K\x01\x94(" + steps + b"t"))


@pytest.mark.timeout(60)
def test_parse_shared_parts_take_linear_time() -> None:
    # Every list holds the one before twice: 2^50 paths, 50 lists.
    body = b"]\x94" + b"".join(b"](h%ch%ce\x94" % (i, i) for i in range(50))
    with pytest.raises(UnreadableError, match="more or less than one value"):
        parse(assemble(body))


@pytest.mark.parametrize("body", [b"Nr\xff\xff\xff\x1f", b"Nr\xff\xff\xff\xff", b"\x94" * 10])
def test_parse_memo_bomb_allocates_nothing(body: bytes) -> None:
    import tracemalloc

    tracemalloc.start()
    try:
        with pytest.raises(UnreadableError):
            parse(assemble(body))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_parse_equal_records_as_keys_stay_apart() -> None:
    # Identity, not equality: no content is hashed, so none can be chosen to collide or to recurse.
    parsed = parse(assemble(SIZE + b"K\x01\x85\x85R\x94}h\x02K\x01\x85\x85RK\x05sh\x03K\x06s\x86"), "torch.Size")
    assert len(parsed[1]) == 2


# The fast path

KEYS = b"\x8c\x01a\x94\x8c\x01b\x94\x8c\x01c\x94\x8c\x01d\x94"  # memo 4..7
CLASS = b"\x8c\x05torch\x94\x8c\x01X\x94\x93\x94"  # memo 8..10


def run_of(*objects: bytes) -> bytes:
    """Pickle of a list that holds Size, X, the keys and then objects of class X."""
    made = b"".join(b"h\x0a)\x81\x94}\x94(" + pairs + b"ub" for pairs in objects)
    return b"]\x94(" + SIZE + KEYS + CLASS + made + b"e"


SIZES = [
    b"h\x03)\x85\x94R\x94",
    b"h\x03K\x07\x85\x94\x85\x94R\x94",
    b"h\x03K\x07M\x00\x01\x86\x94\x85\x94R\x94",
    b"j\x03\x00\x00\x00K\x07M\x00\x01J\xff\xff\xff\xff\x87\x94\x85\x94R\x94",
    b"h\x03(K\x01K\x02K\x03\x8a\x05\x00\x00\x00\x00\x01t\x94\x85\x94R\x94",
]


@pytest.mark.parametrize(
    "objects",
    [
        [b"h\x04K\x01h\x05K\x02"],
        [b"h\x04K\x01h\x05K\x02"] * 3,
        [b"h\x04%bh\x05%b" % (size, size) for size in SIZES] * 2,
        [b"h\x04\x8c\x03xyz\x94h\x05Nh\x06%b" % SIZES[2], b"h\x04\x8c\x03xyz\x94h\x05K\x01h\x06%b" % SIZES[2]],
        [b"h\x04\x8c\x04\xc3\x94zz\x94h\x05N"],  # the byte of MEMOIZE inside a string
        [b"h\x04\x8c\x00\x94h\x05h\x04h\x06h\x03h\x07J\x00\x00\x00\x80"],
        [b"h\x04\x8a\x05abcdeh\x05\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f"],
        [b"h\x04%bh\x05h\x0f" % SIZES[1], b"h\x04h\x0fh\x05K\x00", b"h\x04h\x0fh\x05K\x00"],
        [b"h\x04)h\x05K\x01", b"h\x04h\x0bh\x05h\x0c"],  # not matched: a bare tuple, and another object
    ],
)
def test_fast_path_gives_what_the_general_loop_gives(objects: list[bytes], monkeypatch) -> None:
    # Whatever the memo holds afterwards must be the same too: fetch all of it.
    fetched = b"".join(b"h%c" % i for i in range(11 + 2 * len(objects)))
    data = assemble(b"(" + run_of(*objects) + fetched + b"t")
    fast = to_plain(parse(data, "torch.Size", "torch.X"))
    monkeypatch.setattr(inert_pickle.ObjectRuns, "match", lambda *_: 0)
    assert to_plain(parse(data, "torch.Size", "torch.X")) == fast


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (b"h\x04K\x01h\x04K\x02", "same key twice"),
        (b"h\x03K\x01h\x05K\x02", None),
        (b"h\x04h\x00h\x05K\x02", "perhaps of itself"),
        (b"h\x04h\xffh\x05K\x02", "never stored"),
        (b"h\xffK\x01h\x05K\x02", "never stored"),
        (b"h\x04\x8c\x01\xff\x94h\x05K\x02", "not UTF-8"),
    ],
)
def test_fast_path_leaves_what_is_odd_to_the_general_loop(pairs: bytes, message: str | None) -> None:
    data = assemble(run_of(pairs) + b"\x94" * 20)
    if message is None:
        parse(data, "torch.Size", "torch.X")
        return
    with pytest.raises(UnreadableError, match=message):
        parse(data, "torch.Size", "torch.X")


def test_fast_path_records_cannot_be_changed_later() -> None:
    for change in (b"h\x0b}b", b"h\x0cK\x01K\x02s"):
        data = assemble(b"(" + run_of(b"h\x04K\x01h\x05K\x02") + change + b"t")
        with pytest.raises(UnreadableError, match="part of something"):
            parse(data, "torch.Size", "torch.X")


def test_fast_path_is_off_where_limits_are_narrow() -> None:
    data = assemble(run_of(b"h\x04\x8c\x09123456789\x94h\x05K\x02"))
    with pytest.raises(LimitError, match="string of 9"):
        parse(data, "torch.Size", "torch.X", limits=PickleLimits(max_string_bytes=8))


@pytest.mark.timeout(60)
def test_fast_path_with_unending_strings_takes_linear_time() -> None:
    half = b"h\x0a)\x81\x94}\x94(h\x04\x8c\xff" + b"a" * 255
    data = assemble(b"]\x94(" + SIZE + KEYS + CLASS + half * 20_000)
    with pytest.raises(UnreadableError):
        parse(data, "torch.Size", "torch.X")


def test_parse_ordered_dict_with_items_is_refused() -> None:
    data = pickle.dumps(collections.OrderedDict(a=1), 4)
    with pytest.raises(UnreadableError, match="SETITEM on Record"):
        parse(data, "collections.OrderedDict")
