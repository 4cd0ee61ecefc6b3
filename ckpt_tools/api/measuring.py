"""`stats`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Annotated

from ckpt_tools.checks.stats import Stats, stats as measure
from ckpt_tools.checks.step import join, pair_parts
from ckpt_tools.conversions.job import is_told
from ckpt_tools.errors import UsageError
from ckpt_tools.formats.opening import Opened, open_path
from ckpt_tools.formats.step import open_like, open_repository
from ckpt_tools.formats.steps import note_reading
from ckpt_tools.models.name_options import LibraryNames
from ckpt_tools.options import (
    AnyPath,
    Component,
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
from ckpt_tools.quantised.decoded import dequantised
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
    component: Component = None
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
    source, against = os.fspath(options.source), None if options.against is None else os.fspath(options.against)
    with ExitStack() as stack:
        is_any = options.format is None and options.component is None
        if is_any and (step := open_repository(source)) is not None:
            stack.enter_context(step)
            other = None if against is None else open_repository(against) or open_like(against, None)
            if other is None:
                found = {part.name: _measure([opened], options) for part, opened in step.parts}
                return join(found, identities=(step.identity,))
            stack.callback(other.__exit__)
            found = {pair.name: _measure([pair.ours, pair.theirs], options) for pair in pair_parts(step, other)}
            return join(found, identities=(step.identity, other.identity))
        given, name = options.shapes_from, options.component
        opened = open_path(source, format=options.format, shapes_from=given, as_part=True, component=name)
        one = stack.enter_context(opened)
        others = [] if against is None else [stack.enter_context(open_like(against, options.component))]
        return _measure([one, *others], options)


def _measure(sides: list[Opened], options: StatsOptions) -> Stats:
    """Measure one model, against another where there are two."""
    notes = [note_reading(side.step) for side in sides if side.step is not None]
    identities = tuple(side.identity for side in sides)
    if options.dequantize:
        is_quantised = [True, *(is_told(side, side.own_assets) for side in sides[1:])]
        sides = [dequantised(s, "f32") if found else s for s, found in zip(sides, is_quantised, strict=True)]
    one, *others = sides
    total = one.checkpoint.total_bytes
    result = measure(
        one,
        *others,
        names=options.names,
        include=options.include,
        exclude=options.exclude,
        frozen=options.frozen,
        rank=options.rank,
        num_workers=options.num_workers or default_num_workers(options.source, options.against),
        progress=options.progress(total) if options.progress is not None and total else None,
    )
    missed = result.not_checked
    if not options.dequantize and is_told(one, one.own_assets):
        missed = ("what quantised weights stand for: the figures are those of their codes (--dequantize)", *missed)
    return replace(result, identities=identities, not_checked=missed, notes=(*map(escape_name, notes), *result.notes))
