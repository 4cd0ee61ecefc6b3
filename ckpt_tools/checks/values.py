"""What is wrong with the values of a checkpoint: what is not finite, and weights that are all zero.

An element that is not finite is wrong in any tensor that holds numbers: not where a type is only the storage of packed
ones, nor where a buffer is infinite on purpose. All zero is normal for much: biases, optimizer state, whatever a
recipe begins with zeros. It is strange in one block of a model when it is not in the others, in all norms at once, and
in what nobody begins with zeros.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ckpt_tools.checkpoint.entries import Checkpoint, Finding, TensorEntry
from ckpt_tools.checkpoint.formats.opening import Opened
from ckpt_tools.checkpoint.infer_mesh import rank_of_file
from ckpt_tools.checkpoint.names.foreign import is_factor
from ckpt_tools.checkpoint.transform import find_model, strip_wrappers
from ckpt_tools.checks.sibling_tensors import gathered
from ckpt_tools.errors import CkptError, UnreadableError
from ckpt_tools.models.config import config_beside
from ckpt_tools.text import first_few
from ckpt_tools.transfer.execute import scan
from ckpt_tools.transfer.value_counts import Counts, has_values

NOT_FINITE = "not-finite"
ALL_ZERO = "all-zero"
CONSTANT = "constant"
ZERO_HINT, CONSTANT_HINT = "was it ever initialised, loaded, gathered?", "was it ever initialised?"
VALUE_CODES = (NOT_FINITE, ALL_ZERO)
"""Codes of what is wrong with values: the bytes may be just those that were written."""

_MOST = 8  # Findings of a code; a run that diverged has hundreds of such tensors
_MOST_GLANCES = 1000
_PACKED_LEAVES = ("W_q", "weight_packed", "qdata")
_MIN_PACKED = 256
_INFINITE = re.compile(r"\w*mask\w*|alibi\w*|min_vals?|max_vals?", re.IGNORECASE)
"""Last part of the names of buffers that are infinite on purpose: masks, what has looked for a smallest number."""
_NORM = re.compile(r"(?:^|\.)(?:\w*norm\w*|ln(?:_?\w{1,6})?)(?:\.\d+)?\.weight")
_ADDS_ONE = re.compile(r"gemma|qwen3_next|qwen3_5|qwen4|nemotron|step3p7|minimax_m3|videoprism|muse_|minicpmv4_6")
"""In the model types of transformers' models whose norms multiply by 1 + weight: they begin as zeros."""
_NEVER_ZERO = re.compile(
    r"(?:^|[._])(?:[qkv]_proj|qkv(?:_proj)?|query_key_value|in_proj|query|key|value|to_[qkv]|c_attn|w[qkv]|up_proj|"
    r"gate_proj|gate_up_proj|fc1|c_fc|w[13]|embed_tokens|tok_embeddings|word_embeddings|wte|patch_embed\w*)"
    r"(?:[._](?:proj|base_layer|weight))*$"
)
"""Inputs of attention and MLPs, and embeddings: no recipe begins with zeros there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strange:
    """A tensor with elements that are not finite."""

    fqn: str
    shape: tuple[int, ...]
    counts: Counts  # Of all that was looked at; `first_bad` is of the whole tensor
    where: str  # File, or whatever else holds the first of them
    rank: int | None = None  # Which rank holds it

    def describe(self) -> str:
        """Say how many there are, and where the first one is."""
        counts = self.counts
        kinds = [f"{n} {kind}" for n, kind in ((counts.num_nan, "NaN"), (counts.num_inf, "infinite")) if n]
        place = ""
        if self.shape and counts.first_bad is not None:
            place = f", the first at {list(place_of(counts.first_bad, self.shape))}"
        rank = "" if self.rank is None else f" on rank {self.rank}"
        return f"{' and '.join(kinds)} of {counts.num_elems} elements{place}{rank}"


def place_of(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the coordinates of the element at a row-major position."""
    place = []
    for length in reversed(shape):
        index, at = divmod(index, length)
        place.append(at)
    return tuple(reversed(place))


def report_strange(found: Iterable[Strange], *, hint: str) -> Iterator[Finding]:
    """Yield one finding for all tensors of a kind, and not too many in all."""
    by_name = {each.fqn: each for each in found}
    what = {fqn: each.describe() for fqn, each in by_name.items()}
    yield from gathered(what, "error", NOT_FINITE, hint, where={fqn: each.where for fqn, each in by_name.items()})


def check_values(opened: Opened, checkpoint: Checkpoint, counts: Mapping[str, Counts]) -> Iterator[Finding]:
    """Yield what is wrong with the values of a checkpoint.

    `checkpoint` has raw chunks; its tensors may have other names than in `opened`.
    """
    model, _ = find_model(checkpoint)
    inside = {entry.fqn for entry in model.tensors}
    packed = {entry.fqn for entry in packed_tensors(checkpoint)}
    strange = []
    for entry in checkpoint.tensors:
        seen = counts.get(entry.fqn)
        if seen is None or seen.is_finite or entry.fqn in packed:
            continue
        if may_be_infinite(entry.fqn, is_model=entry.fqn in inside, shape=entry.shape) and not seen.num_nan:
            continue
        file, rank = _holder(entry, seen)
        strange.append(Strange(fqn=entry.fqn, shape=entry.shape, counts=seen, where=file, rank=rank))
    yield from report_strange(strange, hint="the run had diverged when it was saved: go back to an earlier step")
    weights = [entry for entry in model.tensors if entry.fqn in counts and entry.fqn not in packed]
    zero = list(zero_weights(opened, weights, counts))
    for entry in zero[:_MOST]:
        what = f"tensor {entry.fqn!r}: all {entry.num_elems} elements are 0"
        yield Finding.warning(ALL_ZERO, _holder(entry, Counts())[0], what, ZERO_HINT)
    if left := [entry.fqn for entry in zero[_MOST:]]:
        what = f"{len(left):,} more weights are all 0: {first_few(left, 2)}"
        yield Finding.warning(ALL_ZERO, _holder(zero[_MOST], Counts())[0], what)


def sample(opened: Opened, *, most_bytes: int) -> tuple[list[Finding], str]:
    """Look at the values of a sound checkpoint's smallest model tensors: a run that has diverged shows in any.

    Return what is wrong, and what was left out; "" when nothing was.
    """
    model, _ = find_model(opened.checkpoint)
    chosen: list[TensorEntry] = []
    left = most_bytes
    for entry in sorted(model.tensors, key=lambda entry: entry.nbytes):
        left -= entry.nbytes
        if left < 0 or len(chosen) == _MOST_GLANCES:
            break
        chosen.append(opened.resolve(entry))
    damaged: list[Finding] = []

    def tell(entry: TensorEntry, error: CkptError) -> None:  # noqa: ARG001 - the error names it
        damaged.append(Finding.error("damaged-data", error.where or "", error.what, error.hint))

    seen = scan(chosen, opened.source, num_workers=1, on_damage=tell, counting=True)
    found = [*damaged, *check_values(opened, replace(model, tensors=tuple(chosen)), seen.counts)]
    num_left = len(opened.checkpoint.tensors) - len(chosen)
    what = f"the values of {num_left:,} of {len(opened.checkpoint.tensors):,} tensors (ckpt verify --level values)"
    return found, what if num_left else ""


def may_be_infinite(fqn: str, *, is_model: bool, shape: Sequence[int]) -> bool:
    """Is an infinite element no sign of damage here: in a mask, or a number that a trainer keeps (the best loss)?"""
    return _INFINITE.fullmatch(fqn.rpartition(".")[2]) is not None or not (is_model or shape)


def packed_tensors(checkpoint: Checkpoint) -> list[TensorEntry]:
    """Return the tensors whose elements are no numbers of their dtype, but several packed ones each."""
    names = {entry.fqn for entry in checkpoint.tensors}
    return [
        entry
        for entry in checkpoint.tensors
        if not names.isdisjoint((f"{entry.fqn}.absmax", f"{entry.fqn}.quant_map"))
        or entry.fqn.rpartition(".")[2] in _PACKED_LEAVES
        # What FSDP saves of a 4-bit layer when nothing carries its quant state: bitsandbytes' shape.
        or (entry.dtype.is_float and len(entry.shape) == 2 and entry.shape[1] == 1 and entry.shape[0] >= _MIN_PACKED)
    ]


def unseen_values(checkpoint: Checkpoint) -> list[str]:
    """Return the tensors whose values nobody judges: packed ones, and those of types that are not counted."""
    packed = {entry.fqn for entry in packed_tensors(checkpoint)}
    return [e.fqn for e in checkpoint.tensors if e.num_elems and (e.fqn in packed or not has_values(e.dtype))]


def _holder(entry: TensorEntry, seen: Counts) -> tuple[str, int | None]:
    """Return the file and the rank that hold the first bad element; any file, where there is none."""
    place = place_of(seen.first_bad or 0, entry.shape)
    for chunk in entry.chunks:
        box = chunk.box
        if all(o <= at < o + size for at, o, size in zip(place, box.offsets, box.sizes, strict=True)):
            file = chunk.span.file.rpartition("\0")[2]  # of one that nobody has written, what it is instead
            return file, rank_of_file(file)
    return "", None


# Zeros


def zero_weights(opened: Opened, weights: Sequence[TensorEntry], counts: Mapping[str, Counts]) -> Iterator[TensorEntry]:
    """Yield the weights that are all zero and should not be."""
    names = {entry.fqn for entry in weights}
    groups: dict[tuple[bool, str], list[TensorEntry]] = {}
    for entry in weights:
        is_norm = len(entry.shape) == 1
        if is_weight(entry) and f"{entry.fqn.removesuffix('weight')}running_mean" not in names:
            groups.setdefault((is_norm, _kind(entry.fqn)), []).append(entry)
    zero = {key: [e for e in group if counts[e.fqn].is_zero] for key, group in groups.items()}
    if not any(zero.values()):
        return
    adds_one = _adds_one(opened)
    for key, group in groups.items():
        is_norm, kind = key
        is_part = len(zero[key]) < len(group)
        every = all(len(zero[other]) == len(groups[other]) for other in groups if other[0] == is_norm)
        never = len(group) == 1 if is_norm else _NEVER_ZERO.search(kind) is not None
        if (is_part or every or never) and not (is_norm and adds_one):
            yield from zero[key]


def is_weight(entry: TensorEntry) -> bool:
    """Is this the weight of a norm, or a matrix of numbers that are trained?"""
    name = strip_wrappers(entry.fqn)
    if entry.num_elems < 2 or is_factor(name) or not (entry.dtype.is_float or entry.dtype.name.startswith("F8_E")):
        return False
    if len(entry.shape) == 1:
        return _NORM.search(name) is not None and name.endswith(".weight")
    return name.endswith(".weight") or (len(entry.shape) == 3 and _NEVER_ZERO.search(name) is not None)


def _kind(fqn: str) -> str:
    """Return a name without the number of the block that it belongs to; a number in a Sequential is no block's."""
    name = strip_wrappers(fqn)
    return re.sub(r"^(.*?(?:^|\.))\d+(?=\..+\.)", r"\1*", name, count=1)


def _adds_one(opened: Opened) -> bool:
    try:
        config = config_beside(opened.asset_source or opened.source)
    except UnreadableError:
        return False
    return config is not None and any(map(_ADDS_ONE.search, _model_types(config.values)))


def _model_types(config: Mapping[str, object]) -> Iterator[str]:
    """Yield what kind of model a config is of, and those of its parts."""
    for key, value in config.items():
        if key == "model_type" and isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            yield from _model_types(value)
