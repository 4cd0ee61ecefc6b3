"""What the files of a checkpoint could run: the names in their pickles, and code. Nothing is executed.

Archives inside of archives count: torch.save's zips, .nemo, .npz, tar, gzip. What cannot be read is named.

Source: PKWARE APPNOTE 6.3.10 (zip); numpy `lib/format.py`; torch `serialization.py` (2.13).
"""

from __future__ import annotations

import bz2
import io
import lzma
import os
import re
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal, NamedTuple

from ckpt_tools.description.checkpoint import BlobEntry, Finding
from ckpt_tools.errors import CkptError
from ckpt_tools.formats._json import parse_json
from ckpt_tools.formats._pickle_names import VERDICTS, Read, Span, Verdict, judge, walk
from ckpt_tools.formats.opening import Opened, open_path
from ckpt_tools.formats.step import passed_over
from ckpt_tools.remote.places import is_remote, open_place, open_source
from ckpt_tools.storage.source import Source
from ckpt_tools.text import first_few

DANGERS = ("dangerous-pickle", "dangerous-code")
"""Codes of findings."""
Kind = Literal["pickle", "code", "auto_map", "TorchScript", "Keras"]

_HEAD_BYTES = 512
_MAX_LISTED_DEPTH = 16
"""Directories below the root."""
_MAX_DEPTH = 4
"""Archives inside of archives, pickles inside of pickles."""
_MAX_UNPACKED_BYTES = 256 << 20
"""Of everything in one file that is compressed."""
_MAX_PICKLES = 10_000
"""In a row, in one file."""
_MAX_SMALL_BYTES = 1 << 13
"""Items that are read at once."""
_MAX_TOLD = 100
"""Files that an identity names."""
_MAX_SEARCHED_BYTES = 64 << 20
_MAX_CONFIG_BYTES = 4 << 20
_LEGACY = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""torch's magic number as a pickle: five pickles, and then what is no pickle."""
_NAMED = re.compile(rb"c([\w.]{2,99})\n([\w.]{2,99})\n|\x8c.([\w.]{2,99})\x94?\x8c.([\w.]{2,99})\x94?\x93", re.DOTALL)
"""Opcodes that name something, where they are searched for."""
_CODE = (".py", ".pyc", ".pyd", ".so", ".dll", ".dylib", ".pyx", ".ptx", ".cubin")
_CODE_HEADS = (b"\x7fELF", b"MZ", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")
_PICKLES = (".pkl", ".pickle", ".pt", ".pth", ".bin", ".ckpt", ".joblib", ".dill", ".dat", ".data", ".mar")
"""Names of pickles, also of those that do not begin as protocols 2 to 5 do."""
_CONFIG = re.compile(r"(?:.*/)?(?:[\w-]*config|model_index)\.json", re.ASCII)
_TEXTS = (".json", ".txt", ".md", ".jinja", ".model", ".gitattributes")
_KERAS = {
    ".h5": rb'"class_name":\s*"Lambda"',
    ".hdf5": rb'"class_name":\s*"Lambda"',
    ".keras": rb'"class_name":\s*"Lambda"',
    ".json": rb'"class_name":\s*"Lambda"',
    ".pb": rb'"class_name":\s*"Lambda"|(?:ReadFile|WriteFile|PyFunc)\b',
}
"""End of a name → what in it runs code or touches files when Keras or TensorFlow loads it."""
_COMPRESSED: Mapping[bytes, Callable[[], Any]] = {
    b"\x1f\x8b": lambda: zlib.decompressobj(31),
    b"BZh": bz2.BZ2Decompressor,
    b"\xfd7zXZ": lzma.LZMADecompressor,
}
"""First bytes of a compressed file → what unpacks it."""
_ZLIB = (b"x\x01", b"x\x9c", b"x\xda")
"""First bytes of zlib's, by which joblib's files alone are told."""
_METHODS: Mapping[int, Callable[[], Any]] = {8: lambda: zlib.decompressobj(-15), 12: bz2.BZ2Decompressor}
"""Of an entry of a zip."""
_UNKNOWN_ARCHIVES = ((b"7z\xbc\xaf", "a 7z archive"), (b"Rar!", "a rar archive"), (b"\x28\xb5\x2f\xfd", "zstd"))


class NotRead(NamedTuple):
    """Something that was not looked at."""

    file: str
    nbytes: int
    why: str
    could_run: bool = True
    """False for what does not begin as anything that runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Executable:
    """A file, or a part of one, that could run something."""

    file: str
    """Its name; of what lies in an archive, with "!" between."""
    kind: Kind
    verdict: Verdict
    names: tuple[tuple[str, Verdict], ...] = ()
    """What a pickle would import or call, the worst first; what else would run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """What `scan` found."""

    source: str
    num_files: int
    """Files looked at."""
    executables: tuple[Executable, ...]
    """Everything that could run something, the worst first."""
    not_read: tuple[NotRead, ...]

    @property
    def ok(self) -> bool:
        """True when nothing is dangerous."""
        return all(each.verdict != "dangerous" for each in self.executables)

    @property
    def verdict(self) -> Verdict:
        """The worst of all files; "torch" where nothing can run."""
        return next((v for v in VERDICTS if any(each.verdict == v for each in self.executables)), "torch")

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is dangerous, as errors."""
        return tuple(find_dangerous(self.executables))


class _View(NamedTuple):
    """Bytes to look at: a file, or a part of one."""

    name: str
    size: int
    read: Read

    def part(self, start: int, nbytes: int) -> _View:
        """Return some of its bytes."""
        return self._replace(size=nbytes, read=lambda offset, count: self.read(start + offset, count))


def _view_of(name: str, content: bytes) -> _View:
    return _View(name, len(content), lambda offset, nbytes: content[offset : offset + nbytes])


def scan_files(
    source: Source, files: Mapping[str, int], blobs: Sequence[BlobEntry] = (), *, chosen: Container[str] | None = None
) -> Scan:
    """Look at files (relative name → size), all or the `chosen` ones, and at items of a DCP checkpoint."""
    scanner = _Scanner()
    taken = [name for name in files if not name.endswith(".distcp") and (chosen is None or name in chosen)]
    small = (blob.span for blob in blobs if blob.span.nbytes <= _MAX_SMALL_BYTES)
    source.prefetch(
        [*((n, 0, min(_HEAD_BYTES, files[n])) for n in taken), *((s.file, s.offset, s.nbytes) for s in small)]
    )
    views = [_file_view(source, name, files[name]) for name in taken]
    seen: set[bytes] = set()  # most items are one of a few settings
    for blob in blobs:
        view = _file_view(source, blob.span.file, files.get(blob.span.file, 0))
        nbytes = max(min(blob.span.nbytes, view.size - blob.span.offset), 0)
        view = view.part(blob.span.offset, nbytes)._replace(name=f"{view.name}!{blob.fqn}")
        content = b""
        with suppress(CkptError):
            content = view.read(0, nbytes) if 0 < nbytes <= _MAX_SMALL_BYTES else b""
        if content not in seen:
            views.append(_view_of(view.name, content) if content else view)
        seen.update([content] if content else [])
    for view in views:
        scanner.unpacked = 0
        scanner.look(view)
    order = {verdict: index for index, verdict in enumerate(VERDICTS)}
    found = sorted(scanner.found, key=lambda each: (order[each.verdict], each.file))
    return Scan(source=source.root, num_files=len(views), executables=tuple(found), not_read=tuple(scanner.not_read))


def describe_executable(each: Executable) -> str:
    """Say what a file would run, the worst of it."""
    return first_few([name for name, verdict in each.names if verdict == each.verdict]) or each.kind


def why_not_inert(source: Source, file: str, nbytes: int) -> str:
    """Say what in a file could run more than torch needs; "" when there is nothing."""
    scan = scan_files(source, {file: nbytes})
    could_run = (describe_executable(each) for each in scan.executables if each.verdict != "torch")
    missed = (each.why for each in scan.not_read if each.could_run)
    return "" if _CONFIG.fullmatch(file.lower()) else next(could_run, next(missed, ""))


def find_dangerous(executables: Iterable[Executable]) -> Iterator[Finding]:
    """Yield a finding for everything that is dangerous."""
    for each in executables:
        if each.verdict == "dangerous":
            names = [name for name, verdict in each.names if verdict == "dangerous"]
            yield Finding.error(
                code=DANGERS[each.kind != "pickle"],
                where=each.file,
                what=f"loading it would call {first_few(names, 6)}",
                hint="do not load it: ask its author for safetensors, or remove the file",
            )


def _file_view(source: Source, name: str, size: int) -> _View:
    return _View(name, size, lambda offset, nbytes: source.read(name, offset, nbytes))


def _is_pickle(head: bytes) -> bool:
    return head[:1] == b"\x80" and head[1:2] <= b"\x05"


class _Scanner:
    """One run over some files."""

    def __init__(self) -> None:
        self.found: list[Executable] = []
        self.not_read: list[NotRead] = []
        self.unpacked = 0

    def miss(self, view: _View, why: str, *, could_run: bool = True) -> None:
        """Name what was not looked at."""
        self.not_read.append(NotRead(view.name, view.size, why, could_run))

    def add(self, view: _View, kind: Kind, names: Iterable[str] = (), *, verdict: Verdict | None = None) -> None:
        """Note something that could run."""
        judged = [(name, verdict or judge(name)) for name in names]
        judged.sort(key=lambda each: (VERDICTS.index(each[1]), each[0]))
        worst = judged[0][1] if judged else verdict or "torch"
        self.found.append(Executable(file=view.name, kind=kind, verdict=worst, names=tuple(judged)))

    def look(self, view: _View, depth: int = 0) -> None:
        """Look at a file, or a part of one; what is wrong with it is noted, and others are looked at."""
        if depth > _MAX_DEPTH:
            self.miss(view, f"archives inside of archives, {_MAX_DEPTH} deep")
        elif view.size > 0:
            try:
                self._look(view, depth)
            except (CkptError, OSError, ValueError, struct.error, RecursionError) as error:
                self.miss(view, str(error))

    def _look(self, view: _View, depth: int) -> None:
        """Look by its first bytes, then by its name."""
        name = view.name.lower()
        head = view.read(0, min(view.size, _HEAD_BYTES))
        kind = next((what for magic, what in _UNKNOWN_ARCHIVES if head.startswith(magic)), None)
        make = next((make for magic, make in _COMPRESSED.items() if head.startswith(magic)), None)
        if make is None and head[:2] in _ZLIB and name.endswith(_PICKLES):
            make = zlib.decompressobj
        if _is_pickle(head):
            self._pickles(view, head, depth)
        if head.startswith(_CODE_HEADS):
            self.add(view, "code", verdict="unknown")
        elif kind is not None:
            self.miss(view, f"{kind}, which ckpt does not open")
        elif head[257:262] == b"ustar":
            self._tar(view, depth)
        elif make is not None:
            self.look(_view_of(f"{view.name}!", self._unpack(view, make)), depth + 1)
        elif head.startswith(b"\x93NUMPY"):
            self._array(view, head, depth)
        elif head.startswith(b"PK\3\4"):
            self._zip(view, depth)
        elif name.endswith(_CODE):
            self.add(view, "code", verdict="unknown")
        elif _CONFIG.fullmatch(name):
            self._config(view)
        elif pattern := next((each for end, each in _KERAS.items() if name.endswith(end)), None):
            self._search(view, pattern)
        elif name.endswith((*_PICKLES, ".zip")) and any(_zip_entries(view)):  # with something before it
            self._zip(view, depth)
        elif not _is_pickle(head):
            self._pickles(view, head, depth)

    def _pickles(self, view: _View, head: bytes, depth: int) -> None:
        """Follow the pickles that a file is, or begins with."""
        is_certain = _is_pickle(head)
        is_named = depth > 0 or view.name.lower().endswith(_PICKLES)
        most = 5 if _LEGACY in head[:24] else _MAX_PICKLES
        names: set[str] = set()
        at = count = 0
        while at < view.size and count < most:
            found = walk(view.read, view.size, at)
            is_alarm = any(judge(name) == "dangerous" for name in found.names)
            if found.is_whole or is_alarm or (count == 0 and is_certain):
                names.update(found.names)
                for span in found.spans:
                    self._inside(view, span, depth)
            if not found.is_whole:
                break
            at, count = found.end, count + 1
        if names or ((is_certain or is_named) and count):
            is_alarm = any(judge(name) == "dangerous" for name in names)
            if is_certain or is_named or is_alarm:
                self.add(view, "pickle", names)
        if count == _MAX_PICKLES:
            self.miss(view, f"more than {_MAX_PICKLES} pickles in a row")
        if "joblib.numpy_pickle.NumpyArrayWrapper" in names and at < view.size:  # arrays between the opcodes
            rest = view.read(at, min(view.size - at, _MAX_SEARCHED_BYTES))
            told = {b".".join(filter(None, each)).decode() for each in _NAMED.findall(rest)}
            if alarms := [name for name in told if judge(name) == "dangerous"]:
                self.add(view, "pickle", alarms)
        if is_certain and not count:
            self.miss(view, "a pickle that breaks off; what comes before is listed", could_run=False)
        elif not count and not names and is_named and depth == 0:
            self.miss(view, "no kind of file that ckpt knows", could_run=False)

    def _inside(self, view: _View, span: Span | bytes, depth: int) -> None:
        """Look at bytes in a pickle that are a pickle or an archive themselves."""
        inner = _view_of(view.name, span) if isinstance(span, bytes) else view.part(span.start, span.nbytes)
        if isinstance(span, Span) and span.is_text and span.nbytes <= _MAX_SEARCHED_BYTES:
            text = inner.read(0, span.nbytes).decode(errors="replace")
            inner = _view_of(view.name, text.encode("latin-1", "replace"))
        head = inner.read(0, min(inner.size, 2))
        if head in (b"PK", b"\x1f\x8b") or _is_pickle(head):
            self.look(inner._replace(name=f"{view.name}!bytes"), depth + 1)
        elif 4 < inner.size < _MAX_CONFIG_BYTES:
            names = walk(inner.read, inner.size).names
            if any(judge(name) == "dangerous" for name in names):
                self.add(inner._replace(name=f"{view.name}!bytes"), "pickle", names)

    def _array(self, view: _View, head: bytes, depth: int) -> None:
        """Look at a numpy array: of objects, it is a pickle."""
        width = 2 if head[6:7] == b"\1" else 4
        length = int.from_bytes(head[8 : 8 + width], "little")
        start = 8 + width + length
        if start > view.size:
            self.miss(view, "a numpy array that breaks off")
        elif re.search(
            rb"[oO\\]", view.read(8 + width, min(length, _MAX_CONFIG_BYTES)).replace(b"fortran_order", b"")
        ):  # any way to say "O"
            inner = view.part(start, view.size - start)
            self._pickles(inner, inner.read(0, min(inner.size, 2)), depth)

    def _unpack(self, view: _View, make: Callable[[], Any]) -> bytes:
        """Return what is compressed, as far as there is room for it."""
        raw = view.read(0, min(view.size, _MAX_UNPACKED_BYTES))
        made = b""
        try:
            while raw and (room := _MAX_UNPACKED_BYTES - self.unpacked) > 0:
                unpacker = make()
                made += (more := unpacker.decompress(raw, room))
                self.unpacked += len(more)
                raw = unpacker.unused_data  # another one that follows
        except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
            self.miss(view, f"cannot be decompressed: {error}")
        if self.unpacked >= _MAX_UNPACKED_BYTES:
            self.miss(view, f"more than {_MAX_UNPACKED_BYTES >> 20} MiB when decompressed; the rest is not read")
        return made

    def _tar(self, view: _View, depth: int) -> None:
        import tarfile

        try:
            with tarfile.open(fileobj=_File(view), mode="r:") as archive:
                for member in archive:
                    if member.isreg():
                        inner = view.part(member.offset_data, max(min(member.size, view.size - member.offset_data), 0))
                        self.look(inner._replace(name=f"{view.name}!{member.name}"), depth + 1)
        except (tarfile.TarError, ValueError, EOFError) as error:
            self.miss(view, f"a tar that cannot be read: {error}")

    def _zip(self, view: _View, depth: int) -> None:
        """Look at every file of a zip, whatever its flags, sums and local names say."""
        entries = list(_zip_entries(view))
        names = {entry.name for entry in entries}
        roots = {name.rpartition("data.pkl")[0] for name in names if name.endswith("data.pkl")}
        is_script = any("/code/" in name or name.endswith("constants.pkl") for name in names)
        if is_script:
            self.add(view, "TorchScript", verdict="unknown")
        if not entries:
            self.miss(view, "a zip without a directory that can be read")
        for entry in dict.fromkeys(entries):
            root, _, number = entry.name.rpartition("data/")
            if (root in roots and number.isdecimal()) or (is_script and "/code/" in entry.name):
                continue  # a storage; TorchScript's own code
            inner = self._entry(view, entry)
            if inner is not None:
                self.look(inner, depth + 1)

    def _entry(self, view: _View, entry: _Entry) -> _View | None:
        name = f"{view.name}!{entry.name}"
        header = view.read(entry.offset, 30) if entry.offset + 30 <= view.size else b""
        if not header.startswith(b"PK\3\4"):
            return None  # no reader finds it
        start = entry.offset + 30 + sum(struct.unpack_from("<HH", header, 26))
        inner = view.part(start, min(entry.nbytes, view.size - start))._replace(name=name)
        if entry.method == 0 or inner.size <= 0:
            return inner
        if entry.method not in _METHODS:
            self.miss(inner, f"compressed by method {entry.method}, or encrypted")
            return None
        return _view_of(name, self._unpack(inner, _METHODS[entry.method]))

    def _config(self, view: _View) -> None:
        """Look for the code that a config names."""
        if view.size > _MAX_CONFIG_BYTES:
            return
        try:
            document = parse_json(view.read(0, view.size), what="config", where=view.name, infinite=True)
        except CkptError as error:
            self.miss(view, str(error))
            return
        if not isinstance(document, dict):
            return
        named = [
            value for key in ("auto_map", "custom_pipelines", "custom_code") for value in _texts(document.get(key))
        ]
        if named:
            self.add(view, "auto_map", sorted(set(named)), verdict="unknown")
        self._search(view, _KERAS[".json"])

    def _search(self, view: _View, pattern: bytes) -> None:
        if view.name.endswith(".json") and view.size > _MAX_CONFIG_BYTES:
            return  # a tokenizer
        if found := re.search(pattern, view.read(0, min(view.size, _MAX_SEARCHED_BYTES))):
            what = found[0].decode("latin-1")
            self.add(view, "Keras", ["Keras Lambda" if "Lambda" in what else f"TensorFlow {what}"], verdict="dangerous")


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


class _File(io.RawIOBase):
    """Bytes as a file."""

    def __init__(self, view: _View) -> None:
        self._view = view
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._view.size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        count = max(min(len(buffer), self._view.size - self._at), 0)
        buffer[:count] = self._view.read(self._at, count)
        self._at += count
        return count


class _Entry(NamedTuple):
    """A file of a zip."""

    name: str
    method: int
    nbytes: int
    offset: int
    """Of its local header."""


def _zip_entries(view: _View) -> Iterator[_Entry]:
    """Yield what a zip's directory lists, wherever a reader may look for it and for what it lists.

    Offsets are from the beginning of the file, or from that of the archive in it. Nothing else is believed.
    """
    before = max(view.size - 65557, 0)
    tail = view.read(before, view.size - before) if view.size >= 22 else b""
    at = len(tail) - 22 if tail[-22:-18] == b"PK\5\6" else tail.rfind(b"PK\5\6")
    if not 0 <= at <= len(tail) - 22:
        return
    nbytes, offset = struct.unpack_from("<II", tail, at + 12)
    if tail[at - 20 : at - 16] == b"PK\6\7" and (long := tail.rfind(b"PK\6\6", 0, at)) >= 0 and at - long >= 76:
        nbytes, offset = struct.unpack_from("<QQ", tail, long + 40)
        at = long
    end = before + at
    for start in dict.fromkeys((max(end - nbytes, 0), min(offset, end))):
        directory = view.read(start, min(nbytes, end - start, _MAX_UNPACKED_BYTES))
        position = 0
        while directory[position : position + 4] == b"PK\1\2" and position + 46 <= len(directory):
            entry, length = _parse_entry(directory, position)
            position += length
            for shift in dict.fromkeys((max(end - nbytes - offset, 0), 0)):
                yield entry._replace(offset=entry.offset + shift)


def _parse_entry(directory: bytes, at: int) -> tuple[_Entry, int]:
    """Return an entry of a directory, and its length."""
    (method,) = struct.unpack_from("<H", directory, at + 10)
    packed, full, name_n, extra_n, comment_n = struct.unpack_from("<IIHHH", directory, at + 20)
    (place,) = struct.unpack_from("<I", directory, at + 42)
    name = directory[at + 46 : at + 46 + name_n].decode("utf-8", "replace")
    extra = directory[at + 46 + name_n : at + 46 + name_n + extra_n]
    sizes = [full, packed, place]
    if extra[:2] == b"\1\0" and 0xFFFFFFFF in sizes:
        long = iter(struct.unpack_from(f"<{(len(extra) - 4) // 8}Q", extra, 4))
        sizes = [next(long, value) if value == 0xFFFFFFFF else value for value in sizes]
    return _Entry(name, method, sizes[1], sizes[2]), 46 + name_n + extra_n + comment_n


def scan_place(path: str) -> Scan:
    """Look at everything that lies at `path`, a file or a directory of any kind, here or on another machine.

    Raises:
        UnreadableError: There is nothing.
    """
    source, file = open_place(path)
    with source:
        files = source.list_files(max_depth=_MAX_LISTED_DEPTH) if file is None else {file: source.size(file)}
        blobs: list[BlobEntry] = []
        missed: list[NotRead] = []
        for directory in sorted({name.rpartition("/")[0] for name in files if name.endswith(".distcp")}):
            below = f"{directory}/" if directory else ""
            try:
                with open_path(
                    os.path.join(path, directory) if directory else path, format="dcp", as_part=True
                ) as opened:
                    blobs += [
                        replace(blob, span=replace(blob.span, file=below + blob.span.file))
                        for blob in opened.checkpoint.blobs
                    ]
            except CkptError as error:
                why = f"its items are not known: {error.what}"
                missed += [NotRead(name, files[name], why) for name in files if name.rpartition("/")[0] == directory]
        odd = () if file is not None else passed_over(path)
        missed += [NotRead(name, 0, "a hidden directory, a link, or no regular file") for name in odd]
        found = scan_files(source, files, blobs)
    return replace(found, source=path, not_read=(*found.not_read, *missed))


def describe_scan(scan: Scan) -> str:
    """Return what a scan comes to, in one line."""
    counts = Counter(each.verdict for each in scan.executables)
    told = [f"{counts[verdict]} {verdict}" for verdict in VERDICTS[:2] if counts[verdict]]
    if counts["torch"]:
        told.append(f"{counts['torch']} with no more than torch needs")
    missed = f"; {len(scan.not_read)} not read" if scan.not_read else ""
    return f"{', '.join(told) or 'nothing that could run'} ({scan.num_files} files{missed})"


def scan_to_json(scan: Scan) -> dict[str, object]:
    """Return the document of `ckpt scan --json`."""
    return {
        "ok": scan.ok,
        "verdict": scan.verdict,
        "files": scan.num_files,
        "executables": [
            {
                "file": each.file,
                "kind": each.kind,
                "verdict": each.verdict,
                "names": [{"name": name, "verdict": verdict} for name, verdict in each.names],
            }
            for each in scan.executables
        ],
        "not_read": [each._asdict() for each in scan.not_read],
    }


def with_executables(opened: Opened) -> tuple[Opened, tuple[Finding, ...]]:
    """Return an open checkpoint with an identity that says what could run, and a finding for what is dangerous."""
    checkpoint, source = opened.checkpoint, opened.source
    beside = {asset.file: asset.nbytes for asset in opened.beside}
    files = checkpoint.files if opened.format.is_file else beside if opened.format.has_parts else source.list_files()
    passed: tuple[str, ...] = (
        ".safetensors",
        opened.format.marker or ".safetensors",
    )  # read already, by readers that know no names
    passed += _TEXTS if is_remote(source.root) else ()  # a request each; `ckpt scan` looks into them
    chosen = {name: n for name, n in files.items() if not name.endswith(passed) or _CONFIG.fullmatch(name)}
    scans = [scan_files(source, {**checkpoint.files, **chosen}, checkpoint.blobs, chosen=chosen)]
    if opened.step is not None and not opened.format.has_parts:
        with open_source(os.path.dirname(source.root.rstrip("/"))) as root:
            scans.append(scan_files(root, {asset.file: asset.nbytes for asset in opened.step.beside}))
    found = sorted((each for scan in scans for each in scan.executables), key=lambda each: VERDICTS.index(each.verdict))
    told = (f"{each.verdict}: {each.file}: {describe_executable(each)}" for each in found if each.verdict != "torch")
    identity = replace(opened.identity, executables=tuple(islice(told, _MAX_TOLD)))
    return replace(opened, identity=identity), tuple(find_dangerous(found))
