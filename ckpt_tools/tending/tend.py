"""Tend a run's folder once: verify what is new and whole, send it where it is wanted, remove what is superseded."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from ckpt_tools.checks.verify import Level
from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.options import ProgressFactory
from ckpt_tools.tending.assess import Assessor, examine, targets
from ckpt_tools.tending.folder import Folder, Look, Saved
from ckpt_tools.tending.record import MAX_RECORD_BYTES, RECORD_NAME, Entry, build_record, parse_record
from ckpt_tools.tending.retention import Candidate, Decision, Rules, plan_retention
from ckpt_tools.tending.series import parse_name
from ckpt_tools.text import first_few
from ckpt_tools.units import format_size

_MAX_FINDINGS = 20
"""Of one checkpoint."""
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

    def _pass(self, *, wait: bool) -> Tended:
        rules, settings = self._settings.rules, self._settings
        done = _Done(unchecked={what: [] for what in self._folder.unseen if rules.removes})
        look = self._look()
        record = self._read_record(look)
        candidates = self._assessor.assess(look, record, rules)
        is_prune = settings.level is None  # a watch may begin before anything is measured
        _check_rules(candidates, rules, must_measure=is_prune and rules.best is not None)
        if wait and self._needs_time(candidates):
            time.sleep(settings.quiet_s)
            look = self._look()
            candidates = self._assessor.assess(look, record, rules)
        if settings.level is not None and not settings.dry_run:
            for saved in _named(look, [each.name for each in candidates if each.state == "complete"]):
                if self._is_quiet(saved) and (entry := self._verify(saved, done)) is not None:
                    count = 1 + max((each.order for each in record.values()), default=0)
                    record[saved.name] = replace(entry, order=count)
                    self._write_record(record)
                    done.verified.append(saved.name)
            if done.verified:
                look = self._look()
                candidates = self._assessor.assess(look, record, rules)
            done.findings += _bad(self._folder, candidates, record, done.verified)
        decisions = self._send(self._plan(candidates, look), look, record, done)
        stays = [each for each in decisions if each.stays and each.candidate.name in rules.unverified]
        done.failed += [f"{each.candidate.name} stays: {each.reason}" for each in stays]
        for decision in decisions:
            for saved in _named(look, [] if decision.stays else [decision.candidate.name]):
                if settings.dry_run or self._remove(saved, decision, record, done):
                    done.removed.append(saved)
        if done.removed and not settings.dry_run:
            self._write_record(record)
        if not settings.dry_run and rules.removes:
            self._remove_leftovers(look, candidates, done)
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

    def _plan(self, candidates: Sequence[Candidate], look: Look) -> tuple[Decision, ...]:
        """Decide, and look who uses what is to go."""
        rules = self._settings.rules
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

    def _needs_time(self, candidates: Collection[Candidate]) -> bool:
        named = self._settings.rules.unverified
        new = [each for each in candidates if each.state == "complete" and self._settings.level is not None]
        return bool(new) or any(each.name in named and each.state != "verified" for each in candidates)

    def _read_record(self, look: Look) -> dict[str, Entry]:
        """Return what was verified; of what is there no more, nothing."""
        known = parse_record(self._folder.read(RECORD_NAME, MAX_RECORD_BYTES))
        return {saved.name: known[saved.name] for saved in look.saved if saved.name in known}

    def _write_record(self, record: Mapping[str, Entry]) -> None:
        self._folder.write(RECORD_NAME, build_record(record))

    def _verify(self, saved: Saved, done: _Done) -> Entry | None:
        """Verify a checkpoint, and return what is recorded of it; None where that is nothing."""
        level = self._settings.level or "values"
        found: list[Finding] = []
        nbytes = 0
        digest = self._assessor.digest(saved)
        try:
            for label, path in targets(self._folder, saved):
                result = examine(path, level=level, num_workers=self._settings.num_workers, progress=self._progress)
                inside = "/".join(filter(None, (saved.name, label)))
                found += [replace(each, where=f"{inside}/{each.where}".rstrip("/")) for each in result.findings]
                for what in result.not_checked:
                    done.unchecked.setdefault(f"{label}: {what}" if label else what, []).append(saved.name)
                nbytes += result.nbytes
        except CkptError as error:
            done.failed.append(f"{saved.name} could not be verified: {error}")
            return None
        now = self._folder.look().find(saved.name)
        if now is None or now.stamp != saved.stamp:
            done.notes.append(f"{saved.name} changed while it was verified: it counts as not verified")
            return None
        errors = [each for each in found if each.severity == "error"]
        codes = tuple(dict.fromkeys(each.code for each in errors))
        entry = Entry(stamp=saved.stamp, digest=digest, ok=not codes, level=level, order=0, codes=codes)
        if entry.state == "unsupported":
            found, errors = [replace(each, severity="warning") if each in errors else each for each in found], []
        rest = [each for each in found if each.severity != "error"]
        done.findings += errors[:_MAX_FINDINGS] + rest[:_MAX_FINDINGS]
        state = "NOT ok" if errors else entry.state
        self._say(f"{saved.name}: {state} ({format_size(nbytes)} of data, level {level})")
        return entry

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

    def _remove(self, saved: Saved, decision: Decision, record: dict[str, Entry], done: _Done) -> bool:
        """Remove a checkpoint if it, and what it is superseded by, is still as it was judged."""
        if decision.candidate.state != "verified" and not self._is_quiet(saved):
            done.failed.append(f"{saved.name} stays: it may be being written")
        elif not self._has_successor(saved, record) or not self._folder.remove(saved):
            done.failed.append(f"{saved.name} stays: something has opened or changed it, or what supersedes it")
        else:
            record.pop(saved.name, None)
            self._say(f"{saved.name}: removed ({format_size(saved.nbytes)})")
            return True
        return False

    def _has_successor(self, saved: Saved, record: Mapping[str, Entry]) -> bool:
        """Are there, at this moment, as many later checkpoints of the series as must be, each as it was verified?"""
        look = self._folder.look()
        now = look.find(saved.name)
        later = [
            record[each.name].stamp == each.stamp
            for each in look.saved
            if each.place.series == saved.place.series
            and (each.place.step or -1) > (saved.place.step or -1)
            and each.name in record
            and record[each.name].ok
        ]
        is_there = sum(later) >= (self._settings.rules.last or 1)
        return is_there and now is not None and now.stamp == saved.stamp

    def _remove_leftovers(self, look: Look, candidates: Sequence[Candidate], done: _Done) -> None:
        """End interrupted removals, where something verified of the series is there."""
        safe = {each.series for each in candidates if each.state == "verified"}
        for leftover, names in look.leftovers.items():
            places = [parse_name(name, is_directory=True) or parse_name(name, is_directory=False) for name in names]
            if all(place is None or place.series in safe for place in places):
                self._folder.remove_leftover(leftover)
            else:
                done.notes.append(
                    f"{leftover} stays, what a killed run had begun to remove: nothing verified is beside it"
                )


def _named(look: Look, names: Collection[str]) -> list[Saved]:
    """Return the checkpoints of these names."""
    return [saved for saved in look.saved if saved.name in names]


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


def _bad(
    folder: Folder, candidates: Sequence[Candidate], record: Mapping[str, Entry], verified: Collection[str]
) -> list[Finding]:
    """Return findings of what was found bad before, and of what cannot be read: an error if it was verified once."""
    found = []
    for each in candidates:
        hint = f"ckpt verify {os.path.join(folder.path, each.name)} says why"
        if each.state == "bad" and each.name not in verified:
            found.append(Finding.error("bad-checkpoint", each.name, f"it failed its verification: {each.why}", hint))
        elif each.state in ("incomplete", "unsupported"):
            was_good = each.name in record and record[each.name].ok
            what = f"it was verified, and has changed since: {each.why}" if was_good else each.why
            make = Finding.error if was_good else Finding.warning
            code = "incomplete-checkpoint" if each.state == "incomplete" else each.state
            found.append(make(code, each.name, what, None if not was_good else hint))
    return found


def tended_json(tended: Tended) -> dict[str, object]:
    """Return the JSON document of `prune` and `watch`."""
    rows = [
        {**asdict(each.candidate), "stays": each.candidate.name not in tended.removed, "reason": each.reason}
        for each in tended.decisions
    ]
    rest = {name: value for name, value in asdict(tended).items() if name != "decisions"}
    return {**rest, "ok": tended.ok, "checkpoints": rows}
