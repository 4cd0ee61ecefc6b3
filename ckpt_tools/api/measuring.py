"""`stats`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Annotated

from ckpt_tools.checks.stats import Stats, stats as measure
from ckpt_tools.description.transform import select
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.formats.opening import Opened, open_path
from ckpt_tools.formats.steps import note_reading
from ckpt_tools.models.name_options import LibraryNames
from ckpt_tools.options import (
    AnyPath,
    Exclude,
    From,
    Include,
    NumWorkers,
    Option,
    Progress,
    ShapesFrom,
    Source,
    default_num_workers,
    takes,
)
from ckpt_tools.quantised.decoded import dequantised, settings_beside
from ckpt_tools.text import escape_name


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsOptions:
    """The options of `stats`."""

    source: Source = field(kw_only=False)
    against: Annotated[
        AnyPath | None,
        Option("Earlier checkpoint of the same model, of any format, to measure the update from.", metavar="OTHER"),
    ] = None
    frozen: Annotated[
        Sequence[str], Option("Tensors that were not trained (repeatable; needs --against).", metavar="GLOB")
    ] = ()
    rank: Annotated[bool, Option("Also measure the effective rank of a sample of 256 rows of every matrix.")] = False
    dequantize: Annotated[bool, Option("Measure what quantised weights stand for; without it packed ones are not.")] = (
        False
    )
    include: Include = ()
    exclude: Exclude = ()
    names: LibraryNames = "auto"
    num_workers: NumWorkers = None
    format: From = None
    shapes_from: ShapesFrom = None
    progress: Progress = None


@takes(StatsOptions)
def stats(options: StatsOptions) -> Stats:
    """Measure the values of every tensor, and what training has changed since another checkpoint.

    Raises:
        UnreadableError: One of them is incomplete or damaged.
        UsageError: A glob that matches nothing, or names that cannot be matched.
    """
    if options.frozen and options.against is None:
        raise UsageError("--frozen needs --against", hint="name the checkpoint that the run started from")
    with ExitStack() as stack:
        source, given = os.fspath(options.source), options.shapes_from
        one = stack.enter_context(open_path(source, format=options.format, shapes_from=given))
        other = None if options.against is None else stack.enter_context(open_path(os.fspath(options.against)))
        sides = [one] if other is None else [one, other]
        notes = [note_reading(side.step) for side in sides if side.step is not None]
        if options.dequantize:
            is_quantised = [True, *map(_is_quantised, sides[1:])]
            sides = [dequantised(s, "f32") if found else s for s, found in zip(sides, is_quantised, strict=True)]
        chosen = [
            select(side.checkpoint, include=options.include, exclude=options.exclude, beside=sides[-i - 1].checkpoint)
            for i, side in enumerate(sides)
        ]
        one, *others = (replace(side, checkpoint=only) for side, only in zip(sides, chosen, strict=True))
        total = one.checkpoint.total_bytes
        result = measure(
            one,
            *others,
            names=options.names,
            frozen=options.frozen,
            rank=options.rank,
            num_workers=options.num_workers or default_num_workers(options.source, options.against),
            progress=options.progress(total) if options.progress is not None and total else None,
        )
        missed = result.not_checked
        if not options.dequantize and _is_quantised(one):
            missed = ("what quantised weights stand for: the figures are those of their codes (--dequantize)", *missed)
        return replace(result, not_checked=missed, notes=(*map(escape_name, notes), *result.notes))


def _is_quantised(opened: Opened) -> bool:
    """Does a config beside the weights say so? One that cannot be read says nothing."""
    try:
        return settings_beside(opened.asset_source or opened.source) is not None
    except UnreadableError:
        return False
