"""Read what lies below a prefix of a bucket, each object as it was when it was listed.

Stores have no directories: a prefix is one, and an object of exactly that key is a file. ckpt keeps the state of a
write in `.ckpt/` below the prefix until the marker is there: what is found with it and without a marker is half.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

from ckpt_tools.errors import CkptError, MissingError, UnreadableError
from ckpt_tools.storage.claim import CLAIM_NAME, RECORD_PREFIX, SHARED_DIRECTORY
from ckpt_tools.storage.remote.source import RemoteFile, RemoteSource
from ckpt_tools.storage.remote.store import Bucket, ChangedObjectError, DeniedError, MissingObjectError, StoredObject

_WORK = SHARED_DIRECTORY + "/"
_RECORD = re.compile(rf"/{RECORD_PREFIX}(\d{{1,9}})-of-(\d{{1,9}})\b")
_MANIFEST_NAME = "ckpt_manifest.json"
_MAX_MANIFEST_BYTES = 256 << 20


class ObjectSource(RemoteSource):
    """The objects below a prefix.

    Args:
        bucket: The bucket; its `key` is the prefix.
        only: The one object that is looked at, in place of a listing.
    """

    def __init__(self, bucket: Bucket, *, only: StoredObject | None = None) -> None:
        self._bucket = bucket
        self._prefix = bucket.key if only is None else only.key.rpartition("/")[0]
        self._only = only
        super().__init__(bucket.label(self._prefix))

    def _key(self, file: str) -> str:
        return f"{self._prefix}/{file}" if self._prefix else file

    def objects(self) -> Iterable[StoredObject]:
        """Yield what is below the prefix, as the store lists it."""
        return self._bucket.list(self._prefix) if self._only is None else (self._only,)

    def _list(self) -> Iterable[tuple[str, RemoteFile]]:
        start = len(self._key(""))
        for each in self.objects():
            # Consoles make an empty object for a directory; obstore takes the slash off its name.
            if len(each.key) > start:
                yield each.key[start:], RemoteFile(nbytes=each.nbytes, version=_version(each))

    def _fetch(self, file: str, facts: RemoteFile, offset: int, buffer: memoryview) -> None:
        etag = facts.version.get("etag")
        try:
            found, content = self._bucket.get(
                self._key(file), offset, len(buffer), etag=etag if isinstance(etag, str) else None
            )
        except (ChangedObjectError, MissingObjectError):
            raise self.changed(file) from None
        if found.nbytes != facts.nbytes or (etag is None and _version(found) != facts.version):
            raise self.changed(file)
        buffer[:] = content


def _version(stored: StoredObject) -> Mapping[str, object]:
    """Return what tells an object from another of its name; its time only where the store has no ETags."""
    if stored.etag is not None:
        return {"etag": stored.etag}
    return {"modified": stored.modified.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}


def open_place(path: str) -> tuple[ObjectSource, str | None]:
    """Open a prefix, or the object that `path` names; see `places.open_place`."""
    bucket = Bucket(path)
    source = ObjectSource(bucket)
    try:
        files = source.files()
    except DeniedError as error:
        # Reading an object and listing what is beside it are two permissions.
        try:
            only = _look(bucket)
        except CkptError:
            only = None
        if only is None:
            raise error from None
        return _open_object(bucket, only)
    if not files:
        if (only := _look(bucket)) is None:
            raise MissingError("no such file or directory", where=path)
        return _open_object(bucket, only)
    if any(name.startswith(_WORK) for name in files) and not _is_whole(source):
        raise _unfinished(source)
    return source, None


def _look(bucket: Bucket) -> StoredObject | None:
    try:
        return bucket.head(bucket.key) if bucket.key else None
    except MissingObjectError:
        return None


def _open_object(bucket: Bucket, only: StoredObject) -> tuple[ObjectSource, str]:
    return ObjectSource(bucket, only=only), only.key.rpartition("/")[2]


def _unfinished(source: ObjectSource) -> UnreadableError:
    """Say how far the write has come that has begun here."""
    there: set[int] = set()
    parts = 0
    last = datetime.min.replace(tzinfo=UTC)
    for each in source.objects():
        last = max(last, each.modified)
        if (found := _RECORD.search(each.key)) is not None:
            there.add(int(found[1]))
            parts = int(found[2])
    claimed = _read_json(source, _WORK + CLAIM_NAME).get("num_parts")
    parts = parts or (claimed if isinstance(claimed, int) else 0)
    ago = last.astimezone()
    when = f"{ago:%H:%M}" if ago.date() == datetime.now().astimezone().date() else f"{ago:%Y-%m-%d %H:%M}"
    far = f"{len(there)} of {parts} parts have recorded work, " if parts > 1 else ""
    what = f"no checkpoint: a write was not finished ({far}last change {when})"
    return UnreadableError(what, where=source.root, hint="run the command that writes it again: finished work is kept")


def _is_whole(source: ObjectSource) -> bool:
    """Is all there that the manifest names, the marker too? It is written just before that one."""
    manifest = _read_json(source, _MANIFEST_NAME)
    files, assets, documents = (manifest.get(each) for each in ("files", "assets", "documents"))
    if not (isinstance(files, dict) and isinstance(assets, dict) and isinstance(documents, dict)):
        return False
    there = source.files()
    whole = all(name in there and there[name].nbytes == nbytes for name, nbytes in files.items())
    return whole and all(name in there for name in (*assets, *documents))


def _read_json(source: ObjectSource, file: str) -> Mapping[str, object]:
    """Return what a document of ckpt's own says; nothing where it is none."""
    facts = source.files().get(file)
    if facts is None or facts.nbytes > _MAX_MANIFEST_BYTES:
        return {}
    try:
        found = json.loads(source.read(file, 0, facts.nbytes))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
