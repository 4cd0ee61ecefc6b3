"""Check a training step that keeps the model and the optimizer apart: all of its parts, and what lies beside them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.checkpoint.formats.manifest import MANIFEST_NAME
from ckpt_tools.checkpoint.formats.opening import Opened, open_path
from ckpt_tools.checkpoint.formats.repositories import may_be_one_of_several
from ckpt_tools.checkpoint.formats.step import OpenedStep
from ckpt_tools.checkpoint.formats.step_layouts import HERE
from ckpt_tools.checkpoint.identity import Identity
from ckpt_tools.checks.structure import check_candidates
from ckpt_tools.checks.verify import Extent, Looks, Unchecked, Verification, verify
from ckpt_tools.errors import UsageError
from ckpt_tools.options.common import Level, Purpose
from ckpt_tools.text import first_few
from ckpt_tools.transfer.execute import Progress

if TYPE_CHECKING:
    from ckpt_tools.checks.diff import Difference
    from ckpt_tools.checks.stats import Stats

Result = TypeVar("Result", "Difference", "Stats")


def verify_step(
    step: OpenedStep,
    *,
    level: Level,
    num_workers: int,
    progress: Progress | None = None,
    purpose: Purpose | None = None,
    looks: Looks | None = None,
) -> Verification:
    """Check every part of `step` at `level`, and that resuming finds what it needs."""
    findings = [*_check_parts(step), *_check_manifest(step)]
    unchecked: list[Unchecked] = []
    if step.passed_over:
        strange = first_few(step.passed_over, 6)
        unchecked.append(Unchecked(what=f"hidden directories, links and special files: {strange}"))
    results = []
    rows = [] if step.step.has_own else [("", step.root)]
    if not step.root.checkpoint.tensors:  # of files in one directory it has all
        rows += [(part.directory, opened) for part, opened in step.parts]
    names = [name for name, _ in rows]
    lost = {part.directory for part, _ in step.broken}
    for name, opened in rows:
        own_purpose = "weights" if name else purpose
        result = verify(
            opened, level=level, num_workers=num_workers, progress=progress, purpose=own_purpose, looks=looks
        )
        if name:
            findings += _inside(name, result.findings)
        else:  # the others lie in its directory
            findings += [each for each in result.findings if each.where not in lost]
            own = tuple(each for each in result.not_read if each.file.partition("/")[0] not in names)
            result = replace(result, not_read=own)
        unchecked += [replace(u, what=f"{name}: {u.what}", part=name) if name else u for u in result.unchecked]
        results.append(result)
    return Verification(
        level=level,
        identities=(step.identity,),
        tensors=sum(result.tensors for result in results),
        chunks=sum(result.chunks for result in results),
        nbytes=sum(result.nbytes for result in results),
        unchecked=tuple(unchecked),
        findings=tuple(findings),
        counts={
            f"{name}/{fqn}" if name else fqn: seen
            for name, result in zip(names, results, strict=True)
            for fqn, seen in result.counts.items()
        },
        files=tuple(os.path.join(n, file) for n, result in zip(names, results, strict=True) for file in result.files),
        read=_in_parts(names, (result.read for result in results)),
        not_read=_in_parts(names, (result.not_read for result in results)),
        has=frozenset().union(*(result.has for result in results)),
    )


def _in_parts(names: Iterable[str], extents: Iterable[Iterable[Extent]]) -> tuple[Extent, ...]:
    """Return what was read of the parts' files, or was not, by their names in the step."""
    found = zip(names, extents, strict=True)
    return tuple(replace(e, file=os.path.join(name, e.file)) for name, files in found for e in files)


@dataclass(frozen=True, slots=True)
class Pair:
    """A part of a step, and what it is compared with."""

    name: str
    ours: Opened
    theirs: Opened


def pair_parts(step: OpenedStep, reference: OpenedStep | Opened) -> tuple[Pair, ...]:
    """Return what of a step is compared with what of a reference: all that both have, if that is a step too."""
    parts = {part.name: opened for part, opened in step.parts}
    if isinstance(reference, OpenedStep):
        theirs = {part.name: opened for part, opened in reference.parts}
    else:
        theirs = {part.name: reference for part, _ in step.parts if part.holds == "model"}
    shared = [name for name in parts if name in theirs]
    if not shared or (not isinstance(reference, OpenedStep) and len(shared) > 1):
        what = f"the step has {first_few(list(parts), 6)}, the reference has {first_few(list(theirs), 6)}"
        raise UsageError(what, hint="compare one part of each: give their own directories")
    return tuple(Pair(name=name, ours=parts[name], theirs=theirs[name]) for name in shared)


def join(found: Mapping[str, Result], identities: tuple[Identity, ...]) -> Result:
    """Return the results of several models, by directory, as one; what has a name gets its directory before it."""
    first = next(iter(found.values()))
    values: dict[str, Any] = {}
    for field in fields(first):
        parts = [(name, getattr(each, field.name)) for name, each in found.items()]
        if field.name in ("keys_only", "terms"):  # what was asked for, once
            continue
        if isinstance(parts[0][1], tuple):
            is_text = field.name in ("notes", "not_checked")
            values[field.name] = tuple(
                f"{name or HERE}: {item}" if is_text else _named(name, item) for name, items in parts for item in items
            )
        elif isinstance(parts[0][1], int):
            values[field.name] = sum(value for _, value in parts)
        else:  # figures of groups of tensors
            groups = dict.fromkeys(group for _, value in parts for group in value)
            values[field.name] = {
                group: {_named(name, key): each for name, value in parts for key, each in value.get(group, {}).items()}
                for group in groups
            }
    return replace(first, **{**values, "identities": identities})


def _named(name: str, item: object) -> object:
    """Return a name, or what has one, with its model's directory before it."""
    if isinstance(item, str):
        return os.path.join(name, item)
    row = cast("Any", item)
    key = next((key for key in ("fqn", "where") if hasattr(item, key)), None)
    return item if key is None else replace(row, **{key: os.path.join(name, getattr(row, key))})


def _inside(directory: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield findings of a part as findings of the step."""
    for finding in findings:
        is_file = finding.where and not os.path.isabs(finding.where)
        file = None if finding.file is None else f"{directory}/{finding.file}"
        where = f"{directory}/{finding.where}" if is_file else finding.where or directory
        yield replace(finding, where=where, file=file)


def _check_parts(step: OpenedStep) -> Iterator[Finding]:
    for part, error in step.broken:
        yield Finding.error(error.finding or "unreadable-part", error.where or part.directory, error.what, error.hint)
    for directory in step.step.lacking:
        hint = f"restore it, or take one of {first_few(step.step.components)}"
        yield Finding.error("missing-part", directory, f"{step.step.title} without {directory}", hint)
    if any(map(may_be_one_of_several, step.step.names)) and not step.step.is_repository:
        with open_path(step.root.source.root, as_part=True) as model:
            yield from check_candidates(model)


def _check_manifest(step: OpenedStep) -> Iterator[Finding]:
    """Parts that the step's manifest does not know were put there, or changed places, later."""
    manifest = step.root.manifest
    if manifest is None:
        return
    for part in step.step.parts:
        if not any(name.partition("/")[0] == part.directory for name in (*manifest.documents, *manifest.assets)):
            hint = f"remove it, or remove {MANIFEST_NAME} if a trainer has saved over the step on purpose"
            what = "the manifest of the step does not list this part"
            yield Finding.error("manifest-mismatch", part.directory, what, hint)
