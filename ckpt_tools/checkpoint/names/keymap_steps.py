"""What a line of a key map does to tensors, as mosaics, and how it is undone; the words stand in `names.keymap`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ckpt_tools.checkpoint.names import mosaic
from ckpt_tools.checkpoint.names.mosaic import Mosaic
from ckpt_tools.errors import UsageError

Config = Mapping[str, object]
Copy = tuple[Mosaic, Mosaic]
_REST = "rest"
_NOT_SAID = 0  # A size that is what the others leave, or that config.json does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class LineStep:
    """One operation of a line."""

    operation: str
    sizes: tuple[str, ...]  # Its arguments as they are written: numbers, keys of config.json, products of both
    before: int  # Tensors on the hub's side of it
    after: int  # Tensors on the other side of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Undone:
    """What the way back makes of tensors."""

    tensors: list[Mosaic]
    left_out: int = 0  # Rows of padding that the hub's tensor has not
    copies: tuple[Copy, ...] = ()  # What must be equal, because the hub has it once


_Way = Callable[..., list[Mosaic]]  # (tensors, how many there shall be, size, …) → tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operation:
    forward: _Way
    backward: _Way
    num_sizes: int = 0
    has_dim: bool = False  # Is there a dim before the sizes?
    has_heads: bool = False  # Sizes begin with a number of heads, and the `head_dim` beside its key follows them
    has_lengths: bool = False  # May the length of every part follow?
    has_dims: bool = False  # Do the lengths of two or more dims follow?
    joins: int | None = 1  # Tensors on the hub's side: this many, or any number but one for None
    cuts: bool = False  # Does it make several tensors of one?


def build_step(operation: str, sizes: Sequence[str], *, before: int, others: int) -> LineStep | None:
    """Return an operation for `before` tensors that go in and `others` on the other side; None if there is none."""
    found = _OPERATIONS.get(operation)
    if found is None:
        return None
    after = others if found.cuts else before if found.joins == 1 else 1
    is_fit = before == 1 < others if found.cuts else before > 1 if found.joins is None else found.joins in (1, before)
    fixed = found.num_sizes + found.has_dim
    lengths = (0, max(before, after)) if found.has_lengths else (0,)
    free = len(sizes) - fixed
    if (
        not is_fit
        or not (free > 1 if found.has_dims else free in lengths)
        or (found.has_dim and not sizes[0].isdecimal())
    ):
        return None
    return LineStep(operation=operation, sizes=tuple(sizes), before=before, after=after)


def apply(steps: Sequence[LineStep], tensors: list[Mosaic], config: Config) -> list[Mosaic]:
    """Return what steps make of the hub's tensors; raise `ValueError` where these are not as a step needs them."""
    for step in steps:
        tensors = _OPERATIONS[step.operation].forward(tensors, step.after, *_sizes(step, config))
    return tensors


def undo(steps: Sequence[LineStep], tensors: list[Mosaic], config: Config) -> Undone:
    """Return the hub's tensors that steps made others of; errors as those of `apply`."""
    left_out = 0
    copies: list[Copy] = []
    for step in reversed(steps):
        sizes = _sizes(step, config)
        made = _OPERATIONS[step.operation].backward(tensors, step.before, *sizes)
        if step.operation in ("crop", "pad"):
            left_out += sum(map(_rows, tensors)) - sum(map(_rows, made))
        if step.operation == "repeat":
            copies += [(kept, other) for one in tensors for kept, *others in [_turns(one, *sizes)] for other in others]
        tensors = made
    return Undone(tensors=tensors, left_out=left_out, copies=tuple(copies))


def size_of(text: str, config: Config) -> int:
    """Return the number that a size stands for: a product of numbers and keys of config.json."""
    product = 1
    for factor in text.split("*"):
        value = int(factor) if factor.isdecimal() else look_up(factor, config)
        if type(value) is not int or value < 1:
            raise UsageError(f"the map needs {factor}, which config.json does not have as a positive number")
        product *= value
    return product


def has_size(key: str, config: Config) -> bool:
    """Does config.json have a key at all?"""
    return look_up(key, config) is not None


def look_up(key: str, config: Config) -> object:
    """Return the value of a key of config.json, or of its text_config; None when neither has one."""
    for there in (config, config.get("text_config")):
        value = there
        for component in key.split("."):
            value = value.get(component) if isinstance(value, Mapping) else None
        if value is not None:
            return value
    return None


def _sizes(step: LineStep, config: Config) -> list[int]:
    operation = _OPERATIONS[step.operation]
    dims, sizes = step.sizes[: operation.has_dim], step.sizes[operation.has_dim :]
    found = [*map(int, dims), *(_NOT_SAID if text == _REST else size_of(text, config) for text in sizes)]
    if operation.has_heads:
        section, dot, _ = step.sizes[0].rpartition("*")[2].rpartition(".")
        head = look_up(f"{section}{dot}head_dim", config)
        found.append(head if type(head) is int else _NOT_SAID)
    return found


def _rows(tensor: Mosaic) -> int:
    return tensor.shape[0] if tensor.shape else 0


def _cat(parts: list[Mosaic], _after: int, dim: int, *wanted: int) -> list[Mosaic]:
    if any(len(part.shape) <= dim for part in parts):
        raise ValueError(f"a tensor has no dim {dim}")
    lengths = [part.shape[dim] for part in parts]
    is_said = all(size in (_NOT_SAID, length) for size, length in zip(wanted, lengths, strict=bool(wanted)))
    if not is_said or (not wanted and len(set(lengths)) > 1):
        said = f"{list(wanted)} (0: any)" if wanted else "equally long"
        raise ValueError(f"tensors that are {lengths} long in dim {dim} should be {said}")
    return [mosaic.join(parts, dim)]


def _cut(parts: list[Mosaic], after: int, dim: int, *wanted: int) -> list[Mosaic]:
    (part,) = parts
    if not wanted:
        return mosaic.chunk(part, dim, after)
    if len(part.shape) <= dim:
        raise ValueError(f"a tensor has no dim {dim}")
    if (lengths := share_out(part.shape[dim], wanted)) is None:
        raise ValueError(f"{part.shape[dim]} in dim {dim} cannot be cut into {list(wanted)} (0: the rest)")
    starts = [sum(lengths[:at]) for at in range(len(lengths))]
    return [mosaic.part_of(part, dim, start, length) for start, length in zip(starts, lengths, strict=True)]


def share_out(length: int, wanted: Sequence[int]) -> list[int] | None:
    """Return the lengths of parts, of which those that are not said (0) are alike; None where they do not come out."""
    share, left = divmod(length - sum(wanted), max(1, wanted.count(_NOT_SAID)))
    lengths = [size or share for size in wanted]
    return lengths if not left and min(lengths) > 0 and sum(lengths) == length else None


def _swap(parts: list[Mosaic], _after: int, dim: int, *only: int) -> list[Mosaic]:
    is_swapped = [(dim < len(part.shape) and part.shape[dim] in only) or not only for part in parts]
    halves = [mosaic.chunk(part, dim, 2) if swaps else [part] for part, swaps in zip(parts, is_swapped, strict=True)]
    return [mosaic.join(each[::-1], dim) for each in halves]


def _transpose(parts: list[Mosaic], _after: int) -> list[Mosaic]:
    if any(len(part.shape) < 2 for part in parts):
        raise ValueError("a tensor of fewer than two dims cannot be transposed")
    return [mosaic.transpose(part, len(part.shape) - 2, len(part.shape) - 1) for part in parts]


def _half(tensor: Mosaic, heads: int, head: int) -> int:
    rows = _rows(tensor)
    if not rows or rows % (2 * heads) or head not in (_NOT_SAID, rows // heads):
        raise ValueError(f"{rows} rows are not those of {heads} heads" + (f" of {head}" if head else ""))
    return rows // heads // 2


def _rope(parts: list[Mosaic], _after: int, heads: int, head: int) -> list[Mosaic]:
    return [mosaic.regroup(one, 0, heads, 2, _half(one, heads, head)) for one in parts]


def _unrope(parts: list[Mosaic], _before: int, heads: int, head: int) -> list[Mosaic]:
    return [mosaic.regroup(one, 0, heads, _half(one, heads, head), 2) for one in parts]


def _head_rows(rows: Sequence[int], heads: int, groups: int, head: int) -> int:
    """Return how many rows a head has, of which (heads + 2 groups) are in `rows` of q, k and v."""
    each, left = divmod(sum(rows), heads + 2 * groups)
    is_each = len(rows) == 1 or list(rows) == [heads * each, groups * each, groups * each]
    if left or heads % groups or not is_each or head not in (_NOT_SAID, each):
        of = f" of {head}" if head else ""
        what = f"{' + '.join(map(str, rows))} rows of q, k and v are not those of {heads} heads{of} in {groups} groups"
        raise ValueError(what)
    return each


def _qkv(parts: list[Mosaic], _after: int, heads: int, groups: int, head: int) -> list[Mosaic]:
    _head_rows([_rows(part) for part in parts], heads, groups, head)
    columns = [mosaic.chunk(one, 0, groups) for one in parts]
    return [mosaic.join([part for group in zip(*columns, strict=True) for part in group], 0)]


def _unqkv(parts: list[Mosaic], _before: int, heads: int, groups: int, head: int) -> list[Mosaic]:
    (fused,) = parts
    each, share = _head_rows([_rows(fused)], heads, groups, head), heads // groups
    places = ((0, share), (share, 1), (share + 1, 1))
    divided = mosaic.chunk(fused, 0, groups)
    return [
        mosaic.join([mosaic.part_of(group, 0, first * each, count * each) for group in divided], 0)
        for first, count in places
    ]


def _uncrop(parts: list[Mosaic], _after: int, rows: int) -> list[Mosaic]:
    others = [_rows(part) for part in parts if _rows(part) != rows]
    if others:
        raise ValueError(f"{others[0]} rows are not the {rows} of config.json")
    return parts


def _crop(parts: list[Mosaic], _before: int, rows: int) -> list[Mosaic]:
    lacking = [_rows(part) for part in parts if _rows(part) < rows]
    if lacking:
        raise ValueError(f"{lacking[0]} rows are fewer than the {rows} of config.json")
    return [mosaic.part_of(part, 0, 0, rows) for part in parts]


def _pad(parts: list[Mosaic], _after: int, rows: int, padded: int) -> list[Mosaic]:
    _uncrop(parts, _after, rows)
    if not 0 <= padded - rows <= mosaic.MAX_RUNS:
        raise ValueError(f"{rows} rows cannot be padded to {padded}")
    last = padded - rows + 1
    return [
        mosaic.join([mosaic.part_of(one, 0, 0, rows - 1), *[mosaic.part_of(one, 0, rows - 1, 1)] * last], 0)
        for one in parts
    ]


def _unpad(parts: list[Mosaic], before: int, rows: int, padded: int) -> list[Mosaic]:
    _uncrop(parts, before, padded)
    return _crop(parts, before, rows)


def _repeat(parts: list[Mosaic], _after: int, groups: int, wanted: int) -> list[Mosaic]:
    if wanted % groups:
        raise ValueError(f"{groups} groups of rows cannot be repeated to {wanted}")
    times = wanted // groups
    return [mosaic.join([g for g in mosaic.chunk(one, 0, groups) for _ in range(times)], 0) for one in parts]


def _unrepeat(parts: list[Mosaic], _before: int, groups: int, wanted: int) -> list[Mosaic]:
    return [_turns(one, groups, wanted)[0] for one in parts]


def _turns(tensor: Mosaic, groups: int, wanted: int) -> list[Mosaic]:
    """Return the rows of every group's first turn, then those of the second…: they are to be equal."""
    if wanted % groups:
        raise ValueError(f"{wanted} groups of rows are not those of {groups}, repeated")
    every, times = mosaic.chunk(tensor, 0, wanted), wanted // groups
    return [mosaic.join(every[turn::times], 0) for turn in range(times)]


def _flatten(parts: list[Mosaic], _after: int, dim: int, *sizes: int) -> list[Mosaic]:
    for part in parts:
        own = part.shape[dim : dim + len(sizes)]
        if len(own) < len(sizes) or any(
            size not in (_NOT_SAID, length) for size, length in zip(sizes, own, strict=True)
        ):
            raise ValueError(f"dims of {list(own)} should be {list(sizes)} (0: any)")
    return [mosaic.flatten(part, dim, len(sizes)) for part in parts]


def _unflatten(parts: list[Mosaic], _after: int, dim: int, *sizes: int) -> list[Mosaic]:
    made = []
    for part in parts:
        length = part.shape[dim] if dim < len(part.shape) else 0
        known = math.prod(size for size in sizes if size)
        if sizes.count(_NOT_SAID) > 1 or not length or length % known:
            raise ValueError(f"{length} in dim {dim} are not {list(sizes)} (0: the rest)")
        made.append(mosaic.unflatten(part, dim, [size or length // known for size in sizes]))
    return made


_OPERATIONS: Mapping[str, _Operation] = {
    "cat": _Operation(forward=_cat, backward=_cut, has_dim=True, has_lengths=True, joins=None),
    "cut": _Operation(forward=_cut, backward=_cat, has_dim=True, has_lengths=True, cuts=True),
    "swap": _Operation(forward=_swap, backward=_swap, has_dim=True, has_lengths=True),
    "transpose": _Operation(forward=_transpose, backward=_transpose),
    "rope": _Operation(forward=_rope, backward=_unrope, num_sizes=1, has_heads=True),
    "qkv": _Operation(forward=_qkv, backward=_unqkv, num_sizes=2, has_heads=True, joins=3),
    "crop": _Operation(forward=_uncrop, backward=_crop, num_sizes=1),
    "pad": _Operation(forward=_pad, backward=_unpad, num_sizes=2),
    "repeat": _Operation(forward=_repeat, backward=_unrepeat, num_sizes=2),
    "flatten": _Operation(forward=_flatten, backward=_unflatten, has_dim=True, has_dims=True),
    "unflatten": _Operation(forward=_unflatten, backward=_flatten, has_dim=True, has_dims=True),
}
OPERATIONS = tuple(_OPERATIONS)
