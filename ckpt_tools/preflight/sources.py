"""Where the model and the checkpoint of a run lie on this machine: what was passed, or what the config names."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ckpt_tools.errors import UsageError
from ckpt_tools.formats.file_names import is_weights
from ckpt_tools.models.config import CONFIG_NAME, component_of, config_path, read_config
from ckpt_tools.preflight.spec import ParallelSpec
from ckpt_tools.remote.places import exists, is_directory, is_file, open_source
from ckpt_tools.text import escape_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What there is to look at."""

    model: str | None = None
    """Directory with a transformers config.json, or the file."""
    weights: str | None = None
    """Where the base model's weights are, when they are here."""
    checkpoint: str | None = None
    """What to load: what was passed, else what the config resumes from, else the base model's weights."""
    resumes: bool = False
    """`checkpoint` is what the run goes on from, with its optimizer state."""
    not_checked: tuple[str, ...] = ()


def find_sources(spec: ParallelSpec, *, config_path: str, model: str | None, checkpoint: str | None) -> Sources:
    """Find the model's directory and the checkpoint.

    A path of the config counts from the working directory, as for the trainer, then from the config's own. A hub id is
    looked up in the local cache; nothing is downloaded.
    """
    if checkpoint is not None and not exists(checkpoint):
        raise UsageError("there is no such checkpoint", where=checkpoint, hint="--checkpoint takes a path")
    missing: list[str] = []
    directory = _component(_find_model(spec, config_path, model, missing), missing)
    described = None if directory is None else _described(directory, missing, passed=model is not None)
    weights = directory if directory is not None and _has_weights(directory) else None
    resumes = False
    if checkpoint is not None:
        resumes = spec.resume_from is not None
    elif spec.resume_from is not None:
        checkpoint = _existing(spec.resume_from, config_path)
        resumes = checkpoint is not None
        if checkpoint is None:
            key = spec.keys.get("resume_from", "the config")
            missing.append(
                f"the checkpoint that {key} resumes from ({escape_name(spec.resume_from)}), which is not here: "
                "pass --checkpoint"
            )
    if checkpoint is None:
        checkpoint = weights
    if checkpoint is None and spec.resume_from is None:
        missing.append("a checkpoint: there are no weights here (--checkpoint SRC, or a --model directory with them)")
    return Sources(model=described, weights=weights, checkpoint=checkpoint, resumes=resumes, not_checked=tuple(missing))


def _find_model(spec: ParallelSpec, config_path: str, model: str | None, missing: list[str]) -> str | None:
    if model is not None:
        if not exists(model):
            raise UsageError("there is no such model", where=model, hint="--model takes a directory")
        return model
    if spec.model is None:
        key = spec.keys.get("model")
        says = "the config does not name one" if key is None else f"the value of {key} is not in the file"
        missing.append(f"the model: {says}, and --model DIR is not given")
        return None
    found = _existing(spec.model, config_path) or _cached(spec.model)
    if found is None:
        key = spec.keys.get("model", "the config")
        missing.append(
            f"the model: {key} names {escape_name(spec.model)}, which is not on this machine; pass --model DIR"
        )
    return found


def _existing(path: str, config_path: str) -> str | None:
    beside = os.path.join(os.path.dirname(os.path.abspath(config_path)), path)
    return next((one for one in (path, beside) if os.path.exists(one)), None)


def _cached(name: str) -> str | None:
    """Return the snapshot of a hub id in the local cache, if its config is there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, CONFIG_NAME)
    except HFValidationError:  # it is no hub id either
        return None
    return os.path.dirname(found) if isinstance(found, str) else None


def _component(directory: str | None, missing: list[str]) -> str | None:
    """Return the component that is trained, where `directory` is that of a diffusers pipeline."""
    if directory is None:
        return None
    try:
        found, what = component_of(directory)
    except UsageError as error:
        missing.append(f"the model's classes, names and shapes: {error.what}")
        return None
    if what:
        missing.append(f"the other parts of {escape_name(directory)}: the model is {what}")
    return found


def _described(directory: str, missing: list[str], *, passed: bool) -> str | None:
    """Return `directory` when its config.json describes a transformers model; say what it is otherwise."""
    path = config_path(directory)
    where = escape_name(directory)
    if not is_file(path) or not path.endswith(".json"):
        if passed:
            raise UsageError(
                "there is no config.json of a model",
                where=where,
                hint="--model takes the directory that the model was downloaded to, or its config.json",
            )
        missing.append(f"the model's classes, names and shapes: there is no config.json in {where}")
        return None
    if read_config(path).architecture is None:
        missing.append(f"the model's classes, names and shapes: {where} names no architecture")
        return None
    return directory


def _has_weights(directory: str) -> bool:
    if not is_directory(directory):
        return False
    with open_source(directory) as source:
        names = source.list_files(max_depth=0)
    return any(is_weights(name) and name.endswith((".safetensors", ".metadata")) for name in names)
