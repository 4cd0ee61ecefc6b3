"""Make a finished directory appear under its final name: one rename, durable, and taken back when it cannot be.

The directories that lead there are made when they are missing, and removed again when nothing came of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
from collections.abc import Callable, Sequence

from ckpt_tools.errors import DestinationExistsError, StorageError
from ckpt_tools.storage.claim import lock_directory

_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_NOT_SUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
_ASIDE = ".old"
"""Where the old checkpoint waits while the new one takes its place, on file systems that cannot exchange two."""
_libc = ctypes.CDLL(None, use_errno=True)


class NotDurableError(StorageError):
    """The destination is complete, but neither durable nor to be taken back."""


def move_into_place(directory: str, held: int, destination: str, parent: int, *, overwrite: bool) -> str | None:
    """Rename `directory`, whose own entries are durable, to `destination`, and make that durable.

    `held` is its descriptor, which holds its lock. `parent` is opened before, so that no rename is done that could not
    be made durable. Return where the old one is, when it could not be removed. On a `NotDurableError` the destination
    is in place; on an `OSError` both are as they were.
    """
    if os.path.lexists(destination):
        if not overwrite:
            raise _appeared(destination)
        return _replace(directory, held, destination, parent)
    try:
        _rename_new(directory, destination)
    except FileExistsError as error:
        raise _appeared(destination) from error
    _make_durable((held, parent), destination, lambda: _rename_new(destination, directory))
    return None


def put_back(directory: str, destination: str) -> None:
    """Mend what a run left that was killed while it replaced `destination` without an exchange."""
    aside = directory + _ASIDE
    if not os.path.lexists(aside):
        return
    if os.path.lexists(destination):
        shutil.rmtree(aside)
    else:
        os.rename(aside, destination)


def replace_file(path: str, content: bytes, part: str) -> None:
    """Replace a small file durably, whole or not at all, by way of `part`, a new file in its directory."""
    try:
        with open(part, "xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, path)
        sync_directory(os.path.dirname(path))
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise StorageError(f"cannot write: {error.strerror}", where=path) from error


def sync_directory(path: str) -> None:
    """Make the entries of a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_entries(descriptor)
    finally:
        os.close(descriptor)


def sync_entries(descriptor: int) -> None:
    """Make the entries of an open directory durable."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:  # some file systems have no fsync of directories
            raise


def nearest_parent(path: str) -> str:
    """Return the innermost directory above `path` that something exists at."""
    parent = os.path.dirname(os.path.abspath(path))
    while not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    return parent


def make_parents(path: str) -> list[str]:
    """Make the missing directories above `path`, durably; return those that this call made, outermost first."""
    missing = []
    parent = os.path.dirname(os.path.abspath(path))
    while not os.path.lexists(parent):
        missing.append(parent)
        parent = os.path.dirname(parent)
    made: list[str] = []
    try:
        for directory in reversed(missing):
            with contextlib.suppress(FileExistsError):  # somebody else makes them too
                os.mkdir(directory)
                made.append(directory)
            sync_directory(os.path.dirname(directory))
    except OSError as error:
        remove_empty(made)
        where = os.path.dirname(os.path.abspath(path))
        raise StorageError(f"cannot make the destination's parent directory: {error.strerror}", where=where) from error
    return made


def remove_empty(directories: Sequence[str]) -> None:
    """Remove what `make_parents` made, as far as it is still empty."""
    with contextlib.suppress(OSError):
        for directory in reversed(directories):
            os.rmdir(directory)


def _appeared(destination: str) -> DestinationExistsError:
    return DestinationExistsError("the destination appeared meanwhile", where=destination)


def _replace(directory: str, held: int, destination: str, parent: int) -> str | None:
    # The old one will have the staging directory's name: nobody may claim it there before it is removed.
    lock = lock_directory(destination)
    try:
        old = _exchange(directory, destination)
        _make_durable((held, parent), destination, lambda: _exchange_back(directory, destination, old))
        try:
            shutil.rmtree(old)
        except OSError:
            return old
        return None
    finally:
        if lock is not None:
            os.close(lock)


def _exchange(directory: str, destination: str) -> str:
    """Replace `destination`; return where the old one is now."""
    try:
        _rename(directory, destination, _RENAME_EXCHANGE)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
        # For a moment there is no destination, but never half of one; `put_back` mends a kill in between.
        aside = directory + _ASIDE
        os.rename(destination, aside)
        try:
            os.rename(directory, destination)
        except OSError:
            os.rename(aside, destination)
            raise
        return aside
    return directory


def _exchange_back(directory: str, destination: str, old: str) -> None:
    if old == directory:
        _rename(directory, destination, _RENAME_EXCHANGE)
        return
    os.rename(destination, directory)
    os.rename(old, destination)


def _make_durable(descriptors: tuple[int, int], destination: str, undo: Callable[[], object]) -> None:
    """Fsync the renamed directory and its parent; a failed fsync takes the rename back."""
    try:
        for descriptor in descriptors:
            sync_entries(descriptor)
    except OSError as error:
        try:
            undo()
        except OSError:
            what = f"the destination is complete, but could not be made durable: {error.strerror}"
            hint = "a power cut may undo it: fix the storage, then check it with ckpt verify"
            raise NotDurableError(what, where=destination, hint=hint) from error
        raise


def _rename_new(old: str, new: str) -> None:
    """Rename a directory to a name that must be free; FileExistsError says that it is not."""
    try:
        _rename(old, new, _RENAME_NOREPLACE)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
        # A plain rename of a directory replaces nothing but an empty directory (Source: POSIX, rename).
        try:
            os.rename(old, new)
        except OSError as failure:
            if failure.errno in (errno.ENOTEMPTY, errno.ENOTDIR):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new) from failure
            raise


def _rename(old: str, new: str, flags: int) -> None:
    result = _libc.renameat2(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flags)
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), new)
