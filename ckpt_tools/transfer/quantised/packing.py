"""Integers of a few bits in words of 32, and weights [out, in] that are stored as [in, out] of them.

Beside `X.qweight` lie `X.qzeros` and `X.scales`: [groups, out], of groups of inputs. The weight is (q - zero) x scale.
Words are streams of bits, the lowest first, whether or not a number ends where its word does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.transfer.quantised.fp8 import as_float32
from ckpt_tools.transfer.quantised.parts import as_in_model, check_shape, companions, refuse, with_ending
from ckpt_tools.transfer.quantised.scheme import Found, Quantised, ReadRun, Settings, Tensors

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ckpt_tools.transfer.quantised.scheme import F32, Bytes

    Words = NDArray[np.uint32]

WORD = 32
_PARTS = (".qzeros", ".scales", ".g_idx")
_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|(?:word_)?embeddings?|wte|wpe)$")
_OTHERS = (".act_scales", ".w_bf16_to_fp8_scale")
_NOT_UNDONE = ("is_marlin_format", "rotation", "rotation_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayer:
    """A layer's parts."""

    weight: TensorEntry
    zeros: TensorEntry
    scales: TensorEntry
    order: TensorEntry | None  # Which group each input is of; None where groups follow each other
    bits: int
    num_inputs: int
    group_size: int  # Inputs of a group; 0 where only an order says

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight."""
        return self.scales.shape[1], self.num_inputs

    def groups(self, read: ReadRun) -> NDArray[np.int64]:
        """Return which group each input is of."""
        import numpy as np

        plain = np.arange(self.num_inputs) // (self.group_size or self.num_inputs)
        if self.order is None:
            return plain
        kind = np.int64 if self.order.dtype.name == "I64" else np.int32
        found = read(self.order, 0, self.num_inputs).view(kind)
        num_groups = self.scales.shape[0]
        if strange := [int(group) for group in (found.min(), found.max()) if not 0 <= group < num_groups]:
            raise UnreadableError(f"{self.order.fqn!r} names group {strange[0]}, of {num_groups}")
        if self.group_size and not np.array_equal(found, plain):  # some readers would not look at it
            raise UnreadableError(f"{self.order.fqn!r} orders inputs, but config.json has desc_act false")
        return found.astype(np.int64)


Parts = tuple[TensorEntry, TensorEntry, TensorEntry]  # Weight, zeros and scales
Parse = Callable[[str, Parts, Tensors, Settings], PackedLayer]  # Makes a layer of its name and parts
Unpack = Callable[[PackedLayer, ReadRun, int, int], "tuple[F32, F32]"]
"""Returns numbers and zeros of outputs [low, high): [outputs, inputs] and [outputs, groups]."""


def find_layers(what: str, tensors: Tensors, settings: Settings, parse: Parse, unpack: Unpack) -> Found:
    """Return what is stored so; `extra_config` in the settings of config.json has what differs by layer."""
    for key in _NOT_UNDONE:
        refuse(settings, key, None, False)
    extra = settings.get("extra_config")
    found = []
    for stem, weight in with_ending(tensors, ".qweight"):
        if _EMBEDDING.search(stem):
            raise UnreadableError(f"{weight.fqn!r} is a quantised embedding, whose layout ckpt does not know")
        zeros, scales = (companions(tensors, stem + part, of=weight.fqn) for part in _PARTS[:2])
        for entry, kinds in ((weight, ("I32",)), (zeros, ("I32",)), (scales, ("F16", "BF16", "F32"))):
            if entry.dtype.name not in kinds or len(entry.shape) != 2 or not entry.num_elems:
                shown = f"{entry.fqn!r} is {entry.dtype.name} {list(entry.shape)}"
                raise UnreadableError(f"{shown}, not a matrix of {' or '.join(kinds)}")
        own = extra.get(stem) if isinstance(extra, Mapping) else None
        merged = {**settings, **own} if isinstance(own, Mapping) else settings
        refuse(merged, "data_type", None, "int")
        layer = parse(stem, (weight, zeros, scales), tensors, merged)
        parts = [weight, zeros, scales, *([] if layer.order is None else [layer.order])]
        decode = partial(_decode, layer, unpack)
        fqn = f"{stem}.weight"
        found.append(Quantised(fqn=fqn, shape=layer.shape, stored=tuple(parts), decode=decode))
    known = {entry.fqn for one in found for entry in one.stored}
    if strange := [fqn for fqn in tensors if fqn.endswith((*_PARTS, *_OTHERS)) and fqn not in known]:
        what = f"{strange[0]!r} is not part of a weight that ckpt decodes"
        raise UnreadableError(what, hint="without its qweight the checkpoint is incomplete")
    return Found(what=what, tensors=as_in_model(found, settings))


def group_size(settings: Settings, num_inputs: int, weight: TensorEntry, scales: TensorEntry) -> int:
    """Return how many inputs share a scale, as the settings say."""
    size = settings.get("group_size", settings.get("q_group_size"))
    if type(size) is not int or size < -1 or not size:
        raise UsageError(f"quantization_config has group_size {size!r}, but needs a positive number or -1")
    size = max(1, num_inputs) if size == -1 else size
    check_shape(scales, (-(-num_inputs // size), scales.shape[1]), of=weight)
    return size


def num_words(count: int, bits: int) -> int:
    """Return how many words `count` numbers take."""
    return -(-count * bits // WORD)


def _decode(layer: PackedLayer, unpack: Unpack, read: ReadRun, first: int, count: int) -> F32:
    import numpy as np

    low, high = first // layer.num_inputs, -(-(first + count) // layer.num_inputs)
    values, zeros = unpack(layer, read, low, high)
    scales = as_float32(read.columns(layer.scales, low, high).reshape(-1), layer.scales.dtype).reshape(zeros.shape)
    groups = layer.groups(read)
    values -= np.take(zeros, groups, axis=1)
    values *= np.take(scales, groups, axis=1)
    return values.reshape(-1)[first - low * layer.num_inputs :][:count]


def unpack_bytes(content: Bytes, bits: int) -> F32:
    """Return the numbers in bytes, along the last dim: 2, 3, 4 or 8 bits each."""
    import numpy as np

    *outer, length = content.shape
    if 8 % bits == 0:  # flat: indices of two dims take ten times as long
        return np.take(_numbers(bits), content.reshape(-1), axis=0).reshape(*outer, -1)
    each = content.reshape(*outer, length // bits, bits).astype(np.uint32)  # 3 bytes hold 8 numbers of 3 bits
    each <<= np.arange(0, 8 * bits, 8, dtype=np.uint32)
    shifts = np.arange(0, 8 * bits, bits, dtype=np.uint32)
    numbers: Words = (each.sum(axis=-1, dtype=np.uint32, keepdims=True) >> shifts) & np.uint32((1 << bits) - 1)
    return numbers.astype(np.float32).reshape(*outer, -1)


@cache
def _numbers(bits: int) -> F32:
    """Return the numbers that each of the 256 bytes holds."""
    import numpy as np

    return ((np.arange(256)[:, None] >> np.arange(0, 8, bits)) & ((1 << bits) - 1)).astype(np.float32)
