"""A DoRA as ComfyUI must be given it: with the norms of the base's weights in its magnitudes.

A DoRA is m·(W+ΔW)/‖W+ΔW‖ by row. ComfyUI computes m·(W+ΔW)/‖W‖ (its PR #15458 is open): with m·‖W‖/‖W+ΔW‖ in the
place of m, that is the same. Letters as in `adapter.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ckpt_tools.adapters.adapter import Adapter, AdapterModule, Sourced
from ckpt_tools.adapters.families import dora
from ckpt_tools.adapters.families.change import change_of
from ckpt_tools.adapters.families.family import Module, Setting
from ckpt_tools.adapters.read.sidecars import BASE_NORM, DORA_SCALE
from ckpt_tools.adapters.read.tensors import TensorReader, to_array
from ckpt_tools.description.checkpoint import TensorEntry
from ckpt_tools.errors import UsageError
from ckpt_tools.moving.arrays import Array

_ROWS_AT_ONCE = 512


def with_base_norms(
    adapter: Adapter[Array], tensors: Mapping[str, TensorEntry], reader: TensorReader, source: str
) -> Adapter[Array]:
    """Return the adapter with magnitudes that are divided by ‖W‖ instead of ‖W+ΔW‖, and say so in its settings.

    Memory: the largest adapted weight, and a few hundred rows of it.

    Args:
        adapter: Under the base's module paths.
        tensors: The base's, by the names that a plain model gives them; only weights below a DoRA are read.
        reader: Of these.
        source: Whose they are, for people.

    Raises:
        UsageError: The base does not have a module's weight, or has it in a type without numbers.
    """
    modules = tuple(
        _with_base_norm(module, tensors.get(f"{module.path}.weight"), reader, adapter) if module.is_dora else module
        for module in adapter.modules
    )
    settings = {**adapter.settings, DORA_SCALE: Sourced(BASE_NORM, f"norms of the weights of {source}")}
    return replace(adapter.with_modules(modules), settings=settings)


def _with_base_norm(
    module: Module, entry: TensorEntry | None, reader: TensorReader, adapter: Adapter[Array]
) -> AdapterModule[Array]:
    if entry is None or not entry.dtype.is_float:
        what = "has no weight of this module" if entry is None else f"has {entry.dtype.name} elements here"
        raise UsageError(
            f"ComfyUI's DoRA needs the norms of the base's weights, and the base {what}",
            where=module.path,
            hint="--base takes the model that was trained on, unquantised and with the adapter's own module names",
        )
    setting = Setting(convention=adapter.convention, settings=adapter.settings)
    magnitude = module.factors["magnitude"]
    if dora.is_by_column(module, tuple(magnitude.shape), entry.shape, setting):
        return module  # by column ComfyUI computes as LyCORIS does
    change = change_of(dora.without_magnitude(module), entry.shape, setting)
    weight = to_array(reader, entry).reshape(change.rows, math.prod(entry.shape[1:]))
    ratios = np.empty(change.rows, np.float64)
    for start in range(0, change.rows, _ROWS_AT_ONCE):
        stop = min(start + _ROWS_AT_ONCE, change.rows)
        part = weight[start:stop].astype(np.float64)
        before = np.linalg.norm(part, axis=1)
        part += change.delta(start, stop)
        after = np.linalg.norm(part, axis=1)
        ratios[start:stop] = np.divide(before, after, out=np.zeros_like(before), where=after > 0)
        if bool(((before == 0) & (after > 0) & (magnitude.reshape(-1)[start:stop] != 0)).any()):
            raise UsageError(
                "a row of the base's weight is zero: ComfyUI would divide by its norm",
                where=module.path,
                hint="put the adapter into the base: ckpt merge-lora BASE ADAPTER DST",
            )
    folded = (magnitude.astype(np.float64) * ratios.reshape(magnitude.shape)).astype(np.float32)
    return replace(module, factors={**module.factors, "magnitude": folded})
