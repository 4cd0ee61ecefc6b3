"""Where in a path the adapter is: which file or directory to open, and where its sidecars may lie."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from ckpt_tools.adapters.read.sidecars import ADAPTER_CONFIG, ALL_NAMES, RUN_NAMES, TRAINER_NAMES, is_there
from ckpt_tools.errors import StorageError, UnreadableError, UsageError
from ckpt_tools.formats.file_names import METADATA_NAME
from ckpt_tools.formats.steps import ROLES, is_model_part
from ckpt_tools.remote.places import absolute, is_directory, is_remote, open_place, open_source, scheme_of
from ckpt_tools.text import first_few

PEFT_FILE = "adapter_model.safetensors"
DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
DIFFUSERS_TRAPS = ("scheduler", "optimizer", "checkpoint")
"""diffusers overlooks a file with one of these in its name, and fails when no other is there."""
_VERL_RANK = re.compile(r"model_world_size_\d+_rank_\d+\.pt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """What to open."""

    path: str
    """A safetensors file or a directory."""
    sidecars: tuple[tuple[str, frozenset[str]], ...]
    """Directories in which sidecars may lie, nearest first, and which of them."""
    took_adapter: bool = False
    """The adapter's name chose the directory."""


def locate(path: str, adapter_name: str | None) -> Location:
    """Find the adapter in a file, a PEFT or DCP directory, accelerate's checkpoint, or a directory of adapters."""
    path = _with_neighbours(path)
    if not is_directory(path):
        directory = os.path.dirname(absolute(path))
        return Location(path=path, sidecars=_beside(directory, path))
    files, directories = list_directory(path)
    if METADATA_NAME in files:
        return Location(path=path, sidecars=_around_dcp(path))
    held = sorted(name for name in directories if is_there(os.path.join(path, name, PEFT_FILE)))
    if adapter_name in held:  # PEFT puts each into a directory of its own, and "default" beside these
        chosen = os.path.join(path, str(adapter_name))
        return Location(path=os.path.join(chosen, PEFT_FILE), sidecars=_beside(chosen, PEFT_FILE), took_adapter=True)
    for name in (PEFT_FILE, DIFFUSERS_FILE):
        if name in files:
            return Location(path=os.path.join(path, name), sidecars=_beside(path, name))
    models = sorted(filter(is_model_part, directories))
    if models:
        return Location(path=path, sidecars=_around_dcp(os.path.join(path, models[0])))
    if any(_VERL_RANK.fullmatch(name) for name in files):
        if held:
            raise UsageError(
                "files of verl's ranks, and the adapter by itself beside them",
                where=path,
                hint=f"take what verl wrote for that: {os.path.join(path, held[0])}",
            )
        return Location(path=path, sidecars=_around_dcp(path))
    roles = [role for role in ROLES if role in directories]
    if roles and not files & {PEFT_FILE, ADAPTER_CONFIG}:
        return Location(path=path, sidecars=_around_dcp(os.path.join(path, roles[0])))
    if held and not any(name.endswith(".safetensors") for name in files):
        shown = first_few(held, 6)
        raise UsageError(
            f"a directory of adapters: {shown}",
            where=path,
            hint=f"choose one: --adapter {held[0]}",
        )
    if "adapter_model.bin" in files:
        raise UnreadableError(
            "a pickled adapter (adapter_model.bin), which ckpt does not execute",
            where=path,
            hint="save it again with a PEFT that writes safetensors, in a trusted environment",
        )
    if ADAPTER_CONFIG in files and not any(name.endswith(".safetensors") for name in files):
        raise UnreadableError(
            f"{ADAPTER_CONFIG} without {PEFT_FILE}: the adapter's tensors were not saved",
            where=path,
            hint="use the trainer's sharded checkpoint (pytorch_model_fsdp_0, or its DCP directory)",
        )
    return Location(path=path, sidecars=_beside(path, ""))


def _with_neighbours(path: str) -> str:
    """Return `path`, a page of the hub by its address there; refuse a web server, which lists nothing."""
    if not is_remote(path):
        return path
    source, file = open_place(path)
    with source:
        root = source.root
    if scheme_of(root) in ("http", "https"):
        what = "what belongs to an adapter stands beside it, and a web server does not list its files"
        raise UsageError(what, where=path, hint="download the adapter with its adapter_config.json")
    return root if file is None else os.path.join(root, file)


def list_directory(path: str) -> tuple[set[str], set[str]]:
    """Return the names of files and of directories."""
    files: set[str] = set()
    directories: set[str] = set()
    if is_remote(path):
        with open_source(path) as source:
            for name in source.list_files():
                first, slash, _ = name.partition("/")
                (directories if slash else files).add(first)
        return files, directories
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                (directories if entry.is_dir() else files).add(entry.name)
    except OSError as error:
        raise StorageError(f"cannot list: {error.strerror}", where=path) from error
    return files, directories


def _beside(directory: str, file: str) -> tuple[tuple[str, frozenset[str]], ...]:
    """PEFT's configuration belongs to PEFT's file; trainers put theirs a level up as well."""
    names = ALL_NAMES
    if file and os.path.basename(file) != PEFT_FILE and is_there(os.path.join(directory, PEFT_FILE)):
        names = TRAINER_NAMES  # somebody else's configuration
    parent = os.path.dirname(absolute(directory))
    return (directory, names), (parent, frozenset({"lora_train_meta.json"}))


def _around_dcp(path: str) -> tuple[tuple[str, frozenset[str]], ...]:
    """Trainers put PEFT's configuration beside the DCP directory that holds the model."""
    path = absolute(path)
    parent = os.path.dirname(path)
    above = ALL_NAMES if is_model_part(os.path.basename(path)) else RUN_NAMES
    return (path, ALL_NAMES), (parent, above)
