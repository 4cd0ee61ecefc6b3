"""`verify`, `diff` and `stats`: what reads every byte."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.checkpoint.formats.digest import digest_bytes
from ckpt_tools.checkpoint.formats.file_names import is_weights
from ckpt_tools.checkpoint.formats.format import read_document
from ckpt_tools.checkpoint.formats.manifest import (
    MANIFEST_NAME,
    MAX_MANIFEST_BYTES,
    FileRecord,
    build_manifest,
    parse_manifest,
)
from ckpt_tools.checkpoint.formats.opening import Opened, open_path
from ckpt_tools.checkpoint.formats.step import OpenedStep, open_like, open_repository, open_step
from ckpt_tools.checkpoint.formats.step_layouts import note_reading
from ckpt_tools.checks import diff as diffing, stats as measuring, verify as verifying
from ckpt_tools.checks.diff import Difference
from ckpt_tools.checks.stats import Stats
from ckpt_tools.checks.step import Pair, join, pair_parts, verify_step
from ckpt_tools.checks.verify import OTHER_MODEL, Verification
from ckpt_tools.errors import UsageError
from ckpt_tools.models.open_asking import reconsider
from ckpt_tools.options import default_num_workers, takes
from ckpt_tools.options.check import DiffOptions, StatsOptions, VerifyOptions
from ckpt_tools.storage.locations import absolute
from ckpt_tools.storage.publish import replace_file
from ckpt_tools.storage.source import LocalSource
from ckpt_tools.text import counted, escape_name
from ckpt_tools.transfer.quantised.decoded import dequantised, is_told
from ckpt_tools.transfer.share_record import parse_part

# Record in a manifest that files beside the weights were changed on purpose


def accept(directory: str, files: Sequence[str]) -> None:
    """Record these files, which lie beside the weights, as they are now, with the date and both digests."""
    path = os.path.join(directory, MANIFEST_NAME)
    if not os.path.isfile(path):
        hint = "leave --accept out: where nothing is recorded, no file counts as changed"
        raise UsageError(f"--accept needs a {MANIFEST_NAME} on this machine", where=directory, hint=hint)
    today = datetime.now(UTC).date().isoformat()
    with LocalSource(directory) as source:
        manifest = parse_manifest(read_document(source, MANIFEST_NAME, MAX_MANIFEST_BYTES))
        assets, accepted = dict(manifest.assets), dict(manifest.accepted)
        for file in files:
            if file in (*manifest.documents, *manifest.files, MANIFEST_NAME) or is_weights(file):
                hint = "restore it, or write the checkpoint again"
                raise UsageError(f"--accept takes files beside the weights, got {file}", where=directory, hint=hint)
            content = read_document(source, file, MAX_MANIFEST_BYTES)
            before = assets[file].digest if file in assets else ""
            assets[file] = FileRecord(nbytes=len(content), digest=digest_bytes(content))
            accepted[file] = {"date": today, "recorded": before, "digest": assets[file].digest}
    content = build_manifest(replace(manifest, assets=assets, accepted=accepted))
    replace_file(path, content, f"{path}.{uuid.uuid4().hex[:8]}")


@takes(VerifyOptions, 'bool(ckpt_tools.verify("model-dp8"))', "True")
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
                *sides, names=names, num_workers=workers, progress=receiver, share=share, missed=left_out
            )
            left_out += difference.notes
            difference = replace(difference, identities=(pair.ours.identity, pair.theirs.identity))
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
    told = [replace(finding, tensor=fqn) for fqn, finding in found]
    if difference.other_model:
        what, hint = f"another model: {difference.other_model}", "--against takes a copy of the same model"
        told.insert(0, Finding.error(OTHER_MODEL, where, what, hint))
    return tuple(told)


@takes(DiffOptions, 'bool(ckpt_tools.diff("model", "model-dp8"))', "True")
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
                    f"{name} ({counted(len(opened.checkpoint.tensors), 'tensor')})"
                    for name, opened in side
                    if name not in found
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
    result = diffing.diff(
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
    given = {name: value for name in ("atol", "rtol", "include", "exclude") if (value := getattr(options, name))}
    words = {name: value if isinstance(value, float | int) else ", ".join(value) for name, value in given.items()}
    return replace(result, terms=tuple(f"--{name} {value}" for name, value in words.items()))


@takes(StatsOptions, 'ckpt_tools.stats("tuned", against="model").ok', "True")
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
    result = measuring.stats(
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
