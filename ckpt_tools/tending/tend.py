"""Tend a run's folder once: verify what is new and whole, send it where it is wanted, remove what is superseded."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime

from ckpt_tools.checks.verify import Level, Verification
from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.errors import CkptError, StorageError, UnreadableError, UsageError
from ckpt_tools.options import ProgressFactory
from ckpt_tools.storage.run_folder import RECORD_NAME, leased
from ckpt_tools.tending.assess import Assessor, examine, targets
from ckpt_tools.tending.fitness import Profile, Profiler, compare, join_profiles
from ckpt_tools.tending.folder import Folder, Look, Saved
from ckpt_tools.tending.record import MAX_RECORD_BYTES, Entry, build_line, build_record, parse_record
from ckpt_tools.tending.retention import Candidate, Rules, plan_retention
from ckpt_tools.tending.series import place_of
from ckpt_tools.text import escape_name, first_few
from ckpt_tools.units import format_size

_MAX_FINDINGS = 20
"""Of one checkpoint."""
_SMALL_BYTES = 16 << 20
"""What is not worth a second thread."""
_NO_SPACE_BYTES = 64 << 10
"""With less, the quarantine is emptied at once."""
_RESTORE = "restore it, or resume from another checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tended:
    """What was found in a folder, and done."""

    path: str
    checkpoints: tuple[Candidate, ...]
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


def _last_fit(record: Mapping[str, Entry], series: str, before: float = math.inf) -> tuple[int, str] | None:
    """Return step and name of the last fit checkpoint of a series, of those before a step."""
    places = (place for name, entry in record.items() if entry.is_fit and (place := place_of(name)) is not None)
    ours = [(one.step, one.name) for one in places if one.series == series and one.step is not None]
    return max((one for one in ours if one[0] < before), default=None)


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
            return Tended(path=self._folder.path, checkpoints=())
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
            planned = self._plan(self._assessor.assess(look, record, self._settings.rules), look)
        failed = [f"{name} is not in quarantine, or something has its name" for name in names if name not in back]
        notes = [f"{name} is back, and stays until you remove it" for name in back]
        return Tended(path=self._folder.path, checkpoints=planned, notes=tuple(notes), failed=tuple(failed))

    def _pass(self, *, wait: bool) -> Tended:
        rules, settings = self._settings.rules, self._settings
        done = _Done()
        look = self._look()
        record = self._read_record(look)
        if settings.accept:
            self._accept(look, record)
        found = self._assessor.assess(look, record, rules)
        reads = settings.level is not None  # and may begin before anything is measured
        _check_rules(found, rules, must_measure=not reads and rules.best is not None)
        for pause in self._pauses(found) if wait else ():
            time.sleep(pause)
            look = self._look()
            found = self._assessor.assess(look, record, rules)
        if reads and not settings.dry_run and self._verify_new(look, found, record, done):
            look = self._look()
            found = self._assessor.assess(look, record, rules)
        planned = self._plan(found, look)
        if not settings.dry_run:
            planned = self._send(planned, look, record, done)
            if rotten := self._read_again(planned, look, record, done):
                found = self._assessor.assess(look, record, rules)
                why = f"{first_few([*rotten.values()])} is no longer what was verified"
                planned = _all_stay(self._plan(found, look), why, rotten)
        if reads:
            done.findings += self._bad(found, record, done)
        if reads and not settings.dry_run:
            good = [each for each in found if each.state == "verified"]
            self._folder.point(max(good, key=lambda each: each.order).name if good else "")
        done.failed += [
            f"{each.name} stays: {each.reason}" for each in planned if each.stays and each.name in rules.unverified
        ]
        going = {each.name: each for each in planned if not each.stays}
        if settings.dry_run:
            done.removed = _named(look, going)
        elif going:
            self._remove(look, going, record, done)
        if done.removed and not settings.dry_run:
            look = self._look()
        if not settings.dry_run and rules.removes:
            self._remove_leftovers(look, found, done)
        done.notes += self._folder.notes
        for what in self._folder.unseen if rules.removes else ():
            done.unchecked.setdefault(what, [])
        removed = tuple(saved.name for saved in done.removed)
        return Tended(
            path=self._folder.path,
            checkpoints=tuple(replace(each, stays=each.name not in removed) for each in planned),
            unknown=look.unknown,
            verified=tuple(done.verified),
            removed=removed,
            freed_bytes=sum(saved.nbytes for saved in done.removed),
            quarantine=self._quarantine(look),
            findings=tuple(done.findings),
            failed=tuple(done.failed),
            notes=tuple(done.notes),
            not_checked=tuple(
                f"{what} ({first_few(names)})" if names else what for what, names in done.unchecked.items()
            ),
            dry_run=settings.dry_run,
        )

    def _quarantine(self, look: Look) -> dict[str, str]:
        """Return what can be brought back, and until when, the next to go first."""
        start = time.time() + self._settings.quarantine_s
        ends = sorted((start - self._folder.age(leftover), name) for leftover, name in look.leftovers.items())
        shown = ((name, datetime.fromtimestamp(end, UTC)) for end, name in ends if math.isfinite(end))
        return {name: end.isoformat(timespec="seconds") for name, end in shown}

    def _verify_new(self, look: Look, candidates: Sequence[Candidate], record: dict[str, Entry], done: _Done) -> bool:
        """Verify what nobody has; was there anything?"""
        for saved in _named(look, [each.name for each in candidates if each.state == "complete"]):
            if self._is_quiet(saved) and (entry := self._verify(saved, record, done)) is not None:
                record[saved.name] = entry
                self._folder.append(RECORD_NAME, build_line(saved.name, entry))
                done.verified.append(saved.name)
        if done.verified:
            self._write_record(record)
        return bool(done.verified)

    def _plan(self, found: Sequence[Candidate], look: Look) -> tuple[Candidate, ...]:
        """Decide, and look who uses what is to go; in a dry run, who uses anything."""
        rules, kept = self._settings.rules, self._settings.kept
        why = "the trainer points at it"
        planned = plan_retention(
            [replace(each, pinned=each.pinned or why * (each.name in kept)) for each in found], rules
        )
        asked = [each.name for each in planned if self._settings.dry_run or not each.stays]
        used = self._folder.users(_named(look, asked)) if asked else {}
        return plan_retention([replace(each, used_by=used.get(each.name, "")) for each in planned], rules)

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
        there = {*(saved.name for saved in look.saved), *look.leftovers.values()}
        series = {place.series for name in known if (place := place_of(name)) is not None}
        there |= {last[1] for each in series if (last := _last_fit(known, each)) is not None}
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
            with leased(path):
                result = examine(path, level=level, num_workers=workers, progress=self._progress, looks=profiler.looks)
            results.append((label, result))
            profiles.append(profiler.profile())
        return results, join_profiles(profiles)

    def _verify(self, saved: Saved, record: Mapping[str, Entry], done: _Done) -> Entry | None:
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
        unfit: tuple[str, ...] = ()
        moves: tuple[float, ...] = ()
        step = saved.place.step
        if not codes and step is not None and (last := _last_fit(record, saved.place.series, step)) is not None:
            unfit, moves = compare(profile, record[last[1]].profile, step - last[0], last[1])
        before = record.get(saved.name)
        is_rewritten = before is None or before.written != saved.written
        if before is not None and before.ok and not is_rewritten and before.profile.content != profile.content:
            unfit = ("its bytes are others than when it was verified, under the same sizes and times", *unfit)
        unfit = () if saved.name in self._settings.accept else unfit
        state = "NOT ok" if errors else "unsupported" if is_unsupported else "NOT fit" if unfit else "verified"
        self._say(f"{saved.name}: {state} ({format_size(nbytes)} of data, level {level})")
        return Entry(
            stamp=saved.stamp,
            written=saved.written,
            digest=digest,
            ok=not codes,
            level=level,
            order=1 + max((each.order for each in record.values()), default=0),
            codes=codes,
            unfit=unfit,
            profile=replace(profile, moves=moves),
            is_back=before is not None and before.is_back,
        )

    def _read_again(
        self, planned: Sequence[Candidate], look: Look, record: dict[str, Entry], done: _Done
    ) -> dict[str, str]:
        """Read those again whose last predecessors go; return series → the one that is not what was verified."""
        last: dict[str, int] = {}
        for each in planned:
            if not each.stays and each.step is not None:
                last[each.series] = max(last.get(each.series, -1), each.step)
        rotten = {}
        for series, step in last.items():
            good = [each for each in planned if each.stays and each.state == "verified" and each.series == series]
            name = min((each.step, each.name) for each in good if each.step is not None and each.step > step)[1]
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
        self, planned: tuple[Candidate, ...], look: Look, record: dict[str, Entry], done: _Done
    ) -> tuple[Candidate, ...]:
        """Bring what is verified and stays to where it is wanted; nothing goes before what follows it has arrived."""
        failed = len(done.failed)
        wanted = [each.name for each in planned if each.stays and each.state == "verified"]
        for saved in _named(look, wanted):
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
        is_sent = len(done.failed) == failed
        return planned if is_sent else _all_stay(planned, "what follows it has not arrived yet")

    def _remove(self, look: Look, going: Mapping[str, Candidate], record: dict[str, Entry], done: _Done) -> None:
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
        self, look: Look, going: Mapping[str, Candidate], record: Mapping[str, Entry], done: _Done
    ) -> list[Saved]:
        """Return what can go: what is, at this moment, as it was judged, and would be judged so again."""
        now = self._folder.look()
        again = self._plan(self._assessor.assess(now, record, self._settings.rules), now)
        goes = {each.name for each in again if not each.stays}
        stamps = {each.name: each.stamp for each in now.saved}
        ready = []
        for saved in _named(look, going):
            if going[saved.name].state != "verified" and not self._is_quiet(saved):
                done.failed.append(f"{saved.name} stays: it may be being written")
            elif saved.name not in goes or stamps[saved.name] != saved.stamp:
                done.failed.append(f"{saved.name} stays: something has opened or changed it, or what supersedes it")
            else:
                ready.append(saved)
        return ready

    def _bad(self, candidates: Sequence[Candidate], record: Mapping[str, Entry], done: _Done) -> list[Finding]:
        """Return findings of what is bad or unfit, and of what is not whole, an error unless its save may go on."""
        found = []
        told = {*done.verified, *(each.where for each in done.findings if each.code == "changed-since")}
        last = {each.series: each.step or 0 for each in candidates if each.state == "verified"}
        for each in candidates:
            hint = f"ckpt verify {os.path.join(self._folder.path, each.name)} says why"
            if each.state == "bad" and each.name not in told:
                what = f"it failed its verification: {each.why}"
                found.append(Finding.error("bad-checkpoint", each.name, what, hint))
            elif each.state == "unfit":
                accept = f"if it is as it should be: --accept {each.name}"
                found += [Finding.error("unfit-checkpoint", each.name, why, accept) for why in each.unfit]
            elif each.state in ("incomplete", "changing", "unsupported"):
                was_good = each.name in record and record[each.name].ok
                age = time.monotonic() - self._seen[each.name][1]
                is_passed = (each.step or 0) < last.get(each.series, -1) and (
                    age >= self._settings.quiet_s or self._settings.dry_run
                )
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
        is_full = self._folder.free_bytes() < (2 * needs if done.verified else _NO_SPACE_BYTES)
        for leftover, name in look.leftovers.items():
            if not is_full and 0 <= self._folder.age(leftover) < self._settings.quarantine_s:
                if done.removed:
                    size = format_size(sum(each.nbytes for each in done.removed))
                    way = f"`ckpt prune {escape_name(self._folder.path)} --undo all` brings back what is in quarantine"
                    way = f"{way}; --quarantine 0s frees {size}"
                    done.notes += [] if way in done.notes else [way]
                continue
            if (place := place_of(name)) is None or place.series in safe:
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


def _all_stay(planned: Sequence[Candidate], why: str, series: Collection[str] | None = None) -> tuple[Candidate, ...]:
    """Let nothing go, or nothing of some series."""
    return tuple(
        each
        if each.stays or (series is not None and each.series not in series)
        else replace(each, stays=True, reason=why)
        for each in planned
    )


def tended_json(tended: Tended) -> dict[str, object]:
    """Return the JSON document of `prune` and `watch`."""
    rows = [{**asdict(each), "fit": each.state == "verified"} for each in tended.checkpoints]
    return {**asdict(tended), "ok": tended.ok, "checkpoints": rows}
