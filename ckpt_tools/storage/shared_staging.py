"""Build a directory by several processes, on one machine or on many that share a file system.

They work in the one staging directory of the destination. Each holds its lock together with the others
(`LOCK_SH`), and the one that publishes alone (`LOCK_EX`), as an ordinary run does. The claim in `.ckpt/` says what is
built; a record there, that a part is done. Where there are no locks, the claim alone keeps other conversions
out, and whoever publishes writes what any other one would: documents replace each other at once, and one rename wins.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from ckpt_tools.errors import CkptError, DestinationExistsError, StorageError, UnreadableError
from ckpt_tools.storage import publish
from ckpt_tools.storage.claim import (
    CLAIM_NAME,
    RECORD_PREFIX,
    SHARED_DIRECTORY,
    BuildClaim,
    empty_directory,
    is_same,
    open_directory,
    read_claim,
    staging_path,
    try_lock,
)
from ckpt_tools.storage.journal import JournalWriter, read_journal
from ckpt_tools.storage.sink import SharedSink
from ckpt_tools.storage.staging import Staging, check_destination

_POLL_S = 0.02
_PATIENCE_S = 2.0


class SharedStaging(Staging, SharedSink):
    """A directory of this machine, or of a file system that others share, under construction by several processes."""

    def __init__(self, destination: str) -> None:
        super().__init__(destination, overwrite=False)
        self._work: tuple[str, int] | None = None
        """Directory of the pass under way, and its lock."""
        self._fingerprint = ""

    def _claim_directory(self) -> tuple[str, int]:
        return staging_path(self.destination), -1  # see `join`

    @property
    def _shared(self) -> str:
        return os.path.join(self.directory, SHARED_DIRECTORY)

    # Joining

    def find_claim(self) -> BuildClaim | None:
        """Return what is being built here."""
        return read_claim(self.directory)

    def join(self, fingerprint: str, num_parts: int) -> None:
        """Take part; see `SharedSink`. What an interrupted run of one process had left is removed."""
        self._fingerprint = fingerprint
        deadline = time.monotonic() + _PATIENCE_S
        try:
            while not self._try_to_join(BuildClaim.new(fingerprint, num_parts, self.command)):
                if read_claim(self.directory) is None and time.monotonic() > deadline:
                    what = "another ckpt is writing to this destination"
                    where = self.destination
                    raise DestinationExistsError(what, where=where, hint="wait for it, or choose another destination")
                time.sleep(_POLL_S)
        except CkptError:
            raise
        except OSError as error:
            raise self._failed("prepare", "", error) from error

    def _try_to_join(self, mine: BuildClaim) -> bool:
        """Look once; False when somebody holds what is needed, or has just published."""
        check_destination(self.destination, overwrite=False)
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.directory)
        descriptor = open_directory(self.directory)
        if descriptor is None:
            return False
        try:
            alone = _lock(descriptor, fcntl.LOCK_EX)
            if alone is not False and is_same(self.directory, descriptor) and read_claim(self.directory) is None:
                # Where locks do not reach other hosts, one of them may be making its claim at this moment.
                if alone and {*os.listdir(self.directory)} - {SHARED_DIRECTORY}:
                    self.found_other = True
                    empty_directory(self.directory)
                self._put_claim(mine)
            # Another process may take it between the two locks: whoever does finds the claim.
            joined = _lock(descriptor, fcntl.LOCK_SH) is not False and is_same(self.directory, descriptor)
            claim = read_claim(self.directory)
            if claim is not None:
                claim.check(mine.fingerprint, mine.num_parts, where=self.destination, directory=self.directory)
            if joined and claim is not None:
                self._claim, descriptor = descriptor, -1
                return True
            return False
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _put_claim(self, claim: BuildClaim) -> None:
        os.makedirs(self._shared, exist_ok=True)
        own = os.path.join(self._shared, f"{CLAIM_NAME}-{claim.nonce}")
        _write_durably(own, claim.build())
        with contextlib.suppress(FileExistsError):
            os.link(own, os.path.join(self._shared, CLAIM_NAME))
        os.remove(own)
        publish.sync_directory(self._shared)
        publish.sync_directory(self.directory)

    # A pass

    def passes(self, sizes: Sequence[int]) -> Sequence[range]:
        """One: the journal keeps what a killed process had done of it."""
        return [range(len(sizes))] if sizes else []

    def begin(self, fingerprint: str | None = None) -> None:
        """Begin the pass whose record has this name."""
        path = os.path.join(self._shared, f"work-{fingerprint}")
        journal = f"{self._fingerprint} {fingerprint}"
        try:
            os.makedirs(path, exist_ok=True)
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            self._work = path, descriptor
            if _lock(descriptor, fcntl.LOCK_EX) is False:
                self._end()
                hint = "wait for it; every part is run once at a time"
                raise DestinationExistsError("another process is writing this part", where=self.destination, hint=hint)
            found = read_journal(path, journal)
            if found is None:
                empty_directory(path)
            self.records = found or {}
            self._journal = JournalWriter(path, journal, continues=found is not None)
        except CkptError:
            raise
        except OSError as error:
            raise self._failed("prepare", "", error) from error

    def _end(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        if self._work is not None:
            os.close(self._work[1])
            self._work = None

    def allocated_bytes(self) -> int:
        """None that may be counted: others fill their files in the same directory."""
        return 0

    def identity(self, file: str) -> Mapping[str, object] | None:
        """Return size, modification time and inode of a finished file, as they are now."""
        try:
            # Opened: on NFS that, and not a look at the name, asks the server.
            descriptor = self._open(file)
        except OSError:
            return None
        try:
            status = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1:
            return None
        return {"nbytes": status.st_size, "mtime_ns": status.st_mtime_ns, "inode": status.st_ino}

    def put_record(self, name: str, content: bytes) -> None:
        """Write a record; what was kept to continue the pass is not needed any more."""
        try:
            for directory in sorted({os.path.dirname(file) for file in self._files}):
                publish.sync_directory(os.path.join(self.directory, directory))
            self._replace(os.path.join(SHARED_DIRECTORY, name), content)
            publish.sync_directory(self._shared)
        except OSError as error:
            raise self._failed("write", name, error) from error
        work = self._work
        self._end()
        self.records = {}
        if work is not None:
            shutil.rmtree(work[0], ignore_errors=True)

    def records_there(self) -> Mapping[str, bytes]:
        """Return the records of every part, by name."""
        found = {}
        try:
            for name in sorted(os.listdir(self._shared)):
                if name.startswith(RECORD_PREFIX) and name.endswith(".json"):
                    with open(os.path.join(self._shared, name), "rb") as stream:
                        found[name] = stream.read()
        except FileNotFoundError:
            return {}  # published since
        except OSError as error:
            raise self._failed("read", SHARED_DIRECTORY, error) from error
        return found

    # Publishing

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Wait until no other process is at work here; False when one of them has published meanwhile."""
        fcntl_lock = _lock(self._claim, fcntl.LOCK_UN)
        while fcntl_lock is not None and _lock(self._claim, fcntl.LOCK_EX) is False:
            time.sleep(_POLL_S)
        yield is_same(self.directory, self._claim)

    def write_document(self, file: str, content: bytes) -> None:
        """Write a small file whole, in place of one that a killed run has left."""
        try:
            self._replace(file, content)
        except OSError as error:
            raise self._failed("write", file, error) from error
        self._files.append(file)

    def _replace(self, file: str, content: bytes) -> None:
        path = os.path.join(self.directory, file)
        own = os.path.join(self._shared, f"new-{os.urandom(8).hex()}")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        _write_durably(own, content)
        os.replace(own, path)

    def _publish(self) -> None:
        super()._publish()
        # Only now: a kill before must not cost what all the others have done.
        tidy(self.destination)

    # Leaving

    @property
    def num_kept(self) -> int:
        """Blocks of the pass under way, and records."""
        begun = 0 if self._journal is None else self._journal.num_records
        return len(self.records) + begun + (len(self.records_there()) if self._claim >= 0 else 0)

    def discard(self) -> None:
        """Leave; what nobody has done anything in is removed."""
        if self._claim >= 0:
            self._close()
            if not self.num_kept and _lock(self._claim, fcntl.LOCK_EX) and is_same(self.directory, self._claim):
                shutil.rmtree(self.directory, ignore_errors=True)
        self._release()

    def _close(self) -> None:
        self._descriptors.close()
        self._end()

    def _release(self) -> None:
        self._end()
        super()._release()


def under_way(destination: str) -> UnreadableError | None:
    """Return what to say of a destination that does not exist, while several processes build it."""
    directory = staging_path(destination)
    try:
        claim = read_claim(directory)
        names = os.listdir(os.path.join(directory, SHARED_DIRECTORY)) if claim is not None else []
    except (OSError, StorageError):
        return None
    if claim is None:
        return None
    done = len({name.split("-of-")[0] for name in names if name.startswith(RECORD_PREFIX)})
    what = f"no checkpoint: a write is not finished ({done} of {claim.describe()})"
    hint = f"run the same command with --part I/{claim.num_parts} for the missing parts: any part lists them"
    return UnreadableError(what, where=destination, hint=hint)


def tidy(destination: str) -> None:
    """Remove what processes that built `destination` together had left in it for each other."""
    shutil.rmtree(os.path.join(destination, SHARED_DIRECTORY), ignore_errors=True)


def _lock(descriptor: int, kind: int) -> bool | None:
    """Lock a directory, or change the lock; False when others hold it, None when its file system has no locks."""
    with contextlib.suppress(BlockingIOError):
        return True if try_lock(descriptor, kind) else None
    return False


def _write_durably(path: str, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    try:
        with open(descriptor, "wb", closefd=False) as stream:
            stream.write(content)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
