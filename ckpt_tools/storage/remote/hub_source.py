"""Repositories of the hub, read where they are: one commit, by ranges; what the local cache holds of it, from there."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from urllib.parse import quote, urlsplit

from ckpt_tools.errors import CkptError, HubError, LimitError, MissingError, UnreadableError, UsageError
from ckpt_tools.storage.remote.account import Account, find_account, hub_directory, is_offline
from ckpt_tools.storage.remote.server_checks import RefusalError
from ckpt_tools.storage.remote.source import RemoteFile, RemoteSource
from ckpt_tools.storage.remote.web import ChangedError, Web, explain, is_same_host
from ckpt_tools.storage.source import LocalSource, Source
from ckpt_tools.text import is_plain_path
from ckpt_tools.units import format_size

MAX_AGE_S = 600.0  # How long a branch stands for the commit that it had, where nothing of that is open any more
_MAX_DOCUMENT_BYTES = 64 << 20
_MAX_PAGES = 200  # Of a listing; the hub's pages have 1000 entries, and a repository should have 100,000 files at most
_MAX_LISTED_BYTES = 64 << 20  # Of all its pages
_COMMIT = re.compile(r"[0-9a-f]{40}")
_OID = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_NEXT = re.compile(r'<([^>]+)>\s*;\s*rel="?next"?')
_ROUTES = ("tree", "blob", "resolve", "raw", "blame")
_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """What a path names."""

    repo: str  # namespace/name
    revision: str
    path: str  # In the repository; "" for all of it

    def __str__(self) -> str:
        """As `hf://` has it."""
        at = "" if self.revision == "main" else f"@{quote(self.revision, safe='/')}"
        at = at if "/" not in self.revision or self.revision.startswith("refs/") else at.replace("/", "%2F")
        return f"hf://{self.repo}{at}" + (f"/{self.path}" if self.path else "")


@dataclass(slots=True, kw_only=True)
class _Pinned:
    """A commit and what is in it, as one run sees it."""

    commit: str
    files: dict[str, RemoteFile]
    web: Web
    since: float = field(default_factory=time.monotonic)
    num_open: int = 0
    cached: LocalSource | None = None
    """The commit in the local cache, and what of it there has the content that the hub names."""
    held: frozenset[str] = field(default_factory=frozenset)


_pinned: dict[tuple[Account, str, str, bool], _Pinned] = {}
_lock = threading.Lock()


def is_hub_url(path: str) -> bool:
    """Is a web address one of the hub's pages of a repository, or of a file in one?"""
    try:
        own, host = urlsplit(os.environ.get("HF_ENDPOINT", "")).netloc, urlsplit(path).netloc
    except ValueError:
        return False
    return host.lower() in {*_HOSTS, own.lower()} - {""}


def parse(path: str) -> Address:
    """Return what `hf://…`, or the web address of a page of the hub, names."""
    from huggingface_hub.errors import HfUriError

    asked = path
    if not path.lower().startswith("hf://"):
        parts = urlsplit(path)
        segments = parts.path.strip("/").split("/")
        if len(segments) > 2 and segments[2] not in _ROUTES and segments[0] not in ("datasets", "spaces", "models"):
            path = "hf://" + "/".join(segments)  # a file below the page of a repository
    elif len(path) > 5:
        path = "hf://" + path[5:].strip("/")
    try:
        found = import_module("huggingface_hub.utils").parse_hf_uri(path, endpoint=os.environ.get("HF_ENDPOINT"))
    except (HfUriError, ValueError) as error:
        what = f"not the address of a repository: {getattr(error, 'msg', error)}"
        hint = "hf://org/name, hf://org/name@revision, hf://org/name/directory"
        raise UsageError(what, where=asked, hint=hint) from None
    if found.type != "model":
        raise UsageError(f"ckpt reads models of the hub, not a {found.type}", where=asked, hint="hf://org/name")
    inside = found.path_in_repo.strip("/")
    return Address(repo=found.id, revision=found.revision or "main", path=inside)


def open_place(path: str) -> tuple[Source, str | None]:
    """Open what `hf://org/name[@revision][/path]` names; see `places.open_place`."""
    address, account = parse(path), find_account()
    pinned = _pin(address, account, path)
    if address.path in pinned.files:
        directory, _, file = address.path.rpartition("/")
        root = Address(repo=address.repo, revision=address.revision, path=directory)
        return HubSource(root, account, pinned), file
    if address.path and not any(name.startswith(address.path + "/") for name in pinned.files):
        what = f"no such file or directory in commit {pinned.commit[:12]}"
        raise MissingError(what, where=path, hint=f"{account.endpoint}/{address.repo}/tree/{pinned.commit}")
    return HubSource(address, account, pinned), None


def open_commit(repo: str, commit: str, files: Mapping[str, RemoteFile], account: Account) -> HubSource:
    """Open a commit whose `files` are known; what is read comes from the hub itself, whatever the local cache has."""
    pinned = _Pinned(commit=commit, files=dict(files), web=_web(account))
    return HubSource(Address(repo=repo, revision=commit, path=""), account, pinned)


class HubSource(RemoteSource):
    """A directory of a repository at one commit."""

    def __init__(self, address: Address, account: Account, pinned: _Pinned) -> None:
        super().__init__(str(address))
        self._prefix = f"{address.path}/" if address.path else ""
        self._repo, self._pinned = address.repo, pinned
        self._base = f"{account.endpoint}/{quote(address.repo)}/resolve/{pinned.commit}/"
        with _lock:
            pinned.num_open += 1
        self._is_open = True
        self.notes = (f"{self.root} at commit {pinned.commit[:12]}", *self._note_on_cache())

    def _note_on_cache(self) -> Iterable[str]:
        held = sum(name.startswith(self._prefix) for name in self._pinned.held)
        if held:
            yield f"{held} of its files are read from the local cache of the hub"

    @property
    def place(self) -> str:
        """Repository, commit and directory."""
        return f"hf://{self._repo}@{self._pinned.commit}/{self._prefix}".rstrip("/")

    def _list(self) -> Iterable[tuple[str, RemoteFile]]:
        for name, facts in self._pinned.files.items():
            if name.startswith(self._prefix):
                yield name.removeprefix(self._prefix), facts

    def _fetch(self, file: str, facts: RemoteFile, offset: int, buffer: memoryview) -> None:
        name = self._prefix + file
        if self._pinned.cached is not None and name in self._pinned.held:
            self._pinned.cached.read_into(name, offset, buffer)
            return
        try:
            oid = str(facts.version["oid"])
            self._pinned.web.fill(
                self._base + quote(name), offset, buffer, nbytes=facts.nbytes, what=self.label(file), linked=oid
            )
        except ChangedError:
            raise self.changed(file) from None

    def check_unchanged(self) -> None:
        """A commit stays as it is; what the cache gives is looked at again."""
        if self._pinned.cached is not None:
            self._pinned.cached.check_unchanged()

    def close(self) -> None:
        """Free what is kept."""
        super().close()
        with _lock:
            if self._is_open:
                self._is_open = False
                self._pinned.num_open -= 1
                self._pinned.since = time.monotonic()


def _web(account: Account) -> Web:
    return Web(home=account.endpoint, token=account.token or None, explain=partial(_explain, account=account))


def _pin(address: Address, account: Account, path: str) -> _Pinned:
    """Return the commit that a revision stands for: asked for once in a run, so that all of it sees the same."""
    key = (account, address.repo, address.revision, is_offline())
    with _lock:
        found = _pinned.get(key)
        if found is not None and (found.num_open or time.monotonic() - found.since < MAX_AGE_S):
            return found
        for old in [each for each, pinned in _pinned.items() if not pinned.num_open]:
            if time.monotonic() - _pinned[old].since >= MAX_AGE_S:
                gone = _pinned.pop(old)
                if gone.cached is not None:
                    gone.cached.close()
        found = _pinned[key] = (_look_offline if is_offline() else _look)(address, account, path)
        return found


def _look(address: Address, account: Account, where: str) -> _Pinned:
    web = _web(account)
    api = f"{account.endpoint}/api/models/{quote(address.repo)}"
    commit = address.revision
    if not _COMMIT.fullmatch(commit):
        text, _ = web.read(f"{api}/revision/{quote(commit, safe='')}", where, limit=_MAX_DOCUMENT_BYTES)
        document = _json(text, where)
        commit = str(document.get("sha")) if isinstance(document, dict) else ""
        if not _COMMIT.fullmatch(commit):
            raise _nonsense(where)
    files: dict[str, RemoteFile] = {}
    url = f"{api}/tree/{commit}?recursive=true"
    nbytes = 0
    for _ in range(_MAX_PAGES):
        text, headers = web.read(url, where, limit=_MAX_DOCUMENT_BYTES)
        nbytes += len(text)
        rows = _json(text, where)
        if not isinstance(rows, list):
            raise _nonsense(where)
        files |= _files(rows, where)
        following = _NEXT.search(headers.get("Link", ""))
        if following is None:
            pinned = _Pinned(commit=commit, files=files, web=web)
            _use_cache(pinned, address.repo)
            return pinned
        url = following[1]
        if not is_same_host(url, api):
            raise HubError("the hub's listing links to another server", where=where)
        if nbytes > _MAX_LISTED_BYTES:
            break
    most = f"{_MAX_PAGES} pages or {format_size(_MAX_LISTED_BYTES)}"
    hint = f"download what you need: hf download {address.repo} --include GLOB"
    raise LimitError(f"the hub's listing has more than {most}: {len(files)} files so far", where=where, hint=hint)


def _files(rows: list[object], where: str) -> dict[str, RemoteFile]:
    found = {}
    for row in rows:
        if not isinstance(row, dict):
            raise _nonsense(where)
        if row.get("type") != "file":
            continue
        lfs = row.get("lfs")
        name, nbytes, oid = row.get("path"), row.get("size"), row.get("oid")
        if isinstance(lfs, dict):
            nbytes, oid = lfs.get("size"), lfs.get("oid")
        if not isinstance(nbytes, int) or not 0 <= nbytes < 1 << 62 or not isinstance(name, str):
            raise _nonsense(where)
        if not isinstance(oid, str) or not _OID.fullmatch(oid):
            raise _nonsense(where)
        found[name] = RemoteFile(nbytes=nbytes, version={"oid": oid})
    return found


def _json(text: bytes, where: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise _nonsense(where) from None


def _nonsense(where: str) -> HubError:
    hint = "check HF_ENDPOINT: a proxy or a login page may have answered"
    return HubError("unexpected response from the hub", where=where, hint=hint)


def _snapshots(repo: str) -> str:
    return os.path.join(hub_directory("HF_HUB_CACHE"), "models--" + repo.replace("/", "--"), "snapshots")


def _use_cache(pinned: _Pinned, repo: str) -> None:
    """Find what the local cache has of the commit: files whose blob bears the name and size of what the hub lists."""
    root = os.path.join(_snapshots(repo), pinned.commit)
    if not os.path.isdir(root):
        return
    held = {
        name
        for name, (oid, nbytes) in _cached(root).items()
        if name in pinned.files and (pinned.files[name].version["oid"], pinned.files[name].nbytes) == (oid, nbytes)
    }
    if held:
        pinned.cached, pinned.held = LocalSource(root), frozenset(held)


def _cached(root: str) -> dict[str, tuple[str, int]]:
    """Return object id and size of every file of a snapshot that is a link to a blob."""
    found = {}
    with LocalSource(root) as source:
        for name, nbytes in source.list_files(max_depth=64).items():
            oid = os.path.basename(os.path.realpath(os.path.join(root, name)))
            if _OID.fullmatch(oid):
                found[name] = (oid, nbytes)
    return found


def _look_offline(address: Address, account: Account, path: str) -> _Pinned:
    """Return what the local cache has of a revision."""
    snapshots, commit = _snapshots(address.repo), address.revision
    try:
        if not _COMMIT.fullmatch(commit) and is_plain_path(commit):
            with open(os.path.join(os.path.dirname(snapshots), "refs", *commit.split("/")), encoding="ascii") as file:
                commit = file.read(64).strip()
        root = os.path.join(snapshots, commit)
        found = _cached(root) if _COMMIT.fullmatch(commit) and os.path.isdir(root) else {}
    except (OSError, ValueError):
        found = {}
    if not found:
        what = "offline mode is on (HF_HUB_OFFLINE), and it is not in the local cache of the hub"
        hint = f"unset HF_HUB_OFFLINE, or where there is a network: hf download {address.repo}"
        raise HubError(what, where=path, hint=hint)
    files = {name: RemoteFile(nbytes=nbytes, version={"oid": oid}) for name, (oid, nbytes) in found.items()}
    pinned = _Pinned(commit=commit, files=files, web=_web(account))
    pinned.cached, pinned.held = LocalSource(root), frozenset(files)
    return pinned


def _explain(refusal: RefusalError, what: str, account: Account) -> CkptError:
    says = f" (the hub says: {refusal.message})" if refusal.message else ""
    settings = f"{account.endpoint}/settings/tokens"
    page = f"{account.endpoint}/{'/'.join(what.removeprefix('hf://').partition('@')[0].split('/')[:2])}"
    if refusal.code == "GatedRepo":
        hint = f"ask for access at {page}, then `hf auth login`, or set HF_TOKEN"
        return HubError(f"the repository is gated{says}", where=what, hint=hint)
    if refusal.code == "RevisionNotFound":
        return MissingError(f"there is no such revision{says}", where=what, hint=f"{page}/tree/main")
    if refusal.code == "EntryNotFound":
        return UnreadableError(f"a file is missing{says}", where=what)
    if refusal.code == "RepoNotFound" or refusal.status == 404:
        hint = "check the name; if it is private: `hf auth login`, or set HF_TOKEN"
        hint = f"check the name, and that the token may read it ({settings})" if account.token else hint
        return HubError("there is no such repository, or it is private", where=what, hint=hint)
    if refusal.status in (401, 403):
        whom = "the token has expired, or may not read this" if account.token else "nobody is logged in"
        said = f"the hub denies access: {whom}{says}"
        return HubError(said, where=what, hint="hf auth login, or set HF_TOKEN")
    if refusal.status == 429:
        wait = "" if refusal.retry_after_s is None else f"; it asks to wait {refusal.retry_after_s:.0f} s"
        return HubError(
            f"too many requests{wait}{says}", where=what, hint="log in (hf auth login) for a higher limit, or wait"
        )
    return explain(refusal, what, who="the hub", variables="HF_ENDPOINT and HTTPS_PROXY", error=HubError)
