"""Repositories of several models: which directories are models, which of them is meant most, and what lacks.

Source: diffusers 0.42 `pipelines/pipeline_utils.py` (`model_index.json`), sentence-transformers 6.2 `base/model.py`
(`modules.json`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from ckpt_tools.description.checkpoint import Asset
from ckpt_tools.errors import UsageError
from ckpt_tools.formats._json import MAX_JSON_BYTES, parse_json
from ckpt_tools.formats.file_names import files_below
from ckpt_tools.formats.format import read_document
from ckpt_tools.formats.manifest import MANIFEST_NAME
from ckpt_tools.formats.steps import HERE, Part, Step
from ckpt_tools.formats.table import detect_format
from ckpt_tools.storage.journal import JOURNAL_NAME
from ckpt_tools.storage.source import Source
from ckpt_tools.text import first_few

CONFIG_NAME = "config.json"
"""Of a model, beside its weights."""
PIPELINE_NAME = "model_index.json"
"""What the directory of a diffusers pipeline has."""
MODULES_NAME = "modules.json"
"""What that of a sentence-transformers model has."""
TRAINED = ("transformer", "unet", "prior", "decoder")
"""Components of a pipeline that are trained, the usual one first."""
MARKERS = (PIPELINE_NAME, MODULES_NAME)
"""Files that say that there are several models."""
_WITH_WEIGHTS = ("Transformer", "Dense", "LayerNorm", "LSTM", "CNN", "WordEmbeddings", "StaticEmbedding", "CLIPModel")
"""Modules of sentence-transformers that do not load without weights."""


def is_repository(files: Mapping[str, int]) -> bool:
    """May a directory with these files be a repository of several models?"""
    if PIPELINE_NAME in files:
        return any(map(_is_model, files_below(files).values()))
    return MODULES_NAME in files and any(
        name[:1].isdigit() and _is_model(at) for name, at in files_below(files).items()
    )


def find_repository(source: Source, files: Mapping[str, int]) -> Step | None:
    """Return the models in a directory that says itself which it has, as the parts of a step; None for any other.

    Raises:
        UnreadableError: What says it is no JSON.
    """
    if not any(name in files for name in MARKERS):
        return None
    name = PIPELINE_NAME if PIPELINE_NAME in files else MODULES_NAME
    document = parse_json(read_document(source, name, MAX_JSON_BYTES), what=name, where=name)
    listed = dict(_list_pipeline(document) if name == PIPELINE_NAME else _list_modules(document))
    below = files_below(files)
    models = {directory for directory in listed if directory and _is_model(below.get(directory, {}))}
    own = {each: size for each, size in files.items() if each.partition("/")[0] not in models or "/" not in each}
    if "" in listed and _is_model({each: size for each, size in own.items() if "/" not in each}):
        models.add("")
    lacking = tuple(each or HERE for each, has in listed.items() if each not in models and has(below.get(each)))
    if not models or (models == {""} and not lacking):
        return None
    first = {directory: number for number, directory in enumerate(("", *TRAINED))}
    order = sorted(models, key=lambda each: (first.get(each, len(first)), each))
    sizes = {each: sum(below[each].values()) if each else sum(own.values()) for each in order}
    beside = [each for each in own if each not in (MANIFEST_NAME, JOURNAL_NAME)]
    return Step(
        trainer="diffusers" if name == PIPELINE_NAME else "sentence-transformers",
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
        what = f"--component is for repositories of several models ({PIPELINE_NAME}, {MODULES_NAME})"
        raise UsageError(what, where=path, hint="leave it out")
    for part in step.parts:
        if (part.directory or HERE) == component.rstrip("/"):
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
