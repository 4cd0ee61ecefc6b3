"""Check a checkpoint and say everything that is wrong, and what was not looked at."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

from ckpt_tools.checkpoint.entries import (
    MAX_ELEMS,
    BlobEntry,
    ByteSpan,
    Census,
    Checkpoint,
    Finding,
    Severity,
    TensorEntry,
    say_census,
)
from ckpt_tools.checkpoint.formats.blob_contents import look_into
from ckpt_tools.checkpoint.formats.identify import HOLLOW
from ckpt_tools.checkpoint.formats.judge_step import PICKLE, StepVerdict
from ckpt_tools.checkpoint.formats.opening import Opened
from ckpt_tools.checkpoint.formats.scan import with_executables
from ckpt_tools.checkpoint.formats.step import judge
from ckpt_tools.checkpoint.formats.step_layouts import note_reading
from ckpt_tools.checkpoint.formats.torch_zip import check_archive
from ckpt_tools.checkpoint.formats.trainer_contracts import MODEL
from ckpt_tools.checkpoint.identity import Identity
from ckpt_tools.checkpoint.layout import Mesh
from ckpt_tools.checkpoint.names.foreign import FLAT, FLAT_WAY
from ckpt_tools.checks.checksums import check_blobs, check_data, firsts
from ckpt_tools.checks.structure import Lost, check_structure, equal_layouts, is_inside
from ckpt_tools.checks.values import check_values, unseen_values
from ckpt_tools.errors import UnreadableError
from ckpt_tools.options.common import Level, Purpose
from ckpt_tools.results import CheckedResult, as_json, plain
from ckpt_tools.text import counted, escape_name, first_few, natural_key, natural_order
from ckpt_tools.transfer.execute import Outcome, Progress
from ckpt_tools.transfer.split import Part, own_tensors
from ckpt_tools.transfer.task import Look
from ckpt_tools.transfer.value_counts import Counts, counts_to_json
from ckpt_tools.units import format_size

# What of every file was read, and what was not and why: no file of a checkpoint goes without a word


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Bytes of a file that were read, or were not."""

    file: str
    nbytes: int
    why: str = ""  # They were not


def account(
    opened: Opened,
    readable: Iterable[TensorEntry],
    scanned: Sequence[TensorEntry],
    blobs: Sequence[BlobEntry],
    lost: Lost,
    proven: Collection[str] = (),
) -> tuple[tuple[Extent, ...], tuple[Extent, ...]]:
    """Return what was read beside the headers of data files, and what was not.

    `scanned` has the first of each set of replicas, and nothing at level structure; `proven` are files whose own sums
    hold.
    """
    done = {chunk.span for entry in scanned for chunk in firsts(entry)}
    read, left = Counter[str](), lost.copy()
    unread = "a copy of it was read, or another part reads it (--part)" if scanned else "only headers were read"
    for span in {chunk.span for entry in readable for chunk in entry.chunks if chunk.span.nbytes}:
        if span in done:
            read[span.file] += span.nbytes
        else:
            left[span.file, unread] += span.nbytes
    for blob in blobs:
        read[blob.span.file] += blob.span.nbytes if is_inside(opened, blob.span) else 0
    if not opened.format.is_file:
        data = {name.partition("#")[0] for name in opened.checkpoint.files}
        assets = {} if opened.manifest is None else opened.manifest.assets
        held = assets.keys() if scanned or blobs else set()
        unsure = ({each.file for each in opened.companions} | assets.keys()) - held - set(proven)  # perhaps looked into
        used = opened.source.identities().keys() - unsure
        for file, nbytes in opened.source.list_files(max_depth=0 if opened.format.has_parts else 3).items():
            if file in opened.left_out:
                left[file, "weights beside those that were checked"] = nbytes
            elif file not in data and file in used:
                read[file] = nbytes
            elif file not in data:
                left[file, unread if file in assets else "nothing records what it should hold"] = nbytes
    return (
        tuple(Extent(file=file, nbytes=read[file]) for file in sorted(read, key=natural_key)),
        tuple(Extent(file=f, nbytes=left[f, why], why=why) for f, why in sorted(left, key=lambda k: natural_key(k[0]))),
    )


def describe(extents: Iterable[Extent], most: int) -> Iterator[str]:
    """Yield a line for the files of each reason, with the names of at most so many."""
    groups: dict[str, dict[str, int]] = {}
    for each in extents:
        groups.setdefault(each.why, {})[each.file] = each.nbytes
    for why, files in groups.items():
        yield f"{counted(len(files), 'file')}, {format_size(sum(files.values()))}: {why} ({first_few(files, most)})"


# Check that a step has what the trainer that saved it resumes from, and that all of it is of one step

_WEIGHTS = "restore it; --for weights checks the weights alone"


def check_beside(opened: Opened) -> tuple[list[Finding], set[str]]:
    """Return the pickles beside a model of which a byte has changed, and those that their own sums prove."""
    found, proven = [], set()
    known = {*opened.checkpoint.files, *(() if opened.manifest is None else opened.manifest.assets)}
    for name, nbytes in ({} if opened.format.is_file else opened.source.list_files(max_depth=1)).items():
        if PICKLE.fullmatch(name) and nbytes and name not in known:
            try:
                if check_archive(nbytes, partial(opened.source.read, name)):
                    proven.add(name)
            except UnreadableError as error:
                found.append(Finding.error("damaged-file", name, error.what, "restore it", file=name))
    return found, proven


def check_trainer(opened: Opened, purpose: Purpose | None, verdict: StepVerdict) -> Iterator[Finding]:
    """Yield what the trainer would look for in vain, and what is of another step; by default as it was saved to be."""
    for one, other in verdict.mixed:
        hint = "restore the files of one save: a trainer that resumes from it mixes two"
        yield Finding.error("mixed-steps", one.file, f"not of one step: {one}, {other}", hint)
    if purpose == "weights":
        lost = [each for each in verdict.reasons if each.of == MODEL and each.is_sure]
        yield from (Finding.error("lost-weights", each.file, each.what, "restore it") for each in lost)
        return
    for reason in verdict.reasons:
        if opened.broken and reason.file.rpartition("/")[2].startswith("optim"):
            continue  # which is said already
        what = f"{reason.what}: {reason.does}"
        is_error = reason.is_sure or (purpose == "resume" and "stops" in reason.does)
        make = Finding.error if is_error else Finding.warning
        yield make("not-resumable" if is_error else "may-not-resume", escape_name(reason.file), what, _WEIGHTS)
    if verdict.is_weights_only and (opened.format.has_parts or purpose):
        make = Finding.info if purpose is None else Finding.error
        code = "weights-only" if purpose is None else "not-resumable"
        yield make(code, opened.source.root, "weights alone, to start from and not to resume from")


# Findings put together by what brought them about: a missing file is one cause, whatever lay in it

_ORDER: Sequence[Severity] = ("error", "warning", "info")
OTHER_MODEL = "other-model"
_OF_ANOTHER = ("missing-tensor", "extra-tensor", "different-tensor")  # Findings that another model explains


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """What brought findings about."""

    code: str
    severity: Severity
    what: str  # Where, how many tensors, and what is wrong with them, in one line
    hint: str | None
    findings: tuple[int, ...]  # Their places in the list of findings


def find_causes(
    findings: Sequence[Finding], num_tensors: int, read: Iterable[Extent], not_read: Iterable[Extent]
) -> tuple[Cause, ...]:
    """Put findings together that have the same code and place; errors come first."""
    lost = {each.file: each.nbytes for each in not_read}
    total = sum(lost.values()) + sum(each.nbytes for each in read)
    groups: dict[tuple[Severity, str, str], list[int]] = {}
    others = {each.where for each in findings if each.code == OTHER_MODEL}
    for number, each in enumerate(findings):
        code = OTHER_MODEL if each.where in others and each.code in _OF_ANOTHER else each.code
        groups.setdefault((each.severity, code, each.file or each.where), []).append(number)
    causes = []
    for (severity, code, place), numbers in sorted(groups.items(), key=lambda item: _ORDER.index(item[0][0])):
        group = [findings[number] for number in numbers]
        what = f"{group[0].where}: {group[0].what}"
        if len(group) > 1 and code != OTHER_MODEL:
            named = [each for each in group if each.tensor is not None]
            names = {each.tensor for each in named}
            facts = [
                escape_name(place),
                f"in {len(names):,} of {counted(num_tensors, 'tensor')}" if names else counted(len(group), "finding"),
            ]
            if code in ("missing-file", "short-file") and place in lost:
                facts.append(f"{format_size(lost[place])} of {format_size(total)}")
            tails = {each.what.removeprefix(f"tensor {each.tensor!r}").lstrip(": ") for each in named or group}
            what = f"{', '.join(facts)}: {tails.pop() if len(tails) == 1 else f'the first: {group[0].what}'}"
        causes.append(Cause(code=code, severity=severity, what=what, hint=group[0].hint, findings=tuple(numbers)))
    return tuple(causes)


Looks = Callable[[Opened, Sequence[TensorEntry]], Mapping[str, Sequence[Look]]]
"""Given what is open and the tensors that are about to be read: FQN → who sees the elements as they pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unchecked:
    """What a level or a checkpoint leaves unchecked."""

    what: str
    copy_tells: bool = False  # Comparing another copy bit for bit checks it
    part: str = ""  # The part of a step that it is about


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Verification(CheckedResult):
    """What `verify` found."""

    level: Level
    tensors: int
    """Tensors looked at."""
    chunks: int
    """Chunks looked at."""
    nbytes: int
    """Bytes of tensor data whose content was checked."""
    unchecked: tuple[Unchecked, ...]
    findings: tuple[Finding, ...]
    counts: Mapping[str, Counts] = field(default_factory=dict)
    """FQN → what the values are like, at level values; in a step with its part's directory before it."""
    files: tuple[str, ...] = ()
    """The files that its tensors lie in, or should; in a step with their part's directory before them."""
    mesh: Mesh | None = None
    """The ranks that wrote them, where a manifest says; of a step none."""
    identities: tuple[Identity, ...] = ()
    """What it is, and what it was compared with."""
    share: Part | None = None
    """Whose tensors' bytes were read, where several processes check one checkpoint: what is right is no more than these
    and the structure."""
    read: tuple[Extent, ...] = ()
    """What was read of each file, beside headers."""
    not_read: tuple[Extent, ...] = ()
    """What was not, and why; files that ckpt does not understand among them."""
    has: frozenset[str] = frozenset()
    """What its trainer finds there, in words."""
    objects: Census = field(default_factory=Counter)
    """What non-tensor items, and files of objects, hold, as `Summary.census`; what it means was not checked."""

    @property
    def causes(self) -> tuple[Cause, ...]:
        """The findings by what brought them about, errors first."""
        read, not_read = ([each for each in some if each.file in self.files] for some in (self.read, self.not_read))
        return find_causes(self.findings, self.tensors, read, not_read)

    @property
    def not_checked(self) -> tuple[str, ...]:
        """What this level or this checkpoint leaves unchecked, in words."""
        return tuple(each.what for each in self.unchecked)

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that fail the check."""
        return tuple(finding for finding in self.findings if finding.severity == "error")

    @property
    def title(self) -> str:
        """Its state, and how much that says."""
        level = "headers only" if self.level == "structure" else f"level {self.level}"
        return f"{'ok' if self.ok else 'NOT ok'} ({level})"

    def to_json(self) -> dict[str, object]:
        """Return it as JSON holds it."""
        values = counts_to_json(self.counts) if self.level == "values" else None
        return {
            **as_json(self, "ok identities level"),
            **({} if self.share is None else {"part": asdict(self.share)}),
            "checked": as_json(self, "tensors chunks bytes=nbytes") | {"values": values},
            **as_json(self, "objects not_checked"),
            "read": [as_json(each, "file bytes=nbytes") for each in self.read],
            "not_read": [as_json(each, "file bytes=nbytes why") for each in self.not_read],
            "causes": [{**asdict(cause), "count": len(cause.findings)} for cause in self.causes],
            "findings": plain(self.findings),
        }


def verify(
    opened: Opened,
    *,
    level: Level,
    num_workers: int,
    progress: Progress | None = None,
    share: Part | None = None,
    purpose: Purpose | None = None,
    looks: Looks | None = None,
) -> Verification:
    """Check `opened` at `level`; with a `share`, the bytes of its tensors (and the first one those of other files).

    Structure: every element in exactly one chunk, every span inside its file, the items' headers and the
    manifest as the metadata says, no unknown data files. Data: also every byte, against the CRC-32s and
    digests that were recorded. Values: also what the numbers are like, finite or not.
    """
    findings = [*_part_findings(opened)]
    checkpoint, sound, partial, lost = check_structure(opened, findings)
    readable = (*sound, *partial)
    unchecked: list[Unchecked] = []
    companions: list[Finding] = []
    proven: set[str] = set()
    counts: Mapping[str, Counts] = {}
    nbytes = 0
    objects = checkpoint.objects
    if level == "structure":
        unchecked.append(Unchecked(what="the bytes of the tensors (use --level data)"))
        if checkpoint.blobs:
            items = counted(len(checkpoint.blobs), "non-tensor item")
            unchecked.append(Unchecked(what=f"what {items} hold (use --level data)"))
    else:
        damaged: set[str] = set()
        is_first = share is None or share.index == 0
        if share is not None:
            own = own_tensors(sound, share)
            other = "" if is_first else ", and other files and items"
            text = f"the bytes of {len(sound) - len(own):,} of {len(sound):,} tensors{other}: the other parts' (--part)"
            unchecked.append(Unchecked(what=text))
            sound, partial = list(own), partial if is_first else []
            names = {entry.fqn for entry in sound}
            chosen = tuple(entry for entry in checkpoint.tensors if entry.fqn in names)
            checkpoint = replace(checkpoint, tensors=chosen, blobs=checkpoint.blobs if is_first else ())
        extra = opened if is_first else _without_files(opened)
        outcome = check_data(
            extra,
            checkpoint,
            sound,
            partial,
            findings,
            damaged,
            counting=level == "values",
            num_workers=num_workers,
            progress=progress,
            looks=None if looks is None else looks(opened, sound),
        )
        companions, proven = check_beside(opened) if is_first else ([], set())
        nbytes = sum(entry.nbytes for entry in sound)
        nbytes += sum(chunk.span.nbytes for entry in partial for chunk in firsts(entry))
        unchecked += _unchecked_chunks(opened, [*sound, *partial], outcome, damaged)
        if is_first and (unsummed := check_blobs(opened, findings)):
            what = (
                f"what {unsummed:,} of {len(opened.checkpoint.blobs):,} non-tensor items hold, which have no checksum"
            )
            unchecked.append(Unchecked(what=what))
        held = look_into((blob for blob in checkpoint.blobs if is_inside(opened, blob.span)), opened.source)
        objects = sum((each.census for each in held.values()), objects)
        if holding := [f"{fqn} ({say_census(each.census)})" for fqn, each in held.items() if each.census]:
            unchecked.append(Unchecked(what=f"what non-tensor items mean, beyond their bytes: {first_few(holding)}"))
        counts = outcome.counts
        if level == "values":
            judged = tuple(natural_order(sound, lambda entry: entry.fqn))
            findings += check_values(opened, replace(checkpoint, tensors=judged), counts)
        unchecked += _unseen_values(checkpoint, level)
    if opened.single_names:
        single = counted(opened.single_names, "name")
        unchecked.append(Unchecked(what=f"{single} that .metadata stores only once"))
    unchecked += _unknown_places(opened)
    if opened.step is not None:
        unchecked.append(Unchecked(what=note_reading(opened.step)))
    scanned, blobs = ((), ()) if level == "structure" else ((*sound, *partial), checkpoint.blobs)
    read, not_read = account(opened, readable, scanned, blobs, lost, proven)
    opened, dangers = with_executables(opened)  # opens files that nothing else reads, and so does the judge of a step
    verdict = judge(opened)
    findings += [*dangers, *check_trainer(opened, purpose, verdict)]
    findings += [each for each in companions if not any(known.where.endswith(each.where) for known in findings)]
    unchecked += [Unchecked(what=what) for what in (*opened.format.unchecked, *opened.unread)]
    return Verification(
        level=level,
        tensors=len(checkpoint.tensors),
        chunks=sum(len(entry.chunks) for entry in checkpoint.tensors),
        nbytes=nbytes,
        unchecked=tuple(unchecked),
        findings=tuple(natural_order(findings, _place)),
        counts={fqn: counts[fqn] for fqn in natural_order(counts)},
        files=tuple(sorted({c.span.file for entry in checkpoint.tensors for c in entry.chunks}, key=natural_key)),
        mesh=checkpoint.mesh,
        share=share,
        identities=(opened.identity,),
        read=read,
        not_read=not_read,
        has=verdict.has,
        objects=objects,
    )


def _place(finding: Finding) -> str:
    """Return what puts findings of a kind together, by their numbers."""
    return f"{finding.severity} {finding.code} {finding.where} {finding.tensor or ''}"


def _part_findings(opened: Opened) -> Iterator[Finding]:
    """Yield that it is a known part of a model; of lost files, structure says more."""
    if opened.identity.whole == "part" and not opened.lost:
        root, chosen = opened.source.root, opened.identity.chosen
        if opened.identity.hollow:
            yield Finding.error("hollow", root, opened.identity.hollow, HOLLOW)
            return
        for what in opened.identity.evidence:
            if chosen:
                yield Finding.info("part-of-a-model", root, f"on purpose ({chosen}): {what}")
            else:
                way = FLAT_WAY if what == FLAT else "restore or fetch the rest of the model"
                yield Finding.error("part-of-a-model", root, what, way)


def _without_files(opened: Opened) -> Opened:
    """Return a checkpoint of which nothing but tensors is read: the rest is another part's."""
    manifest = opened.manifest
    return replace(opened, sums=(), manifest=None if manifest is None else replace(manifest, assets={}))


def _unseen_values(checkpoint: Checkpoint, level: Level) -> Iterator[Unchecked]:
    if level == "data" and checkpoint.tensors:
        yield Unchecked(what="whether the values are finite (use --level values)")
    elif unseen := unseen_values(checkpoint):
        yield Unchecked(what=f"the values of {len(unseen):,} tensors of packed or complex numbers: {first_few(unseen)}")


def _unchecked_chunks(
    opened: Opened, tensors: Sequence[TensorEntry], outcome: Outcome, damaged: Collection[str]
) -> Iterator[Unchecked]:
    full = [(entry, chunk) for entry in tensors for chunk in entry.chunks if 0 not in chunk.box.sizes]
    chunks = len(full)
    told = sum(entry.fqn in damaged and chunk.crc32 is not None for entry, chunk in full)
    first = {id(chunk) for entry in tensors for chunk in firsts(entry)}
    summed = Summed(opened)
    rest = (chunk for _, chunk in full if chunk.crc32 is None or id(chunk) not in first)
    covered = sum(summed.covers(chunk.span) for chunk in rest)
    missing = chunks - told - outcome.chunks_checked - covered
    if opened.manifest is None and missing > 0:
        what = f"the content of {missing:,} of {counted(chunks, 'chunk')}, without a recorded checksum"
        yield Unchecked(what=f"{what} (--against compares copies)", copy_tells=True)


class Summed:
    """Parts of files whose CRC-32 is recorded and was checked."""

    def __init__(self, opened: Opened) -> None:
        self._parts: dict[str, list[tuple[int, int]]] = {}
        for span, _ in opened.sums:
            self._parts.setdefault(span.file, []).append((span.offset, span.offset + span.nbytes))
        for parts in self._parts.values():
            parts.sort()

    def covers(self, span: ByteSpan) -> bool:
        """Is a span inside of one of them?"""
        parts = self._parts.get(span.file, [])
        at = bisect_right(parts, (span.offset, MAX_ELEMS)) - 1
        return at >= 0 and span.offset + span.nbytes <= parts[at][1]


def _unknown_places(opened: Opened) -> Iterator[Unchecked]:
    is_bare = opened.manifest is None and opened.format.in_items
    if files := equal_layouts(opened.checkpoint.tensors) if is_bare else []:
        shown = f"{len(files):,}: {first_few(files, 2)}"
        what = f"whether files of equal layout were swapped ({shown}); a manifest or --against shows it"
        yield Unchecked(what=what, copy_tells=True)


def with_findings(
    result: Verification,
    findings: Sequence[Finding],
    *,
    parts: Collection[str] | None = None,
    not_compared: Iterable[str] = (),
) -> Verification:
    """Return `result` with more findings; what was compared bit for bit no longer counts as unchecked.

    Of a step these may be only some `parts`. What was `not_compared` stays unchecked.
    """
    is_told = [each.copy_tells and (parts is None or each.part in parts) for each in result.unchecked]
    unchecked = tuple(each for each, told in zip(result.unchecked, is_told, strict=True) if not told)
    unchecked += tuple(Unchecked(what=f"against the reference: {what}") for what in dict.fromkeys(not_compared))
    return replace(result, findings=(*result.findings, *findings), unchecked=unchecked)
