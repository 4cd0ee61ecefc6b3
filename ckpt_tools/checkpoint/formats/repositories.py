"""Repositories of several models: which directories are models, which of them is meant most, and what lacks.

Source: diffusers 0.42 `pipelines/pipeline_utils.py` (`model_index.json`), sentence-transformers 6.2 `base/model.py`
(`modules.json`); BAGEL and FLUX.1 keep each model in a file of its own, and only the headers say so.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_tools.checkpoint.dtypes import DType
from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.checkpoint.formats._json import MAX_JSON_BYTES, parse_json
from ckpt_tools.checkpoint.formats.deepspeed import list_saves
from ckpt_tools.checkpoint.formats.file_names import (
    CONFIG_NAME,
    INDEX_SUFFIX,
    files_below,
    is_side_file,
    read_part_name,
)
from ckpt_tools.checkpoint.formats.format import Opened, read_document
from ckpt_tools.checkpoint.formats.identify import expected_beside
from ckpt_tools.checkpoint.formats.manifest import MANIFEST_NAME
from ckpt_tools.checkpoint.formats.safetensors import FORMAT as ONE_FILE, read_file
from ckpt_tools.checkpoint.formats.step_layouts import HERE, Library, Step, StepPart
from ckpt_tools.checkpoint.formats.table import FORMATS, detect_format, find_format
from ckpt_tools.checkpoint.identity import Known
from ckpt_tools.checkpoint.names import match_names
from ckpt_tools.checkpoint.transform import plain_names
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.storage.journal import JOURNAL_NAME
from ckpt_tools.storage.locations import is_remote
from ckpt_tools.storage.source import Source
from ckpt_tools.text import counted, first_few

# Sets of weights that lie together: which one a loader takes, and whether another is the same model. Trainers resume
# from their own save. Source: transformers 5.23 `modeling_utils._get_resolved_checkpoint_files`; diffusers 0.42
# `ModelMixin.from_pretrained`; peft 0.20 `load_peft_weights`; torch 2.13 `hf_storage.py` (`sharded/`).

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
_LIVE = ("dcp", "step", "ranks", "hf-sharded")  # Formats of trainers' own saves, which go first
_LIVE_FILES = re.compile(
    r"\.metadata|pytorch_model_fsdp_\d+/.*|model_world_size_\d+_rank_\d+\.pt|pytorch_model_fsdp(_\d+)?_rank\d+\.bin"
    r"|shard-\d+-model-\d+-of-\d+\.safetensors"
)
_SHARDED = "sharded"  # Where torch keeps the ranks' files of what it has consolidated beside it
_INDEXES = (INDEX_SUFFIX, ".bin.index.json")
_NUM_TENSORS, _NUM_FAR_TENSORS = 2000, 8  # Most of which some numbers are compared, here and on another machine
_RUN = 32  # Elements that are compared at a place


@dataclass(frozen=True, slots=True)
class WeightSet:
    """One set of weights in a directory."""

    name: str  # The file, index or directory that names it
    format: str
    why: str  # Who takes it
    names: tuple[str, ...]  # Files without which it would not be found


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
        sets.append(WeightSet(name, live, "a trainer's save", names))
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
    """Tell whether two sets of weights differ, from names, shapes, dtypes and numbers here and there."""
    # Names that only one has say nothing: tied weights and buffers are left out by some, and libraries have their own.
    ours, theirs = plain_names(taken.checkpoint), plain_names(other.checkpoint)
    shared = [name for name in ours if name in theirs]
    if not shared:
        return "not known", "its names differ"
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
            return "yes", f"{name!r} has different values"
    return "no", f"equal wherever it was compared ({counted(len(chosen), 'tensor')})"


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
    import numpy as np  # first, as in transfer/arrays.py

    # isort: split
    import ml_dtypes  # only where sets of two dtypes lie together

    kinds: dict[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
    fine, coarse = (
        np.frombuffer(raw[dtype], kinds[dtype.name])
        for dtype in sorted(raw, key=lambda each: [*kinds].index(each.name))
    )
    with np.errstate(all="ignore"):
        return np.array_equal(fine.astype(coarse.dtype).astype(np.float64), coarse.astype(np.float64), equal_nan=True)


PIPELINE_NAME = "model_index.json"  # What the directory of a diffusers pipeline has
MODULES_NAME = "modules.json"  # What that of a sentence-transformers model has
FILES_NAME = "ckpt_models.json"  # Written beside models that were one file each in one directory: such are made again
TRAINED = ("transformer", "unet", "prior", "decoder")  # Components of a pipeline that are trained, the usual one first
MARKERS = (PIPELINE_NAME, MODULES_NAME, FILES_NAME)  # Files that say that there are several models
_MOST_ALIKE = 0.1  # Share of the kinds of tensors (end of the name, shape) that files of two models may share
_WITH_WEIGHTS = ("Transformer", "Dense", "LayerNorm", "LSTM", "CNN", "WordEmbeddings", "StaticEmbedding", "CLIPModel")
"""Modules of sentence-transformers that do not load without weights."""


def is_repository(files: Mapping[str, int]) -> bool:
    """May a directory with these files be a repository of several models?"""
    below = {name: at for name, at in files_below(files).items() if MODULES_NAME not in files or name[:1].isdigit()}
    return not files.keys().isdisjoint(MARKERS) and any(map(_is_model, below.values()))


def find_models(source: Source, files: Mapping[str, int]) -> list[str]:
    """Return the safetensors files of a directory that are a model each, the largest first; none where it is not sure.

    Two files are two models when no name of a tensor is in both, and next to no end of a name with the same shape:
    variants, versions, averages and parts of one model have these in common. Reads headers.
    """
    top = {name.partition("/")[0]: size for name, size in files.items()}
    names = sorted((name for name in files if name in top and name.endswith(ONE_FILE.suffix)), key=lambda n: -files[n])
    is_other = any(is_index(name) or name + ONE_FILE.suffix in names for name in top)
    is_odd = any(is_side_file(name) or read_part_name(name) or name.startswith(".") for name in names)
    if len(names) < 2 or is_other or is_odd or find_sets(files):
        return []
    seen: set[str] = set()
    kinds: list[set[tuple[str, tuple[int, ...]]]] = []
    for name in names:
        try:
            tensors = read_file(source, name).header.tensors
        except UnreadableError:
            return []
        own = {(re.sub(r"\d+", "*", ".".join(entry.fqn.split(".")[-2:])), entry.shape) for entry in tensors}
        is_alike = any(len(own & other) > _MOST_ALIKE * min(len(own), len(other)) for other in kinds)
        if not own or is_alike or not seen.isdisjoint(entry.fqn for entry in tensors):
            return []
        seen.update(entry.fqn for entry in tensors)
        kinds.append(own)
    expected, config = expected_beside(source)
    is_one = expected is not None and not match_names(list(seen), expected, config).foreign
    return [] if is_one else names  # else they are the parts of the model that config.json names


def find_repository(source: Source, files: Mapping[str, int]) -> Step | None:
    """Return the models of a directory that has several, as the parts of a step; None for any other."""
    name = next((each for each in MARKERS if each in files), "")
    found = [] if name else find_models(source, files)
    below = files_below(files) | {each: {each: files[each]} for each in found}
    document = parse_json(read_document(source, name, MAX_JSON_BYTES), what=name, where=name) if name else found
    library, read = _LIBRARIES.get(name, ("files", _list_files))
    listed = dict(read(document))
    models = {directory for directory in listed if directory and _is_model(below.get(directory, {}))}
    own = {each: size for each, size in files.items() if each.partition("/")[0] not in models}
    if "" in listed and _is_model({each: size for each, size in own.items() if "/" not in each}):
        models.add("")
    lacking = tuple(each or HERE for each, has in listed.items() if each not in models and has(below.get(each)))
    if not models or (models == {""} and not lacking):
        return None
    order = [each for each in dict.fromkeys(("", *TRAINED, *listed)) if each in models]
    sizes = {each: sum(below[each].values()) if each else sum(own.values()) for each in order}
    companions = [each for each in own if each not in (MANIFEST_NAME, JOURNAL_NAME, FILES_NAME)]
    return Step.of_models(
        library, sizes, {each: files[each] for each in ([name] if "" in models else companions)}, *lacking
    )


def files_of(step: Step, files: Mapping[str, int]) -> dict[str, int]:
    """Return the files of the model that lies in the directory itself."""
    others = {part.directory for part in step.parts}
    own = (name for name in files if "/" not in name or name.partition("/")[0] not in others)
    return {name: files[name] for name in own if name not in step.names}


def without_markers(files: Mapping[str, int]) -> dict[str, int]:
    """Return the files but for those that say that there are several models."""
    return {name: size for name, size in files.items() if name not in MARKERS}


def choose(step: Step | None, component: str, path: str) -> tuple[Step, StepPart]:
    """Return the repository, and its component of this name."""
    if step is None:
        what = f"--component needs a repository of several models ({PIPELINE_NAME}, {MODULES_NAME}, a file for each)"
        raise UsageError(what, where=path, hint="leave it out")
    for part in step.parts:
        if (part.name or HERE) == component.rstrip("/"):
            return step, part
    names = first_few(step.components, 12)
    what = f"{step.title} has no model {component!r}: {names}"
    raise UsageError(what, where=path, hint=f"--component {step.components[0]}")


def _is_model(files: Mapping[str, int]) -> bool:
    return detect_format(files, is_file=False) is not None


_Judge = Callable[[Mapping[str, int] | None], bool]


def _list_pipeline(document: object) -> Iterator[tuple[str, _Judge]]:
    """Yield the components of a pipeline, and whether their files are a model's that has lost its weights."""
    for name, kind in (document if isinstance(document, dict) else {}).items():
        if isinstance(kind, list) and len(kind) == 2 and all(isinstance(each, str) for each in kind):
            yield name, lambda files: files is None or CONFIG_NAME in files


def _list_modules(document: object) -> Iterator[tuple[str, _Judge]]:
    """Yield the modules of a sentence-transformers model; many have no weights, and then perhaps no directory."""
    for each in document if isinstance(document, list) else []:
        path, kind = (each.get("path"), each.get("type")) if isinstance(each, dict) else (None, None)
        if isinstance(path, str) and isinstance(kind, str):
            needs = kind.rpartition(".")[2] in _WITH_WEIGHTS
            yield path.strip("/"), lambda _, needs=needs: needs  # type: ignore[misc]


def _list_files(document: object) -> Iterator[tuple[str, _Judge]]:
    yield from ((str(name), lambda _: True) for name in (document if isinstance(document, list) else []))


_LIBRARIES: Mapping[str, tuple[Library, Callable[[object], Iterator[tuple[str, _Judge]]]]] = {
    PIPELINE_NAME: ("diffusers", _list_pipeline),
    MODULES_NAME: ("sentence-transformers", _list_modules),
}
