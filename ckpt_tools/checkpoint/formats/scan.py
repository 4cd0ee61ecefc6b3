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
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

from ckpt_tools.checkpoint.entries import BlobEntry, Finding
from ckpt_tools.checkpoint.formats._json import parse_json
from ckpt_tools.checkpoint.formats._pickle_names import VERDICTS, Span, Verdict, judge, walk
from ckpt_tools.checkpoint.formats.opening import Opened, open_path
from ckpt_tools.checkpoint.formats.step import passed_over
from ckpt_tools.errors import CkptError
from ckpt_tools.results import CheckedResult, as_json
from ckpt_tools.storage.locations import is_remote, open_place, open_source
from ckpt_tools.storage.source import Source
from ckpt_tools.text import counted, first_few

DANGER = "dangerous-pickle"  # Code of findings
Kind = Literal["pickle", "code", "auto_map", "TorchScript"]

_HEAD_BYTES = 512
_FIRST_BYTES = 1 << 12  # Of a pickle that are read first; many files are none
_BUFFER_BYTES = 1 << 20
_MAX_LISTED_DEPTH = 16  # Directories below the root
_MAX_DEPTH = 4  # Archives inside of archives, pickles inside of pickles
_MAX_UNPACKED_BYTES = 256 << 20  # Of everything in one file that is compressed
_MAX_PICKLES = 10_000  # In a row, in one file
_MAX_SMALL_BYTES = 1 << 13  # Items that are read at once
_MAX_TOLD = 100  # Files that an identity names
_MAX_SEARCHED_BYTES = 64 << 20
_MAX_CONFIG_BYTES = 4 << 20
_LEGACY = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # torch's magic number: five pickles, and then what is none
_CODE = (".py", ".pyc", ".pyd", ".so", ".dll", ".dylib", ".pyx", ".ptx", ".cubin")
_CODE_HEADS = (b"\x7fELF", b"MZ", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")
_PICKLES = (".pkl", ".pickle", ".pt", ".pth", ".bin", ".ckpt", ".joblib", ".dill", ".dat", ".data", ".mar")
"""Names of pickles, also of those that do not begin as protocols 2 to 5 do."""
_CONFIG = re.compile(r"(?:.*/)?(?:[\w-]*config|model_index)\.json", re.ASCII)
_TEXTS = (".json", ".txt", ".md", ".jinja", ".model", ".gitattributes")
_KERAS = (".h5", ".hdf5", ".keras", ".pb")
_KERAS_LAYER = re.compile(rb'"class_name":\s*"Lambda"')  # What runs code when Keras loads a model from JSON
_NOT_KERAS = "ckpt does not look into Keras and TensorFlow files, which can hold code"
_COMPRESSED: Mapping[bytes, Callable[[], Any]] = {
    b"\x1f\x8b": lambda: zlib.decompressobj(31),
    b"BZh": bz2.BZ2Decompressor,
    b"\xfd7zXZ": lzma.LZMADecompressor,
    **dict.fromkeys((b"x\x01", b"x\x9c", b"x\xda"), zlib.decompressobj),  # joblib's files
}
"""First bytes of a compressed file → what unpacks it."""
_METHODS: Mapping[int, Callable[[], Any]] = {8: lambda: zlib.decompressobj(-15), 12: bz2.BZ2Decompressor}
"""Of an entry of a zip."""
_UNKNOWN_ARCHIVES = ((b"7z\xbc\xaf", "a 7z archive"), (b"Rar!", "a rar archive"), (b"\x28\xb5\x2f\xfd", "zstd"))


class NotRead(NamedTuple):
    """Something that was not looked at."""

    file: str
    nbytes: int
    why: str
    could_run: bool = True  # False for what does not begin as anything that runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Executable:
    """A file, or a part of one, that could run something."""

    file: str
    """Its name; of what lies in an archive, with "!" between."""
    kind: Kind
    verdict: Verdict
    names: tuple[tuple[str, Verdict], ...] = ()
    """What a pickle would import or call, the worst first; what else would run."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Scan(CheckedResult):
    """What `scan` found."""

    source: str
    num_files: int
    """Files looked at."""
    executables: tuple[Executable, ...]
    """Everything that could run something, the worst first."""
    not_read: tuple[NotRead, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst of all files; "torch" where nothing can run."""
        return next((v for v in VERDICTS if any(each.verdict == v for each in self.executables)), "torch")

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is dangerous, as errors."""
        return tuple(find_dangerous(self.executables))

    @property
    def title(self) -> str:
        """What could run, and what was not read."""
        counts = Counter(each.verdict for each in self.executables)
        told = [f"{counts[verdict]} {verdict}" for verdict in VERDICTS[:2] if counts[verdict]]
        if counts["torch"]:
            told.append(f"{counts['torch']} with only what torch needs")
        missed = f"; {len(self.not_read)} not read" if self.not_read else ""
        return f"{', '.join(told) or 'nothing that could run'} ({counted(self.num_files, 'file')}{missed})"

    def to_json(self) -> dict[str, object]:
        """Return it as JSON holds it."""
        rows = [
            asdict(each) | {"names": [{"name": name, "verdict": verdict} for name, verdict in each.names]}
            for each in self.executables
        ]
        not_read = [each._asdict() for each in self.not_read]
        return as_json(self, "ok verdict files=num_files") | {"executables": rows, "not_read": not_read}


class Stretch(NamedTuple):
    """Bytes to look at: a file, or a part of one."""

    name: str
    size: int
    read: Callable[[int, int], bytes]  # (offset, nbytes) → exactly these bytes

    def part(self, start: int, nbytes: int) -> Stretch:
        """Return some of its bytes, as many as there are."""
        nbytes = max(min(nbytes, self.size - start), 0)
        return self._replace(size=nbytes, read=lambda offset, count: self.read(start + offset, count))

    def open(self) -> io.BufferedReader:
        """Return it as a file."""
        return io.BufferedReader(_StretchFile(self), _BUFFER_BYTES)


class _StretchFile(io.RawIOBase):
    """The bytes of a view as a file, of which little is read at first."""

    def __init__(self, view: Stretch) -> None:
        self._view, self._at, self._most = view, 0, _FIRST_BYTES

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._view.size)[whence]
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = max(min(len(buffer), self._most, self._view.size - self._at), 0)
        buffer[:count] = self._view.read(self._at, count) if count else b""
        self._at, self._most = self._at + count, _BUFFER_BYTES
        return count


def _view_of(name: str, content: bytes) -> Stretch:
    return Stretch(name, len(content), lambda offset, nbytes: content[offset : offset + nbytes])


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
        view = view.part(blob.span.offset, blob.span.nbytes)
        view = view._replace(name=f"{view.name}!{blob.fqn}")
        with suppress(CkptError):  # the scanner says so
            if 0 < view.size <= _MAX_SMALL_BYTES:
                content = view.read(0, view.size)
                if content in seen:
                    continue
                seen.add(content)
                view = _view_of(view.name, content)
        views.append(view)
    for view in views:
        scanner.unpacked = 0
        scanner.look(view)
    found = sorted(scanner.found, key=lambda each: (VERDICTS.index(each.verdict), each.file))
    return Scan(source=source.root, num_files=len(views), executables=tuple(found), not_read=tuple(scanner.not_read))


def describe_executable(each: Executable) -> str:
    """Say what a file would run, the worst of it."""
    return first_few([name for name, verdict in each.names if verdict == each.verdict]) or each.kind


def why_not_inert(source: Source, file: str, nbytes: int) -> str:
    """Say what in a file could run more than torch needs; "" when there is nothing."""
    if _CONFIG.fullmatch(file.lower()):
        return ""
    scan = scan_files(source, {file: nbytes})
    could_run = (describe_executable(each) for each in scan.executables if each.verdict != "torch")
    return next(could_run, next((each.why for each in scan.not_read if each.could_run), ""))


def find_dangerous(executables: Iterable[Executable]) -> Iterator[Finding]:
    """Yield a finding for everything that is dangerous."""
    for each in executables:
        if each.verdict == "dangerous":
            names = [name for name, verdict in each.names if verdict == "dangerous"]
            yield Finding.error(
                code=DANGER,
                where=each.file,
                what=f"loading it would call {first_few(names, 6)}",
                hint="do not load it: ask its author for safetensors, or remove the file",
            )


def _file_view(source: Source, name: str, size: int) -> Stretch:
    return Stretch(name, size, lambda offset, nbytes: source.read(name, offset, nbytes))


def _is_pickle(head: bytes) -> bool:
    # No opcode is NUL: so goes on the length before a safetensors header of 640, 896, 1,152 or 1,408 bytes.
    return head[:1] == b"\x80" and head[1:2] <= b"\x05" and head[2:3] != b"\0"


class _Scanner:
    """One run over some files."""

    def __init__(self) -> None:
        self.found: list[Executable] = []
        self.not_read: list[NotRead] = []
        self.unpacked = 0

    def miss(self, view: Stretch, why: str, *, could_run: bool = True) -> None:
        """Name what was not looked at."""
        self.not_read.append(NotRead(view.name, view.size, why, could_run))

    def add(self, view: Stretch, kind: Kind, names: Iterable[str] = (), *, verdict: Verdict | None = None) -> None:
        """Note something that could run."""
        judged = [(name, verdict or judge(name)) for name in names]
        judged.sort(key=lambda each: (VERDICTS.index(each[1]), each[0]))
        worst = judged[0][1] if judged else verdict or "torch"
        self.found.append(Executable(file=view.name, kind=kind, verdict=worst, names=tuple(judged)))

    def look(self, view: Stretch, depth: int = 0) -> None:
        """Look at a file, or a part of one; what is wrong with it is noted, and others are looked at."""
        if depth > _MAX_DEPTH:
            self.miss(view, f"archives inside of archives, {_MAX_DEPTH} deep")
        elif view.size > 0:
            try:
                self._look(view, depth)
            except (CkptError, OSError, ValueError, struct.error, RecursionError) as error:
                self.miss(view, str(error))

    def _look(self, view: Stretch, depth: int) -> None:
        """Look by its first bytes, then by its name."""
        name = view.name.lower()
        head = view.read(0, min(view.size, _HEAD_BYTES))
        kind = next((what for magic, what in _UNKNOWN_ARCHIVES if head.startswith(magic)), None)
        make = next((make for magic, make in _COMPRESSED.items() if head.startswith(magic)), None)
        if _is_pickle(head):
            self._pickles(view, head, depth)
        if name.endswith(_KERAS):
            self.miss(view, _NOT_KERAS)
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
        elif name.endswith(".json"):
            self._json(view)
        elif name.endswith((*_PICKLES, ".zip")) and any(_zip_entries(view)):  # with something before it
            self._zip(view, depth)
        elif not _is_pickle(head):
            self._pickles(view, head, depth)

    def _pickles(self, view: Stretch, head: bytes, depth: int) -> None:
        """Follow the pickles that a file is, or begins with."""
        is_certain = _is_pickle(head)
        is_named = depth > 0 or view.name.lower().endswith(_PICKLES)
        most = 5 if _LEGACY in head[:24] else _MAX_PICKLES
        names: set[str] = set()
        at = count = 0
        file = view.open()
        while at < view.size and count < most:
            found = walk(file, view.size, at)
            if found.is_whole or _has_alarm(found.names) or (count == 0 and is_certain):
                names.update(found.names)
                for span in found.spans:
                    self._inside(view, span, depth)
            if not found.is_whole:
                break
            at, count = found.end, count + 1
        if _has_alarm(names) or ((is_certain or is_named) and (names or count)):
            self.add(view, "pickle", names)
        if count == _MAX_PICKLES:
            self.miss(view, f"more than {_MAX_PICKLES} pickles in a row")
        has_arrays = "joblib.numpy_pickle.NumpyArrayWrapper" in names  # joblib writes them between the opcodes
        if is_certain and not count:
            self.miss(view, "a truncated pickle; only what precedes the break is listed", could_run=has_arrays)
        elif not count and not names and is_named and depth == 0:
            self.miss(view, "an unknown kind of file", could_run=False)

    def _inside(self, view: Stretch, span: Span | bytes, depth: int) -> None:
        """Look at bytes in a pickle that are a pickle or an archive themselves."""
        inner = _view_of(view.name, span) if isinstance(span, bytes) else view.part(span.start, span.nbytes)
        if isinstance(span, Span) and span.is_text and span.nbytes <= _MAX_SEARCHED_BYTES:
            text = inner.read(0, span.nbytes).decode(errors="replace")
            inner = _view_of(view.name, text.encode("latin-1", "replace"))
        inner = inner._replace(name=f"{view.name}!bytes")
        head = inner.read(0, min(inner.size, 2))
        if head in (b"PK", b"\x1f\x8b") or _is_pickle(head):
            self.look(inner, depth + 1)
        elif 4 < inner.size < _MAX_CONFIG_BYTES and _has_alarm(names := walk(inner.open(), inner.size).names):
            self.add(inner, "pickle", names)

    def _array(self, view: Stretch, head: bytes, depth: int) -> None:
        """Look at a numpy array: of objects, it is a pickle."""
        width = 2 if head[6:7] == b"\1" else 4
        length = int.from_bytes(head[8 : 8 + width], "little")
        start = 8 + width + length
        if start > view.size:
            self.miss(view, "a truncated numpy array")
        elif re.search(rb"[oO\\]", view.read(8 + width, min(length, _MAX_CONFIG_BYTES)).replace(b"fortran_order", b"")):
            # any way to say "O"
            inner = view.part(start, view.size - start)
            self._pickles(inner, inner.read(0, min(inner.size, 2)), depth)

    def _unpack(self, view: Stretch, make: Callable[[], Any]) -> bytes:
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

    def _tar(self, view: Stretch, depth: int) -> None:
        import tarfile

        try:
            with tarfile.open(fileobj=view.open(), mode="r:") as archive:
                for member in archive:
                    if member.isreg():
                        inner = view.part(member.offset_data, member.size)
                        self.look(inner._replace(name=f"{view.name}!{member.name}"), depth + 1)
        except (tarfile.TarError, ValueError, EOFError) as error:
            self.miss(view, f"a tar that cannot be read: {error}")

    def _zip(self, view: Stretch, depth: int) -> None:
        """Look at every file of a zip, whatever its flags, sums and local names say."""
        entries = list(_zip_entries(view))
        names = {name for name, *_ in entries}
        roots = {name.rpartition("data.pkl")[0] for name in names if name.endswith("data.pkl")}
        is_script = any("/code/" in name or name.endswith("constants.pkl") for name in names)
        if is_script:
            self.add(view, "TorchScript", verdict="unknown")
        if not entries:
            self.miss(view, "a zip without a readable directory")
        for name, method, nbytes, place in dict.fromkeys(entries):
            root, _, number = name.rpartition("data/")
            header = view.read(place, 30) if place + 30 <= view.size else b""
            if (root in roots and number.isdecimal()) or (is_script and "/code/" in name) or header[:4] != b"PK\3\4":
                continue  # a storage; TorchScript's own code; where no reader finds anything
            start = place + 30 + sum(struct.unpack_from("<HH", header, 26))
            inner = view.part(start, nbytes)._replace(name=f"{view.name}!{name}")
            if method in _METHODS:
                self.look(_view_of(inner.name, self._unpack(inner, _METHODS[method])), depth + 1)
            elif method:
                self.miss(inner, f"compressed by method {method}, or encrypted")
            else:
                self.look(inner, depth + 1)

    def _json(self, view: Stretch) -> None:
        """Look for the code that a config names."""
        if view.size > _MAX_CONFIG_BYTES:
            return  # a tokenizer
        content = view.read(0, view.size)
        if _KERAS_LAYER.search(content):
            self.miss(view, _NOT_KERAS)
        if not _CONFIG.fullmatch(view.name.lower()):
            return
        document = parse_json(content, what="config", where=view.name, infinite=True)
        if isinstance(document, dict):
            values = (document.get(key) for key in ("auto_map", "custom_pipelines", "custom_code"))
            if named := {each for value in values for each in _texts(value)}:
                self.add(view, "auto_map", named, verdict="unknown")


def _has_alarm(names: Iterable[str]) -> bool:
    return any(judge(name) == "dangerous" for name in names)


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


def _zip_entries(view: Stretch) -> Iterator[tuple[str, int, int, int]]:
    """Yield name, method, length and place of what a zip's directory lists, wherever a reader may look for it."""
    # Places are from the beginning of the file, or from that of the archive in it. Nothing else is believed.
    before = max(view.size - 65557, 0)
    tail = view.read(before, view.size - before) if view.size >= 22 else b""
    at = len(tail) - 22 if tail[-22:-18] == b"PK\5\6" else tail.rfind(b"PK\5\6")
    if not 0 <= at <= len(tail) - 22:
        return
    total, offset = struct.unpack_from("<II", tail, at + 12)
    if tail[at - 20 : at - 16] == b"PK\6\7" and (long := tail.rfind(b"PK\6\6", 0, at)) >= 0 and at - long >= 76:
        total, offset = struct.unpack_from("<QQ", tail, long + 40)
        at = long
    end = before + at
    for start in dict.fromkeys((max(end - total, 0), min(offset, end))):
        directory = view.read(start, min(total, end - start, _MAX_UNPACKED_BYTES))
        position = 0
        while directory[position : position + 4] == b"PK\1\2" and position + 46 <= len(directory):
            header = struct.unpack_from("<10xH8xIIHHH8xI", directory, position)
            method, nbytes, full, name_n, extra_n, comment_n, place = header
            extra_at = position + 46 + name_n
            name = directory[position + 46 : extra_at].decode("utf-8", "replace")
            extra = directory[extra_at : extra_at + extra_n]
            if extra[:2] == b"\1\0":
                wide = iter(struct.unpack_from(f"<{max(len(extra) - 4, 0) // 8}Q", extra.ljust(4), 4))
                _, nbytes, place = (next(wide, n) if n == 0xFFFFFFFF else n for n in (full, nbytes, place))
            position = extra_at + extra_n + comment_n
            for shift in dict.fromkeys((max(end - total - offset, 0), 0)):
                yield name, method, nbytes, place + shift


def scan_place(path: str) -> Scan:
    """Look at everything that lies at `path`, a file or a directory of any kind, here or on another machine."""
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
        missed += [NotRead(name, 0, "a hidden directory, a link or a special file") for name in odd]
        found = scan_files(source, files, blobs)
    return replace(found, source=path, not_read=(*found.not_read, *missed))


def with_executables(opened: Opened) -> tuple[Opened, tuple[Finding, ...]]:
    """Return an open checkpoint with an identity that says what could run, and a finding for what is dangerous."""
    checkpoint, source = opened.checkpoint, opened.source
    companions = {asset.file: asset.nbytes for asset in opened.companions}
    files = (
        checkpoint.files if opened.format.is_file else companions if opened.format.has_parts else source.list_files()
    )
    passed: tuple[str, ...] = (
        ".safetensors",
        opened.format.marker or ".safetensors",
    )  # read already, by readers that know no names
    passed += _TEXTS if is_remote(source.root) else ()  # a request each; `ckpt scan` looks into them
    chosen = {name: n for name, n in files.items() if not name.endswith(passed) or _CONFIG.fullmatch(name)}
    scans = [scan_files(source, {**checkpoint.files, **chosen}, checkpoint.blobs, chosen=chosen)]
    if opened.step is not None and not opened.format.has_parts:
        with open_source(os.path.dirname(source.root.rstrip("/"))) as root:
            scans.append(scan_files(root, {asset.file: asset.nbytes for asset in opened.step.companions}))
    found = sorted((each for scan in scans for each in scan.executables), key=lambda each: VERDICTS.index(each.verdict))
    told = [f"{each.verdict}: {each.file}: {describe_executable(each)}" for each in found if each.verdict != "torch"]
    told += [f"not read: {each.file}: {each.why}" for scan in scans for each in scan.not_read if each.could_run]
    identity = replace(opened.identity, executables=tuple(told[:_MAX_TOLD]))
    return replace(opened, identity=identity), tuple(find_dangerous(found))
