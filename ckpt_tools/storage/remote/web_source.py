"""Models on a web server: one file, or the index of several with what stands beside it under known names."""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote, unquote, urlsplit

from ckpt_tools.errors import CkptError, LimitError, MissingError, StorageError, UnreadableError, UsageError
from ckpt_tools.storage.remote import hub_source
from ckpt_tools.storage.remote.server_checks import RefusalError
from ckpt_tools.storage.remote.source import RemoteFile, RemoteSource
from ckpt_tools.storage.remote.web import ChangedError, Web, explain
from ckpt_tools.storage.source import Source
from ckpt_tools.text import is_plain_path

INDEX_ENDING = ".safetensors.index.json"
COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "chat_template.jinja",
)
"""Documents that may stand beside an index. Others are not found: a web server does not list."""
_MAX_INDEX_BYTES = 256 << 20
_MAX_FILES = 10_000
_AT_ONCE = 8


def open_place(path: str) -> tuple[Source, str | None]:
    """Open the file that a web address names, or the directory of the index that it names; see `places.open_place`."""
    if hub_source.is_hub_url(path):
        return hub_source.open_place(path)
    try:
        parts = urlsplit(path)
    except ValueError:
        raise UsageError("not a web address", where=path, hint="https://host/directory/model.safetensors") from None
    if not parts.hostname or "@" in parts.netloc or parts.query or parts.fragment:
        what = "ckpt reads web addresses without a query, a name or a password, because it records its sources"
        shown = f"{parts.scheme}://{parts.hostname or ''}{parts.path}"
        raise UsageError(what, where=shown, hint="download the file, and pass its path")
    root, _, quoted = path.rpartition("/")
    name = unquote(quoted)
    if not name or "/" in name or not is_plain_path(name) or "." not in name:
        hint = f"name a file: {path.rstrip('/')}/model{INDEX_ENDING}, or …/model.safetensors"
        raise UsageError("a web server does not list its files", where=path, hint=hint)
    source = WebSource(root, name)
    source.files()
    return source, None if source.is_index else name


class WebSource(RemoteSource):
    """One file of a web server, or an index, what it names, and what stands beside it under known names.

    Args:
        root: Address of the directory.
        name: The file.
    """

    def __init__(self, root: str, name: str) -> None:
        super().__init__(root)
        self._name = name
        self.is_index = name.endswith(INDEX_ENDING)
        self._web = Web(home=root, token=None, explain=_explain)

    def _url(self, file: str) -> str:
        return f"{self.root}/{quote(file)}"

    def _list(self) -> Iterable[tuple[str, RemoteFile]]:
        first = self._look(self._name)
        yield self._name, first
        if not first.version:
            self.notes = (f"{self.root} does not identify versions of files: only sizes are compared",)
        if not self.is_index:
            return
        names = self._named(first)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            yield from zip(names, pool.map(self._look, names), strict=True)
            for name, found in zip(COMPANIONS, pool.map(self._look_perhaps, COMPANIONS), strict=True):
                if found is not None:
                    yield name, found

    def _named(self, index: RemoteFile) -> list[str]:
        """Return the files that the index names; whether it is right is for its format to say."""
        where = self.label(self._name)
        if index.nbytes > _MAX_INDEX_BYTES:
            raise LimitError(f"{index.nbytes} bytes, the limit is {_MAX_INDEX_BYTES}", where=where)
        text = bytearray(index.nbytes)
        if text:
            self._fetch(self._name, index, 0, memoryview(text))
        try:
            named = {str(file) for file in json.loads(text)["weight_map"].values()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise UnreadableError("the index has no weight_map of strings", where=where) from None
        if len(named) > _MAX_FILES:
            raise LimitError(f"an index of {len(named)} files, the limit is {_MAX_FILES}", where=where)
        outside = sorted(name for name in named if not is_plain_path(name))
        if outside:
            raise UnreadableError(f"the index names the file {outside[0]!r} outside of its directory", where=where)
        return sorted(named - {self._name})

    def _look(self, file: str) -> RemoteFile:
        try:
            nbytes, version = self._web.look(self._url(file), self.label(file))
        except ChangedError:
            raise self.changed(file) from None
        return RemoteFile(nbytes=nbytes, version=version)

    def _look_perhaps(self, file: str) -> RemoteFile | None:
        try:
            return self._look(file)
        except (UnreadableError, _ForbiddenError):  # which is how some stores say that there is none
            return None

    def _fetch(self, file: str, facts: RemoteFile, offset: int, buffer: memoryview) -> None:
        try:
            self._web.fill(self._url(file), offset, buffer, nbytes=facts.nbytes, what=self.label(file))
        except ChangedError:
            raise self.changed(file) from None


class _ForbiddenError(StorageError):
    """The server does not let a file be read, or does not tell strangers that there is none."""


def _explain(refusal: RefusalError, where: str) -> CkptError:
    if refusal.status in (404, 410):
        return MissingError("no such file on this server", where=where)
    if refusal.status in (401, 403):
        what = f"the server denies access (status {refusal.status})"
        return _ForbiddenError(what, where=where, hint="ckpt cannot log in there: download the file")
    return explain(refusal, where)
