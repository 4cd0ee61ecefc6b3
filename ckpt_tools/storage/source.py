"""Read byte ranges of the files below one root: contained, and watched for change.

`Source` is what everything above asks for, `LocalSource` a directory: pread only. `mmap` is not used: an I/O error or a
truncation under a mapping is a SIGBUS that nothing can catch.
"""

from __future__ import annotations

import errno
import os
import resource
import stat
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Self, TypeVar

from ckpt_tools.errors import CkptError, LimitError, MissingError, StorageError, UnreadableError
from ckpt_tools.storage import safe_open
from ckpt_tools.text import is_plain_path

LOST_HINT = "ckpt verify lists what is lost with it; restore the file, or use another copy"

# Read a small document that a user names by its path: a config, rules. Never waits, never reads without end

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def read_named_file(
    path: str, *, what: str, max_bytes: int, refusal: type[CkptError] = UnreadableError, hint: str | None = None
) -> bytes:
    """Return the content of a regular file; links are followed.

    `refusal` is raised when there is no such file, or something else: a pipe would have to be waited for, and opening a
    device can do something. `hint` is what to do then.
    """
    try:
        _check_regular(os.stat(path), what, path, refusal, hint)
        # Whatever has come in its place meanwhile, opening it does not wait.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            _check_regular(os.fstat(descriptor), what, path, refusal, hint)
            content = file.read(max_bytes + 1)
    except (FileNotFoundError, NotADirectoryError):
        from ckpt_tools.storage.locations import likely

        kind = MissingError if refusal is UnreadableError else refusal
        raise kind(f"cannot read {what}: no such file", where=path, hint=likely(path) or hint) from None
    except ValueError as error:  # a NUL in the path, or what no path can hold
        raise refusal(f"this is not a path: {error}", where=path, hint=hint) from None
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ELOOP, errno.ENAMETOOLONG):
            raise refusal(f"expected {what}: {error.strerror}", where=path, hint=hint) from error
        raise StorageError(f"cannot read {what}: {error.strerror}", where=path) from error
    if len(content) > max_bytes:
        raise LimitError(f"{what} of more than {max_bytes} bytes", where=path, hint=hint)
    return content


def _check_regular(status: os.stat_result, what: str, path: str, refusal: type[CkptError], hint: str | None) -> None:
    if not stat.S_ISREG(status.st_mode):
        found = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        if found == "a pipe" and hint is None:
            hint = "write it to a file first, and pass that"
        raise refusal(f"expected {what}, found {found}", where=path, hint=hint)


T = TypeVar("T")

MAX_OPEN_FILES = 256  # Descriptors that one cache keeps open; least recently used ones are closed first
MAX_FILES = 1_000_000
MAX_LISTED_DEPTH = 3  # Directories below the root in which files are looked for
OPEN_FILES_HINT = "raise the limit of open files: ulimit -n 4096"  # What to do about EMFILE and ENFILE

_OTHER_DESCRIPTORS = 12  # Descriptors that are needed beside those caches: streams, the journal, directories

_Identity = tuple[int, int, int, int]


class Descriptors:
    """A bounded cache of open file descriptors that many threads share; `opener` makes them, of relative names."""

    def __init__(self, opener: Callable[[str], int], limit: int | None = None) -> None:
        self._opener = opener
        self._limit = _affordable_files() if limit is None else limit
        self._lock = threading.Lock()
        self._open: OrderedDict[str, list[int]] = OrderedDict()  # file → [descriptor, users]

    def use(self, file: str) -> Lease:
        """Lend the descriptor of `file` to a `with`, opening it when needed."""
        with self._lock:
            slot = self._open.get(file)
            if slot is None:
                self._close_idle()
                slot = self._open[file] = [self._opener(file), 0]
            else:
                self._open.move_to_end(file)
            slot[1] += 1
        return Lease(self._lock, slot)

    def _close_idle(self) -> None:
        if len(self._open) < self._limit:
            return
        for file, (descriptor, users) in self._open.items():
            if users == 0:
                del self._open[file]
                os.close(descriptor)
                return

    def close(self) -> None:
        """Close every descriptor."""
        with self._lock:
            for descriptor, _ in self._open.values():
                os.close(descriptor)
            self._open.clear()


class Lease:
    """A descriptor while it is used; a class of its own, as a generator takes longer than many a read."""

    __slots__ = ("_lock", "_slot")

    def __init__(self, lock: threading.Lock, slot: list[int]) -> None:
        self._lock = lock
        self._slot = slot

    def __enter__(self) -> int:
        return self._slot[0]

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._slot[1] -= 1


class Source(ABC):
    """The files below one root, read only."""

    root: str  # As the user named it, for messages and to find what lies beside; never with a secret in it
    notes: tuple[str, ...] = ()  # What people should know of how it is read

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def changed(self, file: str) -> CkptError:
        """Return the error for a file that is no longer the one that was looked at."""
        hint = "wait until its writer has finished, then run the command again"
        return CkptError("the source changed while it was read", where=self.label(file), hint=hint)

    @property
    def place(self) -> str:
        """One name for the root, however it was reached: what identifies a source beside what `identities` says."""
        return self.root

    @abstractmethod
    def list_files(self, *, max_depth: int = MAX_LISTED_DEPTH, max_files: int = MAX_FILES) -> dict[str, int]:
        """Return {relative name: size in bytes} down to `max_depth` directories, in order; hidden ones are left out."""

    @abstractmethod
    def size(self, file: str) -> int:
        """Return the size of `file` in bytes."""

    @abstractmethod
    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of `file` that begin at `offset`; from any thread.

        A file that ends before is an `UnreadableError`, one that has changed since it was first looked at a
        `CkptError`.
        """

    @abstractmethod
    def identities(self) -> dict[str, Mapping[str, object]]:
        """Return, of every file that was opened, what tells it from another version of it, `nbytes` first."""

    @abstractmethod
    def check_unchanged(self) -> None:
        """Raise CkptError when a file that was read has changed since it was first opened."""

    @abstractmethod
    def close(self) -> None:
        """Free what it holds."""

    def prefetch(self, ranges: Iterable[tuple[str, int, int]]) -> None:  # noqa: B027 - nothing to do for most
        """Be told of (file, offset, bytes) that will be read soon, each small; a remote source gets them at once.

        What lies outside of its file is passed over: reading it says so.
        """

    def read(self, file: str, offset: int, nbytes: int) -> bytes:
        """Return exactly the bytes [offset, offset + nbytes) of `file`."""
        size = self.size(file)
        if offset < 0 or nbytes < 0 or offset + nbytes > size:
            raise short_file(self.label(file), offset, nbytes, size)
        buffer = bytearray(nbytes)
        self.read_into(file, offset, memoryview(buffer))
        return bytes(buffer)

    def each(self, work: Callable[[str], T], files: Sequence[str]) -> list[T]:
        """Return what `work` makes of every file, in order; several at a time where it would mostly wait."""
        return [work(file) for file in files]

    def label(self, file: str) -> str:
        """Return how messages name a file."""
        return os.path.join(self.root, file)


class LocalSource(Source):
    """The files below the directory `root`.

    Links are followed inside of the root, and from a snapshot of the hub's cache into the blobs of its repository;
    everything else that leads out is refused, by the kernel where it has `openat2`.

    Args:
        root: A directory. Files are named relative to it, with forward slashes.

    Raises:
        StorageError: The directory cannot be opened.
    """

    def __init__(self, root: str) -> None:
        self.root = root
        self._real_root = os.path.realpath(root)
        self._blobs = _hub_cache_blobs(self._real_root)
        self._identities: dict[str, _Identity] = {}
        self._descriptors = Descriptors(self.open)
        self._directories: dict[str, int] = {}
        if safe_open.is_available():
            try:
                self._directories[self._real_root] = safe_open.open_directory(self._real_root)
            except OSError as error:
                raise _failed("open", root, error) from error

    @property
    def place(self) -> str:
        """The real path of the root."""
        return self._real_root

    def list_files(self, *, max_depth: int = MAX_LISTED_DEPTH, max_files: int = MAX_FILES) -> dict[str, int]:
        """Return the regular files. Symbolic links to directories are not followed."""
        found: dict[str, int] = {}
        pending = [("", 0)]
        while pending:
            prefix, depth = pending.pop()
            try:
                with os.scandir(os.path.join(self._real_root, prefix)) as scan:
                    entries = sorted(scan, key=lambda entry: entry.name)
                for entry in entries:
                    name = prefix + entry.name
                    if entry.is_dir(follow_symlinks=False):
                        if depth < max_depth and not entry.name.startswith("."):
                            pending.append((name + "/", depth + 1))
                        continue
                    size = _regular_size(entry)
                    if size is not None:
                        found[name] = size
                    if len(found) > max_files:
                        raise LimitError(f"more than {max_files} files", where=self.root)
            except OSError as error:
                if prefix.endswith("lost+found/") and isinstance(error, PermissionError):  # the file system's own
                    continue
                raise _failed("list", self.label(prefix), error) from error
        return dict(sorted(found.items()))

    def path(self, file: str) -> str:
        """Return the real path of `file`, which must not lead out of the root, but for the hub cache's own blobs."""
        if not is_plain_path(file):
            raise UnreadableError("a file name leads out of the checkpoint or is not a plain relative name", where=file)
        try:
            real = os.path.realpath(os.path.join(self._real_root, file))
        except OSError as error:  # a link that is none any more when it is read
            raise self.changed(file) from error
        if not real.startswith(self._real_root.rstrip(os.sep) + os.sep) and not self._is_blob(real):
            what = "a symbolic link leads out of the checkpoint"
            raise UnreadableError(what, where=file, hint="copy the file into the directory if you trust it")
        return real

    def _is_blob(self, real: str) -> bool:
        return self._blobs is not None and os.path.dirname(real) == self._blobs

    def open(self, file: str) -> int:
        """Return a new descriptor of the regular file `file` and remember its identity."""
        path = self.path(file)
        try:
            # Opening a device can do something, and opening a pipe wait: look without opening first.
            probe = self._open(path, os.O_PATH)
            seen = os.fstat(probe)
            os.close(probe)
            if not stat.S_ISREG(seen.st_mode):
                raise UnreadableError("not a regular file", where=self.label(file))
            descriptor = self._open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
            status = os.fstat(descriptor)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise UnreadableError("a file is missing", where=self.label(file), hint=LOST_HINT) from error
        except OSError as error:
            if error.errno in (errno.EXDEV, errno.ELOOP):  # or a link came to be since its path was resolved
                what = "a symbolic link leads in a circle, or was changed meanwhile"
                raise UnreadableError(what, where=self.label(file)) from error
            raise _failed("open", self.label(file), error) from error
        identity = _identity(status)
        is_same = (status.st_dev, status.st_ino) == (seen.st_dev, seen.st_ino)
        if not is_same or self._identities.setdefault(file, identity) != identity:
            os.close(descriptor)
            raise self.changed(file)
        return descriptor

    def _open(self, path: str, flags: int) -> int:
        """Open a real path; a link that is put into it meanwhile is not followed."""
        if not self._directories:
            return _open_and_look(path, flags)
        root = os.path.dirname(path) if self._is_blob(path) else self._real_root
        if root not in self._directories:
            self._directories[root] = safe_open.open_directory(root)
        return safe_open.open_beneath(self._directories[root], root, os.path.relpath(path, root), flags)

    def size(self, file: str) -> int:
        """Return the size of `file` in bytes."""
        if file not in self._identities:
            with self._descriptors.use(file):
                pass
        return self._identities[file][0]

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of `file` that begin at `offset`; see `Source`."""
        with self._descriptors.use(file) as descriptor:
            position, remaining = offset, buffer
            while remaining:
                try:
                    count = os.preadv(descriptor, [remaining], position)
                except OSError as error:
                    raise _failed("read", self.label(file), error) from error
                if count == 0:
                    raise short_file(self.label(file), offset, len(buffer), self._identities[file][0])
                position += count
                remaining = remaining[count:]

    def identities(self) -> dict[str, Mapping[str, object]]:
        """Return size, modification time and inode of every file that was opened."""
        return {
            file: {"nbytes": identity[0], "mtime_ns": identity[1], "inode": identity[2]}
            for file, identity in sorted(self._identities.items())
        }

    def check_unchanged(self) -> None:
        """Raise CkptError when a file that was read has changed since it was first opened."""
        for file, identity in self._identities.items():
            try:
                now = _identity(os.stat(self.path(file)))
            except (FileNotFoundError, NotADirectoryError) as error:
                raise self.changed(file) from error
            except OSError as error:
                raise _failed("look at", self.label(file), error) from error
            if now != identity:
                raise self.changed(file)

    def close(self) -> None:
        """Close every descriptor."""
        self._descriptors.close()
        for descriptor in self._directories.values():
            os.close(descriptor)
        self._directories.clear()


def short_file(where: str, offset: int, nbytes: int, found: int, *, what: str = "") -> UnreadableError:
    """Return the error for a file of `found` bytes that must have `nbytes` from `offset` on, for `what`."""
    said = f"{what}bytes {offset}..{offset + nbytes} are needed, the file has {found}"
    return UnreadableError(said, where=where, hint="the file is truncated: restore it or copy it again")


def _affordable_files() -> int:
    """Return how many files one cache may keep open: reading and writing share what the system allows a process."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return MAX_OPEN_FILES
    return max(2, min(MAX_OPEN_FILES, (allowed - _OTHER_DESCRIPTORS) // 3))


def _hub_cache_blobs(real_root: str) -> str | None:
    """Return the blobs directory of the hub cache's repository when `real_root` is one of its snapshots.

    Source: huggingface_hub, "Understand caching": snapshots/<revision>/<file> → ../../blobs/<hash>.
    """
    for root in (real_root, os.path.dirname(real_root), os.path.dirname(os.path.dirname(real_root))):
        snapshots = os.path.dirname(root)
        if os.path.basename(snapshots) == "snapshots":
            return os.path.join(os.path.dirname(snapshots), "blobs")
    return None


def _regular_size(entry: os.DirEntry[str]) -> int | None:
    """Return the size of a regular file. A dangling link holds nothing: whoever needs it says that it is missing."""
    try:
        return entry.stat().st_size if entry.is_file() else None
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR):
            return None
        raise


def _open_and_look(path: str, flags: int) -> int:
    """Open a real path where there is no openat2, and see afterwards whether it was this one."""
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        found = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:  # no /proc either: the path was right a moment ago
        return descriptor
    if found != path:
        os.close(descriptor)
        raise OSError(errno.ELOOP, "a link was put into the path meanwhile", path)
    return descriptor


def _identity(status: os.stat_result) -> _Identity:
    return (status.st_size, status.st_mtime_ns, status.st_ino, status.st_dev)


def _failed(verb: str, label: str, error: OSError) -> StorageError:
    hint = OPEN_FILES_HINT if error.errno in (errno.EMFILE, errno.ENFILE) else None
    return StorageError(f"cannot {verb}: {error.strerror or error}", where=label, hint=hint)
