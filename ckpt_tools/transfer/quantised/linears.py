"""Which tensors of a model are quantised to 8-bit floats: weights of linear layers in the blocks of a language model.

transformers makes an `FP8Linear` of every plain linear layer that `modules_to_not_convert` does not name, and takes the
experts of a layer as one; of anything else it would load the 8-bit numbers as if they were the weights. So only names
are chosen that are those of linear layers in every architecture of transformers (a test walks them), and whatever else
is a matrix is named among those that stay.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.checkpoint.globs import Names, find_named

BLOCK = 128  # Rows and columns of a block, as in DeepSeek-V3; kernels have no other
_WEIGHT = ".weight"
_PACKED = ".in_proj_weight"  # Of attention as torch has it, which transformers takes apart
_HEAD = "lm_head"  # Stays; named even where the files do not have it, being tied to the embedding
_LINEAR = re.compile(
    r"(?:(?:model|language_model|text_model|transformer|decoder)\.)*(?:layers|h)\.\d+\.(?:\w+\.)*?"
    r"(?:q_proj|k_proj|v_proj|qkv_proj|o_proj|self_attn\.out_proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj"
    r"|gate_proj|up_proj|down_proj|gate_up_proj|fc1|fc2|experts\.\d+\.w[123]"
    r"|linear_attn\.(?:in_proj_qkvz|in_proj_qkv|in_proj_z|out_proj))\.weight"
)
"""Not the small ones that releases keep: routers and gates, DeltaNet's a and b, the indexer's, `eh_proj`."""
_EXPERTS = re.compile(r"(.+\.experts)\.")
_STACKED = re.compile(r"(.+moe)\.\w+\.weight")
"""Experts in one tensor: the live model has them in a module of their own, perhaps below another name."""
_JOINED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
)
"""Layers beside each other that vLLM and SGLang make one of, which has one dtype; the experts of a layer as well."""
_FIRST = {name: names[0] for names in _JOINED for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What is quantised, and what stays."""

    weights: frozenset[str]  # Names of the tensors to quantise
    kept: tuple[str, ...]  # Modules that stay: `modules_to_not_convert`
    uneven: tuple[str, ...]  # Linear layers that stay because they are no whole number of blocks
    asked: tuple[str, ...]  # Those that stay because the user says so
    joined: tuple[str, ...]  # Those that stay because others do with which loaders join them


def choose(tensors: Sequence[TensorEntry], keep: Iterable[str], names: Names) -> Chosen:
    """Return which of a model's tensors are quantised; globs of `keep` match any of their `names`.

    Only whole blocks: kernels take inputs by 128, vLLM joins layers at multiples of 128 rows, and transformers 5.23
    decodes blocks that are smaller at the end with the scales of others. It does not quantise such matrices either.
    """
    matched: set[str] = set().union(*(find_named(f"--keep-precision {glob}", glob, names) for glob in keep))
    matrices = {entry.fqn: entry for entry in tensors if len(entry.shape) > 1}
    linear = {fqn for fqn, entry in matrices.items() if _LINEAR.fullmatch(fqn) and entry.dtype.is_float}
    even = {fqn for fqn in linear if len(shape := matrices[fqn].shape) == 2 and not any(n % BLOCK for n in shape)}
    even = {fqn for fqn in even if matrices[fqn].num_elems}
    weights = _whole_units(even - matched, matrices)
    # To transformers a name is also the end of others, and the beginning: what else it would keep, stays.
    kept = _modules_of(entry for fqn, entry in matrices.items() if fqn not in weights)
    ends = tuple(kept)
    also = {fqn for fqn in weights if fqn.removesuffix(_WEIGHT).endswith(ends) or kept.keys() & _above(fqn)}
    weights = _whole_units(weights - also, matrices)
    modules = tuple(_modules_of(entry for fqn, entry in matrices.items() if fqn not in weights))
    uneven, asked, joined = (tuple(sorted(left)) for left in (linear - even, even & matched, even - matched - weights))
    return Chosen(weights=frozenset(weights), kept=modules, uneven=uneven, asked=asked, joined=joined)


def _whole_units(weights: set[str], matrices: Iterable[str]) -> set[str]:
    """Return those of which everything is there that they are joined with."""
    units: dict[str, set[str]] = defaultdict(set)
    for fqn in matrices:
        units[_unit(fqn)].add(fqn)
    return {fqn for unit in units.values() if unit <= weights for fqn in unit}


def _unit(fqn: str) -> str:
    if found := _EXPERTS.match(fqn):
        return found[1]
    module, _, leaf = fqn.removesuffix(_WEIGHT).rpartition(".")
    return f"{module}.{_FIRST.get(leaf, leaf)}"


def _modules_of(tensors: Iterable[TensorEntry]) -> dict[str, None]:
    """Return the modules of tensors that stay, each once; the experts of a layer are one."""
    modules: dict[str, None] = {_HEAD: None}
    for entry in tensors:
        if found := _EXPERTS.match(entry.fqn):
            modules[found[1]] = None
        elif entry.fqn.endswith((_WEIGHT, _PACKED)):
            modules[entry.fqn.removesuffix(_WEIGHT).removesuffix(_PACKED)] = None
        if len(entry.shape) == 3 and (found := _STACKED.fullmatch(entry.fqn)):
            modules |= dict.fromkeys((f"{found[1]}.experts", "experts"))
    return modules


def _above(fqn: str) -> set[str]:
    parts = fqn.split(".")
    return {".".join(parts[:end]) for end in range(1, len(parts) - 1)}
