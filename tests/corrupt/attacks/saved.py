"""Attacks through files that `torch.save` wrote, or that look like it, and through the files of ranks."""

from __future__ import annotations

import pickle
import struct
import zipfile
from collections.abc import Callable

from corrupt.attacks.opcodes import call, dict_of, list_of, name, number, text, tuple_of
from corrupt.attacks.pickles import Payload
from corrupt.attacks.recipe import Case, add, attack, carried, harmless, refused
from corrupt.attacks.zips import CENTRAL, PAYLOAD, archive, tensor_pickle

PROTO = b"\x80\x02"
PERSID = tuple_of(text("storage"), name("torch", "FloatStorage"), text("0"), text("cpu"), number(6)) + b"Q"
COMPANIONS = {**harmless(), "diff": (0, 3)}


def tensor(**options: bytes) -> bytes:
    """The opcodes of a tensor, without PROTO and STOP."""
    return tensor_pickle(**options)[2:-1]


def saved(*pairs: tuple[bytes, bytes], whole: bytes | None = None) -> bytes:
    """The pickle of a state dict."""
    return PROTO + (dict_of(*pairs) if whole is None else whole) + b"."


def model(*pairs: tuple[bytes, bytes], **options: bytes) -> bytes:
    """The pickle of a state dict with one tensor, and others."""
    return saved((text("w"), tensor(**options)), *pairs)


def entries(pickled: bytes) -> list[tuple[str, bytes]]:
    return [("archive/data.pkl", pickled), ("archive/version", b"3\n"), ("archive/data/0", PAYLOAD)]


def _file(title: str, tries: str, make: Callable[[Case], bytes] | bytes, codes=None, **options) -> None:
    def build(case: Case) -> None:
        case.source.mkdir()
        raw = make(case) if callable(make) else make
        (case.source / "pytorch_model.bin").write_bytes(raw)

    add(f"saved-{title}", tries, build, codes, mesh_verb="shard", **options)


def _pickled(title: str, tries: str, pickled: Callable[[Case], bytes] | bytes, codes=None, **options) -> None:
    def make(case: Case) -> bytes:
        return archive(entries=entries(pickled(case) if callable(pickled) else pickled))

    _file(title, tries, make, codes, **options)


_pickled("sound", "nothing: what the others start from", model(), harmless())


def _system(case: Case) -> bytes:
    return call(name("os", "system"), text(case.shell))


def _exploit(case: Case, protocol: int = 2) -> bytes:
    return pickle.dumps(Payload(case.shell), protocol)


def _stream(case: Case) -> bytes:
    values = (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}, Payload(case.shell), [])
    return b"".join(pickle.dumps(value, 2) for value in values)


def _getattr(case: Case) -> bytes:
    return call(call(name("builtins", "getattr"), name("os", "x"), text("system")), text(case.shell))


def times(count: int) -> bytes:
    """The same tensor under many names."""
    return saved(*((text(f"w{i}"), tensor()) for i in range(count)))


ENVIRON = name("os", "environ") + dict_of() + b"b"
UNPAIRED = call(name("collections", "OrderedDict"), list_of(text("x")))
FLAT = model(shape=tuple_of(number(6)), strides=tuple_of(number(1)))
LAUGHS = b"]q\x00" + b"".join(b"](h" + bytes([i]) + b"h" + bytes([i]) + b"eq" + bytes([i + 1]) for i in range(30))
ITSELF = call(name("a", "B")) + b"q\x00h\x00b"
LONG = b"\x8b" + struct.pack("<i", 1 << 20) + bytes(1 << 20)
SCRIPT = ("archive/code/x.py", b"import os")
AGAIN = ("archive/data/0", PAYLOAD[::-1])

# What would run

for protocol in range(6):
    _pickled(f"exploit-{protocol}", "data.pkl is the textbook exploit", lambda c, p=protocol: _exploit(c, p))
# fmt: off
_pickled("exploit-beside", "an object that executes, beside a tensor", lambda c: model((text("x"), _system(c))),
    carried())
_pickled("exploit-key", "a call for a key", lambda c: model((_system(c), number(1))), carried())
_pickled("exploit-holds", "a tensor inside of a call",
    lambda c: saved((text("w"), call(name("os", "system"), tensor()))))
_pickled("exploit-function", "eval for a rebuild function",
    lambda c: model(function=name("torch._utils", "_rebuild_eval")))
# fmt: on
_pickled("exploit-storage", "the storage is the result of a call", lambda c: model(storage=_system(c)))
_pickled("exploit-persistent", "a persistent id that is a call", lambda c: model(storage=_system(c) + b"Q"))
_pickled("exploit-size", "a call for a shape", lambda c: model(shape=_system(c)))
_pickled("exploit-hooks", "a call for a hook", lambda c: saved((text("w"), tensor().replace(b")R", _system(c)))))
_pickled("exploit-getattr", "a call of what getattr returns", lambda c: model((text("x"), _getattr(c))), carried())
_pickled("exploit-build-class", "BUILD on a class", model((text("x"), ENVIRON)))
_pickled("exploit-ordered", "an OrderedDict of something other than pairs", saved(whole=UNPAIRED))
_file("exploit-stream", "a bare pickle that executes", _exploit)
_file("exploit-stream-magic", "a stream whose object executes", _stream)
_file("script", "a TorchScript archive", archive(entries=[*entries(model()), SCRIPT]))

# Storages

for title, tries, key in (
    ("traversal", "the storage is named ../../x", text("../../secret.safetensors")),
    ("absolute", "the storage is named /etc/passwd", text("/etc/passwd")),
    ("pickle", "the storage is data.pkl", text("../data.pkl")),
    ("missing", "the storage is not there", text("7")),
    ("number", "the storage's name is a number", number(0)),
    ("arabic", "a digit of another script", text("\u0660")),
):
    _pickled(f"key-{title}", tries, model(key=key))
_pickled("storage-huge", "a storage of 2^62 elements", model(num_elems=number(1 << 62)))
_pickled("storage-negative", "a storage of -1 elements", model(num_elems=number(-1)))
_pickled("storage-short", "a storage shorter than it claims", model(num_elems=number(600)))
_pickled("storage-long", "a storage longer than it claims", model(num_elems=number(5)))
_pickled("offset-huge", "an offset of 2^62", model(offset=number(1 << 62)))
_pickled("shape-huge", "a shape of 2^62 elements", model(shape=tuple_of(number(1 << 31), number(1 << 31))))
# fmt: off
_pickled("strides-overflow", "size times stride is beyond 64 bits",
    model(shape=tuple_of(number(1 << 40), number(3)), strides=tuple_of(number(1 << 40), number(1))))
_pickled("strides-overlap", "elements that share memory", model(strides=tuple_of(number(1), number(1))))
_pickled("strides-zero", "an element that is expanded to a terabyte",
    model(shape=tuple_of(number(1 << 20), number(1 << 20)), strides=tuple_of(number(0), number(0))))
_pickled("expanded-many", "a thousand tensors, each expanded four thousand times",
    saved(*((text(f"w{i}"), tensor(shape=tuple_of(number(4096)), strides=tuple_of(number(0)))) for i in range(1000))))
# fmt: on
_pickled("views-many", "the same bytes under a thousand names", times(1000))
_pickled("views-few", "the same bytes under two hundred names: legal", times(200), COMPANIONS)
_file("two-records", "two storages of one name", archive(entries=[*entries(model()), AGAIN]))
_file("two-pickles", "two pickles", lambda c: archive(entries=[*entries(model()), ("archive/data.pkl", _exploit(c))]))
_file("deflated", "a megabyte becomes a gigabyte", archive(entries=entries(model()), compression=zipfile.ZIP_DEFLATED))


def _overlapping() -> bytes:
    """A second storage whose entry points at the first's bytes."""
    raw = archive(entries=[*entries(model((text("x"), tensor(key=text("1"))))), ("archive/data/1", PAYLOAD)])
    at = [i for i in range(len(raw)) if raw.startswith(CENTRAL, i)]
    (offset,) = struct.unpack_from("<I", raw, at[2] + 42)
    return raw[: at[3] + 42] + struct.pack("<I", offset) + raw[at[3] + 46 :]


_file("overlapping", "two entries on the same bytes", _overlapping())

# Containers

_pickled("itself", "a dict that contains itself", saved(whole=b"}q\x00X\x01\0\0\0xh\x00s"))
_pickled("itself-inside", "an object that contains itself", model((text("x"), ITSELF)), COMPANIONS)
_pickled("nested", "sixty thousand tuples in each other", saved(whole=b")" + b"\x85" * 60_000))
_pickled("nested-key", "a key of three thousand tuples", model((b")" + b"\x85" * 3_000, number(1))), COMPANIONS)
_pickled("nested-marks", "a hundred thousand marks", PROTO + b"(" * 100_000 + b".")
_pickled("memo-bomb", "a memo of 2^29", PROTO + b"]r\xff\xff\xff\x1f.")
_pickled("laughs", "thirty lists, each twice in the next", saved(whole=LAUGHS))
_pickled("integer", "an integer of a megabyte", model((text("x"), LONG)))
_pickled("string", "a string that claims 2^60 bytes", PROTO + b"\x8d" + struct.pack("<Q", 1 << 60) + b".")
_pickled("array", "an array that claims 2^60 bytes", PROTO + b"\x96" + struct.pack("<Q", 1 << 60) + b".")
_pickled("name-escape", "a name that drives the terminal", saved((text("\x1b[2J\u202ew"), tensor())), COMPANIONS)
_pickled("name-long", "a name of a megabyte", saved((text("w" * (1 << 20)), tensor())))
_pickled("name-twice", "two tensors of one name",
    saved((text("a.b"), tensor()), (text("a"), dict_of((text("b"), tensor())))))  # fmt: skip
_pickled("empty", "no tensors", saved(), {**refused(), "inspect": (0,), "structure": (3,), "data": (3,), "diff": (3,)})


@attack("saved-index-traversal", "an index that names a file outside", mesh_verb="shard", words="outside")
def _index(case: Case) -> None:
    case.source.mkdir()
    document = '{"metadata": {}, "weight_map": {"w": "../../outside/secret.safetensors"}}'
    (case.source / "pytorch_model.bin.index.json").write_text(document)


# Ranks


def _ranks(title: str, tries: str, codes=None, **pickles: bytes) -> None:
    def build(case: Case) -> None:
        case.source.mkdir()
        for rank, pickled in enumerate(pickles.values()):
            raw = archive(entries=entries(pickled))
            (case.source / f"model_world_size_{len(pickles)}_rank_{rank}.pt").write_bytes(raw)

    add(f"ranks-{title}", tries, build, codes)


_ranks("sound", "nothing: the same plain tensor twice", COMPANIONS, a=model(), b=model())
_ranks("shape", "ranks that claim different shapes", a=model(), b=FLAT)
_ranks("names", "ranks that hold different tensors", a=model(), b=saved((text("v"), tensor())))
_ranks("exploit", "a rank that executes", a=model(), b=PROTO + call(name("os", "system"), text("id")) + b".")
