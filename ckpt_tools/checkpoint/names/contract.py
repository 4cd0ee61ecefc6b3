"""What becomes of the names that only the model has or only the file: the one judgement of every command.

Source: `PreTrainedModel.from_pretrained` of transformers 5.23, which computes what is missing and ignores what is left
over. Here a head that starts anew is told from a file that lacks weights.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ckpt_tools.text import first_few

_OLD_BUFFERS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|position_ids|masked_bias)$")
"""Buffers that old files hold and that models compute by now; some of their modules no longer have them at all."""
_POOLER = re.compile(r"(^|\.)pooler\.")
"""What `add_pooling_layer` adds to a base model: files have it or lack it, whatever the class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """The names of a model, and of a file, that the other does not have."""

    computed: tuple[str, ...] = ()
    """Names of the model that its modules compute, and that files need not hold."""
    anew: tuple[str, ...] = ()
    """Names of a head that the file does not have: they start with the values of their initialiser."""
    missing: tuple[str, ...] = ()
    """Names of the model that nothing fills."""
    ignored: tuple[str, ...] = ()
    """Names of the file that loading leaves out, and that are no sign of another model."""
    unexpected: tuple[str, ...] = ()
    """Names of the file that the model should have and does not."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What is to be said even where everything is as it should be."""
        others = [name for name in self.ignored if not _OLD_BUFFERS.search(name)]
        anew = "a head that the checkpoint does not have starts with new random values, as with from_pretrained"
        both = (self.anew, anew), (others, "not the model's, and left out by from_pretrained")
        return tuple(f"{what}: {first_few(names, 4)}" for names, what in both if names)


def settle(
    missing: Iterable[str],
    left: Iterable[str],
    *,
    present: Collection[str],
    may_miss: Iterable[str],
    ignored: Iterable[str],
    base: str,
    is_other: bool,
) -> Contract:
    """Judge the names that only one side has: of the model, whose others are `present`, or of the file (`left`).

    `may_miss` and `ignored` are transformers' `_keys_to_ignore_on_load_missing` and `…_unexpected`, `base` is its
    `base_model_prefix`. `is_other`: the file's config names another class, or its names lack that prefix.
    """
    computes, ignores = ([re.compile(pattern) for pattern in patterns] for patterns in (may_miss, ignored))
    missing = tuple(missing)
    computed = tuple(name for name in missing if any(regex.search(name) for regex in computes))
    rest = tuple(name for name in missing if name not in set(computed))
    root = f"{base}."
    is_headed = bool(base) and any(name.startswith(root) for name in present)
    filled = {name.rpartition(".")[0] for name in present}

    def starts_anew(name: str) -> bool:
        is_outside = is_headed and not name.startswith(root) and name.rpartition(".")[0] not in filled
        return is_outside or bool(base and _POOLER.search(name))

    anew = rest if is_other and all(map(starts_anew, rest)) else ()
    own = (name.removeprefix(root) for name in present if name.startswith(root) or not is_headed)
    inside = {base, *(name.partition(".")[0] for name in own)}

    def is_out(name: str) -> bool:
        is_known = _OLD_BUFFERS.search(name) or any(regex.search(name) for regex in ignores)
        is_of_head = is_other and anew == rest and inside.isdisjoint(name.split(".")[:3])
        return bool(is_known or (base and (is_of_head or _POOLER.search(name))))

    out = tuple(filter(is_out, left := tuple(left)))
    return Contract(
        computed=computed,
        anew=anew,
        missing=() if anew else rest,
        ignored=out,
        unexpected=tuple(name for name in left if name not in set(out)),
    )
