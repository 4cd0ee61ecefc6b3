"""What goes into an adapter's files, and writing them: whole or not at all, read back before they are published."""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from ckpt_tools.adapters.architectures import ARCHITECTURES
from ckpt_tools.adapters.architectures.architecture import Architecture
from ckpt_tools.adapters.families import family_of
from ckpt_tools.adapters.families.family import Module
from ckpt_tools.adapters.read.sidecars import DIFFUSERS_TRAPS
from ckpt_tools.checkpoint.dtypes import DType
from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.checkpoint.formats import gguf
from ckpt_tools.checkpoint.formats.digest import digest_block
from ckpt_tools.checkpoint.formats.opening import Opened, read_file
from ckpt_tools.checkpoint.formats.safetensors import build_header, data_order
from ckpt_tools.convert.job import Conversion
from ckpt_tools.errors import CkptError, StorageError
from ckpt_tools.memory import peak_rss_bytes
from ckpt_tools.storage.source import LocalSource
from ckpt_tools.storage.staging import Staging, check_space
from ckpt_tools.transfer.box_reader import BytesReader
from ckpt_tools.transfer.casting import cast

if TYPE_CHECKING:
    from ckpt_tools.transfer.arrays import Array

_BASE_BYTES = 64 << 20  # Of the interpreter and the modules, in estimates


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """An adapter in the names of its target."""

    file: str
    tensors: Mapping[str, Array]  # Name → tensor, row-major; some may be the adapter's own arrays, or share memory
    metadata: Mapping[str, str]
    documents: Mapping[str, bytes] = field(default_factory=dict)  # Other files: name → content
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
    stored: DType  # Of what `read` returns
    read: Callable[[], memoryview]  # Returns the row-major bytes

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

    @property
    def is_gguf(self) -> bool:
        """Is the file for llama.cpp?"""
        return self.file.endswith(gguf.FORMAT.suffix)

    def head(self) -> tuple[bytes, dict[str, int], int]:
        """Return the header, where every tensor begins in the file, and the file's size."""
        ordered = data_order([item.entry for item in self.items])
        if self.is_gguf:
            head, starts, nbytes = gguf.build_gguf(ordered, self.metadata)
        else:
            head, starts = build_header(ordered, metadata=self.metadata)
            nbytes = len(head) + sum(entry.nbytes for entry in ordered)
        return head, {entry.fqn: start for entry, start in zip(ordered, starts, strict=True)}, nbytes

    def sizes(self) -> tuple[tuple[str, int], ...]:
        """Return (name, bytes) of every file."""
        return (self.file, self.head()[2]), *((name, len(content)) for name, content in self.documents.items())


@contextmanager
def staged(destination: str, output: Output, *, overwrite: bool) -> Iterator[Staging]:
    """Lend a staging directory with room for an output; it is gone afterwards, unless it was published."""
    check_space(sum(nbytes for _, nbytes in output.sizes()), destination)
    staging = Staging(destination, overwrite=overwrite)
    try:
        staging.begin()
        yield staging
    except CkptError:
        raise
    except OSError as error:
        where = error.filename if isinstance(error.filename, str) else destination
        raise StorageError(error.strerror or str(error), where=where) from error
    finally:
        staging.discard()


def write(output: Output, staging: Staging, *, see: Callable[[Item, memoryview], None]) -> None:
    """Write everything, durably, and read it back; `see` is given every tensor's bytes as they were read.

    Memory: the largest tensor, twice when it is cast.
    """
    head, starts, nbytes = output.head()
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


def conversion_of(
    output: Output,
    opened: Opened,
    reader: BytesReader,
    destination: str,
    start: float,
    notes: Sequence[str],
    *,
    dry_run: bool,
    published: bool | None = None,
) -> Conversion:
    """Return what was read, and what was written or would be."""
    published = not dry_run if published is None else published
    files = output.sizes() if output.items and (published or dry_run) else ()
    largest = max((item.entry.nbytes for item in output.items), default=0)
    return Conversion(
        source=opened.source.root,
        destination=destination,
        num_tensors=len(output.items),
        bytes_read=reader.bytes_read,
        bytes_written=sum(nbytes for _, nbytes in files),
        seconds=time.monotonic() - start,
        peak_rss_bytes=_BASE_BYTES + 2 * largest if dry_run else peak_rss_bytes(),
        files=files,
        verified=published and reader.ledger.is_whole,
        checked=reader.ledger.checked if published else {},
        notes=tuple(notes),
        not_checked=reader.ledger.not_checked,
        dry_run=dry_run,
        published=published,
    )


def _read_back(output: Output, directory: str, digests: Mapping[str, bytes]) -> None:
    with LocalSource(directory) as source:
        if output.is_gguf:
            written = gguf.FORMAT.open(source, {output.file: source.size(output.file)}, path=output.file)
            tensors = written.checkpoint.tensors
        else:
            tensors = read_file(source, output.file).header.tensors
        found = {entry.fqn: entry for entry in tensors}
        for item in output.items:
            entry = found.pop(item.name, None)
            same = entry is not None and (entry.dtype, entry.shape) == (item.dtype, item.shape)
            span = entry.chunks[0].span if entry is not None else None
            if (
                not same
                or span is None
                or digests[item.name] != digest_block(source.read(output.file, span.offset, span.nbytes))
            ):
                what = f"tensor {item.name!r} does not read back as it was written"
                raise StorageError(what, where=output.file, hint="nothing was published; check the storage")
        for name, document in output.documents.items():
            if source.read(name, 0, source.size(name)) != document:
                raise StorageError("a file does not read back as it was written", where=name)
            if name.endswith(".json"):
                json.loads(document)


# The header that kohya's tools, ComfyUI's managers and Civitai read: what a file is, and how it was trained.
#
# Source: kohya-ss/sd-scripts, library/train_util.py (`precalculate_safetensors_hashes`), library/sai_model_spec.py
# (ModelSpec 1.0.1) and train_network.py; musubi-tuner, utils/sai_model_spec.py; ai-toolkit, toolkit/metadata.py;
# willmiao/ComfyUI-Lora-Manager, py/utils/lora_metadata.py.

_TRAINING = ("ss_", "modelspec.", "training_info")
"""Beginnings of what a trainer says of a run; ai-toolkit's `training_info` has steps and epochs."""
_OF_THE_FILE = ("ss_network_", "modelspec.sai_model_spec", "modelspec.hash", "modelspec.impl", "modelspec.unet_dtype")
"""Beginnings of what a conversion makes anew: the network, the names, the bytes."""
_MODEL_SPEC = "1.0.1"
_LEGACY = slice(0x100000, 0x110000)  # Bytes of a file by which sd-webui-additional-networks once knew it


def header_of(file: str, modules: Sequence[Module], architecture: Architecture | None) -> dict[str, str]:
    """Return what the modules and the model family tell; tensors have the last word with all readers."""
    algorithms = Counter(family_of(module).lycoris_algorithm for module in modules)
    is_plain = algorithms.keys() == {"locon"} and not any(module.is_dora for module in modules)
    metadata = {"format": "pt", "ss_network_module": "networks.lora" if is_plain else "lycoris.kohya"}
    if not is_plain:
        args = {"algo": algorithms.most_common(1)[0][0]}
        if any(module.is_dora for module in modules):
            args["dora_wd"] = "True"
        metadata["ss_network_args"] = json.dumps(args)
    ranks = Counter(module.rank.value for module in modules if module.rank is not None)
    if ranks:
        rank = ranks.most_common(1)[0][0]
        alphas = Counter(
            module.alpha.value for module in modules if module.alpha and module.rank and module.rank.value == rank
        )
        metadata["ss_network_dim"] = str(rank)
        if alphas:
            metadata["ss_network_alpha"] = _number(alphas.most_common(1)[0][0])
    if architecture is not None and architecture.base_version:
        metadata["ss_base_model_version"] = architecture.base_version
    if architecture is not None and architecture.model_spec:
        metadata |= {
            "modelspec.sai_model_spec": _MODEL_SPEC,
            "modelspec.architecture": architecture.model_spec,
            "modelspec.implementation": architecture.implementation,
            "modelspec.title": file.removesuffix(".safetensors"),
            "modelspec.resolution": architecture.resolution,
        }
    return metadata


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def with_training(output: Output, source: Mapping[str, str]) -> Output:
    """Return the output with what the source's header says of the training run, and with its hashes.

    Memory: the largest tensor, twice when it is cast.
    """
    carried = {
        key: value
        for key, value in source.items()
        if key.startswith(_TRAINING) and not key.startswith(_OF_THE_FILE) and not _is_wrong(key, value, output)
    }
    metadata = {**output.metadata, **carried}
    if any(key.startswith("modelspec.") for key in metadata):
        metadata["modelspec.sai_model_spec"] = _MODEL_SPEC
        size, end = source.get("ss_resolution", ""), source.get("ss_training_finished_at", "")
        found = {"title": source.get("ss_output_name"), "resolution": _resolution(size), "date": _date(end)}
        said = {f"modelspec.{key}": value for key, value in found.items() if value and value != "None"}
        metadata |= {key: value for key, value in said.items() if key not in carried}
    return _hashed(replace(output, metadata=metadata))


def _is_wrong(key: str, value: str, output: Output) -> bool:
    """Does a header name another model family than the one that the file is written for?"""
    written = output.metadata.get(key)
    others = {spec for each in ARCHITECTURES.values() for spec in (each.base_version, each.model_spec)}
    return (value in others and written not in (None, value)) or (key.endswith(".architecture") and "/" not in value)


def _resolution(text: str) -> str | None:
    """Return "(1024, 768)", "1024,768" or "1024" as ModelSpec has it."""
    hit = re.fullmatch(r"\(?(\d+)(?:, ?(\d+))?\)?", text)
    return None if hit is None else f"{hit[1]}x{hit[2] or hit[1]}"


def _date(text: str) -> str | None:
    """Return a time in seconds since 1970 as ISO 8601."""
    try:
        return datetime.fromtimestamp(math.floor(float(text)), UTC).isoformat()
    except (ValueError, OverflowError, OSError):
        return None


def _hashed(output: Output) -> Output:
    """Add the hashes of the data, which stay as they are when somebody changes the header later."""
    entries = {item.name: item for item in output.items}
    training = {key: value for key, value in output.metadata.items() if key.startswith("ss_")}
    ordered = data_order([item.entry for item in output.items])
    head, _ = build_header(ordered, metadata=training)
    whole, legacy = hashlib.sha256(), hashlib.sha256(head[_LEGACY])
    position = len(head)
    for entry in ordered:
        content = entries[entry.fqn].content()
        whole.update(content)
        legacy.update(content[max(0, _LEGACY.start - position) : max(0, _LEGACY.stop - position)])
        position += len(content)
    digest = whole.hexdigest()
    hashes = {"sshs_model_hash": digest, "sshs_legacy_hash": legacy.hexdigest()[:8]}
    if "modelspec.sai_model_spec" in output.metadata:
        hashes["modelspec.hash_sha256"] = f"0x{digest}"
    return replace(output, metadata={**output.metadata, **hashes})
