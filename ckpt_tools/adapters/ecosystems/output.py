"""What goes into an adapter's files, and writing them: whole or not at all, read back before they are published."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckpt_tools.adapters.read.locate import DIFFUSERS_TRAPS
from ckpt_tools.description.checkpoint import TensorEntry
from ckpt_tools.description.dtypes import DType
from ckpt_tools.errors import CkptError, StorageError
from ckpt_tools.formats.digest import digest_block
from ckpt_tools.formats.opening import read_file
from ckpt_tools.formats.safetensors import build_header, data_order
from ckpt_tools.moving.casting import cast
from ckpt_tools.storage.source import LocalSource
from ckpt_tools.storage.staging import Staging

if TYPE_CHECKING:
    from ckpt_tools.adapters.families.family import Module
    from ckpt_tools.moving.arrays import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """An adapter in the names of its target."""

    file: str
    tensors: Mapping[str, Array]
    """Name → tensor, row-major; some may be the adapter's own arrays, or share memory."""
    metadata: Mapping[str, str]
    notes: tuple[str, ...] = ()
    errors: Mapping[str, float] = field(default_factory=dict)
    """Module → largest error of what was written for it, relative to the largest element; exact modules are not in."""


def file_name(adapter_name: str) -> str:
    """Return the name of a single-file adapter: PEFT's adapter name where it says something, and no trap."""
    plain = "".join(char if char.isalnum() or char in "-_" else "_" for char in adapter_name).strip("_") or "lora"
    if plain == "default" or not plain.isascii() or any(trap in plain.lower() for trap in DIFFUSERS_TRAPS):
        plain = "lora"
    return f"{plain[:100]}.safetensors"


def put(tensors: dict[str, Array], name: str, module: Module, suffixes: Mapping[str, str]) -> None:
    """Add a module's factors under its name and the suffixes of their roles."""
    import numpy as np

    for role, factor in module.factors.items():
        tensors[f"{name}.{suffixes[role]}"] = np.asarray(factor, order="C")


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    stored: DType
    """Of what `read` returns."""
    read: Callable[[], memoryview]
    """Returns the row-major bytes."""

    @property
    def entry(self) -> TensorEntry:
        """Describe it, without saying where it lies."""
        return TensorEntry(fqn=self.name, dtype=self.dtype, shape=self.shape, chunks=())

    def content(self, see: Callable[[Item, memoryview], None] | None = None) -> memoryview:
        """Return the bytes to write; `see` is given them as they were read."""
        content = self.read()
        if see is not None:
            see(self, content)
        if self.dtype is not self.stored and len(content):
            target = memoryview(bytearray(self.entry.nbytes))
            cast(content, self.stored, target, self.dtype)
            content = target
        if len(content) != self.entry.nbytes:
            raise CkptError(f"expected {self.entry.nbytes} bytes, got {len(content)}", where=self.name)
        return content


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The files of an adapter."""

    file: str
    items: Sequence[Item]
    metadata: Mapping[str, str]
    documents: Mapping[str, bytes]

    def head(self) -> tuple[bytes, dict[str, int]]:
        """Return the header, and where every tensor begins in the file."""
        ordered = data_order([item.entry for item in self.items])
        head, starts = build_header(ordered, metadata=self.metadata)
        return head, {entry.fqn: start for entry, start in zip(ordered, starts, strict=True)}

    def sizes(self) -> tuple[tuple[str, int], ...]:
        """Return (name, bytes) of every file."""
        head, _ = self.head()
        nbytes = len(head) + sum(item.entry.nbytes for item in self.items)
        return (self.file, nbytes), *((name, len(content)) for name, content in self.documents.items())


@contextmanager
def staged(destination: str, *, overwrite: bool) -> Iterator[Staging]:
    """Lend a staging directory that is gone afterwards, unless it was published."""
    staging = Staging(destination, overwrite=overwrite)
    try:
        staging.begin()
        yield staging
    except OSError as error:
        where = error.filename if isinstance(error.filename, str) else destination
        raise StorageError(error.strerror or str(error), where=where) from error
    finally:
        staging.discard()


def write(output: Output, staging: Staging, *, see: Callable[[Item, memoryview], None]) -> None:
    """Write everything, durably, and read it back; `see` is given every tensor's bytes as they were read.

    Memory: the largest tensor, twice when it is cast.
    """
    head, starts = output.head()
    nbytes = dict(output.sizes())[output.file]
    staging.create(output.file, nbytes)
    staging.write(output.file, 0, [head])
    digests = {}
    for item in output.items:
        content = item.content(see)
        digests[item.name] = digest_block(content)
        staging.write(output.file, starts[item.name], [content])
    staging.sync(output.file)
    for name, document in output.documents.items():
        staging.write_document(name, document)
    _read_back(output, staging.directory, digests)


def _read_back(output: Output, directory: str, digests: Mapping[str, bytes]) -> None:
    with LocalSource(directory) as source:
        written = read_file(source, output.file)
        found = {entry.fqn: entry for entry in written.header.tensors}
        for item in output.items:
            entry = found.pop(item.name, None)
            same = entry is not None and (entry.dtype, entry.shape) == (item.dtype, item.shape)
            span = entry.chunks[0].span if entry is not None else None
            if (
                not same
                or span is None
                or digests[item.name] != digest_block(source.read(output.file, span.offset, span.nbytes))
            ):
                raise StorageError(
                    f"tensor {item.name!r} does not read back as it was written",
                    where=output.file,
                    hint="nothing was published; check the storage",
                )
        for name, document in output.documents.items():
            if source.read(name, 0, source.size(name)) != document:
                raise StorageError("a file does not read back as it was written", where=name)
            if name.endswith(".json"):
                json.loads(document)
