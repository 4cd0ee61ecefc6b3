"""The manifest: a JSON sidecar in everything that ckpt writes.

It records what the formats themselves do not: mesh, placements, digests over logical bytes (the same for HF
and DCP, so the two can be compared), and what is needed to give the original HF files back byte for byte.
It detects accidents, not attackers: whoever can change the data can change the manifest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import xxhash

from ckpt_tools.checkpoint.dtypes import BY_NAME, DType
from ckpt_tools.checkpoint.entries import MAX_ELEMS, fqn_problem, is_possible_shape
from ckpt_tools.checkpoint.formats._json import parse_json
from ckpt_tools.checkpoint.formats.file_names import INDEX_SUFFIX
from ckpt_tools.checkpoint.layout import Mesh, Placement, parse_placement
from ckpt_tools.errors import CkptError, UnreadableError
from ckpt_tools.text import is_plain_path

MANIFEST_NAME = "ckpt_manifest.json"
SCHEMA_VERSION = 1  # Raised when a reader of the old version would misunderstand
MAX_MANIFEST_BYTES = 512 << 20  # Refused above this size: 700 bytes for each of as many tensors as one header may have
MAX_MANIFEST_CONTAINERS = 6_000_000  # Every tensor has three here and three in the header that `origin` keeps
MAX_WORLD_SIZE = 1 << 24  # Ranks of the mesh that a manifest may record
_DIGEST = re.compile(r"[0-9a-f]{32}", re.ASCII)
BLOCK_BYTES = 4 << 20  # Upper bound of the blocks that a digest is built from
_CHECKSUM = b',\n"checksum": '  # Begins the last line, with the xxh3_128 of all before: a manifest decides on bytes
UNKNOWN_DIGEST = "0" * 32  # Stands for a digest where only its length matters
DIGEST_ALGORITHM = "xxh3_128-blocks"  # xxh3_128 of those of a tensor's canonical blocks (`layout.split_blocks`)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """What the manifest knows of one tensor."""

    dtype: DType
    shape: tuple[int, ...]
    digest: str  # Hexadecimal digest over the logical row-major bytes
    placements: Mapping[str, Placement] = field(default_factory=dict)  # Axis → placement; axes not named replicate


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A file or blob that is carried along as it is."""

    nbytes: int
    digest: str  # As `TensorRecord.digest`, over the bytes as a 1-d U8 tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMap:
    """What made a live model's tensors of those of the files."""

    names: str  # Whose names they are: "live", or a convention such as "torchtitan"
    architecture: str  # Class of the model, by whose rules it was done
    digest: str  # Of these rules: with others there is no certain way back
    by: str = field(default="", compare=False)  # Which release's ("transformers 5.23.0"); empty for a convention


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What gives the original HF files back: their exact headers and index."""

    headers: Mapping[str, str]  # File name → header JSON, padding included
    index_name: str | None = None  # Name of the index, None for a single file
    index_text: str | None = None
    prefix: str = ""  # Put in front of every FQN when the checkpoint was sharded (`--prefix`)
    map: TensorMap | None = None  # What the names of the headers went through before; None for nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything the sidecar says."""

    writer: str
    format: str
    mesh: Mesh | None
    tensors: Mapping[str, TensorRecord]
    blobs: Mapping[str, FileRecord] = field(default_factory=dict)
    assets: Mapping[str, FileRecord] = field(default_factory=dict)
    documents: Mapping[str, FileRecord] = field(default_factory=dict)
    """Small files that the format itself consists of (`.metadata`, an index, headers)."""
    files: Mapping[str, int] = field(default_factory=dict)  # Name → size of every data file that was written
    frames: Mapping[str, str] = field(default_factory=dict)  # DCP data file → digest of the rest (`digest_frames`)
    source: Mapping[str, object] = field(default_factory=dict)  # What it was made from: format, files, sizes and times
    origin: Origin | None = None
    accepted: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """File that somebody changed on purpose → `date`, digest that was `recorded` before, `digest` now."""

    @property
    def placements(self) -> dict[str, Mapping[str, Placement]]:
        """FQN → axis → placement."""
        return {fqn: record.placements for fqn, record in self.tensors.items()}


def build_manifest(manifest: Manifest) -> bytes:
    """Return the manifest's JSON."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "writer": manifest.writer,
        "format": manifest.format,
        "mesh": None if manifest.mesh is None else [list(axis) for axis in manifest.mesh.axes],
        "digest": {"algorithm": DIGEST_ALGORITHM, "block_bytes": BLOCK_BYTES},
        "tensors": {fqn: _tensor_row(record) for fqn, record in manifest.tensors.items()},
        "blobs": _records(manifest.blobs),
        "assets": _records(manifest.assets),
        "documents": _records(manifest.documents),
        "files": dict(manifest.files),
        "frames": dict(manifest.frames),
        "source": dict(manifest.source),
        "origin": None if manifest.origin is None else asdict(manifest.origin),
        **({"accepted": dict(manifest.accepted)} if manifest.accepted else {}),
    }
    # One line per top-level key: compact, and still kind to a reader.
    rows = (f"{json.dumps(key)}: {json.dumps(value)}" for key, value in document.items())
    body = ("{\n" + ",\n".join(rows)).encode()
    return body + _CHECKSUM + f'"{xxhash.xxh3_128_hexdigest(body)}"\n}}\n'.encode()


def manifest_bytes(manifest: Manifest, tensors: Iterable[tuple[str, TensorRecord]]) -> int:
    """Return how long the JSON of `manifest` would be with `tensors` in it, which need not exist at once."""
    # Digests have one length: any will do.
    # Braces around each row take as much as what joins the rows.
    rows = sum(len(json.dumps({fqn: _tensor_row(record)})) for fqn, record in tensors)
    empty = len(build_manifest(replace(manifest, tensors={})))
    return empty - len("{}") + rows if rows else empty


def _tensor_row(record: TensorRecord) -> dict[str, object]:
    return {
        "dtype": record.dtype.name,
        "shape": list(record.shape),
        "digest": record.digest,
        "placements": {axis: str(placement) for axis, placement in record.placements.items()},
    }


def _records(records: Mapping[str, FileRecord]) -> dict[str, dict[str, object]]:
    return {name: {"nbytes": record.nbytes, "digest": record.digest} for name, record in records.items()}


def parse_manifest(text: bytes) -> Manifest:
    """Parse a manifest."""
    body, _, last = text.rpartition(_CHECKSUM)
    if last != f'"{xxhash.xxh3_128_hexdigest(body)}"\n}}\n'.encode():
        what = "the manifest is damaged or was edited: its checksum differs"
        hint = "restore it, or remove it to continue without digests and without the original file names"
        raise UnreadableError(what, where=MANIFEST_NAME, hint=hint)
    document: Any = parse_json(
        text,
        what="the manifest",
        where=MANIFEST_NAME,
        max_bytes=MAX_MANIFEST_BYTES,
        max_containers=MAX_MANIFEST_CONTAINERS,
    )
    try:
        version = document["schema_version"]
        digest = document["digest"]
    except (KeyError, TypeError) as error:
        raise _malformed(error) from error
    if version != SCHEMA_VERSION or digest != {"algorithm": DIGEST_ALGORITHM, "block_bytes": BLOCK_BYTES}:
        shown = f" {version}" if type(version) is int and 0 <= version <= MAX_ELEMS else ""
        what = f"the manifest has a schema version{shown} or a kind of digest that is unknown to this version"
        raise UnreadableError(what, where=MANIFEST_NAME, hint="use a newer ckpt")
    try:
        return _parse(document)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, CkptError) as error:
        raise _malformed(error) from error


def _malformed(error: Exception) -> UnreadableError:
    what = f"the manifest is malformed: {str(error) or type(error).__name__}"
    hint = "remove it to continue without digests and without the original file names"
    return UnreadableError(what, where=MANIFEST_NAME, hint=hint)


def _parse(document: Any) -> Manifest:  # noqa: ANN401 - JSON, checked field by field
    mesh = document["mesh"]
    origin = document["origin"]
    placements: dict[str, dict[str, Placement]] = {}  # parsed once per distinct text

    def place(table: dict[str, str]) -> Mapping[str, Placement]:
        key = json.dumps(table)
        if key not in placements:
            placements[key] = {axis: parse_placement(text) for axis, text in table.items()}
        return placements[key]

    tensors = {}
    for fqn, fields in document["tensors"].items():
        shape = tuple(map(_count, fields["shape"]))
        if fqn_problem(fqn) is not None or not is_possible_shape(shape):
            raise ValueError(f"tensor {fqn!r}")
        tensors[fqn] = TensorRecord(
            dtype=BY_NAME[fields["dtype"]],
            shape=shape,
            digest=_digest(fields["digest"]),
            placements=place(fields["placements"]),
        )
    return Manifest(
        writer=_text(document["writer"]),
        format=_text(document["format"]),
        mesh=None if mesh is None else _mesh(mesh),
        tensors=tensors,
        blobs=_parse_records(document["blobs"], name=_text),
        assets=_parse_records(document["assets"], name=_file_name),
        documents=_parse_records(document["documents"], name=_file_name),
        files={_file_name(name): _count(size) for name, size in document["files"].items()},
        frames={_file_name(name): _text(digest) for name, digest in document.get("frames", {}).items()},
        source=dict(document["source"]),
        origin=None
        if origin is None
        else Origin(
            headers={_file_name(name, ".safetensors"): _utf8(text) for name, text in origin["headers"].items()},
            index_name=None if origin["index_name"] is None else _file_name(origin["index_name"], INDEX_SUFFIX),
            index_text=None if origin["index_text"] is None else _utf8(origin["index_text"]),
            prefix=_utf8(origin["prefix"]),
            map=_map(origin.get("map")),
        ),
        accepted={
            _file_name(name): {word: _utf8(fields[word]) for word in ("date", "recorded", "digest")}
            for name, fields in document.get("accepted", {}).items()
        },
    )


def _map(fields: Any) -> TensorMap | None:  # noqa: ANN401 - JSON, checked field by field
    if fields is None:
        return None
    words = {word: _utf8(fields[word]) for word in ("names", "architecture")}
    return TensorMap(**words, digest=_digest(fields["digest"]), by=_utf8(fields.get("by", "")))


def _parse_records(
    table: Mapping[str, Mapping[str, object]], *, name: Callable[[object], str]
) -> dict[str, FileRecord]:
    return {
        name(key): FileRecord(nbytes=_count(fields["nbytes"]), digest=_digest(fields["digest"]))
        for key, fields in table.items()
    }


def _mesh(axes: list[list[object]]) -> Mesh:
    mesh = Mesh(tuple((_text(name), _count(size)) for name, size in axes))
    if mesh.world_size > MAX_WORLD_SIZE:
        raise ValueError(f"a mesh of more than {MAX_WORLD_SIZE} ranks")
    return mesh


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, found {type(value).__name__}")
    return value


def _utf8(value: object) -> str:
    text = _text(value)
    text.encode()  # it is written again; a lone surrogate cannot be
    return text


def _digest(value: object) -> str:
    digest = _text(value)
    if _DIGEST.fullmatch(digest) is None:
        raise ValueError("a digest is not 32 hexadecimal digits")
    return digest


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value <= MAX_ELEMS:
        raise TypeError(f"expected a count between 0 and 2^62, found {type(value).__name__}")
    return value


def _file_name(value: object, suffix: str = "") -> str:
    """Return a name that stays inside of whatever directory it is joined to: `gather` writes such files."""
    name = _text(value)
    if not is_plain_path(name) or not name.endswith(suffix):
        raise ValueError(f"file name {name!r}")
    return name
