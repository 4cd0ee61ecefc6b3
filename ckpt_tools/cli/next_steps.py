"""What can be done next with a checkpoint: at most three commands that can be copied, and work."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple

from ckpt_tools.checkpoint.formats._json import parse_json
from ckpt_tools.checkpoint.formats.file_names import read_part_name
from ckpt_tools.checkpoint.formats.format import read_document
from ckpt_tools.checkpoint.formats.table import find_format
from ckpt_tools.checkpoint.identity import Identity
from ckpt_tools.checkpoint.names import is_adapter
from ckpt_tools.checkpoint.summarise import Summary
from ckpt_tools.errors import CkptError
from ckpt_tools.storage.locations import is_remote, local
from ckpt_tools.storage.source import LocalSource
from ckpt_tools.text import escape_name

_FILES = ("safetensors", "pt", "pth", "bin", "ckpt")
_MAX_SMOKE = 10**9  # Parameters of a model that is tried on any machine
_HOW_TO_OPEN = {"component": "--component", "format": "--from", "shapes_from": "--shapes-from"}
_WHOLE = "check every byte|verify SRC HOW"
_VALUES = (
    "check bytes and values|verify SRC --level values HOW",
    "shard for 8 ranks|shard SRC NEW-dcp --mesh dp_shard=8 HOW",
)
_RANKS = "convert for other ranks|reshard SRC NEW-resharded --mesh dp_shard=RANKS HOW"
_NEXT: Mapping[str, Sequence[str]] = {
    "models": ("show one model of it|inspect SRC --component ONE", _WHOLE, "measure the values|stats SRC"),
    "hollow": ("list the tensors|inspect SRC --tensors HOW",),
    "damaged": ("find what is wrong|verify SRC HOW",),
    "adapter": ("check it (with --base DIR: against its model)|check-lora SRC", _WHOLE),
    "peft": (
        "check it against its model|check-lora SRC --base BASE",
        "write it for PEFT|export-lora SRC NEW-peft --to peft --base BASE",
        "merge it into its model|merge-lora BASE SRC NEW-merged",
    ),
    "one of several": ("show the whole model|inspect DIR",),
    "part": ("measure its values|stats SRC HOW", "convert the part|gather SRC NEW-hf --as-part HOW"),
    "state": (_WHOLE, _RANKS),
    "sharded": (_WHOLE, "convert to one model|gather SRC NEW-hf HOW", _RANKS),
    "sharded without a config": (_WHOLE, "convert (--assets DIR: its config)|gather SRC NEW-hf HOW", _RANKS),
    "small model": (*_VALUES, "try a few training steps|smoke SRC"),
    "model": (*_VALUES, "estimate the memory|estimate SRC --mesh dp_shard=8"),
    "weights": (*_VALUES, "measure the values|stats SRC HOW"),
}
"""Kind → what a command does, and its words; those in capitals stand for others."""


class NextCommand(NamedTuple):
    """A command, and what it does."""

    command: str
    what: str


def next_commands(summary: Summary, given: Mapping[str, object]) -> list[NextCommand]:
    """Return what suits a checkpoint; `given` are the options of `inspect`."""
    identity, source = summary.identity, str(given["source"])
    if identity is None or summary.is_virtual:
        return []
    source = f"./{source}" if source.startswith("-") else source
    how = [word for name, flag in _HOW_TO_OPEN.items() if given.get(name) for word in (flag, str(given[name]))]
    base, whole = _base_of(source), _whole_of(source)
    words = {"SRC": [source], "HOW": how, "ONE": [*identity.components[:1]], "BASE": [base], "DIR": [whole]}
    words["dp_shard=RANKS"] = [f"dp_shard={2 * (identity.num_ranks or 4)}"]

    def fill(word: str) -> list[str]:
        return [_new_path(source, word[4:])] if word.startswith("NEW-") else words.get(word, [word])

    lines = _NEXT[_kind(summary, identity, base, whole, how)]
    if any(text.startswith(("dangerous", "unknown")) for text in identity.executables):
        lines = ("list what its files would run|scan SRC", *lines[:2])
    split = (line.partition("|") for line in lines)
    return [
        NextCommand(" ".join(["ckpt", *map(quote, chain(*map(fill, text.split())))]), what) for what, _, text in split
    ]


def _kind(summary: Summary, identity: Identity, base: str, whole: str, how: Sequence[str]) -> str:
    """Return the kind of a checkpoint, a key of `_NEXT`."""
    stored = find_format(summary.format)
    if identity.components and not how:
        return "models"
    if identity.hollow:
        return "hollow"
    if is_adapter([entry.fqn for entry in summary.tensors]):
        return "peft" if base else "adapter"
    if len(identity.steps) > 1 or any(file.file_bytes is None for file in summary.files):
        return "damaged"
    if identity.whole == "part":
        return "one of several" if whole else "part"
    if stored.is_sharded or summary.contents:
        if not identity.num_parameters:
            return "state"
        return "sharded" if identity.architecture else "sharded without a config"
    if not identity.architecture or stored.name != "hf":
        return "weights"
    return "small model" if identity.num_parameters <= _MAX_SMOKE else "model"


def _base_of(source: str) -> str:
    """Return the directory of the model that PEFT says an adapter belongs to, where it is on this machine."""
    name = "adapter_config.json"
    with suppress(CkptError, KeyError, TypeError), LocalSource(local(source)) as files:
        config: Any = parse_json(read_document(files, name, 1 << 20), what=name, where=None)
        base = str(config["base_model_name_or_path"])
        return base if os.path.isfile(os.path.join(base, "config.json")) and not base.startswith("-") else ""
    return ""


def _whole_of(source: str) -> str:
    """Return the directory that has all parts of the model that a file is one of; "" for any other."""
    directory, name = os.path.split(source)
    part = read_part_name(name)
    if part is None or is_remote(source):
        return ""
    found = map(read_part_name, os.listdir(local(directory or ".")))
    there = {each.index for each in found if each is not None and each.series == part.series}
    return directory or "." if len(there) == part.count else ""


def _new_path(source: str, what: str) -> str:
    """Return a path that does not exist, for what is made of `source`: here, not in the folder of a run."""
    plain = source.rstrip("/") if is_remote(source) else os.path.abspath(source.removeprefix("file://"))
    name = os.path.basename(plain)
    stem, _, end = name.rpartition(".")
    is_inside = not is_remote(source) and os.path.join(os.getcwd(), "").startswith(os.path.join(plain, ""))
    directory = os.path.normpath(os.path.join(source, "..")) if is_inside else "." * name.startswith("-")
    first = os.path.join(directory, f"{stem if end in _FILES else name}-{what}")
    return next(path for path in (first, *(f"{first}-{n}" for n in range(2, 1000))) if not os.path.lexists(path))


def quote(word: str) -> str:
    """Return a word as a shell reads it, with nothing in it that drives a terminal."""
    if escape_name(word) == word:
        return shlex.quote(word)
    return "$'" + "".join(f"\\{byte:03o}" for byte in os.fsencode(word)) + "'"
