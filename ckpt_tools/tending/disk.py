"""A run's folder on a file system.

Removing is a rename on the same file system, into a quarantine from which there is a way back: what is half removed
never has a checkpoint's name.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import stat
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from ckpt_tools.errors import LimitError, StorageError, UnreadableError, UsageError
from ckpt_tools.storage.claim import NO_LOCKS, staging_path
from ckpt_tools.storage.publish import replace_file, sync_directory
from ckpt_tools.storage.source import MAX_FILES
from ckpt_tools.tending.folder import (
    LATEST_GOOD,
    MAX_READ_BYTES,
    TRASH_PREFIX,
    BusyError,
    Facts,
    Folder,
    Look,
    Saved,
    gather_saved,
    stamp_of,
)
from ckpt_tools.tending.record import RECORD_NAME
from ckpt_tools.tending.series import parse_name
from ckpt_tools.text import first_few

_LOCK_NAME = ".ckpt-tend.lock"
_LEASE = ".ckpt-lease-"
_TRASH = re.compile(r"([0-9a-f]{8,9})-([0-9a-f]+)", re.ASCII)
_PART = re.compile(r"[0-9a-f]{8}", re.ASCII)
_MOST_LINKS = 100_000
_OWN = (RECORD_NAME, _LOCK_NAME)
_COUNTED = re.compile(r"checkpoint_\d+", re.ASCII)
"""accelerate takes whatever lies beside these for one of them, counts it, and may load it as the latest: nothing of
ckpt's may lie there.

Source: accelerate 1.15 `accelerator.py`, `save_state` and `load_state` with automatic_checkpoint_naming.
"""


class DiskFolder(Folder):
    """A directory; see `Folder`."""

    unseen = ("who uses a checkpoint on other machines, or as another user of this one",)

    def __init__(self, path: str, also_used_by: Sequence[str] = ()) -> None:
        if not os.path.isdir(path):
            if os.path.lexists(path):
                raise UsageError("a run's folder is a directory", where=path)
            raise UnreadableError("no such directory", where=path)
        super().__init__(path)
        self._real = os.path.realpath(path)
        self._home, self._tag = self._real, ""
        """Where files of the folder's own lie, and what their names have to tell from those of other folders."""
        self._also = tuple(map(os.path.realpath, also_used_by))
        self._inodes: dict[str, set[tuple[int, int]]] = {}
        """Name in the folder → (device, inode) of all that is there."""
        self._leases: dict[str, str] = {}
        """Name in the folder → who holds it, by a file that says so."""

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
        self._inodes, self._leases, self.notes = {}, {}, ()
        for name in _listed(self._home) if self._tag else ():
            if self._is_own_trash(f"../{name}"):
                leftovers[f"../{name}"] = tuple(sorted(_listed(os.path.join(self._home, name))))
        for entry in entries:
            if entry.is_symlink():
                if entry.name.removesuffix(".part") != LATEST_GOOD:  # a killed watch leaves the other one
                    self._note_link(links, entry.path, entry.name)
            elif self._is_own_trash(entry.name):
                leftovers[entry.name] = tuple(sorted(_listed(entry.path)))
            elif entry.name.startswith(_LEASE):
                self._note_lease("", entry.name)
            elif entry.name not in _OWN:
                is_directory = entry.is_dir(follow_symlinks=False)
                known = parse_name(entry.name, is_directory=is_directory) is not None
                files, oddity = self._walk(entry.name, device, links) if known else ({}, "")
                items[entry.name] = (is_directory, files, oddity)
                if is_directory and not known:
                    self._note_links_below(links, entry.path)
        for directory in self._also:
            self._note_links_below(links, directory)
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
                if name.rpartition("/")[2].startswith(_LEASE):
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
                oddity = f"cannot look at {name}: {error.strerror}"
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
                self.notes += (f"more than {_MOST_LINKS} files below {directory}: links further below are not seen",)
                return

    def _note_lease(self, root: str, name: str) -> None:
        """Remember who says that a checkpoint is in use; one that cannot be read or is stale holds it as well."""
        path = os.path.join(self.path, name)
        try:
            found = json.loads(self.read(name, 1 << 16) or b"")
            root, who = root or str(found["checkpoint"]), f"{found['host']}:{found['pid']}"
            ended = float(found["until"]) < time.time()
        except (ValueError, KeyError, TypeError):
            who, ended = "somebody", True
        text = f"{who}, by a lease" + (
            f" that is over or cannot be read (`rm {shlex.quote(path)}` ends it)" if ended else ""
        )
        self._leases.setdefault(root, text)
        if ended:
            self.notes += (f"{root or 'every checkpoint'} is held by {text}",)

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
        for root, name in owners.items():
            if who := self._leases.get(root) or self._leases.get(""):
                found.setdefault(name, who)
        used = self._used()
        for root, name in owners.items():
            for inode in self._inodes.get(root, set()) & used.keys():
                found.setdefault(name, f"process {used[inode]}")
        return found

    def _used(self) -> dict[tuple[int, int], str]:
        """Return (device, inode) of what processes have open or mapped, or are in → process; say who cannot be seen."""
        used, hidden = _used_by_processes()
        more = f" ({len(hidden)} processes here: {first_few(hidden)})" if hidden else ""
        self.unseen = (DiskFolder.unseen[0] + more,)
        return used

    def remove(self, saved: Sequence[Saved]) -> list[str]:
        """Rename them into quarantine, see that nobody came in between, and put back what somebody uses."""
        moved: dict[str, list[str]] = {}
        trash = os.path.join(self._home, f"{TRASH_PREFIX}{self._tag}{uuid.uuid4().hex[:8]}")
        try:
            os.mkdir(trash, 0o700)
            trash, bare = os.path.join(self._home, self._trash_name(os.stat(trash).st_ino, time.time())), trash
            os.rename(bare, trash)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise StorageError(f"cannot remove: {error.strerror}", where=self.path) from error
            return [each.name for each in saved if self._remove_now(each)]
        for each in saved:
            try:
                for root in each.roots:
                    os.rename(os.path.join(self._real, root), os.path.join(trash, root))
                    moved.setdefault(each.name, []).append(root)
            except FileNotFoundError:  # the trainer has removed it itself
                self._put_back(trash, moved.pop(each.name, []))
            except OSError as error:
                self._put_back(trash, [root for roots in moved.values() for root in roots])
                where = os.path.join(self.path, each.name)
                raise StorageError(f"cannot remove: {error.strerror}", where=where) from error
        for directory in (trash, self._real, self._home):
            sync_directory(directory)
        inside, used = os.path.relpath(trash, self._real), self._used()
        device = os.stat(self._real).st_dev
        for each in saved:
            now = {}
            for root in moved.get(each.name, ()):
                files, _ = self._walk(f"{inside}/{root}", device, {})
                now.update({name[len(inside) + 1 :]: facts for name, facts in files.items()})
            inodes = set().union(*(self._inodes.get(f"{inside}/{root}", set()) for root in each.roots))
            if each.name in moved and (_own_files(now) != _own_files(each.files) or inodes & used.keys()):
                self._put_back(trash, moved.pop(each.name))
        with contextlib.suppress(OSError):
            os.rmdir(trash)
        return list(moved)

    def _remove_now(self, saved: Saved) -> bool:
        """Remove one where there is no space for a quarantine, by a name that is ckpt's until it is gone."""
        for root in saved.roots:
            path = os.path.join(self._real, root)
            name = self._trash_name(os.lstat(path).st_ino, since=0)
            os.rename(path, os.path.join(self._home, name))
            self.remove_leftover(os.path.relpath(os.path.join(self._home, name), self._real))
        return True

    def _trash_name(self, inode: int, since: float) -> str:
        return f"{TRASH_PREFIX}{self._tag}{int(since):08x}-{inode:x}"

    def _is_own_trash(self, name: str) -> bool:
        """Was this put away by ckpt? A directory's name then has its inode, which no copy and nothing else has."""
        base = name.rpartition("/")[2]
        if not base.startswith(TRASH_PREFIX + self._tag):
            return False
        rest, path = base[len(TRASH_PREFIX + self._tag) :], os.path.join(self._real, name)
        if found := _TRASH.fullmatch(rest):
            with contextlib.suppress(OSError):
                return os.lstat(path).st_ino == int(found[2], 16)
        is_empty = os.path.isdir(path) and not os.path.islink(path) and not _listed(path)
        return _PART.fullmatch(rest) is not None and (is_empty or os.path.isfile(path))

    def age(self, leftover: str) -> float:
        """Return for how many seconds it is in quarantine, by its name; inf where its removal has begun."""
        found = _TRASH.fullmatch(leftover.rpartition("/")[2][len(TRASH_PREFIX + self._tag) :])
        return math.inf if found is None or not int(found[1], 16) else time.time() - int(found[1], 16)

    def restore(self, names: Collection[str]) -> list[str]:
        """Rename back what has these names, the latest removed first."""
        back: list[str] = []
        for leftover, roots in sorted(self.look().leftovers.items(), reverse=True):
            for root in roots if self.age(leftover) < math.inf else ():
                place = parse_name(root, is_directory=True) or parse_name(root, is_directory=False)
                is_free = not os.path.lexists(os.path.join(self._real, root))
                if place is not None and (not names or place.name in names) and is_free:
                    self._put_back(os.path.join(self._real, leftover), [root])
                    back.append(place.name)
            with contextlib.suppress(OSError):
                os.rmdir(os.path.join(self._real, leftover))
        sync_directory(self._real)
        return [*dict.fromkeys(back)]

    def stamp(self, saved: Saved) -> str:
        """Walk it again."""
        device, files = os.stat(self._real).st_dev, {}
        for root in saved.roots:
            files.update(self._walk(root, device, {})[0])
        return stamp_of(files)

    def append(self, file: str, content: bytes) -> None:
        """Append to it, as far as there is space."""
        with contextlib.suppress(OSError), open(self._own(file), "ab") as stream:
            stream.write(content)

    def forget(self, saved: Saved) -> None:
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
        found = os.statvfs(self._home)
        return found.f_bavail * found.f_frsize

    def point(self, name: str) -> None:
        """Let the link lead there at once; what is called so and is no link is left alone."""
        path = os.path.join(self._home, (f"{os.path.basename(self._real)}-" if self._tag else "") + LATEST_GOOD)
        target = os.path.relpath(os.path.join(self._real, name), self._home)
        if not name or (os.path.lexists(path) and not os.path.islink(path)):
            return
        with contextlib.suppress(OSError):  # a help, and nothing depends on it
            if not os.path.islink(path) or os.readlink(path) != target:
                if os.path.islink(part := f"{path}.part"):
                    os.unlink(part)
                os.symlink(target, part)
                os.replace(part, path)

    def _put_back(self, trash: str, roots: Collection[str]) -> None:
        for root in roots:
            if not os.path.lexists(os.path.join(self._real, root)):
                os.rename(os.path.join(trash, root), os.path.join(self._real, root))

    def remove_leftover(self, name: str) -> None:
        """Remove what was renamed away, from which there is no way back then; links in it are never followed."""
        path = os.path.join(self._real, name)
        if not self._is_own_trash(name):
            return
        try:
            if os.path.isdir(path) and not os.path.islink(path):
                begun = os.path.join(os.path.dirname(path), self._trash_name(os.lstat(path).st_ino, since=0))
                os.rename(path, begun)
                shutil.rmtree(begun)
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
