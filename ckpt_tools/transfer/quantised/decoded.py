"""A checkpoint without its quantisation: every quantised tensor is a file of plain floats that nobody has written.

Such a file is decoded while it is read, whichever bytes of it are wanted. So maps, casts, meshes and the executor see
floats in files, as of any checkpoint, and know nothing of schemes; of the source no more is read than is asked for.
"""

from __future__ import annotations

import json
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import takewhile
from math import prod
from typing import TYPE_CHECKING

from ckpt_tools.checkpoint.dtypes import BY_NAME, BY_TORCH_NAME, DType
from ckpt_tools.checkpoint.entries import Asset, ByteSpan, Chunk, TensorEntry
from ckpt_tools.checkpoint.formats.opening import Opened
from ckpt_tools.checkpoint.layout import Box, flat_boxes
from ckpt_tools.checkpoint.quantised_units import find_units, is_code
from ckpt_tools.checkpoint.transform import is_optimizer, plain_names
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.models.config import CONFIG_NAME, config_beside, restate_dtype
from ckpt_tools.models.output_names import AssetList
from ckpt_tools.storage.source import Source
from ckpt_tools.storage.virtual import VirtualFile, VirtualSource
from ckpt_tools.text import first_few
from ckpt_tools.transfer.box_reader import BytesReader
from ckpt_tools.transfer.quantised import comfyui, torchao
from ckpt_tools.transfer.quantised.scheme import Found, Quantised, Scheme, Tensors

if TYPE_CHECKING:
    from ckpt_tools.transfer.quantised.scheme import Bytes

# Every scheme of quantisation that ckpt decodes, by the `quant_method` of config.json

SCHEMES: Mapping[str, str] = {
    "fp8": "fp8", "mxfp4": "mxfp4", "bitsandbytes": "bnb", "compressed-tensors": "compressed", "gptq": "gptq",
    "auto-round": "gptq:AUTO_ROUND", "awq": "awq", "modelopt": "modelopt", "torchao": "torchao", "comfyui": "comfyui",
}  # fmt: skip


KEY = "quantization_config"
_OTHER_CONFIGS = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""What libraries also wrote their settings to, or only there, with the `quant_method`. Readers would believe them."""
_PREFIX = "\0decoded/"  # Begins the names of files that nobody has written; no other file has a NUL in its name
_PIECE_ELEMS = 1 << 20  # Decoded at once: a few megabytes of float32
_MAX_KEPT_BYTES = 128 << 20  # Decoded matrices that are kept while they are read in the order of their columns


def dequantised(opened: Opened, dtype: str) -> Opened:
    """Return a checkpoint with plain floats in place of quantised tensors, and a config that says so.

    With `dtype` "keep" they are what config.json says of the model.
    """
    checkpoint, root = opened.checkpoint, "" if opened.origin is None else opened.origin.prefix
    names = plain_names(checkpoint)
    if all(name.startswith(root) for name in names):
        names = {name.removeprefix(root): entry for name, entry in names.items()}
    found, config = _find(opened, {name: replace(entry, fqn=name) for name, entry in names.items()})
    floats = BY_NAME[dtype.upper()] if dtype != "keep" else _dtype_in(config or {})
    if not floats.is_float:
        raise UsageError(f"--dequantize gives floats, not {floats.name}")
    by_stored = {names[entry.fqn].fqn: one for one in found.tensors for entry in one.stored[:1]}
    dropped = {names[name].fqn for name in (*found.dropped, *(e.fqn for one in found.tensors for e in one.stored))}
    tensors = []
    for entry in checkpoint.tensors:
        one = by_stored.get(entry.fqn)
        if one is not None:
            tensors.append(_entry(one, floats, entry))
        elif entry.fqn not in dropped:
            tensors.append(entry)
    if twice := [fqn for fqn, count in Counter(entry.fqn for entry in tensors).items() if count > 1]:
        raise UsageError(f"{first_few(twice)}: both quantised and unquantised")
    companions = {entry.fqn for entry in checkpoint.tensors} - {entry.fqn for entry in names.values()}
    if left := find_units(e for e in tensors if e.fqn in companions and not is_optimizer(e)):
        what = f"quantised weights that are not the model's, and would not be decoded: {first_few(left)}"
        raise UsageError(what, where=checkpoint.root, hint="`ckpt gather --strip-prefix PFX` takes one model")
    decoder = _Decoder(opened, floats)
    files = {_PREFIX + one.fqn: decoder.file(one) for one in found.tensors}
    restated = b"" if config is None else _restated(config, floats)
    files |= {} if config is None else {CONFIG_NAME: VirtualFile.of(restated)}
    assets = [
        Asset(file=asset.file, nbytes=len(restated)) if asset.file == CONFIG_NAME else asset
        for asset in checkpoint.assets
        if asset.file not in _OTHER_CONFIGS
    ]
    what = f"{len(found.tensors)} tensors of {found.what} are decoded to {floats.name}"
    what += "" if config is None else f"; {KEY} is removed from {CONFIG_NAME}"
    if others := [asset.file for asset in checkpoint.assets if asset.file in _OTHER_CONFIGS]:
        what += f", and {first_few(others)} left out"
    if found.dropped:
        what += f"; left out {first_few(found.dropped)}, which only a quantised model has"
    manifest = opened.manifest
    if manifest is not None:  # of its own config, and not of the one that is made
        manifest = replace(manifest, assets={k: v for k, v in manifest.assets.items() if k != CONFIG_NAME})
    return replace(
        opened,
        checkpoint=replace(checkpoint, tensors=tuple(tensors), assets=tuple(assets)),
        source=VirtualSource(opened.source, files),
        manifest=manifest,
        stored={_PREFIX + one.fqn: [replace(e, fqn=names[e.fqn].fqn) for e in one.stored] for one in found.tensors},
        origin=None,
        root=root,
        notes=(*opened.notes, what),
    )


def _find(opened: Opened, tensors: Tensors) -> tuple[Found, Mapping[str, object] | None]:
    """Return what is quantised, by the settings in config.json, and the config; None for a file that needs none."""
    config, settings = config_beside(opened.source), settings_beside(opened.source)
    where = opened.source.root
    if settings is None and comfyui.is_there(tensors):
        return comfyui.SCHEME.find(tensors, {}, _RunReader(opened)), None if config is None else config.values
    if config is None or settings is None:
        what = f"--dequantize: no {CONFIG_NAME} beside the weights has a {KEY}, which defines how they are quantised"
        hint = f"put the model's {CONFIG_NAME} there; weights that are not quantised need no --dequantize"
        raise UsageError(what, where=where, hint=hint)
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in SCHEMES:
        raise UsageError(f"ckpt does not decode {method!r}", where=where, hint=f"supported: {', '.join(SCHEMES)}")
    scheme = load_scheme(method)
    header = torchao.header_of(opened) if scheme is torchao.SCHEME else None
    settings = {**settings, "model_type": config.values.get("model_type"), "header": header}
    found = scheme.find(tensors, settings, _RunReader(opened))
    if not found.tensors:
        raise UsageError(f"{CONFIG_NAME} has {scheme.method}, but no tensor is stored that way", where=where)
    return found, config.values


def load_scheme(method: str) -> Scheme:
    """Return a scheme by the name that config.json has for it."""
    module, _, name = SCHEMES[method].partition(":")
    found: Scheme = getattr(import_module(f"{__package__}.{module}"), name or "SCHEME")
    return found


def is_quantised(opened: Opened) -> bool:
    """Are there quantised weights, or tensors that may be and a config that says so, or 8-bit floats by themselves?"""
    tensors = opened.checkpoint.tensors
    if find_units(tensors) or comfyui.is_there({entry.fqn: entry for entry in tensors}):
        return True
    return any(map(is_code, tensors)) and settings_beside(opened.source) is not None


def settings_beside(source: Source) -> Mapping[str, object] | None:
    """Return what config.json in a directory, or another file there, says of how weights are quantised."""
    config = config_beside(source)
    values = {} if config is None else config.values
    settings = values.get(KEY, _mapping(values.get("text_config")).get(KEY))
    for name, method in _OTHER_CONFIGS.items():
        if not isinstance(settings, Mapping) and (other := config_beside(source, name)) is not None:
            settings = {"quant_method": method, **_mapping(other.values.get("quantization", other.values))}
    return settings if settings and isinstance(settings, Mapping) else None


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _entry(one: Quantised, floats: DType, stored: TensorEntry) -> TensorEntry:
    """Describe what a tensor stands for as floats in a file, in the place of one that it is stored in."""
    plain = one.stored[0].fqn
    shared = sum(1 for _ in takewhile(bool, map(str.__eq__, one.fqn, plain)))
    fqn = stored.fqn.removesuffix(plain[shared:]) + one.fqn[shared:]
    root = "".join(f"{key}." for key in stored.path[:-1])
    path = (*stored.path[:-1], fqn.removeprefix(root)) if stored.path else ()
    nbytes = floats.num_bytes(prod(one.shape))
    span = ByteSpan(file=_PREFIX + one.fqn, offset=0, nbytes=nbytes)
    shape, strides = one.shape, None
    if one.is_transposed:
        *outer, rows, columns = one.shape
        shape = (*outer, columns, rows)
        across = tuple(prod(one.shape[dim + 1 :]) for dim in range(len(outer)))
        strides = (*across, 1, columns)
    chunk = Chunk(box=Box((0,) * len(shape), shape), span=span, strides=strides)
    return TensorEntry(fqn=fqn, dtype=floats, shape=shape, chunks=(chunk,), path=path)


def _dtype_in(config: Mapping[str, object]) -> DType:
    """Return the dtype that a config gives its weights; bfloat16 when it gives none."""
    for values in (config, _mapping(config.get("text_config"))):
        for key in ("dtype", "torch_dtype"):
            found = BY_TORCH_NAME.get(str(values.get(key)).removeprefix("torch."))
            if found is not None and found.is_float:
                return found
    return BY_NAME["BF16"]


def _restated(config: Mapping[str, object], floats: DType) -> bytes:
    """Return the config of a model that is not quantised, without which transformers would quantise it again."""
    stated = without_key(config)
    if "dtype" not in stated and "torch_dtype" not in stated:
        stated["dtype"] = floats.torch_name
    text = (json.dumps(stated, indent=2, ensure_ascii=False) + "\n").encode()
    restated = restate_dtype(text, floats)
    return text if restated is None else restated.text


def without_key(config: Mapping[str, object]) -> dict[str, object]:
    """Return a config that says nothing of quantisation."""
    return {
        key: without_key(value) if key.endswith("_config") and isinstance(value, Mapping) else value
        for key, value in config.items()
        if key != KEY
    }


class _Decoder:
    """Decodes tensors, and keeps what is read in another order than it is decoded in; from any thread."""

    def __init__(self, opened: Opened, floats: DType) -> None:
        self._read = _RunReader(opened)
        self._floats = floats
        self._kept: OrderedDict[tuple[str, int], memoryview] = OrderedDict()
        self._lock = threading.Lock()

    def file(self, one: Quantised) -> VirtualFile:
        """Return the file of one tensor."""
        return VirtualFile(self._floats.num_bytes(prod(one.shape)), partial(self._decode_into, one))

    def _decode_into(self, one: Quantised, offset: int, buffer: memoryview) -> None:
        """Decode bytes; of a matrix that is read by its columns, which means in short runs, all of it at once."""
        per_matrix = self._floats.num_bytes(prod(one.shape[-2:]))
        if not one.is_transposed or per_matrix > _MAX_KEPT_BYTES // 2:
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

        from ckpt_tools.transfer.arrays import array_of, numpy_dtype

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


class _RunReader:
    """Reads runs of stored elements, wherever their chunks lie; from any thread."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._local = threading.local()
        self.columns = Bands(self._boxes).columns

    def __call__(self, entry: TensorEntry, first: int, count: int) -> Bytes:
        return self._boxes(entry, *flat_boxes(entry.shape, first, first + count))

    def _boxes(self, entry: TensorEntry, *boxes: Box) -> Bytes:
        """Return the bytes of boxes, one after the other."""
        import numpy as np

        reader: BytesReader | None = getattr(self._local, "reader", None)
        if reader is None:
            reader = self._local.reader = BytesReader(self._opened)
        content = np.empty(sum(entry.dtype.num_bytes(box.num_elems) for box in boxes), np.uint8)
        position = 0
        for box in boxes:
            nbytes = entry.dtype.num_bytes(box.num_elems)
            reader.read_into(entry, box, entry.dtype, content.data[position : position + nbytes])
            position += nbytes
        return content


# Matrices whose columns are wanted, as quantisers of [out, in] weights store them in [in, out]

_BAND_BYTES = 16 << 20  # Columns that are read at once: runs of some kilobytes, of a matrix of any size
_MAX_BANDS_BYTES = 6 * _BAND_BYTES
"""Workers decode neighbouring rows, which lie in one band or two, beside their scales."""


class Bands:
    """Reads columns in bands and keeps the last ones, so that every byte is read once; for any thread."""

    def __init__(self, read: Callable[[TensorEntry, Box], Bytes]) -> None:
        self._read = read
        self._kept: OrderedDict[tuple[str, int], Bytes] = OrderedDict()
        self._lock = threading.Lock()

    def columns(self, entry: TensorEntry, low: int, high: int) -> Bytes:
        """Return the bytes of columns [low, high) of a matrix, [columns, bytes of one]: shared, not to be changed."""
        import numpy as np

        width = max(1, _BAND_BYTES // max(1, entry.dtype.num_bytes(entry.shape[0])))
        numbers = range(low // width, -(-high // width))
        parts = [self._band(entry, n, width)[max(0, low - n * width) : high - n * width] for n in numbers]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _band(self, entry: TensorEntry, number: int, width: int) -> Bytes:
        import numpy as np

        with self._lock:
            key = entry.fqn, number
            found = self._kept.get(key)
            if found is None:
                (rows, columns), first = entry.shape, number * width
                width = min(width, columns - first)
                stored = self._read(entry, Box((0, first), (rows, width))).reshape(rows, width, -1)
                kind = np.dtype(f"V{stored.shape[2]}")  # elements are moved whole
                found = np.ascontiguousarray(stored.view(kind)[..., 0].T).view(np.uint8).reshape(width, -1)
                self._kept[key] = found
                while sum(band.nbytes for band in self._kept.values()) > _MAX_BANDS_BYTES and len(self._kept) > 1:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
            return found


def is_told(opened: Opened, assets: AssetList) -> bool:
    """Does the config that goes with a checkpoint, or lies beside it, say that weights are quantised?"""
    sources = [source for source, asset in assets if asset.file == CONFIG_NAME]
    try:
        return any(map(settings_beside, (*sources, opened.asset_source or opened.source)))
    except UnreadableError:  # which others say
        return False
