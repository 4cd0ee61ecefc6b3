"""Dtypes of a checkpoint, and adapters in it, against what a config trains: findings. Pure; no torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.description.dtypes import BY_NAME
from ckpt_tools.preflight.comparison import Comparison
from ckpt_tools.preflight.names_match import fold_names
from ckpt_tools.text import escape_name
from ckpt_tools.units import format_size

_STORED = {"bf16": "BF16", "f16": "F16", "f32": "F32"}


def check_dtypes(
    comparison: Comparison, *, where: str, param_dtype: str | None, master_dtype: str | None, key: str
) -> Iterator[Finding]:
    """Yield what becomes of the checkpoint's dtypes in a run that computes in `param_dtype`, as `key` says."""
    num_bytes: Counter[str] = Counter()
    packed: list[str] = []
    for name, found in comparison.found.items():
        dtype = BY_NAME[found.dtype]
        num_bytes[found.dtype] += math.prod(found.shape) * dtype.bits // 8
        wanted = comparison.tensors.get(name)
        if wanted is not None and BY_NAME[wanted.dtype].is_float and not dtype.is_float:
            packed.append(name)
    if packed:
        kinds = ", ".join(sorted({comparison.found[name].dtype for name in packed}))
        yield Finding.error(
            "checkpoint-dtype",
            where,
            f"{len(packed)} tensors are stored as {kinds}, and the model's are floating-point: {fold_names(packed)}",
            "a quantised checkpoint cannot be trained directly: start from the one that it was made from",
        )
    floats = {name: size for name, size in num_bytes.items() if BY_NAME[name].is_float}
    if not floats:
        return
    total = ", ".join(f"{format_size(size)} of {name}" for name, size in sorted(floats.items()))
    computed = _STORED.get(param_dtype or "")
    if computed is not None and {computed, *floats} >= {"F16", "BF16"}:
        yield Finding.warning(
            "checkpoint-dtype",
            where,
            f"the checkpoint is {total}, and {key} computes in {param_dtype}: between F16 and BF16 either the range "
            "or the precision does not survive",
            "compute in the dtype of the checkpoint, or start from an F32 one",
        )
    elif len(floats) > 1:
        yield Finding.info("checkpoint-dtype", where, f"several dtypes are stored: {total}")
    master = _STORED.get(master_dtype or "")
    if master == "F32" and set(floats) & {"F16", "BF16"}:
        yield Finding.info(
            "checkpoint-dtype", where, f"the checkpoint is {total}; the optimizer's copy is F32, twice as large"
        )


def check_adapters(
    comparison: Comparison,
    shapes: Mapping[str, Sequence[int]],
    *,
    where: str,
    rank: int | None,
    has_adapter: bool,
    key: str,
) -> Iterator[Finding]:
    """Yield what is to be said about adapters in the checkpoint; `rank` is that of the run's, as `key` says."""
    if not comparison.adapters:
        return
    count = len(comparison.adapters)
    if not has_adapter:
        alone = not comparison.found
        yield Finding.error(
            "checkpoint-adapter",
            where,
            f"{'an adapter, not a model' if alone else 'the model and an adapter in one'}: {count} tensors such as "
            f"{escape_name(comparison.adapters[0])}; the config trains no adapter, and they would be ignored",
            f"merge it first: ckpt merge-lora BASE {where} NEW",
        )
        return
    ranks = {
        min(shapes[fqn]) for fqn in comparison.adapters if fqn in shapes and len(shapes[fqn]) == 2 and "lora_A" in fqn
    }
    if rank is not None and ranks and ranks != {rank}:
        yield Finding.error(
            "checkpoint-adapter",
            where,
            f"the adapter in it has rank {', '.join(map(str, sorted(ranks)))}, {key} says {rank}",
            f"set {key} to the rank of the checkpoint",
        )
    elif not comparison.found:
        yield Finding.info(
            "checkpoint-adapter", where, f"{count} tensors of an adapter; the base model's are not in it"
        )
