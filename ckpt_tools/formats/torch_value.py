"""Plain values as `torch.save` writes them: numbers, texts and lists of them, read without unpickling, and written.

DCP stores what is no tensor this way (`optimizer.param_groups.0.lr`).
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from dataclasses import replace

from ckpt_tools.errors import LimitError, UnreadableError
from ckpt_tools.formats.inert_pickle import DEFAULT_LIMITS, GlobalName, Record, parse_pickle

MAX_VALUE_BYTES = 64 << 20
"""Largest item that is read: lists of parameter names have kilobytes."""
_LIMITS = replace(DEFAULT_LIMITS, max_int_bytes=32)
"""numpy's random generators have states of 128 bits."""
_DAMAGED = (
    zipfile.BadZipFile,
    RuntimeError,  # encrypted, an unknown method
    ValueError,
    EOFError,
    OSError,  # a negative offset
    ArithmeticError,  # an offset beyond what a file can have
    LookupError,
    struct.error,  # an extra field that ends early
)
"""What zipfile raises on archives that nobody wrote."""


def parse_value(content: bytes, *, where: str) -> object:
    """Return the value of a `torch.save` zip that holds plain values alone.

    That is an int, str, bool, None, float, bytes, or tuples, lists and dicts of them.
    """
    if len(content) > MAX_VALUE_BYTES:
        raise LimitError(f"{len(content)} bytes, the limit is {MAX_VALUE_BYTES}", where=where)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            records = [entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl")]
            if len(records) != 1 or records[0].compress_type != zipfile.ZIP_STORED:
                raise UnreadableError("the item is not what torch.save writes", where=where)
            data = archive.read(records[0])
    except _DAMAGED as error:
        raise UnreadableError(f"the item is damaged: {error!s}", where=where) from error
    try:
        value = parse_pickle(data, allowed_globals=frozenset(), limits=_LIMITS)
    except UnreadableError as error:
        raise UnreadableError(f"the item does not hold plain values: {error.what}", where=where) from error
    if isinstance(value, (GlobalName, Record)):
        raise UnreadableError("the item does not hold plain values", where=where)
    return value


def build_value(value: object) -> bytes:
    """Return the item of a plain value, which `torch.load` and `parse_value` read; equal values make equal bytes."""
    buffer = io.BytesIO()
    records = {"data.pkl": pickle.dumps(value, 2), "byteorder": b"little", "version": b"3\n"}
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, content in records.items():
            archive.writestr(zipfile.ZipInfo(f"archive/{name}"), content)
    return buffer.getvalue()
