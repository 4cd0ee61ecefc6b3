"""What is known of the names of a live model's class: ckpt's own table, else the transformers that is installed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn
from torch.distributed.fsdp import FSDPModule

from ckpt_tools.checkpoint.names import Expected, load_table
from ckpt_tools.checkpoint.names.renames import Rule
from ckpt_tools.floors import installed_release
from ckpt_tools.fsdp2.buffers import is_transformers
from ckpt_tools.models.asked import rule_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A class of transformers, with its config."""

    expected: Expected
    """Its rules and base prefix; names, ties and counts only where the table knows it."""
    config: Mapping[str, object]
    source: str
    """Of which transformers the rules are."""
    is_known: bool
    """The table has it, so that `ckpt shard` and `ckpt gather` go by the same rules."""


def architecture_of(model: nn.Module) -> Architecture | None:
    """Return the architecture of a model; None when it is not one of transformers."""
    if not is_transformers(model):
        return None
    kind = _original(type(model))
    config: dict[str, object] = model.config.to_dict()  # type: ignore[operator,union-attr]
    table = load_table()
    expected = table.expected(kind.__name__, config)
    # A class of the user's own may be called like another, and mean other things by the same names.
    if expected is not None and kind.__module__.startswith("transformers."):
        return Architecture(expected=expected, config=config, source=table.source, is_known=True)
    rules = _installed_rules(model)
    if rules is None:
        return None
    base = getattr(model, "base_model_prefix", "")
    return Architecture(
        expected=Expected(architecture=kind.__name__, base=base, rules=rules),
        config=config,
        source=f"transformers {installed_release('transformers')}",
        is_known=False,
    )


def _installed_rules(model: nn.Module) -> list[Rule] | None:
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
