"""Merge an adapter into its base, streaming: the plan and the executor of every conversion, with edits on the way."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from ckpt_tools.adapters.adapter import TOKENS, Adapter
from ckpt_tools.adapters.base.combine import Combining, parts_of
from ckpt_tools.adapters.base.frozen import refuse_changed
from ckpt_tools.adapters.base.matching import BaseMatch, match_any_spelling
from ckpt_tools.adapters.base.model import live_tensors
from ckpt_tools.adapters.base.share import Share
from ckpt_tools.adapters.base.slots import find_slots, some
from ckpt_tools.adapters.base.tensor_edit import TensorEdit
from ckpt_tools.adapters.base.tied import HEAD, Pair, refuse_equal, suspects, untied, with_tied_heads
from ckpt_tools.adapters.base.trainers import in_hub_names
from ckpt_tools.adapters.checks.integrity import check_structure
from ckpt_tools.adapters.ecosystems.peft.variants import refuse_carried, refuse_variants
from ckpt_tools.adapters.families import family_of
from ckpt_tools.adapters.read.opening import OpenedAdapter
from ckpt_tools.adapters.read.sidecars import base_config
from ckpt_tools.adapters.read.tensors import LazyAdapter
from ckpt_tools.adapters.settings import assumptions, findings_of, settle_parameters, with_alpha
from ckpt_tools.conversions.assets import choose_assets, tokens_in
from ckpt_tools.conversions.job import Job, check_separate, with_config
from ckpt_tools.conversions.to_own import own_job
from ckpt_tools.description.checkpoint import TensorEntry
from ckpt_tools.description.transform import plain_names
from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.formats.digest import digest_bytes
from ckpt_tools.formats.opening import open_path
from ckpt_tools.moving.execute import scan
from ckpt_tools.options.adapters import MergeOptions
from ckpt_tools.quantised.decoded import dequantised, is_quantised

_NUMPY_BYTES = 64 << 20
"""Of numpy and its linear algebra, once imported."""
Weighted = tuple[OpenedAdapter, float]
"""An adapter, and what multiplies its change."""


class MergeUnchangedError(CkptError):
    """Tensors come out unchanged, although the adapter changes them."""

    exit_code = 3
    code = "merge-unchanged"


class AdapterRefusedError(CkptError):
    """Something is wrong with the adapter itself."""

    exit_code = 3
    code = "adapter"


@contextmanager
def merging_job(options: MergeOptions, adapters: Mapping[str, Weighted], *, num_workers: int) -> Iterator[Job]:
    """Yield the job that writes a base with adapters merged into it.

    A base of safetensors files gives safetensors files, under the base's file names unless `dtype` or `max_shard_size`
    ask for others. A DCP checkpoint gives one with the same chunks on the same ranks; optimizer state, which belongs to
    other weights, is left out. Raise AdapterRefusedError for a broken adapter.
    """
    combining = Combining.of(options)
    with ExitStack() as stack:
        base = stack.enter_context(open_path(os.fspath(options.base), format=options.format, as_part=options.as_part))
        if is_quantised(base):
            base = dequantised(base, options.dtype)
        base, config = untied(base) if options.untie else (base, None)
        job = own_job(
            base,
            os.fspath(options.destination),
            dtype=options.dtype,
            dtype_for=options.dtype_for,
            max_shard_size=options.max_shard_size,
        )
        job.overwrite, job.num_workers, job.progress = options.overwrite, num_workers, options.progress
        job.keep_pickles = options.keep_pickles
        if config is not None:
            job.assets = with_config(job.assets, config)
            job.notes.append(f"untied: {HEAD} is a tensor of its own, and config.json has tie_word_embeddings false")
        own = [(f"that of {path}", tokens_in(path, stack)) for path in adapters]
        job.assets, said = choose_assets([*own, ("that of the base", job.assets)])
        job.notes += said
        shares = []
        for path, (read, weight) in adapters.items():
            check_separate(read.opened, job.destination)
            notes: list[str] = []
            share = _share(job, path, read, weight, options, notes)
            stack.callback(share.loading.close)
            if weight or combining is not None:
                shares.append(share)
            else:
                notes = ["left out: its weight is 0"]
            job.notes += [f"{path}: {note}" if len(adapters) > 1 else note for note in notes]
        _add_edits(job, shares, combining, is_untied=config is not None)
        yield job


def _share(job: Job, path: str, read: OpenedAdapter, weight: float, options: MergeOptions, notes: list[str]) -> Share:
    """Find out what an adapter changes, and prove that it fits."""
    base = job.opened
    read = in_hub_names(read, base_config(base))
    adapter = read.adapter
    if not all(module.parameter for module in adapter.modules):
        slots = find_slots(plain_names(base.checkpoint), base_config(base))
        adapter = settle_parameters(adapter, {name: slot.shape for name, slot in slots.items()})
    adapter = with_alpha(adapter, options.alpha)
    refuse_variants(adapter)
    refuse_carried(
        adapter,
        "merged by ckpt",
        "PEFT does it: PeftModel.from_pretrained(model, ADAPTER).merge_and_unload(), then save_pretrained",
    )
    _refuse_broken(adapter)
    _check_scale(adapter, weight)
    frozen = live_tensors(plain_names(base.checkpoint), base_config(base))
    is_proven = bool(adapter.base_tensors) and refuse_changed(adapter, read.opened, base, frozen)
    assumed = assumptions(adapter, is_base_proven=is_proven)
    if options.strict and assumed:
        finding = findings_of(assumed, strict=True)[0]
        raise AdapterRefusedError(f"--strict: {finding.what}", where=finding.where, hint=finding.hint)
    loading = LazyAdapter(adapter, read.opened)
    tensors = plain_names(job.source)
    matched, match, respelled = match_any_spelling(adapter, loading, tensors, base_config(base))
    match, settled = with_tied_heads(base, tensors, matched, match)
    notes += [*respelled, *_notes(matched, match, weight)]
    notes += [f"assumed: {each.text}, which is not recorded. Otherwise: {each.otherwise}" for each in assumed]
    return Share(
        path=path,
        weight=weight,
        read=read,
        stored=adapter,
        adapter=matched,
        match=match,
        settled=settled,
        loading=loading,
    )


def _add_edits(job: Job, shares: Sequence[Share], combining: Combining | None, *, is_untied: bool) -> None:
    """Add to a conversion what the adapters change."""
    shares = [_without_copies(job, share, shares) for share in shares]
    parts = parts_of(shares, combining)
    settled = {fqn for share in shares for fqn in share.settled}
    pairs = () if is_untied else suspects(job.opened, plain_names(job.source), parts.keys() - settled)
    targets = {entry.fqn: entry.dtype for entry in job.target.tensors}
    entries = {entry.fqn: entry for entry in job.source.tensors}
    turns = threading.Lock()
    edits = {
        fqn: TensorEdit(entries[fqn], targets[fqn], found, job.opened.source, turns) for fqn, found in parts.items()
    }
    job.edits = edits
    modules = sum(len(share.adapter.modules) for share in shares)
    job.made = {**job.made, "merged": {"adapters": len(shares), "modules": modules}}
    job.edit_bytes = _edit_bytes(shares, edits, combining, job.num_workers)
    if len(shares) > 1:
        how = "the weighted sum of their changes" if combining is None else str(combining)
        job.notes.append(f"{len(shares)} adapters change {len(edits)} tensors: {how}")
    for share in shares:
        share.loading.reader.ledger = job.ledger
    job.prepare = lambda: _prepare(job, shares, pairs, combining)

    def accept() -> None:
        for share in shares:
            share.read.opened.source.check_unchanged()
        job.notes += _judge(edits)

    job.accept = accept


def _without_copies(job: Job, share: Share, shares: Sequence[Share]) -> Share:
    """Leave out whole tensors that other adapters change as well and that are copies of the base's.

    PEFT saves the embedding beside a LoRA of it (`save_embedding_layers`).
    """
    entries = {entry.fqn: entry for entry in job.source.tensors}
    others = {fqn for other in shares if other is not share for fqn in other.match.parts}
    opened, kept = share.read.opened, dict(share.match.parts)
    for fqn in share.match.parts.keys() & others if share.adapter is share.stored else ():
        for rows in share.match.parts[fqn]:
            module = share.adapter.modules[rows.module]
            if module.is_saved and rows.count * math.prod(rows.shape[1:]) == entries[fqn].num_elems:
                pairs = ((opened.resolve(module.factors[rows.role]), opened), (entries[fqn], job.opened))
                digests = [scan([each], whose.source, num_workers=1).digests[each.fqn] for each, whose in pairs]
                if digests[0] == digests[1]:
                    kept[fqn] = [each for each in kept[fqn] if each is not rows]
    return replace(share, match=replace(share.match, parts=kept))


def _prepare(job: Job, shares: Sequence[Share], pairs: Collection[Pair], combining: Combining | None) -> None:
    """Refuse a tied base, and say what identifies the result."""
    refuse_equal(pairs, job.opened, num_workers=job.num_workers)
    state = [str(combining), *(_identity(share, job.num_workers) for share in shares)]
    job.recipe = digest_bytes(json.dumps(state).encode())


def _identity(share: Share, num_workers: int) -> object:
    adapter, opened = share.stored, share.read.opened
    entries = {entry.fqn: entry for module in adapter.modules for entry in module.factors.values()}
    digests = scan(
        [opened.resolve(entry) for entry in entries.values()], opened.source, num_workers=num_workers
    ).digests
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
    return modules, settings, adapter.convention, share.weight


def _refuse_broken(adapter: Adapter[TensorEntry]) -> None:
    errors = [finding for finding in check_structure(adapter, repairs=True) if finding.severity == "error"]
    if errors:
        shown = some([f"{finding.code}: {finding.where}: {finding.what}" for finding in errors])
        raise AdapterRefusedError(
            f"the adapter has {len(errors)} error{'s' if len(errors) > 1 else ''}: {shown}", hint=errors[0].hint
        )


def _check_scale(adapter: Adapter[TensorEntry], scale: float) -> None:
    if scale in (0.0, 1.0):
        return
    for module in adapter.modules:
        if module.is_dora or family_of(module).is_rotation:
            what = "DoRA" if module.is_dora else module.family.upper()
            what = f"{what} cannot be scaled ({module.path})"
            raise UsageError(what, where="--scale", hint="give it the weight 1")


# What is written


def _edit_bytes(
    shares: Sequence[Share], edits: Mapping[str, TensorEdit], combining: Combining | None, num_workers: int
) -> int:
    """Return an upper bound of the memory of the libraries, the adapters and the tensors that are computed whole."""
    modules = [module for share in shares for module in share.adapter.modules]
    factors = sum({e.fqn: e.num_elems for module in modules for e in module.factors.values()}.values())
    whole = [edit.entry for edit in edits.values() if any(part.needs_all for part in edit.parts)]
    largest = max((entry.num_elems for entry in whole), default=0)
    # Read, in float32, in float32 once more, and as it is written; pieces of 2²⁰ bytes otherwise, a few per worker.
    kept = 2 * 4 * factors + largest * (2 * 8 + 2 * 4)
    if combining is not None:
        shapes = [edit.entry.shape for edit in edits.values()]
        kept += 4 * factors + max((combining.bytes_of(shape, len(shares)) for shape in shapes), default=0)
    return _NUMPY_BYTES + kept + num_workers * (8 << 20)


# What is said


def _notes(adapter: Adapter[TensorEntry], match: BaseMatch, weight: float) -> list[str]:
    families = sorted({family_of(module).label(module) for module in adapter.modules})
    notes = [f"{len(adapter.modules)} modules ({', '.join(families)}) change {len(match.parts)} tensors"]
    alphas = {
        (m.alpha.value, m.alpha.source) for m in adapter.modules if m.alpha is not None and not family_of(m).is_rotation
    }
    if alphas:
        notes.append("alpha " + some([f"{value:g} ({source})" for value, source in sorted(alphas)]))
    if weight != 1.0:
        notes.append(f"times {weight:g}")
        if any(module.is_saved or module.family == TOKENS for module in adapter.modules):
            notes.append("tensors that the adapter holds whole were copied unchanged: no scale applies to them")
    if adapter.left_out:
        notes.append("left out of the adapter's source: " + ", ".join(adapter.left_out))
    return [*notes, *match.notes]


def _judge(edits: Mapping[str, TensorEdit]) -> list[str]:
    """Refuse a merge that changes nothing where it should."""
    lost: list[str] = []
    idle: list[str] = []
    for fqn, edit in edits.items():
        for part, changed, should in zip(edit.parts, edit.has_changed, edit.should_change, strict=True):
            if not changed and part.rows.count:
                name = fqn if len(edit.parts) == 1 else f"{fqn} ({part.module.path})"
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
