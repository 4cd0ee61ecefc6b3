"""Open files beneath a directory so that no link, however it is swapped meanwhile, leads out of it.

Checking a path and then opening it leaves a moment between the two. `openat2` with RESOLVE_BENEATH has none: the
kernel follows links as it opens, and stops at the first step out of the directory.

Source: openat2(2), Linux 5.6.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from functools import cache

NO_SYMLINKS = 0x04
"""RESOLVE_NO_SYMLINKS: follow no links at all, for `open_beneath`."""

_SYS_OPENAT2 = 437  # the same on every architecture, as all system calls since 424
_NO_MAGICLINKS = 0x02
_BENEATH = 0x08
_MAX_RACES = 16
_libc = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


@cache
def is_available() -> bool:
    """Does this kernel, and the sandbox around it, have openat2?"""
    try:
        os.close(_openat2(os.curdir, os.O_PATH | os.O_CLOEXEC, -100, 0))
    except OSError as error:
        # Old sandboxes answer EPERM to system calls that they do not know.
        return error.errno not in (errno.ENOSYS, errno.EPERM)
    return True


def open_directory(path: str) -> int:
    """Return a descriptor for `open_beneath` of a directory, whose path must not end in a link."""
    return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def open_beneath(directory: int, path: str, file: str, flags: int, resolve: int = 0) -> int:
    """Open `file` for reading, beneath a directory.

    Args:
        directory: Its descriptor.
        path: Its path, for audit hooks only.
        file: Relative name; links in it are followed as long as they stay beneath.
        flags: As of `os.open`; O_CLOEXEC is added.
        resolve: `NO_SYMLINKS`, or 0.

    Raises:
        OSError: EXDEV when a link leads out, ELOOP when one may not be followed; otherwise as of `os.open`.
    """
    # What Python's own `open` reports (PEP 578) must not go unseen because the call is made by hand.
    sys.audit("open", os.path.join(path, file), None, flags)
    attempts = 0
    while True:
        try:
            return _openat2(file, flags | os.O_CLOEXEC, directory, _BENEATH | _NO_MAGICLINKS | resolve)
        except OSError as error:
            # EAGAIN: something was renamed while `..` was resolved, so the kernel cannot vouch for the result.
            attempts += 1
            if error.errno not in (errno.EAGAIN, errno.EINTR) or attempts == _MAX_RACES:
                raise


def _openat2(file: str, flags: int, directory: int, resolve: int) -> int:
    how = _OpenHow(flags | getattr(os, "O_LARGEFILE", 0), 0, resolve)
    descriptor: int = _libc.syscall(
        ctypes.c_long(_SYS_OPENAT2),
        ctypes.c_int(directory),
        ctypes.c_char_p(os.fsencode(file)),
        ctypes.byref(how),
        ctypes.c_size_t(ctypes.sizeof(how)),
    )
    if descriptor < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), file)
    return descriptor
