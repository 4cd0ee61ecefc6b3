"""Is a checkpoint fit to succeed the earlier ones of its series? By what it holds, and by what its numbers are like.

All is noted in the one pass in which a checkpoint is verified: names, shapes, dtypes, what lies beside them, a digest
of all elements, and a few figures and elements of every tensor, from which a change can be estimated.
"""

from __future__ import annotations

import math
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from statistics import median

import xxhash

from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.checkpoint.formats._torch_file import read_torch_file
from ckpt_tools.checkpoint.formats.judge_step import PICKLE
from ckpt_tools.checkpoint.formats.opening import Opened, open_path
from ckpt_tools.checkpoint.formats.trainer_contracts import describe
from ckpt_tools.checkpoint.layout import Box
from ckpt_tools.checkpoint.transform import find_model, is_optimizer
from ckpt_tools.checks.values import packed_tensors
from ckpt_tools.errors import CkptError
from ckpt_tools.runs.folder import parse_name
from ckpt_tools.storage.locations import open_source
from ckpt_tools.text import first_few
from ckpt_tools.transfer.box_bytes import start_of
from ckpt_tools.transfer.execute import scan
from ckpt_tools.transfer.statistics import measures
from ckpt_tools.transfer.task import Look

_SAMPLES, _PIECE_ELEMS = 16, 1 << 16
_MOST_MOVES = 8
_FEW = 8  # Elements below which a tensor is not judged
_HEAD_BYTES = 16 << 20  # Of a file without tensors, what is digested; larger ones have checksums of their own
_TOKENIZER = re.compile(
    r"(?:.*/)?(?:tokenizer\w*\.(?:json|model)|vocab\.\w+|merges\.txt|special_tokens_map\.json|added_tokens\.json|"
    r"chat_template\.\w+|\w*config\.json|spiece\.model)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What was noted of a checkpoint while it was verified."""

    layout: Mapping[str, str] = field(default_factory=dict)
    """What it holds → dtype and shape of a tensor. Names begin with whose it is: model, state, has."""
    figures: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Name of a tensor → rms, largest magnitude, share of elements that equal the one before, and some elements.

    That share is 1 for a constant tensor, and about 1/2 where half of it is."""
    content: str = ""  # Digest of every element, and of small files beside them
    moves: tuple[float, ...] = ()
    """By how much the model of it and of its predecessors has changed a step of training, the latest last."""


class _Sketch:
    """Takes the blocks of one tensor; see `moving.execute.Look`."""

    def __init__(self, entry: TensorEntry, *, is_measured: bool) -> None:
        self._entry, self._lock = entry, threading.Lock()
        self._whole = Box((0,) * len(entry.shape), entry.shape)
        self._is_measured = is_measured
        self._places = sorted({i * entry.num_elems // _SAMPLES for i in range(_SAMPLES)})
        self._squares = self._absmax = 0.0
        self._equal = 0
        self._sample: dict[int, float] = {}
        self.digest = 0

    def see(self, block: Box, content: memoryview) -> None:
        """Take a block, as row-major bytes."""
        start = start_of(block, self._whole)
        digest = xxhash.xxh3_64_intdigest(content, start & (1 << 64) - 1)
        with self._lock:
            self.digest ^= digest
        if not self._is_measured:
            return
        import numpy as np

        from ckpt_tools.transfer.arrays import array_of

        values = array_of(content, self._entry.dtype, (-1,))
        squares, absmax, equal = 0.0, 0.0, 0
        with np.errstate(all="ignore"):
            for at in range(0, len(values), _PIECE_ELEMS):
                wide = values[at : at + _PIECE_ELEMS].astype(np.float64)
                squares += float(np.dot(wide, wide))
                absmax = max(absmax, float(np.abs(wide).max()))
                equal += int(np.count_nonzero(wide[1:] == wide[:-1]))
            sample = {at: float(values[at - start]) for at in self._places if 0 <= at - start < len(values)}
        with self._lock:
            self._squares, self._equal = self._squares + squares, self._equal + equal
            self._absmax = max(self._absmax, absmax)
            self._sample |= sample

    def finish(self) -> None:
        """Nothing is left to do."""

    @property
    def figures(self) -> tuple[float, ...] | None:
        """The numbers of `Figures` in a row; None of what has none."""
        elems = self._entry.num_elems
        if not self._is_measured or elems < _FEW or not math.isfinite(self._squares):
            return None
        sample = [self._sample.get(at, 0.0) for at in self._places]
        row = (math.sqrt(self._squares / elems), self._absmax, self._equal / (elems - 1), *sample)
        return tuple(float(f"{value:.5g}") for value in row)


class Profiler:
    """Notes what there is to note of the checkpoint at `path` while it is verified."""

    def __init__(self, path: str, label: str) -> None:
        self._path, self._label = path, re.sub(r"\d+", "*", label)
        self._layout: dict[str, str] = {}
        self._sketches: dict[str, _Sketch] = {}
        self._files: set[str] = set()

    def looks(self, opened: Opened, entries: Sequence[TensorEntry]) -> Mapping[str, Sequence[Look]]:
        """Return who sees the elements of these tensors, and note what else is there."""
        model = {entry.fqn for entry in find_model(opened.checkpoint)[0].tensors}
        packed = {entry.fqn for entry in packed_tensors(opened.checkpoint)}
        inside = os.path.relpath(opened.source.root, self._path) if os.path.isdir(self._path) else ""
        prefix = "/".join(part for part in (self._label, inside) if part not in ("", "."))
        found: dict[str, Sequence[Look]] = {}
        for entry in opened.checkpoint.tensors:
            whose = "state" if is_optimizer(entry) or prefix.startswith("optim") else "model"
            if whose == "model" and entry.fqn not in model:
                self._note_item(prefix, entry.path, entry.fqn)
                name = f"other {prefix} {entry.fqn}"
            else:
                name = f"{whose} {prefix} {entry.fqn}" if prefix else f"{whose} {entry.fqn}"
                self._layout[name] = f"{entry.dtype.name}{list(entry.shape)}"
            is_float = entry.dtype.is_float and entry.fqn not in packed and measures(entry.dtype)
            self._sketches[name] = sketch = _Sketch(entry, is_measured=is_float and not name.startswith("other"))
            found[entry.fqn] = (sketch,)
        for blob in opened.checkpoint.blobs:
            self._note_item(prefix, blob.path, blob.fqn)
        self._files |= {os.path.normpath(os.path.join(inside, file)) for file in opened.checkpoint.files}
        return {entry.fqn: found[entry.fqn] for entry in entries if entry.fqn in found}

    def _note_item(self, prefix: str, path: Sequence[object], fqn: str) -> None:
        parts = [str(each) for each in path] if len(path) > 1 else fqn.split(".")
        family = ".".join("*" if part.isdigit() else part for part in parts[:2])
        self._layout[f"has {prefix} {family}" if prefix else f"has {family}"] = ""

    def profile(self) -> Profile:
        """Return what was noted, with what lies beside the tensors."""
        found = xxhash.xxh3_128()
        with ExitStack() as stack:
            if os.path.isdir(self._path) or "://" in self._path:
                source = stack.enter_context(open_source(self._path))
                for file, nbytes in sorted(source.list_files().items()):
                    if os.path.normpath(file) in self._files:
                        continue
                    found.update(file.encode("utf-8", "surrogatepass"))
                    with suppress(CkptError):  # a link that leads out
                        found.update(bytes(source.read(file, 0, min(nbytes, _HEAD_BYTES))))
                    self._note_file(file, stack)
        for name, sketch in sorted(self._sketches.items()):
            found.update(f"{name}\0{sketch.digest:x}\0".encode("utf-8", "surrogatepass"))
        figures = {name: row for name, sketch in self._sketches.items() if (row := sketch.figures) is not None}
        return Profile(layout=self._layout, figures=figures, content=found.hexdigest())

    def _note_file(self, file: str, stack: ExitStack) -> None:
        """Note a file beside the tensors, and what is in it where it is one of `torch.save`."""
        *directories, base = file.split("/")
        places = (parse_name(each, is_directory=True) for each in directories)
        shown = [each if place is None else place.series for each, place in zip(directories, places, strict=True)]
        what = describe(file) or describe(base)
        if not what and not _TOKENIZER.fullmatch(base) and not PICKLE.fullmatch(base):
            return
        name = "/".join((self._label, *shown, base)) if self._label else "/".join((*shown, base))
        name = name if what or not PICKLE.fullmatch(base) else re.sub(r"\d+", "*", name)
        self._layout[f"has {name}"] = what
        if not what or not PICKLE.fullmatch(base):
            return
        with suppress(CkptError):
            opened = stack.enter_context(open_path(os.path.join(self._path, file), as_part=True))
            is_state = base.startswith(("optim", "bf16_", "fp16_", "zero_"))
            state = [entry for entry in opened.checkpoint.tensors if is_state or is_optimizer(entry)]
            self._layout |= {f"state {name} {each.fqn}": f"{each.dtype.name}{list(each.shape)}" for each in state}
            looks = {
                each.fqn: _Sketch(each, is_measured=each.dtype.is_float and measures(each.dtype)) for each in state
            }
            self._sketches |= {f"state {name} {fqn}": look for fqn, look in looks.items()}
            scan(state, opened.source, num_workers=1, looks={fqn: (look,) for fqn, look in looks.items()})
        with suppress(CkptError):
            value = read_torch_file(stack.enter_context(open_source(self._path)), file).value
            keys = [key for key in value if isinstance(key, str)] if isinstance(value, dict) else []
            self._layout |= {f"has {name} {key}": "" for key in keys}


def join_profiles(profiles: Sequence[Profile]) -> Profile:
    """Return that of a checkpoint of several parts."""
    layout: dict[str, str] = {}
    figures: dict[str, tuple[float, ...]] = {}
    for each in profiles:
        layout.update(each.layout)
        figures.update(each.figures)
    return Profile(layout=layout, figures=figures, content="-".join(each.content for each in profiles))


def compare(new: Profile, old: Profile, gap: int, name: str) -> tuple[tuple[str, ...], tuple[float, ...]]:
    """Say why `new` is not fit to succeed `old`, `gap` steps later; and how the model has moved so far."""
    top = max((row[0] for key, row in old.figures.items() if key.startswith("model ")), default=0.0)
    moves = {
        key: move
        for key, row in old.figures.items()
        if key.startswith("model ") and row[0] > top / 64 and "," in old.layout[key] and key in new.figures
        if (move := _distance(new.figures[key][3:], row[3:])) is not None
    }
    typical = median(moves.values()) if moves else 0.0
    usual = gap * max(old.moves) if old.moves else typical
    far = {key for key, move in moves.items() if move > 1 and move > 8 * usual}
    reasons = [*_compare_layout(new.layout, old.layout, name), *_compare_values(new, old, name, top, far)]
    return tuple(reasons), (*old.moves, typical / max(gap, 1))[-_MOST_MOVES:] if moves else old.moves


def _compare_layout(new: Mapping[str, str], old: Mapping[str, str], name: str) -> Iterator[str]:
    ours, theirs = ({key for key in each if key.startswith("model ")} for each in (new, old))
    if lost := sorted(_plain(key) for key in theirs - ours):
        yield f"{len(lost)} of the {len(theirs)} model tensors of {name} are missing: {first_few(lost)}"
    if added := sorted(_plain(key) for key in ours - theirs):
        yield f"{len(added)} of the {len(ours)} model tensors are not in {name}: {first_few(added)}"
    both = [key for key in old if key in new and not key.startswith("has ")]
    if changed := [f"{_plain(key)} is {new[key]}, was {old[key]}" for key in both if new[key] != old[key]]:
        yield f"the dtype or shape differs from {name}: {first_few(changed)}"
    if lost := sorted(_plain(key) for key in old.keys() - new.keys() - theirs):
        yield f"it does not have {first_few(lost)}, which {name} has"


def _compare_values(new: Profile, old: Profile, name: str, top: float, far: set[str]) -> Iterator[str]:
    even, strange = [], []
    for key in [key for key in new.figures if key in old.figures]:
        (rms, absmax, flat, *_), (old_rms, old_absmax, old_flat, *_) = new.figures[key], old.figures[key]
        is_model = key.startswith("model ")
        # Rows of an optimizer's state may decay to zero: of it, only what has become one number altogether counts.
        if flat >= (0.4 if is_model else 0.999) and flat - old_flat > 0.25:
            even.append(_plain(key))
        is_large = rms > 8 * old_rms and (rms > 2 * top or old_rms > top / 64)
        is_small = rms < old_rms / 64 and _plain(key) not in even
        if absmax > 1e12 * max(old_absmax, 1e-6) or (is_model and (is_large or is_small)):
            strange.append(f"{_plain(key)} {rms:.2g}, was {old_rms:.2g}")
        if key in far and (is_large or is_small or _plain(key) in even):
            far.remove(key)
    if even:
        shown = first_few(sorted(even))
        yield f"tensors now half or fully zero or constant, unlike in {name}: {shown}"
    if strange:
        yield f"tensors with implausible magnitudes (rms): {first_few(sorted(strange))}"
    if far:
        shown = first_few(sorted(map(_plain, far)))
        yield f"tensors that differ from {name} by far more than training has moved the model: {shown}"


def _distance(new: Sequence[float], old: Sequence[float]) -> float | None:
    """Return |new - old| / |old| of a tensor, as its few elements tell; None where that is no number."""
    size = math.fsum(each * each for each in old)
    change = math.fsum((a - b) ** 2 for a, b in zip(new, old)) / size if size > 0 else math.nan  # noqa: B905
    return math.sqrt(change) if math.isfinite(change) else None


def _plain(key: str) -> str:
    return key.partition(" ")[2].strip()
