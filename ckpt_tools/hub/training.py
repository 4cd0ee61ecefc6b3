"""What the files beside the weights tell of a training run; which facts, and where they stand: training.toml.

Numbers and plain words alone get into a card: no path, address or name of anybody. What a configuration says was
asked for; what a trainer's state or the weights' header says was done.

Source: transformers 5.23 trainer_callback.py (`TrainerState`) and trainer_pt_utils.py (`all_results.json`); sd-scripts
train_network.py and musubi-tuner hv_train_network.py (`ss_*`); ai-toolkit BaseSDTrainProcess.py (`training_info`, its
config.yaml); axolotl's and LLaMA-Factory's options.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ckpt_tools.checkpoint.formats._json import parse_json
from ckpt_tools.checkpoint.formats.format import read_document
from ckpt_tools.checkpoint.formats.manifest import MANIFEST_NAME
from ckpt_tools.checkpoint.formats.opening import read_file
from ckpt_tools.errors import CkptError
from ckpt_tools.hub.card import Row
from ckpt_tools.storage.source import LocalSource, Source
from ckpt_tools.transfer.placement.plain_yaml import load_yaml

Paths = Mapping[str, Sequence[str]]  # Fact → dotted paths of which the first that is there counts

with open(os.path.join(os.path.dirname(__file__), "training.toml"), "rb") as _file:
    _FACTS: Mapping[str, Any] = tomllib.load(_file)
_JSON: Mapping[str, Paths] = _FACTS["json"]
_PROCESS = "config.process.0"  # Where ai-toolkit's config.yaml has what it does
_BASE_KEYS = ("base_model", "model_name_or_path")
"""A YAML file with one of these and a learning rate is axolotl's, LLaMA-Factory's or TRL's."""
_MAX_BYTES = 64 << 20
_WORD = re.compile(r"[A-Za-z][\w .+-]{0,39}|\(?\d{1,5}, ?\d{1,5}\)?|\d{1,5}x\d{1,5}", re.ASCII)


def training_facts(source: Source, names: Collection[str], headers: Iterable[Mapping[str, str]]) -> tuple[Row, ...]:
    """Return (fact, value, where it stands), each fact once: what was done before what was asked for."""
    found: dict[str, Row] = {}

    def take(document: object, paths: Paths, origin: str) -> None:
        for fact, ways in paths.items():
            value = next((shown for way in ways if (shown := _plain(value_at(document, way))) is not None), None)
            if value is not None:
                found.setdefault(fact, (fact, value, origin))

    for name in filter(names.__contains__, _JSON):
        with suppress(CkptError):  # a trainer's file that is damaged: the card is silent about it
            text = read_document(source, name, _MAX_BYTES)
            take(parse_json(text, what=name, where=None, max_bytes=_MAX_BYTES, infinite=True), _JSON[name], name)
    for metadata in headers:
        nested = {}
        for key in {"training_info", "software"} & metadata.keys():
            with suppress(CkptError):
                nested[key] = parse_json(metadata[key].encode(), what=key, where=None)
        take({**metadata, **nested}, _FACTS["header"], "header of the weights")
    for name in sorted(names):
        document = _yaml(source, name) if name.endswith((".yaml", ".yml")) and "/" not in name else None
        keys = document.keys() if isinstance(document, Mapping) else set()
        if "learning_rate" in keys and any(key in keys for key in _BASE_KEYS):
            take(document, _FACTS["flat"], f"{name} (as configured)")
        take(value_at(document, _PROCESS), _FACTS["ai_toolkit"], f"{name} (as configured)")
    return tuple(found.values())


def training_of(path: str) -> tuple[Row, ...]:
    """Return what stands beside the weights at `path`, and in configurations one level above."""
    above, name = os.path.split(os.path.abspath(path))
    rows: list[Row] = []
    for place, is_own in ((path, True), (above, not os.path.isdir(path))):
        with suppress(CkptError), LocalSource(place) as source:  # a store, or one file: the card is silent
            names = [each for each in source.list_files(max_depth=0) if is_own or each.endswith((".yaml", ".yml"))]
            weights = [each for each in names if each.endswith(".safetensors") and (place == path or each == name)]
            headers = [read_file(source, each).header.metadata for each in weights[:1]]
            rows += training_facts(source, [each for each in names if each != MANIFEST_NAME], headers)
    return tuple({row[0]: row for row in reversed(rows)}.values())[::-1]


def ai_toolkit_config(directory: str) -> object:
    """Return what ai-toolkit's config.yaml in a directory says of its first process; None where there is none."""
    with suppress(CkptError), LocalSource(directory) as source:
        names = source.list_files(max_depth=0)
        found = [_yaml(source, name) for name in ("config.yaml", "config.yml") if name in names]
        return value_at(found[0], _PROCESS) if found else None
    return None


def _yaml(source: Source, name: str) -> object:
    with suppress(CkptError, ValueError):
        return load_yaml(read_document(source, name, 1 << 20).decode(), full=True)
    return None


def value_at(document: object, path: str) -> object:
    """Return what stands at a dotted path; None where nothing does."""
    for key in path.split("."):
        if isinstance(document, list) and key.isdigit():
            document = document[int(key)] if int(key) < len(document) else None
        else:
            document = document.get(key) if isinstance(document, Mapping) else None
    return document


def _plain(value: object) -> str | None:
    """Return a number or a plain word as a card shows it; None for anything else."""
    if isinstance(value, bool) or value in (None, "None", ""):
        return None
    if isinstance(value, str):
        try:
            return _plain(int(value) if value.strip().isdigit() else float(value))
        except ValueError:
            names = (value, value.partition("(")[0].rpartition(".")[2])  # "torch.optim.adamw.AdamW(…)" is AdamW
            return next((text for text in names if _WORD.fullmatch(text)), None)
    if isinstance(value, int):
        return str(value) if 0 <= value < 10**15 else None
    return f"{value:.6g}" if isinstance(value, float) and math.isfinite(value) else None
