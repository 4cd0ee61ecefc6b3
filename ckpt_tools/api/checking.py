"""`verify` and `diff`: what reads every byte."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Annotated

from ckpt_tools.checks import diff as diffing, verify as verifying
from ckpt_tools.checks.diff import Difference
from ckpt_tools.checks.verify import Level, Verification
from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.description.transform import select
from ckpt_tools.formats.opening import open_path
from ckpt_tools.options import (
    AnyPath,
    Argument,
    Exclude,
    From,
    Include,
    NumWorkers,
    Option,
    Progress,
    Source,
    default_num_workers,
    takes,
)
from ckpt_tools.text import escape_name


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """The options of `verify`."""

    source: Source = field(kw_only=False)
    against: Annotated[AnyPath | None, Option("Copy to compare with, bit for bit, of any format.", metavar="REF")] = (
        None
    )
    level: Annotated[Level, Option("What to read: structure, headers only; data, every byte.")] = "data"
    num_workers: NumWorkers = None
    format: From = None
    progress: Progress = None


@takes(VerifyOptions)
def verify(options: VerifyOptions) -> Verification:
    """Check a checkpoint and collect everything that is wrong.

    Raises:
        UnreadableError: The checkpoint is too damaged to be described.
    """
    level, against, progress = options.level, options.against, options.progress
    workers = options.num_workers or default_num_workers()
    with ExitStack() as stack:
        opened = stack.enter_context(open_path(os.fspath(options.source), format=options.format))
        reference = None if against is None else stack.enter_context(open_path(os.fspath(against)))
        total = opened.checkpoint.total_bytes if level == "data" else 0
        if reference is not None:
            total += opened.checkpoint.total_bytes + reference.checkpoint.total_bytes
        receiver = progress(total) if progress is not None and total else None
        result = verifying.verify(opened, level=level, num_workers=workers, progress=receiver)
        if reference is None or not result.ok:
            return result
        difference = diffing.diff(opened, reference, num_workers=workers, progress=receiver)
        return verifying.with_findings(result, _findings_of(difference, os.fspath(against or "")))


def _findings_of(difference: Difference, against: str) -> tuple[Finding, ...]:
    where = escape_name(against)
    rows = [("missing-tensor", fqn, "only the reference has it") for fqn in difference.only_in_b]
    rows += [("extra-tensor", fqn, "the reference does not have it") for fqn in difference.only_in_a]
    rows += [("different-tensor", change.fqn, change.what) for change in difference.changed]
    return tuple(Finding.error(code=code, where=where, what=f"tensor {fqn!r}: {what}") for code, fqn, what in rows)


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
    num_workers: NumWorkers = None
    progress: Progress = None


@takes(DiffOptions)
def diff(options: DiffOptions) -> Difference:
    """Compare two checkpoints of any formats: names, shapes, dtypes and bytes.

    Raises:
        UnreadableError: One of them is incomplete or damaged.
    """
    progress = options.progress
    with open_path(os.fspath(options.a)) as one, open_path(os.fspath(options.b)) as other:
        left, right = (
            replace(
                side,
                checkpoint=select(
                    side.checkpoint, include=options.include, exclude=options.exclude, beside=beside.checkpoint
                ),
            )
            for side, beside in ((one, other), (other, one))
        )
        total = left.checkpoint.total_bytes + right.checkpoint.total_bytes
        return diffing.diff(
            left,
            right,
            keys_only=options.keys_only,
            atol=options.atol,
            rtol=options.rtol,
            num_workers=options.num_workers or default_num_workers(),
            progress=progress(total) if progress is not None and not options.keys_only else None,
        )
