"""Is what is to be pushed whole? Asked before anything leaves the machine."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Literal

from ckpt_tools.checkpoint.formats.dcp_safetensors import SHARDED_FILE
from ckpt_tools.checkpoint.formats.file_names import INDEX_SUFFIX, METADATA_NAME
from ckpt_tools.checkpoint.formats.manifest import MANIFEST_NAME
from ckpt_tools.checkpoint.formats.opening import Opened, open_path, read_file
from ckpt_tools.checkpoint.formats.scan import DANGER
from ckpt_tools.checkpoint.formats.step import may_be_repository
from ckpt_tools.checkpoint.names import is_adapter, is_factor
from ckpt_tools.checks.values import VALUE_CODES
from ckpt_tools.checks.verify import verify
from ckpt_tools.errors import CkptError, PartError, UnreadableError, UsageError
from ckpt_tools.models.config import CONFIG_NAME
from ckpt_tools.storage.source import LocalSource, Source
from ckpt_tools.text import first_few

if TYPE_CHECKING:
    from ckpt_tools.adapters.check import LoraCheck

Kind = Literal["peft", "diffusers", "transformers", "weights"]
"""What the directory holds, and so which library loads it; weights: tensors that no config says more about."""

ADAPTER_CONFIG = "adapter_config.json"  # PEFT's; without it nothing loads the adapter
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")  # PEFT's
DIFFUSERS_LORA = "pytorch_lora_weights.safetensors"  # The name under which diffusers looks for a LoRA
PIPELINE_CONFIG = "model_index.json"  # Of a diffusers pipeline, whose models lie in directories of their own
_PART = re.compile(r".+-\d+-of-\d+\.safetensors", re.ASCII)
_OLD_WEIGHTS = re.compile(r"pytorch_model(?:-\d+-of-\d+)?\.bin", re.ASCII)
SINGLE_FILES = ("kohya", "comfyui", "ai-toolkit", "diffusers")
"""Whose adapters are one file of any name; those of others need what stands beside them."""
_DEAD = ("adapter-zero", "adapter-truncated")
"""Codes of what trainers lose without a word, whatever else the file holds (trl#4416, peft#2892)."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def check_adapters(source: Source, chosen: Iterable[str]) -> dict[str, LoraCheck]:
    """Return weights → what check-lora finds of each adapter; raise AdapterRefusedError if its loaders refuse it."""
    from ckpt_tools.adapters.check import check_lora
    from ckpt_tools.adapters.merge import AdapterRefusedError

    found: dict[str, LoraCheck] = {}
    for name in sorted(chosen):
        directory, _, last = name.rpartition("/")
        is_named = last in (ADAPTER_WEIGHTS[0], DIFFUSERS_LORA)
        is_whole = last.endswith(".safetensors") and not SHARDED_FILE.fullmatch(last) and not _PART.fullmatch(last)
        tensors = read_file(source, name).header.tensors if is_whole and not is_named else ()
        if not is_named and not any(is_factor(entry.fqn) for entry in tensors):
            continue
        try:
            check = check_lora(os.path.join(source.root, directory if is_named else name))
        except CkptError:
            if is_named:
                raise
            continue  # factors in names that ckpt does not know: nothing is known to be wrong
        is_loaded = is_named or check.convention in SINGLE_FILES
        errors = [each for each in check.findings if each.severity == "error" and (is_loaded or each.code in _DEAD)]
        if errors:
            first = errors[0]
            more = f", and {len(errors) - 1} more (ckpt check-lora lists them)" if len(errors) > 1 else ""
            raise AdapterRefusedError(f"{first.code}: {first.what}{more}", where=first.where, hint=first.hint)
        if is_loaded:
            found[name] = check
    return found


def check_directory(
    source: Source, chosen: Mapping[str, int], *, num_workers: int
) -> tuple[Kind, dict[str, LoraCheck], list[str]]:
    """Check that every checkpoint in the directory is complete; return its kind, its adapters and notes.

    It is checked as `ckpt verify --level values` does; what is strange about values is noted, and does not refuse.
    Raise AdapterRefusedError for an adapter as `check_adapters` does, and UsageError for a choice of files that tears a
    checkpoint apart.
    """
    top = {path for path in chosen if "/" not in path}
    _check_adapter(source, top)
    notes: list[str] = []
    num_tensors = sum(_check_checkpoint(source, name, chosen, num_workers, notes) for name in _directories(chosen))
    pickles = [path for path in chosen if path.endswith(_PICKLES)]
    if pickles:
        notes.append(f"{first_few(pickles)}: pickle files; loading them runs any code that they contain")
    kind, adapters = _kind(top), check_adapters(source, chosen)
    if kind == "weights" and num_tensors and not adapters and not any(path.endswith(METADATA_NAME) for path in chosen):
        notes.append("no config.json beside the weights: transformers and diffusers cannot load them without one")
    if any(path.rpartition("/")[2] == METADATA_NAME for path in chosen):
        notes.append("this is a sharded training checkpoint: ckpt gather converts it to files that others can load")
    return kind, adapters, notes


def _kind(top: set[str]) -> Kind:
    if ADAPTER_CONFIG in top:
        return "peft"
    if PIPELINE_CONFIG in top or ("diffusion_pytorch_model.safetensors" in top and CONFIG_NAME in top):
        return "diffusers"
    has_weights = any(name.endswith(".safetensors") or _OLD_WEIGHTS.fullmatch(name) for name in top)
    return "transformers" if CONFIG_NAME in top and has_weights else "weights"


def _check_adapter(source: Source, top: set[str]) -> None:
    there = set(source.list_files(max_depth=0))
    weights = [name for name in ADAPTER_WEIGHTS if name in there]
    if weights and ADAPTER_CONFIG not in top:
        is_there = ADAPTER_CONFIG in there
        what, hint = ("is left out", "push it as well") if is_there else ("is missing", "write one: ckpt export-lora")
        where = source.root
        raise UsageError(
            f"{ADAPTER_CONFIG} {what}, and no loader can use the adapter without it", where=where, hint=hint
        )
    if ADAPTER_CONFIG in top and not weights:
        raise UnreadableError(f"there is no adapter beside {ADAPTER_CONFIG}", where=source.root, hint="save it again")


def _directories(chosen: Iterable[str]) -> list[str]:
    """Return the directories ("" is the root) in which weights lie that ckpt reads."""
    ends = (".safetensors", INDEX_SUFFIX, ".distcp", MANIFEST_NAME, f"/{METADATA_NAME}")
    return sorted({path.rpartition("/")[0] for path in chosen if f"/{path}".endswith(ends)})


def _check_checkpoint(
    source: Source, directory: str, chosen: Mapping[str, int], num_workers: int, notes: list[str]
) -> int:
    """Check what lies in one directory, and add to `notes`; returns the number of tensors."""
    root = os.path.join(source.root, directory)
    prefix = f"{directory}/" if directory else ""
    inside = {path.removeprefix(prefix) for path in chosen if path.startswith(prefix)}
    here = sorted(name for name in inside if "/" not in name)
    _check_parts(root, here)
    seen: set[str] = set()
    num_tensors = 0
    try:
        opened = open_path(root)
    except PartError:
        if not may_be_repository(root):  # whose models lie in directories of their own
            raise
    except UnreadableError:
        # Several files that no index joins, as in a collection of LoRAs: each is checked by itself.
        if any(name.endswith(INDEX_SUFFIX) or name in (METADATA_NAME, MANIFEST_NAME) for name in here):
            raise
    else:
        with opened:
            num_tensors = _check_opened(opened, root, inside, num_workers, notes)
            seen = set(opened.checkpoint.files)
    with LocalSource(root) as companions:
        for name in here:
            if name.endswith(".safetensors") and name not in seen:
                num_tensors += len(read_file(companions, name).header.tensors)
    return num_tensors


def _check_parts(root: str, names: list[str]) -> None:
    """Refuse numbered files without the index that says what the others hold: the last one may be missing."""
    parts = [name for name in names if _PART.fullmatch(name) and not SHARDED_FILE.fullmatch(name)]
    if parts and not any(name.endswith(INDEX_SUFFIX) for name in os.listdir(root)):
        what = f"{first_few(parts)}: numbered parts of a model, but the index that lists them is missing"
        raise UnreadableError(what, where=root, hint="restore the index, or save the model again")


def _check_opened(opened: Opened, root: str, inside: set[str], num_workers: int, notes: list[str]) -> int:
    missing = sorted(set(opened.checkpoint.files) - inside)
    if missing and len(missing) < len(opened.checkpoint.files):
        what = f"{first_few(missing)} would be left out, but the checkpoint needs it"
        raise UsageError(what, where=root, hint="push all of the checkpoint, or none of it")
    if missing:
        return 0
    result = verify(opened, level="values", num_workers=num_workers, purpose="weights")
    if errors := [finding for finding in result.errors if finding.code not in (*VALUE_CODES, DANGER)]:
        more = f" (findings in total: {len(errors)})" if len(errors) > 1 else ""
        what = f"not pushed, because the checkpoint is not intact: {errors[0].what}{more}"
        hint = f"run ckpt verify {root} for all findings"
        raise UnreadableError(what, where=f"{root}: {errors[0].where}", hint=hint)
    notes += [f"{each.code}: {each.where}: {each.what}" for each in result.findings if each.code in VALUE_CODES]
    if not is_adapter([entry.fqn for entry in opened.checkpoint.tensors]):
        notes.append(opened.identity.title)
    if not result.tensors:
        raise UnreadableError("the checkpoint contains no tensors", where=root)
    return result.tensors
