"""The first layers of a model: which tensors are theirs, and the config of the model that they are."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ckpt_tools.checkpoint.entries import Checkpoint
from ckpt_tools.checkpoint.formats.opening import Opened
from ckpt_tools.checkpoint.names.table import load_table
from ckpt_tools.convert.job import with_config
from ckpt_tools.errors import UsageError
from ckpt_tools.models.config import CONFIG_NAME
from ckpt_tools.models.naming import AssetList, Naming, claim_of, name_live

_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
"""Keys that configs have for the number of layers, by whatever name a class knows it."""
_PARTS = ("text_config", "llm_config", "language_config")
"""Where a model that also sees or hears keeps the config of its language model."""
_OTHERS = re.compile(r"vision|visual|audio|image|speech")


def first_layers(opened: Opened, num_layers: int) -> tuple[Checkpoint, AssetList, str]:
    """Return what the first layers of a model need, its files with a config for them, and what was done, for people.

    Everything outside of the layers stays.
    """
    where, assets = opened.source.root, opened.own_assets
    claim = claim_of(assets)
    expected = None if claim is None else load_table().expected(claim.architecture, claim.config)
    if claim is None or expected is None:
        what = f"no {CONFIG_NAME} beside the weights" if claim is None else f"{claim.architecture}, unknown to ckpt"
        raise UsageError(
            f"--layers needs the {CONFIG_NAME} of an architecture that ckpt knows, got {what}",
            where=where,
            hint="--include chooses tensors by their names; the config is then yours to cut",
        )
    stacks = {path: count for path, count in expected.counts.items() if not _OTHERS.search(path)}
    if len(stacks) != 1:
        what = f"{claim.architecture} has {len(stacks)} stacks of layers: {', '.join(stacks)}"
        raise UsageError(what, where=where, hint="--include chooses tensors by their names")
    ((path, count),) = stacks.items()
    if num_layers > count:
        raise UsageError(f"--layers {num_layers}: {CONFIG_NAME} says that there are {count}", where=where)
    in_layer = re.compile(r"(?:.*\.)?" + re.escape(path).replace(r"\*", r"(\d+)") + r"(?:\..*)?")
    numbers = {entry.fqn: found[1] for entry in opened.checkpoint.tensors if (found := in_layer.fullmatch(entry.fqn))}
    if not numbers:  # files whose names are not the live model's
        live = name_live(opened.checkpoint, assets, Naming(), opened.resolve).sources
        numbers = {own: found[1] for fqn, own in live.items() if (found := in_layer.fullmatch(fqn))}
    if not numbers:
        hint = "bring it to the model's own names first: `ckpt rename`"
        raise UsageError(f"no tensor is called {path}", where=where, hint=hint)
    tensors = tuple(e for e in opened.checkpoint.tensors if int(numbers.get(e.fqn, "0")) < num_layers)
    values: dict[str, Any] = copy.deepcopy(dict(claim.config))
    changed = sorted({key for part in _parts(values) for key in _cut(part, count, num_layers)})
    if not changed:
        raise UsageError(f"{CONFIG_NAME} does not say how many layers there are", where=where)
    note = f"the first {num_layers} of {count} layers; {CONFIG_NAME} has other {', '.join(changed)}"
    return replace(opened.checkpoint, tensors=tensors), with_config(assets, values), note


def _parts(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield values
    yield from (part for key in _PARTS if isinstance(part := values.get(key), dict))


def _cut(part: dict[str, Any], count: int, num_layers: int) -> Iterator[str]:
    """Change a config to fewer layers; yield the keys that say so: their number, and lists that speak of each."""
    counts = [key for key in _COUNTS if part.get(key) == count]
    for key in counts:
        part[key] = num_layers
        yield key
    for key, value in part.items():
        if counts and isinstance(value, list) and len(value) == count and ("layer" in key or "block" in key):
            part[key] = value[:num_layers]
            yield key
