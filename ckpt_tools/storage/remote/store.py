"""Buckets of S3, Google Cloud Storage and Azure, through obstore: nobody else imports it.

Whatever obstore raises becomes a `CkptError` here. Its own texts hold addresses, answers of the store and at times a
signature, so nothing of them is passed on but a status, an error code and how often it tried.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from importlib.util import find_spec
from itertools import count
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ckpt_tools.errors import CkptError, LimitError, StorageError, UnreachableError, UnreadableError, UsageError
from ckpt_tools.storage.locations import storage
from ckpt_tools.storage.remote.patience import patience_s, watched
from ckpt_tools.storage.source import MAX_FILES
from ckpt_tools.text import escape_name

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SCHEMES: Mapping[str, str] = {"s3": "bucket", "gs": "bucket", "az": "container"}
"""Scheme → what its stores call a namespace of keys."""

_RETRIES = {
    "max_retries": 10_000,  # Time decides, see patience.py
    # obstore draws each pause between the first one and `base` times the last: with 2 it hardly grows.
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=10), "base": 3},
}
_CLIENT = {"connect_timeout": timedelta(seconds=10), "timeout": timedelta(seconds=90)}
_PAGE_KEYS = 1000

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z]{1,60})</Code>")
_TRIES = re.compile(r"\bretries: (\d{1,4}),")
_HTTP_KIND = re.compile(r"\bkind: (Connect|Timeout|Interrupted|Decode|Request|Unknown)\b")
_NO_CREDENTIALS = ("169.254.169.254", "169.254.170.2", "metadata.google.internal", "MissingCredentials")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """What a store says of an object."""

    key: str
    nbytes: int
    etag: str | None
    version: str | None
    modified: datetime


class ChangedObjectError(CkptError):
    """An object is not the one that it was: a condition on its ETag was not met."""

    def __init__(self, where: str) -> None:
        hint = "wait until its writer has finished, then run the command again"
        super().__init__("the source changed while it was read", where=where, hint=hint)


class ExistingObjectError(StorageError):
    """An object that was to be created is there already."""


class DeniedError(UnreachableError):
    """The store refuses this request to these credentials."""


class MissingObjectError(UnreadableError):
    """There is no object of this key, or no such bucket."""


def split(path: str) -> tuple[str, str, str]:
    """Return scheme, bucket and key (without slashes around it) of `s3://bucket/key`."""
    scheme, _, rest = path.partition("://")
    bucket, _, key = rest.partition("/")
    scheme, key = scheme.lower(), key.strip("/")
    kind = SCHEMES[scheme]
    if "@" in bucket:  # what stands before it may be a password: it is not repeated
        raise UsageError("a path must not contain credentials", where=f"{scheme}://…", hint=_credentials_hint(scheme))
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:-]*", bucket):
        raise UsageError(f"{kind} missing or malformed", where=path, hint=f"{scheme}://{kind}/key")
    if key and any(part in ("", ".", "..") for part in key.split("/")):
        raise UsageError("a key cannot have empty or relative parts", where=path, hint=f"{scheme}://{kind}/key")
    return scheme, bucket, key


class Bucket:
    """A bucket (for Azure, a container); every method may be called from any thread.

    Keys are whole ones, without a leading slash. Every method raises `CkptError` with the object's name:
    `MissingObjectError`, `ChangedObjectError` (an ETag differs), `ExistingObjectError` (create), else `StorageError`.

    Args:
        path: A path into it.

    Raises:
        UsageError: Malformed, obstore is missing, or an option that it does not know.
    """

    def __init__(self, path: str) -> None:
        self.scheme, self.name, self.key = split(path)
        self.root = f"{self.scheme}://{self.name}"
        try:
            import obstore
        except ImportError as error:
            hint = "pip install 'ckpt-tools[remote]'"
            raise UsageError("remote storage needs obstore", where=f"{self.scheme}://", hint=hint) from error
        self.obstore = obstore
        self.store = _open_store(obstore, self.scheme, self.name, self.root)

    def label(self, key: str) -> str:
        """Return how messages name an object."""
        return f"{self.root}/{key}" if key else self.root

    def list(self, prefix: str) -> Iterator[StoredObject]:
        """Yield the objects below `prefix` (whole path segments), in pages of a thousand, in the order of the store."""
        pages: Iterator[Any] = iter(self.obstore.list(self.store, prefix or None, chunk_size=_PAGE_KEYS))
        for number in count():
            with self.telling(prefix, "LIST"):  # each page is a request
                page = next(pages, None)
            if page is None:
                return
            if number * _PAGE_KEYS > MAX_FILES:
                raise LimitError(f"the store lists more than {MAX_FILES} objects", where=self.label(prefix))
            yield from map(_stored, page)

    def head(self, key: str) -> StoredObject:
        """Return what the store says of an object."""
        with self.telling(key, "HEAD"):
            return _stored(self.obstore.head(self.store, key))

    def get(self, key: str, start: int, nbytes: int, *, etag: str | None = None) -> tuple[StoredObject, memoryview]:
        """Return an object as it is now, and `nbytes` > 0 of it from `start` on: fewer where it ends before.

        `etag` is that of the object that is meant. It is asked for, and compared for stores that ignore the condition.
        """
        options: dict[str, Any] = {"range": (start, start + nbytes)}
        if etag is not None and not etag.startswith("W/"):  # a weak one never matches
            options["if_match"] = etag
        with self.telling(key, "GET"):
            result = self.obstore.get(self.store, key, options=options)  # type: ignore[arg-type,unused-ignore]
            found = _stored(result.meta)
            if etag is not None and found.etag != etag:
                raise ChangedObjectError(self.label(key))
            content = memoryview(result.bytes())
            if len(content) != min(nbytes, found.nbytes - start):  # obstore compares where it says that they lie
                what = f"the store sent other bytes than {start}..{start + nbytes}"
                raise UnreachableError(what, where=self.label(key), hint="is there a proxy or cache in front of it?")
            return found, content

    def get_whole(self, key: str, *, max_bytes: int) -> tuple[StoredObject, bytes]:
        """Return a small object and its content."""
        with self.telling(key, "GET"):
            result = self.obstore.get(self.store, key)
            found = _stored(result.meta)
            if found.nbytes > max_bytes:
                what = f"{found.nbytes} bytes where at most {max_bytes} are expected"
                raise UnreadableError(what, where=self.label(key))
            return found, bytes(result.bytes())

    def put(self, key: str, content: bytes, *, create: bool = False) -> str | None:
        """Write a small object with one request, whole; with `create`, only where there is none. Return its ETag."""
        with self.telling(key, "PUT"):
            mode: Any = "create" if create else "overwrite"
            written = self.obstore.put(self.store, key, content, mode=mode, use_multipart=False)
            return _canonical(written["e_tag"])

    def open_writer(self, key: str, *, part_bytes: int, max_concurrency: int) -> Any:  # noqa: ANN401 - obstore's own
        """Return obstore's writer of one object: `write(bytes)`, `close()`; leaving its `with` by an error aborts it.

        What its methods raise is for `telling`.
        """
        with self.telling(key, "PUT"):
            return self.obstore.open_writer(self.store, key, buffer_size=part_bytes, max_concurrency=max_concurrency)

    def delete(self, key: str) -> None:
        """Remove an object; there being none is fine."""
        with suppress(MissingObjectError), self.telling(key, "DELETE"):
            self.obstore.delete(self.store, key)

    @contextmanager
    def telling(self, key: str, verb: str) -> Iterator[None]:
        """Turn what obstore raises about an object into a `CkptError`."""
        try:
            with watched(verb, self.root):
                yield
        except (CkptError, GeneratorExit):
            raise
        except Exception as error:
            # Beside its own errors, obstore raises some of Python's: for a missing object, a key that it does not take.
            if not isinstance(error, (self.obstore.exceptions.BaseError, ValueError, OSError)):
                raise
            raise _translate(self, error, self.label(key), verb) from None


def _translate(bucket: Bucket, error: Exception, where: str, verb: str) -> CkptError:
    """Say what obstore says, without what it quotes."""
    kinds, text = bucket.obstore.exceptions, str(error)
    found = _STATUS.search(text)
    status = 0 if found is None else int(found[1])
    code = found[1] if (found := _CODE.search(text)) else ""
    tries = 1 + (int(found[1]) if (found := _TRIES.search(text)) else 0)
    tried = f" ({tries} tries)" if tries > 1 else ""
    if any(sign in text for sign in _NO_CREDENTIALS) and status not in (404, 412):
        return UnreachableError("no credentials were found", where=where, hint=_credentials_hint(bucket.scheme))
    if isinstance(error, kinds.PreconditionError):
        return ChangedObjectError(where)
    if isinstance(error, kinds.AlreadyExistsError):
        return ExistingObjectError("the object exists already", where=where)
    if code == "NoSuchBucket" or "ContainerNotFound" in code:
        return MissingObjectError(f"there is no {SCHEMES[bucket.scheme]} {bucket.name!r}", where=where)
    if isinstance(error, FileNotFoundError) or status == 404:
        return MissingObjectError("no such object", where=where)
    if isinstance(error, kinds.PermissionDeniedError | kinds.UnauthenticatedError) or status in (401, 403):
        said = f" ({code})" if code else ""
        return DeniedError(f"access denied: {verb}{said}", where=where, hint=_credentials_hint(bucket.scheme))
    if isinstance(error, ValueError | kinds.InvalidPathError) and not status:
        return UnreadableError("the store has a key that is not a plain path", where=where)
    if status in (301, 307, 308) or "BareRedirect" in text:
        hint = "set AWS_REGION to the bucket's region" if bucket.scheme == "s3" else "check the endpoint"
        return UnreachableError("the store answered with a redirect: another region?", where=where, hint=hint)
    if status:
        said = f"{status} {code}".strip()
        later = "it is overloaded or down: try again later" if status >= 500 or status == 429 else None
        return UnreachableError(f"{verb} failed: the store answered {said}{tried}", where=where, hint=later)
    if "NotPartial" in text:
        return UnreachableError("the store does not support range requests, which ckpt needs", where=where)
    kind = found[1] if (found := _HTTP_KIND.search(text)) else ""
    said = {"Connect": "no connection", "Timeout": "no answer in time"}.get(kind, "the connection or the answer broke")
    way = f"check the network and the endpoint ({_endpoint(bucket.scheme) or 'the default one'})"
    return UnreachableError(f"{verb} failed: {said}{tried}", where=where, hint=way)


def _open_store(library: Any, scheme: str, name: str, root: str) -> ObjectStore:  # noqa: ANN401 - a module
    import obstore.store as stores

    client: dict[str, Any] = dict(_CLIENT)
    if _endpoint(scheme).lower().startswith("http://"):
        client["allow_http"] = True  # whoever writes http:// means it
    retries = {"retry_timeout": timedelta(seconds=patience_s()), **_RETRIES}
    given: dict[str, Any] = {"client_options": client, "retry_config": retries, "config": dict(storage())}
    try:
        if scheme == "s3":
            if _wants_profile():
                from obstore.auth.boto3 import Boto3CredentialProvider

                given["credential_provider"] = Boto3CredentialProvider()
            return stores.S3Store(name, **given)
        return stores.GCSStore(name, **given) if scheme == "gs" else stores.AzureStore(name, **given)
    except library.exceptions.UnknownConfigurationKeyError as error:
        unknown = re.search(r"key: '([^']{1,80})'", str(error))
        what = f"--storage: obstore has no option {unknown[1] if unknown else 'of this name'!r} for {scheme}://"
        raise UsageError(what, hint="names as in obstore's configuration: endpoint, region, skip_signature") from None
    except Exception as error:  # noqa: BLE001 - botocore's among them
        missing = "set AZURE_STORAGE_ACCOUNT_NAME" if "MissingAccount" in str(error) else "its settings are wrong"
        raise UsageError(f"cannot open the store: {missing}", where=root, hint=_credentials_hint(scheme)) from None


def _wants_profile() -> bool:
    """Do credentials come from AWS's config files, which obstore does not read, and is boto3 there, which does?"""
    if os.environ.get("AWS_ACCESS_KEY_ID") or "access_key_id" in storage() or "aws_access_key_id" in storage():
        return False
    return _has_profile() and find_spec("boto3") is not None


def _has_profile() -> bool:
    if os.environ.get("AWS_PROFILE"):
        return True
    named = (("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"), ("AWS_CONFIG_FILE", "~/.aws/config"))
    return any(os.path.isfile(os.path.expanduser(os.environ.get(name) or usual)) for name, usual in named)


def _credentials_hint(scheme: str) -> str:
    if scheme == "gs":
        return "gcloud auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS; --storage skip_signature=true"
    if scheme == "az":
        return "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN"
    key = os.environ.get("AWS_ACCESS_KEY_ID")
    if key:
        told = f"the credentials come from AWS_ACCESS_KEY_ID (…{escape_name(key[-4:])})"
        return told if len(key) > 8 else "check AWS_ACCESS_KEY_ID"
    if _has_profile():
        return "export credentials: eval $(aws configure export-credentials --format env), or pip install boto3"
    return "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; for a public bucket --storage skip_signature=true"


def _endpoint(scheme: str) -> str:
    """Return the address that replaces a provider's own, without what could be secret in it; empty for none."""
    names = {"s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"), "az": ("AZURE_STORAGE_ENDPOINT",)}
    options = (storage().get(name, "") for name in ("endpoint", "aws_endpoint", "endpoint_url", "base_url"))
    variables = (os.environ.get(name, "") for name in names.get(scheme, ()))
    found = next((each for each in (*options, *variables) if each), "")
    try:
        parts = urlsplit(found)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return ""
    return f"{parts.scheme}://{parts.hostname or ''}{port}" if found else ""


def _canonical(etag: str | None) -> str | None:
    """Return an ETag as headers have it; listings of some stores leave its quotes out."""
    if not etag:
        return None
    weak = "W/" if etag.startswith("W/") else ""
    return weak + '"' + etag.removeprefix("W/").strip('"') + '"'


def _stored(meta: Any) -> StoredObject:  # noqa: ANN401 - a mapping of obstore's
    told = {"version": meta["version"], "modified": meta["last_modified"]}
    return StoredObject(key=meta["path"], nbytes=meta["size"], etag=_canonical(meta["e_tag"]), **told)
