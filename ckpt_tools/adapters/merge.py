"""Merge an adapter into its base, streaming: the plan and the executor of every conversion, with edits on the way."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from ckpt_tools.adapters.adapter import Adapter, AdapterModule
from ckpt_tools.adapters.base.frozen import refuse_changed
from ckpt_tools.adapters.base.matching import BaseMatch, match_any_spelling
from ckpt_tools.adapters.base.model import live_tensors
from ckpt_tools.adapters.base.slots import find_slots, some
from ckpt_tools.adapters.base.tensor_edit import TensorEdit
from ckpt_tools.adapters.base.tied import Pair, refuse_equal, suspects
from ckpt_tools.adapters.checks.integrity import check_structure
from ckpt_tools.adapters.ecosystems.peft.variants import refuse_variants
from ckpt_tools.adapters.families import family_of
from ckpt_tools.adapters.options import MergeOptions
from ckpt_tools.adapters.read.opening import OpenedAdapter
from ckpt_tools.adapters.read.sidecars import base_config
from ckpt_tools.adapters.read.tensors import LazyAdapter
from ckpt_tools.adapters.settings import assumptions, findings_of, settle_parameters, with_alpha
from ckpt_tools.conversions.job import Job, check_separate
from ckpt_tools.conversions.to_own import own_job
from ckpt_tools.description.checkpoint import TensorEntry
from ckpt_tools.description.transform import plain_names
from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.formats.digest import digest_bytes
from ckpt_tools.formats.opening import Opened
from ckpt_tools.moving.execute import scan

_NUMPY_BYTES = 64 << 20
"""Of numpy and its linear algebra, once imported."""


class MergeUnchangedError(CkptError):
    """Tensors come out unchanged, although the adapter changes them."""

    exit_code = 3
    code = "merge-unchanged"


class AdapterRefusedError(CkptError):
    """Something is wrong with the adapter itself."""

    exit_code = 3
    code = "adapter"


@contextmanager
def merging_job(base: Opened, read: OpenedAdapter, options: MergeOptions, *, num_workers: int) -> Iterator[Job]:
    """Yield the job that writes the base with the adapter merged into it.

    A base of safetensors files gives safetensors files, under the base's file names unless `dtype` or
    `max_shard_size` ask for others. A DCP checkpoint gives one with the same chunks on the same ranks; optimizer
    state, which belongs to other weights, is left out.

    Raises:
        UsageError: A module that does not fit the base, an alpha that is not known, a scale that is not defined; or
            the adapter's source has other frozen weights than the base.
        AdapterRefusedError: The adapter is broken.
    """
    destination, scale = os.fspath(options.destination), options.scale
    check_separate(read.opened, destination)
    adapter = read.adapter
    if not all(module.parameter for module in adapter.modules):
        slots = find_slots(plain_names(base.checkpoint), base_config(base))
        adapter = settle_parameters(adapter, {name: slot.shape for name, slot in slots.items()})
    adapter = with_alpha(adapter, options.alpha)
    refuse_variants(adapter)
    _refuse_broken(adapter)
    job = own_job(
        base,
        destination,
        dtype=options.dtype,
        dtype_for=options.dtype_for,
        max_shard_size=options.max_shard_size,
    )
    job.overwrite, job.num_workers, job.progress = options.overwrite, num_workers, options.progress
    _check_scale(adapter, scale)
    frozen = live_tensors(plain_names(base.checkpoint), base_config(base))
    is_proven = bool(adapter.base_tensors) and refuse_changed(adapter, read.opened, base, frozen)
    assumed = assumptions(adapter, is_base_proven=is_proven)
    if options.strict and assumed:
        finding = findings_of(assumed, strict=True)[0]
        raise AdapterRefusedError(f"--strict: {finding.what}", where=finding.where, hint=finding.hint)
    loading = LazyAdapter(adapter, read.opened)
    try:
        job = _with_edits(job, adapter, read, loading, scale)
        job.notes += [f"assumed: {each.text}, which is not recorded. Otherwise: {each.otherwise}" for each in assumed]
        yield job
    finally:
        loading.close()


def _with_edits(
    job: Job, adapter: Adapter[TensorEntry], read: OpenedAdapter, loading: LazyAdapter, scale: float
) -> Job:
    """Add to a conversion what the adapter changes."""
    stored = adapter
    tensors = plain_names(job.source)
    adapter, match, notes = match_any_spelling(stored, loading, tensors, base_config(job.opened))
    job.notes += notes
    pairs = suspects(job.opened, tensors, match.parts.keys())
    targets = {entry.fqn: entry.dtype for entry in job.target.tensors}
    entries = {entry.fqn: entry for entry in job.source.tensors}
    turns = threading.Lock()
    edits = {
        fqn: TensorEdit(entries[fqn], targets[fqn], parts, loading.get, scale, job.opened.source, turns)
        for fqn, parts in match.parts.items()
    }
    job.edits = edits
    job.made = {**job.made, "merged": {"modules": len(adapter.modules)}}
    job.edit_bytes = _edit_bytes(adapter, edits, job.num_workers)
    job.notes += _notes(adapter, match, scale)
    job.prepare = lambda: _prepare(job, stored, read, pairs, scale)

    def accept() -> None:
        read.opened.source.check_unchanged()
        job.notes += _judge(adapter, edits)

    job.accept = accept
    return job


def _prepare(
    job: Job, adapter: Adapter[TensorEntry], read: OpenedAdapter, pairs: Collection[Pair], scale: float
) -> None:
    """Refuse a tied base, and say what identifies the result."""
    refuse_equal(pairs, job.opened, num_workers=job.num_workers)
    entries = [read.opened.resolve(entry) for module in adapter.modules for entry in module.factors.values()]
    digests = scan(entries, read.opened.source, num_workers=job.num_workers).digests
    modules = [
        (
            module.path,
            module.parameter,
            module.family,
            {role: digests[entry.fqn] for role, entry in module.factors.items()},
            None if module.alpha is None else module.alpha.value,
            None if module.rank is None else module.rank.value,
            module.use_rslora,
        )
        for module in adapter.modules
    ]
    settings = {name: repr(found.value) for name, found in sorted(adapter.settings.items())}
    state = (modules, settings, adapter.convention, scale)
    job.recipe = digest_bytes(json.dumps(state).encode())


def _refuse_broken(adapter: Adapter[TensorEntry]) -> None:
    errors = [finding for finding in check_structure(adapter, repairs=True) if finding.severity == "error"]
    if errors:
        shown = some([f"{finding.code}: {finding.where}: {finding.what}" for finding in errors])
        raise AdapterRefusedError(
            f"the adapter has {len(errors)} error{'s' if len(errors) > 1 else ''}: {shown}", hint=errors[0].hint
        )


def _check_scale(adapter: Adapter[TensorEntry], scale: float) -> None:
    if scale == 1.0:
        return
    for module in adapter.modules:
        if module.is_dora or family_of(module).is_rotation:
            what = "DoRA" if module.is_dora else module.family.upper()
            raise UsageError(
                f"{what} cannot be scaled ({module.path})",
                where="--scale",
                hint="leave out --scale",
            )


# What is written


def _edit_bytes(adapter: Adapter[TensorEntry], edits: Mapping[str, TensorEdit], num_workers: int) -> int:
    """Return an upper bound of the memory of the libraries, the adapter and the tensors that are computed whole."""
    factors = sum(entry.num_elems for module in adapter.modules for entry in module.factors.values())
    whole = [
        edit.entry for edit in edits.values() if any(_mixes_rows(adapter.modules[part.module]) for part in edit.parts)
    ]
    largest = max((entry.num_elems for entry in whole), default=0)
    # Read, in float32, in float32 once more, and as it is written; pieces of 2²⁰ bytes otherwise, a few per worker.
    return _NUMPY_BYTES + 2 * 4 * factors + largest * (2 * 8 + 2 * 4) + num_workers * (8 << 20)


def _mixes_rows(module: AdapterModule[TensorEntry]) -> bool:
    magnitude = module.factors.get("magnitude")
    return "blocks" in module.factors or (
        magnitude is not None and (len(magnitude.shape) > 1 or "A" not in module.factors)
    )


# What is said


def _notes(adapter: Adapter[TensorEntry], match: BaseMatch, scale: float) -> list[str]:
    families = sorted({family_of(module).label(module) for module in adapter.modules})
    notes = [f"{len(adapter.modules)} modules ({', '.join(families)}) change {len(match.parts)} tensors"]
    alphas = {
        (m.alpha.value, m.alpha.source) for m in adapter.modules if m.alpha is not None and not family_of(m).is_rotation
    }
    if alphas:
        notes.append("alpha " + some([f"{value:g} ({source})" for value, source in sorted(alphas)]))
    if scale != 1.0:
        notes.append(f"times {scale:g} (--scale)")
        if any(module.is_saved for module in adapter.modules):
            notes.append("tensors that the adapter holds whole were copied unchanged: --scale does not apply to them")
    if adapter.left_out:
        notes.append("left out of the adapter's source: " + ", ".join(adapter.left_out))
    return [*notes, *match.notes]


def _judge(adapter: Adapter[TensorEntry], edits: Mapping[str, TensorEdit]) -> list[str]:
    """Refuse a merge that changes nothing where it should."""
    lost: list[str] = []
    idle: list[str] = []
    for fqn, edit in edits.items():
        for part, changed, should in zip(edit.parts, edit.has_changed, edit.should_change, strict=True):
            if not changed and part.count:
                name = fqn if len(edit.parts) == 1 else f"{fqn} ({adapter.modules[part.module].path})"
                (lost if should else idle).append(name)
    total = sum(len(edit.parts) for edit in edits.values())
    if lost:
        dtypes = sorted({edit.dtype.name for edit in edits.values()})
        raise MergeUnchangedError(
            f"{len(lost)} of {total} adapted tensors come out unchanged: the changes are smaller than a step of "
            f"{' or '.join(dtypes)}: {some(lost)}",
            hint=("" if dtypes == ["F32"] else "--dtype f32 keeps them; ")
            + "if they should be larger, is --alpha right?",
        )
    if len(idle) == total:
        raise MergeUnchangedError(
            "the result equals the base: the adapter's factors are zero, or multiply to zero",
            hint="`ckpt check-lora ADAPTER` shows more; was the adapter saved before it was trained?",
        )
    return [f"{len(idle)} of {total} tensors get no change: the adapter's factors for them are zero"] if idle else []
