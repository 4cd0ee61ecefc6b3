"""The formats that ckpt reads: one line each. What reads this table learns of a new format by itself."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from ckpt_tools.errors import UsageError
from ckpt_tools.storage.locations import is_remote
from ckpt_tools.storage.source import LocalSource

if TYPE_CHECKING:
    from ckpt_tools.checkpoint.entries import Checkpoint
    from ckpt_tools.checkpoint.formats.format import Format

FORMATS: Mapping[str, str] = {
    "safetensors": "safetensors",
    "torch": "torch_save",
    "torch-dist": "torch_dist",
    "dcp": "dcp",
    "step": "step",
    "ranks": "rank_files",
    "hf-sharded": "dcp_safetensors",
    "hf": "hf",
    "deepspeed": "deepspeed",
    "deepspeed-fp32": "deepspeed_fp32",
    "torch-dir": "torch_directory",
}
"""Name → module of this room, whose `FORMAT` it is. The first one that detects a directory has it. Modules are
imported when they are needed, so that the names alone cost nothing."""


def find_format(name: str) -> Format:
    """Return the format of this name."""
    if name not in FORMATS:
        raise UsageError(f"{name!r} is not a format", hint=f"--from takes {', '.join(FORMATS)}")
    found: Format = import_module(f"{__package__}.{FORMATS[name]}").FORMAT
    return found


def format_of(checkpoint: Checkpoint) -> Format:
    """Return the format that a description says it has."""
    return find_format(checkpoint.format)


def detect_format(files: Mapping[str, int], *, is_file: bool) -> Format | None:
    """Return the first format that `files` (relative name → size) are of, or None."""
    if not is_file and "metadata.pkl" in files and "config.json" not in files:  # torch_checkpointing's: parts of ranks
        return None
    known = map(find_format, FORMATS)
    return next((kind for kind in known if kind.is_file == is_file and kind.detects(files)), None)


def check_replaceable(destination: str) -> None:
    """Refuse to replace a directory that is neither empty nor a checkpoint."""
    if is_remote(destination) or not os.path.isdir(destination) or not os.listdir(destination):
        return
    with LocalSource(destination) as source:
        files = source.list_files()
        if len(files) == 1 and all(name.endswith(".gguf") for name in files):
            from ckpt_tools.checkpoint.formats import gguf

            gguf.FORMAT.open(source, files, path=destination)  # an adapter, or it raises
        elif detect_format(files, is_file=False) is None:
            raise UsageError(
                "--overwrite only replaces checkpoints; this directory is not one",
                where=destination,
                hint="remove it yourself if nothing in it is needed",
            )
