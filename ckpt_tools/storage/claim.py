"""Claim the one staging directory of a destination, so that one run at a time works in it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import stat
import time
import uuid
from dataclasses import asdict, dataclass
from typing import Any

from ckpt_tools._version import __version__
from ckpt_tools.errors import CkptError, DestinationExistsError, StorageError
from ckpt_tools.text import counted

# The claim of a destination that several processes build together: what every one of them must agree on

SHARED_DIRECTORY = ".ckpt"
"""Holds the claim and the records, beside the files; hidden from whoever looks for a checkpoint."""
CLAIM_NAME = "claim"
RECORD_PREFIX = "share-"
MAX_CLAIM_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildClaim:
    """Who began to build here, and what."""

    fingerprint: str
    num_parts: int
    version: str = __version__
    host: str = ""
    pid: int = 0
    time: float = 0.0  # Seconds since 1970
    nonce: str = ""  # Tells this claim from any other
    command: str = ""  # What builds it, in JSON, for whoever comes to publish it; "" where that cannot be said

    @classmethod
    def new(cls, fingerprint: str, num_parts: int, command: str = "") -> BuildClaim:
        """Return a claim of this process."""
        here: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}
        return cls(fingerprint=fingerprint, num_parts=num_parts, nonce=os.urandom(8).hex(), command=command, **here)

    @classmethod
    def parse(cls, content: bytes, *, where: str) -> BuildClaim:
        """Return the claim that a document states."""
        try:
            if len(content) > MAX_CLAIM_BYTES:
                raise ValueError  # noqa: TRY301 - one way to be no claim
            document = json.loads(content)
            claim = cls(**{name: document[name] for name in cls.__slots__})
            kinds = (str, int, str, str, int, float, str, str)
            is_one = all(map(isinstance, (getattr(claim, name) for name in cls.__slots__), kinds))
        except (ValueError, TypeError, KeyError, RecursionError):
            is_one = False
        if not is_one:
            what = "an unfinished write by several processes here cannot be identified"
            raise StorageError(what, where=where, hint="remove the directory if nothing in it is needed")
        return claim

    def build(self) -> bytes:
        """Return the document."""
        return json.dumps(asdict(self)).encode() + b"\n"

    def describe(self) -> str:
        """Say who began what: "64 parts, started 14:02 by host-3"."""
        started = time.localtime(self.time)
        today = time.strftime("%F", started) == time.strftime("%F")
        parts = counted(self.num_parts, "part")
        return f"{parts}, started {time.strftime('%H:%M' if today else '%F %H:%M', started)} by {self.host}"

    def check(self, fingerprint: str | None, num_parts: int, *, where: str, directory: str) -> None:
        """Raise DestinationExistsError unless the claim is of this conversion in so many parts."""
        if (self.fingerprint, self.num_parts) == (fingerprint, num_parts):
            return
        if self.fingerprint == fingerprint:
            what = f"this conversion is under way here in {self.num_parts} parts, not {num_parts} ({self.describe()})"
            hint = f"run it with --part I/{self.num_parts}, or remove {directory} to begin again"
            raise DestinationExistsError(what, where=where, hint=hint)
        what = f"another conversion is under way here ({self.describe()}): other arguments, or the source has changed"
        hint = f"wait, choose another destination, or remove {directory} if it has ended"
        raise DestinationExistsError(what, where=where, hint=hint)


STAGING_PREFIX = ".ckpt-tmp-"
NO_LOCKS = (errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL)  # What flock answers on file systems without locks
_PATIENCE_S = 2.0


def staging_path(destination: str) -> str:
    """Return the staging directory of `destination`: beside it, and the same for every run."""
    parent, name = os.path.split(os.path.abspath(destination))
    return os.path.join(parent, STAGING_PREFIX + hashlib.sha256(os.fsencode(name)).hexdigest()[:16])


def claim_directory(destination: str) -> tuple[str, int]:
    """Make or take over the staging directory of `destination`, and lock it.

    Return its path, and the descriptor that holds the lock until it is closed. On file systems without locks the path
    is of this run alone.
    """
    path = staging_path(destination)
    try:
        while True:
            with contextlib.suppress(FileExistsError):
                os.mkdir(path)
            descriptor = open_directory(path)
            if descriptor is None:
                continue  # published or removed since
            try:
                if not _lock(descriptor, destination):
                    os.close(descriptor)
                    return _claim_unshared(path)
                if is_same(path, descriptor):
                    _check_unshared(path, destination)
                    return path, descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)
    except CkptError:
        raise
    except OSError as error:
        what = f"cannot make a staging directory beside the destination: {error.strerror}"
        raise StorageError(what, where=os.path.dirname(path)) from error


def lock_directory(path: str) -> int | None:
    """Lock a checkpoint that is about to change places with its staging directory, so that none claims it there.

    Return the descriptor that holds the lock; None where there are no locks.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            if _lock(descriptor, path):
                return descriptor
            break
        except DestinationExistsError:
            # A run that came too late to claim this very directory holds it for a moment.
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise
            time.sleep(0.01)
        except BaseException:
            os.close(descriptor)
            raise
    os.close(descriptor)
    return None


def try_lock(descriptor: int, kind: int) -> bool:
    """Lock a file or directory; False when its file system has no locks. BlockingIOError says that others hold it."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return False
    return True


def _lock(descriptor: int, destination: str) -> bool:
    """Lock a directory; return False when its file system has no locks."""
    try:
        return try_lock(descriptor, fcntl.LOCK_EX)
    except BlockingIOError as error:
        _check_unshared(staging_path(destination), destination)
        what = "another ckpt is writing to this destination"
        hint = "wait for it, or choose another destination"
        raise DestinationExistsError(what, where=destination, hint=hint) from error


def _claim_unshared(path: str) -> tuple[str, int]:
    # Nobody works in a directory of the common name here; what an earlier attempt left of it is empty.
    with contextlib.suppress(OSError):
        os.rmdir(path)
    path = f"{path}-{uuid.uuid4().hex[:8]}"
    os.mkdir(path)
    return path, os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def read_claim(directory: str) -> BuildClaim | None:
    """Return what several processes build in a staging directory; None when it is not built so."""
    path = os.path.join(directory, SHARED_DIRECTORY, CLAIM_NAME)
    try:
        with open(path, "rb") as stream:
            return BuildClaim.parse(stream.read(MAX_CLAIM_BYTES + 1), where=directory)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"cannot read: {error.strerror}", where=path) from error


def _check_unshared(path: str, destination: str) -> None:
    """Raise DestinationExistsError when the directory has the work of several processes, though none is at it now."""
    claim = read_claim(path)
    if claim is not None:
        claim.check(None, 1, where=destination, directory=path)


def open_directory(path: str) -> int | None:
    """Open a staging directory; None when there is none any more."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
        what = "something that is not a directory has the name of the staging directory"
        raise CkptError(what, where=path, hint="remove it if you know what it is") from error
    owner = os.fstat(descriptor).st_uid
    if owner != os.geteuid():
        os.close(descriptor)
        what = f"the staging directory belongs to another user ({owner})"
        raise CkptError(what, where=path, hint="choose another destination, or let its owner remove it")
    return descriptor


def is_same(path: str, descriptor: int) -> bool:
    """Does `path` still name the directory that is open?"""
    try:
        now = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    held = os.fstat(descriptor)
    return stat.S_ISDIR(now.st_mode) and (now.st_ino, now.st_dev) == (held.st_ino, held.st_dev)


def empty_directory(path: str) -> None:
    """Remove everything inside a directory; links are removed, never followed."""
    with os.scandir(path) as entries:
        for entry in list(entries):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.remove(entry.path)
