"""Sets of weights that lie together: which one a loader takes, and whether another is the same model.

Source: transformers 5.23 `modeling_utils._get_resolved_checkpoint_files`; diffusers 0.42 `ModelMixin.from_pretrained`;
peft 0.20 `load_peft_weights`; torch 2.13 `hf_storage.py` (`sharded/`). Trainers resume from their own save.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_tools.checkpoint.dtypes import DType
from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.checkpoint.formats._zero_files import list_saves
from ckpt_tools.checkpoint.formats.file_names import INDEX_SUFFIX
from ckpt_tools.checkpoint.formats.format import Opened
from ckpt_tools.checkpoint.formats.table import FORMATS, find_format
from ckpt_tools.checkpoint.identity import Known
from ckpt_tools.checkpoint.transform import plain_names
from ckpt_tools.storage.locations import is_remote

_LOADERS: Mapping[str, tuple[str, ...]] = {
    "transformers": (
        *("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"),
        "pytorch_model_fsdp.bin",
    ),
    "diffusers": (
        *("diffusion_pytorch_model.safetensors.index.json", "diffusion_pytorch_model.safetensors"),
        *("diffusion_pytorch_model.bin", "diffusion_pytorch_model.bin.index.json"),
    ),
    "peft": ("adapter_model.safetensors", "adapter_model.bin"),
}
"""Loader → the files that it looks for, in its order."""
_LIVE = ("dcp", "step", "ranks", "hf-sharded")
"""Formats of trainers' own saves, which go first."""
_LIVE_FILES = re.compile(
    r"\.metadata|pytorch_model_fsdp_\d+/.*|model_world_size_\d+_rank_\d+\.pt|pytorch_model_fsdp(_\d+)?_rank\d+\.bin"
    r"|shard-\d+-model-\d+-of-\d+\.safetensors"
)
_SHARDED = "sharded"
"""Where torch keeps the ranks' files of what it has consolidated beside it."""
_INDEXES = (INDEX_SUFFIX, ".bin.index.json")
_NUM_TENSORS, _NUM_FAR_TENSORS = 2000, 8
"""Most tensors of which some numbers are compared, on this machine and on another."""
_RUN = 32
"""Elements that are compared at a place."""


@dataclass(frozen=True, slots=True)
class WeightSet:
    """One set of weights in a directory."""

    name: str
    """The file, index or directory that names it."""
    format: str
    why: str
    """Who takes it."""
    names: tuple[str, ...]
    """Files without which it would not be found."""


def is_index(name: str) -> bool:
    """Is a file of this name an index of several files with weights?"""
    return name.endswith(_INDEXES)


def may_be_one_of_several(name: str) -> bool:
    """Does a loader look for a file of this name, among others?"""
    return any(name in names for names in _LOADERS.values())


def find_sets(files: Mapping[str, int]) -> list[WeightSet]:
    """Return the sets of weights in a directory (relative name → size), the one that is taken first."""
    sets: list[WeightSet] = []
    live = next((name for name in _LIVE if find_format(name).detects(files)), None)
    if live is not None and find_format("torch-dist").detects(files):
        return []
    if live is not None:
        names = tuple(filter(_LIVE_FILES.fullmatch, files))
        name = names[0].partition("/")[0] if live == "step" and names else live
        sets.append(WeightSet(name, live, "the save of a trainer", names))
    for loader, names in _LOADERS.items():
        kinds = ((name, "hf" if ".safetensors" in name else "torch-dir") for name in names if name in files)
        sets += [WeightSet(name, kind, f"{loader} looks for it", (name,)) for name, kind in kinds]
    if any(name.startswith(f"{_SHARDED}/shard-") for name in files) and sets:
        sets.append(WeightSet(_SHARDED, "hf-sharded", "the ranks' own files, which torch consolidates", ()))
    if live is None and sets and list_saves(files):
        sets.append(WeightSet("deepspeed", "deepspeed", "DeepSpeed resumes from it", ()))
    return sorted(sets, key=lambda each: files.get(each.name) == 0)


def lies_below(each: WeightSet) -> bool:
    """Is it a directory of its own?"""
    return each.name == _SHARDED or each.format == "step"


def option_for(name: str, path: str) -> str:
    """Return what picks a set of this name: its path, or the format."""
    return f"--from {name}" if name in FORMATS else os.path.join(path, name)


def compare(taken: Opened, other: Opened) -> tuple[Known, str]:
    """Tell whether two sets of weights differ, from names, shapes, dtypes and numbers here and there.

    Names that only one has say nothing: tied weights and buffers are left out by some, and libraries have their own.
    """
    ours, theirs = plain_names(taken.checkpoint), plain_names(other.checkpoint)
    shared = [name for name in ours if name in theirs]
    if not shared:
        return "not known", "its names are others"
    for name in shared:
        one, two = ours[name], theirs[name]
        if one.shape != two.shape:
            return "yes", f"{name!r} is {list(one.shape)}, and {list(two.shape)} there"
        if one.dtype != two.dtype and not (one.dtype.is_float and two.dtype.is_float):
            return "yes", f"{name!r} is {one.dtype.name}, and {two.dtype.name} there"
    most = _NUM_FAR_TENSORS if is_remote(taken.source.root) else _NUM_TENSORS
    chosen = shared[:: math.ceil(len(shared) / most)]
    for name in chosen:
        if not _is_alike(taken, taken.resolve(ours[name]), other, other.resolve(theirs[name])):
            return "yes", f"{name!r} has other values"
    return "no", f"equal wherever it was compared ({len(chosen)} tensors)"


def _is_alike(taken: Opened, one: TensorEntry, other: Opened, two: TensorEntry) -> bool:
    """Are some numbers of a tensor equal, the finer ones rounded to the coarser, at three places?"""
    for part in (0, 2, 3) if 0 not in one.shape else ():
        place = tuple(size * part // 4 for size in one.shape)
        ours, theirs = _run(one, place), _run(two, place)
        if ours is not None and theirs is not None:
            count = min(ours[2], theirs[2])
            left = taken.source.read(*ours[:2], count * one.dtype.bits // 8)
            right = other.source.read(*theirs[:2], count * two.dtype.bits // 8)
            if not (left == right if one.dtype == two.dtype else _is_rounded({one.dtype: left, two.dtype: right})):
                return False
    return True


def _run(entry: TensorEntry, place: tuple[int, ...]) -> tuple[str, int, int] | None:
    """Return (file, offset, elements) of what lies in a row from `place` on; None where it cannot be said."""
    width = entry.dtype.bits
    for chunk in entry.chunks:
        sizes = chunk.box.sizes
        inside = tuple(p - o for p, o in zip(place, chunk.box.offsets, strict=True))
        if chunk.encoding == "raw" and not width % 8 and all(0 <= i < n for i, n in zip(inside, sizes, strict=True)):
            flat = sum(i * math.prod(sizes[dim + 1 :]) for dim, i in enumerate(inside))
            count = min(_RUN, sizes[-1] - inside[-1]) if sizes else 1
            return chunk.span.file, chunk.span.offset + flat * width // 8, count
    return None


def _is_rounded(raw: Mapping[DType, bytes]) -> bool:
    """Are these numbers, by their dtypes, equal, the finer ones rounded to the coarser?"""
    import ml_dtypes  # only where sets of two dtypes lie together
    import numpy as np

    kinds: dict[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
    fine, coarse = (
        np.frombuffer(raw[dtype], kinds[dtype.name])
        for dtype in sorted(raw, key=lambda each: [*kinds].index(each.name))
    )
    with np.errstate(all="ignore"):
        return np.array_equal(fine.astype(coarse.dtype).astype(np.float64), coarse.astype(np.float64), equal_nan=True)
