"""Which tensor of a checkpoint belongs to which name of a model: roots, wrappers, and the maps of its architecture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ckpt_tools.checkpoint.entries import Checkpoint, TensorEntry
from ckpt_tools.checkpoint.formats.table import format_of
from ckpt_tools.checkpoint.names import Expected, load_table
from ckpt_tools.checkpoint.names.convert import convert
from ckpt_tools.checkpoint.names.match_architecture import NameContract, settle
from ckpt_tools.checkpoint.names.mosaic import whole
from ckpt_tools.checkpoint.names.operations import UnknownOperationError
from ckpt_tools.checkpoint.names.transformers_renames import RenameRule
from ckpt_tools.checkpoint.transform import find_model, is_optimizer, strip_wrappers
from ckpt_tools.errors import UsageError
from ckpt_tools.floors import installed_release
from ckpt_tools.fsdp2.buffers import is_transformers
from ckpt_tools.fsdp2.read import Whole, as_whole
from ckpt_tools.models.ask_transformers import rule_of
from ckpt_tools.text import escape_name, first_few

Shapes = Mapping[str, tuple[int, ...] | None]
"""Name → shape of the model's tensor; None where the checkpoint's may be another (4-bit weights)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Which tensors of a checkpoint a model gets."""

    found: Mapping[str, Whole] = field(default_factory=dict)  # Name of the model → what to read
    left: tuple[str, ...] = ()  # FQNs of the checkpoint that are left over
    whose: str = ""
    """By whose map the names are found; empty where they are those of the file, perhaps under another root."""

    @property
    def title(self) -> str:
        """What was done, for people."""
        changed = [(one.only, name) for name, one in self.found.items() if one.only is None or one.only.fqn != name]
        if not changed:
            return "names as in the file"
        if self.whose:
            return f"names of {self.whose}: {len(changed)} of {len(self.found)} tensors are renamed, joined or split"
        old = ", ".join(f"{entry.fqn} is {name}" for entry, name in changed[:1] if entry)
        return f"names as in the file, except for their prefix ({escape_name(old)})"


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...] | None]:
    """Return what `match_names` holds the checkpoint's tensors against."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def match_names(checkpoint: Checkpoint, model: nn.Module, names: Shapes, prefix: str) -> Match:
    """Find the tensor for every name of the model; `prefix` "auto" finds what the file's names begin with or lack.

    A file of the hub is what `from_pretrained` and `ckpt shard` take it for: its names go through the maps of the
    model's class. What `dcp.load` reads has the model's own names, unless these maps find more of them.
    """
    plain = _plain(checkpoint, prefix)
    candidates = [plain]
    if prefix == "auto" and (rooted := _without_root(plain, names)) is not plain:
        candidates.append(rooted)
    best = Match(left=tuple(entry.fqn for entry in plain.values()))
    best_score: tuple[int, ...] = (0, 0, 0)
    is_live = format_of(checkpoint).loads_by_dcp
    for candidate in candidates:
        same = _same(candidate, names)
        is_whole = _score(same, names)[0] == len(names)
        mapped = _mapped(candidate, model, names, is_needed=not is_whole) if not (is_live and is_whole) else None
        for match in (same, mapped) if is_live else (mapped, same):
            if match is not None and match.found and (score := _score(match, names)) > best_score:
                best, best_score = match, score
    return best


def _plain(checkpoint: Checkpoint, prefix: str) -> dict[str, TensorEntry]:
    """Return the model's tensors by the names that they have without `prefix`, or the root that is found."""
    if prefix == "auto":
        inside, root = find_model(checkpoint)
        return {strip_wrappers(entry.fqn).removeprefix(root): entry for entry in inside.tensors}
    entries = [entry for entry in checkpoint.tensors if not prefix or entry.fqn.startswith(prefix)]
    if not entries:
        raise UsageError(
            f"no tensor name in the checkpoint starts with {prefix!r}",
            where="prefix",
            hint='use "auto", or list the names with `ckpt inspect --tensors`',
        )
    outside = len(entries) < len(checkpoint.tensors)
    rest = [] if outside else [entry for entry in entries if is_optimizer(entry)]
    return {strip_wrappers(entry.fqn.removeprefix(prefix)): entry for entry in entries if entry not in rest}


def _score(match: Match, names: Shapes) -> tuple[int, int, int]:
    """Return how well it fits: names whose shape is right, all names, and what is left over."""
    fitting = sum(names[name] in (None, one.shape) for name, one in match.found.items())
    return fitting, len(match.found), -len(match.left)


def _same(plain: Mapping[str, TensorEntry], names: Shapes) -> Match:
    return Match(
        found={name: as_whole(plain[name]) for name in names if name in plain},
        left=tuple(entry.fqn for name, entry in plain.items() if name not in names),
    )


def _mapped(plain: Mapping[str, TensorEntry], model: nn.Module, names: Shapes, *, is_needed: bool) -> Match | None:
    """Return what the map of the model's class makes of the tensors, or None; where it `is_needed` it must succeed."""
    known = architecture_of(model)
    if known is None:
        return None
    mosaics = {name: whole(entry.fqn, entry.dtype, entry.shape) for name, entry in plain.items()}
    shapes = {name: shape for name, shape in names.items() if shape is not None}
    try:
        made = convert(mosaics, known.expected, names.__contains__, known.config, shapes)
    except UsageError as error:
        if not is_needed:
            return None
        error.hint = "pass prefix if the checkpoint contains more than this model"
        if isinstance(error.__cause__, UnknownOperationError):
            error.hint = (
                "save the model once with transformers in its own names: "
                "save_pretrained(..., save_original_format=False)"
            )
        raise
    entries = {entry.fqn: entry for entry in plain.values()}
    found = {name: Whole(fqn=name, mosaic=made[name], entries=entries) for name in names if name in made}
    used = {source for one in found.values() for source in one.mosaic.sources}
    return Match(
        found=found,
        left=tuple(fqn for fqn in entries if fqn not in used),
        whose=f"the live {known.expected.architecture} of {known.source}",
    )


def _without_root(plain: dict[str, TensorEntry], names: Collection[str]) -> dict[str, TensorEntry]:
    """Return the entries under the names that agree best with the model's: with a root taken away or added."""
    if all(name in plain for name in names):
        return plain
    tails = {name.rpartition(".")[0]: name for name in names}
    less = (
        {name[len(root) :]: entry for name, entry in plain.items() if name.startswith(root)}
        for root in _roots(plain, names)
    )
    more = (
        {name if name in names else root + name: entry for name, entry in plain.items()}
        for root in _roots(tails.values(), plain)
    )
    return max((plain, *less, *more), key=lambda option: sum(name in names for name in option))


def _roots(names: Iterable[str], known: Collection[str]) -> list[str]:
    """Return what up to four components before a known name are, the three most frequent of them."""
    found: Counter[str] = Counter()
    for name in names:
        parts = name.split(".")
        start = next((n for n in range(1, min(len(parts), 5)) if ".".join(parts[n:]) in known), None)
        if start is not None:
            found[".".join(parts[:start]) + "."] += 1
    return [root for root, _ in found.most_common(3)]


def settle_names(
    model: nn.Module,
    architecture: str,
    match: Match,
    missing: Collection[str],
    names: Collection[str],
    *,
    strict: bool = True,
) -> NameContract:
    """Judge the names that only the model has (`missing`, of `names`) or only the checkpoint, by the model's classes.

    `architecture` is the class that the checkpoint's config names; empty where none does. Without `strict` a head that
    the checkpoint lacks keeps the values that it was given, and is missing.
    """
    base = getattr(model, "base_model_prefix", "") if is_transformers(model) else ""
    is_other = bool(architecture) and all(kind.__name__ != architecture for kind in type(model).__mro__)
    used = [source for one in match.found.values() for source in one.mosaic.sources]
    lacks_base = bool(used) and not any(f".{base}." in f".{fqn}" for fqn in (*used, *match.left))
    buffers = [name for name, _ in model.named_buffers()]
    old = tuple(fqn for fqn in match.left if any(fqn == name or fqn.endswith(f".{name}") for name in buffers))
    found = settle(
        missing,
        [fqn for fqn in match.left if fqn not in old],
        present=set(names).difference(missing),
        may_miss=_patterns(model, "_keys_to_ignore_on_load_missing"),
        ignored=_patterns(model, "_keys_to_ignore_on_load_unexpected"),
        base=base,
        is_other=strict and (is_other or (any(name.startswith(f"{base}.") for name in names) and lacks_base)),
    )
    return replace(found, ignored=(*old, *found.ignored))


def _patterns(model: nn.Module, attribute: str) -> Iterator[str]:
    for module in model.modules():
        patterns = getattr(module, attribute, None) or ()
        yield from (patterns,) if isinstance(patterns, str) else patterns


def describe_misfit(missing: Collection[str], unexpected: Collection[str]) -> str:
    """Say which names are missing and which nobody expects: "1 missing: a; 2 unexpected: b, c"."""
    both = (("missing", missing), ("unexpected", unexpected))
    return "; ".join(f"{len(names)} {label}: {first_few(names, 4)}" for label, names in both if names)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveArchitecture:
    """A class of transformers, with its config."""

    expected: Expected  # Its rules and base prefix; names, ties and counts only where the table knows it
    config: Mapping[str, object]
    source: str  # Of which transformers the rules are
    is_known: bool  # The table has it, so that `ckpt shard` and `ckpt gather` go by the same rules


def architecture_of(model: nn.Module) -> LiveArchitecture | None:
    """Return the architecture of a model; None when it is not one of transformers."""
    if not is_transformers(model):
        return None
    kind = _original(type(model))
    config: dict[str, object] = model.config.to_dict()  # type: ignore[operator,union-attr]
    table = load_table()
    expected = table.expected(kind.__name__, config)
    # A class of the user's own may be called like another, and mean other things by the same names.
    if expected is not None and kind.__module__.startswith("transformers."):
        return LiveArchitecture(expected=expected, config=config, source=table.source, is_known=True)
    rules = _installed_rules(model)
    if rules is None:
        return None
    base = getattr(model, "base_model_prefix", "")
    return LiveArchitecture(
        expected=Expected(architecture=kind.__name__, base=base, rules=rules),
        config=config,
        source=f"transformers {installed_release('transformers')}",
        is_known=False,
    )


def _installed_rules(model: nn.Module) -> list[RenameRule] | None:
    """Return what loading does by the installed transformers; None where it has a kind of rule that ckpt has not."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    with _original_classes(model):
        found = [rule_of(transform) for transform in get_model_conversion_mapping(model)]  # type: ignore[arg-type]
    rules = [rule for rule in found if rule is not None]
    return rules if len(rules) == len(found) else None


def _original(kind: type) -> type:
    """Return the class that `fully_shard` has made one of its own of."""
    return next(one for one in kind.__mro__ if not issubclass(one, FSDPModule))


@contextmanager
def _original_classes(model: nn.Module) -> Iterator[None]:
    """Give the units their original classes: transformers goes by the names."""
    changed = [(module, type(module)) for module in model.modules() if isinstance(module, FSDPModule)]
    for module, kind in changed:
        module.__class__ = _original(kind)
    try:
        yield
    finally:
        for module, kind in changed:
            module.__class__ = kind
