"""What stands beside an adapter's tensors: adapter_config.json, the header's metadata, trainers' own files.

Every value comes with where it was found. The files are input like any other: bounded, checked, never executed.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ckpt_tools.adapters.adapter import Sourced
from ckpt_tools.errors import LimitError, UnreadableError, UsageError
from ckpt_tools.formats._json import parse_json
from ckpt_tools.formats.opening import Opened, read_document
from ckpt_tools.models.config import CONFIG_NAME, config_in
from ckpt_tools.placement.plain_yaml import load_yaml
from ckpt_tools.remote.places import is_directory, is_file, is_remote, open_source
from ckpt_tools.storage.source import Source

ADAPTER_CONFIG = "adapter_config.json"
DIFFUSERS_KEY = "lora_adapter_metadata"
"""Header of diffusers' files: the configuration of every model of the pipeline."""
DIFFUSERS_HEADER = f"header {DIFFUSERS_KEY}"
"""Source of what diffusers' own header says."""
DORA_SCALE = "ckpt_dora_scale"
"""Header of the files whose dora_scale ckpt made for ComfyUI's normalisation: for other loaders it is wrong."""
BASE_NORM = "base-norm"
"""Value of `DORA_SCALE`: the magnitudes are to be divided by the norms of the base's weights."""
ASSUMED = "ckpt_assumed"
"""Header of exported files: what nothing said of the adapter, "use_rslora=false, …"."""
MODEL_FAMILY = ("ss_base_model_version", "modelspec.architecture")
"""Header of kohya's tools and relatives: what model an adapter is for."""
_VERL = "lora_train_meta.json"
_LYCORIS = "lycoris_config.json"
_AI_TOOLKIT = ("config.yaml", "config.yml")
_MAX_BYTES = 1_000_000
_MAX_PATTERN_CHARS = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecars:
    """Everything that was found."""

    peft: Mapping[str, Sourced[object]] = field(default_factory=dict)
    """Fields of a PEFT configuration."""
    components: Mapping[str, Mapping[str, Sourced[object]]] = field(default_factory=dict)
    """As `peft`, by the component of a pipeline (diffusers' header: "transformer", "text_encoder", …)."""
    alpha: Sourced[float] | None = None
    """Of all modules, by a trainer's file or header."""
    conv_alpha: Sourced[float] | None = None
    """As `alpha`, for convolutions with a kernel."""
    is_ai_toolkit: bool = False
    stated: Mapping[str, Sourced[object]] = field(default_factory=dict)
    """What the header says under `ASSUMED` and `MODEL_FAMILY`."""


def read_json(source: Source, name: str) -> dict[str, object]:
    """Read a small JSON object.

    Raises:
        UnreadableError: It is none.
    """
    where = os.path.join(source.root, name)
    document = parse_json(read_document(source, name, _MAX_BYTES), what=name, where=where)
    if not isinstance(document, dict):
        raise UnreadableError(f"{name} is not a JSON object", where=where)
    return document


def base_config(base: Opened) -> Mapping[str, object]:
    """Return a base model's config.json; {} where there is none.

    Raises:
        UnreadableError: It is not a JSON object.
    """
    if not any(a.file == CONFIG_NAME for a in base.checkpoint.assets):
        return {}
    return config_in(base.source).values


def is_there(path: str) -> bool:
    """Is there a file, or on this machine anything of that name?"""
    return is_file(path) if is_remote(path) else os.path.lexists(path)


def _is_directory(path: str) -> bool:
    try:
        return is_directory(path)
    except UsageError:  # above a repository
        return False


def read_sidecars(directories: Iterable[tuple[str, frozenset[str]]], metadata: Mapping[str, str]) -> Sidecars:
    """Collect what is known beyond the tensors: by the names that are meant in each directory, the nearest first.

    Raises:
        UnreadableError: A file is there and not what its name says.
    """
    peft: dict[str, Sourced[object]] = {}
    components = _diffusers_header(metadata)
    alpha, conv_alpha = _kohya_header(metadata)
    if "" in components:
        peft = dict(components[""])
    if DORA_SCALE in metadata:
        peft[DORA_SCALE] = Sourced(metadata[DORA_SCALE], f"header {DORA_SCALE}")
    for directory, names in directories:
        if not _is_directory(directory):
            continue
        with open_source(directory) as source:
            there = {name for name in names if is_there(os.path.join(directory, name))}
            if ADAPTER_CONFIG in there:
                for key, value in read_json(source, ADAPTER_CONFIG).items():
                    peft.setdefault(key, Sourced(value, ADAPTER_CONFIG))
            if _VERL in there:
                document = read_json(source, _VERL)
                for name in ("lora_alpha", "r", "task_type"):  # 0 where verl does not know
                    if document.get(name) and not _number(peft.get(name)):
                        peft[name] = Sourced(document[name], _VERL)
            if _LYCORIS in there and alpha is None:
                document = read_json(source, _LYCORIS)
                alpha = _found(document.get("linear_alpha", document.get("alpha")), _LYCORIS)
                conv_alpha = _found(document.get("conv_alpha"), _LYCORIS)
            for name in _AI_TOOLKIT:
                if name in there and alpha is None:
                    alpha, conv_alpha = _ai_toolkit(source, name)
    return Sidecars(
        peft=peft,
        components={name: fields for name, fields in components.items() if name},
        alpha=alpha,
        conv_alpha=conv_alpha,
        is_ai_toolkit="ai-toolkit" in metadata.get("software", ""),
        stated={key: Sourced(metadata[key], f"header {key}") for key in (ASSUMED, *MODEL_FAMILY) if key in metadata},
    )


ALL_NAMES = frozenset({ADAPTER_CONFIG, _VERL, _LYCORIS, *_AI_TOOLKIT})
"""Every sidecar."""
TRAINER_NAMES = frozenset({_VERL, _LYCORIS, *_AI_TOOLKIT})
"""Those that trainers put a level above the weights."""


def _number(found: Sourced[object] | None) -> float:
    value = _found(None if found is None else found.value, "")
    return 0.0 if value is None else value.value


def _found(value: object, source: str) -> Sourced[float] | None:
    """Return a number that may be an alpha; text counts when it spells one."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return Sourced(number, source) if math.isfinite(number) else None


def _diffusers_header(metadata: Mapping[str, str]) -> dict[str, dict[str, Sourced[object]]]:
    """Source: diffusers `loaders/lora_base.py`: one flat object, every key behind the component's name."""
    text = metadata.get(DIFFUSERS_KEY)
    if text is None:
        return {}
    source = DIFFUSERS_HEADER
    document = parse_json(text.encode(), what=source, where=None, max_bytes=_MAX_BYTES)
    if not isinstance(document, dict):
        raise UnreadableError(f"{source} is not a JSON object")
    components: dict[str, dict[str, Sourced[object]]] = {}
    for key, value in document.items():
        component, _, name = key.rpartition(".")
        components.setdefault(component, {})[name] = Sourced(value, source)
    return components


def _kohya_header(metadata: Mapping[str, str]) -> tuple[Sourced[float] | None, Sourced[float] | None]:
    """Source: kohya-ss `train_network.py`: numbers as text, the module's arguments as JSON."""
    alpha = _found(metadata.get("ss_network_alpha"), "header ss_network_alpha")
    conv = None
    if "ss_network_args" in metadata:
        source = "header ss_network_args"
        arguments = parse_json(metadata["ss_network_args"].encode(), what=source, where=None, max_bytes=_MAX_BYTES)
        if isinstance(arguments, dict):
            conv = _found(arguments.get("conv_alpha"), source)
    return alpha, conv


def _ai_toolkit(source: Source, name: str) -> tuple[Sourced[float] | None, Sourced[float] | None]:
    """Source: ai-toolkit: config.process[0].network.{linear_alpha, conv_alpha}.

    The file's name is anybody's: what is not of this form is not ai-toolkit's, and says nothing.
    """
    try:
        document = load_yaml(read_document(source, name, _MAX_BYTES).decode())
    except (ValueError, LimitError):
        return None, None
    found: object = document
    for key in ("config", "process", 0, "network"):
        if isinstance(key, int):
            found = found[key] if isinstance(found, list) and found else None
        else:
            found = found.get(key) if isinstance(found, dict) else None
    if not isinstance(found, dict):
        return None, None
    return _found(found.get("linear_alpha"), name), _found(found.get("conv_alpha"), name)


def by_pattern(table: object, path: str, *, where: str) -> tuple[bool, object]:
    """Look a module up in PEFT's rank_pattern or alpha_pattern: the first pattern that its path ends with.

    Returns:
        Whether one matches, and its value.

    Raises:
        UnreadableError: Not a table.
        UsageError: A pattern that is no regular expression, or one that could take for ever.
    """
    if not table:
        return False, None
    if not isinstance(table, dict):
        raise UnreadableError(f"{where} is not a JSON object")
    for pattern, value in table.items():
        if matches(rf"(.*\.)?({pattern})$", path, shown=pattern, where=where):
            return True, value
    return False, None


def matches(pattern: str, text: str, *, shown: str, where: str, full: bool = False) -> bool:
    """Match a regular expression out of a file, which nobody vouches for."""
    # Quantified groups that hold quantifiers take exponential time; module names need none.
    if len(pattern) > _MAX_PATTERN_CHARS or re.search(r"\)\s*[*+{]", shown) or len(re.findall("[*+{]", shown)) > 12:
        raise UsageError(f"the pattern {shown!r} could take forever to match", where=where, hint="name the modules")
    try:
        found = re.fullmatch(pattern, text) if full else re.match(pattern, text)
    except (re.error, RecursionError, OverflowError) as error:
        raise UsageError(f"{shown!r} is not a regular expression: {error}", where=where) from error
    return found is not None
