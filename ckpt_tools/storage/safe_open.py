"""Open files beneath a directory so that no link, however late it is put there, leads out of it.

Checking a path and then opening it leaves a moment between the two. `openat2` with RESOLVE_BENEATH has none: the
kernel looks at every step as it opens, and stops at the first link or the first step out of the directory.

Source: openat2(2), Linux 5.6.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from functools import cache

_SYS_OPENAT2 = 437  # the same on every architecture, as all system calls since 424
_AT_FDCWD = -100
_NO_MAGICLINKS = 0x02
_NO_SYMLINKS = 0x04
_BENEATH = 0x08
_libc = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


@cache
def is_available() -> bool:
    """Does this kernel, and the sandbox around it, have openat2?"""
    try:
        os.close(_openat2(_AT_FDCWD, os.curdir, os.O_PATH | os.O_CLOEXEC, 0))
    except OSError as error:
        # Old sandboxes answer EPERM to system calls that they do not know.
        return error.errno not in (errno.ENOSYS, errno.EPERM)
    return True


def open_directory(path: str) -> int:
    """Return a descriptor for `open_beneath` of a directory, whose path must not end in a link."""
    return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def open_beneath(directory: int, path: str, file: str, flags: int) -> int:
    """Open `file` for reading, beneath a directory and through no link.

    `path` is for audit hooks only; `file` is what `os.path.realpath` gave; O_CLOEXEC is added to `flags`. The `OSError`
    is ELOOP when there is a link in it, EXDEV when it leads out.
    """
    # What Python's own `open` reports (PEP 578) must not go unseen because the call is made by hand.
    sys.audit("open", os.path.join(path, file), None, flags | os.O_NOFOLLOW)
    while True:
        try:
            return _openat2(directory, file, flags | os.O_CLOEXEC, _BENEATH | _NO_MAGICLINKS | _NO_SYMLINKS)
        except InterruptedError:
            continue


def _openat2(directory: int, file: str, flags: int, resolve: int) -> int:
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
