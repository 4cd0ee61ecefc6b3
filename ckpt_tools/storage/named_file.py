"""Read a small document that a user names by its path: a config, rules. Never waits, never reads without end."""

from __future__ import annotations

import errno
import os
import stat

from ckpt_tools.errors import CkptError, LimitError, StorageError, UnreadableError

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
        raise refusal(f"cannot read {what}: no such file", where=path, hint=hint) from None
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
            hint = "write it into a file first, and name that"
        raise refusal(f"expected {what}, found {found}", where=path, hint=hint)
