"""Check a training step that keeps the model and the optimizer apart: all of its parts, and what lies beside them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ckpt_tools.checks.verify import Level, Unchecked, Verification, verify
from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.description.infer import rank_of_file
from ckpt_tools.errors import UsageError
from ckpt_tools.formats.manifest import MANIFEST_NAME
from ckpt_tools.formats.opening import Opened
from ckpt_tools.formats.step import OpenedStep
from ckpt_tools.formats.steps import missing_parts, note_missing_rng, rng_ranks
from ckpt_tools.moving.execute import Progress
from ckpt_tools.text import first_few


def verify_step(step: OpenedStep, *, level: Level, num_workers: int, progress: Progress | None = None) -> Verification:
    """Check every part of `step` at `level`, and that resuming finds what it needs."""
    findings = [*_check_parts(step), *_check_manifest(step)]
    unchecked: list[Unchecked] = []
    if step.passed_over:
        strange = first_few(step.passed_over, 6)
        unchecked.append(Unchecked(what=f"hidden directories, links and special files: {strange}"))
    results = [verify(step.root, level=level, num_workers=num_workers)]
    findings += results[0].findings
    unchecked += results[0].unchecked
    for part, opened in step.parts:
        result = verify(opened, level=level, num_workers=num_workers, progress=progress)
        findings += _inside(part.directory, result.findings)
        name = part.directory
        unchecked += [replace(each, what=f"{name}: {each.what}", part=name) for each in result.unchecked]
        results.append(result)
    names = ["", *(part.directory for part, _ in step.parts)]
    return Verification(
        level=level,
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
        files=tuple(
            f"{name}/{file}" if name else file
            for name, result in zip(names, results, strict=True)
            for file in result.files
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A part of a step, and what it is compared with."""

    name: str
    ours: Opened
    theirs: Opened


def pair_parts(step: OpenedStep, reference: OpenedStep | Opened) -> tuple[Pair, ...]:
    """Return what of a step is compared with what of a reference: all that both have, if that is a step too.

    Raises:
        UsageError: The two steps have no part in common, or the reference is one model and the step has several.
    """
    parts = {part.directory: opened for part, opened in step.parts}
    if isinstance(reference, OpenedStep):
        theirs = {part.directory: opened for part, opened in reference.parts}
    else:
        theirs = {part.directory: reference for part, _ in step.parts if part.holds == "model"}
    shared = [name for name in parts if name in theirs]
    if not shared or (not isinstance(reference, OpenedStep) and len(shared) > 1):
        raise UsageError(
            f"the step has {first_few(list(parts), 6)}, the reference has {first_few(list(theirs), 6)}",
            hint="compare one part of each: give their own directories",
        )
    return tuple(Pair(name=name, ours=parts[name], theirs=theirs[name]) for name in shared)


def _num_ranks(step: OpenedStep) -> int:
    """Return how many ranks a step is for: as its manifests say, else as many as left a file of their own."""
    checkpoints = [opened.checkpoint for _, opened in step.parts]
    recorded = [checkpoint.mesh.world_size for checkpoint in checkpoints if checkpoint.mesh is not None]
    if recorded:
        return max(recorded)
    files = (rank_of_file(file) for checkpoint in checkpoints for file in checkpoint.files)
    ranks = {rank for rank in files if rank is not None} | rng_ranks(step.step.names)
    return 1 + max(ranks, default=-1)


def _inside(directory: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield findings of a part as findings of the step."""
    for finding in findings:
        is_file = finding.where and not os.path.isabs(finding.where)
        file = None if finding.file is None else f"{directory}/{finding.file}"
        where = f"{directory}/{finding.where}" if is_file else finding.where or directory
        yield replace(finding, where=where, file=file)


def _check_parts(step: OpenedStep) -> Iterator[Finding]:
    for part, error in step.broken:
        yield Finding.error("unreadable-part", error.where or part.directory, error.what, error.hint)
    is_of_ckpt = step.root.manifest is not None
    for directory, is_needed in missing_parts(step.step):
        what = f"{step.step.title} without {directory}"
        if is_needed:
            hint = "restore it; without it the trainer does not resume, or resumes with a new optimizer"
            yield Finding.error("missing-part", directory, what, hint)
        elif is_of_ckpt:
            yield Finding.info("missing-part", directory, f"{what}: weights to start from, not to resume from")
        else:
            hint = "restore it if there was an optimizer: load_state fails without"
            yield Finding.warning("missing-part", directory, what, hint)
    if note := note_missing_rng(step.step.names, _num_ranks(step)):
        yield Finding.warning("missing-rng-state", step.root.source.root, note)


def _check_manifest(step: OpenedStep) -> Iterator[Finding]:
    """Parts that the step's manifest does not know were put there, or changed places, later."""
    manifest = step.root.manifest
    if manifest is None:
        return
    for part in step.step.parts:
        if not any(name.startswith(f"{part.directory}/") for name in manifest.documents):
            hint = f"remove it, or remove {MANIFEST_NAME} if a trainer has saved over the step on purpose"
            what = "the manifest of the step does not list this part"
            yield Finding.error("manifest-mismatch", part.directory, what, hint)
