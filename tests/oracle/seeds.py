"""Checkpoints of a few KB in every format that stock libraries load, and how stock libraries load them."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

import torch
from corrupt import every_bit
from formats.saved import Flat, flat
from samples import without_ranks

from ckpt_tools import api

_WEIGHT = torch.arange(24.0).reshape(6, 4) / 7
MODEL = {
    "embed.weight": _WEIGHT,
    "layers.0.up.weight": _WEIGHT * 3,
    "layers.1.up.weight": _WEIGHT.flip(0) - 2,
    "layers.0.norm.weight": torch.linspace(-1, 1, 4).bfloat16(),
    "steps": torch.tensor(7),
}


@dataclass(frozen=True, slots=True)
class Seed:
    """One way to save `MODEL`, or a trainer's state with it."""

    make: Callable[[Path], None]
    """Fills an empty directory."""
    load: Callable[[Path, AbstractSet[str] | None], Flat]
    """What the stock library loads of it, or of these names; raises what that raises."""
    file: str = ""
    """What ckpt is given, below the directory."""
    holds: str = ""
    """What may not change unnoticed: "all" (a manifest), "values" (a CRC-32 of every payload), or nothing."""


# What stock libraries load


def load_safetensors(path: Path, keys: AbstractSet[str] | None = None) -> Flat:
    """One file, or what the index lists, as transformers does: all tensors of every file that it names."""
    from safetensors.torch import load_file

    index = path / "model.safetensors.index.json"
    wanted = json.loads(index.read_text())["weight_map"] if index.exists() else {}
    names = sorted(set(wanted.values())) or ["model.safetensors"]
    found = flat({fqn: tensor for name in names for fqn, tensor in load_file(path / name).items()})
    assert wanted.keys() <= found.keys(), "the index has names that no file has"
    return found


def load_dcp(path: Path, keys: AbstractSet[str] | None = None) -> Flat:
    """All that `.metadata` lists."""
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    with without_ranks():
        return flat(_load_state_dict_from_keys(keys, checkpoint_id=path))


def load_hf_dcp(path: Path, keys: AbstractSet[str] | None = None) -> Flat:
    """What HuggingFaceStorageWriter wrote."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    with without_ranks():
        return flat(_load_state_dict_from_keys(storage_reader=HuggingFaceStorageReader(str(path))))


def load_saved(path: Path, keys: AbstractSet[str] | None = None) -> Flat:
    """A file of torch.save, or those that an index lists."""
    index = path / "pytorch_model.bin.index.json"
    wanted = json.loads(index.read_text())["weight_map"] if index.exists() else {}
    names = sorted(set(wanted.values())) or [next(name for name in os.listdir(path) if name.endswith((".pt", ".bin")))]
    found: Flat = {}
    for name in names:
        found |= flat(_load_saved(path / name))
    assert wanted.keys() <= found.keys(), "the index has names that no file has"
    return found


def _load_saved(path: Path) -> object:
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except pickle.UnpicklingError as error:
        if "Unsupported operand" not in str(error):  # LONG4 for a key: no more than an instruction that it lacks
            raise
        return torch.load(path, weights_only=False, map_location="cpu")


# What writes them


def _split(save: Callable[[dict[str, torch.Tensor], Path], None], stem: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        base, suffix = os.path.splitext(stem)
        names = [f"{base}-{i + 1:05d}-of-00002{suffix}" for i in range(2)]
        weight_map = {fqn: names[i % 2] for i, fqn in enumerate(MODEL)}
        for name in names:
            save({fqn: tensor for fqn, tensor in MODEL.items() if weight_map[fqn] == name}, path / name)
        index = {"metadata": {"total_size": sum(t.nbytes for t in MODEL.values())}, "weight_map": weight_map}
        (path / f"{stem}.index.json").write_text(json.dumps(index, indent=1))

    return make


def _safetensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={"format": "pt"})


def _dcp(state: Callable[[], dict[str, object]]) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        import torch.distributed.checkpoint as dcp

        with without_ranks():
            dcp.save(state(), checkpoint_id=path, no_dist=True)

    return make


def _hf_dcp(path: Path) -> None:
    """What two ranks write with `save_distributed`; ckpt's own writer makes the same files (tests/compat)."""
    api.shard(_source(path), path, mesh="dp_shard=2", serialization="safetensors", overwrite=True)
    (path / "ckpt_manifest.json").unlink()


def _by_ckpt(step: Callable[[Path, Path], object]) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        step(_source(path), path)

    return make


def _source(path: Path) -> Path:
    source = path.with_name(path.name + "-source")
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir()
    _safetensors(MODEL, source / "model.safetensors")
    return source


def _sharded(source: Path, path: Path) -> None:
    api.shard(source, path, mesh="dp_shard=4", overwrite=True)


def _without_manifest(source: Path, path: Path) -> None:
    _sharded(source, path)
    (path / "ckpt_manifest.json").unlink()


def _nested() -> dict[str, object]:
    moments = {name: {"step": torch.tensor(3.0), "exp_avg": tensor + 1} for name, tensor in list(MODEL.items())[:2]}
    return {"model": MODEL, "optim": {"state": moments, "param_groups": [{"lr": 0.1}]}, "step": 5}


def _saved(state: Callable[[], object], name: str, *, zipped: bool = True) -> Callable[[Path], None]:
    return lambda path: torch.save(state(), path / name, _use_new_zipfile_serialization=zipped)


def _shared() -> dict[str, object]:
    """Views of one storage, of the one that is turned."""
    return {"a": _WEIGHT, "b": _WEIGHT[2:4], "c": _WEIGHT.t(), "d": MODEL["layers.0.norm.weight"]}


SEEDS: dict[str, Seed] = {
    "safetensors": Seed(lambda p: _safetensors(MODEL, p / "model.safetensors"), load_safetensors),
    "safetensors-index": Seed(_split(_safetensors, "model.safetensors"), load_safetensors),
    "safetensors-manifest": Seed(
        _by_ckpt(lambda s, p: api.gather(s, p, max_shard_size="300", dtype="f32", overwrite=True)),
        *(load_safetensors, "", "all"),
    ),
    "dcp-flat": Seed(_dcp(lambda: dict(MODEL)), load_dcp, holds="values"),
    "dcp-nested": Seed(_dcp(_nested), load_dcp, holds="values"),
    "dcp-4-ranks": Seed(_by_ckpt(_without_manifest), load_dcp, holds="values"),
    "dcp-2-ranks-stock": Seed(every_bit.two_ranks, load_dcp, holds="values"),
    "dcp-manifest": Seed(_by_ckpt(_sharded), load_dcp, holds="all"),
    "hf-dcp": Seed(_hf_dcp, load_hf_dcp),
    "pt-zip": Seed(_saved(_shared, "m.pt"), load_saved, "m.pt", "values"),
    "pt-nested": Seed(_saved(lambda: {"state_dict": MODEL, "epoch": 3}, "m.pt"), load_saved, "m.pt", "values"),
    "pt-legacy": Seed(_saved(_shared, "m.pt", zipped=False), load_saved, "m.pt"),
    "bin-index": Seed(_split(torch.save, "pytorch_model.bin"), load_saved, holds="values"),
    "bin-manifest": Seed(_by_ckpt(lambda s, p: api.gather(s, p, to="torch", overwrite=True)), load_saved, holds="all"),
}
"""By name; `dcp-2-ranks-stock` starts two processes."""
