"""Manage a run's folder once: verify what is new and whole, send it where it is wanted, remove what is superseded."""

from __future__ import annotations

import math
import os
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.checks.verify import Verification
from ckpt_tools.errors import CkptError, StorageError, UnreadableError, UsageError
from ckpt_tools.options import ProgressFactory
from ckpt_tools.options.common import Level
from ckpt_tools.results import CheckedResult
from ckpt_tools.runs.assess import MAX_RECORD_BYTES, Assessor, Entry, build_record, examine, parse_record, targets
from ckpt_tools.runs.compare_series import Profile, Profiler, compare, join_profiles
from ckpt_tools.runs.folder import Folder, FolderListing, SavedCheckpoint, place_of
from ckpt_tools.runs.retention import Rules, RunCheckpoint, plan_retention
from ckpt_tools.storage.run_leases import RECORD_NAME, leased
from ckpt_tools.text import escape_name, first_few, natural_key
from ckpt_tools.units import format_size

_MAX_FINDINGS = 20  # Of one checkpoint
_SMALL_BYTES = 16 << 20  # What is not worth a second thread
_NO_SPACE_BYTES = 64 << 10  # With less, the quarantine is emptied at once
_RECORD_S = 10.0  # What a killed pass has to verify again at most, beside the checkpoint that it was at
_RESTORE = "restore it, or resume from another checkpoint"


@dataclass(slots=True, kw_only=True, repr=False)
class PruneResult(CheckedResult):
    """What was found in a folder, and done."""

    path: str
    checkpoints: tuple[RunCheckpoint, ...] = ()
    """As it was before anything was removed."""
    unknown: tuple[str, ...] = ()
    """Names in the folder that are of no checkpoint."""
    verified: tuple[str, ...] = ()
    """Names of those that this pass has verified, bad ones too."""
    removed: tuple[str, ...] = ()
    """Names; in a dry run of those that would be."""
    freed_bytes: int = 0
    quarantine: Mapping[str, str] = field(default_factory=dict)
    """Name of what can be brought back → until when, as ISO 8601 has it."""
    findings: tuple[Finding, ...] = ()
    failed: tuple[str, ...] = ()
    """What was to be done and was not, and why."""
    notes: tuple[str, ...] = ()
    not_checked: tuple[str, ...] = ()
    dry_run: bool = False

    @property
    def last_fit(self) -> str:
        """The fit one that was verified last; "" without any."""
        fit = [each for each in self.checkpoints if each.state == "verified"]
        return max(fit, key=lambda each: each.order).name if fit else ""

    @property
    def exit_code(self) -> int:
        """As the command line's contract has it."""
        return 3 if not self.ok else 1 if self.failed else 0

    def to_json(self) -> dict[str, object]:
        """Return it as JSON holds it."""
        rows = [{**asdict(each), "fit": each.state == "verified"} for each in self.checkpoints]
        return {**asdict(self), "ok": self.ok, "checkpoints": rows}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to do with a folder."""

    rules: Rules = field(default_factory=Rules)
    level: Level | None = "values"  # How to verify what is new; None: not at all
    quiet_s: float = 10.0  # For so long a checkpoint must not have changed before it is read or removed
    patience_s: float | None = None
    """For so long one that is not whole must not have changed before it counts as given up; None: twice `quiet_s`."""
    quarantine_s: float = 86400.0  # For so long what was removed can be brought back
    accept: tuple[str, ...] = ()  # Names of checkpoints that are fit, whatever sets them apart from those before them
    num_workers: int = 1
    dry_run: bool = False
    send: Mapping[str, Callable[[str, str], None]] = field(default_factory=dict)
    """Where to → what brings a verified checkpoint there, given a name and a path of it; CkptError where it cannot."""


def _fit_ones(record: Mapping[str, Entry]) -> dict[str, list[tuple[int, str]]]:
    """Return series → (step, name) of its fit checkpoints, by step."""
    found: dict[str, list[tuple[int, str]]] = {}
    places = (place for name, entry in record.items() if entry.is_fit and (place := place_of(name)) is not None)
    for step, name, series in sorted((one.step, one.name, one.series) for one in places if one.step is not None):
        found.setdefault(series, []).append((step, name))
    return found


class RunManager:
    """Manages one folder, pass by pass.

    Args:
        folder: The folder.
        settings: What to do with it.
        say: Told what is done, line by line.
        progress: Called with the total number of bytes; returns a function that is called with each increment.
    """

    def __init__(
        self,
        folder: Folder,
        settings: Settings,
        *,
        say: Callable[[str], None] | None = None,
        progress: ProgressFactory | None = None,
    ) -> None:
        self._folder = folder
        self._settings = settings
        self._say = say or (lambda _: None)
        self._progress = progress
        self._assessor = Assessor(folder)
        self._seen: dict[str, tuple[str, float]] = {}
        """Name → its stamp, and since when it is so, by a clock that does not jump."""
        self._now = FolderListing(saved=(), unknown=())
        self._record: dict[str, Entry] = {}
        self._fit: dict[str, list[tuple[int, str]]] = {}
        self._order = 0
        self._done = PruneResult(path=folder.path)
        self._unchecked: dict[str, list[str]] = {}
        """What → of which checkpoints; of none for what is not about one."""

    def once(self, *, wait: bool = True) -> PruneResult:
        """Manage the folder; with `wait`, new checkpoints get the time that they must stay unchanged."""
        if self._settings.dry_run:
            return self._pass(wait=False)
        if not self._seen and not self._folder.look().saved:  # nothing is written where no run is
            return PruneResult(path=self._folder.path)
        with self._folder.lock():
            return self._pass(wait=wait)

    def undo(self, names: Collection[str]) -> PruneResult:
        """Bring back what was removed, of these names or all, and let it stay."""
        with self._folder.lock():
            back = self._folder.restore(names)
            self._begin()
            for name in back:
                empty = Entry(stamp="", ok=False, level="", order=0)
                self._record[name] = replace(self._record.get(name, empty), is_back=True)
            self._write_record()
            planned = self._plan(self._assess())
        failed = [f"{name} is not in quarantine, or the name is taken" for name in names if name not in back]
        notes = [f"{name} was restored and is kept until you remove it" for name in back]
        return replace(self._done, checkpoints=planned, notes=tuple(notes), failed=tuple(failed))

    def _pass(self, *, wait: bool) -> PruneResult:
        rules, settings = self._settings.rules, self._settings
        reads, acts = settings.level is not None, not settings.dry_run
        self._begin()
        self._accept()
        done, found = self._done, self._assess()
        _check_rules(found, rules, must_measure=not reads and rules.best is not None)  # a watch may begin before that
        for pause in self._pauses(found) if wait else ():
            time.sleep(pause)
            self._look()
            found = self._assess()
        if reads and acts and self._verify_new(found):
            self._look()
            found = self._assess()
        planned = self._plan(found)
        done.checkpoints = planned = self._read_again(self._send(planned)) if acts else planned
        if reads:
            done.findings += tuple(self._bad(planned))
        if reads and acts:
            self._folder.point(done.last_fit)
        named = [each for each in planned if each.stays and each.name in rules.unverified]
        done.failed += tuple(f"{each.name} is kept: {each.reason}" for each in named)
        going = {each.name: each for each in planned if not each.stays}
        for saved in self._remove(going) if going and acts else _named(self._now, going):
            done.removed += (saved.name,)
            done.freed_bytes += saved.nbytes
        done.checkpoints = tuple(replace(each, stays=each.name not in done.removed) for each in planned)
        if acts and done.removed:
            self._write_record()
            self._look()
        done.quarantine = self._quarantine()
        if acts and rules.removes:
            self._remove_leftovers({each.series for each in planned if each.state == "verified"})
        done.unknown, done.notes = self._now.unknown, done.notes + self._folder.notes
        unseen = dict.fromkeys(self._folder.unseen if rules.removes else (), ())
        unchecked = {**self._unchecked, **unseen}
        done.not_checked = tuple(f"{what} ({first_few(names)})" if names else what for what, names in unchecked.items())
        return done

    def _begin(self) -> None:
        """Look, and read of the record what is there or can be brought back, and the last fit one of each series."""
        self._done, self._unchecked = PruneResult(path=self._folder.path, dry_run=self._settings.dry_run), {}
        self._look()
        known = parse_record(self._folder.read(RECORD_NAME, MAX_RECORD_BYTES))
        there = {*(saved.name for saved in self._now.saved), *self._now.leftovers.values()}
        there |= {fit[-1][1] for fit in _fit_ones(known).values()}
        self._record = {name: entry for name, entry in known.items() if name in there}

    def _look(self) -> None:
        """List the folder, and note since when everything is as it is."""
        self._now, now, before = self._folder.look(), time.monotonic(), self._seen
        self._seen = {saved.name: (saved.stamp, now) for saved in self._now.saved}
        self._seen |= {name: was for name, was in before.items() if self._seen.get(name, ("",))[0] == was[0]}

    def _assess(self) -> tuple[RunCheckpoint, ...]:
        return self._assessor.assess(self._now, self._record, self._settings.rules)

    def _plan(self, found: Sequence[RunCheckpoint]) -> tuple[RunCheckpoint, ...]:
        """Decide, and look who uses what is to go; in a dry run, who uses anything."""
        planned = plan_retention(found, self._settings.rules)
        asked = [each.name for each in planned if self._settings.dry_run or not each.stays]
        used = self._folder.users(_named(self._now, asked)) if asked else {}
        return plan_retention([replace(each, used_by=used.get(each.name, "")) for each in found], self._settings.rules)

    def _quarantine(self) -> dict[str, str]:
        """Return what can be brought back, and until when, the next to go first."""
        start = time.time() + self._settings.quarantine_s
        aged = ((self._folder.age(leftover), name) for leftover, name in self._now.leftovers.items())
        ends = sorted((round(start - age), natural_key(name), name) for age, name in aged if age < math.inf)
        return {name: datetime.fromtimestamp(end, UTC).isoformat(timespec="seconds") for end, _, name in ends}

    def _verify_new(self, found: Sequence[RunCheckpoint]) -> bool:
        """Verify what nobody has; was there anything?"""
        written = time.monotonic()
        self._fit, self._order = _fit_ones(self._record), max((each.order for each in self._record.values()), default=0)
        lacks = {each.name: each.why for each in found if each.state == "complete"}
        for saved in _named(self._now, lacks):
            why = lacks[saved.name]
            if self._is_quiet(saved, 1 + bool(why)) and (entry := self._verify(saved, why)) is not None:
                fit, one = self._fit.setdefault(saved.place.series, []), (saved.place.step or 0, saved.name)
                if saved.name in self._record and one in fit:
                    fit.remove(one)
                if entry.is_fit and saved.place.step is not None:
                    insort(fit, one)
                self._record[saved.name] = entry
                self._done.verified += (saved.name,)
                if time.monotonic() - written > _RECORD_S:
                    self._write_record()
                    written = time.monotonic()
        if self._done.verified:
            self._write_record()
        return bool(self._done.verified)

    def _is_quiet(self, saved: SavedCheckpoint, times: int = 1) -> bool:
        stamp, since = self._seen[saved.name]
        return stamp == saved.stamp and time.monotonic() - since >= times * self._settings.quiet_s

    def _pauses(self, found: Collection[RunCheckpoint]) -> list[float]:
        """Return for how long to wait, look by look, until it is known which saves have come to an end."""
        named, reads = self._settings.rules.unverified, self._settings.level is not None
        new = any(each.state == "complete" and reads for each in found)
        new = new or any(each.name in named and each.state != "verified" for each in found)
        stuck = any(each.state in ("incomplete", "changing") and reads for each in found)
        lacks = any(each.state == "complete" and each.why and reads for each in found)
        quiet = self._settings.quiet_s
        return [quiet] * (new or stuck) + [max(stuck * self._patience, 2 * lacks * quiet) - quiet] * (stuck or lacks)

    @property
    def _patience(self) -> float:
        given = self._settings.patience_s
        return 2 * self._settings.quiet_s if given is None else given

    def _write_record(self) -> None:
        with suppress(StorageError):  # no space: what is not recorded is verified again
            self._folder.write(RECORD_NAME, build_record(self._record))

    def _accept(self) -> None:
        """Let what was found unfit be fit; what was judged by its predecessors is judged again by it."""
        there = {saved.name: saved.place for saved in self._now.saved}
        for name in self._settings.accept:
            if name not in there:
                hint = f"found: {first_few([*there], 6) or 'nothing'}"
                raise UsageError(f"--accept: no checkpoint is named {name!r}", hint=hint)
            if name not in self._record or not self._record[name].unfit:
                continue
            self._record[name] = replace(self._record[name], unfit=())
            for other, place in there.items():
                later = place.series == there[name].series and (place.step or 0) > (there[name].step or 0)
                if later and other in self._record and self._record[other].unfit:
                    del self._record[other]
            if not self._settings.dry_run:
                self._write_record()

    def _read(self, saved: SavedCheckpoint, level: Level) -> tuple[list[tuple[str, Verification]], Profile]:
        """Read a checkpoint whole: (part of it, what was found), and what it is like."""
        results, profiles = [], []
        for label, path in targets(self._folder, saved):
            profiler = Profiler(path, label)
            workers = self._settings.num_workers if saved.nbytes > _SMALL_BYTES else 1
            with leased(path):
                result = examine(path, level=level, num_workers=workers, progress=self._progress, looks=profiler.looks)
            results.append((label, result))
            profiles.append(profiler.profile())
        return results, join_profiles(profiles)

    def _verify(self, saved: SavedCheckpoint, lacks: str = "") -> Entry | None:
        """Verify a checkpoint, whose headers tell what it `lacks`; return what is recorded, if anything."""
        level, done, before = self._settings.level or "values", self._done, self._record.get(saved.name)
        found: list[Finding] = []
        try:
            results, profile = self._read(saved, level)
        except CkptError as error:
            done.failed += (f"{saved.name} could not be verified: {error}",)
            return None
        for label, result in results:
            inside = "/".join(filter(None, (saved.name, label)))
            found += [replace(each, where=f"{inside}/{each.where}".rstrip("/")) for each in result.findings]
            for what in result.not_checked:
                self._unchecked.setdefault(f"{label}: {what}" if label else what, []).append(saved.name)
        if self._folder.stamp(saved) != saved.stamp:
            done.notes += (f"{saved.name} changed during verification and counts as not verified",)
            return None
        codes = tuple(dict.fromkeys(each.code for each in found if each.severity == "error"))
        if codes == ("unsupported",):
            found = [replace(each, severity="warning") if each.severity == "error" else each for each in found]
        for is_error in (True, False):
            done.findings += tuple(each for each in found if (each.severity == "error") == is_error)[:_MAX_FINDINGS]
        step = -1 if saved.place.step is None else saved.place.step
        ours = [] if codes else self._fit.get(saved.place.series, [])
        last = ours[at - 1] if (at := bisect_left(ours, (step, ""))) else None
        unfit: tuple[str, ...] = ()
        moves: tuple[float, ...] = ()
        if last is not None:
            unfit, moves = compare(profile, self._record[last[1]].profile, step - last[0], last[1])
        if lacks:
            unfit = (f"it {lacks}", *unfit)
        is_rewritten = before is None or before.written != saved.written
        if before is not None and before.ok and not is_rewritten and before.profile.content != profile.content:
            unfit = ("its bytes changed since it was verified, with the same sizes and times", *unfit)
        self._order += 1
        entry = Entry(
            stamp=saved.stamp, written=saved.written, ok=not codes, level=level, order=self._order, codes=codes
        )
        unfit, is_back = () if saved.name in self._settings.accept else unfit, before is not None and before.is_back
        entry = replace(entry, unfit=unfit, profile=replace(profile, moves=moves), is_back=is_back)
        state = {"bad": "NOT ok", "unfit": "NOT fit"}.get(entry.state, entry.state)
        nbytes = format_size(sum(result.nbytes for _, result in results))
        self._say(f"{saved.name}: {state} ({nbytes} of data, level {level})")
        return entry

    def _read_again(self, planned: tuple[RunCheckpoint, ...]) -> tuple[RunCheckpoint, ...]:
        """Read those again whose last predecessors go; these stay where one is not what was verified."""
        rotten: dict[str, str] = {}
        """Series → the one that is not."""
        going = {each.series: each.step for each in planned if not each.stays and each.step is not None}  # by step
        for series, step in going.items():
            good = [each for each in planned if each.stays and each.state == "verified" and each.series == series]
            name = min((each.step, each.name) for each in good if each.step is not None and each.step > step)[1]
            entry, (saved,) = self._record[name], _named(self._now, [name])
            try:
                self._folder.forget(saved)
                results, profile = self._read(saved, "values" if entry.level == "values" else "data")
            except UnreadableError as error:
                results, profile = [], Profile(content=str(error))
            except CkptError as error:
                self._done.failed += (f"{name} could not be read again; those that it supersedes are kept: {error}",)
                rotten[series] = name
                continue
            is_same = profile.content == entry.profile.content and all(result.ok for _, result in results)
            if not is_same or self._folder.stamp(saved) != entry.stamp:
                rotten[series] = name
                what = "a second read differs from what was verified; the checkpoints that it supersedes are kept"
                self._done.findings += (Finding.error("changed-since", name, what, _RESTORE),)
                self._record[name] = replace(entry, ok=False, codes=("changed-since",))
                self._write_record()
        if not rotten:
            return planned
        why = f"{first_few([*rotten.values()])} has changed since it was verified"
        return _all_stay(self._plan(self._assess()), why, rotten)

    def _send(self, planned: tuple[RunCheckpoint, ...]) -> tuple[RunCheckpoint, ...]:
        """Bring what is verified and stays to where it is wanted; nothing goes before what follows it has arrived."""
        failed = len(self._done.failed)
        for saved in _named(self._now, [each.name for each in planned if each.stays and each.state == "verified"]):
            for where, bring in self._settings.send.items():
                if where in self._record[saved.name].sent:
                    continue
                try:
                    for root in saved.roots:
                        bring(root, os.path.join(self._folder.path, root))
                except CkptError as error:
                    self._done.failed += (f"{saved.name} was not delivered to {where}: {error}",)
                    continue
                self._say(f"{saved.name}: delivered to {where}")
                entry = self._record[saved.name]
                self._record[saved.name] = replace(entry, sent=(*entry.sent, where))
                self._write_record()
        is_sent = len(self._done.failed) == failed
        return planned if is_sent else _all_stay(planned, "later checkpoints have not been delivered yet")

    def _remove(self, going: Mapping[str, RunCheckpoint]) -> list[SavedCheckpoint]:
        """Remove what can go, and return it."""
        ready = self._ready(going)
        names = self._folder.remove(ready) if ready else []
        gone = [saved for saved in ready if saved.name in names]
        for saved in gone:
            self._say(f"{saved.name}: removed ({format_size(saved.nbytes)})")
        stay = [saved.name for saved in ready if saved not in gone]
        self._done.failed += tuple(f"{name} is kept: it was opened or changed meanwhile" for name in stay)
        return gone

    def _ready(self, going: Mapping[str, RunCheckpoint]) -> list[SavedCheckpoint]:
        """Return what can go: what is, at this moment, as it was judged, and would be judged so again."""
        judged, self._now = self._now, self._folder.look()
        goes = {each.name for each in plan_retention(self._assess(), self._settings.rules) if not each.stays}
        stamps = {each.name: each.stamp for each in self._now.saved}
        ready = []
        for saved in _named(judged, going):
            if going[saved.name].state != "verified" and not self._is_quiet(saved):
                self._done.failed += (f"{saved.name} is kept: it may still be being written",)
            elif saved.name not in goes or stamps[saved.name] != saved.stamp:
                what = "it was opened or changed meanwhile, or the one that supersedes it was"
                self._done.failed += (f"{saved.name} is kept: {what}",)
            else:
                ready.append(saved)
        return ready

    def _bad(self, found: Sequence[RunCheckpoint]) -> Iterator[Finding]:
        """Yield findings of what is bad or unfit, and of what is not whole, an error unless its save may go on."""
        told = {*self._done.verified, *(each.where for each in self._done.findings if each.code == "changed-since")}
        last = {each.series: each.step or 0 for each in found if each.state == "verified"}
        for each in found:
            hint = f"run ckpt verify {os.path.join(self._folder.path, each.name)} for details"
            if each.state == "bad" and each.name not in told:
                yield Finding.error("bad-checkpoint", each.name, f"verification failed: {each.why}", hint)
            elif each.state == "unfit":
                accept = f"if the change is intended, add --accept {each.name}"
                yield from (Finding.error("unfit-checkpoint", each.name, why, accept) for why in each.unfit)
            elif each.state in ("incomplete", "changing", "unsupported"):
                was_good = each.name in self._record and self._record[each.name].ok
                age = math.inf if self._settings.dry_run else time.monotonic() - self._seen[each.name][1]
                is_passed = (each.step or 0) < last.get(each.series, -1) and age >= self._settings.quiet_s
                is_over = is_passed or self._patience <= age < math.inf
                is_error = was_good or (each.state != "unsupported" and is_over)
                what = f"it changed after it was verified: {each.why}" if was_good else each.why
                make = Finding.error if is_error else Finding.warning
                code = "incomplete-checkpoint" if each.state != "unsupported" else each.state
                yield make(code, each.name, what, hint if is_error else None)

    def _remove_leftovers(self, safe: Collection[str]) -> None:
        """End what is in quarantine for long enough, or in the way, where something verified of the series is there."""
        done = self._done
        needs = max((each.nbytes for each in self._now.saved), default=0)
        is_full = self._folder.free_bytes() < (2 * needs if done.verified else _NO_SPACE_BYTES)
        ages = {leftover: self._folder.age(leftover) for leftover in self._now.leftovers}
        kept = {name for name, age in ages.items() if not is_full and abs(age) < self._settings.quarantine_s}
        if kept and done.removed:
            way = f"`ckpt prune {escape_name(self._folder.path)} --undo all` restores what is in quarantine"
            done.notes += (f"{way}; --quarantine 0s frees {format_size(done.freed_bytes)}",)
        for leftover in ages.keys() - kept:
            place = place_of(self._now.leftovers[leftover])
            if place is None or place.series in safe:
                self._folder.remove_leftover(leftover)
            else:
                what = "which an interrupted removal left: there is no verified checkpoint beside it"
                done.notes += (f"{leftover} is kept, {what}",)


def _named(look: FolderListing, names: Collection[str]) -> list[SavedCheckpoint]:
    """Return the checkpoints of these names."""
    wanted = set(names)
    return [saved for saved in look.saved if saved.name in wanted]


def _check_rules(candidates: Sequence[RunCheckpoint], rules: Rules, *, must_measure: bool) -> None:
    names = {each.name for each in candidates}
    if missing := [name for name in rules.unverified if name not in names]:
        there = first_few(sorted(names, key=natural_key), 6) or "nothing"
        raise UsageError(f"--unverified: no checkpoint is named {missing[0]!r}", hint=f"found: {there}")
    if must_measure and names and all(each.metric is None for each in candidates):
        hint = "set --metric to a value that the Trainer logs at its saves, or that Lightning puts into file names"
        raise UsageError(f"--keep-best: no checkpoint has a {rules.metric}", hint=hint)


def _all_stay(
    planned: Sequence[RunCheckpoint], why: str, series: Collection[str] | None = None
) -> tuple[RunCheckpoint, ...]:
    """Let nothing go, or nothing of some series."""
    return tuple(
        each
        if each.stays or (series is not None and each.series not in series)
        else replace(each, stays=True, reason=why)
        for each in planned
    )
