"""A run's folder on a file system.

Removing is a rename on the same file system, into a quarantine from which there is a way back: what is half removed
never has a checkpoint's name.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import shlex
import shutil
import socket
import stat
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from ckpt_tools.errors import LimitError, MissingError, StorageError, UsageError
from ckpt_tools.runs.folder import (
    LATEST_GOOD,
    MAX_READ_BYTES,
    TRASH_PREFIX,
    BusyError,
    Facts,
    Folder,
    FolderListing,
    SavedCheckpoint,
    gather_saved,
    parse_name,
    place_of,
    stamp_of,
)
from ckpt_tools.storage.claim import staging_path, try_lock
from ckpt_tools.storage.locations import likely
from ckpt_tools.storage.publish import sync_directory
from ckpt_tools.storage.run_leases import LEASE_PREFIX, RECORD_NAME, homes_of, is_locked
from ckpt_tools.storage.source import MAX_FILES
from ckpt_tools.text import first_few

_LOCK_NAME, _PART_NAME, _LINK_NAME = ".ckpt-tend.lock", ".ckpt-tend.part", ".ckpt-tend.link"
_TRASH = re.compile(r"([0-9a-f]{8,9})-([0-9a-f]+)-(.+)", re.ASCII | re.DOTALL)
_MOST_LINKS = 100_000
_OWN = (RECORD_NAME, _LOCK_NAME, _PART_NAME, _LINK_NAME)
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_RESERVED_BYTES = 64 << 10  # For a record, beside twice what the last one took
_COUNTED = re.compile(r"checkpoint_\d+", re.ASCII)
"""accelerate takes whatever lies beside these for one of them, counts it, and may load it as the latest: nothing of
ckpt's may lie there.

Source: accelerate 1.15 `accelerator.py`, `save_state` and `load_state` with automatic_checkpoint_naming.
"""


class DiskFolder(Folder):
    """A directory; see `Folder`."""

    unseen = ("use of a checkpoint on other machines, or by other users of this machine",)

    def __init__(self, path: str, also_used_by: Sequence[str] = ()) -> None:
        if not os.path.isdir(path):
            if os.path.lexists(path):
                raise UsageError("the run folder must be a directory", where=path)
            raise MissingError("no such directory", where=path, hint=likely(path))
        super().__init__(path)
        self._real = os.path.realpath(path)
        self._home = homes_of(self._real)[0]
        self._also = tuple(map(os.path.realpath, also_used_by))
        self._inodes: dict[str, set[tuple[int, int]]] = {}
        """Name in the folder → (device, inode) of all that is there."""
        self._leases: dict[str, str] = {}
        """Name in the folder → who holds it, by a file that says so."""

    def look(self) -> FolderListing:
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
        self._inodes, self._leases, self.notes = {}, {}, ()
        for name in _listed(self._home.directory):
            if (trash := self._own_trash(name)) is not None:
                leftovers[name] = place.name if (place := place_of(trash[3])) is not None else trash[3]
            elif self._home.tag and name.startswith(LEASE_PREFIX + self._home.tag):
                self._note_lease("", os.path.relpath(os.path.join(self._home.directory, name), self._real))
        for entry in entries:
            if entry.is_symlink():
                if entry.name not in (LATEST_GOOD, _LINK_NAME):  # a killed watch leaves the other one
                    self._note_link(links, entry.path, entry.name)
            elif entry.name.startswith(LEASE_PREFIX):
                self._note_lease("", entry.name)
            elif entry.name not in _OWN and entry.name not in leftovers:
                is_directory = entry.is_dir(follow_symlinks=False)
                known = parse_name(entry.name, is_directory=is_directory) is not None
                files, oddity = self._walk(entry.name, device, links) if known else ({}, "")
                items[entry.name] = (is_directory, files, oddity)
                if is_directory and not known:
                    self._note_links_below(links, entry.path)
        for directory in self._also:
            self._note_links_below(links, directory)
        saved, unknown = gather_saved(items)
        return FolderListing(saved=saved, unknown=unknown, links=links, leftovers=leftovers)

    def _choose_home(self, names: Collection[str]) -> None:
        self._home = homes_of(self._real)[any(map(_COUNTED.fullmatch, names))]

    def _walk(self, root: str, device: int, links: dict[str, str]) -> tuple[dict[str, Facts], str]:
        """Return the files at and below `root`, and what is odd. What vanishes meanwhile has changed."""
        files: dict[str, Facts] = {}
        oddity = ""
        pending = [root]
        while pending:
            name = pending.pop()
            path = os.path.join(self._real, name)
            try:
                if name.rpartition("/")[2].startswith(LEASE_PREFIX):
                    self._note_lease(root, name)
                    continue
                status = os.lstat(path)
                self._inodes.setdefault(root, set()).add((status.st_dev, status.st_ino))
                if stat.S_ISDIR(status.st_mode):
                    pending += [f"{name}/{child}" for child in os.listdir(path)]
                    if status.st_dev != device:
                        oddity = f"another file system is mounted at {name}"
                    continue
                version = f"{status.st_mtime_ns} {status.st_ino} {status.st_ctime_ns}"
                if status.st_nlink > 1:
                    oddity = f"{name} has a hard link elsewhere"
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
                oddity = f"cannot read {name}: {error.strerror}"
            if len(files) > MAX_FILES:
                raise LimitError(f"more than {MAX_FILES} files", where=os.path.join(self.path, root))
        return files, oddity

    def _note_links_below(self, links: dict[str, str], directory: str) -> None:
        """Remember the links in a directory that lead into checkpoints of the folder."""
        left = _MOST_LINKS
        for parent, directories, files in os.walk(directory):
            for name in (*directories, *files):
                if os.path.islink(path := os.path.join(parent, name)):
                    self._note_link(links, path, os.path.relpath(path, self._real))
            if (left := left - len(directories) - len(files)) < 0:
                self.notes += (f"more than {_MOST_LINKS} files below {directory}: links further on were not checked",)
                return

    def _note_lease(self, root: str, name: str) -> None:
        """Remember who holds a checkpoint, by a stale lease as well, but not of a process here that is gone."""
        path = os.path.join(self.path, name)
        try:
            found = json.loads(self.read(name, 1 << 16) or b"")
            root, who = root or str(found["checkpoint"]), f"{found['host']}:{found['pid']}"
            is_ours = found["host"] == socket.gethostname() and found.get("is_locked") is True
            if is_ours and is_locked(path) is False:  # its process is gone
                return
            ended = float(found["until"]) < time.time() and not (is_ours and is_locked(path))
        except (ValueError, KeyError, TypeError):
            who, ended = "somebody", True
        text = f"{who}, by a lease" + (
            f" that has expired or cannot be read (`rm {shlex.quote(path)}` ends it)" if ended else ""
        )
        self._leases.setdefault(root, text)
        if ended:
            self.notes += (f"{root or 'every checkpoint'} is kept for {text}",)

    def _note_link(self, links: dict[str, str], path: str, name: str) -> None:
        """Remember what a link leads to, if that is in another checkpoint of the folder."""
        with contextlib.suppress(OSError):
            target = os.path.relpath(os.path.realpath(path), self._real).partition("/")[0]
            if target not in (os.pardir, name.partition("/")[0]):
                links.setdefault(target, name)

    def read(self, file: str, max_bytes: int = MAX_READ_BYTES) -> bytes | None:
        """Return the beginning of a file; never of a link or a pipe."""
        path = self._home.path(file) if file in _OWN else os.path.join(self._real, file)
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with open(os.open(path, flags), "rb") as stream:
                return stream.read(max_bytes) if stat.S_ISREG(os.fstat(stream.fileno()).st_mode) else None
        except OSError:
            return None

    def write(self, file: str, content: bytes) -> None:
        """Replace a file at once, and durably, by way of one whose space is reserved."""
        path, part = self._home.path(file), self._home.path(_PART_NAME)
        try:
            with open(os.open(part, _FLAGS, 0o666), "r+b") as stream:
                stream.write(content)
                stream.truncate()
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(part, path)
            sync_directory(self._home.directory)
        except OSError as error:
            raise StorageError(f"cannot write: {error.strerror}", where=path) from error
        self._reserve(len(content))

    def _reserve(self, nbytes: int) -> None:
        """Keep space for the next record, so that a full disk costs no verification."""
        with contextlib.suppress(OSError), open(os.open(self._home.path(_PART_NAME), _FLAGS, 0o666), "r+b") as stream:
            os.posix_fallocate(stream.fileno(), 0, 2 * nbytes + _RESERVED_BYTES)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold a lock on a file of the folder's own; where there are no locks, nothing keeps another one out."""
        self._choose_home(_listed(self._real))
        try:
            descriptor = os.open(self._home.path(_LOCK_NAME), _FLAGS, 0o666)
        except OSError as error:
            raise StorageError(f"cannot write here: {error.strerror}", where=self.path) from error
        try:
            try:
                try_lock(descriptor, fcntl.LOCK_EX)
            except BlockingIOError:
                raise BusyError("another ckpt manages this folder", where=self.path, hint="wait for it") from None
            self._reserve(0)
            yield
        finally:
            os.close(descriptor)

    def users(self, saved: Collection[SavedCheckpoint]) -> Mapping[str, str]:
        """Look for locks and claims of ckpt's, and for open and mapped files of processes that may be looked at."""
        found: dict[str, str] = {}
        used, hidden = _used_by_processes()
        more = f" ({len(hidden)} processes here: {first_few(hidden)})" if hidden else ""
        self.unseen = (DiskFolder.unseen[0] + more,)
        for name, root in ((each.name, root) for each in saved for root in each.roots):
            path = os.path.join(self._real, root)
            pids = (f"process {used[inode]}" for inode in self._inodes.get(root, set()) & used.keys())
            is_written = os.path.lexists(staging_path(path)) or is_locked(path)
            who = "a ckpt process that is writing it" if is_written else self._leases.get(root) or self._leases.get("")
            if who := who or next(pids, ""):
                found.setdefault(name, who)
        return found

    def remove(self, saved: Sequence[SavedCheckpoint]) -> list[str]:
        """Rename them, which takes no space, see that nobody came in between, and put back what somebody uses."""
        moved: dict[str, dict[str, str]] = {}
        """Name → what was renamed of it → its path now."""
        for each in saved:
            ours = moved.setdefault(each.name, {})
            try:
                for root in each.roots:
                    path = os.path.join(self._real, root)
                    ours[root] = self._put_away(path, root, time.time())
            except FileNotFoundError:  # the trainer has removed it itself
                self._put_back(moved.pop(each.name))
            except OSError as error:
                for roots in moved.values():
                    self._put_back(roots)
                where = os.path.join(self.path, each.name)
                raise StorageError(f"cannot remove: {error.strerror}", where=where) from error
        for directory in {self._real, self._home.directory}:
            sync_directory(directory)
        device, (used, _) = os.stat(self._real).st_dev, _used_by_processes()
        for each in saved:
            now, is_used = {}, False
            for root, path in moved.get(each.name, {}).items():
                inside = os.path.relpath(path, self._real)
                files, _ = self._walk(inside, device, {})
                now.update({root + name[len(inside) :]: facts for name, facts in files.items()})
                is_used = is_used or inside in self._leases or bool(self._inodes.get(inside, set()) & used.keys())
            if each.name in moved and (is_used or _own_files(now) != _own_files(each.files)):
                self._put_back(moved.pop(each.name))
        return list(moved)

    def _put_away(self, path: str, root: str, since: float) -> str:
        """Rename into quarantine, or with 0 for `since` to where there is no way back from; return the path."""
        name = f"{TRASH_PREFIX}{self._home.tag}{int(since):08x}-{os.lstat(path).st_ino:x}-{root}"
        trash = os.path.join(self._home.directory, name)
        os.rename(path, trash)
        return trash

    def _own_trash(self, name: str) -> re.Match[str] | None:
        """Return when this was put away by ckpt, its inode and its name: no copy and nothing else has that inode."""
        start = TRASH_PREFIX + self._home.tag
        found = _TRASH.fullmatch(name[len(start) :]) if name.startswith(start) else None
        with contextlib.suppress(OSError):
            if found and os.lstat(os.path.join(self._home.directory, name)).st_ino == int(found[2], 16):
                return found
        return None

    def age(self, leftover: str) -> float:
        """Return for how many seconds it is in quarantine, by its name; inf where its removal has begun."""
        found = self._own_trash(leftover)
        since = 0 if found is None else int(found[1], 16)
        return time.time() - since if since else math.inf

    def restore(self, names: Collection[str]) -> list[str]:
        """Rename back what has these names, the latest removed first."""
        back: list[str] = []
        for leftover, name in sorted(self.look().leftovers.items(), reverse=True):
            trash = self._own_trash(leftover) if self.age(leftover) < math.inf else None
            if trash and (not names or name in names) and not os.path.lexists(os.path.join(self._real, trash[3])):
                os.rename(os.path.join(self._home.directory, leftover), os.path.join(self._real, trash[3]))
                back.append(name)
        sync_directory(self._real)
        return [*dict.fromkeys(back)]

    def stamp(self, saved: SavedCheckpoint) -> str:
        """Walk it again."""
        device, files = os.stat(self._real).st_dev, {}
        for root in saved.roots:
            files.update(self._walk(root, device, {})[0])
        return stamp_of(files)

    def forget(self, saved: SavedCheckpoint) -> None:
        """Drop its pages from memory, where the kernel does."""
        for file in saved.files:
            with contextlib.suppress(OSError):
                descriptor = os.open(os.path.join(self._real, file), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                try:
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(descriptor)

    def free_bytes(self) -> float:
        """Return how much space the file system has for this user."""
        found = os.statvfs(self._home.directory)
        return found.f_bavail * found.f_frsize if found.f_favail or not found.f_files else 0

    def point(self, name: str) -> None:
        """Let the link lead there at once; what is called so and is no link is left alone."""
        tag = f"{os.path.basename(self._real)}-" if self._home.tag else ""
        path, part = os.path.join(self._home.directory, tag + LATEST_GOOD), self._home.path(_LINK_NAME)
        target = os.path.relpath(os.path.join(self._real, name), self._home.directory)
        if not name or (os.path.lexists(path) and not os.path.islink(path)):
            return
        with contextlib.suppress(OSError):  # a help, and nothing depends on it
            if not os.path.islink(path) or os.readlink(path) != target:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(part)
                os.symlink(target, part)
                os.replace(part, path)

    def _put_back(self, roots: Mapping[str, str]) -> None:
        for root, path in roots.items():
            if not os.path.lexists(os.path.join(self._real, root)):
                os.rename(path, os.path.join(self._real, root))

    def remove_leftover(self, name: str) -> None:
        """Remove what was renamed away, from which there is no way back then; links in it are never followed."""
        path, trash = os.path.join(self._home.directory, name), self._own_trash(name)
        if trash is None:
            return
        try:
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(self._put_away(path, trash[3], since=0))
            else:
                os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise StorageError(f"cannot remove: {error.strerror}", where=os.path.join(self.path, name)) from error


def _own_files(files: Mapping[str, Facts]) -> dict[str, Facts]:
    """Return the files without links, which lead elsewhere from another place, and times that a rename changes."""
    own = {name: facts for name, facts in files.items() if not facts.version.startswith("link ")}
    return {name: replace(facts, version=facts.version.rpartition(" ")[0]) for name, facts in own.items()}


def _used_by_processes() -> tuple[dict[tuple[int, int], str], list[str]]:
    """Return (device, inode) of what is open or mapped, or a working directory → process; and who cannot be seen."""
    used: dict[tuple[int, int], str] = {}
    hidden = []
    for pid in filter(str.isdigit, _listed("/proc")):
        try:
            numbers = os.listdir(f"/proc/{pid}/fd")
        except PermissionError:
            hidden.append(pid)
            continue
        except OSError:
            continue
        for link in ("cwd", "root", *(f"fd/{number}" for number in numbers)):
            with contextlib.suppress(OSError):
                found = os.stat(f"/proc/{pid}/{link}")
                used.setdefault((found.st_dev, found.st_ino), pid)
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/maps", "rb") as lines:
            for line in lines:
                _, _, _, device, inode, *path = line.split(maxsplit=5)
                if inode != b"0":
                    major, minor = (int(part, 16) for part in device.split(b":"))
                    used.setdefault((os.makedev(major, minor), int(inode)), pid)
                    with contextlib.suppress(OSError):  # of some file systems maps tell another device
                        found = os.stat(path[0].rstrip(b"\n") if path else b"")
                        used.setdefault((found.st_dev, found.st_ino), pid)
    return used, hidden


def _listed(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []
