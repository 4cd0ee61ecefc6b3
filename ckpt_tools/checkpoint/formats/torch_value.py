"""Plain values as `torch.save` writes them: numbers, texts and lists of them, read without unpickling, and written.

DCP stores what is no tensor this way (`optimizer.param_groups.0.lr`).
"""

from __future__ import annotations

import io
import pickle
import zipfile
import zlib
from dataclasses import replace

from ckpt_tools.checkpoint.formats._pickle_values import DEFAULT_LIMITS, GlobalName, Record
from ckpt_tools.checkpoint.formats.inert_pickle import parse_pickle
from ckpt_tools.checkpoint.formats.torch_zip import parse_archive
from ckpt_tools.errors import LimitError, UnreadableError

MAX_VALUE_BYTES = 64 << 20  # Largest item that is read: lists of parameter names have kilobytes
_LIMITS = replace(DEFAULT_LIMITS, max_int_bytes=32)  # numpy's random generators have states of 128 bits


def parse_value(content: bytes, *, where: str) -> object:
    """Return the value of a `torch.save` zip that holds plain values alone."""
    # That is an int, str, bool, None, float, bytes, or tuples, lists and dicts of them.
    if len(content) > MAX_VALUE_BYTES:
        raise LimitError(f"{len(content)} bytes, the limit is {MAX_VALUE_BYTES}", where=where)
    try:
        value = parse_pickle(_pickle_of(content), allowed_globals=frozenset(), limits=_LIMITS)
    except UnreadableError as error:
        raise UnreadableError(f"the item does not hold plain values: {error.what}", where=where) from error
    if isinstance(value, (GlobalName, Record)):
        raise UnreadableError("the item does not hold plain values", where=where)
    return value


def _pickle_of(content: bytes) -> bytes:
    record = parse_archive(len(content), lambda offset, nbytes: content[offset : offset + nbytes]).get("data.pkl")
    data = b"" if record is None else content[record.start : record.start + record.nbytes]
    if record is None or record.crc32 not in (None, zlib.crc32(data)):
        raise UnreadableError("it is damaged, or not what torch.save writes")
    return data


def build_value(value: object) -> bytes:
    """Return the item of a plain value, which `torch.load` and `parse_value` read; equal values make equal bytes."""
    buffer = io.BytesIO()
    records = {"data.pkl": pickle.dumps(value, 2), "byteorder": b"little", "version": b"3\n"}
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, content in records.items():
            archive.writestr(zipfile.ZipInfo(f"archive/{name}"), content)
    return buffer.getvalue()
