"""Tend a run's folder once: verify what is new and whole, send it where it is wanted, remove what is superseded."""

from __future__ import annotations

import os
import time
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace

from ckpt_tools.checks.verify import Verification
from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.errors import CkptError, StorageError, UnreadableError, UsageError
from ckpt_tools.options import ProgressFactory
from ckpt_tools.options.common import Level
from ckpt_tools.tending.assess import Assessor, examine, targets
from ckpt_tools.tending.fitness import Profile, Profiler, compare, join_profiles
from ckpt_tools.tending.folder import Folder, Look, Saved
from ckpt_tools.tending.record import MAX_RECORD_BYTES, RECORD_NAME, Entry, build_line, build_record, parse_record
from ckpt_tools.tending.retention import Candidate, Decision, Rules, plan_retention
from ckpt_tools.tending.series import Place, parse_name
from ckpt_tools.text import escape_name, first_few
from ckpt_tools.units import format_size

_MAX_FINDINGS = 20
"""Of one checkpoint."""
_SMALL_BYTES = 16 << 20
"""What is not worth a second thread."""
_RESTORE = "restore it, or resume from another checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tended:
    """What was found in a folder, and done."""

    path: str
    decisions: tuple[Decision, ...]
    """As it is now; what was removed is in `removed`."""
    unknown: tuple[str, ...] = ()
    """Names in the folder that are of no checkpoint."""
    verified: tuple[str, ...] = ()
    """Names of those that this pass has verified, bad ones too."""
    removed: tuple[str, ...] = ()
    """Names; in a dry run of those that would be."""
    freed_bytes: int = 0
    findings: tuple[Finding, ...] = ()
    failed: tuple[str, ...] = ()
    """What was to be done and was not, and why."""
    notes: tuple[str, ...] = ()
    not_checked: tuple[str, ...] = ()
    dry_run: bool = False

    @property
    def ok(self) -> bool:
        """True without a bad checkpoint."""
        return not any(finding.severity == "error" for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """As the command line's contract has it."""
        return 3 if not self.ok else 1 if self.failed else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to do with a folder."""

    rules: Rules = field(default_factory=Rules)
    level: Level | None = "values"
    """How to verify what is new; None: not at all."""
    quiet_s: float = 10.0
    """For so long a checkpoint must not have changed before it is read or removed."""
    patience_s: float | None = None
    """For so long one that is not whole must not have changed before it counts as given up; None: twice `quiet_s`."""
    quarantine_s: float = 86400.0
    """For so long what was removed can be brought back."""
    kept: tuple[str, ...] = ()
    """Names of checkpoints that the trainer points at."""
    accept: tuple[str, ...] = ()
    """Names of checkpoints that are fit, whatever sets them apart from those before them."""
    num_workers: int = 1
    dry_run: bool = False
    send: Mapping[str, Callable[[str, str], None]] = field(default_factory=dict)
    """Where to → what brings a verified checkpoint there, given a name and a path of it; CkptError where it cannot."""


@dataclass(slots=True, kw_only=True)
class _Done:
    """What a pass has done so far."""

    verified: list[str] = field(default_factory=list)
    removed: list[Saved] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unchecked: dict[str, list[str]] = field(default_factory=dict)
    """What → of which checkpoints; of none for what is not about one."""


class _Fit:
    """The fit checkpoints that are known of each series, by their steps; and how many verifications there were."""

    def __init__(self, record: Mapping[str, Entry]) -> None:
        self.by_series: dict[str, list[tuple[int, str]]] = {}
        self._count = max((each.order for each in record.values()), default=0)
        for name, entry in record.items():
            place = parse_name(name, is_directory=True) or parse_name(name, is_directory=False)
            if entry.is_fit and place is not None:
                self.add(name, place)

    def add(self, name: str, place: Place) -> None:
        """Note one more."""
        if place.step is not None:
            insort(self.by_series.setdefault(place.series, []), (place.step, name))

    def count(self) -> int:
        """Return the number of the next verification."""
        self._count += 1
        return self._count

    def judge(
        self, saved: Saved, profile: Profile, record: Mapping[str, Entry]
    ) -> tuple[tuple[str, ...], tuple[float, ...]]:
        """Say why a checkpoint is not fit to succeed the one before it, and how its series has moved."""
        step = saved.place.step
        before = self.by_series.get(saved.place.series, []) if step is not None else []
        at = bisect_left(before, (step or 0, ""))
        if not at:
            return (), ()
        old, name = before[at - 1]
        return compare(profile, record[name].profile, (step or 0) - old, name)


class Tender:
    """Tends one folder, pass by pass.

    Args:
        folder: The folder.
        settings: What to do with it.
        say: Told what is done, line by line.
        progress: Makes the receiver of progress.
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

    def once(self, *, wait: bool = True) -> Tended:
        """Tend the folder; with `wait`, new checkpoints get the time that they must stay unchanged."""
        if self._settings.dry_run:
            return self._pass(wait=False)
        if not self._seen and not self._look().saved:  # nothing is written where no run is
            return Tended(path=self._folder.path, decisions=())
        with self._folder.lock():
            return self._pass(wait=wait)

    def undo(self, names: Collection[str]) -> Tended:
        """Bring back what was removed, of these names or all, and let it stay."""
        with self._folder.lock():
            back = self._folder.restore(names)
            look = self._look()
            record = self._read_record(look)
            for name in back:
                empty = Entry(stamp="", digest="", ok=False, level="", order=0)
                record[name] = replace(record.get(name, empty), is_back=True)
            if back:
                self._write_record(record)
            decisions = self._plan(self._assessor.assess(look, record, self._settings.rules), look)
        failed = [f"{name} is not in quarantine, or something has its name" for name in names if name not in back]
        notes = [f"{name} is back, and stays until you remove it" for name in back]
        return Tended(path=self._folder.path, decisions=decisions, notes=tuple(notes), failed=tuple(failed))

    def _pass(self, *, wait: bool) -> Tended:
        rules, settings = self._settings.rules, self._settings
        done = _Done()
        look = self._look()
        record = self._read_record(look)
        if settings.accept:
            self._accept(look, record)
        candidates = self._assessor.assess(look, record, rules)
        is_prune = settings.level is None  # a watch may begin before anything is measured
        _check_rules(candidates, rules, must_measure=is_prune and rules.best is not None)
        for pause in self._pauses(candidates) if wait else ():
            time.sleep(pause)
            look = self._look()
            candidates = self._assessor.assess(look, record, rules)
        if settings.level is not None and not settings.dry_run and self._verify_new(look, candidates, record, done):
            look = self._look()
            candidates = self._assessor.assess(look, record, rules)
        decisions = self._send(self._plan(candidates, look), look, record, done)
        rotten = {} if settings.dry_run else self._read_again(decisions, look, record, done)
        if rotten:
            candidates = self._assessor.assess(look, record, rules)
            why = f"{first_few([*rotten.values()])} is no longer what was verified"
            decisions = tuple(
                replace(each, stays=True, reason=each.reason if each.stays else why)
                if each.candidate.series in rotten
                else each
                for each in self._plan(candidates, look)
            )
        if settings.level is not None and not settings.dry_run:
            done.findings += self._bad(candidates, record, {*done.verified, *rotten.values()})
            good = [each for each in candidates if each.state == "verified"]
            self._folder.point(max(good, key=lambda each: each.order).name if good else "")
        stays = [each for each in decisions if each.stays and each.candidate.name in rules.unverified]
        done.failed += [f"{each.candidate.name} stays: {each.reason}" for each in stays]
        going = {each.candidate.name: each for each in decisions if not each.stays}
        if settings.dry_run:
            done.removed = _named(look, going)
        elif going:
            self._remove(look, going, record, done)
        if not settings.dry_run and rules.removes:
            self._remove_leftovers(self._look() if done.removed else look, candidates, done)
        done.notes += self._folder.notes
        for what in self._folder.unseen if rules.removes else ():
            done.unchecked.setdefault(what, [])
        return Tended(
            path=self._folder.path,
            decisions=decisions,
            unknown=look.unknown,
            verified=tuple(done.verified),
            removed=tuple(saved.name for saved in done.removed),
            freed_bytes=sum(saved.nbytes for saved in done.removed),
            findings=tuple(done.findings),
            failed=tuple(done.failed),
            notes=tuple(done.notes),
            not_checked=tuple(
                f"{what} ({first_few(names)})" if names else what for what, names in done.unchecked.items()
            ),
            dry_run=settings.dry_run,
        )

    def _verify_new(self, look: Look, candidates: Sequence[Candidate], record: dict[str, Entry], done: _Done) -> bool:
        """Verify what nobody has; was there anything?"""
        fit = _Fit(record)
        for saved in _named(look, [each.name for each in candidates if each.state == "complete"]):
            if self._is_quiet(saved) and (entry := self._verify(saved, fit, record, done)) is not None:
                record[saved.name] = entry
                self._folder.append(RECORD_NAME, build_line(saved.name, entry))
                done.verified.append(saved.name)
        if done.verified:
            self._write_record(record)
        return bool(done.verified)

    def _plan(self, candidates: Sequence[Candidate], look: Look) -> tuple[Decision, ...]:
        """Decide, and look who uses what is to go."""
        rules, kept = self._settings.rules, self._settings.kept
        why = "the trainer points at it"
        candidates = [replace(each, pinned=each.pinned or why * (each.name in kept)) for each in candidates]
        decisions = plan_retention(candidates, rules)
        going = [each.candidate.name for each in decisions if not each.stays]
        used = self._folder.users(_named(look, going)) if going else {}
        pins = {name: f"in use by {user}" for name, user in used.items()}
        return plan_retention([replace(each, pinned=pins.get(each.name, each.pinned)) for each in candidates], rules)

    def _look(self) -> Look:
        """List the folder, and note since when everything is as it is."""
        look = self._folder.look()
        now = time.monotonic()
        before = self._seen
        self._seen = {}
        for saved in look.saved:
            stamp = saved.stamp
            was, since = before.get(saved.name, ("", now))
            self._seen[saved.name] = (stamp, since if was == stamp else now)
        return look

    def _is_quiet(self, saved: Saved) -> bool:
        stamp, since = self._seen[saved.name]
        return stamp == saved.stamp and time.monotonic() - since >= self._settings.quiet_s

    def _pauses(self, candidates: Collection[Candidate]) -> list[float]:
        """Return for how long to wait, look by look, until it is known which saves have come to an end."""
        named, reads = self._settings.rules.unverified, self._settings.level is not None
        new = any(each.state == "complete" and reads for each in candidates)
        new = new or any(each.name in named and each.state != "verified" for each in candidates)
        stuck = any(each.state in ("incomplete", "changing") and reads for each in candidates)
        quiet = self._settings.quiet_s
        return [quiet] * (new or stuck) + [self._patience - quiet] * stuck

    @property
    def _patience(self) -> float:
        given = self._settings.patience_s
        return 2 * self._settings.quiet_s if given is None else given

    def _read_record(self, look: Look) -> dict[str, Entry]:
        """Return what was verified, of what is there, of what can be brought back, and the last fit one of a series."""
        known = parse_record(self._folder.read(RECORD_NAME, MAX_RECORD_BYTES))
        there = {saved.name for saved in look.saved}.union(*look.leftovers.values())
        there |= {found[-1][1] for found in _Fit(known).by_series.values()}
        return {name: entry for name, entry in known.items() if name in there}

    def _write_record(self, record: Mapping[str, Entry]) -> None:
        with suppress(StorageError):  # no space: what is not recorded is verified again
            self._folder.write(RECORD_NAME, build_record(record))

    def _accept(self, look: Look, record: dict[str, Entry]) -> None:
        """Let what was found unfit be fit; what was judged by its predecessors is judged again by it."""
        for name in self._settings.accept:
            saved = look.find(name)
            if saved is None:
                there = first_few([each.name for each in look.saved], 6) or "nothing"
                raise UsageError(f"--accept: no checkpoint is called {name!r}", hint=f"there is {there}")
            if (entry := record.get(name)) is None or not entry.unfit:
                continue
            record[name] = replace(entry, unfit=())
            for each in look.saved:
                later = each.place.series == saved.place.series and (each.place.step or 0) > (saved.place.step or 0)
                if later and each.name in record and record[each.name].unfit:
                    del record[each.name]
            if not self._settings.dry_run:
                self._write_record(record)

    def _read(self, saved: Saved, level: Level) -> tuple[list[tuple[str, Verification]], Profile]:
        """Read a checkpoint whole: (part of it, what was found), and what it is like."""
        results, profiles = [], []
        for label, path in targets(self._folder, saved):
            profiler = Profiler(path, label)
            workers = self._settings.num_workers if saved.nbytes > _SMALL_BYTES else 1
            result = examine(path, level=level, num_workers=workers, progress=self._progress, looks=profiler.looks)
            results.append((label, result))
            profiles.append(profiler.profile())
        return results, join_profiles(profiles)

    def _verify(self, saved: Saved, fit: _Fit, record: Mapping[str, Entry], done: _Done) -> Entry | None:
        """Verify a checkpoint, and return what is recorded of it; None where that is nothing."""
        level = self._settings.level or "values"
        found: list[Finding] = []
        nbytes = 0
        digest = self._assessor.digest(saved)
        try:
            results, profile = self._read(saved, level)
            for label, result in results:
                inside = "/".join(filter(None, (saved.name, label)))
                found += [replace(each, where=f"{inside}/{each.where}".rstrip("/")) for each in result.findings]
                for what in result.not_checked:
                    done.unchecked.setdefault(f"{label}: {what}" if label else what, []).append(saved.name)
                nbytes += result.nbytes
        except CkptError as error:
            done.failed.append(f"{saved.name} could not be verified: {error}")
            return None
        if self._folder.stamp(saved) != saved.stamp:
            done.notes.append(f"{saved.name} changed while it was verified: it counts as not verified")
            return None
        errors = [each for each in found if each.severity == "error"]
        codes = tuple(dict.fromkeys(each.code for each in errors))
        if is_unsupported := codes == ("unsupported",):
            found, errors = [replace(each, severity="warning") if each in errors else each for each in found], []
        rest = [each for each in found if each.severity != "error"]
        done.findings += errors[:_MAX_FINDINGS] + rest[:_MAX_FINDINGS]
        unfit, moves = ((), ()) if codes else fit.judge(saved, profile, record)
        before = record.get(saved.name)
        is_rewritten = before is None or before.written != saved.written
        if before is not None and before.ok and not is_rewritten and before.profile.content != profile.content:
            unfit = ("its bytes are others than when it was verified, under the same sizes and times", *unfit)
        unfit = () if saved.name in self._settings.accept else unfit
        state = "NOT ok" if errors else "unsupported" if is_unsupported else "NOT fit" if unfit else "verified"
        self._say(f"{saved.name}: {state} ({format_size(nbytes)} of data, level {level})")
        entry = Entry(
            stamp=saved.stamp,
            written=saved.written,
            digest=digest,
            ok=not codes,
            level=level,
            order=fit.count(),
            codes=codes,
            unfit=unfit,
            profile=replace(profile, moves=moves),
            is_back=before is not None and before.is_back,
        )
        if entry.is_fit:
            fit.add(saved.name, saved.place)
        return entry

    def _read_again(
        self, decisions: Sequence[Decision], look: Look, record: dict[str, Entry], done: _Done
    ) -> dict[str, str]:
        """Read those again whose last predecessors go; return series → the one that is not what was verified."""
        last: dict[str, int] = {}
        for each in decisions:
            if not each.stays and each.candidate.step is not None:
                last[each.candidate.series] = max(last.get(each.candidate.series, -1), each.candidate.step)
        rotten = {}
        for series, step in last.items():
            later = (each.candidate for each in decisions if each.stays and each.candidate.state == "verified")
            heirs = [one for one in later if one.series == series and one.step is not None and one.step > step]
            name = min(heirs, key=lambda one: one.step or 0).name
            entry, (saved,) = record[name], _named(look, [name])
            try:
                self._folder.forget(saved)
                results, profile = self._read(saved, "values" if entry.level == "values" else "data")
            except UnreadableError as error:
                results, profile = [], Profile(content=str(error))
            except CkptError as error:
                done.failed.append(f"{name} could not be read again, and what it supersedes stays: {error}")
                rotten[series] = name
                continue
            is_same = profile.content == entry.profile.content and all(result.ok for _, result in results)
            if is_same and self._folder.stamp(saved) == entry.stamp:
                continue
            rotten[series] = name
            what = "read again, it is no longer what was verified: what it supersedes stays"
            done.findings.append(Finding.error("changed-since", name, what, _RESTORE))
            record[name] = replace(entry, ok=False, codes=("changed-since",))
            self._write_record(record)
        return rotten

    def _send(
        self, decisions: Sequence[Decision], look: Look, record: dict[str, Entry], done: _Done
    ) -> tuple[Decision, ...]:
        """Bring what is verified and stays to where it is wanted; nothing goes before what follows it has arrived."""
        failed = len(done.failed)
        wanted = [each.candidate.name for each in decisions if each.stays and each.candidate.state == "verified"]
        for saved in _named(look, [] if self._settings.dry_run else wanted):
            for where, bring in self._settings.send.items():
                if where in record[saved.name].sent:
                    continue
                try:
                    for root in saved.roots:
                        bring(root, os.path.join(self._folder.path, root))
                except CkptError as error:
                    done.failed.append(f"{saved.name} did not arrive at {where}: {error}")
                    continue
                self._say(f"{saved.name}: arrived at {where}")
                record[saved.name] = replace(record[saved.name], sent=(*record[saved.name].sent, where))
                self._write_record(record)
        if len(done.failed) == failed:
            return tuple(decisions)
        waits = "what follows it has not arrived yet"
        return tuple(each if each.stays else replace(each, stays=True, reason=waits) for each in decisions)

    def _remove(self, look: Look, going: Mapping[str, Decision], record: dict[str, Entry], done: _Done) -> None:
        """Remove what can go."""
        ready = self._ready(look, going, record, done)
        gone = set(self._folder.remove(ready)) if ready else set()
        for saved in ready:
            if saved.name in gone:
                done.removed.append(saved)
                self._say(f"{saved.name}: removed ({format_size(saved.nbytes)})")
            else:
                done.failed.append(f"{saved.name} stays: something has opened or changed it")
        if gone:
            self._write_record(record)

    def _ready(
        self, look: Look, going: Mapping[str, Decision], record: Mapping[str, Entry], done: _Done
    ) -> list[Saved]:
        """Return what can go: what is, at this moment, as it was judged, and so are as many later ones as must be."""
        now = {each.name: each for each in self._folder.look().saved}
        heirs: dict[str, list[int]] = {}
        for each in now.values():
            if each.name in record and record[each.name].is_fit and record[each.name].stamp == each.stamp:
                heirs.setdefault(each.place.series, []).append(each.place.step or -1)
        ready = []
        for saved in _named(look, going):
            steps = heirs.get(saved.place.series, [])  # in their order, as a look lists them
            later = len(steps) - bisect_right(steps, saved.place.step or -1)
            is_same = saved.name in now and now[saved.name].stamp == saved.stamp
            if going[saved.name].candidate.state != "verified" and not self._is_quiet(saved):
                done.failed.append(f"{saved.name} stays: it may be being written")
            elif not is_same or later < (self._settings.rules.last or 1):
                done.failed.append(f"{saved.name} stays: something has opened or changed it, or what supersedes it")
            else:
                ready.append(saved)
        return ready

    def _bad(
        self, candidates: Sequence[Candidate], record: Mapping[str, Entry], verified: Collection[str]
    ) -> list[Finding]:
        """Return findings of what is bad or unfit, and of what is not whole, an error unless its save may go on."""
        found = []
        last = {each.series: each.step or 0 for each in candidates if each.state == "verified"}
        for each in candidates:
            hint = f"ckpt verify {os.path.join(self._folder.path, each.name)} says why"
            if each.state == "bad" and each.name not in verified:
                what = f"it failed its verification: {each.why}"
                found.append(Finding.error("bad-checkpoint", each.name, what, hint))
            elif each.state == "unfit":
                accept = f"if it is as it should be: --accept {each.name}"
                found += [Finding.error("unfit-checkpoint", each.name, why, accept) for why in each.unfit]
            elif each.state in ("incomplete", "changing", "unsupported"):
                was_good = each.name in record and record[each.name].ok
                age = time.monotonic() - self._seen[each.name][1]
                is_passed = (each.step or 0) < last.get(each.series, -1) and age >= self._settings.quiet_s
                is_error = was_good or (each.state != "unsupported" and (is_passed or age >= self._patience))
                what = f"it was verified, and has changed since: {each.why}" if was_good else each.why
                make = Finding.error if is_error else Finding.warning
                code = "incomplete-checkpoint" if each.state != "unsupported" else each.state
                found.append(make(code, each.name, what, hint if is_error else None))
        return found

    def _remove_leftovers(self, look: Look, candidates: Sequence[Candidate], done: _Done) -> None:
        """End what is in quarantine for long enough, or in the way, where something verified of the series is there."""
        safe = {each.series for each in candidates if each.state == "verified"}
        needs = max((each.nbytes for each in look.saved), default=0)
        is_full = bool(done.verified) and self._folder.free_bytes() < 2 * needs
        for leftover, names in look.leftovers.items():
            if not is_full and 0 <= self._folder.age(leftover) < self._settings.quarantine_s:
                if done.removed:
                    size = format_size(sum(each.nbytes for each in done.removed))
                    way = f"`ckpt prune {escape_name(self._folder.path)} --undo all` brings back what is in quarantine"
                    way = f"{way}; --quarantine 0s frees {size}"
                    done.notes += [] if way in done.notes else [way]
                continue
            places = [parse_name(name, is_directory=True) or parse_name(name, is_directory=False) for name in names]
            if all(place is None or place.series in safe for place in places):
                self._folder.remove_leftover(leftover)
            else:
                done.notes.append(
                    f"{leftover} stays, what a killed run had begun to remove: nothing verified is beside it"
                )


def _named(look: Look, names: Collection[str]) -> list[Saved]:
    """Return the checkpoints of these names."""
    wanted = set(names)
    return [saved for saved in look.saved if saved.name in wanted]


def _check_rules(candidates: Sequence[Candidate], rules: Rules, *, must_measure: bool) -> None:
    names = {each.name for each in candidates}
    if missing := [name for name in rules.unverified if name not in names]:
        there = first_few(sorted(names), 6) or "nothing"
        raise UsageError(f"--unverified: no checkpoint is called {missing[0]!r}", hint=f"there is {there}")
    if must_measure and names and all(each.metric is None for each in candidates):
        raise UsageError(
            f"--keep-best: no checkpoint has a {rules.metric}",
            hint="--metric names what the Trainer logs at the steps that it saves, or what Lightning puts into names",
        )


def tended_json(tended: Tended) -> dict[str, object]:
    """Return the JSON document of `prune` and `watch`."""
    rows = [
        {
            **asdict(each.candidate),
            "fit": each.candidate.state == "verified",
            "stays": each.candidate.name not in tended.removed,
            "reason": each.reason,
        }
        for each in tended.decisions
    ]
    rest = {name: value for name, value in asdict(tended).items() if name != "decisions"}
    return {**rest, "ok": tended.ok, "checkpoints": rows}
