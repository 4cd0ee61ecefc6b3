"""Repositories of several models: which directories are models, which of them is meant most, and what lacks.

Source: diffusers 0.42 `pipelines/pipeline_utils.py` (`model_index.json`), sentence-transformers 6.2 `base/model.py`
(`modules.json`); BAGEL and FLUX.1 keep each model in a file of its own, and only the headers say so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from ckpt_tools.checkpoint.entries import Asset
from ckpt_tools.checkpoint.formats._json import MAX_JSON_BYTES, parse_json
from ckpt_tools.checkpoint.formats.candidates import find_sets, is_index
from ckpt_tools.checkpoint.formats.file_names import files_below, is_side_file
from ckpt_tools.checkpoint.formats.format import read_document
from ckpt_tools.checkpoint.formats.identify import expected_beside
from ckpt_tools.checkpoint.formats.manifest import MANIFEST_NAME
from ckpt_tools.checkpoint.formats.part_names import read_part_name
from ckpt_tools.checkpoint.formats.safetensors import FORMAT as ONE_FILE, read_file
from ckpt_tools.checkpoint.formats.steps import HERE, Library, Part, Step
from ckpt_tools.checkpoint.formats.table import detect_format
from ckpt_tools.checkpoint.names import hold
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.storage.journal import JOURNAL_NAME
from ckpt_tools.storage.source import Source
from ckpt_tools.text import first_few

CONFIG_NAME = "config.json"
"""Of a model, beside its weights."""
PIPELINE_NAME = "model_index.json"
"""What the directory of a diffusers pipeline has."""
MODULES_NAME = "modules.json"
"""What that of a sentence-transformers model has."""
FILES_NAME = "ckpt_models.json"
"""What ckpt writes beside models that were one file each in one directory, and that it makes such files again."""
TRAINED = ("transformer", "unet", "prior", "decoder")
"""Components of a pipeline that are trained, the usual one first."""
MARKERS = (PIPELINE_NAME, MODULES_NAME, FILES_NAME)
"""Files that say that there are several models."""
_MOST_ALIKE = 0.1
"""Share of the kinds of tensors that two files may have in common and be two models: end of the name, shape."""
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
    is_one = expected is not None and not hold(list(seen), expected, config).foreign
    return [] if is_one else names  # else they are the parts of the model that config.json names


def find_repository(source: Source, files: Mapping[str, int]) -> Step | None:
    """Return the models of a directory that has several, as the parts of a step; None for any other.

    Raises:
        UnreadableError: The file that says which there are is no JSON.
    """
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
    beside = [each for each in own if each not in (MANIFEST_NAME, JOURNAL_NAME, FILES_NAME)]
    return Step(
        trainer=library,
        parts=tuple(
            Part(directory=each, holds="model", index=number, nbytes=sizes[each], is_saved=True)
            for number, each in enumerate(order)
        ),
        beside=tuple(Asset(file=each, nbytes=files[each]) for each in ([name] if "" in models else beside)),
        lacking=lacking,
    )


def files_of(step: Step, files: Mapping[str, int]) -> dict[str, int]:
    """Return the files of the model that lies in the directory itself."""
    others = {part.directory for part in step.parts}
    own = (name for name in files if "/" not in name or name.partition("/")[0] not in others)
    return {name: files[name] for name in own if name not in step.names}


def without_markers(files: Mapping[str, int]) -> dict[str, int]:
    """Return the files but for those that say that there are several models."""
    return {name: size for name, size in files.items() if name not in MARKERS}


def choose(step: Step | None, component: str, path: str) -> tuple[Step, Part]:
    """Return the repository, and its component of this name.

    Raises:
        UsageError: There is none.
    """
    if step is None:
        what = f"--component is for repositories of several models ({PIPELINE_NAME}, {MODULES_NAME}, a file for each)"
        raise UsageError(what, where=path, hint="leave it out")
    for part in step.parts:
        if (part.name or HERE) == component.rstrip("/"):
            return step, part
    names = first_few(step.components, 12)
    raise UsageError(
        f"{step.title} has no model {component!r}: {names}", where=path, hint=f"--component {step.components[0]}"
    )


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
