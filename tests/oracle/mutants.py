"""Mutants of a checkpoint: one file's bytes, one lie in its JSON or pickle with checksums that fit, or whole files."""

from __future__ import annotations

import io
import itertools
import json
import pickletools
import random
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping

from fuzz.mutate import mutate, random_operations

Files = dict[str, bytes]
_WORD = re.compile(rb"[A-Za-z_][\w./-]{2,40}")
_TOKENS = (b"F32", b"BF16", b"I64", b"F16", b"shape", b"cpu", b"FloatStorage", b"BFloat16Storage", b"LongStorage")


def mutant(files: Mapping[str, bytes], rng: random.Random) -> tuple[str, Files]:
    """Return the kind of mutation, and the files that are others than before (b"" of a removed one is None)."""
    kind = rng.choice(("bytes", "bytes", "bit", "swap", "json", "pickle", "pickle", "payload", "files"))
    name = rng.choice(sorted(files))
    raw = files[name]
    if kind == "files" and len(files) > 1:
        other = rng.choice(sorted(files))
        return kind, {name: files[other], other: raw} if rng.random() < 0.6 else {name: files[other]}
    if kind == "swap" and len(raw) > 16:
        return kind, {name: _swapped(raw, rng)}
    if kind == "json" and (made := _json(name, raw, rng)) is not None:
        return kind, {name: made}
    if kind in ("pickle", "payload") and (made := _inside(name, raw, rng, kind)) is not None:
        return f"{kind}, sealed", {name: made}
    if kind == "bit":
        at = rng.randrange(8 * len(raw))
        return kind, {name: raw[: at // 8] + bytes([raw[at // 8] ^ 1 << at % 8]) + raw[at // 8 + 1 :]}
    words = {word for each in files.values() for word in _WORD.findall(each[:4000])}
    tokens = (*_TOKENS, *sorted(words))
    return "bytes", {name: mutate(raw, random_operations(rng), tokens=tokens, others=[*files.values()])}


def _swapped(raw: bytes, rng: random.Random) -> bytes:
    """Exchange two regions of one length, anywhere."""
    length = rng.choice((1, 2, 4, 8, 16, len(raw) // 8))
    a, b = sorted(rng.sample(range(len(raw) - length + 1), 2))
    b = max(b, a + length) if a + 2 * length <= len(raw) else b
    return raw[:a] + raw[b : b + length] + raw[a + length : b] + raw[a : a + length] + raw[b + length :]


def _json(name: str, raw: bytes, rng: random.Random) -> bytes | None:
    """Change one thing of a JSON document, and write it again as its library would."""
    if name.endswith(".safetensors"):
        length = int.from_bytes(raw[:8], "little")
        document, rest = json.loads(raw[8 : 8 + length]), raw[8 + length :]
    elif name.endswith(".json"):
        document, rest = json.loads(raw), None
    else:
        return None
    places = [*_places(document)]
    holder, key = rng.choice(places)
    other, twin = rng.choice([place for place in places if type(place[0][place[1]]) is type(holder[key])])
    match rng.randrange(5):
        case 0:
            holder[key], other[twin] = other[twin], holder[key]
        case 1:
            holder[key] = json.loads(json.dumps(other[twin]))
        case 2 if isinstance(holder, dict):
            holder[rng.choice((f"{key}x", str(key)[:-1], "embed.weight", "layers.1.up.weight"))] = holder.pop(key)
        case 3 if isinstance(holder[key], int):
            holder[key] += rng.choice((-24, -8, -4, -1, 1, 2, 4, 8, 96))
        case 4 if isinstance(holder[key], str):
            holder[key] = rng.choice(("F32", "F16", "BF16", "I64", "I32", "U8", "model.safetensors", ""))
        case _:
            del holder[key]
    text = json.dumps(document).encode()
    if rest is None:
        return text
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + rest


def _places(value: object) -> Iterator[tuple[dict | list, object]]:
    keys = [*value] if isinstance(value, dict) else [*range(len(value))] if isinstance(value, list) else []
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _inside(name: str, raw: bytes, rng: random.Random, kind: str) -> bytes | None:
    """Change a pickle or a payload; where it lies in a zip, with the CRC-32 that fits (what no checksum then tells)."""
    if name == ".metadata":
        return _repickled(raw, rng)
    if name.endswith(".safetensors") and kind == "payload":
        at = rng.randrange(8 + int.from_bytes(raw[:8], "little"), len(raw))
        return raw[:at] + bytes([raw[at] ^ 1 << rng.randrange(8)]) + raw[at + 1 :]
    found = [m for m in members(raw) if m[0].endswith("data.pkl") == (kind == "pickle") and m[2] > m[1]]
    if not found:
        return None
    _, start, end = rng.choice(found)
    before = raw[start:end]
    operations = random_operations(rng)[:1]
    is_pickle = kind == "pickle"
    after = _repickled(before, rng) if is_pickle else mutate(before, operations, tokens=_TOKENS, others=[before])
    after = (after + bytes(len(before)))[: len(before)]
    crcs = [zlib.crc32(each).to_bytes(4, "little") for each in (before, after)]
    return (raw[:start] + after + raw[end:]).replace(*crcs)


def members(raw: bytes) -> Iterator[tuple[str, int, int]]:
    """Yield name, start and end of every record of every zip in a file."""
    begin = 0
    for found in re.finditer(rb"PK\x05\x06", raw):
        begin = raw.find(b"PK\3\4", begin)
        end = found.start() + 22
        with zipfile.ZipFile(io.BytesIO(raw[begin:end])) as archive:
            for info in archive.infolist():
                head = begin + info.header_offset
                lengths = (int.from_bytes(raw[head + at : head + at + 2], "little") for at in (26, 28))
                start = head + 30 + sum(lengths)
                yield info.filename, start, start + info.file_size
        begin = end


def _repickled(raw: bytes, rng: random.Random) -> bytes:
    """Change one instruction of a pickle: its code, its argument, or whether and where it is there."""
    steps = [(op, at) for op, _, at in pickletools.genops(raw)]
    bounds = [*(at for _, at in steps), steps[-1][1] + 1]
    parts = [raw[a:b] for a, b in itertools.pairwise(bounds)]
    at = rng.randrange(1, len(parts) - 1)
    other = rng.randrange(1, len(parts) - 1)
    match rng.randrange(6):
        case 0:
            same = [op.code for op in pickletools.opcodes if (op.arg is None) == (steps[at][0].arg is None)]
            parts[at] = rng.choice(same).encode("latin-1") + parts[at][1:]
        case 1 if len(parts[at]) > 1:
            where = rng.randrange(1, len(parts[at]))
            parts[at] = parts[at][:where] + bytes([parts[at][where] ^ 1 << rng.randrange(8)]) + parts[at][where + 1 :]
        case 2:
            parts[at], parts[other] = parts[other], parts[at]
        case 3:
            parts[at] = b""
        case 4:
            parts[at] *= 2
        case _:
            alike = [part for part in parts if part[:1] == parts[at][:1]]
            parts[at] = rng.choice(alike)
    return b"".join(parts) + raw[bounds[-1] :]
