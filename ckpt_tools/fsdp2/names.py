"""Which tensor of a checkpoint belongs to which name of a model: roots, wrappers, transformers' conversions."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from ckpt_tools.description.checkpoint import Checkpoint, TensorEntry
from ckpt_tools.description.transform import find_model, is_optimizer, strip_wrappers
from ckpt_tools.errors import UsageError
from ckpt_tools.fsdp2.buffers import is_transformers
from ckpt_tools.fsdp2.read import Piece, Whole, as_whole
from ckpt_tools.text import first_few


def match_names(
    checkpoint: Checkpoint, model: nn.Module, names: Collection[str], prefix: str
) -> tuple[dict[str, Whole], tuple[str, ...]]:
    """Find the tensor for every name of the model.

    Args:
        checkpoint: What was opened.
        model: Transformers models bring renamings and mergers for files of the hub's layout.
        names: FQNs of the model's state dict.
        prefix: What the checkpoint's names have in front of the model's; "auto" finds it, or what they lack.

    Returns:
        FQN of the model → what to read, and the checkpoint's FQNs that are left over.

    Raises:
        UsageError: No tensor begins with `prefix`, or two tensors claim one name.
    """
    if prefix != "auto":
        entries = [entry for entry in checkpoint.tensors if not prefix or entry.fqn.startswith(prefix)]
        if not entries:
            raise UsageError(
                f"no tensor of the checkpoint begins with {prefix!r}",
                where="prefix",
                hint='use "auto", or look at the names with `ckpt inspect --tensors`',
            )
        outside = len(entries) < len(checkpoint.tensors)
        rest = [] if outside else [entry for entry in entries if is_optimizer(entry)]
        plain = {strip_wrappers(entry.fqn.removeprefix(prefix)): entry for entry in entries if entry not in rest}
    else:
        inside, root = find_model(checkpoint)
        plain = {strip_wrappers(entry.fqn).removeprefix(root): entry for entry in inside.tensors}
    candidates = [plain]
    if prefix == "auto" and (rooted := _without_root(plain, names)) is not plain:
        candidates.append(rooted)
    best: tuple[dict[str, Whole], tuple[str, ...]] = ({}, ())
    for candidate in candidates:
        found = {name: as_whole(candidate[name]) for name in names if name in candidate}
        left = tuple(entry.fqn for name, entry in candidate.items() if name not in found)
        for result in ((found, left), _convert(model, candidate, names) if len(found) < len(names) else None):
            if result is not None and (len(result[0]), -len(result[1])) > (len(best[0]), -len(best[1])):
                best = result
    return best if best[0] else ({}, tuple(entry.fqn for entry in plain.values()))


def _without_root(plain: dict[str, TensorEntry], names: Collection[str]) -> dict[str, TensorEntry]:
    """Return the entries under the names that agree best with the model's: with a root taken away or added."""
    wanted = set(names)
    best, best_count = plain, sum(name in wanted for name in plain)
    if best_count == len(wanted):
        return best
    for change in _changes(plain, wanted):
        changed = {new: entry for name, entry in plain.items() if (new := change(name)) is not None}
        count = sum(name in wanted for name in changed)
        if count > best_count:
            best, best_count = changed, count
    return best


def _changes(plain: Iterable[str], wanted: Collection[str]) -> list[Callable[[str], str | None]]:
    """Return the renamings to try: those that make some names agree, most frequent first."""
    tails = {name.rpartition(".")[0]: name for name in wanted}
    less = (partial(_without, root) for root in _roots(plain, wanted))
    more = (partial(_below, root, wanted) for root in _roots(tails.values(), set(plain)))
    return [*less, *more]


def _without(root: str, name: str) -> str | None:
    return name[len(root) :] if name.startswith(root) else None


def _below(root: str, wanted: Collection[str], name: str) -> str:
    return name if name in wanted else root + name


def _roots(names: Iterable[str], known: Collection[str]) -> list[str]:
    """Return what up to four components before a known name are, the three most frequent of them."""
    found: Counter[str] = Counter()
    for name in names:
        parts = name.split(".")
        start = next((n for n in range(1, min(len(parts), 5)) if ".".join(parts[n:]) in known), None)
        if start is not None:
            found[".".join(parts[:start]) + "."] += 1
    return [root for root, _ in found.most_common(3)]


def _convert(
    model: nn.Module, plain: Mapping[str, TensorEntry], names: Collection[str]
) -> tuple[dict[str, Whole], tuple[str, ...]] | None:
    """Apply the conversions that transformers has for the model; None when it has none.

    Source: `conversion_mapping.py` and `core_model_loading.py` of transformers 5.23. Renamings are applied as they
    are; of the operations on tensors, stacking (experts) and concatenation, whose parts can be read box by box.
    """
    if not is_transformers(model):
        return None
    try:
        from transformers import core_model_loading as loading
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return None
    with _original_classes(model):
        transforms = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    renamings = [t for t in transforms if isinstance(t, loading.WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, loading.WeightConverter)]
    base = getattr(model, "base_model_prefix", "") or None
    wanted = dict.fromkeys(names, True)
    groups: dict[str, list[tuple[str | None, str]]] = defaultdict(list)
    for source in plain:
        target, pattern = loading.rename_source_key(source, renamings, converters, base, wanted)
        groups[target].append((pattern, source))
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    found: dict[str, Whole] = {}
    left: list[str] = []
    for target, members in groups.items():
        if target not in wanted:
            left += [plain[source].fqn for _, source in members]
        elif members[0][0] is None:
            if len(members) > 1:
                raise UsageError(
                    f"{len(members)} tensors of the checkpoint are named {target!r} in the model: "
                    + first_few([source for _, source in members]),
                    hint="pass the prefix of the one that is meant",
                )
            found[target] = as_whole(plain[members[0][1]])
        else:
            converter = by_pattern[members[0][0]]
            found[target] = _merge(target, converter, members, plain)
    return found, tuple(left)


def describe_misfit(missing: Collection[str], unexpected: Collection[str]) -> str:
    """Say which names are missing and which nobody expects: "1 missing: a; 2 unexpected: b, c"."""
    both = (("missing", missing), ("unexpected", unexpected))
    return "; ".join(f"{len(names)} {label}: {first_few(names, 4)}" for label, names in both if names)


@contextmanager
def _original_classes(model: nn.Module) -> Iterator[None]:
    """Give the units their original classes: `fully_shard` makes new ones, and transformers goes by the names."""
    changed = [(module, type(module)) for module in model.modules() if isinstance(module, FSDPModule)]
    for module, kind in changed:
        module.__class__ = next(k for k in kind.__mro__ if not issubclass(k, FSDPModule))  # type: ignore[assignment]
    try:
        yield
    finally:
        for module, kind in changed:
            module.__class__ = kind


def _merge(
    target: str,
    converter: Any,  # noqa: ANN401 - transformers' own, imported only where it is there
    members: Sequence[tuple[str | None, str]],
    plain: Mapping[str, TensorEntry],
) -> Whole:
    """Put tensors together as a converter's operations say: stack each source's list, then concatenate."""
    operations = [(type(op).__name__, getattr(op, "dim", 0)) for op in converter.operations]
    kinds = [kind for kind, _ in operations]
    if kinds not in (["MergeModulelist"], ["MergeModulelist", "Concatenate"], ["Concatenate"]):
        raise UsageError(
            f"the checkpoint's form of {target!r} has to be converted by {', '.join(kinds)}, which is not supported",
            hint="save the model once with transformers in its own names: "
            "save_pretrained(..., save_original_format=False)",
        )
    patterns = list(converter.source_patterns)
    lists: dict[str, list[TensorEntry]] = {pattern: [] for pattern in patterns}
    for pattern, source in sorted(members, key=lambda member: _natural(member[1])):
        lists[str(pattern)].append(plain[source])
    dims = dict(operations)
    stack = dims.get("MergeModulelist")
    concatenate = dims.get("Concatenate")
    columns = [entries for entries in lists.values() if entries]
    if (stack is not None and len({len(entries) for entries in columns}) > 1) or len(columns) < len(patterns):
        raise UsageError(f"the parts of {target!r} are not complete in the checkpoint")
    pieces: list[Piece] = []
    new_dims = () if stack is None else (stack,)
    base = 0
    for entries in columns:
        for number, entry in enumerate(entries, start=1):
            offsets = [0] * (len(entry.shape) + len(new_dims))
            if stack is not None:
                offsets[stack] = number - 1
            if concatenate is not None:
                offsets[concatenate] = base
            piece = Piece(entry, tuple(offsets), new_dims)
            pieces.append(piece)
            if concatenate is not None and (stack is None or number == len(entries)):
                base += piece.box.sizes[concatenate]
    ends = [tuple(o + n for o, n in zip(p.box.offsets, p.box.sizes, strict=True)) for p in pieces]
    shape = tuple(max(lengths) for lengths in zip(*ends, strict=True))
    return Whole(shape=shape, dtype=pieces[0].entry.dtype, pieces=tuple(pieces))


def _natural(name: str) -> list[tuple[int, int | str]]:
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", name) if part]
