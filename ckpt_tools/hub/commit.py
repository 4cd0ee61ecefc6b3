"""Send what the plan says, in one commit that only succeeds on the state that the plan was made on."""

from __future__ import annotations

import importlib.util
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.errors import CkptError, HubError
from ckpt_tools.hub.answers import client_errors, is_transient, to_refusal
from ckpt_tools.hub.client import Hub
from ckpt_tools.hub.files import changed, digest_files, read_whole
from ckpt_tools.hub.plan import LocalFile, PlannedFile, Remote
from ckpt_tools.storage.remote.refusals import RefusalError
from ckpt_tools.storage.source import LocalSource
from ckpt_tools.text import escape_name
from ckpt_tools.transfer.execute import Progress

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

MAX_COMMIT_TRIES = 5
"""Tries of one commit, after answers that may be overcome."""
READ_BACK_BYTES = 16 << 20
"""Of a file that one request reads back."""
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
            hub.log(f"{error.what}; trying without Xet")
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
    parent: str | None,
    message: str,
    create_pr: bool,
) -> Committed:
    """Make the commit, if the revision still is what the plan was made on.

    An answer can get lost after the hub has committed, so after a failure the repository is read before anything is
    sent again. A pull request, which looks like an earlier one, is not asked for twice. Raise HubError if
    somebody else committed meanwhile, the hub refused, or the outcome is not known.
    """
    operations: list[CommitOperationAdd | CommitOperationDelete] = [*additions, *deletions]
    doing = "opening the pull request" if create_pr else "committing"
    for attempt in range(1, MAX_COMMIT_TRIES + 1):
        try:
            return _send(hub, operations, parent_commit=parent, commit_message=message, create_pr=create_pr)
        except client_errors() as error:
            refusal = to_refusal(error, hub.account.token)
            problem = hub.error(doing, refusal, attempts=attempt)
        if not is_transient(refusal):
            raise problem from None
        may_be_done = refusal.was_sent and refusal.status != 429  # the hub may have committed, and its answer got lost
        if create_pr and may_be_done:
            page = f"{hub.account.endpoint}/{hub.repo}/discussions"
            hint = f"check whether it is there before you run the command again: {page}"
            raise HubError(problem.what, where=problem.where, hint=hint)
        if may_be_done and (now := hub.snapshot()).commit != parent:
            return _recognise(hub, now, additions, deletions, local)
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


def _recognise(
    hub: Hub,
    now: Remote,
    additions: Sequence[CommitOperationAdd],
    deletions: Sequence[CommitOperationDelete],
    local: Mapping[str, LocalFile],
) -> Committed:
    """Return the commit whose answer got lost, if the repository holds just what it would have made of it."""
    has_all = all(now.holds(local[addition.path_in_repo]) for addition in additions)
    if now.commit is None or not has_all or any(gone.path_in_repo in now.files for gone in deletions):
        raise hub.error("committing", RefusalError(412, ""))
    note = "the hub's answer to the commit was lost, but the commit was made"
    return Committed(oid=now.commit, pull_request=None, notes=(note,))


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
        raise CkptError("the repository is gone", where=hub.where)
    for plan in planned:
        there = remote.files.get(plan.path)
        if plan.state == "deleted":
            if there is not None:
                findings.append(_finding("not-deleted", plan.path, "it should have been deleted, but is still there"))
        elif there is None:
            findings.append(_finding("not-arrived", plan.path, "the hub does not have it"))
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
            what = f"the hub reports the file but returns different bytes: sha256 {sha256}, not {expected}"
            findings.append(_finding("arrived-different", path, what))
    return tuple(findings), sum(file.nbytes for file in found.values())


def _finding(code: str, path: str, what: str) -> Finding:
    hint = "delete it on the hub and push again; if that does not help, report it to the hub's operators"
    return Finding.error(code=code, where=path, what=what, hint=hint)
