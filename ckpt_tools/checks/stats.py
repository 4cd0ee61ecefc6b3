"""What the values of a checkpoint are like, tensor by tensor, and which stand out: in one pass, for any format.

A tensor is compared with its siblings: the same weight of other layers, told by its name without numbers. Only matrices
are: biases and norms differ by orders of magnitude in healthy models. What stands out is a warning, and no proof.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpt_tools.checkpoint.entries import Finding, TensorEntry
from ckpt_tools.checkpoint.formats.blob_contents import check_sealed, revealed
from ckpt_tools.checkpoint.formats.manifest import MANIFEST_NAME
from ckpt_tools.checkpoint.formats.opening import Opened
from ckpt_tools.checkpoint.identity import Identity
from ckpt_tools.checkpoint.layout import Box
from ckpt_tools.checkpoint.quantised_units import find_units
from ckpt_tools.checkpoint.transform import find_model, plain_names, select
from ckpt_tools.checks.diff import match_names
from ckpt_tools.checks.sibling_tensors import gathered, kind_of, layer_of, outliers
from ckpt_tools.checks.updates import Update, Updating, check_updates
from ckpt_tools.checks.values import CONSTANT, CONSTANT_HINT, check_values, is_weight, packed_tensors, unseen_values
from ckpt_tools.errors import UnreadableError
from ckpt_tools.results import CheckedResult, as_json, plain
from ckpt_tools.storage.source import Source
from ckpt_tools.text import first_few, natural_order
from ckpt_tools.transfer.execute import Outcome, Progress, scan
from ckpt_tools.transfer.paired_reader import PairedReader, Reading
from ckpt_tools.transfer.plan import check_complete, chunk_index
from ckpt_tools.transfer.read import Buffers, read_block
from ckpt_tools.transfer.statistics import Moments, Tally, measures
from ckpt_tools.transfer.task import Look
from ckpt_tools.transfer.value_counts import Counts
from ckpt_tools.units import format_number

# How many directions a matrix uses, to judge by a sample of its rows

_MAX_ROWS = 256
_MAX_COLUMNS = 1 << 14  # A sample is this large at most: 32 MiB in float64


@dataclass(frozen=True, slots=True, kw_only=True)
class Spectrum:
    """What the singular values of a sample are like; no rank exceeds the smaller of its two sizes."""

    rows: int  # Rows of the sample, evenly spaced
    columns: int  # Its columns, from the first
    effective_rank: float  # exp of the entropy of the singular values over their sum (Roy and Vetterli, 2007)
    stable_rank: float  # Sum of the squares over the largest square


def measure_spectrum(entry: TensorEntry, source: Source) -> Spectrum | None:
    """Measure a matrix; None for what is none, is zero, or has elements that are not finite in the sample.

    The chunks of `entry` are raw, and its type has figures (`moments.measures`).
    """
    import numpy as np

    from ckpt_tools.transfer.arrays import array_of

    if len(entry.shape) != 2 or min(entry.shape) < 2 or (entry.dtype.name[0] in "BIU" and entry.dtype.name != "BF16"):
        return None
    height, width = entry.shape
    rows, columns = min(height, _MAX_ROWS), min(width, _MAX_COLUMNS)
    sample = np.empty((rows, columns), np.float64)
    chunks, buffers = chunk_index(entry), Buffers()
    for i in range(rows):
        box = Box((i * height // rows, 0), (1, columns))
        content, _, _ = read_block(entry, chunks, entry.dtype, box, source, buffers)
        sample[i] = array_of(content, entry.dtype, (-1,))
    most = float(np.abs(sample).max())
    if not 0 < most < math.inf:
        return None
    sample /= most
    short = sample if rows <= columns else sample.T
    values = np.sqrt(np.clip(np.linalg.eigvalsh(short @ short.T), 0, None))
    shares = values[values > values.max() * 1e-7] / values.sum()  # below, there is only rounding of the squares
    entropy = -float(np.sum(shares * np.log(shares)))
    stable = float(np.square(values).sum() / np.square(values.max()))
    return Spectrum(rows=rows, columns=columns, effective_rank=math.exp(entropy), stable_rank=stable)


_FIGURES = {
    "rms": ("rms-outlier", 3.0),
    "largest magnitude": ("magnitude-outlier", 6.0),
    "relative update": ("update-outlier", 3.0),
}
"""Figure → code, and the powers of two from its siblings' median within which it is never strange."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStats:
    """One tensor."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    moments: Moments | None  # None of what has no such figures: packed and complex numbers
    counts: Counts
    update: Update | None = None  # Against the other checkpoint, where it has the tensor
    spectrum: Spectrum | None = None  # Where it was asked for, of matrices

    def to_json(self) -> dict[str, object]:
        """Return it as JSON holds it."""
        document = as_json(self, "fqn dtype shape") | as_json(self.counts, "nan=num_nan inf=num_inf zeros=num_zero")
        if (moments := self.moments) is not None:
            figures = ("min", "max", "mean", "std", "rms", "absmax")
            document |= {"finite": moments.num_elems} | {name: _number(getattr(moments, name)) for name in figures}
            document["histogram"] = plain(moments.histogram)
        return document | {
            name: plain(held) for name, held in (("update", self.update), ("rank", self.spectrum)) if held is not None
        }


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Stats(CheckedResult):
    """All tensors, and what stands out."""

    tensors: tuple[TensorStats, ...]
    findings: tuple[Finding, ...]
    not_checked: tuple[str, ...] = ()
    """What has no figures, or was not compared, for people."""
    notes: tuple[str, ...] = ()
    only_in_source: tuple[str, ...] = ()
    only_in_other: tuple[str, ...] = ()
    nbytes: int = 0
    identities: tuple[Identity, ...] = ()
    """What it is, and what it was compared with."""
    updates: Mapping[str, Mapping[str, Update]] = field(default_factory=dict)
    """By "layer" and by "kind": each of these → the update of all its tensors together."""

    def to_json(self) -> dict[str, object]:
        """Return it as JSON holds it."""
        first = as_json(self, "ok identities bytes=nbytes tensors only_in_source only_in_other updates findings")
        return first | as_json(self, "not_checked notes")


def stats(
    opened: Opened,
    other: Opened | None = None,
    *,
    names: str = "auto",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    frozen: Sequence[str] = (),
    rank: bool = False,
    num_workers: int,
    progress: Progress | None = None,
) -> Stats:
    """Measure every tensor of an open checkpoint, and the update from `other`, an earlier one of the same model."""
    opened, other = revealed(opened), None if other is None else revealed(other)
    named: Mapping[str, TensorEntry] = {}
    theirs: Mapping[str, TensorEntry] = {}
    missed: list[str] = []
    if other is not None:
        ours, side = match_names(opened, other, names, include, exclude)
        named, theirs = ours.entries, side.entries
        missed += [*ours.left_out, *side.left_out, *_companion(opened, named)]
    else:
        chosen = replace(opened, checkpoint=select(opened.checkpoint, include=include, exclude=exclude))
        check_sealed(chosen)
        named = {entry.fqn: entry for entry in natural_order(chosen.checkpoint.tensors, lambda entry: entry.fqn)}
    for entry in named.values():
        check_complete(entry)
    found = zip(named, opened.ahead(named.values()), strict=True)
    entries = tuple(replace(opened.resolve(entry), fqn=fqn) for fqn, entry in found)
    checkpoint = replace(opened.checkpoint, tensors=entries)
    packed = {entry.fqn for entry in packed_tensors(checkpoint)}
    parts = find_units(entries)
    tallies = {e.fqn: Tally(e) for e in entries if measures(e.dtype) and e.fqn not in packed}
    measured = tallies.keys() - parts.keys()
    updating: dict[str, Updating] = {}
    if other is not None:
        reading, own = Reading(), {id(entry) for entry in other.checkpoint.tensors}
        for entry in entries:
            companions = theirs.get(entry.fqn)
            if companions is None or entry.fqn not in measured or not measures(companions.dtype):
                continue
            if companions.shape != entry.shape:
                missed.append(f"{entry.fqn!r}: {list(entry.shape)} here, {list(companions.shape)} in the other")
                continue
            recorded = companions.fqn if id(companions) in own else ""
            updating[entry.fqn] = Updating(entry, PairedReader(companions, other, reading, recorded))
    looks: dict[str, Sequence[Look]] = {
        fqn: (tally, updating[fqn]) if fqn in updating else (tally,) for fqn, tally in tallies.items()
    }
    outcome = scan(entries, opened.source, num_workers=num_workers, progress=progress, looks=looks)
    counts = {fqn: tally.counts for fqn, tally in tallies.items()}
    _check_digests(opened, named, outcome)
    rows = tuple(
        TensorStats(
            fqn=entry.fqn,
            dtype=entry.dtype.name,
            shape=entry.shape,
            moments=tallies[entry.fqn].moments if entry.fqn in measured else None,
            counts=counts.get(entry.fqn, Counts()),
            update=updating[entry.fqn].update if entry.fqn in updating else None,
            spectrum=measure_spectrum(entry, opened.source) if rank and entry.fqn in measured else None,
        )
        for entry in entries
    )
    model = {entry.fqn: entry for entry in find_model(checkpoint)[0].tensors if entry.fqn not in parts}
    judged = [row for row in rows if row.fqn in model and len(row.shape) > 1 and is_weight(model[row.fqn])]
    findings = [*check_values(opened, checkpoint, counts), *_constant(judged), *_outliers(judged)]
    if other is not None:
        trained = {fqn for fqn, entry in model.items() if entry.dtype.is_float and is_weight(entry)}
        shown = {fqn: (fqn, named[fqn].fqn, theirs[fqn].fqn) for fqn in updating}
        findings += check_updates({fqn: each.update for fqn, each in updating.items()}, trained, frozen, shown)
    if cast := [fqn for fqn, each in updating.items() if each.is_cast]:
        missed.append(f"what rounding alone changed of {len(cast):,} tensors of another dtype: {first_few(cast)}")
    if weights := dict.fromkeys(parts.values()):
        missed.append(f"{len(weights):,} quantised weights (--dequantize measures them): {first_few(weights)}")
    if unseen := [fqn for fqn in unseen_values(checkpoint) if fqn not in parts]:
        missed.append(f"the values of {len(unseen):,} tensors of packed or complex numbers: {first_few(unseen)}")
    return Stats(
        tensors=rows,
        findings=tuple(findings),
        not_checked=tuple(dict.fromkeys(missed)),
        notes=opened.notes,
        only_in_source=tuple(fqn for fqn in named if fqn not in theirs) if other is not None else (),
        only_in_other=tuple(fqn for fqn in theirs if fqn not in named),
        nbytes=checkpoint.total_bytes,
        updates={"layer": _joint((row for row in rows if row.fqn in model), _layer), "kind": _joint(rows, kind_of)},
    )


def _companion(opened: Opened, named: Mapping[str, TensorEntry]) -> Iterator[str]:
    """Say what of the checkpoint is not measured, because only its model's tensors have names in the other."""
    if named.keys() == {entry.fqn for entry in opened.checkpoint.tensors}:
        return
    model = {id(entry) for entry in plain_names(opened.checkpoint).values()}
    if left := [entry.fqn for entry in opened.checkpoint.tensors if id(entry) not in model]:
        yield f"{len(left):,} tensors that are not the model's: {first_few(left)}"


def _check_digests(opened: Opened, named: Mapping[str, TensorEntry], outcome: Outcome) -> None:
    """Hold what was read against the manifest; figures of other bytes are nobody's."""
    if opened.manifest is None:
        return
    own = {id(entry) for entry in opened.checkpoint.tensors}
    for fqn, entry in named.items():
        record = opened.manifest.tensors.get(entry.fqn) if id(entry) in own else None
        if record is not None and record.digest != outcome.digests.get(fqn):
            what = f"tensor {entry.fqn!r} is not what was written: {MANIFEST_NAME} has another digest"
            hint = "`ckpt verify` lists everything that is wrong; restore the checkpoint"
            raise UnreadableError(what, where=opened.source.root, hint=hint)


def _constant(rows: Iterable[TensorStats]) -> Iterator[Finding]:
    """Yield the matrices that are one number everywhere; zeros are told elsewhere."""
    found = {
        row.fqn: f"all {row.moments.num_elems} elements are {row.moments.min:g}"
        for row in rows
        if row.moments is not None and row.moments.num_elems > 1 and row.moments.min == row.moments.max != 0
    }
    yield from gathered(found, "warning", CONSTANT, CONSTANT_HINT)


def _outliers(rows: Sequence[TensorStats]) -> Iterator[Finding]:
    """Yield the matrices that are not like the same matrix of other layers."""
    alike = {row.fqn: (kind_of(row.fqn), row.shape) for row in rows}
    moments = {row.fqn: row.moments for row in rows if row.moments is not None}
    figures = {
        "rms": {fqn: each.rms for fqn, each in moments.items()},
        "largest magnitude": {fqn: each.absmax for fqn, each in moments.items()},
        "relative update": {r.fqn: r.update.relative or 0.0 for r in rows if r.update is not None},
    }
    said = "its {} is {}, that of the same weight in other layers about {}"
    for name, (code, fewest_bits) in _FIGURES.items():
        found = {
            fqn: said.format(name, format_number(figures[name][fqn]), format_number(usual))
            for fqn, usual in outliers(figures[name], alike, fewest_bits)
        }
        yield from gathered(found, "warning", code, "was this layer loaded, initialised and trained like the others?")


def _layer(fqn: str) -> str:
    number = layer_of(fqn)
    return "none" if number is None else str(number)


def _joint(rows: Iterable[TensorStats], part_of: Callable[[str], str]) -> dict[str, Update]:
    """Return the updates of the tensors of every part together."""
    found: dict[str, Update] = {}
    for row in rows:
        if row.update is not None:
            part = part_of(row.fqn)
            found[part] = found.get(part, Update()) + row.update
    return {part: found[part] for part in natural_order(found)}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
