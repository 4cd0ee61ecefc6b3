"""Write a directory so that it appears whole or not at all.

The protocol: a staging directory beside the destination, claimed by one run at a time, every file created
exclusively, filled and fsynced, then the directory fsynced, then one rename that cannot replace anything (or that
exchanges, for overwrite), then the parent fsynced. What an interrupted run leaves in the staging directory is
continued by the same command, and removed by any other. See docs/dev/reliability.md.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
import threading
from collections import defaultdict
from collections.abc import Iterable

from ckpt_tools.errors import CkptError, DestinationExistsError, StorageError, UnreadableError, UsageError
from ckpt_tools.signals import hold_signals
from ckpt_tools.storage import publish
from ckpt_tools.storage.claim import claim_directory, empty_directory, staging_path
from ckpt_tools.storage.journal import JOURNAL_NAME, BlockRecord, JournalWriter, Records, read_journal
from ckpt_tools.storage.sink import Sink
from ckpt_tools.storage.source import OPEN_FILES_HINT, Descriptors, LocalSource
from ckpt_tools.units import format_size

_SYNC_FILE_RANGE_WRITE = 2
_SLICE_BYTES = 128 << 10
"""Bytes of one call to write. The kernel takes memory for its cache in pieces up to this size. Large ones come from
large free areas, which the host of a virtual machine has often taken back and must provide again, page by page: with
1 MiB at once the same run took up to twice as long. That is also about what cp asks for."""
_MARGIN_BYTES = 16 << 20
_libc = ctypes.CDLL(None, use_errno=True)


class Staging(Sink):
    """A directory of this machine under construction.

    Args:
        destination: The directory that `publish` makes appear.
        overwrite: Replace an existing destination, which stays in place until the new one is durable.

    Raises:
        DestinationExistsError: The destination exists and `overwrite` is false.
        UsageError: The destination's parent or the destination itself is a file.
    """

    def __init__(self, destination: str, *, overwrite: bool) -> None:
        self.destination = os.path.abspath(destination)
        self._overwrite = overwrite
        check_destination(destination, overwrite=overwrite)
        self._made = publish.make_parents(self.destination)
        try:
            self._parent = self._open_parent()
            try:
                self.directory, self._claim = self._claim_directory()
            except BaseException:
                os.close(self._parent)
                raise
        except BaseException:
            publish.remove_empty(self._made)
            raise
        self._files: list[str] = []
        self._parts: list[str] = []
        self._turns: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._descriptors = Descriptors(self._open)
        self._journal: JournalWriter | None = None
        self.records: Records = {}
        self._continues = False

    def _open_parent(self) -> int:
        # Now, so that nothing is written that could not be made durable in the end.
        parent = os.path.dirname(self.destination)
        try:
            return os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError(f"cannot open: {error.strerror}", where=parent) from error

    def _claim_directory(self) -> tuple[str, int]:
        """Return the staging directory, and the descriptor that holds its lock."""
        return claim_directory(self.destination)

    def _open(self, file: str) -> int:
        return os.open(os.path.join(self.directory, file), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)

    def begin(self, fingerprint: str | None = None) -> None:
        """Look at what is there: continue it when it is of this `fingerprint`, else remove it.

        Afterwards `records` holds what an interrupted run of this fingerprint had written, and `found_other`
        says whether the work of another one was removed. Without a fingerprint nothing is kept or recorded, nor on
        file systems without locks, where no later run can know that this directory is free.
        """
        if self.directory != staging_path(self.destination):
            fingerprint = None
        try:
            publish.put_back(self.directory, self.destination)
            # Somebody may have published between the caller's first look and our claim.
            check_destination(self.destination, overwrite=self._overwrite)
            found = None if fingerprint is None else read_journal(self.directory, fingerprint)
            if found is None:
                self.found_other = bool(os.listdir(self.directory))
                empty_directory(self.directory)
            if fingerprint is not None:
                self.records = found or {}
                self._continues = found is not None
                self._journal = JournalWriter(self.directory, fingerprint, continues=found is not None)
        except CkptError:
            raise
        except OSError as error:
            raise self._failed("prepare", self.directory, error) from error

    def record(self, tensor: int, block: int, record: BlockRecord) -> None:
        """Remember that a block is written."""
        if self._journal is not None:
            try:
                self._journal.append(tensor, block, record)
            except OSError as error:
                raise self._failed("write", self.directory, error) from error

    @property
    def num_kept(self) -> int:
        """Blocks, and parts whole or begun, that the next run of the same command could continue from."""
        count = len(self.records) + (self._journal.num_records if self._journal is not None else 0)
        return count + sum(os.path.lexists(path) or os.path.lexists(staging_path(path)) for path in self._parts)

    def begin_part(self, directory: str) -> str:
        """Return where a `Staging` of its own may build a directory that is published with the rest.

        It is there already when an interrupted run, whose work is continued, had come to its end.
        """
        path = os.path.join(self.directory, directory)
        self._parts.append(path)
        return path

    def create(self, file: str, nbytes: int, gaps: Iterable[tuple[int, int]] = ()) -> None:
        """Create `file` with `nbytes` of allocated space; one that is continued is kept when it has that size."""
        del gaps  # are zeros from the beginning
        if os.path.isabs(file) or ".." in file.split("/") or "\0" in file:
            raise UnreadableError("a file name leads out of the destination", where=file)
        path = os.path.join(self.directory, file)
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            self._files.append(file)
            if os.path.lexists(path):
                status = os.stat(path, follow_symlinks=False)
                is_own = stat.S_ISREG(status.st_mode) and (status.st_nlink, status.st_size) == (1, nbytes)
                if self.records and is_own:
                    return
                os.remove(path)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(path, flags, 0o666)
            try:
                if nbytes:
                    _allocate(descriptor, nbytes)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise self._failed("create", file, error) from error

    def read_into(self, file: str, offset: int, buffer: memoryview) -> bool:
        """Fill `buffer` with what is staged of `file`; False when it ends before or cannot be read."""
        with self._descriptors.use(file) as descriptor:
            while buffer:
                try:
                    count = os.preadv(descriptor, [buffer], offset)
                except OSError:
                    return False
                if count == 0:
                    return False
                offset += count
                buffer = buffer[count:]
        return True

    @property
    def kept_in(self) -> str:
        """The staging directory."""
        return self.directory

    def reader(self) -> LocalSource:
        """Open the staging directory."""
        return LocalSource(self.directory)

    def check_space(self, needed_bytes: int) -> None:
        """Hold what is needed against the free space, and the space that staged files already have."""
        check_space(needed_bytes - self.allocated_bytes(), self.destination)

    def allocated_bytes(self) -> int:
        """Return the disk space that staged files already have."""
        total = 0
        try:
            for directory, _, names in os.walk(self.directory):
                for name in names:
                    total += os.stat(os.path.join(directory, name), follow_symlinks=False).st_blocks * 512
        except OSError as error:
            raise self._failed("look at", self.directory, error) from error
        return total

    def write(self, file: str, offset: int, buffers: list[memoryview | bytes]) -> int:
        """Write `buffers`, one after the other, from `offset` on; return the number of bytes."""
        total = sum(map(len, buffers))
        # The kernel lets one thread at a time write to a file, and the others spin on their core until it is done:
        # better that they sleep.
        with self._descriptors.use(file) as descriptor:
            try:
                with self._turns[file]:
                    _write_all(descriptor, offset, buffers, total)
                if total >= 1 << 20:
                    # Start the write-back now, so that the fsync at the end finds little to do.
                    _libc.sync_file_range(
                        descriptor, ctypes.c_int64(offset), ctypes.c_int64(total), _SYNC_FILE_RANGE_WRITE
                    )
            except OSError as error:
                raise self._failed("write", file, error) from error
        return total

    def sync(self, file: str) -> None:
        """Make `file` durable. A failed fsync is never tried again: the kernel has dropped the pages."""
        with self._descriptors.use(file) as descriptor:
            try:
                os.fsync(descriptor)
            except OSError as error:
                raise self._failed("fsync", file, error) from error

    def adopt(self) -> dict[str, int]:
        """Take over the files that somebody else wrote into the directory, durably; return their sizes.

        Hidden files are not data and are left alone (see `take`).
        """
        sizes = {}
        with os.scandir(self.directory) as entries:
            for entry in sorted(entries, key=lambda e: e.name):
                if entry.is_file(follow_symlinks=False) and not entry.name.startswith("."):
                    sizes[entry.name] = entry.stat(follow_symlinks=False).st_size
        self._files += sizes
        for name in sizes:
            self.sync(name)
        return sizes

    def take(self, file: str) -> bytes:
        """Return the content of a file that somebody else wrote, and remove it."""
        path = os.path.join(self.directory, file)
        try:
            with open(path, "rb") as stream:
                content = stream.read()
            os.remove(path)
        except OSError as error:
            raise self._failed("read", file, error) from error
        return content

    def write_document(self, file: str, content: bytes) -> None:
        """Create `file` with `content` and make it durable."""
        self.create(file, len(content))
        self.write(file, 0, [content])
        self.sync(file)

    def publish(self) -> None:
        """Make the destination appear, whole and durable. Stop signals wait until that is done, or has failed.

        An old checkpoint that cannot be removed is no failure: see `left_behind`. After an error the destination is as
        it was, unless the message says otherwise.
        """
        self._descriptors.close()
        with hold_signals():
            try:
                if self._continues:
                    self._remove_others()
                self._publish()
            except publish.NotDurableError:
                self.is_published = True
                self._release()  # the old one, when there is one, stays where it is
                raise
            except CkptError:
                raise
            except OSError as error:
                raise self._failed("publish", "", error) from error
            self.is_published = True
            self._release()

    def _remove_others(self) -> None:
        """Remove what is in the directory and was never asked for: what is continued may have met anything."""
        mine = {os.path.normpath(file) for file in (*self._files, JOURNAL_NAME)}
        mine |= {part for file in self._files for part in _parents(file)}
        for directory, subdirectories, names in os.walk(self.directory):
            for name in [*subdirectories, *names]:
                path = os.path.join(directory, name)
                if path in self._parts:
                    subdirectories.remove(name)
                    continue
                if os.path.relpath(path, self.directory) in mine:
                    continue
                if os.path.isdir(path) and not os.path.islink(path):
                    shutil.rmtree(path)
                    subdirectories.remove(name)
                else:
                    os.remove(path)

    def _publish(self) -> None:
        for directory in sorted({part for file in self._files for part in _parents(file)}):
            publish.sync_directory(os.path.join(self.directory, directory))
        publish.sync_entries(self._claim)
        if self._journal is not None:
            # Last, so that a kill before loses nothing. From here on there is nothing to continue.
            self._journal.remove()
            self._journal, self.records = None, {}
        self.left_behind = publish.move_into_place(
            self.directory, self._claim, self.destination, self._parent, overwrite=self._overwrite
        )

    def keep(self) -> None:
        """Leave what is staged for the next run of the same command."""
        self._close()
        self._release()

    def discard(self) -> None:
        """Remove what was staged. Does nothing after `publish` or `keep`."""
        if self._claim < 0:
            return
        self._close()
        shutil.rmtree(self.directory, ignore_errors=True)
        self._release()

    def _close(self) -> None:
        self._descriptors.close()
        if self._journal is not None:
            self._journal.close()

    def _release(self) -> None:
        if self._parent < 0:
            return
        if self._claim >= 0:
            os.close(self._claim)
        os.close(self._parent)
        self._claim = self._parent = -1
        if not self.is_published:
            publish.remove_empty(self._made)  # not when work is kept there

    def _failed(self, verb: str, file: str, error: OSError) -> StorageError:
        hint = None
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "free some space there, or choose another destination; --dry-run shows how much is needed"
        if error.errno in (errno.EMFILE, errno.ENFILE):
            hint = OPEN_FILES_HINT
        what = f"cannot {verb}: {error.strerror or error}"
        return StorageError(what, where=os.path.join(self.destination, file) if file else self.destination, hint=hint)


def check_destination(destination: str, *, overwrite: bool) -> None:
    """Raise unless `destination` can be created (or, with `overwrite`, replaced)."""
    if "://" in destination:
        what = "this can only be written to this machine's disks"
        raise UsageError(what, where=destination, hint="write it to a disk, then copy it")
    parent = publish.nearest_parent(destination)
    if not os.path.isdir(parent):
        raise UsageError("the destination's parent is not a directory", where=parent)
    if not os.path.lexists(destination):
        return
    if not overwrite:
        what = "the destination exists"
        raise DestinationExistsError(what, where=destination, hint="choose another one, or add --overwrite")
    if os.path.islink(destination) or not os.path.isdir(destination):
        raise UsageError("only a directory can be overwritten, and this is not one", where=destination)


def free_bytes(destination: str) -> int:
    """Return the bytes that may still be written on the destination's file system."""
    parent = publish.nearest_parent(destination)
    try:
        status = os.statvfs(parent)
    except OSError as error:
        raise StorageError(f"cannot query the free space: {error.strerror}", where=parent) from error
    return status.f_bavail * status.f_frsize


def check_space(needed_bytes: int, destination: str) -> None:
    """Raise StorageError when the destination's file system has not enough room."""
    free = free_bytes(destination)
    if needed_bytes + _MARGIN_BYTES > free:
        what = f"{format_size(needed_bytes)} are needed, {format_size(free)} are free"
        where = os.path.dirname(os.path.abspath(destination))
        raise StorageError(what, where=where, hint="free some space there, or choose another destination")


def _parents(file: str) -> list[str]:
    """Return the directories that lead to `file`, relative to the root."""
    parts = file.split("/")[:-1]
    return ["/".join(parts[:i]) for i in range(1, len(parts) + 1)]


def _write_all(descriptor: int, offset: int, buffers: list[memoryview | bytes], nbytes: int) -> None:
    if nbytes <= _SLICE_BYTES:
        count = os.pwritev(descriptor, buffers, offset)
        if count == nbytes:
            return
        offset += count
        buffers = [b"".join(buffers)[count:]]
    for buffer in buffers:
        rest = memoryview(buffer)
        while rest:
            count = os.pwrite(descriptor, rest[:_SLICE_BYTES], offset)
            if not count:
                raise OSError(errno.EIO, "nothing more is written")
            offset += count
            rest = rest[count:]


def _allocate(descriptor: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(descriptor, nbytes)
