"""What no training leaves behind, though loaders take it: modules that died, and scales that nobody meant.

adapter-dead-module  factors that are 0 where the same module of other layers was trained, or that never begin at 0
adapter-alpha        the scale is negative, or out of every proportion
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from ckpt_tools.adapters.adapter import Adapter, AdapterModule, F
from ckpt_tools.adapters.checks.integrity import ValueTable, is_idle
from ckpt_tools.description.checkpoint import Finding

NUMBER = re.compile(r"(?<![^._])\d+(?![^._])")
"""Of a layer, in a path."""
_EXPERT = re.compile(r"(?:^|[._])experts?[._]\d")
"""One that the router never chose stays untrained in a healthy run."""
_NEVER_ZERO = ("A", "B_embedding")
"""Roles that begin with random values in every trainer: PEFT, kohya's, LyCORIS."""
_LARGEST, _SMALLEST = 256.0, 1e-6
"""Of scales: alpha/r is around 1; rsLoRA's alpha/√r reaches 64 with alpha 512, kohya's alpha of 1 gives 1/r."""


def check_suspicions(adapter: Adapter[F], table: ValueTable) -> Iterator[Finding]:
    """Yield what speaks for a damage that no loader notices.

    Args:
        adapter: Whose modules the table numbers.
        table: What was seen of the factors' values.
    """
    yield from _dead(adapter, table)
    for module in adapter.modules:
        yield from _scale(module)


def _dead(adapter: Adapter[F], table: ValueTable) -> Iterator[Finding]:
    idle, alive = [], set()
    for number, module in enumerate(adapter.modules):
        seen = {role: values for role in module.factors if (values := table.get((number, role))) is not None}
        if module.is_saved or not seen:
            continue
        if not is_idle(module, seen):
            alive.add(NUMBER.sub("*", module.path))
        else:
            is_lost = any(role in _NEVER_ZERO and values.is_zero for role, values in seen.items())
            idle.append((module.path, is_lost))
    for path, is_lost in idle if alive else ():
        if is_lost:
            what, hint = "a factor is 0 that begins with random values", "was the adapter saved whole?"
        elif NUMBER.sub("*", path) in alive and not _EXPERT.search(path):
            what = "its factors multiply to 0, and the same module of other layers was trained"
            hint = "was it saved whole? If this layer was not meant to be trained, leave its tensors out"
        else:
            continue
        yield Finding.error(code="adapter-dead-module", where=path, what=what, hint=hint)


def _scale(module: AdapterModule[F]) -> Iterator[Finding]:
    if module.alpha is None or module.rank is None or not module.rank.value or not math.isfinite(module.alpha.value):
        return  # said by the other checks, or nothing scales it
    rank = module.rank.value
    scale = module.alpha.value / (math.sqrt(rank) if module.use_rslora else rank)
    if scale == 0 or _SMALLEST <= scale <= _LARGEST:
        return
    what = "is negative: it takes away what was trained" if scale < 0 else "is out of every proportion"
    yield Finding.error(
        code="adapter-alpha",
        where=module.path,
        what=f"the scale {scale:g} (alpha {module.alpha.value:g}, {module.alpha.source}) {what}",
        hint="give the alpha of the training run: ckpt export-lora SRC DST --alpha VALUE",
    )
