"""Attacks through `.metadata`, which DCP unpickles."""

from __future__ import annotations

import pickle
import pickletools
import struct

from corrupt.attacks.opcodes import DCP, NONE, PROTO, W, call, dict_of, name, tensor, text, tuple_of, write_run
from corrupt.attacks.recipe import Case, add, harmless

NOT_EXECUTED = "not executed"


def planner(title: str, tries: str, value, codes=None, **options) -> None:
    """Put a value where the format leaves room for anything: into planner_data."""

    def build(case: Case) -> None:
        raw = value(case) if callable(value) else value
        write_run(case.source, planner=dict_of((W, raw)))

    add(f"pickle-{title}", tries, build, codes, **options)


# Calls

GADGETS = (
    "posix.system", "os.system", "nt.system", "subprocess.Popen", "subprocess.check_output", "builtins.eval",
    "builtins.exec", "builtins.__import__", "builtins.getattr", "__builtin__.eval", "importlib.import_module",
    "pickle.loads", "torch.load", "torch.hub.load", "torch.jit.load", "numpy.load", "runpy._run_code", "pty.spawn",
    "operator.attrgetter", "functools.partial", "types.FunctionType", "copyreg._reconstructor", "code.interact",
    "webbrowser.open", "socket.create_connection", "torch.serialization._get_layout.__globals__",
    "torch.Size.__class__", "torch.storage._load_from_bytes", "torch._utils._rebuild_tensor_v2", "pathlib.Path.unlink",
    "ckpt_tools.cli.main",
)  # fmt: skip

for gadget in GADGETS:
    module, _, attribute = gadget.rpartition(".")
    planner(
        f"reduce-{gadget}",
        f"calls {gadget} while the metadata is read",
        lambda case, m=module, a=attribute: call(name(m, a), text(case.shell)),
        words=NOT_EXECUTED,
    )

# fmt: off
planner("reduce-global", "names os.system by the old GLOBAL opcode",
    lambda case: b"cos\nsystem\n" + tuple_of(text(case.shell)) + b"R", words=NOT_EXECUTED)
planner("reduce-of-string", "calls a string", call(text("os.system"), text("id")), words="reduce on str", codes=None)
planner("newobj-of-function", "makes an object of os.system", name("os", "system") + b")\x81", words=NOT_EXECUTED)
planner("newobj-ex", "NEWOBJ_EX on an allowed class", name("torch", "Size") + b")}\x92", words=NOT_EXECUTED)
planner("inst", "the INST opcode", lambda case: b"(" + text(case.shell) + b"ios\nsystem\n", words=NOT_EXECUTED)
planner("obj", "the OBJ opcode", lambda case: b"(" + name("torch", "Size") + text(case.shell) + b"o")
planner("build-on-class", "BUILD with slots state rewrites attributes of an allowed class",
    name("torch", "Size") + tuple_of(NONE, dict_of((text("__init__"), text("x")))) + b"b", words=NOT_EXECUTED)
# fmt: on
planner("build-on-dict", "BUILD on a dict", b"}}b", words=NOT_EXECUTED)
STORAGE_META = name("torch.distributed.checkpoint.metadata", "StorageMeta")
planner("build-twice", "BUILD twice on one record", STORAGE_META + b")\x81}b}b", words="build twice")
planner("global-with-newlines", "a name with more lines than GLOBAL has",
    b"ctorch\nSize\nos\nsystem\n" + tuple_of() + b"R")  # fmt: skip
planner("global-confusable", "a letter that looks like another", name("t\u03bfrch", "Size"), words=NOT_EXECUTED)
planner("global-escape", "a name that drives the terminal", name("\x1b[2J\u202e", "x\n"), words=NOT_EXECUTED)
planner("global-long", "a name of a megabyte", lambda case: name("a" * 900_000, "b" * 900_000), words=NOT_EXECUTED)
planner("stack-global-of-numbers", "a name made of numbers", b"K\x01K\x02\x93")
planner("persistent-id", "BINPERSID where no storage may be", text("storage") + b"Q", words=NOT_EXECUTED)
planner("persistent-id-text", "PERSID", b"P0\n", words=NOT_EXECUTED)
planner("extension-1", "an extension code", b"\x82\x01", words=NOT_EXECUTED)
planner("extension-2", "a two-byte extension code", b"\x83\x01\x00", words=NOT_EXECUTED)
planner("extension-4", "a four-byte extension code", b"\x84\x01\x00\x00\x00", words=NOT_EXECUTED)
planner("next-buffer", "an out-of-band buffer", b"\x97", words=NOT_EXECUTED)
planner("dup", "doubles the top of the stack", b"]2", words=NOT_EXECUTED)
planner("pop", "takes values back", b"]]0", words=NOT_EXECUTED)
planner("pop-mark", "takes a whole mark back", b"](]1", words=NOT_EXECUTED)

for protocol in range(6):
    add(
        f"exploit-protocol-{protocol}",
        f"the textbook exploit, protocol {protocol}",
        lambda case, p=protocol: write_run(case.source, edit=lambda _: pickle.dumps(Payload(case.shell), p)),
    )


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        import os

        return os.system, (self.command,)


KNOWN = set(b"\x94\x68\x6a\x29\x4b\x28\x85\x81\x62\x75\x7d\x52\x86\x4d\x4a\x8c\x71\x72\x8a\x4e\x89\x88\x74\x87\x5d\x65")
KNOWN |= set(b"\x61\x73\x95\x93\x63\x58\x47\x43\x42\x8d\x8e\x8b\x2e\x80")
for opcode in pickletools.opcodes:
    if ord(opcode.code) not in KNOWN:
        planner(
            f"opcode-{opcode.name.lower().replace('_', '-')}",
            f"the opcode {opcode.name}, with plausible arguments",
            b"]](" + opcode.code.encode("latin-1") + b"0\n\0\0\0\0\0\0\0\0",
            words=NOT_EXECUTED,
        )
for code in (0x00, 0x7F, 0xFF):
    planner(f"byte-{code:02x}", "a byte that is no opcode", bytes([code]), words=NOT_EXECUTED)


# fmt: off
add("pickle-second", "a second pickle, which executes, behind the first",
    lambda case: write_run(case.source, edit=lambda raw: raw + pickle.dumps(Payload(case.shell))),
    words="follow the end")
add("pickle-in-storage-meta", "a call in storage_meta",
    lambda case: write_run(case.source, storage_meta=call(name("os", "system"), text(case.shell))), words=NOT_EXECUTED)
add("pickle-in-key", "a call for a key of the state dict",
    lambda case: write_run(case.source, entries=[(call(name("os", "system"), text(case.shell)), tensor([1]))]),
    words=NOT_EXECUTED)
# fmt: on


# Bombs

planner("memo-long-binput", "LONG_BINPUT 2^29-1 asks for 4 GB of memo", b"]r\xff\xff\xff\x1f", words="memo index")
planner("memo-binput", "BINPUT leaves a gap", b"]q\xff", words="memo index")
planner("memo-put", "PUT with a number of digits", b"]p536870911\n", words=NOT_EXECUTED)
planner("memo-put-negative", "PUT with a negative number", b"]p-1\n", words=NOT_EXECUTED)
planner("memo-get-beyond", "LONG_BINGET of what was never put", b"j\xff\xff\xff\x7f")
planner("memo-get-text", "GET with a long number", b"g" + b"9" * 5000 + b"\n", words=NOT_EXECUTED)
planner("nest-tuples", "a million nested tuples: hashing or freeing them overflows the stack", b")" + b"\x85" * 10**6)
planner("nest-lists", "seventy thousand nested lists", b"]" * 70_000 + b"a" * 69_999)
planner("nest-dicts", "fifty thousand nested dicts", b"}" + b"NN}" * 50_000)
planner("nest-marks", "three hundred thousand open marks", b"(" * 300_000, words="nest")
planner("nest-just-too-deep", "one more container than is allowed", b")" + b"\x85" * 80, words="nests more")
planner("many-dicts", "a hundred thousand empty dicts", b"(" + b"}" * 100_000 + b"t", words="")
planner("many-lists", "a hundred thousand empty lists", b"(" + b"]" * 100_000 + b"t", words="")
LAUGHS = text("lol") + b"\x94" + b"".join(b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86\x94" for i in range(55))
planner("billion-laughs", "every tuple holds the one before twice: 2^55 values", tuple_of(LAUGHS), codes=harmless())
# fmt: off
planner("billion-laughs-lists", "the same with lists",
    tuple_of(b"]\x94" + b"".join(b"](h" + bytes([i]) + b"h" + bytes([i]) + b"e\x94" for i in range(55))),
    codes=harmless())
planner("int-long4-huge", "LONG4 of 2 GB", b"\x8b\xff\xff\xff\x7f\x01", words="integer of")
planner("int-long4-negative", "LONG4 of -1 bytes", b"\x8b\xff\xff\xff\xff\x01", words="integer of")
planner("int-long1", "an integer of 255 bytes", b"\x8a\xff" + b"\x7f" * 255, words="integer of")
planner("int-text", "INT with a million digits", b"I" + b"9" * 10**6 + b"\n", words=NOT_EXECUTED)
planner("long-text", "LONG with a million digits", b"L" + b"9" * 10**6 + b"L\n", words=NOT_EXECUTED)
planner("string-8-huge", "BINUNICODE8 of 2^63 bytes", b"\x8d" + struct.pack("<Q", 1 << 63), words="a string of")
planner("string-4-huge", "BINUNICODE of 4 GB", b"X\xff\xff\xff\xff", words="a string of")
planner("string-long", "a string of 2 MB, there", text("x" * (2 << 20)), words="a string of")
planner("string-short", "a string that reaches past the end", b"X\xff\xff\x0f\x00abc")
planner("string-surrogate", "a lone surrogate in UTF-8", text(b"\xed\xa0\x80"), words="utf-8")
planner("bytes-8-huge", "BINBYTES8 of 2^62 bytes", b"\x8e" + struct.pack("<Q", 1 << 62), words="a string of")
planner("bytearray-huge", "BYTEARRAY8 of 2^40 bytes", b"\x96" + struct.pack("<Q", 1 << 40), words=NOT_EXECUTED)
planner("frame-huge", "a frame of 2^63 bytes", b"\x95" + struct.pack("<Q", 1 << 63) + NONE, words="frame")
planner("frame-short", "a frame that ends inside of an opcode", b"\x95" + struct.pack("<Q", 1) + NONE, codes=harmless())
planner("key-list", "a list for a key", dict_of((b"]", NONE)), words="a dict key is a list")
planner("key-tuple", "a tuple for a key", dict_of((b")", NONE)), words="a dict key is a tuple")
planner("key-dict", "a dict for a key", dict_of((b"}", NONE)), words="a dict key is a dict")
planner("key-twice", "a key twice", dict_of((W, NONE), (W, b"K\x01")), words="same key twice")
planner("key-equal-hashes", "nine thousand floats, as many of equal hash as there are",
    dict_of(*((b"G" + struct.pack(">d", m * 2.0 ** (61 * e - 900)), NONE) for m in range(1, 300) for e in range(30))),
    codes=harmless())
planner("key-without-value", "SETITEMS with a key and no value", b"}(Nu", words="no value")
planner("cycle-list", "a list in itself", b"]\x94h\x00a", words="part of")
planner("cycle-dict", "a dict in itself", b"}\x94Nh\x00s", words="part of")
planner("cycle-record", "a record in its own state", STORAGE_META + b")\x81\x94h\x00\x85b", words="part of")
planner("grow-after-use", "a list that grows after it was put into another", b"]\x94]h\x00ah\x00K\x01a",
    words="part of")
planner("setitems-on-tuple", "SETITEMS on a tuple", b")(NNu")
planner("underflow", "takes more than there is", b"\x87\x87\x87")
planner("no-mark", "TUPLE without a MARK", b"ttt")
planner("path-long", "a path of a hundred thousand keys in planner_data", tuple_of(*[b"K\x00"] * 100_000),
    codes=harmless())
# fmt: on
planner("path-strange", "a path of lists", tuple_of(b"]", b"}"), codes=harmless())

for title, raw in {
    "empty": b"",
    "two-bytes": PROTO,
    "no-stop": PROTO + b"N",
    "stop": PROTO + b".",
    "none": PROTO + b"N.",
    "protocol-6": b"\x80\x06N.",
    "protocol-1": b"N.",
    "zeros": bytes(1 << 20),
    "zip": b"PK\3\4" + bytes(100),
    "list": PROTO + b"].",
    "class-not-instance": PROTO + name(DCP, "Metadata") + b".",
    "without-fields": PROTO + name(DCP, "Metadata") + b")\x81.",
    "state-is-tuple": PROTO + name(DCP, "Metadata") + b")\x81" + tuple_of(NONE, b"}") + b"b.",
}.items():
    add(
        f"metadata-{title}",
        "bytes that are not the metadata of a checkpoint",
        lambda case, raw=raw: write_run(case.source, edit=lambda _: raw),
    )
