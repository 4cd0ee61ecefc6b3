"""What can be done next with a checkpoint: at most three commands that can be copied, and work."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
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

_MOST = 3
_PEFT = "adapter_config.json"
_FILES = ("safetensors", "pt", "pth", "bin", "ckpt")
_MAX_SMOKE = 10**9  # Parameters of a model that is tried on any machine
_HOW_TO_OPEN = {"component": "--component", "format": "--from", "shapes_from": "--shapes-from"}


class NextCommand(NamedTuple):
    """A command, and what it does."""

    command: str
    what: str


def next_commands(summary: Summary, given: Mapping[str, object]) -> list[NextCommand]:
    """Return what suits a checkpoint; `given` are the options of `inspect`."""
    identity = summary.identity
    if identity is None or summary.is_virtual:
        return []
    how = [word for name, flag in _HOW_TO_OPEN.items() if given.get(name) for word in (flag, str(given[name]))]
    source = str(given["source"])
    found = _choose(summary, identity, f"./{source}" if source.startswith("-") else source, how)
    return [NextCommand(" ".join(map(quote, ["ckpt", *words])), what) for what, words in found][:_MOST]


def _choose(summary: Summary, identity: Identity, source: str, how: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield what a command does, and its words."""
    stored = find_format(summary.format)
    pickled = any(text.startswith(("dangerous", "unknown")) for text in identity.executables)
    is_part = identity.whole == "part"
    if pickled:
        yield "what its files would run", ["scan", source]
    if identity.components and not how:
        component = identity.components[0]
        yield "one model of it", ["inspect", source, "--component", component]
        yield "is every byte whole?", ["verify", source]
        yield "the values of each", ["stats", source]
    elif identity.hollow:
        yield "the shapes of its tensors", ["inspect", source, "--tensors", *how]
    elif is_adapter([entry.fqn for entry in summary.tensors]):
        base = _base_of(source)
        with_base = ["--base", base] if base else []
        yield (
            "will its loader take it?" + " (--base DIR: in its model?)" * (not base),
            ["check-lora", source, *with_base],
        )
        yield "for PEFT", ["export-lora", source, beside(source, "peft"), "--to", "peft", *with_base]
        if base:
            yield "merged into its model", ["merge-lora", base, source, beside(source, "merged")]
    elif any(file.file_bytes is None for file in summary.files):
        yield "what is lost with it", ["verify", source, *how]
    elif is_part and (whole := _whole_of(source)):
        yield "the whole model", ["inspect", whole]
    elif is_part:
        yield "its values", ["stats", source, *how]
        yield "the part as safetensors", ["gather", source, beside(source, "hf"), "--as-part", *how]
    elif stored.is_sharded or summary.contents:
        assets = "" if identity.architecture else " (--assets DIR: its config)"
        size = 2 * (identity.num_ranks or 4)
        yield "is every byte whole?", ["verify", source, *how]
        yield f"as one model{assets}", ["gather", source, beside(source, "hf"), *how]
        yield (
            "for other ranks",
            ["reshard", source, beside(source, f"{size}-ranks"), "--mesh", f"dp_shard={size}", *how],
        )
    else:
        yield "are all values finite?", ["verify", source, "--level", "values", *how]
        yield "for 8 ranks of FSDP2", ["shard", source, beside(source, "dcp"), "--mesh", "dp_shard=8", *how]
        if identity.architecture and stored.name == "hf":
            is_small = identity.num_parameters <= _MAX_SMOKE
            yield (
                ("does it train?", ["smoke", source])
                if is_small
                else (
                    "memory of a rank",
                    ["estimate", source, "--mesh", "dp_shard=8"],
                )
            )
        else:
            yield "what its values are like", ["stats", source, *how]


def _base_of(source: str) -> str:
    """Return the directory of the model that PEFT says an adapter belongs to, where it is on this machine."""
    directory = "" if is_remote(source) else local(source)
    with suppress(CkptError, KeyError, TypeError), LocalSource(directory) as files:
        config: Any = parse_json(read_document(files, _PEFT, 1 << 20), what=_PEFT, where=None)
        base = str(config["base_model_name_or_path"])
        return base if os.path.isfile(os.path.join(base, "config.json")) else ""
    return ""


def _whole_of(source: str) -> str:
    """Return the directory that has all parts of the model that a file is one of; "" for any other."""
    directory, name = os.path.split(source)
    part = read_part_name(name)
    if part is None or part.count is None or is_remote(source):
        return ""
    there = {found.index for each in os.listdir(local(directory or ".")) if (found := read_part_name(each)) is not None
             and found.series == part.series}  # fmt: skip
    return directory or "." if len(there) == part.count else ""


def beside(source: str, what: str) -> str:
    """Return a path that does not exist, for what is made of `source`: next to it, or here."""
    plain = source.rstrip("/") if is_remote(source) else os.path.normpath(source.removeprefix("file://"))
    name, directory = os.path.basename(plain), "" if is_remote(source) else os.path.dirname(plain)
    if name in (".", ".."):
        name, directory = os.path.basename(os.path.abspath(plain)), os.path.normpath(os.path.join(plain, ".."))
    stem, _, end = name.rpartition(".")
    if is_remote(source) or not os.access(directory or ".", os.W_OK):
        directory = ""
    first = os.path.join(directory or "." * name.startswith("-"), f"{stem if end in _FILES else name}-{what}")
    return next(path for path in (first, *(f"{first}-{n}" for n in range(2, 1000))) if not os.path.lexists(path))


def quote(word: str) -> str:
    """Return a word as a shell reads it, with nothing in it that drives a terminal."""
    if escape_name(word) == word:
        return shlex.quote(word)
    return "$'" + "".join(f"\\{byte:03o}" for byte in os.fsencode(word)) + "'"
