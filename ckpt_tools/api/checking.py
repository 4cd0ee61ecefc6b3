"""`verify` and `diff`: what reads every byte."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Annotated

from ckpt_tools.api.parts import parse_part
from ckpt_tools.checks import diff as diffing, verify as verifying
from ckpt_tools.checks.accept import accept
from ckpt_tools.checks.diff import Difference
from ckpt_tools.checks.step import Pair, join, pair_parts, verify_step
from ckpt_tools.checks.trainer import Purpose
from ckpt_tools.checks.verify import Level, Verification
from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.errors import UsageError
from ckpt_tools.formats.opening import Opened, open_path
from ckpt_tools.formats.step import OpenedStep, open_like, open_repository, open_step
from ckpt_tools.formats.steps import note_reading
from ckpt_tools.models.name_options import LibraryNames
from ckpt_tools.models.opening import reconsider
from ckpt_tools.options import (
    AnyPath,
    Argument,
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
from ckpt_tools.remote.places import absolute
from ckpt_tools.text import escape_name

CheckedPart = Annotated[
    str | None,
    Option("Read the bytes of one part of N of the tensors, from 0; nobody sums the parts up.", metavar="I/N"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """The options of `verify`."""

    source: Source = field(kw_only=False)
    against: Annotated[AnyPath | None, Option("Copy to compare with, bit for bit, of any format.", metavar="REF")] = (
        None
    )
    names: LibraryNames = "auto"
    level: Annotated[
        Level,
        Option("What to check: structure, headers only; data, every byte; values, also NaN, Inf and all-zero weights."),
    ] = "data"
    purpose: Annotated[
        Purpose | None,
        Option("Purpose: resume, all that the trainer resumes from; weights (default: as saved).", name="--for"),
    ] = None
    part: CheckedPart = None
    accept: Annotated[
        Sequence[str],
        Option("Record that this file was changed on purpose, in the manifest (repeatable).", metavar="FILE"),
    ] = ()
    num_workers: NumWorkers = None
    format: From = None
    component: Component = None
    shapes_from: ShapesFrom = None
    progress: Progress = None


@takes(VerifyOptions)
def verify(options: VerifyOptions) -> Verification:
    """Check a checkpoint and collect everything that is wrong.

    Raises:
        UnreadableError: The checkpoint is too damaged to be described.
    """
    level, against, progress = options.level, options.against, options.progress
    workers = options.num_workers or default_num_workers(options.source, options.against)
    share = None if options.part is None else parse_part(options.part)
    if share is not None and level == "structure":
        raise UsageError("--part shares the bytes, and --level structure reads none", hint="leave out --part")
    if options.accept:
        accept(absolute(os.fspath(options.source)), options.accept)
    with ExitStack() as stack:
        is_step = options.format is None and options.component is None
        step = open_step(os.fspath(options.source)) if is_step else None
        if step is not None and share is not None:
            raise UsageError("--part takes a checkpoint, not a step", hint="name the directory of its model")
        pairs: tuple[Pair, ...] = ()
        if step is not None:
            stack.enter_context(step)
            total = step.total_bytes
            if against is not None:
                other = open_step(os.fspath(against)) or open_path(os.fspath(against), as_part=True)
                stack.callback(other.__exit__)
                pairs = pair_parts(step, other)
        else:
            source, given, component = os.fspath(options.source), options.shapes_from, options.component
            opened = open_path(source, format=options.format, shapes_from=given, as_part=True, component=component)
            opened = reconsider(stack.enter_context(opened))
            total = opened.checkpoint.total_bytes
            if against is not None:
                pairs = (Pair("", opened, stack.enter_context(open_like(os.fspath(against), component))),)
        total = total if level != "structure" else 0
        total += sum(side.checkpoint.total_bytes for pair in pairs for side in (pair.ours, pair.theirs))
        receiver = progress(total) if progress is not None and total else None
        purpose = options.purpose
        result = (
            verifying.verify(opened, level=level, num_workers=workers, progress=receiver, share=share, purpose=purpose)
            if step is None
            else verify_step(step, level=level, num_workers=workers, progress=receiver, purpose=purpose)
        )
        if not pairs or not result.ok:
            return result
        findings: list[Finding] = []
        left_out: list[str] = []
        for pair in pairs:
            sides, names = (pair.ours, pair.theirs), options.names
            difference = diffing.diff(
                *sides, names=names, num_workers=workers, progress=receiver, share=share, told=left_out
            )
            left_out += difference.notes
            findings += _findings_of(difference, os.fspath(against or "") + (f" ({pair.name})" if pair.name else ""))
        if step is None:
            result = replace(result, identities=(pairs[0].ours.identity, pairs[0].theirs.identity))
        parts = [pair.name for pair in pairs] if step is not None and len(pairs) < len(step.parts) else None
        return verifying.with_findings(result, findings, parts=parts, not_compared=left_out)


def _findings_of(difference: Difference, against: str) -> tuple[Finding, ...]:
    where = escape_name(against)
    rows = [("missing-tensor", fqn, "only the reference has it") for fqn in difference.only_in_b]
    rows += [("extra-tensor", fqn, "the reference does not have it") for fqn in difference.only_in_a]
    rows += [("different-tensor", change.fqn, change.what) for change in difference.changed]
    found = ((fqn, Finding.error(code, where, f"tensor {fqn!r}: {what}")) for code, fqn, what in rows)
    return tuple(replace(finding, tensor=fqn) for fqn, finding in found)


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffOptions:
    """The options of `diff`."""

    a: Annotated[AnyPath, Argument("A checkpoint of any format.", "A")] = field(kw_only=False)
    b: Annotated[AnyPath, Argument("The other checkpoint.", "B")] = field(kw_only=False)
    keys_only: Annotated[bool, Option("Names, shapes and dtypes only; reads no tensor.")] = False
    atol: Annotated[float | None, Option("Absolute tolerance (default: bitwise).", min=0)] = None
    rtol: Annotated[float | None, Option("Relative tolerance.", min=0)] = None
    include: Include = ()
    exclude: Exclude = ()
    names: LibraryNames = "auto"
    component: Component = None
    part: CheckedPart = None
    num_workers: NumWorkers = None
    progress: Progress = None


@takes(DiffOptions)
def diff(options: DiffOptions) -> Difference:
    """Compare two checkpoints of any formats: names, shapes, dtypes and bytes.

    Raises:
        UnreadableError: One of them is incomplete or damaged.
    """
    sides = (os.fspath(options.a), os.fspath(options.b))
    with ExitStack() as stack:
        if options.component is None and (step := open_repository(sides[0])) is not None:
            stack.enter_context(step)
            other = open_repository(sides[1]) or open_like(sides[1], None)
            stack.callback(other.__exit__)
            found = {pair.name: _diff(pair.ours, pair.theirs, options) for pair in pair_parts(step, other)}
            alone = [
                tuple(
                    f"{name} ({len(opened.checkpoint.tensors)} tensors)" for name, opened in side if name not in found
                )
                for side in (step.models, other.models if isinstance(other, OpenedStep) else ())
            ]
            result = join(found, identities=(step.identity, other.identity))
            return replace(result, only_in_a=(*result.only_in_a, *alone[0]), only_in_b=(*result.only_in_b, *alone[1]))
        one, two = (stack.enter_context(open_like(side, options.component)) for side in sides)
        difference = _diff(one, two, options)
        named = ((options.a, one.step), (options.b, two.step))
        notes = (f"{os.fspath(path)}: {note_reading(step)}" for path, step in named if step is not None)
        both = (one.identity, two.identity)
        return replace(difference, identities=both, notes=(*map(escape_name, notes), *difference.notes))


def _diff(one: Opened, other: Opened, options: DiffOptions) -> Difference:
    """Compare two models."""
    progress = options.progress
    total = one.checkpoint.total_bytes + other.checkpoint.total_bytes
    return diffing.diff(
        one,
        other,
        keys_only=options.keys_only,
        atol=options.atol,
        rtol=options.rtol,
        names=options.names,
        include=options.include,
        exclude=options.exclude,
        num_workers=options.num_workers or default_num_workers(options.a, options.b),
        progress=progress(total) if progress is not None and not options.keys_only else None,
        share=None if options.part is None else parse_part(options.part),
    )
