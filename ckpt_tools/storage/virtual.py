"""Files that nobody has written: what is in them is made while they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from ckpt_tools.storage.source import MAX_FILES, MAX_LISTED_DEPTH, Source


@dataclass(frozen=True, slots=True)
class VirtualFile:
    """A file of a `VirtualSource`."""

    nbytes: int
    fill: Callable[[int, memoryview], None]
    """Given an offset, fills a buffer with the bytes that begin there; from any thread."""

    @classmethod
    def of(cls, content: bytes) -> Self:
        """Return a file that holds `content`."""

        def fill(offset: int, buffer: memoryview) -> None:
            buffer[:] = content[offset : offset + len(buffer)]

        return cls(len(content), fill)


class VirtualSource(Source):
    """The files of another source, and some beside them or in their place.

    It shares everything else with the source below, which is the one to close. They are nothing that anybody would
    look for, unless they are `listed`.
    """

    def __init__(self, below: Source, files: Mapping[str, VirtualFile], *, listed: bool = False) -> None:
        self.root = below.root
        self._below = below
        self._files = files
        self._listed = {file: each.nbytes for file, each in files.items()} if listed else {}

    @property
    def place(self) -> str:
        """That of the source below."""
        return self._below.place

    def list_files(self, *, max_depth: int = MAX_LISTED_DEPTH, max_files: int = MAX_FILES) -> dict[str, int]:
        """Return the files of the source below, and the virtual ones that are listed."""
        return {**self._below.list_files(max_depth=max_depth, max_files=max_files), **self._listed}

    def size(self, file: str) -> int:
        """Return the size of a file, or what that of a virtual one would be."""
        found = self._files.get(file)
        return self._below.size(file) if found is None else found.nbytes

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of a file; see `Source`."""
        found = self._files.get(file)
        if found is None:
            self._below.read_into(file, offset, buffer)
        else:
            found.fill(offset, buffer)

    def prefetch(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        """Tell the source below of what lies there."""
        self._below.prefetch(each for each in ranges if each[0] not in self._files)

    def identities(self) -> dict[str, Mapping[str, object]]:
        """Return those of the source below: what is made follows from it."""
        return self._below.identities()

    def check_unchanged(self) -> None:
        """Ask the source below."""
        self._below.check_unchanged()

    def close(self) -> None:
        """Close the source below."""
        self._below.close()
