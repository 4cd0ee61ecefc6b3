"""What the files beside the weights tell of a training run, as data: file → fact → where it stands in it.

Numbers and plain words alone get into a card: no path, address or name of anybody. What a configuration says was
asked for; what a trainer's state or the weights' header says was done.

Source: transformers 5.23 trainer_callback.py (`TrainerState`) and trainer_pt_utils.py (`all_results.json`); sd-scripts
train_network.py and musubi-tuner hv_train_network.py (`ss_*`); ai-toolkit BaseSDTrainProcess.py (`training_info`, its
config.yaml); axolotl's and LLaMA-Factory's options.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping

from ckpt_tools.errors import CkptError
from ckpt_tools.formats._json import parse_json
from ckpt_tools.formats.format import read_document
from ckpt_tools.formats.manifest import MANIFEST_NAME
from ckpt_tools.formats.opening import read_file
from ckpt_tools.hub.card_body import Row
from ckpt_tools.placement.plain_yaml import load_yaml
from ckpt_tools.storage.source import LocalSource, Source

Paths = Mapping[str, tuple[str, ...]]
"""Fact → dotted paths of which the first that is there counts."""

_JSON: Mapping[str, Paths] = {
    "trainer_state.json": {
        "steps": ("global_step",),
        "epochs": ("epoch",),
        "batch size per device": ("train_batch_size",),
        "best metric": ("best_metric",),
    },
    "all_results.json": {"training loss": ("train_loss",), "evaluation loss": ("eval_loss",)},
    "training_state.json": {"steps": ("global_step",)},
}
_HEADER: Paths = {
    "steps": ("training_info.step", "ss_steps"),
    "epochs": ("training_info.epoch", "ss_epoch"),
    "learning rate": ("ss_learning_rate",),
    "learning rate of the U-Net": ("ss_unet_lr",),
    "learning rate of the text encoder": ("ss_text_encoder_lr",),
    "schedule": ("ss_lr_scheduler",),
    "optimizer": ("ss_optimizer",),
    "batch size": ("ss_total_batch_size", "ss_batch_size_per_device"),
    "training images": ("ss_num_train_images",),
    "resolution": ("ss_resolution",),
    "precision": ("ss_mixed_precision",),
    "seed": ("ss_seed",),
    "trained with": ("software.name",),
}
_AI_TOOLKIT: Paths = {
    "steps": ("config.process.0.train.steps",),
    "learning rate": ("config.process.0.train.lr",),
    "optimizer": ("config.process.0.train.optimizer",),
    "batch size": ("config.process.0.train.batch_size",),
    "precision": ("config.process.0.train.dtype",),
}
_FLAT: Paths = {
    "steps": ("max_steps",),
    "epochs": ("num_epochs", "num_train_epochs"),
    "learning rate": ("learning_rate",),
    "schedule": ("lr_scheduler", "lr_scheduler_type"),
    "optimizer": ("optimizer", "optim"),
    "batch size per device": ("micro_batch_size", "per_device_train_batch_size"),
    "gradient accumulation": ("gradient_accumulation_steps",),
    "sequence length": ("sequence_len", "cutoff_len", "max_length"),
    "seed": ("seed",),
}
_BASE_KEYS = ("base_model", "model_name_or_path")
"""A YAML file with one of these and a learning rate is axolotl's, LLaMA-Factory's or TRL's."""
_MAX_BYTES = 64 << 20
_WORD = re.compile(r"[A-Za-z][\w .+-]{0,39}|\(?\d{1,5}, ?\d{1,5}\)?|\d{1,5}x\d{1,5}", re.ASCII)


def training_facts(
    source: Source, names: Iterable[str], headers: Mapping[str, Mapping[str, str]], config: object = None
) -> tuple[Row, ...]:
    """Return (fact, value, where it stands), each fact once: what was done before what was asked for.

    Args:
        source: Where the files are.
        names: Those that may be read.
        headers: Weights → metadata of their safetensors header.
        config: ai-toolkit's config.yaml.
    """
    there = set(names)
    found: dict[str, tuple[str, str]] = {}

    def take(document: object, paths: Paths, origin: str) -> None:
        for fact, ways in paths.items():
            value = next((shown for way in ways if (shown := _plain(_at(document, way))) is not None), None)
            if value is not None:
                found.setdefault(fact, (value, origin))

    for name, paths in _JSON.items():
        if name in there:
            take(_json(source, name), paths, name)
    for metadata in headers.values():
        nested = {key: _loaded(metadata[key]) for key in ("training_info", "software") if key in metadata}
        take({**metadata, **nested}, _HEADER, "header of the weights")
    for name in sorted(there):
        if name.endswith((".yaml", ".yml")) and "/" not in name:
            document = _yaml(source, name)
            if isinstance(document, Mapping) and "learning_rate" in document and any(k in document for k in _BASE_KEYS):
                take(document, _FLAT, f"{name} (as configured)")
    take(config, _AI_TOOLKIT, "config.yaml (as configured)")
    if MANIFEST_NAME in there:
        take(_json(source, MANIFEST_NAME), {"converted from": ("source.format",), "by": ("writer",)}, MANIFEST_NAME)
    return tuple((fact, value, origin) for fact, (value, origin) in found.items())


def training_of(path: str) -> tuple[Row, ...]:
    """Return what stands beside the weights at `path`, and one level above; nothing of what lies elsewhere."""
    found: dict[str, Row] = {}
    directory = path if os.path.isdir(path) else os.path.dirname(os.path.abspath(path))
    for place in (directory, os.path.dirname(os.path.abspath(directory))):
        try:
            with LocalSource(place) as source:
                names = [name for name in source.list_files(max_depth=0) if name != MANIFEST_NAME]
                headers = {}
                if place != directory:  # a run's configuration is that of all its steps; its state is the last one's
                    names = [name for name in names if name.endswith((".yaml", ".yml"))]
                else:
                    wanted = [name for name in names if name.endswith(".safetensors")]
                    wanted = wanted if os.path.isdir(path) else [os.path.basename(path)]
                    headers = {name: read_file(source, name).header.metadata for name in wanted[:1]}
                config = config_of_ai_toolkit(source)
                rows = training_facts(source, names, headers, config)
        except CkptError:  # a store, or no directory that can be read: the card is silent
            continue
        for row in rows:
            found.setdefault(row[0], row)
    return tuple(found.values())


def config_of_ai_toolkit(source: Source) -> object:
    """Return ai-toolkit's config.yaml beside the weights; None where it is not there, or no YAML."""
    names = source.list_files(max_depth=0)
    for name in ("config.yaml", "config.yml"):
        if name in names:
            return _yaml(source, name)
    return None


def trigger_of(config: object) -> str | None:
    """Return the trigger word of ai-toolkit's configuration."""
    word = process_of(config).get("trigger_word")
    return word if isinstance(word, str) and word else None


def process_of(config: object) -> Mapping[str, object]:
    """Return the first process of ai-toolkit's configuration: all that it trains."""
    for key in ("config", "process"):
        config = config.get(key) if isinstance(config, Mapping) else None
    first = config[0] if isinstance(config, list) and config else None
    return first if isinstance(first, Mapping) else {}


def _json(source: Source, name: str) -> object:
    try:
        limit = _MAX_BYTES
        return parse_json(read_document(source, name, limit), what=name, where=None, max_bytes=limit, infinite=True)
    except CkptError:
        return None  # a trainer's file that is none: the card is silent about it


def _yaml(source: Source, name: str) -> object:
    try:
        return load_yaml(read_document(source, name, 1 << 20).decode(), full=True)
    except (CkptError, ValueError):
        return None


def _loaded(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _at(document: object, path: str) -> object:
    for key in path.split("."):
        if isinstance(document, list) and key.isdigit():
            document = document[int(key)] if int(key) < len(document) else None
        elif isinstance(document, Mapping):
            document = document.get(key)
        else:
            return None
    return document


def _plain(value: object) -> str | None:
    """Return a number or a plain word as a card shows it; None for anything else."""
    if isinstance(value, bool) or value is None or value in ("None", ""):
        return None
    if isinstance(value, str):
        try:
            return _plain(int(value) if value.strip().isdigit() else float(value))
        except ValueError:
            names = (value, value.partition("(")[0].rpartition(".")[2])  # "torch.optim.adamw.AdamW(…)" is AdamW
            return next((text for text in names if _WORD.fullmatch(text)), None)
    if isinstance(value, int):
        return str(value) if 0 <= value < 10**15 else None
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.6g}"
    return None
