"""Open what a path names, wherever that is: a path with a scheme is remote, every other one is this machine's.

A remote path is a URL as far as `os.path.join`, `dirname` and `basename` go, and stays a text; what else there is to
know about a path is asked here. A new scheme is one module of this room and one line of `_READERS` (`_WRITERS`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Protocol, cast

from ckpt_tools.errors import CkptError, LimitError, MissingError, UnreadableError, UsageError
from ckpt_tools.storage.shared_staging import SharedStaging, under_way
from ckpt_tools.storage.sink import SharedSink, Sink
from ckpt_tools.storage.source import LocalSource, Source, read_named_file
from ckpt_tools.storage.staging import Staging
from ckpt_tools.text import nearest

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")

_READERS: Mapping[str, str] = {
    "hf": "hub_source",
    "https": "web_source",
    "http": "web_source",
    **dict.fromkeys(("s3", "gs", "az"), "object_source"),
}
"""Scheme → module of this room with `open_place(path)`."""
_WRITERS: Mapping[str, str] = {"s3": "object_sink", "gs": "object_sink", "az": "object_sink"}
"""Scheme → module of this room with `open_sink(path, overwrite=…)`."""


_REPOSITORY = re.compile(r"(?!.*\.(safetensors|ckpt|pth?|bin|gguf|json|ya?ml|toml|txt)$)\w[\w.-]*/\w[\w.-]*(@[\w.-]+)?")
_REVISION = re.compile(r"[0-9A-Za-z]+")
_MAX_REVISION = 256
_options: dict[str, str] = {}


class _SourceModule(Protocol):
    def open_place(self, path: str) -> tuple[Source, str | None]: ...


class _SinkModule(Protocol):
    def open_sink(self, path: str, *, overwrite: bool) -> Sink: ...


def set_storage(options: Iterable[str]) -> None:
    """Set options of stores (`KEY=VALUE`, by obstore's names) for everything that this process opens from now on.

    Values can be secret and are not shown, here or anywhere.
    """
    pairs = [each.partition("=") for each in options]
    if any(not key or not equals for key, equals, _ in pairs):
        raise UsageError("--storage must be KEY=VALUE", hint="--storage region=eu-west-1")
    _options.clear()
    _options.update((key.strip().lower(), value) for key, _, value in pairs)


def storage() -> Mapping[str, str]:
    """Return what `set_storage` was given."""
    return _options


def scheme_of(path: str) -> str | None:
    """Return the scheme of a remote path in small letters; None for a path of this machine, `file://` among them."""
    found = _SCHEME.match(path)
    scheme = None if found is None else found[1].lower()
    return None if scheme == "file" else scheme


def is_remote(path: str) -> bool:
    """Does the path lead to another machine?"""
    return scheme_of(path) is not None


def absolute(path: str) -> str:
    """Return a path that means the same in every directory."""
    return path if is_remote(path) else os.path.abspath(local(path))


def local(path: str) -> str:
    """Return a path of this machine without `file://`; for a repository in the hub's cache, of its main snapshot."""
    if not path.lower().startswith("file://"):
        return _snapshot(path)
    rest = path[len("file://") :]
    rest = rest.removeprefix("localhost") if rest.startswith("localhost/") else rest
    if not rest.startswith("/"):
        raise UsageError("file:// needs an absolute path", where=path, hint="file:///data/model, or its path")
    return _snapshot(rest)


def _snapshot(path: str) -> str:
    """Return where the files of `refs/main` lie, for the root of a repository in the hub's cache; else the path.

    Source: huggingface_hub, "Understand caching".
    """
    named = os.path.join(path, "refs", "main")
    if is_remote(path) or not os.path.isfile(named):
        return path
    try:
        with open(named, encoding="ascii") as file:
            revision = file.read(_MAX_REVISION).strip()
    except (OSError, ValueError):
        return path
    snapshot = os.path.join(path, "snapshots", revision)
    return snapshot if _REVISION.fullmatch(revision) and os.path.isdir(snapshot) else path


def open_place(path: str) -> tuple[Source, str | None]:
    """Open what is at `path`: the directory, and the name of the file in it; None where `path` is the directory."""
    scheme = scheme_of(path)
    if scheme is not None:
        return cast("_SourceModule", _module(scheme, _READERS, path, "reads")).open_place(path)
    path = local(path)
    if not os.path.lexists(path):
        raise under_way(path) or MissingError("no such file or directory", where=path, hint=likely(path))
    if os.path.isdir(path):
        return LocalSource(path), None
    return LocalSource(os.path.dirname(os.path.abspath(path))), os.path.basename(path)


def likely(path: str) -> str | None:
    """Return the hint of what is meant by a path that leads nowhere: a place elsewhere, or the nearest one here."""
    scheme = re.match(r"([a-z0-9]+):/?(?!/)", path)
    if scheme is not None and scheme[1] in _READERS:
        return f"did you mean {scheme[1]}://{path[scheme.end() :]}?"
    here, below = path.rstrip("/"), list[str]()
    while not os.path.lexists(here or "."):
        here, name = os.path.split(here)
        below.insert(0, name)
    try:
        near = nearest(below[0], os.listdir(here or ".")[:10_000]) if below else None  # of more it takes seconds
        short = os.path.relpath(path)
    except (OSError, ValueError):  # no path, or the current directory is gone
        return None
    whole = os.path.join(here, near or "", *below[1:])
    is_repository = _REPOSITORY.fullmatch(short) and not os.path.lexists(os.path.dirname(short))
    if near is not None and (os.path.lexists(whole) or not is_repository):
        return f"did you mean {whole if os.path.lexists(whole) else os.path.join(here, near)}?"
    return f"for a repository of the Hugging Face hub, write hf://{short}" if is_repository else None


def open_source(path: str) -> Source:
    """Open the directory `path`; of a file, that which it lies in. Raises as `open_place`."""
    return open_place(path)[0]


def is_directory(path: str) -> bool:
    """Is there a directory at `path`? A remote one is asked for."""
    if not is_remote(path):
        return os.path.isdir(local(path))
    return _is_remote_file(path) is False


def open_shared_sink(destination: str) -> SharedSink:
    """Open a directory for writing by several processes; see `SharedStaging`. Raises as `open_sink`."""
    if not is_remote(destination):
        return SharedStaging(local(destination))
    sink = open_sink(destination, overwrite=False)
    if not isinstance(sink, SharedSink):
        raise UsageError("several processes cannot write there together", where=destination)
    return sink


def is_file(path: str) -> bool:
    """Is there a file at `path`? A remote one is asked for."""
    if not is_remote(path):
        return os.path.isfile(local(path))
    return _is_remote_file(path) is True


def _is_remote_file(path: str) -> bool | None:
    """Is what a remote path names a file? None where there is nothing."""
    try:
        source, file = open_place(path)
    except LimitError:
        raise
    except UnreadableError:
        return None
    source.close()
    return file is not None


def exists(path: str) -> bool:
    """Is there anything at `path`? A remote place is asked for."""
    return is_directory(path) or is_file(path) if is_remote(path) else os.path.exists(local(path))


def read_named(
    path: str, *, what: str, max_bytes: int, refusal: type[CkptError] = UnreadableError, hint: str | None = None
) -> bytes:
    """Return the content of a small file that a user names; see `read_named_file`."""
    if not is_remote(path):
        return read_named_file(local(path), what=what, max_bytes=max_bytes, refusal=refusal, hint=hint)
    if not is_file(path):
        raise refusal(f"cannot read {what}: no such file", where=path, hint=hint)
    source, file = open_place(path)
    with source:
        nbytes = source.size(str(file))
        if nbytes > max_bytes:
            raise LimitError(f"{what} of more than {max_bytes} bytes", where=path, hint=hint)
        return source.read(str(file), 0, nbytes)


def open_sink(destination: str, *, overwrite: bool) -> Sink:
    """Open a directory for writing that appears whole or not at all; see `Staging`."""
    scheme = scheme_of(destination)
    if scheme is None:
        return Staging(local(destination), overwrite=overwrite)
    module = cast("_SinkModule", _module(scheme, _WRITERS, destination, "writes"))
    return module.open_sink(destination, overwrite=overwrite)


def _module(scheme: str, table: Mapping[str, str], path: str, verb: str) -> object:
    if scheme not in table:
        known = ", ".join(f"{each}://" for each in sorted(table)) or "only paths on this machine"
        hint = "write to a disk or a store, then `ckpt push`" if scheme == "hf" and verb == "writes" else None
        raise UsageError(f"ckpt {verb} {known}, not {scheme}://", where=path, hint=hint)
    return import_module(f"ckpt_tools.storage.remote.{table[scheme]}")
