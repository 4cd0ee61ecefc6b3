"""Where in a base model's tensors an adapter's modules may belong: as they are, fused, split or stacked.

A tensor is a matrix, rows × columns. A slot is a name that a module could have, and the rows of base tensors behind
it: all rows of one tensor, some rows of a fused one, or the rows of several one after the other.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpt_tools.adapters.adapter import Convention
from ckpt_tools.adapters.base.model import FLAT, names_in_model
from ckpt_tools.adapters.base.tied import EMBEDDINGS
from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.errors import UsageError
from ckpt_tools.text import escape_name

_MAX_SHOWN = 5

FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "W_pack": ("q_proj", "k_proj", "v_proj"),
    "to_qkv": ("to_q", "to_k", "to_v"),
    "to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Fused module → the modules whose rows it has, one after the other."""
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
_STACKS: Mapping[str, tuple[str, ...]] = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Parameter of stacked experts (transformers 5) → the modules of one expert whose rows it has."""
_MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}  # Mixtral's names of an expert's modules on disk


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one base tensor."""

    entry: TensorEntry
    count: int  # How many; 0 where only the adapter tells (one of the parts of a fused tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """A name that a module could have, and what is behind it."""

    rows: tuple[Rows, ...]  # One after the other, as the module has them
    parts: tuple[str, ...] = ()  # Slots whose rows together are those of the fused tensor, in its order
    num_experts: int = 1  # Experts whose rows follow each other

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor, or of what a model would make of these tensors."""
        first = self.rows[0].entry.shape
        if len(self.rows) == 1:
            return first
        total, experts = sum(rows.count for rows in self.rows), self.num_experts
        return (experts, total // experts, *first[1:]) if experts > 1 else (total, *first[1:])


def find_slots(tensors: Mapping[str, TensorEntry], config: Mapping[str, object]) -> dict[str, Slot]:
    """Return every name under which an adapter could mean tensors of the base, parameter included.

    `tensors` are the base's by the names that a plain model gives them, `config` is its config.json, {} without one.
    """
    slots = {name: Slot(rows=(_all_rows(entry),)) for name, entry in tensors.items()}
    renamed = {new: slots[name] for new, name in names_in_model(tensors, config).items()}
    virtual = {**_of_fused(tensors), **_of_split(tensors), **renamed, **stacked_experts(tensors)}
    return {**virtual, **slots}


def num_rows(shape: tuple[int, ...], lead: int = 1) -> int:
    """Return the rows of a tensor of `shape` of which the first `lead` dims are rows."""
    return math.prod(shape[:lead])


def _all_rows(entry: TensorEntry) -> Rows:
    return Rows(entry, num_rows(entry.shape))


def _of_fused(tensors: Mapping[str, TensorEntry]) -> dict[str, Slot]:
    slots = {}
    for name, entry in tensors.items():
        parent, leaf, parameter = _split(name)
        if parameter not in ("weight", "bias") or leaf not in FUSED:
            continue
        names = tuple(f"{parent}{part}.{parameter}" for part in FUSED[leaf])
        for part in names:
            slots[part] = Slot(rows=(Rows(entry, 0),), parts=names)
    return slots


def _of_split(tensors: Mapping[str, TensorEntry]) -> dict[str, Slot]:
    slots = {}
    for fused, parts in FUSED.items():
        for name in tensors:
            parent, leaf, parameter = _split(name)
            if leaf != parts[0] or parameter not in ("weight", "bias"):
                continue
            entries = [tensors.get(f"{parent}{part}.{parameter}") for part in parts]
            found = tuple(entry for entry in entries if entry is not None)
            if len(found) == len(parts) and len({entry.shape[1:] for entry in found}) == 1:
                rows = tuple(map(_all_rows, found))
                slots[f"{parent}{fused}.{parameter}"] = Slot(rows=rows)
    return slots


def stacked_experts(tensors: Mapping[str, TensorEntry]) -> dict[str, Slot]:
    """Return the parameters that a model makes of experts that are stored one by one."""
    experts: dict[str, dict[int, dict[str, TensorEntry]]] = defaultdict(lambda: defaultdict(dict))
    for name, entry in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is not None and len(entry.shape) == 2:
            experts[match[1]][int(match[2])][_MIXTRAL.get(match[3], match[3])] = entry
    slots = {}
    for path, numbered in experts.items():
        if sorted(numbered) != list(range(len(numbered))):
            continue
        for parameter, parts in _STACKS.items():
            entries = [numbered[i].get(part) for i in range(len(numbered)) for part in parts]
            found = tuple(entry for entry in entries if entry is not None)
            if len(found) < len(entries) or len({entry.shape[1:] for entry in found}) != 1:
                continue
            rows = tuple(map(_all_rows, found))
            for alias in {path, path.replace(".block_sparse_moe.", ".mlp.")}:
                slots[f"{alias}.{parameter}"] = Slot(rows=rows, num_experts=len(numbered))
    return slots


def _split(name: str) -> tuple[str, str, str]:
    """Return ("model.layers.0.self_attn.", "qkv_proj", "weight")."""
    path, _, parameter = name.rpartition(".")
    parent, dot, leaf = path.rpartition(".")
    return parent + dot, leaf, parameter


def resolve(
    wanted: Sequence[str], slots: Mapping[str, Slot], convention: Convention
) -> tuple[dict[str, str], list[str]]:
    """Return {name in the adapter: slot}, and how other names were understood.

    A name that is no slot's may be one with another beginning: the same for all, and without a second possibility.
    kohya's have underscores for dots.
    """
    found = {name: name for name in wanted if name in slots}
    missing = [name for name in dict.fromkeys(wanted) if name not in found]
    notes = []
    flat = _flattened(slots) if missing and convention in ("kohya", "comfyui", "ai-toolkit") else {}
    for name in list(missing):
        slot = flat.get(_without_prefix(name))
        if slot is not None:
            found[name] = slot
            missing.remove(name)
    index: dict[str, list[str]] = defaultdict(list)
    for slot in slots:
        index[".".join(slot.split(".")[-2:])].append(slot)
    while missing:
        rule = next(filter(None, (_find_rule(name, index, slots) for name in missing)), None)
        if rule is None:
            break
        old, new = rule
        moved = {name: new + name[len(old) :] for name in missing if name.startswith(old)}
        moved = {name: slot for name, slot in moved.items() if slot in slots}
        found |= moved
        missing = [name for name in missing if name not in moved]
        notes.append(f"took {escape_name(old) or 'nothing'!r} in the adapter's names for {escape_name(new)!r}")
    if missing:
        raise _unmatched(missing, wanted, slots)
    if len(set(found.values())) < len(found):
        counts = Counter(found.values())
        twice = next([name for name in found if found[name] == slot] for slot in counts if counts[slot] > 1)
        raise UsageError(f"{' and '.join(twice)} both map to the same tensor of the base")
    return found, notes


def _find_rule(name: str, index: Mapping[str, Sequence[str]], slots: Mapping[str, Slot]) -> tuple[str, str] | None:
    """Return (beginning in the adapter, beginning in the base), when one tensor of the base ends like `name`."""
    parts = name.split(".")
    for i in range(len(parts) - 2):
        suffix = ".".join(parts[i:])
        hits = [slot for slot in index.get(".".join(parts[-2:]), ()) if slot == suffix or slot.endswith("." + suffix)]
        if hits and all(slots[hit].rows == slots[hits[0]].rows for hit in hits):
            return name[: len(name) - len(suffix)], hits[0][: len(hits[0]) - len(suffix)]
        if hits:
            return None
    return None


def _flattened(slots: Mapping[str, Slot]) -> dict[str, str]:
    """Return the slots by their names with underscores, without those that are not unique."""
    table: dict[str, str | None] = {}
    for slot in slots:
        path, _, parameter = slot.rpartition(".")
        key = f"{path.replace('.', '_')}.{parameter}"
        table[key] = None if key in table else slot
    return {key: slot for key, slot in table.items() if slot is not None}


def _without_prefix(name: str) -> str:
    path, _, parameter = name.rpartition(".")
    path = FLAT.sub("", path)
    for prefix in ("diffusion_model.", "transformer.", "unet."):
        path = path.removeprefix(prefix)
    return f"{path.replace('.', '_')}.{parameter}"


def _unmatched(missing: Sequence[str], wanted: Sequence[str], slots: Mapping[str, Slot]) -> UsageError:
    hint = "is it the base that the adapter was trained on? `ckpt inspect BASE --tensors` lists its names"
    leaves = {slot.split(".")[-2] for slot in slots if "." in slot}
    if all(name.rpartition(".")[0].endswith("lm_head") for name in missing) and leaves.intersection(EMBEDDINGS):
        hint = (
            "the base ties lm_head to its embedding and stores one tensor for both. --untie gives the head its "
            "own weight (and records that in config.json)"
        )
    shown = some(missing)
    return UsageError(f"{len(missing)} of {len(set(wanted))} adapted tensors are not in the base: {shown}", hint=hint)


def some(texts: Sequence[str]) -> str:
    """Join the first few."""
    more = len(texts) - _MAX_SHOWN
    return "; ".join(texts[:_MAX_SHOWN]) + (f"; and {more} more" if more > 0 else "")
