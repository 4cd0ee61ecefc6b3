"""`open_checkpoint`, `inspect`, `verify` and `diff`: what only reads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from ckpt_tools.api.workers import ProgressFactory, default_num_workers
from ckpt_tools.checks import diff as diffing
from ckpt_tools.checks import verify as verifying
from ckpt_tools.checks.diff import Difference
from ckpt_tools.checks.verify import Level, Verification
from ckpt_tools.conversions.to_mesh import MeshOptions, find_layout
from ckpt_tools.description import summarise as inspecting
from ckpt_tools.description.checkpoint import Checkpoint, Finding
from ckpt_tools.description.layout import Mesh
from ckpt_tools.description.summarise import Summary
from ckpt_tools.description.transform import select
from ckpt_tools.errors import UsageError
from ckpt_tools.formats.opening import open_path


def open_checkpoint(path: str | os.PathLike[str], *, format: str | None = None) -> Checkpoint:  # noqa: A002
    """Describe the checkpoint at `path` from its headers alone.

    Args:
        path: A safetensors file, an HF directory or a DCP directory.
        format: Overrides what would be detected.

    Raises:
        UnreadableError: Not a complete, readable checkpoint.
    """
    with open_path(os.fspath(path), format=format) as opened:
        return opened.checkpoint


def inspect(
    source: str | os.PathLike[str],
    *,
    mesh: str | Mesh | None = None,
    world_size: int | None = None,
    rules: str | os.PathLike[str] | None = None,
    set: Sequence[str] = (),  # noqa: A002
    tp_plan: str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    format: str | None = None,  # noqa: A002
) -> Summary:
    """Summarise a checkpoint from its headers alone.

    Args:
        source: A safetensors file, an HF directory or a DCP directory.
        mesh: Show the layout that this mesh would give instead of the one on disk.
        world_size: Needed when an axis of `mesh` is -1.
        rules: YAML file of placement rules for `mesh`.
        set: Rules "GLOB=axis:S(d)[,axis:R]" for `mesh`.
        tp_plan: "auto" takes the tensor-parallel plan of the model's config.json for `mesh`.
        include: Globs of the FQNs to look at; all by default.
        exclude: Globs of the FQNs to leave out.
        format: Overrides what would be detected.

    Raises:
        UsageError: An impossible mesh or rule.
        UnreadableError: Not a complete, readable checkpoint.
    """
    with open_path(os.fspath(source), format=format) as opened:
        checkpoint = select(opened.checkpoint, include=include, exclude=exclude)
        if mesh is None and rules is None:
            if set or tp_plan is not None:
                raise UsageError("rules need a mesh", hint="add for example --mesh dp_shard=8,tp=2")
            return inspecting.summarise(checkpoint, path=os.fspath(source))
        options = MeshOptions(mesh=mesh, world_size=world_size, rules=rules, set=set, tp_plan=tp_plan)
        layout = find_layout(opened, checkpoint, options)
        virtual = inspecting.overlay(checkpoint, layout.mesh, layout.placements)
        return inspecting.summarise(virtual, path=os.fspath(source), mesh_source="overlay")


def verify(
    source: str | os.PathLike[str],
    *,
    against: str | os.PathLike[str] | None = None,
    level: Level = "data",
    num_workers: int | None = None,
    progress: ProgressFactory | None = None,
    format: str | None = None,  # noqa: A002
) -> Verification:
    """Check a checkpoint and collect everything that is wrong.

    Args:
        source: A safetensors file, an HF directory or a DCP directory.
        against: A checkpoint of any format that must hold the same tensors, bit for bit.
        level: "structure" reads headers; "data" also reads every byte.
        num_workers: Threads that read.
        progress: Makes the receiver of progress.
        format: Overrides what would be detected.

    Raises:
        UnreadableError: So broken that it cannot even be described.
    """
    if level not in ("structure", "data"):
        raise UsageError(f"{level!r} is not a level", hint="--level takes structure or data")
    workers = num_workers or default_num_workers()
    with ExitStack() as stack:
        opened = stack.enter_context(open_path(os.fspath(source), format=format))
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
    rows = [("missing-tensor", fqn, "only the reference has it") for fqn in difference.only_in_b]
    rows += [("extra-tensor", fqn, "the reference does not have it") for fqn in difference.only_in_a]
    rows += [("different-tensor", change.fqn, change.what) for change in difference.changed]
    return tuple(Finding.error(code=code, where=against, what=f"tensor {fqn!r}: {what}") for code, fqn, what in rows)


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    keys_only: bool = False,
    atol: float | None = None,
    rtol: float | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    num_workers: int | None = None,
    progress: ProgressFactory | None = None,
) -> Difference:
    """Compare two checkpoints of any formats: names, shapes, dtypes and bytes.

    Args:
        a: One checkpoint.
        b: The other.
        keys_only: Compare names, shapes and dtypes only.
        atol: Absolute tolerance for floating-point tensors; bitwise without tolerances.
        rtol: Relative tolerance.
        include: Globs of the FQNs to look at; all by default.
        exclude: Globs of the FQNs to leave out.
        num_workers: Threads that read.
        progress: Makes the receiver of progress.

    Raises:
        UnreadableError: One of them is incomplete or damaged.
    """
    with open_path(os.fspath(a)) as one, open_path(os.fspath(b)) as other:
        left, right = (
            replace(
                side,
                checkpoint=select(side.checkpoint, include=include, exclude=exclude, beside=beside.checkpoint),
            )
            for side, beside in ((one, other), (other, one))
        )
        total = left.checkpoint.total_bytes + right.checkpoint.total_bytes
        return diffing.diff(
            left,
            right,
            keys_only=keys_only,
            atol=atol,
            rtol=rtol,
            num_workers=num_workers or default_num_workers(),
            progress=progress(total) if progress is not None and not keys_only else None,
        )
