"""Large files in parts that another run can go on with, where the hub takes LFS.

The client begins such a file again after every break: each answer to "batch" opens a new upload, and what was sent to
the one before is lost. Here the addresses of an upload and the parts that have arrived are kept beside the client's
cache until the file is there.

Source: the LFS batch API (github.com/git-lfs/git-lfs, docs/api/batch.md) and huggingface_hub 2.4, lfs.py: the header of
an upload has `chunk_size` and the address of each part by its number; `href` takes {oid, parts: [{partNumber, etag}]}.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from ckpt_tools.errors import HubError
from ckpt_tools.hub.client import BLOCK_BYTES, Hub
from ckpt_tools.hub.plan import LocalFile
from ckpt_tools.hub.session import client_errors, client_utils, to_failure
from ckpt_tools.remote.account import hub_directory
from ckpt_tools.storage.source import Source

RESUMED_BYTES = 64 << 20
"""Smaller files are sent again as a whole."""
MAX_AGE_S = 20 * 3600.0
"""The addresses of an upload expire; the hub's do after a day."""
_JSON = {"Accept": "application/vnd.git-lfs+json", "Content-Type": "application/vnd.git-lfs+json"}
_GONE = (400, 401, 403, 404, 410)
"""What a storage says of an upload that has expired or was finished."""


@dataclass(slots=True)
class _Upload:
    """One upload of one file: its addresses, and number → ETag of the parts that have arrived."""

    href: str
    chunk: int
    urls: list[str]
    verify: str | None
    began: float
    etags: dict[int, str] = field(default_factory=dict)


class _GoneError(HubError):
    """The addresses are no longer good, which says nothing of the user's token."""


def send_parts(hub: Hub, source: Source, files: Sequence[LocalFile], *, create_pr: bool, num_workers: int) -> None:
    """Send every large file that the hub takes in parts and does not have; the client then finds it there.

    Raise HubError when the hub refuses or is away; what has arrived is kept for the next run.
    """
    for file in files:
        if file.nbytes < RESUMED_BYTES or file.content is not None:
            continue
        fresh = _begin(hub, file, create_pr=create_pr)
        if fresh is None:
            continue
        path = _place(hub, file)
        kept = _kept(path, file)
        if kept is not None:
            there = f"{len(kept.etags)} of {len(kept.urls)} parts are there"
            hub.say(f"{file.path}: going on with an earlier upload, {there}")
        try:
            _Sending(hub, source, file, kept or fresh, path).run(num_workers, is_last=kept is not None)
        except _GoneError:
            _forget(path)
            if kept is None:
                raise
            hub.say(f"{file.path}: the earlier upload has expired; starting again")
            _Sending(hub, source, file, fresh, path).run(num_workers)


def _begin(hub: Hub, file: LocalFile, *, create_pr: bool) -> _Upload | None:
    """Ask for an upload; None where the hub has the file, takes it whole or refuses it: the client says which."""
    asked: dict[str, object] = {
        "operation": "upload",
        "transfers": ["basic", "multipart"],
        "objects": [{"oid": file.sha256, "size": file.nbytes}],
        "hash_algo": "sha256",
    }
    if not create_pr:  # which takes the right to write to that branch
        asked["ref"] = {"name": hub.revision}
    url, doing = f"{hub.account.endpoint}/{hub.repo}.git/info/lfs/objects/batch", f"uploading {file.path}"
    found = hub.call(doing, lambda: _post(url, asked, hub.headers() | _JSON).json())
    try:
        actions = found["objects"][0].get("actions") or {}
        header = (actions.get("upload") or {}).get("header") or {}
        if "chunk_size" not in header:
            return None
        urls = [str(header[key]) for key in sorted(filter(str.isdigit, header), key=int)]
        ends = {
            name: client_utils().fix_hf_endpoint_in_url(each["href"], hub.account.endpoint)
            for name, each in actions.items()
        }
        found = _Upload(ends["upload"], int(header["chunk_size"]), urls, ends.get("verify"), time.time())
        return found if _fits(found, file) else None
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        raise hub.nonsense(doing) from None


def _fits(upload: _Upload, file: LocalFile) -> bool:
    return upload.chunk > 0 and len(upload.urls) == -(-file.nbytes // upload.chunk)


def _post(url: str, document: Mapping[str, object], headers: Mapping[str, str]) -> Any:  # noqa: ANN401 - httpx2's
    response = client_utils().get_session().post(url, json=document, headers=headers)
    client_utils().hf_raise_for_status(response)
    return response


class _Sending:
    """The parts of one file on their way; `path` keeps what has arrived."""

    def __init__(self, hub: Hub, source: Source, file: LocalFile, upload: _Upload, path: str) -> None:
        self._hub, self._source, self._file, self._upload, self._path = hub, source, file, upload, path
        self._has_failed = self._is_stopped = False
        self._lock = threading.Lock()

    def run(self, num_workers: int, *, is_last: bool = False) -> None:
        """Send the parts that lack, and put them together; if that fails `is_last` says not to try it once more."""
        upload, oid = self._upload, self._file.sha256
        self._send_lacking(num_workers)
        parts = [{"partNumber": number, "etag": etag} for number, etag in sorted(upload.etags.items())]
        try:
            self._call(lambda: _post(upload.href, {"oid": oid, "parts": parts}, _JSON))
        except HubError:
            if is_last:
                _forget(self._path)
            raise
        if (verify := upload.verify) is not None:
            is_home = verify.startswith(self._hub.account.endpoint + "/")  # whose token it is
            headers = self._hub.headers() if is_home else {}
            self._call(lambda: _post(verify, {"oid": oid, "size": self._file.nbytes}, headers))
        _forget(self._path)

    def _send_lacking(self, num_workers: int) -> None:
        lacking = sorted(set(range(1, len(self._upload.urls) + 1)) - self._upload.etags.keys())
        with ThreadPoolExecutor(max_workers=num_workers) as pool:
            try:
                for each in [pool.submit(self._put, number) for number in lacking]:
                    each.result()
            except Exception:
                self._has_failed = True  # what is under way may still arrive
                raise
            except BaseException:
                self._has_failed = self._is_stopped = True
                raise

    def _put(self, number: int) -> None:
        if self._has_failed:
            return
        start = (number - 1) * self._upload.chunk
        end = min(start + self._upload.chunk, self._file.nbytes)

        def blocks() -> Iterator[bytes]:
            for at in range(start, end, BLOCK_BYTES):
                if self._is_stopped:
                    raise ValueError("interrupted")
                yield self._source.read(self._file.path, at, min(BLOCK_BYTES, end - at))

        def work() -> str:
            url, headers = self._upload.urls[number - 1], {"Content-Length": str(end - start)}
            response = client_utils().get_session().put(url, content=blocks(), headers=headers)
            client_utils().hf_raise_for_status(response)
            if not (etag := response.headers.get("etag")):
                raise ValueError("a part without an ETag")
            return str(etag)

        etag = self._call(work)
        with self._lock:
            self._upload.etags[number] = etag
            _keep(self._path, self._upload)

    def _call(self, work: Callable[[], Any]) -> Any:  # noqa: ANN401 - returns what `work` does
        doing = f"uploading {self._file.path}"

        def once() -> Any:  # noqa: ANN401
            try:
                return work()
            except client_errors() as error:
                failure = to_failure(error, self._hub.account.token)
                if failure.status not in _GONE or failure.is_quota:
                    raise
                what = f"{doing}: the upload's address was refused with status {failure.status}: {failure.message}"
                raise _GoneError(what, where=self._hub.place(doing).where, hint="run the command again") from None

        return self._hub.call(doing, once)


def _place(hub: Hub, file: LocalFile) -> str:
    directory = os.path.join(hub_directory("HF_HOME"), "ckpt-uploads")
    with suppress(OSError):
        for name in os.listdir(directory):  # of uploads that have expired
            if os.stat(os.path.join(directory, name)).st_mtime < time.time() - 2 * MAX_AGE_S:
                _forget(os.path.join(directory, name))
    return os.path.join(
        directory, hashlib.sha256(f"{hub.account.endpoint} {hub.repo} {file.sha256}".encode()).hexdigest()
    )


def _keep(path: str, upload: _Upload) -> None:
    with suppress(OSError):  # a full disk ends the keeping, not the upload
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        # The addresses let whoever has them write this one upload: they are for their owner alone.
        aside = f"{path}.{os.getpid()}"
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w") as stream:
            json.dump(asdict(upload), stream)
        os.replace(aside, path)


def _kept(path: str, file: LocalFile) -> _Upload | None:
    """Return the earlier upload, if it may still be there."""
    try:
        with open(path, encoding="utf-8") as stream:
            upload = _Upload(**json.load(stream))
        upload.etags = {int(number): str(etag) for number, etag in upload.etags.items()}
        is_fresh = 0 <= time.time() - upload.began < MAX_AGE_S
        return upload if is_fresh and _fits(upload, file) else None
    except (OSError, AttributeError, TypeError, ValueError):
        return None


def _forget(path: str) -> None:
    with suppress(OSError):
        os.unlink(path)
