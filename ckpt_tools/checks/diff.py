"""Compare two checkpoints, of whatever formats: names, shapes, dtypes, bytes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import isfinite

from ckpt_tools.checkpoint.entries import Checkpoint, TensorEntry
from ckpt_tools.checkpoint.formats.blob_contents import Missed, check_sealed, revealed
from ckpt_tools.checkpoint.formats.opening import Opened
from ckpt_tools.checkpoint.globs import choose_names
from ckpt_tools.checkpoint.identity import Identity
from ckpt_tools.checkpoint.quantised_units import find_units
from ckpt_tools.checkpoint.transform import plain_names
from ckpt_tools.checks.updates import Updating
from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.models.output_names import AssetList, Named, Naming, name_known, name_live
from ckpt_tools.results import CheckedResult
from ckpt_tools.text import first_few, natural_order
from ckpt_tools.transfer.execute import Progress, scan
from ckpt_tools.transfer.paired_reader import PairedReader, Reading
from ckpt_tools.transfer.plan import check_complete
from ckpt_tools.transfer.read import read_blocks
from ckpt_tools.transfer.split import Part, own_tensors
from ckpt_tools.transfer.statistics import measures

_EMBEDDING = re.compile(r"(?:^|\.)(?:\w*(?:embed_tokens|embeddings)|wte|embed_in)\.weight$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A tensor that both have, differently."""

    fqn: str
    what: str
    relative: float | None = None
    """|B - A| / |A| (2-norms), of floating-point values; None where shapes or dtypes differ, or A is zero."""
    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """Those of A and B, where they differ."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Difference(CheckedResult):
    """How two checkpoints differ."""

    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    changed: tuple[Change, ...]
    num_equal: int = 0
    """Tensors that are equal in both."""
    same: tuple[str, ...] = ()
    """Their names; JSON has the number alone."""
    notes: tuple[str, ...] = ()
    """What of the two was not compared, for people."""
    identities: tuple[Identity, ...] = ()
    """What both are."""
    keys_only: bool = False
    """Names, shapes and dtypes were compared, and no values."""
    terms: tuple[str, ...] = ()
    """Options that let fewer differences count: tolerances, and names that were chosen."""

    @property
    def equal(self) -> bool:
        """True when nothing differs."""
        return not (self.only_in_a or self.only_in_b or self.changed)

    @property
    def other_model(self) -> str:
        """In which numbers B is of another model than A, or in its architecture; "" where they may be of one."""
        if self.equal or len(self.identities) != 2 or "part" in (each.whole for each in self.identities):
            return ""
        one, two = self.identities
        embedding = next((c.shapes for c in self.changed if c.shapes and _EMBEDDING.search(c.fqn)), ((), ()))
        sizes = [each[-1:] or (known.hidden_size,) for each, known in zip(embedding, (one, two), strict=True)]
        said = {
            "{} layers": (one.num_layers, two.num_layers),
            "hidden {}": (sizes[0][0], sizes[1][0]),
            "{}": (one.architecture, two.architecture),
            "vocabulary {}": (embedding[0][:1] and embedding[0][0], embedding[1][:1] and embedding[1][0]),
        }
        facts = {w: f"{w.format(b)} instead of {a}" for w, (a, b) in said.items() if a and b and a != b}
        if not facts and self.only_in_a and self.only_in_b and not (self.changed or self.num_equal):
            return "no tensor has the same name"
        return ", ".join(facts.values()) if facts.keys() - {"vocabulary {}"} else ""

    @property
    def ok(self) -> bool:
        """Are they `equal`?"""
        return self.equal

    @property
    def title(self) -> str:
        """Are they equal, and in what?"""
        return ("equal" if self.equal else "NOT equal") + " (names, shapes and dtypes)" * self.keys_only

    def to_json(self) -> dict[str, object]:
        """Return it as JSON holds it."""
        document: dict[str, object] = {"equal": self.equal, "identities": (), **asdict(self)}
        del document["same"]
        return document | {"identities": [each.to_json() for each in self.identities]}


def diff(
    a: Opened,
    b: Opened,
    *,
    keys_only: bool = False,
    atol: float | None = None,
    rtol: float | None = None,
    names: str = "auto",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    num_workers: int,
    progress: Progress | None = None,
    share: Part | None = None,
    missed: Missed = None,
) -> Difference:
    """Compare two open checkpoints; what of a model is not read is refused, or `told`.

    Values are compared as bytes, so that NaNs and signed zeros count as what they are. With a tolerance, floating-point
    tensors may differ by `atol + rtol * |a|`.
    """
    a, b = revealed(a), revealed(b)
    our_side, their_side = match_names(a, b, names, include, exclude, missed)
    ours, theirs = our_side.entries, their_side.entries
    shared = [fqn for fqn in ours if fqn in theirs]
    parts = {f: w for side in (ours, theirs) for f, w in find_units(replace(e, fqn=n) for n, e in side.items()).items()}
    kinds = ((fqn, _compare_kinds(ours[fqn], theirs[fqn])) for fqn in shared)
    changed = {
        f: Change(fqn=f, what=what, shapes=(ours[f].shape, theirs[f].shape) if what.startswith("shape ") else None)
        for f, what in kinds
        if what is not None
    }
    left_out: tuple[str, ...] = ()
    if not keys_only:
        every = [fqn for fqn in shared if fqn not in changed]
        alike = [entry.fqn for entry in own_tensors([replace(ours[fqn], fqn=fqn) for fqn in every], share)]
        if share is not None:
            num_left = len(every) - len(alike)
            left_out += (f"the bytes of {num_left:,} of {len(shared):,} tensors: the other parts' (--part)",)
            read = {*alike, *changed}
            shared = [fqn for fqn in shared if fqn in read]
        left, right = _resolve(a, ours, alike), _resolve(b, theirs, alike)
        digests = [
            scan(list(side.values()), opened.source, num_workers=num_workers, progress=progress).digests
            for opened, side in ((a, left), (b, right))
        ]
        differing = [fqn for fqn in alike if digests[0][fqn] != digests[1][fqn]]
        numbers = {fqn for fqn in differing if left[fqn].dtype.is_float and measures(left[fqn].dtype)} - parts.keys()
        tolerance = None if atol is None and rtol is None else (atol or 0.0, rtol or 0.0)
        reading = Reading()
        seen = {
            fqn: Updating(right[fqn], PairedReader(left[fqn], a, reading), numbers=fqn in numbers, tolerance=tolerance)
            for fqn in differing
        }
        looks = {fqn: (each,) for fqn, each in seen.items()}
        scan([right[fqn] for fqn in differing], b.source, num_workers=num_workers, looks=looks)
        for fqn, each in seen.items():
            if (what := _describe(each, fqn in numbers and tolerance is not None)) is not None:
                changed[fqn] = Change(fqn=fqn, what=what, relative=each.update.relative)
    rows: dict[str, Change] = {}
    for change in (changed[fqn] for fqn in ours if fqn in changed):
        weight = parts.get(change.fqn)
        what = f"quantised, and its {change.fqn!r} differs: {change.what}"
        rows.setdefault(weight or change.fqn, replace(change, fqn=weight, what=what) if weight else change)
    only = [tuple(fqn for fqn in one if fqn not in other) for one, other in ((ours, theirs), (theirs, ours))]
    notes = tuple(dict.fromkeys((*our_side.left_out, *their_side.left_out, *left_out)))
    same = tuple(fqn for fqn in shared if fqn not in changed)
    return Difference(
        only_in_a=only[0],
        only_in_b=only[1],
        changed=tuple(rows.values()),
        num_equal=len(same),
        notes=notes,
        keys_only=keys_only,
        same=same,
    )


_Entries = Mapping[str, TensorEntry]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A checkpoint by certain names."""

    entries: _Entries
    left_out: tuple[str, ...] = ()  # What has no place among them, for people


def match_names(
    a: Opened, b: Opened, names: str, include: Sequence[str] = (), exclude: Sequence[str] = (), missed: Missed = None
) -> tuple[Side, Side]:
    """Index both by FQN; when the names differ, by those of plain models, of the hub or of the live model.

    The globs choose pairs, by the common name or by that of either side; `told` is as of `diff`.
    """
    sides = _match(a, b, names)
    shown = {fqn: (fqn, *(s.entries[fqn].fqn for s in sides if fqn in s.entries)) for s in sides for fqn in s.entries}
    shown |= {name: (name,) for each in (a, b) for name in each.checkpoint.sealed}
    kept = choose_names(shown, include, exclude) if include or exclude else shown.keys()
    check_sealed(a, kept=kept, missed=missed)
    check_sealed(b, kept=kept, missed=missed)
    one, other = (replace(s, entries={f: s.entries[f] for f in natural_order(s.entries) if f in kept}) for s in sides)
    return one, other


def _match(a: Opened, b: Opened, names: str) -> tuple[Side, Side]:
    ours, theirs = (_by_names(opened.checkpoint) for opened in (a, b))
    best = _closest(ours, theirs)
    if best[0].entries.keys() == best[1].entries.keys():
        return best
    assets = [*a.own_assets, *b.own_assets]
    more = [_otherwise(opened, side[-1].entries, assets, names) for opened, side in ((a, ours), (b, theirs))]
    if names != "auto" and all(len(found) == 1 for found in more):
        raise UsageError(f"neither checkpoint has names of {names}'s for the model that config.json names")
    return _closest([*ours, *more[0]], [*theirs, *more[1]])


def _by_names(checkpoint: Checkpoint) -> tuple[Side, Side]:
    return Side(entries={entry.fqn: entry for entry in checkpoint.tensors}), Side(entries=plain_names(checkpoint))


def _closest(ours: Sequence[Side], theirs: Sequence[Side]) -> tuple[Side, Side]:
    return min(product(ours, theirs), key=lambda pair: len(pair[0].entries.keys() ^ pair[1].entries.keys()))


def _otherwise(opened: Opened, entries: _Entries, assets: AssetList, names: str) -> list[Side]:
    """Return a checkpoint's tensors by the live model's names, and by the hub's if they have a library's."""
    tensors = tuple(replace(entry, fqn=fqn) for fqn, entry in entries.items())
    checkpoint = replace(opened.checkpoint, tensors=tensors)
    hub = name_known(checkpoint, assets, names, opened.resolve)
    hub = hub and without_zeros(hub, opened)
    left_out = () if hub is None else hub.left_out
    live = name_live(checkpoint if hub is None else hub.checkpoint, assets, Naming(), opened.resolve)
    found = {entry.fqn: entry for entry in live.checkpoint.tensors}
    sides = [Side(entries=found | {alias: found[name] for alias, name in live.aliases.items()}, left_out=left_out)]
    if hub is not None:
        sides.insert(0, Side(entries={entry.fqn: entry for entry in hub.checkpoint.tensors}, left_out=left_out))
    return sides


def without_zeros(named: Named, opened: Opened) -> Named:
    """Leave out what the hub has no place for where it is zeros, as the other side begins with."""
    lost = [entry for entry in named.checkpoint.tensors if entry.fqn in named.lost]
    blocks = {entry.fqn: read_blocks(opened.resolve(entry), opened.source) for entry in lost}
    zeros = [fqn for fqn, found in blocks.items() if not any(any(content) for _, content in found)]
    if not zeros:
        return named
    kept = tuple(entry for entry in named.checkpoint.tensors if entry.fqn not in zeros)
    said = f"left out {first_few(zeros)}: zeros, which the hub has no place for"
    checkpoint, left_out = replace(named.checkpoint, tensors=kept), (*named.left_out, said)
    nowhere, note = tuple(fqn for fqn in named.lost if fqn not in zeros), "; ".join(filter(None, (named.note, said)))
    return replace(named, checkpoint=checkpoint, lost=nowhere, left_out=left_out, note=note)


def _compare_kinds(one: TensorEntry, other: TensorEntry) -> str | None:
    """Say how shape or dtype differ."""
    if one.shape != other.shape:
        return f"shape {list(one.shape)} and {list(other.shape)}"
    if one.dtype != other.dtype:
        return f"dtype {one.dtype.name} and {other.dtype.name}"
    return None


def _resolve(opened: Opened, entries: Mapping[str, TensorEntry], fqns: list[str]) -> dict[str, TensorEntry]:
    resolved = {}
    for fqn, entry in zip(fqns, opened.ahead(entries[fqn] for fqn in fqns), strict=True):
        check_complete(entry)
        resolved[fqn] = replace(opened.resolve(entry), fqn=fqn)
    return resolved


def _describe(seen: Updating, is_tolerant: bool) -> str | None:
    """Say by how much two tensors of other digests differ; None where a tolerance takes them for equal."""
    update = seen.update
    if seen.first is None:
        raise CkptError("the digests differ but the bytes do not: a source changed meanwhile", where=seen.fqn)
    if is_tolerant:
        if not seen.num_far:
            return None
        what = f"values differ by up to {seen.farthest:g} in {seen.num_far:,} of {update.num_elems:,} elements"
    else:
        what = f"values differ in {update.num_changed:,} of {update.num_elems:,} elements, first at {[*seen.first]}"
    odd = [side for side, sum_ in (("A", update.theirs), ("B", update.ours)) if not isfinite(sum_)]
    return what + f"; {' and '.join(odd)} with NaN, Inf or numbers too large to square" * bool(odd)
