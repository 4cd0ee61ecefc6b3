"""The directories that lead to a destination: made when they are missing, and removed again when nothing came of it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from ckpt_tools.errors import StorageError
from ckpt_tools.storage.publish import sync_directory


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
