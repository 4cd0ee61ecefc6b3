"""What file names tell of files that no format has claimed: weights of some tool, a model's assets, a trainer's own."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping

INDEX_SUFFIX = ".safetensors.index.json"
METADATA_NAME = ".metadata"
"""The file that makes a directory a DCP checkpoint; written last."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
"""Ends of the names of what `torch.save` writes."""

_WEIGHTS = (
    ".metadata", "*.safetensors", "*.distcp", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx",
    "*.onnx_data", "*.gguf", "*.npz", "*.ot", "*.tflite", "*.index.json",
)  # fmt: skip
_HF_ASSETS = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
    "vocab*", "merges.txt", "*.model", "chat_template*", "*processor*.json", "*.jinja", "*.py", "README.md",
    "LICENSE*", "modules.json", "*_Pooling/config.json", "*sentence*.json",
)  # fmt: skip

_SIDE = re.compile(
    r"(optim|scheduler|scaler|rng_state|random_states|sampler|training_args|data|extra_state)[\w-]*\.\w+"
    r"|(common|train_state)\.pt"  # of Megatron's
)


def is_side_file(name: str) -> bool:
    """Does a trainer keep a pickle of this name beside the weights?"""
    return _SIDE.fullmatch(name) is not None


def is_weights(name: str) -> bool:
    """Does a file of this name hold weights (in any tool's format)?"""
    base = name.rpartition("/")[2]
    return any(fnmatch.fnmatchcase(base, pattern) for pattern in _WEIGHTS)


def is_step_file(name: str) -> bool:
    """Does a trainer keep a file of this name beside the DCP files of a step? Pickles of its own do, weights do not."""
    return "/" not in name and (name.endswith((*PICKLES, ".pkl")) or not is_weights(name))


def is_for_people(name: str) -> bool:
    """Does no program read a file of this name?"""
    base = name.rpartition("/")[2].lower()
    return base.endswith(".md") or base.startswith(("license", "notice", "readme"))


def is_hf_asset(name: str) -> bool:
    """Is a file of this name one that transformers or a tokenizer needs?"""
    return not is_weights(name) and any(fnmatch.fnmatchcase(name, pattern) for pattern in _HF_ASSETS)


def files_below(files: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Return the files of every directory, named relative to it."""
    found: dict[str, dict[str, int]] = {}
    for name, size in files.items():
        directory, slash, rest = name.partition("/")
        if slash:
            found.setdefault(directory, {})[rest] = size
    return found
