"""Push a directory: check, plan, one guarded commit, and proof of what arrived."""

from __future__ import annotations

import importlib.util
import os
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.errors import CkptError, HubError, MissingError, UnreadableError, UsageError
from ckpt_tools.hub.card import (
    MAX_CARD_BYTES,
    CardFacts,
    Sample,
    build_card,
    facts_in,
    merged_with,
    notes_on,
    replaced_in,
)
from ckpt_tools.hub.check import check_directory
from ckpt_tools.hub.client import Hub, Log, client_errors, is_transient, quiet_client, to_refusal
from ckpt_tools.hub.facts import configs_naming, facts_of, refuse_assumed, refuse_contradictions
from ckpt_tools.hub.front_matter import CARD_NAME, name_base, read_front_matter
from ckpt_tools.hub.gallery import add_gallery
from ckpt_tools.hub.one_file import complete, staged
from ckpt_tools.hub.plan import (
    LocalFile,
    PlannedFile,
    PushResult,
    Remote,
    changed,
    digest_files,
    file_of_bytes,
    list_directory,
    plan_files,
    read_whole,
    stale_weights,
    visibility,
)
from ckpt_tools.hub.secrets import refuse_secrets
from ckpt_tools.hub.stranger import check_loads
from ckpt_tools.options import Doc, default_num_workers, takes
from ckpt_tools.options.hub import PushFields
from ckpt_tools.storage.locations import is_remote, likely
from ckpt_tools.storage.remote.account import find_account, find_pusher, is_offline
from ckpt_tools.storage.remote.server_checks import RefusalError
from ckpt_tools.storage.run_leases import leased
from ckpt_tools.storage.source import LocalSource
from ckpt_tools.text import escape_name, first_few
from ckpt_tools.transfer.execute import Progress
from ckpt_tools.units import format_size

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete


_MAX_SHOWN = 20  # Files that somebody else changed
MAX_COMMIT_TRIES = 5  # Tries of one commit, after answers that may be overcome
READ_BACK_BYTES = 16 << 20  # Of a file that one request reads back
MAX_READ_BACK = 100  # Files inside of git that are read back, a request each: git names each by a digest of its bytes
_XET_BOUNDS = {
    "HF_XET_CLIENT_RETRY_MAX_ATTEMPTS": "4",
    "HF_XET_CLIENT_RETRY_BASE_DELAY": "1s",
    "HF_XET_CLIENT_RETRY_MAX_DURATION": "60s",
}
"""By itself hf_xet tries a storage that is away for many minutes, without a word. It reads these when it begins."""
_OID = re.compile(r"[0-9a-f]{40}", re.ASCII)


class Committed(NamedTuple):
    """A commit that the hub has made."""

    oid: str
    pull_request: str | None
    notes: tuple[str, ...] = ()


def upload(
    hub: Hub,
    source: LocalSource,
    planned: Sequence[PlannedFile],
    local: Mapping[str, LocalFile],
    *,
    create_pr: bool,
    num_workers: int,
) -> list[CommitOperationAdd]:
    """Upload the large files, and return what the commit adds; nobody sees any of it before the commit."""
    from huggingface_hub import CommitOperationAdd

    additions = []
    for plan in filter(lambda plan: plan.is_sent, planned):
        # What lies inside of git is read once and sent from memory.
        is_whole = plan.mode == "regular" or local[plan.path].content is not None
        content = read_whole(source, local[plan.path]) if is_whole else source.path(plan.path)
        additions.append(CommitOperationAdd(path_in_repo=plan.path, path_or_fileobj=content))
    options: dict[str, Any] = {"create_pr": create_pr, "num_threads": num_workers, "free_memory": False}

    def send() -> None:
        hub.api.preupload_lfs_files(hub.repo, additions, revision=hub.revision, **options)

    _upload_large(hub, send, create_pr=create_pr)
    try:
        source.check_unchanged()
    except CkptError as error:
        error.what += "; nothing was committed"
        raise
    for addition in additions:
        if addition.upload_info.sha256.hex() != local[addition.path_in_repo].sha256:
            raise changed(addition.path_in_repo)
    return additions


def _upload_large(hub: Hub, send: Callable[[], None], *, create_pr: bool) -> None:
    """Upload by Xet where both sides have it, and by LFS otherwise or where Xet fails; both go by the sha256."""
    from huggingface_hub import constants

    is_off = constants.HF_HUB_DISABLE_XET
    if not is_off and importlib.util.find_spec("hf_xet") is not None and hub.offers_xet(create_pr=create_pr):
        ours = {name: value for name, value in _XET_BOUNDS.items() if name not in os.environ}
        os.environ.update(ours)
        try:
            return hub.call("uploading to Xet", send, retries=False)
        except HubError as error:
            hub.log(f"{error.what}; retrying without Xet")
        finally:
            for name in ours:
                os.environ.pop(name, None)
    constants.HF_HUB_DISABLE_XET = True
    try:
        # The client repeats every request of its own; as a whole it costs little, since it skips what has arrived.
        hub.call("uploading", send, retries=False)
    finally:
        constants.HF_HUB_DISABLE_XET = is_off


def commit(
    hub: Hub,
    additions: Sequence[CommitOperationAdd],
    deletions: Sequence[CommitOperationDelete],
    local: Mapping[str, LocalFile],
    *,
    base: Remote,
    message: str,
    create_pr: bool,
) -> Committed:
    """Make the commit, if the revision still is what the plan was made on.

    An answer can get lost after the hub has committed, so after a failure the repository is read before anything is
    sent again. A pull request, which looks like an earlier one, is not asked for twice. Raise HubError if
    somebody else committed meanwhile, the hub refused, or the outcome is not known.
    """
    operations: list[CommitOperationAdd | CommitOperationDelete] = [*additions, *deletions]
    doing, parent = "opening the pull request" if create_pr else "committing", base.commit
    for attempt in range(1, MAX_COMMIT_TRIES + 1):
        try:
            return _send(hub, operations, parent_commit=parent, commit_message=message, create_pr=create_pr)
        except client_errors() as error:
            refusal = to_refusal(error, hub.account.token)
            problem = hub.error(doing, refusal, attempts=attempt)
        if refusal.status == 412:
            raise _overtaken(hub, base, hub.snapshot(), local, message) from None
        if not is_transient(refusal):
            raise problem from None
        may_be_done = refusal.was_sent and refusal.status != 429  # the hub may have committed, and its answer got lost
        if create_pr and may_be_done:
            page = f"{hub.account.endpoint}/{hub.repo}/discussions"
            hint = f"check whether the pull request exists before you run the command again: {page}"
            raise HubError(problem.what, where=problem.where, hint=hint)
        if may_be_done and (now := hub.snapshot()).commit != parent:
            if _is_ours(now, additions, deletions, local):
                note = "the hub made the commit, but its response was lost"
                return Committed(oid=str(now.commit), pull_request=None, notes=(note,))
            raise _overtaken(hub, base, now, local, message)
        if attempt < MAX_COMMIT_TRIES:
            hub.pause(doing, max(2.0 ** (attempt - 1), refusal.retry_after_s or 0.0))
    raise problem


def _send(
    hub: Hub,
    operations: Sequence[CommitOperationAdd | CommitOperationDelete],
    **options: Any,  # noqa: ANN401 - of create_commit
) -> Committed:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        done = hub.api.create_commit(hub.repo, operations, revision=hub.revision, **options)
    notes = tuple(escape_name(" ".join(str(warning.message).split())) for warning in caught)
    if not isinstance(done.oid, str) or not _OID.fullmatch(done.oid):
        raise hub.unexpected("committing")
    return Committed(oid=done.oid, pull_request=done.pr_url, notes=notes)


def _is_ours(
    now: Remote,
    additions: Sequence[CommitOperationAdd],
    deletions: Sequence[CommitOperationDelete],
    local: Mapping[str, LocalFile],
) -> bool:
    """Return True if the repository holds just what the commit whose answer got lost would have made of it."""
    has_all = all(now.holds(local[addition.path_in_repo]) for addition in additions)
    return now.commit is not None and has_all and not any(gone.path_in_repo in now.files for gone in deletions)


def _overtaken(hub: Hub, base: Remote, now: Remote, local: Mapping[str, LocalFile], message: str) -> HubError:
    """Return the error for somebody else's commit: what it changed, and whether ours is in the history."""
    error, titles = hub.error("committing", RefusalError(412, "")), hub.titles(since=base.commit)
    if not titles or message in titles:
        error.add_note(f"whether this push was committed is not known: see {hub.account.endpoint}/{hub.repo}/commits")
    else:
        error.add_note("nothing of this push was committed")
    changed = sorted(path for path in {*base.files, *now.files} if base.files.get(path) != now.files.get(path))
    for path in changed[:_MAX_SHOWN]:
        here, held = local.get(path), [each.files.get(path) for each in (base, now)]
        before, theirs = ("none" if each is None else str(each.version["oid"]) for each in held)
        ours = "none" if here is None else here.sha256 if 64 in (len(theirs), len(before)) else str(here.blob_id)
        error.add_note(f"{escape_name(path)}: theirs {theirs[:12]}, ours {ours[:12]}, base {before[:12]}")
    if len(changed) > _MAX_SHOWN:
        error.add_note(f"… and {len(changed) - _MAX_SHOWN:,} more files changed")
    return error


def check_arrival(
    hub: Hub,
    oid: str,
    planned: Sequence[PlannedFile],
    local: Mapping[str, LocalFile],
    read_back: Sequence[str],
    *,
    num_workers: int,
    progress: Progress | None,
) -> tuple[tuple[Finding, ...], int]:
    """Compare what the hub has at a commit with what was here; return findings and the number of bytes read.

    The hub's own word is taken for the names and digests of all files; of those in `read_back` every byte is read.
    """
    findings, remote = [], hub.snapshot(oid)
    if not remote.exists:
        raise CkptError("the repository no longer exists", where=hub.where)
    for plan in planned:
        there = remote.files.get(plan.path)
        if plan.state == "deleted":
            if there is not None:
                findings.append(_finding("not-deleted", plan.path, "it should have been deleted, but still exists"))
        elif there is None:
            findings.append(_finding("not-arrived", plan.path, "the hub does not have this file"))
        elif not remote.holds(local[plan.path]):
            what = f"the hub has different content ({there.nbytes} bytes)"
            findings.append(_finding("arrived-different", plan.path, what))
    wrong = {finding.where for finding in findings}
    read_back = [path for path in read_back if path not in wrong]
    with hub.open(remote, read_back) as theirs:
        sizes = {"num_workers": num_workers, "block_bytes": READ_BACK_BYTES}
        found = digest_files(theirs, read_back, progress=progress, **sizes)
    for path in read_back:
        sha256, expected = found[path].sha256, local[path].sha256
        if sha256 != expected:
            what = f"the hub lists the file but returns different bytes: sha256 must be {expected}, got {sha256}"
            findings.append(_finding("arrived-different", path, what))
    return tuple(findings), sum(file.nbytes for file in found.values())


def _finding(code: str, path: str, what: str) -> Finding:
    hint = "delete it on the hub and push again; if that does not help, report it to the hub's operators"
    return Finding.error(code=code, where=path, what=what, hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class PushOptions(PushFields):
    """The options of `push`."""

    card: Annotated[CardFacts | bool, Doc("Facts for the model card beside those of the configs; False for none.")] = (
        True
    )


class Push:
    """One push, step by step; every step finds here what those before it made."""

    def __init__(self, options: PushOptions, num_workers: int, about: CardFacts | None = None) -> None:
        self._options, self._about = options, about or CardFacts()  # What is known beside the files
        self._directory = os.fspath(options.directory)
        self._num_workers = num_workers
        self._asked = options.card if isinstance(options.card, CardFacts) else CardFacts()
        self._log: Log = options.log or (lambda _: None)
        self._notes: list[str] = []
        self._hub: Hub
        self._source: LocalSource
        self._local: dict[str, LocalFile]
        self._remote: Remote
        self._planned: tuple[PlannedFile, ...]

    def run(self) -> PushResult:
        """Push, or with `dry_run` return what would be pushed."""
        options = self._options
        if options.create_pr and options.revision not in (None, "main"):
            raise UsageError("a pull request needs revision main", hint="leave out --revision or --create-pr")
        self._asked.check()
        start = time.monotonic()
        account = (find_account if options.dry_run else find_pusher)(endpoint=options.endpoint, token=options.token)
        self._is_alone = options.dry_run and (is_offline() or not account.token)
        with quiet_client(account.token, self._log, bars=options.bars), LocalSource(self._directory) as source:
            self._source = source
            wanted = {"include": options.include, "exclude": options.exclude}
            chosen, left_out = list_directory(source, **wanted, keep_pickles=options.keep_pickles)
            self._kind, self._adapters, self._notes = check_directory(source, chosen, num_workers=self._num_workers)
            if not options.accept_assumed:
                refuse_assumed(self._adapters)
            hub = self._hub = Hub(account, options.repo, revision=options.revision, log=self._log)
            self._message = options.commit_message or f"Upload {hub.repo.rpartition('/')[2]} with ckpt"
            receiver = options.progress(sum(chosen.values())) if options.progress is not None else None
            self._local = digest_files(source, chosen, num_workers=self._num_workers, progress=receiver)
            named = {"the commit message": options.commit_message, "the name of the branch": options.revision}
            texts = {**named, "the name of the repository": options.repo}
            self._not_searched = refuse_secrets(source, self._local.values(), account.token, texts)
            self._find_remote()
            self._name_base(self._add_card())
            # The card says what configs and headers say.
            made = (file for file in self._local.values() if file.content is not None)
            refuse_secrets(source, made, account.token)
            self._notes += check_loads(source, self._local, self._kind)
            self._plan()
            self._validate_card()
            created = not self._remote.exists and not self._is_alone
            card = self._local.get(CARD_NAME)
            text = card.content.decode() if card is not None and card.content is not None else None
            done: Committed | None = None
            findings: tuple[Finding, ...] = ()
            num_checked = checked_bytes = 0
            if not options.dry_run:
                self._announce(text, created=created)
                if created:
                    hub.create(private=options.private)
                    self._find_remote()
                    self._plan()
                done = self._commit(created=created)
                findings, num_checked, checked_bytes = self._check(done)
        return PushResult(
            directory=self._directory,
            repo=hub.repo,
            url=f"{account.endpoint}/{hub.repo}",
            revision=hub.revision,
            dry_run=options.dry_run,
            created=created,
            private=self._remote.private if self._remote.exists else options.private,
            card=text,
            parent=self._remote.commit,
            commit=None if done is None else done.oid,
            pull_request=None if done is None else done.pull_request,
            files=self._planned,
            left_out=left_out,
            num_checked=num_checked,
            checked_bytes=checked_bytes,
            findings=findings,
            not_searched=self._not_searched,
            notes=tuple(dict.fromkeys(self._notes)),
            seconds=time.monotonic() - start,
        )

    def _find_remote(self) -> None:
        hub = self._hub
        if self._is_alone:
            why = "offline mode is on" if is_offline() else "there is no token (hf auth login, or set HF_TOKEN)"
            self._notes.append(f"not compared with the hub, and the card not validated by it: {why}")
        self._remote = Remote(exists=False, is_known=False, files={}) if self._is_alone else hub.snapshot()
        if self._remote.exists and self._options.private and self._remote.private is False:
            what = f"--private was given, but {hub.repo} is public; nothing was uploaded"
            hint = "make it private on the hub, choose another name, or leave --private out"
            raise HubError(what, where=hub.where, hint=hint)
        if not self._remote.exists and hub.revision != "main" and not self._is_alone:
            what = f"{hub.repo} does not exist, so it has no revision {hub.revision!r}"
            raise HubError(what, where=hub.where, hint="push to main first")

    def _name_base(self, base_model: str | None) -> None:
        """Let the adapter's config name the base that the card names; the directory itself stays as it is."""
        if base_model is not None and not self._is_alone and not self._hub.has(base_model):
            where = self._hub.account.endpoint
            self._notes.append(f"base model {base_model}: private, or not known at {where}; not everybody can load it")
        if self._adapters:
            what = "that the base model has the adapter's modules, in these shapes"
            self._notes.append(f"not checked: {what} (`ckpt check-lora` with --base compares them)")
        accept = self._options.accept_assumed
        for path, content, note in configs_naming(self._source, self._local, base_model, accept_assumed=accept):
            self._local[path] = file_of_bytes(path, content)
            self._notes.append(note)

    def _add_card(self) -> str | None:
        """Add the model card, or what the README lacks, and return the base; the directory itself stays as it is."""
        asked, source = self._asked, self._source
        here, there = self._local.get(CARD_NAME), self._remote.files.get(CARD_NAME)
        nbytes = here.nbytes if here is not None else there.nbytes if there is not None else 0
        was_left_out = bool(self._options.include) or CARD_NAME in source.list_files(max_depth=0)
        is_kept = self._options.card is False or (here is None and was_left_out)
        if is_kept and here is None:
            return asked.base_model
        try:
            text = self._card_so_far(nbytes) if here is not None or nbytes <= MAX_CARD_BYTES else None
        except UnicodeDecodeError as error:
            if here is None:
                self._notes.append(f"{CARD_NAME} is not UTF-8 text: left unchanged")
                return asked.base_model
            what = "the model card is not UTF-8 text, which the hub's client refuses"
            hint = f"save it as UTF-8, or leave it out: --exclude {CARD_NAME}"
            raise UnreadableError(what, where=CARD_NAME, hint=hint) from error
        if is_kept or nbytes > MAX_CARD_BYTES:
            name_base(text or "", None)
            self._notes += [] if is_kept else [f"{CARD_NAME} is too large to add to: left unchanged"]
            return asked.base_model
        before = text
        if text is not None:
            text = name_base(text, asked.base_model)
        gallery: tuple[Sample, ...] = ()
        if asked.samples is not None:
            gallery, notes = add_gallery(os.fspath(asked.samples), self._directory, self._local)
            self._notes += notes
        said = asked.or_else(CardFacts() if text is None else facts_in(text))
        about, base = self._about, said.base_model or self._about.base_model
        main = about.load and about.load.weight_name  # the others are its copies
        adapters = {name: check for name, check in self._adapters.items() if main in (None, name)}
        facts = complete(about, facts_of(source, self._local, self._kind, adapters, base_model=base))
        facts = replace(said.or_else(facts), gallery=gallery)
        if text is None or not read_front_matter(text).get("base_model"):
            self._notes += facts.notes
        if text is None and facts.is_empty:
            return facts.base_model
        card = build_card(facts, repo=self._hub.repo, existing=text, asked=asked)
        self._notes += [*notes_on(facts, asked, card), *replaced_in(before or "", card)]
        refuse_contradictions(card, self._kind, self._adapters, facts.base_model)
        self._local[CARD_NAME] = file_of_bytes(CARD_NAME, card.encode("utf-8"))
        self._local = dict(sorted(self._local.items()))
        return facts.base_model

    def _announce(self, card: str | None, *, created: bool) -> None:
        """Say who will be able to read it, and what the card will say, before anything leaves."""
        private = self._options.private if created else self._remote.private
        self._log(f"{self._hub.repo}: {visibility(private, is_new=created)}")
        for line in (card or "").partition("\n---")[0].splitlines()[1:]:
            self._log(f"  {escape_name(line)}")

    def _card_so_far(self, nbytes: int) -> str | None:
        """Return the README that is here with the keys of the hub's, or else the hub's; None where there is none.

        A text that somebody wrote on the hub is not replaced by the one here.
        """
        here, there = self._local.get(CARD_NAME), self._remote.files.get(CARD_NAME)
        ours = None if here is None else self._source.read(CARD_NAME, 0, nbytes).decode("utf-8-sig")
        if there is None or (here is not None and (self._remote.holds(here) or there.nbytes > MAX_CARD_BYTES)):
            return ours
        with self._hub.open(self._remote, [CARD_NAME]) as source:
            theirs = source.read(CARD_NAME, 0, there.nbytes).decode("utf-8-sig")
        if ours is None:
            return theirs
        merged, is_same = merged_with(ours, theirs)
        if not (is_same or self._options.replace_card or self._hub.was_last(self._message)):
            what = (
                "the README.md on the hub says something else than the one here, and its last commit is not this push's"
            )
            hint = "keep the hub's: --exclude README.md; or put what it says into the one here, then: --replace-card"
            raise UsageError(what, where=f"{self._hub.account.endpoint}/{self._hub.repo}", hint=hint)
        return merged

    def _validate_card(self) -> None:
        """Let the hub judge the card before anything is sent: by itself it does so after the upload."""
        card = self._local.get(CARD_NAME)
        is_sent = any(plan.path == CARD_NAME and plan.is_sent for plan in self._planned)
        if card is not None and is_sent and card.nbytes <= MAX_CARD_BYTES and not self._is_alone:
            self._hub.validate_card(card.read(self._source, 0, card.nbytes).decode("utf-8"))

    def _plan(self) -> None:
        local, remote, options = self._local, self._remote, self._options
        files = list(local.values()) if remote.exists else []
        answers = self._hub.ask(self._source, files, create_pr=options.create_pr) if files else {}
        self._planned = plan_files(local, remote, answers, delete_stale=options.delete_stale)
        if not options.delete_stale and (stale := stale_weights(local, remote)):
            what = f"the repository contains weights that this directory does not: {first_few(stale)}"
            self._notes.append(f"{what}; a loader may pick those up (--delete-stale deletes them)")

    def _commit(self, *, created: bool) -> Committed | None:
        from huggingface_hub import CommitOperationDelete

        hub, planned, options = self._hub, self._planned, self._options
        ignored = [plan.path for plan in planned if plan.state == "ignored"]
        if ignored:
            what = f"the repository's .gitignore excludes {first_few(ignored)}"
            hint = "change the .gitignore on the hub, or exclude them here as well: --exclude GLOB"
            raise HubError(what, where=hub.where, hint=hint)
        sending = [plan for plan in planned if plan.is_sent]
        deletions = [CommitOperationDelete(plan.path) for plan in planned if plan.state == "deleted"]
        if not sending and not deletions:
            return None
        size = format_size(sum(plan.nbytes for plan in sending))
        self._log(f"uploading {len(sending)} file{'s' if len(sending) != 1 else ''}, {size}")
        pr = options.create_pr
        is_uploaded = False
        try:
            additions = upload(hub, self._source, planned, self._local, create_pr=pr, num_workers=self._num_workers)
            is_uploaded = True
            base = self._remote
            done = commit(hub, additions, deletions, self._local, base=base, message=self._message, create_pr=pr)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                where = f"{hub.account.endpoint}/{hub.repo}"
                error.add_note(f"check at {where} whether it was committed" if is_uploaded else "nothing was committed")
                error.add_note("run the command again: it skips what is already uploaded")
            if created:
                error.add_note(f"the repository {hub.repo} was created")
            raise
        self._notes += done.notes
        return done

    def _check(self, done: Committed | None) -> tuple[tuple[Finding, ...], int, int]:
        """Compare what the hub has now with what is here; returns findings, files read back, and their bytes."""
        oid = self._remote.commit if done is None else done.oid
        level, progress = self._options.check, self._options.progress
        states = {"sent": ("new", "changed"), "all": ("new", "changed", "unchanged"), "names": ()}[level]
        paths = [plan.path for plan in self._planned if plan.state in states]
        small = [plan.path for plan in self._planned if plan.state in states and plan.mode == "regular"]
        if oid is None:
            return (), 0, 0
        if level == "sent" and len(small) > MAX_READ_BACK:
            unread = {*small} - {small[i * len(small) // MAX_READ_BACK] for i in range(MAX_READ_BACK)}
            paths = [path for path in paths if path not in unread]
            what = "were compared by git's digests of their bytes alone (--check all reads them back)"
            self._notes.append(f"{len(unread):,} small files {what}")
        total = sum(self._local[path].nbytes for path in paths)
        receiver = progress(total) if progress is not None and total else None
        try:
            hub, planned, local, workers = self._hub, self._planned, self._local, self._num_workers
            findings, nbytes = check_arrival(hub, oid, planned, local, paths, num_workers=workers, progress=receiver)
        except BaseException as error:
            if done is not None:
                error.add_note(f"commit {oid} was made, but the check of the uploaded files did not finish")
                error.add_note("run the same ckpt push with --check all to check every file")
            raise
        self._source.check_unchanged()
        if level == "names":
            self._notes.append("the bytes were not read back: only the hub's own digests were compared")
        return findings, len(paths), nbytes


@takes(PushOptions, 'ckpt_tools.push("model", "me/model", dry_run=True).ok', "True")
def push(options: PushOptions) -> PushResult:
    """Push a directory to the hub in one commit, and check what arrived.

    The directory must be complete, as `verify` judges it. The commit is made on the revision that was planned
    for, or not at all. The directory is not written to: a model card, or the keys that its README.md lacks, are only
    uploaded.

    Raises:
        UsageError: Options that contradict each other, or invalid names.
        UnreadableError: The directory holds something incomplete, or changes meanwhile.
        AdapterRefusedError: It holds an adapter that would not load, or would load and change nothing.
        HubError: The hub refused or cannot be reached, or somebody else committed meanwhile.
    """
    path = os.fspath(options.directory)
    if is_remote(path):
        hint = f"copy it here first: ckpt gather {path} DIR, then push DIR"
        raise UsageError("push needs a directory on this machine", where=path, hint=hint)
    workers = options.num_workers or default_num_workers()
    if os.path.isfile(path) and path.endswith(".safetensors"):
        asked = options.card if isinstance(options.card, CardFacts) else CardFacts()
        with leased(path), staged(path, asked, options.also) as (root, about, notes):
            result = Push(replace(options, directory=root), workers, about).run()
            return replace(result, directory=path, notes=(*result.notes, *notes))
    if options.also:
        raise UsageError("--also writes copies of a LoRA that is one file", where=path, hint="push FILE.safetensors")
    if not os.path.isdir(path):
        if os.path.lexists(path):
            raise UsageError("push needs a directory, or a LoRA in one .safetensors file", where=path)
        raise MissingError("no such file or directory", where=path, hint=likely(path))
    with leased(path):
        return Push(options, workers).run()
