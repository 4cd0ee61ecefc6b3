"""Which format a path holds, from file names alone."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping

from ckpt_tools.description.checkpoint import Format
from ckpt_tools.formats.dcp import METADATA_NAME
from ckpt_tools.formats.hf import INDEX_SUFFIX, SHARDED_FILE
from ckpt_tools.formats.layouts import PICKLES, explain

FORMATS: tuple[Format, ...] = ("safetensors", "hf", "dcp", "hf-sharded")
"""Values of `--from`."""

_WEIGHTS = (
    "*.safetensors", "*.distcp", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx",
    "*.onnx_data", "*.gguf", "*.npz", "*.ot", "*.tflite", "*.index.json",
)  # fmt: skip
_HF_ASSETS = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
    "vocab*", "merges.txt", "*.model", "chat_template*", "*processor*.json", "*.jinja", "*.py", "README.md",
    "LICENSE*", "modules.json", "*_Pooling/config.json", "*sentence*.json",
)  # fmt: skip


def detect(files: Mapping[str, int], *, path: str) -> Format:
    """Return the format of a directory.

    Args:
        files: Relative name → size, as `Source.list_files` gives them.
        path: The directory as the user named it, for messages.

    Raises:
        UnreadableError: Nothing that ckpt reads; the message names the layout when it is known.
    """
    top = [name for name in files if "/" not in name]
    if METADATA_NAME in top:
        return "dcp"
    if any(SHARDED_FILE.fullmatch(name) for name in top):
        return "hf-sharded"
    if any(name.endswith((".safetensors", INDEX_SUFFIX)) for name in top):
        return "hf"
    raise explain(files, path)


def is_weights(name: str) -> bool:
    """Does a file of this name hold weights (in any tool's format)?"""
    base = name.rpartition("/")[2]
    return base == METADATA_NAME or any(fnmatch.fnmatchcase(base, pattern) for pattern in _WEIGHTS)


def is_step_file(name: str) -> bool:
    """Does a trainer keep a file of this name beside the DCP files of a step? Pickles of its own do, weights do not."""
    return "/" not in name and (name.endswith((*PICKLES, ".pkl")) or not is_weights(name))


def is_hf_asset(name: str) -> bool:
    """Is a file of this name one that transformers or a tokenizer needs?"""
    return not is_weights(name) and any(fnmatch.fnmatchcase(name, pattern) for pattern in _HF_ASSETS)
