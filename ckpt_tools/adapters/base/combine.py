"""Several LoRAs of the same modules made into one, other than by a sum: as PEFT's `add_weighted_adapter` does.

Source: peft 0.21, `tuners/lora/model.py` and `utils/merge_utils.py`. What differs: the scale of the result is 1, also
where the first adapter is rsLoRA (PEFT's then has √r); of equal magnitudes pruning keeps the first; and a random mask
follows from the seed and the module's name.
"""

from __future__ import annotations

import math
import threading
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ckpt_tools.adapters.base.matching import ChangedRows
from ckpt_tools.adapters.base.share import Part, Share
from ckpt_tools.adapters.families import family_of
from ckpt_tools.errors import UsageError

if TYPE_CHECKING:
    from ckpt_tools.adapters.families.changes import Change
    from ckpt_tools.moving.arrays import Array
    from ckpt_tools.options.adapters import MergeOptions

_PAIRS = (("A", "B"), ("A_embedding", "B_embedding"))


class _Method(NamedTuple):
    pruning: str | None = None
    """Which elements of an adapter are set to 0: those of the least magnitude, or random ones."""
    elects: bool = False
    """Do only elements of the sign count that most have?"""
    of_product: bool = False
    """Is B·A combined, and a LoRA made of the result, in the place of A and B each?"""


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
    members: list[tuple[Share, int]]
    """Share, and the module's index in its adapter."""
    turns: threading.Lock
    """Shared by all groups: whole products are computed one at a time."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _made: tuple[Array, Array] | None = None

    def check(self) -> None:
        """Refuse what PEFT does not combine: other types than plain LoRA, or factors of different ranks."""
        modules = [share.adapter.modules[index] for share, index in self.members]
        method, where = self.combining.options.combine, modules[0].path
        for module in modules:
            if module.family != "lora" or set(module.factors) not in map(set, _PAIRS) or module.parameter != "weight":
                what = family_of(module).label(module) + (
                    " with more than two matrices" if len(module.factors) > 2 else ""
                )
                what = "stacked experts" if module.parameter != "weight" else what
                hint = "leave out --combine: a sum takes every family"
                raise UsageError(f"--combine {method} is for plain LoRA; {where} is {what}", where=where, hint=hint)
        ranks = sorted({module.factors[min(module.factors)].shape[0] for module in modules})
        if len(ranks) > 1 and not self.combining.kind.of_product:
            what = f"--combine {method} needs one rank; {where} has {' and '.join(map(str, ranks))}"
            raise UsageError(what, where=where, hint="--combine svd takes any ranks; so does a sum, without --combine")

    def change(self, rows: ChangedRows) -> Change:
        """Return what the combined module makes of rows."""
        from ckpt_tools.adapters.families.changes import LowRank

        with self._lock:
            if self._made is None:
                self._made = self._combined()
            a, b = self._made
        share, index = self.members[0]
        is_turned = rows.transposed or "A_embedding" in share.adapter.modules[index].factors
        return LowRank(a.T, b.T, 1.0) if is_turned else LowRank(b, a, 1.0)

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
            basis, rest = np.linalg.qr(left)
            turned, lower = np.linalg.qr(right.T)
            outer, sizes, inner = np.linalg.svd(rest @ lower.T)
            a, b = inner[:rank] @ turned.T, basis @ (outer[:, :rank] * sizes[:rank])
        else:
            with self.turns:
                whole = self.combining.mix([b @ a for a, b in zip(down, up, strict=True)], weights, (key,))
                is_wide = whole.shape[0] <= whole.shape[1]
                matrix = (whole if is_wide else whole.T).astype(np.float64)
                vectors = np.linalg.eigh(matrix @ matrix.T)[1][:, : -rank - 1 : -1]
                other = vectors.T @ matrix
                a, b = (other, vectors) if is_wide else (vectors.T, other.T)
        return a.astype(np.float32), b.astype(np.float32)


def parts_of(shares: Sequence[Share], combining: Combining | None) -> dict[str, tuple[Part, ...]]:
    """Return FQN in the base → what changes it, whole tensors first: of every adapter, or of those combined."""
    turns = threading.Lock()
    groups: dict[tuple[object, ...], Group] = {}
    found: dict[str, list[Part]] = defaultdict(list)
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
                found[fqn].append(Part(rows, module, share.path, change))
    for group in groups.values():
        group.check()
    for fqn, parts in found.items():
        parts.sort(key=lambda part: not part.module.is_saved)
        for one, other in _meetings(parts):
            _refuse_meeting(fqn, one, other, combining)
    return {fqn: tuple(parts) for fqn, parts in found.items()}


def _meetings(parts: Iterable[Part]) -> Iterator[tuple[Part, Part]]:
    """Yield every two that change some row of a tensor, both ways round; experts of a stack are many that do not."""
    earlier: list[Part] = []
    for part in sorted(parts, key=lambda each: each.rows.start):
        earlier = [each for each in earlier if each.meets(part)]
        for each in earlier:
            yield each, part
            yield part, each
        earlier.append(part)


def _refuse_meeting(fqn: str, one: Part, other: Part, combining: Combining | None) -> None:
    if one.owner == other.owner:
        if one.module.is_saved != other.module.is_saved:
            return
        what = f"{one.module.path} and {other.module.path} both change {fqn}"
        raise UsageError(what, hint="an adapter has one module per weight")
    what = f"{one.owner} and {other.owner} both change {fqn}"
    if reason := one.why_not_a_sum:
        hint = "merge one after the other, each into the result before it; the order matters"
        raise UsageError(f"{what}, which have no sum. Of the first, {reason}", where=one.module.path, hint=hint)
    if combining is not None and not other.module.is_saved:
        what += ", by modules of other rows, and only the same can be combined"
        raise UsageError(what, where=fqn, hint="leave out --combine: a sum takes both")
