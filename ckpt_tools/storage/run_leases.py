"""Where ckpt's own files of a run's folder lie, and the leases by which readers of its checkpoints hold them."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple, TextIO

RECORD_NAME = ".ckpt-tend.json"
LEASE_PREFIX = ".ckpt-lease-"
LEASE_S = 3600.0  # For so long the lease of another machine is no stale one
_MOST_LEVELS = 4  # By which what is read lies below the run's folder


class Home(NamedTuple):
    """A directory for files of ckpt's own."""

    directory: str
    tag: str  # What their names have to tell from those of other folders; with "-"

    def path(self, file: str) -> str:
        """Return where a file lies."""
        name, dot, end = file.rpartition(".")
        return os.path.join(self.directory, f"{name}-{self.tag[:-1]}{dot}{end}" if self.tag else file)


def homes_of(folder: str) -> tuple[Home, Home]:
    """Return where they lie for a real path: in the folder, or beside it where nothing may lie in it."""
    parent, name = os.path.split(folder)
    return Home(folder, ""), Home(parent, hashlib.sha256(os.fsencode(name)).hexdigest()[:8] + "-")


@contextmanager
def leased(path: str | os.PathLike[str], *, is_wanted: bool = True) -> Iterator[None]:
    """Hold what is at `path`, if that is of a checkpoint in a folder that ckpt keeps a record of; never fails."""
    lease = None
    with suppress(OSError, ValueError):
        lease = _write(os.path.realpath(path)) if is_wanted and os.path.exists(path) else None
    try:
        yield
    finally:
        if lease is not None:
            with suppress(OSError):
                os.unlink(lease.name)
            with suppress(OSError):  # a full disk: what was not written is not missed
                lease.close()


def _write(path: str) -> TextIO | None:
    """Write the lease, locked for as long as its process lives, and return it; None without a record."""
    for _ in range(_MOST_LEVELS):
        path, name = os.path.split(path)
        for home in homes_of(path) if name else ():
            if os.path.exists(home.path(RECORD_NAME)):
                now = time.time()
                lease = {"checkpoint": name, "host": socket.gethostname(), "pid": os.getpid(), "is_locked": True}
                file = os.path.join(home.directory, f"{LEASE_PREFIX}{home.tag}{uuid.uuid4().hex[:8]}")
                stream = open(file, "x", encoding="utf-8", errors="surrogateescape")  # noqa: SIM115 - closed by `leased`
                with suppress(OSError):
                    fcntl.flock(stream.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                    json.dump({**lease, "since": now, "until": now + LEASE_S}, stream)
                    stream.flush()
                return stream
    return None


def is_locked(path: str) -> bool | None:
    """Return True if a process here holds the lock of a file or directory; None where there are no locks."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return True if isinstance(error, BlockingIOError) else None
    finally:
        os.close(descriptor)
    return False
