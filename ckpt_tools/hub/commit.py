"""Send what the plan says, in one commit that only succeeds on the state that the plan was made on."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.errors import CkptError, HubError
from ckpt_tools.hub.answers import Failure, to_error
from ckpt_tools.hub.client import Hub
from ckpt_tools.hub.files import changed, read_whole
from ckpt_tools.hub.parts import send_parts
from ckpt_tools.hub.plan import LocalFile, PlannedFile, Remote
from ckpt_tools.hub.session import client_errors, to_failure
from ckpt_tools.hub.xet import bounded_xet, offers_xet, open_stream, uses_xet
from ckpt_tools.moving.execute import Progress
from ckpt_tools.storage.source import LocalSource
from ckpt_tools.text import escape_name

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

MAX_COMMIT_TRIES = 5
"""Tries of one commit, after answers that may be overcome."""
_OID = re.compile(r"[0-9a-f]{40}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
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

    sending = [plan for plan in planned if plan.state in ("new", "changed")]

    def build(*, as_streams: bool) -> list[CommitOperationAdd]:
        additions = []
        for plan in sending:
            # What lies inside of git is read once and sent from memory.
            content: bytes | str | BinaryIO
            if plan.mode == "regular" or local[plan.path].content is not None:
                content = read_whole(source, local[plan.path])
            else:
                content = open_stream(source, plan.path) if as_streams else source.path(plan.path)
            additions.append(CommitOperationAdd(path_in_repo=plan.path, path_or_fileobj=content))
        return additions

    def send() -> None:
        hub.api.preupload_lfs_files(
            hub.repo,
            additions,
            revision=hub.revision,
            create_pr=create_pr,
            num_threads=num_workers,
            free_memory=False,
        )

    # Xet where the hub has it, and LFS where it has not or where Xet fails: both name the content by its sha256.
    additions = build(as_streams=False)
    is_by_lfs = True
    if uses_xet() and any(plan.mode == "lfs" for plan in sending):
        is_by_lfs = not (offers_xet(hub, create_pr=create_pr) and _is_sent_to_xet(hub, send))
        if is_by_lfs:
            additions = build(as_streams=True)
    if is_by_lfs:
        large = [local[plan.path] for plan in sending if plan.mode == "lfs"]
        send_parts(hub, source, large, create_pr=create_pr, num_workers=num_workers)
        # The client repeats every request of its own; as a whole it costs little, since it skips what has arrived.
        hub.call("uploading", send, may_repeat=lambda failure: failure.status is None and failure.was_sent)
    try:
        source.check_unchanged()
    except CkptError as error:
        error.what += "; nothing was committed"
        raise
    for addition in additions:
        if addition.upload_info.sha256.hex() != local[addition.path_in_repo].sha256:
            raise changed(addition.path_in_repo)
    return additions


def _is_sent_to_xet(hub: Hub, send: Callable[[], None]) -> bool:
    """Try to upload by Xet; say so where it fails."""
    try:
        with bounded_xet():
            hub.call("uploading to Xet", send, may_repeat=lambda _: False)
    except HubError as error:
        hub.say(f"{error.what}; trying without Xet")
        return False
    return True


def commit(
    hub: Hub,
    additions: Sequence[CommitOperationAdd],
    deletions: Sequence[CommitOperationDelete],
    local: Mapping[str, LocalFile],
    *,
    parent: str | None,
    message: str,
    create_pr: bool,
) -> Committed:
    """Make the commit, if the revision still is what the plan was made on.

    An answer can get lost after the hub has committed, so after a failure the repository is looked at before anything
    is sent again. A pull request, which cannot be told from an earlier one, is not asked for twice. Raise HubError if
    somebody else committed meanwhile, the hub refused, or the outcome is not known.
    """
    doing = "opening the pull request" if create_pr else "committing"
    for attempt in range(1, MAX_COMMIT_TRIES + 1):
        try:
            return _send(hub, [*additions, *deletions], parent=parent, message=message, create_pr=create_pr)
        except client_errors() as error:
            failure = to_failure(error, hub.account.token)
            problem = to_error(failure, hub.place(doing), attempts=attempt)
        if not failure.is_transient:
            raise problem from None
        if create_pr and _may_be_done(failure):
            page = f"{hub.account.endpoint}/{hub.repo}/discussions"
            hint = f"check whether it is there before you run the command again: {page}"
            raise HubError(problem.what, where=problem.where, hint=hint)
        if not create_pr and _may_be_done(failure):
            now = hub.look()
            if now.commit != parent:
                return _recognise(hub, now, additions, deletions, local)
        if attempt < MAX_COMMIT_TRIES:
            hub.pause(doing, max(2.0 ** (attempt - 1), failure.retry_after_s or 0.0))
    raise problem


def _send(
    hub: Hub,
    operations: Sequence[CommitOperationAdd | CommitOperationDelete],
    *,
    parent: str | None,
    message: str,
    create_pr: bool,
) -> Committed:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        done = hub.api.create_commit(
            hub.repo,
            operations,
            commit_message=message,
            revision=hub.revision,
            create_pr=create_pr,
            parent_commit=parent,
        )
    notes = tuple(escape_name(" ".join(str(warning.message).split())) for warning in caught)
    if not isinstance(done.oid, str) or not _OID.fullmatch(done.oid):
        raise hub.nonsense("committing")
    return Committed(oid=done.oid, pull_request=done.pr_url, notes=notes)


def _may_be_done(failure: Failure) -> bool:
    """May the hub have committed, although no answer says so?"""
    return failure.was_sent and failure.status != 429


def _recognise(
    hub: Hub,
    now: Remote,
    additions: Sequence[CommitOperationAdd],
    deletions: Sequence[CommitOperationDelete],
    local: Mapping[str, LocalFile],
) -> Committed:
    """Return the commit whose answer got lost, if the repository holds just what it would have made of it."""
    has_all = all(
        (there := now.files.get(addition.path_in_repo)) is not None and there.holds(local[addition.path_in_repo])
        for addition in additions
    )
    if now.commit is None or not has_all or any(gone.path_in_repo in now.files for gone in deletions):
        raise to_error(Failure(status=412, code=None, message=""), hub.place("committing"))
    note = "the hub's answer to the commit was lost, but the commit was made"
    return Committed(oid=now.commit, pull_request=None, notes=(note,))


def check_arrival(
    hub: Hub,
    oid: str,
    planned: Sequence[PlannedFile],
    local: Mapping[str, LocalFile],
    *,
    read_back: Sequence[str],
    progress: Progress | None,
) -> tuple[tuple[Finding, ...], int]:
    """Compare what the hub has at a commit with what was here; return findings and the number of bytes read.

    The hub's own word is taken for the names and digests of all files; of those in `read_back` every byte is read.
    """
    findings = []
    remote = Hub(hub.account, hub.repo, revision=oid, say=hub.say).look()
    if not remote.exists:
        raise CkptError("the repository is gone", where=hub.place("").where)
    for plan in planned:
        found = remote.files.get(plan.path)
        if plan.state == "deleted":
            if found is not None:
                findings.append(_finding("not-deleted", plan.path, "it should have been deleted, but is still there"))
        elif found is None:
            findings.append(_finding("not-arrived", plan.path, "the hub does not have it"))
        elif not found.holds(local[plan.path]):
            findings.append(
                _finding("arrived-different", plan.path, f"the hub has different content ({found.nbytes} bytes)")
            )
    wrong = {finding.where for finding in findings}
    read_bytes = 0
    for path in read_back:
        if path in wrong:
            continue
        sha256, nbytes = hub.digest(path, oid, progress)
        read_bytes += nbytes
        if sha256 != local[path].sha256:
            what = f"the hub reports the file but returns different bytes: sha256 {sha256}, not {local[path].sha256}"
            findings.append(_finding("arrived-different", path, what))
    return tuple(findings), read_bytes


def _finding(code: str, path: str, what: str) -> Finding:
    return Finding.error(
        code=code,
        where=path,
        what=what,
        hint="delete it on the hub and push again; if that does not help, report it to the hub's operators",
    )
