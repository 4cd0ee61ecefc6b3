"""A conversion, ready to run: its parts, what is checked before anything is made, and what came of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpt_tools._version import __version__
from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.checkpoint.entries import Asset, Checkpoint, TensorEntry
from ckpt_tools.checkpoint.formats.digest import digest_bytes
from ckpt_tools.checkpoint.formats.manifest import MANIFEST_NAME, Origin
from ckpt_tools.checkpoint.formats.opening import Opened, check_candidates, read_document
from ckpt_tools.checkpoint.formats.step_layouts import is_part, note_reading
from ckpt_tools.checkpoint.formats.table import format_of
from ckpt_tools.checkpoint.globs import NameIndex, find_named
from ckpt_tools.checkpoint.identity import Identity
from ckpt_tools.checkpoint.layout import Mesh, Placement
from ckpt_tools.checkpoint.names.foreign import FLAT, FLAT_WAY, origins_of
from ckpt_tools.checkpoint.names.patterns import matches
from ckpt_tools.checkpoint.names.table import load_table
from ckpt_tools.checkpoint.quantised_units import find_units, grouped
from ckpt_tools.checkpoint.recorded_checks import Ledger
from ckpt_tools.checkpoint.transform import plain_names
from ckpt_tools.checks.values import packed_tensors
from ckpt_tools.errors import PartError, UnreadableError, UsageError
from ckpt_tools.models.config import CONFIG_NAME, MAX_CONFIG_BYTES, restate_dtype
from ckpt_tools.models.output_names import AssetList, claim_of
from ckpt_tools.results import Result, as_json
from ckpt_tools.storage.journal import JOURNAL_NAME
from ckpt_tools.storage.locations import is_remote, local
from ckpt_tools.storage.source import short_file
from ckpt_tools.storage.virtual import VirtualFile, VirtualSource
from ckpt_tools.text import counted, first_few
from ckpt_tools.transfer.execute import Progress
from ckpt_tools.transfer.plan import Seal, check_names
from ckpt_tools.transfer.quantised.decoded import is_told
from ckpt_tools.transfer.quantised.torchao import NUMBERS
from ckpt_tools.transfer.read import Edit
from ckpt_tools.transfer.split import Part
from ckpt_tools.transfer.value_counts import Counts, counts_to_json

DTYPES = ("keep", "bf16", "f16", "f32")  # Values of `--dtype`
_PART = "parts of quantised weights, which --dequantize decodes"
_UNKNOWN = "perhaps parts of weights: config.json calls the model quantised, and ckpt does not know them"
STATE = "not the model's: no option casts optimizer state"  # Why a tensor is not cast
_Names = Mapping[str, str]
_Tensors = Sequence[TensorEntry]
PART_NOTE = "one part of a step: scheduler, RNG and trainer state are in the directory above, and are not copied"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Conversion(Result):
    """What a conversion did, or with `dry_run` would do."""

    source: str
    destination: str
    num_tensors: int
    bytes_read: int
    bytes_written: int
    seconds: float
    peak_rss_bytes: int
    """Peak memory of this process (the plan's estimate with `dry_run`)."""
    files: tuple[tuple[str, int], ...]
    """(name, bytes) of everything that was written."""
    verified: bool
    """The result was opened again and checked, and everything that the source records of what was taken was held."""
    checked: Mapping[str, int]
    """How many of the source's recorded digests, CRC-32s, sizes and shapes were held."""
    notes: tuple[str, ...]
    """What was left out or decided, for people."""
    warnings: tuple[str, ...] = ()
    """What may be wrong with the result."""
    not_checked: tuple[str, ...] = ()
    """What nothing was known to hold it against; which recorded digests, CRC-32s, … were not held, and why."""
    counts: Mapping[str, Counts] = field(default_factory=dict)
    """FQN as written → what its values are like; in a step with its part's directory before it."""
    architecture: str | None = None
    """The architecture whose names all are written, and no others; None when they were not compared with one."""
    identity: Identity | None = None
    """What the source is."""
    dry_run: bool = False
    published: bool = True
    """False with `dry_run`, for a part while others are missing, and on the ranks of torchrun that leave publishing to
    the first."""
    part: Part | None = None
    """Which one of several processes this was."""
    waiting_for: tuple[int, ...] = ()
    """The parts that are missing."""

    @property
    def title(self) -> str:
        """What became of the destination."""
        done = "published" if self.published else "written, not published yet"
        return "dry run, nothing written" if self.dry_run else done

    @property
    def throughput_bytes_per_s(self) -> float:
        """Bytes written per second."""
        return self.bytes_written / self.seconds if self.seconds > 0 else 0.0

    def to_json(self) -> dict[str, object]:
        """Return it as JSON holds it."""
        document = as_json(self, "source destination num_tensors")
        if self.dry_run:
            files = [{"file": name, "nbytes": nbytes} for name, nbytes in self.files]
            document["plan"] = {"files": files, **as_json(self, "bytes=bytes_written peak_bytes=peak_rss_bytes")}
        else:
            document |= as_json(self, "bytes_read bytes_written")
            document |= {
                "seconds": round(self.seconds, 3),
                "throughput_bytes_per_s": round(self.throughput_bytes_per_s),
                "peak_rss_bytes": self.peak_rss_bytes,
                "files": [name for name, _ in self.files],
                **as_json(self, "verified checked"),
                "values": counts_to_json(self.counts),
            }
        if self.part is not None:
            document |= as_json(self, "part published waiting_for")
        return document | as_json(self, "architecture identity notes warnings not_checked")


@dataclass(slots=True, kw_only=True)
class Job:
    """One conversion, ready to run."""

    opened: Opened
    source: Checkpoint  # Selected and renamed, chunks raw
    target: Checkpoint
    destination: str
    heads: Mapping[str, bytes] = field(default_factory=dict)  # File → fixed bytes at its beginning
    seals: Mapping[str, Seal] = field(default_factory=dict)
    """File → what closes it, where it holds the CRC-32s of its payloads."""
    documents: Mapping[str, bytes] = field(default_factory=dict)  # Small files to write before the manifest (an index)
    assets: AssetList = ()
    dtype: str = "keep"  # What `--dtype` said: beside weights that were cast, the config names their new dtype
    rewritten: Mapping[str, bytes] = field(default_factory=dict)
    """Asset → what is written in its place (see `rewrite_assets`)."""
    names: Mapping[str, str] = field(default_factory=dict)
    """FQN in the destination → FQN in the source, where they differ; "" for what is joined, or a part."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further FQN in the destination → FQN there of the same bytes: tied weights."""
    apart: Sequence[TensorEntry] = ()
    """Tensors of the opened checkpoint that are written in parts: what is recorded of them is checked by itself."""
    origin: Origin | None = None
    mesh: Mesh | None = None
    placements: Mapping[str, Mapping[str, Placement]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    warnings: Sequence[str] = ()
    not_checked: Sequence[str] = ()
    ledger: Ledger = field(default_factory=Ledger)
    """What sources record of what is read, settled once the bytes are written."""
    counts: Mapping[str, Counts] = field(default_factory=dict)  # As in `Conversion`, once the bytes are written
    architecture: str | None = None  # As in `Conversion`
    edits: Mapping[str, Edit] = field(default_factory=dict)  # FQN in `source` → what changes its elements on their way
    recipe: str = ""  # Identifies what `edits` do, down to the last bit of the result
    made: Mapping[str, object] = field(default_factory=dict)
    """What the manifest says, beside what the source was, of what was done to it."""
    edit_bytes: int = 0  # Memory that `edits` need beside the buffers, at most; for the estimate of a dry run
    prepare: Callable[[], None] | None = None
    """Called when the job is sound and before anything is written, to begin what runs beside and set `recipe`."""
    accept: Callable[[], None] | None = None
    """Called when every byte is written and before anything is published; raises to refuse the result."""
    parts: Mapping[str, Job] = field(default_factory=dict)
    """Directory inside the destination → what is built there: the parts of a step, published with the rest at once."""
    part: Part | None = None
    """Which one of several processes this is: it writes its files, and the last one publishes them all."""
    only_commit: bool = False  # Write no part: publish what all have written
    command: str = ""  # What was asked for, in JSON; for `ckpt commit`
    overwrite: bool = False
    keep_pickles: bool = False
    use_dtensor: bool = False  # Write the data files through torch (`--engine dtensor`) instead of the executor
    num_workers: int = 1
    progress: Callable[[int], Progress] | None = None  # Given the bytes to move, returns what reports them

    @property
    def named(self) -> Checkpoint:
        """The target with every further name."""
        entries = {entry.fqn: entry for entry in self.target.tensors}
        further = (replace(entries[fqn], fqn=alias, path=()) for alias, fqn in self.aliases.items())
        return replace(self.target, tensors=(*self.target.tensors, *further))


def choose(job: Job, **options: object) -> None:
    """Let the manifest say that tensors are left out on purpose, by the options that are given."""
    given = [f"--{name.replace('_', '-')}" for name, value in options.items() if value]
    if chosen := " ".join(given) or job.opened.identity.chosen:
        for each in (job, *job.parts.values()):
            each.made = {**each.made, "chosen": chosen}


def notes_on(opened: Opened) -> list[str]:
    """Say what a user should know of the source: what is not carried along, and what had to be believed."""
    notes = []
    if opened.identity.whole == "part":
        notes.append(f"a part of a model, used as it is: {opened.identity.evidence[0]}")
    notes += [f"not used: {each.name} ({each.why})" for each in opened.candidates if not each.is_taken]
    if opened.left_out:
        left_out = first_few(opened.left_out, limit=4)
        notes.append(f"left out, as weights in another format or of another model: {left_out}")
    if opened.step is not None:
        notes.append(note_reading(opened.step))
    elif is_part(os.path.basename(opened.checkpoint.root)):
        notes.append(PART_NOTE)
    notes += [f"left out, {what}" for what in opened.unread]
    return [*notes, *opened.notes, *opened.format.caveats]


def check_claims(job: Job) -> None:
    """Compare what the source says of files and lengths with its files, before anything is made to measure."""
    check_candidates(job.opened.candidates, job.opened.source.root)
    step = job.opened.step
    if step is not None and step.has_own and not job.parts:
        what = f"{step.title} of {len(step.parts)} models, which this command would separate"
        hint = f"--from {job.opened.format.name} reads only the one at the top"
        raise UnreadableError(what, where=job.opened.source.root, hint=hint)
    own = [job.names.get(entry.fqn, entry.fqn) for entry in job.target.tensors]
    if flat := [name for name in own if "flat_param" in name and origins_of([name])]:
        raise PartError(f"{FLAT}: {first_few(flat)}", where=job.opened.source.root, hint=FLAT_WAY)
    if flattened := sorted(job.opened.flattened.intersection(own)):
        raise UsageError(
            f"{len(flattened)} tensors are flat ranges of blocks, and only Megatron's metadata beside "
            f"them records their tensors: {first_few(flattened)}",
            where=job.opened.source.root,
            hint="leave them out: --exclude 'optimizer.**'",
        )
    names = [*job.target.files, *job.documents, MANIFEST_NAME, JOURNAL_NAME, *(asset.file for _, asset in job.assets)]
    marker = format_of(job.target).marker
    check_names([*names, marker] if marker else names)
    for source, asset in job.assets:
        found = source.size(asset.source_file)
        if found != asset.nbytes:
            what = f"the file has {found} bytes, {asset.nbytes} were recorded"
            hint = f"restore it, or remove {MANIFEST_NAME} to continue without its records"
            raise UnreadableError(what, where=os.path.join(source.root, asset.source_file), hint=hint)
    for blob in job.source.blobs:
        found = job.opened.source.size(blob.span.file)
        if blob.span.offset + blob.span.nbytes > found:
            where = os.path.join(job.opened.source.root, blob.span.file)
            raise short_file(where, blob.span.offset, blob.span.nbytes, found, what=f"item {blob.fqn!r}: ")


def rewrite_assets(job: Job) -> None:
    """Decide what is written in place of assets that would not be true any more, and say so in the job's notes.

    That is the model's config, when the weights are cast: transformers loads in the dtype that it names.
    """
    for source, asset in job.assets:
        if job.dtype == "keep" or asset.file != CONFIG_NAME:
            continue
        wanted = BY_NAME[job.dtype.upper()]
        try:
            restated = restate_dtype(read_document(source, asset.file, MAX_CONFIG_BYTES), wanted)
        except UnreadableError as error:
            job.notes.append(
                f"{CONFIG_NAME} is copied unchanged, and may not name the dtype that the weights have now: {error.what}"
            )
            continue
        if restated is not None:
            job.rewritten = {**job.rewritten, asset.file: restated.text}
            before = " and ".join(map(repr, restated.before))
            job.notes.append(f"{CONFIG_NAME} now has {wanted.torch_name!r}, not {before}: the weights were cast")


def fingerprint(job: Job, metadata: bytes) -> str:
    """Return what identifies this conversion: the source as it is now, where every byte goes, and as what."""
    source = job.opened.source
    for file in job.opened.checkpoint.files:
        source.size(file)
    dtypes = {entry.fqn: entry.dtype.name for entry in job.source.tensors}
    parts = {fqn for fqn, name in job.names.items() if not name}
    state = (
        __version__,
        source.place,
        source.identities(),
        [(t.fqn, job.names.get(t.fqn), t.dtype.name, dtypes[t.fqn], t.shape) for t in job.target.tensors],
        [[[c.span.file, c.span.offset, c.box.offsets] for c in t.chunks] for t in job.source.tensors if t.fqn in parts],
        list(job.target.files.items()),
        [(name, digest_bytes(content)) for name, content in (*job.heads.items(), *job.documents.items())],
        [(asset.file, asset.source_file, asset.nbytes) for _, asset in job.assets],
        [(name, digest_bytes(content)) for name, content in job.rewritten.items()],
        digest_bytes(metadata),
        sorted(job.edits),
        job.recipe,
        [
            (name, fingerprint(part, format_of(part.target).build_marker(part.named)))
            for name, part in job.parts.items()
        ],
    )
    return digest_bytes(json.dumps(state).encode())


def check_separate(opened: Opened, destination: str) -> None:
    """Refuse a destination inside the source, or around it: the source is never written to.

    A source that is one file has no inside: the destination may lie beside it.
    """
    name = next(iter(opened.checkpoint.files)) if opened.format.is_file else ""
    if is_remote(destination):
        source, target = os.path.join(opened.source.place, name).rstrip("/"), destination.rstrip("/")
    else:
        source = os.path.realpath(os.path.join(opened.source.place, name))
        target = os.path.realpath(local(destination))
    if target == source or target.startswith(source + os.sep) or source.startswith(target + os.sep):
        what = "source and destination must not contain each other"
        where = f"{opened.source.root} and {destination}"
        raise UsageError(what, where=where, hint="choose a destination beside the source")


def kept_by(opened: Opened, assets: AssetList) -> dict[str, str]:
    """Return tensor → why it is cast and averaged with nothing.

    It is not the model's, or a part of a quantised weight; or, where a config says that there are such, it is neither
    called weight or bias nor known to the architecture: perhaps a scale or a code book.
    """
    checkpoint = opened.checkpoint
    plain = {entry.fqn: name for name, entry in plain_names(checkpoint).items()}
    kept = {entry.fqn: STATE for entry in checkpoint.tensors if entry.fqn not in plain}
    if told := is_told(opened, assets):
        claim = claim_of(assets)
        known = None if claim is None else load_table().expected(claim.architecture, claim.config)
        packed = {entry.fqn for entry in packed_tensors(checkpoint)}
        for fqn, name in plain.items():
            is_known = known is not None and matches(known.names, name, known.counts)
            if fqn in packed or not (is_known or name.endswith(("weight", "bias"))):
                kept[fqn] = _UNKNOWN
    return kept | dict.fromkeys(find_units(checkpoint.tensors, is_told=told), _PART)


def check_whole(
    opened: Opened, assets: AssetList, written: _Tensors, names: _Names, apart: _Tensors = (), has_headers: bool = False
) -> None:
    """Refuse, with a UsageError, to part a quantised weight, or to name its parts so that they are no longer one's.

    `names` has the names in the source of what is written, where they differ, "" for what is joined or a part; `apart`
    are those tensors. torchao's weights also need the headers of their files.
    """
    told = is_told(opened, assets)
    before = grouped(find_units(opened.checkpoint.tensors, is_told=told))
    own = {entry.fqn: names.get(entry.fqn, entry.fqn) for entry in written}
    touched = {*own.values(), *(entry.fqn for entry in apart)}
    whole = {frozenset(own[n] for n in parts) for parts in grouped(find_units(written, is_told=told)).values()}
    headed = set() if has_headers else {name for name in touched if name.endswith(NUMBERS)}
    if torn := [w for w, parts in before.items() if parts & touched and (parts not in whole or parts & headed)]:
        what = "torchao needs the header of their file, which is not written" if headed else "written in part or apart"
        hint = f"`gather --dequantize` decodes them; together lie {first_few(sorted(before[torn[0]]), 8)}"
        raise UsageError(f"quantised weight {first_few(torn)}: {what}", where=opened.source.root, hint=hint)


def shown_names(written: Iterable[TensorEntry], sources: _Names) -> dict[str, tuple[str, ...]]:
    """Return the names of tensors as written, and in the source ("" there for what is joined, or a part)."""
    return {e.fqn: tuple(filter(None, (e.fqn, sources.get(e.fqn)))) for e in written}


def cast_target(
    opened: Opened,
    checkpoint: Checkpoint,
    dtype: str,
    dtype_for: Sequence[str],
    names: _Names,
    assets: AssetList,
    before: _Names | None = None,
) -> tuple[Checkpoint, list[str]]:
    """Return `checkpoint` with the model's plain floating-point tensors (F64, F32, F16, BF16) as `dtype`, and notes.

    `dtype_for` are "GLOB=DTYPE", of which the first that matches decides, by the name that is written or that of the
    source; `names` are as of `check_whole`, `before` those of the files where `opened` was renamed.
    """
    if dtype not in DTYPES:
        raise UsageError(f"{dtype!r} is not a dtype", hint=f"--dtype takes {', '.join(DTYPES)}")
    rules = list(map(_parse_dtype_for, dtype_for))
    if dtype == "keep" and not rules:
        return checkpoint, []
    kept = kept_by(opened, assets)
    floats = {e.fqn: kept.get(names.get(e.fqn, e.fqn), "") for e in checkpoint.tensors if e.dtype.is_float}
    shown = NameIndex(shown_names(checkpoint.tensors, names if before is None else before))
    chosen: dict[str, str] = {}
    for text, (glob, name) in zip(dtype_for, rules, strict=True):
        found = find_named(f"--dtype-for {text}", glob, shown)
        if all(floats.get(fqn, "not floating-point") for fqn in found):
            what = floats.get(min(found), "not floating-point")
            hint = "leave it out, or match others: `ckpt inspect SRC --tensors` lists names and dtypes"
            raise UsageError(f"--dtype-for {text} matches no tensor to cast: {min(found)!r} is {what}", hint=hint)
        chosen = dict.fromkeys(found, name) | chosen
    left: dict[str, list[str]] = {}
    tensors = []
    for entry in checkpoint.tensors:
        name = chosen.get(entry.fqn, dtype)
        is_cast = entry.dtype.is_float and name not in ("keep", entry.dtype.name.lower())
        if is_cast and (why := floats[entry.fqn]):
            left.setdefault(why, []).append(entry.fqn)
            is_cast = False
        tensors.append(replace(entry, dtype=BY_NAME[name.upper()]) if is_cast else entry)
    notes = [f"not cast: {counted(len(fqns), 'tensor')}, {why}: {first_few(fqns)}" for why, fqns in left.items()]
    return replace(checkpoint, tensors=tuple(tensors)), notes


def _parse_dtype_for(text: str) -> tuple[str, str]:
    glob, found, dtype = text.rpartition("=")
    if not found or not glob or dtype not in DTYPES:
        what = f"--dtype-for takes GLOB=DTYPE with one of {', '.join(DTYPES)}, got {text!r}"
        raise UsageError(what, hint="--dtype-for '**norm**=f32'")
    return glob, dtype


def with_config(assets: AssetList, values: Mapping[str, object]) -> AssetList:
    """Return a model's files with another config.json in place of the one among them."""
    text = (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()
    files, made = {CONFIG_NAME: VirtualFile.of(text)}, Asset(file=CONFIG_NAME, nbytes=len(text))
    return [
        (VirtualSource(source, files), made) if asset.file == CONFIG_NAME else (source, asset)
        for source, asset in assets
    ]
