"""What a conversion does to tensors, by the names that transformers gives its operations; each is a step of mosaics.

An operation is written ``Name(key=value;…)``, several with commas between them (`names.table`). Sources:
`ConversionOps` of transformers 5.23 (`core_model_loading.py`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ckpt_tools.checkpoint.names import mosaic
from ckpt_tools.checkpoint.names.mosaic import Mosaic

Config = Mapping[str, object]
Groups = dict[str, list[Mosaic]]  # Name or pattern → its tensors, in the order in which they belong together
Arguments = Mapping[str, str]
Shapes = Mapping[str, tuple[int, ...]]  # Live name → shape
_OPERATION = re.compile(r"(\w+)(?:\(([^)]*)\))?(?:,|$)")


class UnknownOperationError(ValueError):
    """An operation that ckpt does not do, or cannot do without the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """What operations ask a model."""

    config: Config
    shapes: Shapes


def run(
    operations: str, groups: Groups, targets: Sequence[str], config: Config, shapes: Shapes | None = None
) -> dict[str, Mosaic]:
    """Do operations, one after another, as the table writes them."""
    # `groups` has the tensors of each source pattern; a target has ``*`` for a number where a list comes out. Some
    # operations need the `shapes` of the live model. Tensors that are not as the operations need them are a
    # `ValueError`.
    model = _Model(config=config, shapes=shapes or {})
    for name, arguments in _OPERATION.findall(operations):
        given = dict(part.split("=", 1) for part in arguments.split(";") if part)
        if name not in _OPERATIONS:
            raise UnknownOperationError(f"the operation {name} is not known")
        groups = _OPERATIONS[name](groups, targets, given, model)
    results: dict[str, Mosaic] = {}
    if len(groups) == 1 and len(targets) == 1:
        groups = {targets[0]: next(iter(groups.values()))}
    for target, tensors in groups.items():
        if target not in targets:
            raise UnknownOperationError(f"{operations} leaves {len(groups)} results for {len(targets)} names")
        if "*" in target:
            results |= {target.replace("*", str(at)): tensor for at, tensor in enumerate(tensors)}
        elif len(tensors) == 1:
            results[target] = tensors[0]
        else:
            raise ValueError(f"{len(tensors)} tensors would have one name")
    return results


def _merge(groups: Groups, _targets: Sequence[str], given: Arguments, _model: _Model) -> Groups:
    return {key: [mosaic.stack(tensors, int(given["dim"]))] for key, tensors in groups.items()}


def _concatenate(groups: Groups, targets: Sequence[str], given: Arguments, _model: _Model) -> Groups:
    (target,) = targets
    return {target: [mosaic.join([one for tensors in groups.values() for one in tensors], int(given["dim"]))]}


def _chunk(groups: Groups, targets: Sequence[str], given: Arguments, _model: _Model) -> Groups:
    if "num_shards_attribute" in given:
        raise UnknownOperationError("a number of parts that a class computes is not known")
    parts = mosaic.chunk(_only(groups), int(given["dim"]), len(targets))
    return {target: [part] for target, part in zip(targets, parts, strict=True)}


def _split_list(groups: Groups, targets: Sequence[str], given: Arguments, _model: _Model) -> Groups:
    keys = list(groups) if len(groups) > 1 else targets
    columns = zip(keys, groups.values(), strict=True)
    return {key: mosaic.unstack(tensor, int(given["dim"])) for key, (tensor,) in columns}


def _split(groups: Groups, targets: Sequence[str], given: Arguments, model: _Model) -> Groups:
    tensor, dim, start = _only(groups), int(given["dim"]), 0
    sizes = [_live_shape(target, model)[dim] for target in targets]
    if sum(sizes) != tensor.shape[dim]:
        raise ValueError(f"{tensor.shape[dim]} rows are not the {' + '.join(map(str, sizes))} of the model")
    parts: Groups = {}
    for target, size in zip(targets, sizes, strict=True):
        parts[target] = [mosaic.part_of(tensor, dim, start, size)]
        start += size
    return parts


def _transpose(groups: Groups, targets: Sequence[str], given: Arguments, model: _Model) -> Groups:
    dims = int(given.get("dim0", 0)), int(given.get("dim1", 1))
    if "check_dims" in given:
        return {targets[0]: [_transpose_by_shape(_only(groups), *dims, _live_shape(targets[0], model)[-2:])]}
    return {key: [mosaic.transpose(one, *dims) for one in tensors] for key, tensors in groups.items()}


def _transpose_by_shape(tensor: Mosaic, dim0: int, dim1: int, live: tuple[int, ...]) -> Mosaic:
    """Transpose what has not the shape that the model has; of a model's own, give back the hub's."""
    # The reverse of the operation has its dims exchanged. transformers' own reverse leaves a model's tensors as they
    # are, and loads both; other readers of the hub's files (vLLM) know theirs alone.
    there = (tensor.shape[-2], tensor.shape[-1])
    if there not in (live, live[::-1]):  # of a square one nobody can tell: transformers leaves it as it is
        raise ValueError(f"{list(there)} is not the {list(live)} of the model, nor its transpose")
    is_saving = dim0 > dim1
    is_transposed = live != live[::-1] and (there == live) == is_saving
    return mosaic.transpose(tensor, dim0, dim1) if is_transposed else tensor


def _live_shape(name: str, model: _Model) -> tuple[int, ...]:
    """Return the shape of a tensor of the live model: its own, else (rows, columns) or rows by config.json."""
    if name in model.shapes:
        return model.shapes[name]
    inner = model.config.get("text_config")
    values = {**model.config, **(inner if isinstance(inner, Mapping) else {})}
    kind = next((part for part in reversed(name.split(".")) if part in _LIVE_SIZES), "")
    sizes = []
    for factors in _LIVE_SIZES.get(kind, ()):
        found = [value for factor in factors if type(value := values.get(factor, _COUNTS.get(factor))) is int]
        if len(found) == len(factors):
            sizes.append(math.prod(found))
    if not sizes or len(sizes) < len(_LIVE_SIZES[kind]):
        raise UnknownOperationError(f"config.json does not say what {name} is in the model")
    return tuple(sizes)


_COUNTS = {"two": 2}
_LIVE_SIZES: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "gate_up_proj": (("two", "moe_intermediate_size"), ("hidden_size",)),
    "down_proj": (("hidden_size",), ("moe_intermediate_size",)),
    "q_proj": (("num_attention_heads", "head_dim"),),
    "k_proj": (("num_key_value_heads", "head_dim"),),
    "v_proj": (("num_key_value_heads", "head_dim"),),
}
"""Layer → its rows and columns as products of what config.json says, of experts and of attention."""


def _interleave(groups: Groups, _targets: Sequence[str], given: Arguments, _model: _Model) -> Groups:
    dim, tensor = int(given.get("dim", 0)), _only(groups)
    half = tensor.shape[dim] // 2
    ways = (1, 2, half) if "inverse" in given else (1, half, 2)
    return {next(iter(groups)): [mosaic.regroup(tensor, dim, *ways)]}


def _permute_for_rope(groups: Groups, _targets: Sequence[str], given: Arguments, model: _Model) -> Groups:
    own = model.config.get(given.get("subconfig_key", ""), model.config)
    heads = own.get("num_attention_heads", own.get("num_heads")) if isinstance(own, Mapping) else None
    if type(heads) is not int or heads < 1:
        raise UnknownOperationError("the number of heads is not in the config")
    names = given["permute_layer_names"].split("|") if "permute_layer_names" in given else [""]

    def permuted(tensor: Mosaic) -> Mosaic:
        half = tensor.shape[0] // heads // 2
        return mosaic.regroup(tensor, 0, heads, *((2, half) if "inverse" in given else (half, 2)))

    return {
        key: list(map(permuted, tensors)) if any(name in key for name in names) else tensors
        for key, tensors in groups.items()
    }


def _fuse_and_split_experts(groups: Groups, targets: Sequence[str], given: Arguments, _model: _Model) -> Groups:
    stack, join = int(given["stack_dim"]), int(given["concat_dim"])
    results: Groups = {}
    for at, target in enumerate(targets):
        parts = []
        for tensors in groups.values():
            count = math.ceil(len(tensors) / len(targets))
            parts.append(mosaic.stack(tensors[at * count : (at + 1) * count], stack))
        results[target] = [mosaic.join(parts, join)]
    return results


def _split_and_decouple_experts(groups: Groups, targets: Sequence[str], given: Arguments, _model: _Model) -> Groups:
    stack, join = int(given["stack_dim"]), int(given["concat_dim"])
    results: Groups = {target: [] for target in targets}
    for (tensor,) in groups.values():
        for target, part in zip(targets, mosaic.chunk(tensor, join, len(targets)), strict=True):
            results[target] += mosaic.unstack(part, stack)
    return results


def _only(groups: Groups) -> Mosaic:
    tensors = [one for group in groups.values() for one in group]
    if len(tensors) != 1:
        raise ValueError(f"{len(tensors)} tensors are given where one is split")
    return tensors[0]


_OPERATIONS: Mapping[str, Callable[[Groups, Sequence[str], Arguments, _Model], Groups]] = {
    "MergeModulelist": _merge,
    "SplitModulelist": _split_list,
    "Concatenate": _concatenate,
    "Chunk": _chunk,
    "Split": _split,
    "Transpose": _transpose,
    "Interleave": _interleave,
    "PermuteForRope": _permute_for_rope,
    "ErnieFuseAndSplitTextVisionExperts": _fuse_and_split_experts,
    "ErnieSplitAndDecoupleTextVisionExperts": _split_and_decouple_experts,
}
