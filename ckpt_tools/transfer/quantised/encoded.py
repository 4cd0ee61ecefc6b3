"""Weights as 8-bit floats in blocks, which nobody has written: encoded while they are read.

A weight becomes two files: its F8_E4M3 numbers, and its F32 scales, one for each block. Both come from the same 128
rows, which are encoded together, once. So maps, files and the executor see tensors in files, as of any checkpoint.
Source: `Fp8Quantize` of transformers 5.23, whose bytes these are.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.checkpoint.entries import ByteSpan, Chunk, TensorEntry
from ckpt_tools.checkpoint.globs import NameIndex, Names, find_named
from ckpt_tools.checkpoint.layout import Box
from ckpt_tools.errors import UsageError
from ckpt_tools.storage.source import Source
from ckpt_tools.storage.virtual import VirtualFile
from ckpt_tools.transfer.plan import chunk_index
from ckpt_tools.transfer.read import Buffers, read_block

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ckpt_tools.transfer.arrays import Array


# Which tensors of a model are quantised to 8-bit floats: weights of linear layers in the blocks of a language model

BLOCK = 128  # Rows and columns of a block, as in DeepSeek-V3; kernels have no other
_WEIGHT = ".weight"
_PACKED = ".in_proj_weight"  # Of attention as torch has it, which transformers takes apart
_HEAD = "lm_head"  # Stays; named even where the files do not have it, being tied to the embedding
_LINEAR = re.compile(
    r"(?:(?:model|language_model|text_model|transformer|decoder)\.)*(?:layers|h)\.\d+\.(?:\w+\.)*?"
    r"(?:q_proj|k_proj|v_proj|qkv_proj|o_proj|self_attn\.out_proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj"
    r"|gate_proj|up_proj|down_proj|gate_up_proj|fc1|fc2|experts\.\d+\.w[123]"
    r"|linear_attn\.(?:in_proj_qkvz|in_proj_qkv|in_proj_z|out_proj))\.weight"
)
"""Not the small ones that releases keep: routers and gates, DeltaNet's a and b, the indexer's, `eh_proj`."""
_EXPERTS = re.compile(r"(.+\.experts)\.")
_STACKED = re.compile(r"(.+moe)\.\w+\.weight")
"""Experts in one tensor: the live model has them in a module of their own, perhaps below another name."""
_JOINED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
)
"""Layers beside each other that vLLM and SGLang make one of, which has one dtype; the experts of a layer as well."""
_FIRST = {name: names[0] for names in _JOINED for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What is quantised, and what stays."""

    weights: frozenset[str]  # Names of the tensors to quantise
    kept: tuple[str, ...]  # Modules that stay: `modules_to_not_convert`
    uneven: tuple[str, ...]  # Linear layers that stay because they are no whole number of blocks
    asked: tuple[str, ...]  # Those that stay because the user says so
    joined: tuple[str, ...]  # Those that stay because others do with which loaders join them


def choose(tensors: Sequence[TensorEntry], keep: Iterable[str], names: Names) -> Chosen:
    """Return which of a model's tensors are quantised; globs of `keep` match any of their `names`.

    Only whole blocks: kernels take inputs by 128, vLLM joins layers at multiples of 128 rows, and transformers 5.23
    decodes blocks that are smaller at the end with the scales of others. It does not quantise such matrices either.
    """
    index = NameIndex(names)
    matched: set[str] = set().union(*(find_named(f"--keep-precision {glob}", glob, index) for glob in keep))
    matrices = {entry.fqn: entry for entry in tensors if len(entry.shape) > 1}
    linear = {fqn for fqn, entry in matrices.items() if _LINEAR.fullmatch(fqn) and entry.dtype.is_float}
    even = {fqn for fqn in linear if len(shape := matrices[fqn].shape) == 2 and not any(n % BLOCK for n in shape)}
    even = {fqn for fqn in even if matrices[fqn].num_elems}
    weights = _whole_units(even - matched, matrices)
    # To transformers a name is also the end of others, and the beginning: what else it would keep, stays.
    kept = _modules_of(entry for fqn, entry in matrices.items() if fqn not in weights)
    ends = tuple(kept)
    also = {fqn for fqn in weights if fqn.removesuffix(_WEIGHT).endswith(ends) or kept.keys() & _above(fqn)}
    weights = _whole_units(weights - also, matrices)
    modules = tuple(_modules_of(entry for fqn, entry in matrices.items() if fqn not in weights))
    uneven, asked, joined = (tuple(sorted(left)) for left in (linear - even, even & matched, even - matched - weights))
    return Chosen(weights=frozenset(weights), kept=modules, uneven=uneven, asked=asked, joined=joined)


def _whole_units(weights: set[str], matrices: Iterable[str]) -> set[str]:
    """Return those of which everything is there that they are joined with."""
    units: dict[str, set[str]] = defaultdict(set)
    for fqn in matrices:
        units[_unit(fqn)].add(fqn)
    return {fqn for unit in units.values() if unit <= weights for fqn in unit}


def _unit(fqn: str) -> str:
    if found := _EXPERTS.match(fqn):
        return found[1]
    module, _, leaf = fqn.removesuffix(_WEIGHT).rpartition(".")
    return f"{module}.{_FIRST.get(leaf, leaf)}"


def _modules_of(tensors: Iterable[TensorEntry]) -> dict[str, None]:
    """Return the modules of tensors that stay, each once; the experts of a layer are one."""
    modules: dict[str, None] = {_HEAD: None}
    for entry in tensors:
        if found := _EXPERTS.match(entry.fqn):
            modules[found[1]] = None
        elif entry.fqn.endswith((_WEIGHT, _PACKED)):
            modules[entry.fqn.removesuffix(_WEIGHT).removesuffix(_PACKED)] = None
        if len(entry.shape) == 3 and (found := _STACKED.fullmatch(entry.fqn)):
            modules |= dict.fromkeys((f"{found[1]}.experts", "experts"))
    return modules


def _above(fqn: str) -> set[str]:
    parts = fqn.split(".")
    return {".".join(parts[:end]) for end in range(1, len(parts) - 1)}


SCALE = "_scale_inv"  # At the end of a scale's name: what a weight is multiplied by, the inverse of what it was
_PREFIX = "\0encoded/"  # Begins the names of files that nobody has written; no other file has a NUL in its name
_LARGEST = 448  # Of F8_E4M3
_STRIP = 512  # Columns that are computed with at once: a quarter of a megabyte of float32
_MAX_KEPT_BYTES = 64 << 20  # Encoded rows that are kept until the blocks that they are parts of have been read


class _BlockRow:
    """The numbers of one row of blocks, once somebody has had the lock."""

    def __init__(self) -> None:
        self.numbers: memoryview | None = None
        self.lock = threading.Lock()


class Encoder:
    """Encodes matrices of a source, whichever bytes are asked for; from any thread."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._local = threading.local()
        self._lock = threading.Lock()
        self._rows: OrderedDict[tuple[str, int], tuple[_BlockRow, int]] = OrderedDict()
        """With how many bytes they take, the least recently used first."""
        self._scales: dict[tuple[str, int], memoryview] = {}
        """Those of rows that have been encoded; they are read once."""

    def encode(self, entry: TensorEntry) -> tuple[tuple[TensorEntry, TensorEntry], Mapping[str, VirtualFile]]:
        """Return what a matrix of whole blocks (raw chunks) is stored as, weight and scales, and the files of both."""
        chunks = tuple(replace(chunk, crc32=None) for chunk in entry.chunks)  # rows are read, no whole chunks
        entry = replace(entry, chunks=chunks)
        weight = _virtual(entry.fqn, "F8_E4M3", entry.shape)
        scale = _virtual(entry.fqn + SCALE, "F32", tuple(length // BLOCK for length in entry.shape))
        parts = (weight, BLOCK * entry.shape[1], self._numbers), (scale, 4 * entry.shape[1] // BLOCK, self._scales_of)
        files = {
            made.chunks[0].span.file: VirtualFile(made.nbytes, partial(_fill, per_row, partial(rows, entry)))
            for made, per_row, rows in parts
        }
        return (weight, scale), files

    def _numbers(self, entry: TensorEntry, number: int) -> memoryview:
        """Return one row of blocks; who comes second waits for who came first."""
        nbytes = BLOCK * entry.shape[1]
        with self._lock:
            rows, _ = self._rows.setdefault((entry.fqn, number), (_BlockRow(), nbytes))
            self._rows.move_to_end((entry.fqn, number))
            while sum(kept for _, kept in self._rows.values()) > max(_MAX_KEPT_BYTES, nbytes):
                self._rows.popitem(last=False)
        with rows.lock:
            if rows.numbers is None:
                rows.numbers, self._scales[entry.fqn, number] = self._encode(entry, number)
            return rows.numbers

    def _scales_of(self, entry: TensorEntry, number: int) -> memoryview:
        """Return the scales of one row of blocks; encodes what nobody has asked for yet, and somebody will."""
        if (entry.fqn, number) not in self._scales:
            self._numbers(entry, number)
        found = self._scales.pop((entry.fqn, number), None)
        return self._encode(entry, number)[1] if found is None else found

    def _encode(self, entry: TensorEntry, number: int) -> tuple[memoryview, memoryview]:
        import numpy as np

        from ckpt_tools.transfer.arrays import array_of, bytes_of

        buffers: Buffers | None = getattr(self._local, "buffers", None)
        if buffers is None:
            buffers = self._local.buffers = Buffers()
        columns = entry.shape[1]
        box = Box((number * BLOCK, 0), (BLOCK, columns))
        content = read_block(entry, chunk_index(entry), entry.dtype, box, self._source, buffers)[0]
        values = array_of(content, entry.dtype, box.sizes)
        numbers = np.empty(box.sizes, np.uint8)
        strips = (slice(start, start + _STRIP) for start in range(0, columns, _STRIP))
        scales = np.concatenate([encode_strip(values[:, strip], numbers[:, strip]) for strip in strips])
        if not np.isfinite(scales).all():
            what = f"tensor {entry.fqn!r} has NaN or infinite values, which cannot be quantised"
            hint = f"`ckpt verify --level values` lists them; --keep-precision {entry.fqn} leaves it as it is"
            raise UsageError(what, where=f"rows {number * BLOCK} to {(number + 1) * BLOCK}", hint=hint)
        return bytes_of(numbers), bytes_of(scales)


def encode_strip(values: Array, numbers: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Encode blocks that lie side by side, floats [128, n × 128], into the bytes of `numbers`.

    Return what each block's numbers must be multiplied by; that is not finite where its values are not.
    """
    import numpy as np

    with np.errstate(all="ignore"):
        own = values.astype(np.float32)
        signs = (own.view(np.uint32) >> 24).astype(np.uint8)
        np.abs(own, out=own)
        largest = own.max(axis=0).reshape(-1, BLOCK).max(axis=1)
        scales = np.reciprocal(largest) * np.float32(_LARGEST)  # as torch divides a number by a tensor
        scales[np.isinf(scales)] = 1  # all zero, or nearly: no float32 would scale it
        own *= np.repeat(scales, BLOCK)
        round_magnitudes(own, numbers)
        signs &= 0x80
        numbers |= signs
        inverse: NDArray[np.float32] = np.reciprocal(scales)
        return inverse


def round_magnitudes(values: NDArray[np.float32], numbers: NDArray[np.uint8]) -> None:
    """Round what is not negative to the nearest F8_E4M3, ties to even; what is too large to the largest.

    Five times as fast as ml_dtypes, and other threads run meanwhile: a number's byte is the sum of two, one of which
    counts steps of 2^-9 up to 2^-6, the smallest normal number, and the other the steps from there on, which are those
    of a float32 with three bits of mantissa. `values` are overwritten; `numbers` takes the bytes.
    """
    import numpy as np

    np.minimum(values, _LARGEST, out=values)
    few = np.minimum(values, np.float32(2**-6))
    few += np.float32(2**14)  # whose last bit is 2^-9: rounds, and counts in the last byte
    bits = values.view(np.uint32)
    np.maximum(bits, 0x3C800000, out=bits)  # of 2^-6
    odd = bits >> 20
    odd &= 1
    bits += odd
    bits += 0x7FFFF
    bits >>= 20
    bits += few.view(np.uint32)
    numbers[:] = bits  # the last byte
    numbers -= (0x3C800000 >> 20) & 0xFF


def peak_bytes(entries: Iterable[TensorEntry], num_workers: int) -> int:
    """Return how much memory encoding takes at most, beside the buffers of whoever reads."""
    widest = max((BLOCK * entry.shape[1] * (entry.dtype.bits // 8 + 1) for entry in entries), default=0)
    return _MAX_KEPT_BYTES + num_workers * widest


def _fill(per_row: int, rows: Callable[[int], memoryview], offset: int, buffer: memoryview) -> None:
    """Fill a buffer from rows of so many bytes."""
    while buffer:
        number, start = divmod(offset, per_row)
        part = rows(number)[start : start + len(buffer)]
        buffer[: len(part)] = part
        buffer, offset = buffer[len(part) :], offset + len(part)


def _virtual(fqn: str, dtype: str, shape: tuple[int, ...]) -> TensorEntry:
    kind = BY_NAME[dtype]
    span = ByteSpan(file=_PREFIX + fqn, offset=0, nbytes=kind.num_bytes(shape[0] * shape[1]))
    chunk = Chunk(box=Box((0, 0), shape), span=span)
    return TensorEntry(fqn=fqn, dtype=kind, shape=shape, chunks=(chunk,))
