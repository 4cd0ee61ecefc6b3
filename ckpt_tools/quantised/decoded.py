"""A checkpoint without its quantisation: every quantised tensor is a file of plain floats that nobody has written.

Such a file is decoded while it is read, whichever bytes of it are wanted. So maps, casts, meshes and the executor see
floats in files, as of any checkpoint, and know nothing of schemes; of the source no more is read than is asked for.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from ckpt_tools.description.checkpoint import Asset, ByteSpan, Chunk, TensorEntry
from ckpt_tools.description.dtypes import BY_NAME, BY_TORCH_NAME, DType
from ckpt_tools.description.flat import flat_boxes
from ckpt_tools.description.layout import Box
from ckpt_tools.errors import UsageError
from ckpt_tools.formats.opening import Opened
from ckpt_tools.models.config import CONFIG_NAME, config_beside
from ckpt_tools.models.restate import restate_dtype
from ckpt_tools.moving.boxes import BytesReader
from ckpt_tools.quantised.scheme import Found, Quantised
from ckpt_tools.quantised.table import SCHEMES, find_scheme
from ckpt_tools.storage.source import Source
from ckpt_tools.text import first_few

if TYPE_CHECKING:
    from ckpt_tools.quantised.scheme import Bytes

KEY = "quantization_config"
_PREFIX = "\0decoded/"
"""Begins the names of files that nobody has written; no other file has a NUL in its name."""
_PIECE_ELEMS = 1 << 20
"""Decoded at once: a few megabytes of float32."""
_MAX_KEPT_BYTES = 128 << 20
"""Decoded matrices that are kept while they are read in the order of their columns."""


def dequantised(opened: Opened, dtype: str) -> Opened:
    """Return a checkpoint with plain floats in place of quantised tensors, and a config that says so.

    Args:
        opened: The checkpoint.
        dtype: As what `--dtype` wants them; "keep" is what config.json says of the model.

    Raises:
        UsageError: It is not quantised, or by a scheme that ckpt does not decode.
        UnreadableError: A part of a tensor is missing.
    """
    found, config = _find(opened)
    floats = BY_NAME[dtype.upper()] if dtype != "keep" else _dtype_in(config)
    if not floats.is_float:
        raise UsageError(f"--dequantize gives floats, not {floats.name}")
    by_stored = {entry.fqn: one for one in found.tensors for entry in one.stored[:1]}
    dropped = {entry.fqn for one in found.tensors for entry in one.stored} | set(found.dropped)
    checkpoint = opened.checkpoint
    tensors = []
    for entry in checkpoint.tensors:
        one = by_stored.get(entry.fqn)
        if one is not None:
            tensors.append(_entry(one, floats))
        elif entry.fqn not in dropped:
            tensors.append(entry)
    plain = {entry.fqn for entry in checkpoint.tensors} - dropped
    if twice := sorted(plain & {one.fqn for one in found.tensors}):
        raise UsageError(f"{first_few(twice)}: there quantised and as it is")
    restated = _restated(config, floats)
    source = DecodedSource(opened, found.tensors, floats, {CONFIG_NAME: restated})
    assets = [Asset(file=a.file, nbytes=len(restated)) if a.file == CONFIG_NAME else a for a in checkpoint.assets]
    what = f"{len(found.tensors)} tensors of {found.what} are decoded to {floats.name}"
    what += f"; {KEY} is taken out of {CONFIG_NAME}"
    if found.dropped:
        what += f"; left out {first_few(found.dropped)}, which only a quantised model has"
    if opened.manifest is not None or any(chunk.crc32 is not None for e in checkpoint.tensors for chunk in e.chunks):
        what += "; recorded checksums were not held against the quantised bytes (`ckpt verify` does)"
    return replace(
        opened,
        checkpoint=replace(checkpoint, tensors=tuple(tensors), assets=tuple(assets)),
        source=source,
        manifest=None,
        origin=None,
        notes=(*opened.notes, what),
    )


def _find(opened: Opened) -> tuple[Found, Mapping[str, object]]:
    """Return what is quantised, by the settings in config.json, and the config."""
    config = config_beside(opened.source)
    inner = None if config is None else config.values.get("text_config")
    settings = None if config is None else config.values.get(KEY, isinstance(inner, Mapping) and inner.get(KEY))
    where = opened.source.root
    if config is None or not isinstance(settings, Mapping):
        raise UsageError(
            f"--dequantize: no {CONFIG_NAME} beside the weights has a {KEY}, which says how they are quantised",
            where=where,
            hint=f"put the model's {CONFIG_NAME} there; weights that are not quantised need no --dequantize",
        )
    scheme = find_scheme(settings.get("quant_method"))
    if scheme is None:
        known = ", ".join(scheme.method for scheme in SCHEMES)
        raise UsageError(
            f"ckpt does not decode {settings.get('quant_method')!r}", where=where, hint=f"it does: {known}"
        )
    found = scheme.find({entry.fqn: entry for entry in opened.checkpoint.tensors}, settings, _Reader(opened))
    if not found.tensors:
        raise UsageError(f"{CONFIG_NAME} says {scheme.method}, and no tensor is stored so", where=where)
    return found, config.values


def _entry(one: Quantised, floats: DType) -> TensorEntry:
    """Describe what a tensor stands for as floats in a file."""
    nbytes = floats.num_bytes(prod(one.shape))
    span = ByteSpan(file=_PREFIX + one.fqn, offset=0, nbytes=nbytes)
    shape, strides = one.shape, None
    if one.is_turned:
        *outer, rows, columns = one.shape
        shape = (*outer, columns, rows)
        across = tuple(prod(one.shape[dim + 1 :]) for dim in range(len(outer)))
        strides = (*across, 1, columns)
    chunk = Chunk(box=Box((0,) * len(shape), shape), span=span, strides=strides)
    return TensorEntry(fqn=one.fqn, dtype=floats, shape=shape, chunks=(chunk,))


def _dtype_in(config: Mapping[str, object]) -> DType:
    """Return the dtype that a config gives its weights; bfloat16 when it gives none."""
    inner = config.get("text_config")
    for values in (config, inner if isinstance(inner, Mapping) else {}):
        for key in ("dtype", "torch_dtype"):
            found = BY_TORCH_NAME.get(str(values.get(key)).removeprefix("torch."))
            if found is not None and found.is_float:
                return found
    return BY_NAME["BF16"]


def _restated(config: Mapping[str, object], floats: DType) -> bytes:
    """Return the config of a model that is not quantised, without which transformers would quantise it again."""
    stated = _without_key(config)
    if "dtype" not in stated and "torch_dtype" not in stated:
        stated["dtype"] = floats.torch_name
    text = (json.dumps(stated, indent=2, ensure_ascii=False) + "\n").encode()
    restated = restate_dtype(text, floats)
    return text if restated is None else restated.text


def _without_key(config: Mapping[str, object]) -> dict[str, object]:
    return {
        key: _without_key(value) if key.endswith("_config") and isinstance(value, Mapping) else value
        for key, value in config.items()
        if key != KEY
    }


class DecodedSource(Source):
    """The files of a checkpoint, and one for each quantised tensor; shares everything else with the source it is of."""

    def __init__(
        self, opened: Opened, tensors: tuple[Quantised, ...], floats: DType, documents: Mapping[str, bytes]
    ) -> None:
        self.__dict__.update(opened.source.__dict__)  # descriptors, identities: whoever closes this closes that
        self._read = _Reader(opened)
        self._floats = floats
        self._tensors = {_PREFIX + one.fqn: one for one in tensors}
        self._documents = documents
        self._kept: OrderedDict[tuple[str, int], memoryview] = OrderedDict()
        self._lock = threading.Lock()

    def size(self, file: str) -> int:
        """Return the size of a file, or what that of a decoded one would be."""
        if file in self._documents:
            return len(self._documents[file])
        if file in self._tensors:
            return self._floats.num_bytes(prod(self._tensors[file].shape))
        return super().size(file)

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer`; decodes what is no file."""
        if file in self._documents:
            buffer[:] = self._documents[file][offset : offset + len(buffer)]
        elif file in self._tensors:
            self._decode_into(self._tensors[file], offset, buffer)
        else:
            super().read_into(file, offset, buffer)

    def _decode_into(self, one: Quantised, offset: int, buffer: memoryview) -> None:
        """Decode bytes; of a matrix that is read by its columns, which means in short runs, all of it at once."""
        per_matrix = self._floats.num_bytes(prod(one.shape[-2:]))
        if not one.is_turned or per_matrix > _MAX_KEPT_BYTES // 2:
            self._decode(one, offset, buffer)
            return
        while buffer:
            number, start = divmod(offset, per_matrix)
            part = self._matrix(one, number, per_matrix)[start : start + len(buffer)]
            buffer[: len(part)] = part
            buffer, offset = buffer[len(part) :], offset + len(part)

    def _matrix(self, one: Quantised, number: int, nbytes: int) -> memoryview:
        key = (one.fqn, number)
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                found = memoryview(bytearray(nbytes))
                self._decode(one, number * nbytes, found)
                while self._kept and (len(self._kept) + 1) * nbytes > _MAX_KEPT_BYTES:
                    self._kept.popitem(last=False)
                self._kept[key] = found
            return found

    def _decode(self, one: Quantised, offset: int, buffer: memoryview) -> None:
        import numpy as np

        from ckpt_tools.moving.arrays import array_of, numpy_dtype

        size = self._floats.num_bytes(1)
        first, skipped = divmod(offset, size)
        if skipped or len(buffer) % size:  # only a digest of bytes would ask for that
            whole = memoryview(bytearray((skipped + len(buffer) + size - 1) // size * size))
            self._decode(one, first * size, whole)
            buffer[:] = whole[skipped : skipped + len(buffer)]
            return
        target = array_of(buffer, self._floats, (-1,))
        for start in range(0, len(target), _PIECE_ELEMS):
            piece = target[start : start + _PIECE_ELEMS]
            with np.errstate(all="ignore"):
                values = one.decode(self._read, first + start, len(piece))
                piece[:] = values.astype(numpy_dtype(self._floats), copy=False)


class _Reader:
    """Reads runs of stored elements, wherever their chunks lie; from any thread."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._local = threading.local()

    def __call__(self, entry: TensorEntry, first: int, count: int) -> Bytes:
        import numpy as np

        reader: BytesReader | None = getattr(self._local, "reader", None)
        if reader is None:
            reader = self._local.reader = BytesReader(self._opened)
        content = np.empty(entry.dtype.num_bytes(count), np.uint8)
        position = 0
        for box in flat_boxes(entry.shape, first, first + count):
            nbytes = entry.dtype.num_bytes(box.num_elems)
            reader.read_into(entry, box, entry.dtype, content.data[position : position + nbytes])
            position += nbytes
        return content
