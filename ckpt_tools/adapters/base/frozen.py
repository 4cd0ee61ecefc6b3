"""The frozen weights that a training checkpoint holds beside its adapter, held against the base of a merge.

They should be the same. Where they are not, something was trained or changed that the adapter's factors do not hold:
biases (`bias="all"`), a base out of which the factors were taken (PiSSA, OLoRA), or it is another base. Without an
optimizer's state or a configuration nothing else in a checkpoint says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckpt_tools.adapters.adapter import TOKENS, Adapter
from ckpt_tools.adapters.base.slots import some
from ckpt_tools.adapters.ecosystems.peft.config_rules import changes_base
from ckpt_tools.adapters.families import FAMILIES, family_of
from ckpt_tools.adapters.read.opening import TensorReader
from ckpt_tools.description.checkpoint import TensorEntry
from ckpt_tools.errors import UsageError
from ckpt_tools.formats.opening import Opened

_MAX_VECTOR_ELEMS = 1 << 20
"""Longer ones are not compared: what is read stays small."""


def refuse_changed(
    adapter: Adapter[TensorEntry], source: Opened, base: Opened, tensors: Mapping[str, TensorEntry]
) -> bool:
    """Refuse an adapter whose source has other biases, norms or values in its smallest adapted weight than the base.

    `tensors` are the base's, by the names that a plain model gives them. Return True if an adapted weight was compared:
    the adapter was trained on the base as it is.
    """
    own, theirs = TensorReader(source), TensorReader(base)

    def differs(name: str) -> bool:
        return not _is_same(adapter.base_tensors[name], tensors[name], own, theirs)

    names = list(_comparable(adapter, tensors))
    adapted = {f"{m.path}.{m.parameter}" for m in adapter.modules if not m.is_saved and m.family != TOKENS}
    weights = [name for name in names if name in adapted]
    weight = min(weights, key=lambda name: (tensors[name].num_elems, name), default=None)
    if weight is not None and not changes_base(adapter) and differs(weight):
        raise UsageError(
            f"{weight} in the checkpoint that holds the adapter differs from the base's: the adapter was "
            "trained on that one",
            where=weight,
            hint="is it the base of the training run? PiSSA, OLoRA and the like change it before training: then "
            "--config init_lora_weights=… makes it an adapter that PEFT loads and merges. To continue anyway, read "
            f"only the factors: --include {_factors(adapter)}",
        )
    vectors = [name for name in names if len(tensors[name].shape) == 1 and tensors[name].num_elems <= _MAX_VECTOR_ELEMS]
    changed = [name for name in vectors if differs(name)]
    if changed:
        is_bias = all(name.endswith(".bias") for name in changed)
        raise UsageError(
            f"{len(changed)} of {len(vectors)} biases and norms in the checkpoint that holds the adapter differ from "
            f"the base's: {some(list(changed))}",
            where=changed[0],
            hint=("were they trained? --config bias=all includes them" if is_bias else "were they trained, or is this")
            + (" (lora_only: those of adapted modules)" if is_bias else " another base?")
            + f"; to keep those of the base, read only the factors: --include {_factors(adapter)}",
        )
    return weight is not None and not changes_base(adapter)


def _factors(adapter: Adapter[TensorEntry]) -> str:
    """Return the glob of the factors' names."""
    markers = (family_of(module).marker for module in adapter.modules)
    return f"'**{next(filter(None, markers), FAMILIES['lora'].marker)}**'"


def _comparable(adapter: Adapter[TensorEntry], tensors: Mapping[str, TensorEntry]) -> Iterator[str]:
    """Yield the names of parameters that both have, in the same shape and as plain numbers."""
    for name, entry in adapter.base_tensors.items():
        other = tensors.get(name)
        if other is None or other.shape != entry.shape or not name.endswith((".weight", ".bias")):
            continue
        if entry.dtype.is_float and other.dtype.is_float:
            yield name


def _is_same(one: TensorEntry, other: TensorEntry, own: TensorReader, theirs: TensorReader) -> bool:
    """Do they hold the same numbers, or is one of them the other one rounded?"""
    import numpy as np

    from ckpt_tools.moving.arrays import array_of
    from ckpt_tools.moving.casting import cast_array

    first = array_of(own.read(one), one.dtype, (-1,))
    second = array_of(theirs.read(other), other.dtype, (-1,))
    for wide, narrow in ((first, second), (second, first)):
        rounded = np.empty_like(narrow)
        cast_array(wide, rounded)
        if rounded.tobytes() == narrow.tobytes():
            return True
    return False
