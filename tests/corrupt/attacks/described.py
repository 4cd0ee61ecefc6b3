"""Attacks through what `.metadata` says of tensors, files and items, and through items that are not tensors."""

from __future__ import annotations

import pickle

from corrupt.attacks.opcodes import (
    DCP,
    NONE,
    call,
    chunk,
    index,
    info,
    instance,
    item,
    list_of,
    name,
    number,
    properties,
    size,
    tensor,
    text,
    tuple_of,
    write_run,
)
from corrupt.attacks.pickles import Payload
from corrupt.attacks.recipe import Case, add, attack, carried, found, harmless


def described(title: str, tries: str, codes=None, words: str = "", **options) -> None:
    add(f"metadata-{title}", tries, lambda case: write_run(case.source, **options), codes, words=words)


described("dims-65", "more dims than PyTorch has", words="64 dims", described=tensor([1] * 65))
described("dims-200000", "so many dims that multiplying them takes hours", described=tensor([3] * 200_000))
described("dims-huge", "dims whose product overflows", words="too large", described=tensor([1 << 40, 1 << 40]))
# fmt: off
described("dims-empty-huge", "an empty shape that overflows", words="too large",
    described=tensor([0, 1 << 62, 1 << 62]))
described("dims-negative", "a negative dim", described=tensor([2, -3]), words="not numbers between")
described("dims-bool", "a boolean dim", described=tensor([2, 3], size=call(name("torch", "Size"), tuple_of(b"\x88"))))
described("dims-beyond", "a dim above 2^62", described=tensor([(1 << 63) - 1]))
described("size-lies", "the size says 800 million elements", found(diff=3),
    described=tensor([800_000_000, 3], [chunk([0, 0], [2, 3])]))
described("size-too-small", "the chunk lies outside of the size", found(diff=3),
    described=tensor([1, 3], [chunk([0, 0], [2, 3])]))
described("chunks-none", "no chunk at all", described=tensor([2, 3], []))
described("chunk-twice", "one chunk twice", described=tensor([2, 3], [chunk([0, 0], [2, 3])] * 2), words="twice")
described("dtype-class", "a class for a dtype", described=tensor([2, 3], properties=properties(name("torch", "Size"))))
described("dtype-none", "no dtype", described=tensor([2, 3], properties=properties(NONE)))
described("dtype-lies", "int32 for a float32 item", found(diff=3),
    described=tensor([2, 3], properties=properties(name("torch", "int32"))))
described("layout-sparse", "a sparse layout",
    described=tensor([2, 3], properties=properties(None, "\x1b[2Jtorch.sparse")))
described("entry-is-none", "no description", described=NONE)
described("fqn-nul", "a name with a NUL, as ckpt uses inside", fqn=text("\0asset\0config.json"), words="nul")
described("fqn-long", "a name of 100 kB", fqn=text("x" * 100_000), words="the limit is 4096")
described("fqn-dots", "a name of a hundred thousand components", fqn=text("." * 100_000), words="the limit is 4096")
described("fqn-number", "a number for a name", fqn=number(7))
described("length-short", "an item too short for its elements", length=10, words="cannot hold")
described("length-huge", "an item of 2^61 bytes", found(), length=1 << 61)
described("length-beyond", "a length above 2^62", length=1 << 63)
described("length-negative", "a negative length", length=-1, words="cannot be a part")
described("offset-negative", "a negative offset", offset=-8, words="cannot be a part")
described("offset-beyond", "an offset behind the end", found(), offset=1 << 50)
described("offset-one", "an item that begins one byte late", found(), offset=1)
described("transform", "an unknown transform, named to drive the terminal",
    info_fields={"transform_descriptors": list_of(*[text("\x1b]0;x\x07")] * 1000)}, words="transform")
described("item-unnamed", "an item that no tensor has",
    storage=[(index(text("v"), size(0)), info(text("__0_0.distcp")))])
described("blob-without-item", "an object without an item",
    entries=[(text("b"), instance(DCP, "BytesStorageMetadata"))])
# fmt: on

for title, path in {
    "parent": "../../outside/secret.safetensors",
    "inside-out": "sub/../../../outside/secret.safetensors",
    "dot": "./__0_0.distcp",
    "empty": "",
    "slashes": "//etc/passwd",
    "trailing-slash": "__0_0.distcp/",
    "nul": "__0_0.distcp\0.txt",
    "long": "x" * 10_000,
    "proc": "/proc/self/mem",
}.items():
    described(f"path-{title}", f"relative_path {path[:40]!r}", path=text(path), words="plain path")
described("path-escape", "a path that drives the terminal", found(), path=text("\x1b[2J\u202e__0_0.distcp"))
described("path-backslash", "a Windows path", found(), path=text("..\\..\\outside\\secret.safetensors"))
described("path-metadata", "an item inside of .metadata itself", found(), path=text(".metadata"), length=500)


described("path-deep-name", "a component longer than any file name", path=text("y" * 300), words="plain path")
described("rank-highest", "a rank of nine digits", found(), path=text("__999999999_0.distcp"))
add("metadata-path-absolute", "relative_path is absolute",
    lambda case: write_run(case.source, path=text(str(case.secret))), words="plain path")  # fmt: skip


def _layers(num_dims: int, num_parts: int, left_out: int) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """Boxes that tile a shape, in layers, each layer cut along another dim: a sweep takes parts^dims steps."""
    shape = [num_parts] * num_dims + [num_dims]
    boxes = []
    for dim in range(num_dims):
        for part in range(num_parts):
            offsets, sizes = [0] * num_dims + [dim], [num_parts] * num_dims + [1]
            offsets[dim], sizes[dim] = part, 1
            boxes.append((offsets, sizes))
    boxes = boxes[: len(boxes) - left_out]
    own = tensor(shape, [chunk(*box) for box in boxes])
    nbytes = max(len(item(())) + 4 * num_parts ** (num_dims - 1), 1 << 10) * 2
    return own, [(index(text("v"), size(*offsets)), info(text("__1_0.distcp"), 0, nbytes)) for offsets, _ in boxes]


for left_out in (0, 1):

    @attack(
        f"metadata-tiling-{'missing' if left_out else 'whole'}",
        "chunks along many dims at once, so that comparing them takes exponential time",
        found(diff=3),
        seconds=5,
    )
    def _tiling(case: Case, left_out: int = left_out) -> None:
        own, storage = _layers(6, 12, left_out)
        write_run(case.source, entries=[(text("v"), own)], storage=storage)


@attack("metadata-ranks", "ranks and parts that keep the search for a mesh busy", found(diff=3), seconds=5)
def _ranks(case: Case) -> None:
    entries, storage = [], []
    for count in range(2, 40):
        fqn = text(f"t{count}")
        entries.append((fqn, tensor([count, 7], [chunk([i, 0], [1, 7]) for i in range(count)])))
        storage += [
            (index(fqn, size(i, 0)), info(text(f"__{(i * 997) % 65536}_0.distcp"), 0, 1000)) for i in range(count)
        ]
    write_run(case.source, entries=entries, storage=storage)


OWN = item()
# fmt: off
described("one-item-many-tensors", "two hundred tensors in one item: legal, they are tied", harmless(),
    entries=[(text(f"t{i}"), tensor([2, 3])) for i in range(200)],
    storage=[(index(text(f"t{i}"), size(0, 0)), info(text("__0_0.distcp"), 0, len(OWN))) for i in range(200)])
described("spans-overlap", "two items share bytes", found(diff=3), content=OWN + OWN, length=len(OWN),
    entries=[(text("v"), tensor([2, 3]))],
    storage=[(index(text("v"), size(0, 0)), info(text("__0_0.distcp"), 8, len(OWN)))])
# fmt: on


# Items that are not tensors, and would run when unpickled


def _torch_zip(case: Case) -> bytes:
    import io
    import zipfile

    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Payload(case.shell), 2))
        archive.writestr("archive/version", b"3\n")
    return out.getvalue()


def _blob(title: str, tries: str, codes, make=_torch_zip, *, offset: int = len(OWN), length: int | None = None) -> None:
    def build(case: Case) -> None:
        raw = make(case)
        place = info(text("__0_0.distcp"), offset, len(raw) if length is None else length)
        entries = [(text("b"), instance(DCP, "BytesStorageMetadata"))]
        write_run(case.source, content=OWN + raw, length=len(OWN), entries=entries, storage=[(index(text("b")), place)])

    add(f"blob-{title}", tries, build, codes)


_blob("exploit-zip", "an object whose torch.save item executes: never unpickled, not copied", carried(mesh=4))
_blob("exploit-pickle", "an object that is a bare pickle", {**carried(mesh=4), "diff": (4,), "gather": (4,)},
    lambda case: pickle.dumps(Payload(case.shell)))  # fmt: skip
_blob("length-lies", "an object of 2^60 bytes", {**found(), "gather": (0, 4)}, length=1 << 60)
_blob("offset-lies", "an object behind the end", {**found(), "gather": (0, 4)}, offset=1 << 60)
NAMED = text("\0blob\0w")
add(
    "blob-name-of-ckpt",
    "an object that is named as ckpt names digests inside",
    lambda case: write_run(
        case.source,
        entries=[(NAMED, instance(DCP, "BytesStorageMetadata"))],
        storage=[(index(NAMED), info(text("__0_0.distcp"), 0, len(OWN)))],
    ),
    words="nul",
)
