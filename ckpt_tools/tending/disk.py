"""A run's folder on a file system.

Removing begins with a rename on the same file system: what is half removed never has a checkpoint's name.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import stat
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from ckpt_tools.errors import LimitError, StorageError, UnreadableError, UsageError
from ckpt_tools.storage.claim import NO_LOCKS, staging_path
from ckpt_tools.storage.publish import replace_file, sync_directory
from ckpt_tools.storage.source import MAX_FILES
from ckpt_tools.tending.folder import (
    MAX_READ_BYTES,
    TRASH_PREFIX,
    BusyError,
    Facts,
    Folder,
    Look,
    Saved,
    gather_saved,
)
from ckpt_tools.tending.record import RECORD_NAME
from ckpt_tools.tending.series import parse_name

_LOCK_NAME = ".ckpt-tend.lock"
_OWN = (RECORD_NAME, _LOCK_NAME)
_COUNTED = re.compile(r"checkpoint_\d+", re.ASCII)
"""accelerate takes whatever lies beside these for one of them, counts it, and may load it as the latest: nothing of
ckpt's may lie there.

Source: accelerate 1.15 `accelerator.py`, `save_state` and `load_state` with automatic_checkpoint_naming.
"""


class DiskFolder(Folder):
    """A directory; see `Folder`."""

    unseen = ("who uses a checkpoint on other machines, or as another user of this one",)

    def __init__(self, path: str) -> None:
        if not os.path.isdir(path):
            if os.path.lexists(path):
                raise UsageError("a run's folder is a directory", where=path)
            raise UnreadableError("no such directory", where=path)
        super().__init__(path)
        self._real = os.path.realpath(path)
        self._home, self._tag = self._real, ""
        """Where files of the folder's own lie, and what their names have to tell from those of other folders."""

    def look(self) -> Look:
        """List it; what is directly in it and no checkpoint by its name is not looked into."""
        items: dict[str, tuple[bool, Mapping[str, Facts], str]] = {}
        links: dict[str, str] = {}
        leftovers = {}
        try:
            device = os.stat(self._real).st_dev
            with os.scandir(self._real) as scan:
                entries = sorted(scan, key=lambda entry: entry.name)
        except OSError as error:
            raise StorageError(f"cannot list: {error.strerror}", where=self.path) from error
        self._choose_home([entry.name for entry in entries])
        for name in _listed(self._home) if self._tag else ():
            if name.startswith(TRASH_PREFIX + self._tag):
                leftovers[f"../{name}"] = tuple(sorted(_listed(os.path.join(self._home, name))))
        for entry in entries:
            if entry.is_symlink():
                self._note_link(links, entry.path, entry.name)
            elif entry.name.startswith(TRASH_PREFIX):
                leftovers[entry.name] = tuple(sorted(_listed(entry.path)))
            elif entry.name not in _OWN:
                is_directory = entry.is_dir(follow_symlinks=False)
                known = parse_name(entry.name, is_directory=is_directory) is not None
                files, oddity = self._walk(entry.name, device, links) if known else ({}, "")
                items[entry.name] = (is_directory, files, oddity)
        saved, unknown = gather_saved(items)
        return Look(saved=saved, unknown=unknown, links=links, leftovers=leftovers)

    def _choose_home(self, names: Collection[str]) -> None:
        if any(map(_COUNTED.fullmatch, names)):
            self._home = os.path.dirname(self._real)
            self._tag = hashlib.sha256(os.fsencode(os.path.basename(self._real))).hexdigest()[:8] + "-"

    def _walk(self, root: str, device: int, links: dict[str, str]) -> tuple[dict[str, Facts], str]:
        """Return the files at and below `root`, and what is odd. What vanishes meanwhile has changed."""
        files: dict[str, Facts] = {}
        oddity = ""
        pending = [root]
        while pending:
            name = pending.pop()
            path = os.path.join(self._real, name)
            try:
                status = os.lstat(path)
                if stat.S_ISDIR(status.st_mode):
                    pending += [f"{name}/{child}" for child in os.listdir(path)]
                    if status.st_dev != device:
                        oddity = f"another file system is mounted at {name}"
                    continue
                version = str(status.st_mtime_ns)
                if stat.S_ISLNK(status.st_mode):
                    self._note_link(links, path, name)
                    version = f"link {os.readlink(path)}"
                    with contextlib.suppress(OSError):
                        status = os.stat(path)
                        version += f" {status.st_mtime_ns}"
                files[name] = Facts(nbytes=status.st_size, version=version)
            except FileNotFoundError:
                files[name] = Facts(nbytes=0, version="vanished")
            except OSError as error:
                oddity = f"cannot look at {name}: {error.strerror}"
            if len(files) > MAX_FILES:
                raise LimitError(f"more than {MAX_FILES} files", where=os.path.join(self.path, root))
        return files, oddity

    def _note_link(self, links: dict[str, str], path: str, name: str) -> None:
        """Remember what a link leads to, if that is in another checkpoint of the folder."""
        with contextlib.suppress(OSError):
            target = os.path.relpath(os.path.realpath(path), self._real).partition("/")[0]
            if target not in (os.pardir, name.partition("/")[0]):
                links.setdefault(target, name)

    def read(self, file: str, max_bytes: int = MAX_READ_BYTES) -> bytes | None:
        """Return the beginning of a file; never of a link or a pipe."""
        path = self._own(file) if file in _OWN else os.path.join(self._real, file)
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with open(os.open(path, flags), "rb") as stream:
                return stream.read(max_bytes) if stat.S_ISREG(os.fstat(stream.fileno()).st_mode) else None
        except OSError:
            return None

    def write(self, file: str, content: bytes) -> None:
        """Replace a file at once, and durably."""
        part = os.path.join(self._home, f"{TRASH_PREFIX}{self._tag}{uuid.uuid4().hex[:8]}")
        replace_file(self._own(file), content, part)

    def _own(self, file: str) -> str:
        """Return the path of a file of the folder's own."""
        name, dot, end = file.rpartition(".")
        return os.path.join(self._home, f"{name}-{self._tag[:-1]}{dot}{end}" if self._tag else file)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold a lock on a file of the folder's own; where there are no locks, nothing keeps another one out."""
        self._choose_home(_listed(self._real))
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(self._own(_LOCK_NAME), flags, 0o666)
        except OSError as error:
            raise StorageError(f"cannot write here: {error.strerror}", where=self.path) from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BusyError("another ckpt tends this folder", where=self.path, hint="wait for it") from None
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
            yield
        finally:
            os.close(descriptor)

    def users(self, saved: Collection[Saved]) -> Mapping[str, str]:
        """Look for locks and claims of ckpt's, and for open and mapped files of processes that may be looked at."""
        owners = {root: each.name for each in saved for root in each.roots}
        found: dict[str, str] = {}
        for root, name in owners.items():
            path = os.path.join(self._real, root)
            if os.path.lexists(staging_path(path)) or _is_locked(path):
                found[name] = "a ckpt that is writing it"
        for pid, path in _open_files():
            if path.startswith(self._real + os.sep):
                root = path[len(self._real) + 1 :].partition("/")[0]
                if root in owners:
                    found.setdefault(owners[root], f"process {pid}")
        return found

    def remove(self, saved: Saved) -> bool:
        """Rename it away, see that nobody came in between, and remove it."""
        trash = os.path.join(self._home, f"{TRASH_PREFIX}{self._tag}{uuid.uuid4().hex[:8]}")
        moved: list[str] = []
        try:
            os.mkdir(trash, 0o700)
            for root in saved.roots:
                os.rename(os.path.join(self._real, root), os.path.join(trash, root))
                moved.append(root)
            sync_directory(trash)
            sync_directory(self._real)
            sync_directory(self._home)
        except FileNotFoundError:  # the trainer has removed it itself
            self._put_back(trash, moved)
            return False
        except OSError as error:
            self._put_back(trash, moved)
            where = os.path.join(self.path, saved.name)
            raise StorageError(f"cannot remove: {error.strerror}", where=where) from error
        inside = os.path.relpath(trash, self._real)
        device = os.stat(self._real).st_dev
        now = {}
        for root in saved.roots:
            files, _ = self._walk(f"{inside}/{root}", device, {})
            now.update({name[len(inside) + 1 :]: facts for name, facts in files.items()})
        if _own_files(now) != _own_files(saved.files) or any(
            path.startswith(trash + os.sep) for _, path in _open_files()
        ):
            self._put_back(trash, moved)
            return False
        self.remove_leftover(inside)
        return True

    def _put_back(self, trash: str, roots: Collection[str]) -> None:
        for root in roots:
            if not os.path.lexists(os.path.join(self._real, root)):
                os.rename(os.path.join(trash, root), os.path.join(self._real, root))
        with contextlib.suppress(OSError):
            os.rmdir(trash)

    def remove_leftover(self, name: str) -> None:
        """Remove what was renamed away; links in it are removed, never followed."""
        path = os.path.join(self._real, name)
        try:
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise StorageError(f"cannot remove: {error.strerror}", where=os.path.join(self.path, name)) from error


def _own_files(files: Mapping[str, Facts]) -> dict[str, Facts]:
    """Return the files without links, which lead elsewhere from another place."""
    return {name: facts for name, facts in files.items() if not facts.version.startswith("link ")}


def _is_locked(path: str) -> bool:
    """Does a ckpt hold the lock of this directory?"""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _open_files() -> Iterator[tuple[str, str]]:
    """Yield (process, path) of open and mapped files, of the processes that this one may look at."""
    for pid in filter(str.isdigit, _listed("/proc")):
        for number in _listed(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                yield pid, os.readlink(f"/proc/{pid}/fd/{number}")
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as lines:
            for line in lines:
                if b"/" in line:
                    yield pid, os.fsdecode(line[line.index(b"/") :].rstrip(b"\n"))


def _listed(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []
