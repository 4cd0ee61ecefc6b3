"""Checkpoints of a few KB in every format that stock libraries load, and how stock libraries load them."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Mapping, Set as AbstractSet
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from corrupt import every_bit
from formats.saved import Flat, flat
from safetensors.torch import load_file, save_file
from samples import without_ranks
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from ckpt_tools import api

Tensors = Mapping[str, torch.Tensor]
_WEIGHT = torch.arange(24.0).reshape(6, 4) / 7
MODEL = {
    "embed.weight": _WEIGHT,
    "layers.0.up.weight": _WEIGHT * 3,
    "layers.1.up.weight": _WEIGHT.flip(0) - 2,
    "layers.0.norm.weight": torch.linspace(-1, 1, 4).bfloat16(),
    "steps": torch.tensor(7),
}
_SHARED = {"a": _WEIGHT, "b": _WEIGHT[2:4], "c": _WEIGHT.t(), "d": MODEL["layers.0.norm.weight"]}
_MOMENTS = {name: {"step": torch.tensor(3.0), "exp_avg": MODEL[name] + 1} for name in [*MODEL][:2]}
_NESTED = {"model": MODEL, "optim": {"state": _MOMENTS, "param_groups": [{"lr": 0.1}]}, "step": 5}


def load(path: Path, keys: AbstractSet[str] | None = None) -> Flat:
    """What the stock library loads of a directory, or of these names in it, if it can; raises what that raises.

    Of an index all tensors of every file that it names, as transformers does.
    """
    names = sorted(os.listdir(path))
    is_sharded = any(name.startswith("shard-") for name in names)
    if ".metadata" in names or is_sharded:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is unavailable", UserWarning)
            if is_sharded:
                return flat(_load_state_dict_from_keys(storage_reader=dcp.HuggingFaceStorageReader(str(path))))
            return flat(_load_state_dict_from_keys(keys, checkpoint_id=path))
    index = next((name for name in names if name.endswith(".index.json")), None)
    wanted = {} if index is None else json.loads((path / index).read_text())["weight_map"]
    found: Flat = {}
    for name in sorted(set(wanted.values())) or [n for n in names if n.endswith((".safetensors", ".pt", ".bin"))]:
        found |= flat(load_file(path / name) if name.endswith(".safetensors") else _load_saved(path / name))
    assert wanted.keys() <= found.keys(), "the index has names that no file has"
    return found


def _load_saved(path: Path) -> object:
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        if "Unsupported operand" not in str(error):  # LONG4 for a key: no more than an instruction that it lacks
            raise
        return torch.load(path, weights_only=False, map_location="cpu")


def save_safetensors(tensors: Tensors, path: Path) -> None:
    """One file, as transformers writes it."""
    save_file(dict(tensors), path, metadata={"format": "pt"})


def save_split(save: Callable[[Tensors, Path], None], tensors: Tensors, path: Path, stem: str) -> None:
    """Two files and their index."""
    base, suffix = os.path.splitext(stem)
    weight_map = {fqn: f"{base}-{i % 2 + 1:05d}-of-00002{suffix}" for i, fqn in enumerate(tensors)}
    for name in {*weight_map.values()}:
        save({fqn: tensor for fqn, tensor in tensors.items() if weight_map[fqn] == name}, path / name)
    (path / f"{stem}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1))


def save_dcp(state: dict[str, object], path: Path) -> None:
    """What one process saves."""
    with without_ranks():
        dcp.save(state, checkpoint_id=path, no_dist=True)


class Seed(NamedTuple):
    """One way to save a state dict."""

    make: Callable[[Path], object]
    """Fills an empty directory."""
    holds: str = ""
    """What may not change unnoticed: "all" (a manifest), "values" (a CRC-32 of every payload), or nothing."""
    file: str = ""
    """What ckpt is given, below the directory."""


def _by_ckpt(step: Callable[..., object], *, keep: bool = True, **options: object) -> Callable[[Path], None]:
    """What ckpt writes, with its manifest or without."""

    def make(path: Path) -> None:
        source = path.with_name(path.name + "-source")
        shutil.rmtree(source, ignore_errors=True)
        source.mkdir()
        save_safetensors(MODEL, source / "model.safetensors")
        step(source, path, overwrite=True, num_workers=1, **options)
        if not keep:
            (path / "ckpt_manifest.json").unlink()

    return make


SEEDS: dict[str, Seed] = {
    "safetensors": Seed(lambda p: save_safetensors(MODEL, p / "model.safetensors")),
    "safetensors-index": Seed(lambda p: save_split(save_safetensors, MODEL, p, "model.safetensors")),
    "safetensors-manifest": Seed(_by_ckpt(api.gather, max_shard_size="300", dtype="f32"), "all"),
    "dcp-flat": Seed(lambda p: save_dcp(dict(MODEL), p), "values"),
    "dcp-nested": Seed(lambda p: save_dcp(_NESTED, p), "values"),
    "dcp-4-ranks": Seed(_by_ckpt(api.shard, mesh="dp_shard=4", keep=False), "values"),
    "dcp-2-ranks-stock": Seed(every_bit.two_ranks, "values"),
    "dcp-manifest": Seed(_by_ckpt(api.shard, mesh="dp_shard=4"), "all"),
    "hf-dcp": Seed(_by_ckpt(api.shard, mesh="dp_shard=2", serialization="safetensors", keep=False)),
    "pt-zip": Seed(lambda p: torch.save(_SHARED, p / "m.pt"), "values", "m.pt"),
    "pt-nested": Seed(lambda p: torch.save({"state_dict": MODEL, "epoch": 3}, p / "m.pt"), "values", "m.pt"),
    "pt-legacy": Seed(lambda p: torch.save(_SHARED, p / "m.pt", _use_new_zipfile_serialization=False), "", "m.pt"),
    "bin-index": Seed(lambda p: save_split(torch.save, MODEL, p, "pytorch_model.bin"), "values"),
    "bin-manifest": Seed(_by_ckpt(api.gather, to="torch"), "all"),
}
"""By name; `dcp-2-ranks-stock` starts two processes. hf-dcp: as HuggingFaceStorageWriter writes it (tests/compat)."""
