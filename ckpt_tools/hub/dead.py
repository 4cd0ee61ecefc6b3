"""Does an adapter change anything at all? The two ways in which training frameworks lose one without a word."""

from __future__ import annotations

import os
import re

from ckpt_tools.description.checkpoint import TensorEntry
from ckpt_tools.errors import UnreadableError
from ckpt_tools.formats.safetensors import File
from ckpt_tools.maps import is_factor
from ckpt_tools.storage.source import Source

_BLOCK_BYTES = 1 << 20
_LAST_FACTOR = re.compile(r"(?:^|[._])lora_(?:B|up|embedding_B)(?:[._]|$)")
"""The factor that training starts at zero, and that leaves it as soon as anything was learnt."""


def refuse_dead(source: Source, file: File) -> None:
    """Refuse an adapter with empty factors, or one of which every last factor is zero.

    Source: trl#4416 and peft#2892 (ZeRO-3's empty placeholders saved for the weights). Reads one factor until its
    first byte that is not zero.

    Raises:
        UnreadableError: It would load and change nothing, or not load.
    """
    where = os.path.join(source.root, file.name)
    factors = [entry for entry in file.header.tensors if is_factor(entry.fqn)]
    empty = [entry for entry in factors if 0 in entry.shape]
    if empty:
        raise UnreadableError(
            f"{len(empty)} of {len(factors)} factors are empty, {empty[0].fqn} the first",
            where=where,
            hint="the adapter was saved from one rank's shards: gather it first (ckpt export-lora from the checkpoint)",
        )
    last = [entry for entry in factors if _LAST_FACTOR.search(entry.fqn)]
    if last and all(_is_zero(source, entry) for entry in last):
        raise UnreadableError(
            f"all {len(last)} B factors are zero: the adapter loads and changes nothing",
            where=where,
            hint="it was saved untrained, or without its weights: ckpt check-lora shows more",
        )


def _is_zero(source: Source, entry: TensorEntry) -> bool:
    for chunk in entry.chunks:
        for start in range(0, chunk.span.nbytes, _BLOCK_BYTES):
            size = min(_BLOCK_BYTES, chunk.span.nbytes - start)
            if any(source.read(chunk.span.file, chunk.span.offset + start, size)):
                return False
    return True
