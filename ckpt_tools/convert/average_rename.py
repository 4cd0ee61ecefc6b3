"""`average`, `extract` and `rename`: what makes another checkpoint of the same kind."""

from __future__ import annotations

import copy
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from ckpt_tools.checkpoint.dtypes import DType
from ckpt_tools.checkpoint.entries import Checkpoint, TensorEntry
from ckpt_tools.checkpoint.formats.blob_contents import check_sealed, revealed
from ckpt_tools.checkpoint.formats.dcp_placing import kept_cells, place
from ckpt_tools.checkpoint.formats.digest import digest_bytes
from ckpt_tools.checkpoint.formats.opening import Opened
from ckpt_tools.checkpoint.formats.step import refuse_mixed
from ckpt_tools.checkpoint.layout import Box
from ckpt_tools.checkpoint.names.foreign import is_factor
from ckpt_tools.checkpoint.names.table import load_table
from ckpt_tools.checkpoint.transform import find_model, select
from ckpt_tools.checks.diff import match_names
from ckpt_tools.checks.values import packed_tensors
from ckpt_tools.convert.check_names import check_names
from ckpt_tools.convert.find_model import model_in, name_again, omitted, with_zeros
from ckpt_tools.convert.job import (
    STATE,
    Conversion,
    Job,
    cast_target,
    check_separate,
    check_whole,
    choose,
    kept_by,
    notes_on,
    with_config,
)
from ckpt_tools.convert.run import run
from ckpt_tools.convert.to_hf import gathering_job, written_names
from ckpt_tools.errors import UsageError
from ckpt_tools.models.config import CONFIG_NAME
from ckpt_tools.models.open_asking import open_asking
from ckpt_tools.models.output_names import AssetList, Named, Naming, claim_of, name_live
from ckpt_tools.options import AnyPath, default_num_workers, takes
from ckpt_tools.options.adapters import MergeOptions
from ckpt_tools.options.convert import AverageOptions, ExtractOptions, GatherOptions, RenameOptions, WritingOptions
from ckpt_tools.text import first_few
from ckpt_tools.transfer.paired_reader import PairedReader, Reading

# Jobs that write a checkpoint as what it is: safetensors, or DCP with the same chunks on the same ranks


def rewrite_job(
    opened: Opened,
    destination: str,
    options: WritingOptions | MergeOptions,
    *,
    only_model: bool = True,
    named: Named | None = None,
) -> Job:
    """Return the job that writes a checkpoint again; what is neither DCP nor safetensors becomes safetensors.

    `only_model` leaves optimizer state and whatever else a trainer keeps out of a DCP checkpoint. Safetensors hold
    nothing but a model anyway.
    """
    own, dtype, dtype_for, limit = None, options.dtype, options.dtype_for, options.max_shard_size
    if named is not None:
        own = {entry.fqn: named.sources.get(entry.fqn, "") for entry in named.checkpoint.tensors}
        check_whole(opened, opened.own_assets, named.checkpoint.tensors, own, named.apart)
        opened = replace(with_zeros(opened, named), checkpoint=named.checkpoint, origin=None)
    if not opened.format.loads_by_dcp:
        gather = GatherOptions(
            opened.source.root,
            destination,
            max_shard_size=limit,
            dtype=dtype,
            dtype_for=dtype_for,
            names="auto" if named is None else "live",
            strip_prefix="auto" if named is None else "none",
        )
        job = gathering_job(opened, gather, before=own)
        return job if named is None else _of_names(job, named)
    if limit is not None:
        what = "--max-shard-size needs safetensors files, but the source is a DCP checkpoint"
        raise UsageError(what, hint="leave it out, and `ckpt gather` the result")
    opened = revealed(opened) if only_model else opened
    check_sealed(opened)
    chosen = replace(find_model(opened.checkpoint)[0], blobs=()) if only_model else opened.checkpoint
    source_checkpoint = replace(chosen, tensors=tuple(map(opened.resolve, chosen.tensors)))
    target, cast = cast_target(opened, source_checkpoint, dtype, dtype_for, {}, opened.own_assets, own)
    cells = {entry.fqn: kept_cells(entry) for entry in target.tensors}
    kept = {entry.fqn for entry in source_checkpoint.tensors}
    placements = opened.checkpoint.placements or {}
    job = Job(
        opened=opened,
        source=source_checkpoint,
        target=place(target.tensors, cells, source_checkpoint.blobs),
        destination=destination,
        assets=opened.own_assets,
        dtype=dtype,
        mesh=opened.checkpoint.mesh,
        placements={fqn: placed for fqn, placed in placements.items() if fqn in kept},
        notes=[*notes_on(opened), *cast, *(omitted(opened.checkpoint, chosen, changed=True) if only_model else ())],
    )
    return job if named is None else _of_names(job, named)


def _of_names(job: Job, named: Named) -> Job:
    """Let a job know what its tensors are called in the source."""
    own = {entry.fqn: named.sources.get(named.aliases.get(entry.fqn, entry.fqn), "") for entry in job.source.tensors}
    placements = job.opened.checkpoint.placements or {}
    job.names, job.apart = own, named.apart
    job.placements = {fqn: placements[name] for fqn, name in own.items() if name in placements}
    job.notes += [named.note] if named.note else []
    return job


def renamed(opened: Opened, naming: Naming) -> Named:
    """Return a model by the names of a key map, tied ones each with its bytes."""
    notes: list[str] = []
    if opened.format.loads_by_dcp:
        named, _ = name_again(opened, naming, notes, choose="`ckpt extract SRC WEIGHTS {}`, and rename WEIGHTS")
    else:
        model, names = model_in(opened, "auto", notes)
        named = name_live(model, opened.own_assets, naming, opened.resolve)
        named = replace(named, sources={new: names.get(old, old) for new, old in named.sources.items()})
    if opened.format.loads_by_dcp and named.apart:
        what = f"the map joins or splits tensors that are sharded: {first_few([entry.fqn for entry in named.apart])}"
        where = opened.source.root
        raise UsageError(what, where=where, hint="`ckpt reshard SRC DST --map FILE --mesh …` cuts them anew")
    entries = {entry.fqn: entry for entry in named.checkpoint.tensors}
    copies = (replace(entries[fqn], fqn=alias, path=()) for alias, fqn in named.aliases.items())
    checkpoint = replace(named.checkpoint, tensors=(*named.checkpoint.tensors, *copies), blobs=())
    note = "; ".join(filter(None, (*notes, named.note)))
    return replace(named, checkpoint=checkpoint, note=note)


# The first layers of a model: which tensors are theirs, and the config of the model that they are

_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
"""Keys that configs have for the number of layers, by whatever name a class knows it."""
_PARTS = ("text_config", "llm_config", "language_config")
"""Where a model that also sees or hears keeps the config of its language model."""
_OTHERS = re.compile(r"vision|visual|audio|image|speech")


def first_layers(opened: Opened, num_layers: int) -> tuple[Checkpoint, AssetList, str]:
    """Return what the first layers of a model need, its files with a config for them, and what was done, for people.

    Everything outside of the layers stays.
    """
    where, assets = opened.source.root, opened.own_assets
    claim = claim_of(assets)
    expected = None if claim is None else load_table().expected(claim.architecture, claim.config)
    if claim is None or expected is None:
        what = f"no {CONFIG_NAME} beside the weights" if claim is None else f"{claim.architecture}, unknown to ckpt"
        raise UsageError(
            f"--layers needs the {CONFIG_NAME} of an architecture that ckpt knows, got {what}",
            where=where,
            hint="--include chooses tensors by their names; the config is then yours to cut",
        )
    stacks = {path: count for path, count in expected.counts.items() if not _OTHERS.search(path)}
    if len(stacks) != 1:
        what = f"{claim.architecture} has {len(stacks)} stacks of layers: {', '.join(stacks)}"
        raise UsageError(what, where=where, hint="--include chooses tensors by their names")
    ((path, count),) = stacks.items()
    if num_layers > count:
        raise UsageError(f"--layers {num_layers}, but {CONFIG_NAME} has {count}", where=where)
    in_layer = re.compile(r"(?:.*\.)?" + re.escape(path).replace(r"\*", r"(\d+)") + r"(?:\..*)?")
    numbers = {entry.fqn: found[1] for entry in opened.checkpoint.tensors if (found := in_layer.fullmatch(entry.fqn))}
    if not numbers:  # files whose names are not the live model's
        live = name_live(opened.checkpoint, assets, Naming(), opened.resolve).sources
        numbers = {own: found[1] for fqn, own in live.items() if (found := in_layer.fullmatch(fqn))}
    if not numbers:
        hint = "rename it to the model's own names first: `ckpt rename`"
        raise UsageError(f"no tensor is named {path}", where=where, hint=hint)
    tensors = tuple(e for e in opened.checkpoint.tensors if int(numbers.get(e.fqn, "0")) < num_layers)
    values: dict[str, Any] = copy.deepcopy(dict(claim.config))
    changed = sorted({key for part in _parts(values) for key in _cut(part, count, num_layers)})
    if not changed:
        raise UsageError(f"{CONFIG_NAME} does not record the number of layers", where=where)
    note = f"the first {num_layers} of {count} layers; {CONFIG_NAME} has new values of {', '.join(changed)}"
    return replace(opened.checkpoint, tensors=tensors), with_config(assets, values), note


def _parts(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield values
    yield from (part for key in _PARTS if isinstance(part := values.get(key), dict))


def _cut(part: dict[str, Any], count: int, num_layers: int) -> Iterator[str]:
    """Change a config to fewer layers; yield the keys that say so: their number, and lists that speak of each."""
    counts = [key for key in _COUNTS if part.get(key) == count]
    for key in counts:
        part[key] = num_layers
        yield key
    for key, value in part.items():
        if counts and isinstance(value, list) and len(value) == count and ("layer" in key or "block" in key):
            part[key] = value[:num_layers]
            yield key


# The weighted average of several checkpoints as one conversion of the first: the others are read beside it

_PIECE_ELEMS = 1 << 16
_BLOCK_BYTES = 24 << 20  # Of a worker beside its buffers: a block of each source, and one in float32
_LIBRARIES_BYTES = 64 << 20


def steps_of(weights: Sequence[float]) -> tuple[float, ...]:
    """Return by which part of its distance every source but the first moves the mean."""
    sums = list(accumulate(weights))
    return tuple(weight / total for weight, total in zip(weights[1:], sums[1:], strict=True))


def averaging_job(job: Job, others: Sequence[Opened], steps: Sequence[float]) -> Job:
    """Return the job that writes the average of what `job` would write and of others, with one step for each."""
    odd = {fqn for fqn, why in kept_by(job.opened, job.assets).items() if why != STATE}
    odd |= {entry.fqn for entry in packed_tensors(job.source)}
    odd |= {e.fqn for e in job.source.tensors if e.dtype.name[0] == "F" and not e.dtype.is_float}
    if packed := [e.fqn for e in job.source.tensors if {e.fqn, job.names.get(e.fqn)} & odd]:
        what = f"quantised weights cannot be averaged: {first_few(packed)}"
        where = job.opened.source.root
        raise UsageError(what, where=where, hint="`ckpt gather SRC DST --dequantize` each of them first")
    reading = Reading()
    besides: dict[str, list[PairedReader]] = {entry.fqn: [] for entry in job.source.tensors}
    for other in map(revealed, others):
        check_sealed(other)
        check_separate(other, job.destination)
        own = {id(entry) for entry in other.checkpoint.tensors}
        for fqn, entry in _paired(job, other).items():
            recorded = entry.fqn if id(entry) in own else ""
            besides[fqn].append(PairedReader(entry, other, reading, recorded))
    dtypes = {entry.fqn: entry.dtype for entry in job.target.tensors}
    full = [entry for entry in job.source.tensors if entry.num_elems]
    job.edits = {e.fqn: _Averaging(e, dtypes[e.fqn], tuple(besides[e.fqn]), tuple(steps), reading) for e in full}
    sources = [job.opened, *others]
    for other in others:
        for file in other.checkpoint.files:
            other.source.size(file)  # identities are of the files as they were opened
    job.recipe = digest_bytes(json.dumps([[s.source.identities() for s in sources], list(steps)]).encode())
    job.edit_bytes = _LIBRARIES_BYTES + job.num_workers * _BLOCK_BYTES
    averaged = sum(entry.dtype.is_float for entry in full)
    job.notes.append(f"averaged {averaged} tensors of {len(sources)} checkpoints in float32")
    if counters := [entry.fqn for entry in full if entry.num_elems == 1 and not entry.dtype.is_float]:
        job.notes.append(f"numbers that are not averaged, taken from the last: {first_few(counters)}")

    if factors := [entry.fqn for entry in full if is_factor(entry.fqn)]:
        text = f"the factors of an adapter were averaged one by one ({first_few(factors)}): their product is not the "
        job.warnings = (*job.warnings, f"{text}average of the adapters. Merge each into its base, and average those")

    def accept() -> None:
        for other in others:
            other.source.check_unchanged()
        for each in (one for some in besides.values() for one in some):
            job.ledger.held.update(each.ledger.held)
            job.ledger.missed.update(each.ledger.missed)

    job.accept = accept
    return job


def _paired(job: Job, other: Opened) -> dict[str, TensorEntry]:
    """Return the tensors of another checkpoint by the names of the job's source."""
    where = other.source.root
    ours, theirs = match_names(replace(job.opened, checkpoint=job.source), other, "auto")
    own = {id(entry) for entry in job.source.tensors}
    if any(id(entry) not in own for entry in ours.entries.values()):
        hint = "give both the same names: `ckpt gather`, or `ckpt rename`"
        raise UsageError("its names are not those of the first checkpoint's library", where=where, hint=hint)
    found = {entry.fqn: theirs.entries[name] for name, entry in ours.entries.items() if name in theirs.entries}
    missing = [entry.fqn for entry in job.source.tensors if entry.fqn not in found]
    used = {id(entry) for entry in found.values()}
    extra = [fqn for fqn, entry in theirs.entries.items() if id(entry) not in used]
    if missing or extra:
        parts = [f"{len(missing)} tensors of the first are missing: {first_few(missing)}"] * bool(missing)
        parts += [f"{len(extra)} are not in the first: {first_few(extra)}"] * bool(extra)
        raise UsageError("; ".join(parts), where=where, hint="`ckpt diff --keys-only` lists the names")
    for one in job.source.tensors:
        entry = found[one.fqn]
        if (one.shape, one.dtype) != (entry.shape, entry.dtype):
            here, first = (f"{each.dtype.name} {list(each.shape)}" for each in (entry, one))
            what = f"tensor {one.fqn!r} is {here}, but {first} in the first checkpoint"
            raise UsageError(what, where=where, hint="average checkpoints of one model and dtype")
    return found


@dataclass(frozen=True, slots=True)
class _Averaging:
    """Averages one tensor; see `moving.read.Edit`. What is no floating-point tensor must be the same in all."""

    entry: TensorEntry
    target: DType  # As what it is written
    others: tuple[PairedReader, ...]
    steps: tuple[float, ...]
    reading: Reading
    is_settled: bool = True

    def apply(self, block: Box, content: memoryview, result: memoryview) -> None:
        """Compute the new elements of a block."""
        if self.entry.dtype.is_float:
            self._average(block, content, result)
            return
        for other in self.others:
            theirs = other.read(block)
            if self.entry.num_elems == 1:
                result[:] = theirs
            elif bytes(theirs) != bytes(content):
                what = f"tensor {self.entry.fqn!r} of {self.entry.dtype.name} cannot be averaged, and differs"
                hint = "are these checkpoints of one model? Quantised weights must be decoded first "
                raise UsageError(what, where=other.root, hint=hint + "(`ckpt gather --dequantize`)")

    def _average(self, block: Box, content: memoryview, result: memoryview) -> None:
        import numpy as np

        from ckpt_tools.transfer.arrays import array_of
        from ckpt_tools.transfer.casting import cast_array

        dtype = self.entry.dtype
        kind = np.float64 if dtype.name == "F64" else np.float32
        first = array_of(content, dtype, (-1,))
        mean = np.frombuffer(self.reading.room.get(0, len(first) * np.dtype(kind).itemsize), kind)
        piece = np.empty(min(len(first), _PIECE_ELEMS), kind)
        places = [slice(at, at + _PIECE_ELEMS) for at in range(0, len(first), _PIECE_ELEMS)]
        with np.errstate(all="ignore"):
            cast_array(first, mean)
            for other, step in zip(self.others, self.steps, strict=True):
                values = array_of(other.read(block), dtype, (-1,))
                for place in places:
                    old = mean[place]
                    new = piece[: len(old)]
                    cast_array(values[place], new)
                    infinite = np.isinf(old)  # from there no number moves the mean
                    kept = old[infinite] + new[infinite] if infinite.any() else None
                    np.subtract(new, old, out=new)
                    np.multiply(new, kind(step), out=new)
                    np.add(old, new, out=old)
                    if kept is not None:
                        old[infinite] = kept
            cast_array(mean, array_of(result, self.target, (-1,)))

    def finish(self) -> None:
        """Hold what was read of the others against what is recorded of it."""
        for other in self.others:
            other.finish()


@takes(AverageOptions, 'ckpt_tools.average(["model", "tuned"], "soup").verified', "True")
def average(options: AverageOptions) -> Conversion:
    """Average the weights of several checkpoints (SWA, EMA, soups), streaming, in the format of the first.

    Arithmetic is float32 in the order of the sources, and rounds once.

    Raises:
        UsageError: The checkpoints differ in names, shapes or dtypes, or the weights are not as many.
        UnreadableError: One of them is incomplete or damaged.
        DestinationExistsError: The destination exists.
    """
    sources = [os.fspath(path) for path in options.sources]
    steps, said = _steps(options, len(sources))
    places = [os.path.realpath(path) for path in sources]
    if twice := [path for path, place in zip(sources, places, strict=True) if places.count(place) > 1]:
        raise UsageError("the same checkpoint is given twice", where=twice[0], hint="--weights says how much it counts")
    with ExitStack() as stack:
        first, *others = opened = [
            stack.enter_context(open_asking(path, format=options.format, as_part=options.as_part)) for path in sources
        ]
        for each in others:
            refuse_mixed(each)
        job = _own(first, options.destination, options)
        job.num_workers = options.num_workers or default_num_workers(*sources, computes=True)
        job = averaging_job(job, others, steps)
        names = map(os.path.basename, places)
        of = [{"name": name, "format": each.format.name} for name, each in zip(names, opened, strict=True)]
        job.made = {"averaged": {**said, "of": of}}
        result = run(job, dry_run=options.dry_run)
        return replace(result, bytes_read=result.bytes_read * len(sources))


def _steps(options: AverageOptions, count: int) -> tuple[tuple[float, ...], dict[str, object]]:
    """Return what `averaging_job` takes, and how the user said it."""
    if count < 2:
        raise UsageError("an average needs at least two checkpoints", hint="ckpt average A B DST")
    if options.ema is not None:
        if options.weights is not None:
            raise UsageError("--ema sets the weights itself", hint="leave out --weights")
        if not 0 < options.ema < 1:
            raise UsageError(f"--ema must be between 0 and 1, got {options.ema:g}", hint="0.99 is usual")
        return (1 - options.ema,) * (count - 1), {"ema": options.ema}
    weights = [1.0] * count if options.weights is None else _parse_weights(options.weights)
    if len(weights) != count:
        raise UsageError(f"--weights has {len(weights)} numbers for {count} checkpoints", hint="one for each, in order")
    return steps_of(weights), {"weights": [weight / math.fsum(weights) for weight in weights]}


def _parse_weights(text: str) -> list[float]:
    try:
        weights = [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--weights must be numbers, got {text!r}", hint="--weights 0.5,0.3,0.2") from None
    if not all(0 < weight < math.inf for weight in weights):
        raise UsageError("--weights must be positive", hint="leave out the checkpoint that should not count")
    if abs(math.fsum(weights) - 1) > 1e-6:
        raise UsageError(f"--weights must sum to 1, got {math.fsum(weights):g}", hint="--weights 0.5,0.3,0.2")
    return weights


@takes(ExtractOptions, 'ckpt_tools.extract("model", "embedding", include="**.embed_tokens.*").num_tensors', "1")
def extract(options: ExtractOptions) -> Conversion:
    """Write a part of a checkpoint, in its own format: chosen tensors, or a model of its first layers.

    Raises:
        UsageError: Nothing is chosen, or a glob matches nothing; no config to cut.
        UnreadableError: The source is incomplete or damaged.
        DestinationExistsError: The destination exists.
    """
    if not options.include and not options.exclude and options.layers is None:
        raise UsageError("nothing is selected to extract", hint="add --include GLOB, --exclude GLOB or --layers N")
    with open_asking(os.fspath(options.source), format=options.format, as_part=options.as_part) as opened:
        chosen, notes = opened.checkpoint, []
        assets: AssetList = opened.own_assets
        if options.layers is not None:
            chosen, assets, note = first_layers(opened, options.layers)
            notes = [note]
        own = Naming(names="auto" if opened.format.is_training else "live")
        also = {} if opened.format.loads_by_dcp else written_names(opened, "auto", assets, own)
        chosen = select(chosen, include=options.include, exclude=options.exclude, also=also)
        check_whole(opened, opened.own_assets, chosen.tensors, {})
        part = replace(opened, checkpoint=chosen, origin=None)
        job = _own(part, options.destination, options, only_model=options.layers is not None)
        choose(job, include=options.include, exclude=options.exclude, as_part=options.as_part)
        job.assets = assets
        job.notes += notes
        if not opened.format.loads_by_dcp:  # a trainer's names have prefixes
            check_names(job, [opened], allow_foreign=True, is_selection=bool(options.include or options.exclude))
        return run(job, dry_run=options.dry_run)


@takes(RenameOptions, 'ckpt_tools.rename("model", "renamed", map="names.txt").num_tensors', "21")
def rename(options: RenameOptions) -> Conversion:
    """Write a model's weights by other names, in its own format: renamed, joined or split as a key map says.

    `gather` with the same map, or the same `names`, is the way back.

    Raises:
        UsageError: The map does not fit the names, or there is other state than weights; not one of `map` and `names`.
        UnreadableError: The source is incomplete or damaged.
        DestinationExistsError: The destination exists.
    """
    if options.map is None and options.names is None:
        raise UsageError("no names to write are given", hint="add --map FILE or --names comfyui")
    naming = Naming.of(options.names or "auto", options.map)
    with open_asking(os.fspath(options.source), format=options.format, as_part=options.as_part) as opened:
        if options.names is not None:
            return run(_single_file(opened, options, naming), dry_run=options.dry_run)
        job = _own(opened, options.destination, options, named=renamed(opened, naming))
        job.not_checked = (*job.not_checked, "names were not compared with an architecture: they are the map's own")
        return run(job, dry_run=options.dry_run)


def _single_file(opened: Opened, options: RenameOptions, naming: Naming) -> Job:
    """Return the job that writes what ComfyUI loads: one file of any size, without diffusers' config."""
    if opened.format.loads_by_dcp:
        raise UsageError(f"--names {options.names} does not support DCP checkpoints", hint="`ckpt gather` it first")
    named = renamed(opened, naming)
    assets = tuple(asset for asset in named.checkpoint.assets if asset.file != CONFIG_NAME)
    named = replace(named, checkpoint=replace(named.checkpoint, assets=assets))
    options = replace(options, max_shard_size=options.max_shard_size or "1000000TB")
    return _own(opened, options.destination, options, named=named)


def _own(
    opened: Opened,
    destination: AnyPath,
    options: WritingOptions,
    *,
    only_model: bool = True,
    named: Named | None = None,
) -> Job:
    """Return the job that writes a checkpoint again, as the options say."""
    refuse_mixed(opened)
    job = rewrite_job(opened, os.fspath(destination), options, only_model=only_model, named=named)
    job.overwrite, job.progress = options.overwrite, options.progress
    job.keep_pickles = options.keep_pickles
    job.num_workers = options.num_workers or default_num_workers(opened.source.place, destination)
    return job
