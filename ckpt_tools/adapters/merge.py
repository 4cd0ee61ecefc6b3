"""Merge an adapter into its base, streaming: the plan and the executor of every conversion, with edits on the way."""

from __future__ import annotations

import json
import math
import os
import threading
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from ckpt_tools.adapters.adapter import TOKENS, Adapter
from ckpt_tools.adapters.base.matching import BaseMatch, ChangedRows, match_any_spelling
from ckpt_tools.adapters.base.model import live_tensors
from ckpt_tools.adapters.base.reading import in_hub_names, on_changed_base, refuse_changed
from ckpt_tools.adapters.base.slots import find_slots, some
from ckpt_tools.adapters.base.tensor_edit import Share, TensorEdit, TensorShare
from ckpt_tools.adapters.base.tied import HEAD, Pair, refuse_equal, suspects, untied, with_tied_heads
from ckpt_tools.adapters.ecosystems.peft.config_rules import refuse_carried, refuse_variants
from ckpt_tools.adapters.families import family_of
from ckpt_tools.adapters.integrity import check_structure
from ckpt_tools.adapters.low_rank import svd_of_product
from ckpt_tools.adapters.read.opening import LazyAdapter, OpenedAdapter
from ckpt_tools.adapters.read.sidecars import base_config
from ckpt_tools.adapters.settings import assumptions, findings_of, settle_parameters, with_alpha
from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.checkpoint.formats.digest import digest_bytes
from ckpt_tools.checkpoint.formats.opening import open_path
from ckpt_tools.checkpoint.transform import plain_names
from ckpt_tools.convert.assets import choose_assets, tokens_in
from ckpt_tools.convert.average_rename import rewrite_job
from ckpt_tools.convert.job import Job, check_separate, with_config
from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.options.adapters import MergeOptions
from ckpt_tools.transfer.execute import scan
from ckpt_tools.transfer.quantised.decoded import dequantised, is_quantised

if TYPE_CHECKING:
    from ckpt_tools.adapters.families.changes import WeightChange
    from ckpt_tools.transfer.arrays import Array

_NUMPY_BYTES = 64 << 20  # Of numpy and its linear algebra, once imported
Weighted = tuple[OpenedAdapter, float]  # An adapter, and what multiplies its change


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
        job = rewrite_job(base, os.fspath(options.destination), options)
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
    adapter = trained = with_alpha(adapter, options.alpha)
    adapter = on_changed_base(trained)
    refuse_variants(adapter)
    hint = "merge it with PEFT: PeftModel.from_pretrained(model, ADAPTER).merge_and_unload(), then save_pretrained"
    refuse_carried(adapter, "merged by ckpt", hint)
    _refuse_broken(adapter)
    _check_scale(adapter, weight)
    if adapter is not trained and weight != 1:
        what = "an adapter whose base was changed before training cannot be scaled"
        raise UsageError(what, where="--scale", hint="give it the weight 1")
    frozen = live_tensors(plain_names(base.checkpoint), base_config(base))
    is_proven = bool(adapter.base_tensors) and refuse_changed(trained, read.opened, base, frozen)
    assumed = assumptions(adapter, is_base_proven=is_proven)
    if options.strict and assumed:
        finding = findings_of(assumed, strict=True)[0]
        raise AdapterRefusedError(f"--strict: {finding.what}", where=finding.where, hint=finding.hint)
    loading = LazyAdapter(adapter, read.opened)
    tensors = plain_names(job.source)
    matched, match, respelled = match_any_spelling(adapter, loading, tensors, base_config(base))
    match, settled = with_tied_heads(base, tensors, matched, match)
    notes += [*respelled, *_notes(matched, match, weight)]
    if adapter is not trained:
        notes.append("the adapted weights are those of the training checkpoint, changed before training")
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
        what = f"the adapter has {len(errors)} error{'s' if len(errors) > 1 else ''}: {shown}"
        raise AdapterRefusedError(what, hint=errors[0].hint)


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
    families = sorted({family_of(module).kind(module) for module in adapter.modules})
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
        what = "the result equals the base: the adapter's factors are zero, or multiply to zero"
        hint = "`ckpt check-lora ADAPTER` shows more; was the adapter saved before it was trained?"
        raise MergeUnchangedError(what, hint=hint)
    return [f"{len(idle)} of {total} tensors do not change: the adapter's factors for them are zero"] if idle else []


# Several LoRAs of the same modules made into one, other than by a sum: as PEFT's `add_weighted_adapter` does.
#
# Source: peft 0.21, `tuners/lora/model.py` and `utils/merge_utils.py`. What differs: the scale of the result is 1, also
# where the first adapter is rsLoRA (PEFT's then has √r); of equal magnitudes pruning keeps the first; and a random mask
# follows from the seed and the module's name.

_PAIRS = (("A", "B"), ("A_embedding", "B_embedding"))


class _Method(NamedTuple):
    pruning: str | None = None
    """Which elements of an adapter are set to 0: those of the least magnitude, or random ones."""
    elects: bool = False  # Do only elements of the sign count that most have?
    of_product: bool = False  # Is B·A combined, and a LoRA made of the result, in the place of A and B each?


_OF_FACTORS = {
    "linear": _Method(),
    "ties": _Method("magnitude", elects=True),
    "dare_linear": _Method("random"),
    "dare_ties": _Method("random", elects=True),
    "magnitude_prune": _Method("magnitude"),
}
METHODS: Mapping[str, _Method] = {
    "sum": _Method(),
    **_OF_FACTORS,
    "svd": _Method(of_product=True),
    **{f"{name}_svd": method._replace(of_product=True) for name, method in _OF_FACTORS.items() if method.pruning},
}
"""By PEFT's names, and the sum, which PEFT has as "cat"."""


@dataclass(frozen=True, slots=True)
class Combining:
    """How adapters are combined."""

    options: MergeOptions
    kind: _Method

    @classmethod
    def of(cls, options: MergeOptions) -> Combining | None:
        """Return what the user asks for; None where adapters are added up."""
        method, density = options.combine, options.density
        if method not in METHODS:
            raise UsageError(f"--combine must be one of {', '.join(METHODS)}, got {method!r}")
        kind = METHODS[method]
        if kind.pruning and (density is None or not 0 < density <= 1):
            given = "" if density is None else f", got {density:g}"
            raise UsageError(f"--combine {method} needs a --density above 0 and up to 1{given}", hint="--density 0.5")
        for flag, value, is_taken in (
            ("--density", density, kind.pruning),
            ("--majority-sign", options.majority_sign, kind.elects),
            ("--svd-rank", options.svd_rank, kind.of_product),
            ("--seed", options.seed or None, kind.pruning == "random"),
        ):
            if value is not None and not is_taken:
                raise UsageError(f"--combine {method} does not use {flag}", hint=f"leave out {flag}")
        return None if method == "sum" else cls(options, kind)

    def __str__(self) -> str:
        """Return all of it, for people and to tell results apart."""
        names = ("density", "majority_sign", "svd_rank", "seed")
        numbers = [f"{name} {value}" for name in names if (value := getattr(self.options, name)) is not None]
        return ", ".join([f"combined by {self.options.combine}", *numbers])

    def bytes_of(self, shape: tuple[int, ...], count: int) -> int:
        """Return the memory for the products of so many adapters of a weight; 0 where none is made."""
        is_made = self.kind.of_product and self.kind.pruning is not None
        rows, columns = shape[0], math.prod(shape[1:])
        return is_made * (rows * columns * (4 * (count + 3) + 8) + 4 * 8 * min(rows, columns) ** 2)

    def prune(self, array: Array, key: tuple[int, ...]) -> Array:
        """Return an adapter's matrix with less in it; `key` makes another mask of the seed."""
        import numpy as np

        density = self.options.density
        if self.kind.pruning is None or density is None or density >= 1:
            return array
        if self.kind.pruning == "random":
            kept = np.random.default_rng((self.options.seed, *key)).random(array.shape, np.float32) < density
            factor = np.float32(1 / density)
        else:
            count, magnitude = int(density * array.size), np.abs(array).reshape(-1)
            limit = np.partition(magnitude, -count)[-count] if count else np.inf
            flat = magnitude > limit
            flat[np.flatnonzero(magnitude == limit)[: count - int(flat.sum())]] = True
            kept, factor = flat.reshape(array.shape), np.float32(1)
        pruned: Array = array * kept * factor
        return pruned

    def mix(self, arrays: Sequence[Array], weights: Sequence[float], key: tuple[int, ...]) -> Array:
        """Return one matrix (float32) of the adapters', all of one shape."""
        import numpy as np

        pruned = [self.prune(array, (*key, i)) for i, array in enumerate(arrays)]
        total = np.zeros_like(pruned[0])
        if not self.kind.elects:
            for array, weight in zip(pruned, weights, strict=True):
                total += array * np.float32(weight)
            return total
        votes = sum(pruned if self.options.majority_sign != "frequency" else map(np.sign, pruned))
        sign = np.where(votes >= 0, np.float32(1), np.float32(-1))
        count = np.zeros_like(total)
        for array, weight in zip(pruned, weights, strict=True):
            agrees = np.sign(array) == sign
            total += array * np.float32(weight) * agrees
            count += agrees
        return total / np.maximum(count, 1)


@dataclass(slots=True, eq=False)
class Group:
    """The modules of several adapters that change the same rows of a base: a pair of `_PAIRS` each."""

    combining: Combining
    members: list[tuple[Share, int]]  # Share, and the module's index in its adapter
    turns: threading.Lock  # Shared by all groups: whole products are computed one at a time
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _made: tuple[Array, Array] | None = None

    def check(self) -> None:
        """Refuse what PEFT does not combine: other types than plain LoRA, or factors of different ranks."""
        modules = [share.adapter.modules[index] for share, index in self.members]
        method, where = self.combining.options.combine, modules[0].path
        for module in modules:
            if module.family != "lora" or set(module.factors) not in map(set, _PAIRS) or module.parameter != "weight":
                what = family_of(module).kind(module) + (
                    " with more than two matrices" if len(module.factors) > 2 else ""
                )
                what = "stacked experts" if module.parameter != "weight" else what
                hint = "leave out --combine: a sum supports every family"
                raise UsageError(f"--combine {method} needs plain LoRA; {where} is {what}", where=where, hint=hint)
        ranks = sorted({module.factors[min(module.factors)].shape[0] for module in modules})
        if len(ranks) > 1 and not self.combining.kind.of_product:
            what = f"--combine {method} needs one rank; {where} has {' and '.join(map(str, ranks))}"
            raise UsageError(what, where=where, hint="use --combine svd, or leave out --combine: both accept any ranks")

    def change(self, rows: ChangedRows) -> WeightChange:
        """Return what the combined module makes of rows."""
        from ckpt_tools.adapters.families.changes import LowRank

        with self._lock:
            if self._made is None:
                self._made = self._combined()
            a, b = self._made
        share, index = self.members[0]
        is_transposed = rows.transposed or "A_embedding" in share.adapter.modules[index].factors
        return LowRank(a.T, b.T, 1.0) if is_transposed else LowRank(b, a, 1.0)

    def _combined(self) -> tuple[Array, Array]:
        """Return A (r, columns) and B (rows, r)."""
        import numpy as np

        modules = [share.loading.get().modules[index] for share, index in self.members]
        scales = [family_of(module).scale(module) for module in modules]
        weights = [share.weight for share, _ in self.members]
        down, up = (
            [factor.astype(np.float32).reshape(factor.shape[0], -1) for factor in factors]
            for factors in zip(*([m.factors[role] for role in sorted(m.factors)] for m in modules), strict=True)
        )
        key = zlib.crc32(modules[0].path.encode())
        if self.combining.kind.of_product:
            rank = self.combining.options.svd_rank or max(each.shape[0] for each in down)
            up = [factor * np.float32(scale) for factor, scale in zip(up, scales, strict=True)]
            return self._of_product(down, up, weights, rank, key)
        scaled = [weight * scale for weight, scale in zip(weights, scales, strict=True)]
        roots = [math.sqrt(abs(each)) for each in scaled]
        signed = [math.copysign(root, each) for root, each in zip(roots, scaled, strict=True)]
        return self.combining.mix(down, signed, (key, 0)), self.combining.mix(up, roots, (key, 1))

    def _of_product(
        self, down: Sequence[Array], up: Sequence[Array], weights: Sequence[float], rank: int, key: int
    ) -> tuple[Array, Array]:
        """Return A and B of the nearest matrix of a rank."""
        import numpy as np

        if self.combining.kind.pruning is None:  # the product of all factors side by side: never a whole matrix
            left = np.concatenate([b * np.float64(w) for b, w in zip(up, weights, strict=True)], axis=1)
            right = np.concatenate(down).astype(np.float64)
            outer, sizes, inner = svd_of_product(left, right)
            a, b = inner[:rank], outer[:, :rank] * sizes[:rank]
        else:
            with self.turns:
                whole = self.combining.mix([b @ a for a, b in zip(down, up, strict=True)], weights, (key,))
                is_wide = whole.shape[0] <= whole.shape[1]
                matrix = (whole if is_wide else whole.T).astype(np.float64)
                vectors = np.linalg.eigh(matrix @ matrix.T)[1][:, : -rank - 1 : -1]
                other = vectors.T @ matrix
                a, b = (other, vectors) if is_wide else (vectors.T, other.T)
        return a.astype(np.float32), b.astype(np.float32)


def parts_of(shares: Sequence[Share], combining: Combining | None) -> dict[str, tuple[TensorShare, ...]]:
    """Return FQN in the base → what changes it, whole tensors first: of every adapter, or of those combined."""
    turns = threading.Lock()
    groups: dict[tuple[object, ...], Group] = {}
    found: dict[str, list[TensorShare]] = defaultdict(list)
    for share in shares:
        places: dict[int, list[tuple[str, ChangedRows]]] = defaultdict(list)
        for fqn, every in share.match.parts.items():
            for rows in every:
                places[rows.module].append((fqn, rows))
        for index, rows_of in places.items():
            module, change = share.adapter.modules[index], share.change
            if module.is_saved and not share.weight:
                continue
            if combining is not None and not module.is_saved:
                key = tuple((fqn, rows.start, rows.count, rows.offset) for fqn, rows in rows_of)
                if key in groups:
                    groups[key].members.append((share, index))
                    continue
                change = groups.setdefault(key, Group(combining, [(share, index)], turns)).change
            for fqn, rows in rows_of:
                found[fqn].append(TensorShare(rows, module, share.path, change))
    for group in groups.values():
        group.check()
    for fqn, parts in found.items():
        parts.sort(key=lambda part: not part.module.is_saved)
        for one, other in _meetings(parts):
            _refuse_meeting(fqn, one, other, combining)
    return {fqn: tuple(parts) for fqn, parts in found.items()}


def _meetings(parts: Iterable[TensorShare]) -> Iterator[tuple[TensorShare, TensorShare]]:
    """Yield every two that change some row of a tensor, both ways round; experts of a stack are many that do not."""
    earlier: list[TensorShare] = []
    for part in sorted(parts, key=lambda each: each.rows.start):
        earlier = [each for each in earlier if each.meets(part)]
        for each in earlier:
            yield each, part
            yield part, each
        earlier.append(part)


def _refuse_meeting(fqn: str, one: TensorShare, other: TensorShare, combining: Combining | None) -> None:
    if one.owner == other.owner:
        if one.module.is_saved != other.module.is_saved:
            return
        what = f"{one.module.path} and {other.module.path} both change {fqn}"
        raise UsageError(what, hint="an adapter has one module per weight")
    what = f"{one.owner} and {other.owner} both change {fqn}"
    if reason := one.why_not_a_sum:
        hint = "merge one after the other, each into the previous result; the order matters"
        raise UsageError(f"{what} and cannot be added. Of the first, {reason}", where=one.module.path, hint=hint)
    if combining is not None and not other.module.is_saved:
        what += ", in different rows; --combine needs the same rows"
        raise UsageError(what, where=fqn, hint="leave out --combine: a sum supports both")
