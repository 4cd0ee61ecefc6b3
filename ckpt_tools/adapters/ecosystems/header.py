"""The header that kohya's tools, ComfyUI's managers and Civitai read: what a file is, and how it was trained.

Source: kohya-ss/sd-scripts, library/train_util.py (`precalculate_safetensors_hashes`), library/sai_model_spec.py
(ModelSpec 1.0.1) and train_network.py; musubi-tuner, utils/sai_model_spec.py; ai-toolkit, toolkit/metadata.py;
willmiao/ComfyUI-Lora-Manager, py/utils/lora_metadata.py.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from ckpt_tools.adapters.architectures import ARCHITECTURES
from ckpt_tools.adapters.architectures.architecture import Architecture
from ckpt_tools.adapters.ecosystems.output import Output
from ckpt_tools.adapters.families import family_of
from ckpt_tools.adapters.families.family import Module
from ckpt_tools.formats.safetensors import build_header, data_order

_TRAINING = ("ss_", "modelspec.", "training_info")
"""Beginnings of what a trainer says of a run; ai-toolkit's `training_info` has steps and epochs."""
_OF_THE_FILE = ("ss_network_", "modelspec.sai_model_spec", "modelspec.hash", "modelspec.impl", "modelspec.unet_dtype")
"""Beginnings of what a conversion makes anew: the network, the names, the bytes."""
_MODEL_SPEC = "1.0.1"
_LEGACY = slice(0x100000, 0x110000)
"""Bytes of a file by which sd-webui-additional-networks once knew it."""


def header_of(modules: Sequence[Module], architecture: Architecture | None, *, title: str) -> dict[str, str]:
    """Return what the modules and the model family tell; tensors have the last word with all readers."""
    algorithms = Counter(family_of(module).lycoris_algorithm for module in modules)
    is_plain = algorithms.keys() == {"locon"} and not any(module.is_dora for module in modules)
    metadata = {"format": "pt", "ss_network_module": "networks.lora" if is_plain else "lycoris.kohya"}
    if not is_plain:
        args = {"algo": algorithms.most_common(1)[0][0]}
        if any(module.is_dora for module in modules):
            args["dora_wd"] = "True"
        metadata["ss_network_args"] = json.dumps(args)
    ranks = Counter(module.rank.value for module in modules if module.rank is not None)
    if ranks:
        rank = ranks.most_common(1)[0][0]
        alphas = Counter(
            module.alpha.value for module in modules if module.alpha and module.rank and module.rank.value == rank
        )
        metadata["ss_network_dim"] = str(rank)
        if alphas:
            metadata["ss_network_alpha"] = _number(alphas.most_common(1)[0][0])
    if architecture is not None and architecture.base_version:
        metadata["ss_base_model_version"] = architecture.base_version
    if architecture is not None and architecture.model_spec:
        metadata |= {
            "modelspec.sai_model_spec": _MODEL_SPEC,
            "modelspec.architecture": architecture.model_spec,
            "modelspec.implementation": architecture.implementation,
            "modelspec.title": title,
            "modelspec.resolution": architecture.resolution,
        }
    return metadata


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def with_training(output: Output, source: Mapping[str, str]) -> Output:
    """Return the output with what the source's header says of the training run, and with its hashes.

    Memory: the largest tensor, twice when it is cast.
    """
    carried = {
        key: value
        for key, value in source.items()
        if key.startswith(_TRAINING) and not key.startswith(_OF_THE_FILE) and not _is_wrong(key, value, output)
    }
    metadata = {**output.metadata, **carried}
    if any(key.startswith("modelspec.") for key in metadata):
        metadata["modelspec.sai_model_spec"] = _MODEL_SPEC
        size, end = source.get("ss_resolution", ""), source.get("ss_training_finished_at", "")
        found = {"title": source.get("ss_output_name"), "resolution": _resolution(size), "date": _date(end)}
        said = {f"modelspec.{key}": value for key, value in found.items() if value and value != "None"}
        metadata |= {key: value for key, value in said.items() if key not in carried}
    return _hashed(replace(output, metadata=metadata))


def _is_wrong(key: str, value: str, output: Output) -> bool:
    """Does a header name another model family than the one that the file is written for?"""
    written = output.metadata.get(key)
    others = {spec for each in ARCHITECTURES.values() for spec in (each.base_version, each.model_spec)}
    return (value in others and written not in (None, value)) or (key.endswith(".architecture") and "/" not in value)


def _resolution(text: str) -> str | None:
    """Return "(1024, 768)", "1024,768" or "1024" as ModelSpec has it."""
    hit = re.fullmatch(r"\(?(\d+)(?:, ?(\d+))?\)?", text)
    return None if hit is None else f"{hit[1]}x{hit[2] or hit[1]}"


def _date(text: str) -> str | None:
    """Return a time in seconds since 1970 as ISO 8601."""
    try:
        return datetime.fromtimestamp(math.floor(float(text)), UTC).isoformat()
    except (ValueError, OverflowError, OSError):
        return None


def _hashed(output: Output) -> Output:
    """Add the hashes of the data, which stay as they are when somebody changes the header later."""
    entries = {item.name: item for item in output.items}
    training = {key: value for key, value in output.metadata.items() if key.startswith("ss_")}
    ordered = data_order([item.entry for item in output.items])
    head, _ = build_header(ordered, metadata=training)
    whole, legacy = hashlib.sha256(), hashlib.sha256(head[_LEGACY])
    position = len(head)
    for entry in ordered:
        content = entries[entry.fqn].content()
        whole.update(content)
        legacy.update(content[max(0, _LEGACY.start - position) : max(0, _LEGACY.stop - position)])
        position += len(content)
    digest = whole.hexdigest()
    hashes = {"sshs_model_hash": digest, "sshs_legacy_hash": legacy.hexdigest()[:8]}
    if "modelspec.sai_model_spec" in output.metadata:
        hashes["modelspec.hash_sha256"] = f"0x{digest}"
    return replace(output, metadata={**output.metadata, **hashes})
