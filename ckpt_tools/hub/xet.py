"""The hub's second way in for large files: used where the hub offers it, bounded, and never the only one.

Source: huggingface_hub 2.4, _commit_api.py (`_upload_files`: with hf_xet installed it asks no hub whether it has Xet,
and sends what it gets as a stream by LFS); hf_xet 1.8, whose settings are read from the environment when its first
session begins.
"""

from __future__ import annotations

import importlib.util
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO

from ckpt_tools.hub.client import Hub
from ckpt_tools.hub.session import client_utils
from ckpt_tools.storage.source import Source

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_BOUNDS = {
    "HF_XET_CLIENT_RETRY_MAX_ATTEMPTS": "4",
    "HF_XET_CLIENT_RETRY_BASE_DELAY": "1s",
    "HF_XET_CLIENT_RETRY_MAX_DURATION": "60s",
}
"""By itself it tries a storage that is away for many minutes, without a word."""


def uses_xet() -> bool:
    """Will the client upload what it gets as a path by Xet?"""
    from huggingface_hub import constants

    return not constants.HF_HUB_DISABLE_XET and importlib.util.find_spec("hf_xet") is not None


def offers_xet(hub: Hub, *, create_pr: bool) -> bool:
    """Return True if this hub has Xet; raise HubError if the token may not write here or the hub is away."""

    def get() -> bool:
        response = hub.request("GET", "xet-write-token", create_pr=create_pr)
        if response.status_code in (404, 405, 501):  # a hub of one's own, or a mirror
            return False
        client_utils().hf_raise_for_status(response)
        return True

    return hub.call("asking for the storage", get)


@contextmanager
def bounded_xet() -> Iterator[None]:
    """Let Xet give up within a minute or so, unless the user has settings of their own."""
    ours = {name: value for name, value in _BOUNDS.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def open_stream(source: Source, path: str) -> BinaryIO:
    """Open a file as a stream, which the client uploads by LFS; the source bounds how many files are open."""
    return io.BufferedReader(_Raw(source, path))


class _Raw(io.RawIOBase):
    """A file of a source, read from a position that moves on."""

    def __init__(self, source: Source, path: str) -> None:
        self._source, self._path = source, path
        self._nbytes, self._at = source.size(path), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._nbytes}[whence] + offset
        return self._at

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer).cast("B")
        nbytes = max(0, min(len(view), self._nbytes - self._at))
        self._source.read_into(self._path, self._at, view[:nbytes])
        self._at += nbytes
        return nbytes
