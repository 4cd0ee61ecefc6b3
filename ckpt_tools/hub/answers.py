"""What went wrong between here and the hub, in the user's terms; no secret gets into it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ckpt_tools.errors import HubError
from ckpt_tools.remote.web import TRANSIENT

_QUOTA = re.compile(r"storage|quota|billing|payment|upgrade|subscri", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a request was about."""

    doing: str
    """For people: "reading the repository", "uploading"."""
    repo: str
    """namespace/name."""
    revision: str
    """Branch, tag or commit."""
    endpoint: str
    namespace_only: bool = False
    """The request creates the repository: the right is one over the namespace."""

    @property
    def where(self) -> str:
        """For the second line of an error."""
        at = "" if self.revision == "main" else f" at {self.revision}"
        return f"{self.repo}{at} on {self.endpoint}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What came back instead of an answer."""

    status: int | None
    """HTTP status; None when there was no answer, or none that the client understood."""
    code: str | None
    """X-Error-Code: RepoNotFound, RevisionNotFound, EntryNotFound, GatedRepo."""
    message: str
    """The hub's or the system's words, without secrets."""
    retry_after_s: float | None = None
    was_sent: bool = True
    """False: the connection did not come about, so the hub has not seen the request."""
    is_lasting: bool = False
    """The client gave up for a reason that will be there again: an answer it does not understand or take."""
    is_json: bool = True
    """False: the answer was to be JSON and is not."""

    @property
    def is_quota(self) -> bool:
        """Does it say that there is no more storage, or none that is paid for?"""
        return self.status == 402 or (self.status in (403, 507) and _QUOTA.search(self.message) is not None)

    @property
    def is_transient(self) -> bool:
        """May the same request succeed a moment later?"""
        return not self.is_lasting and (self.status is None or self.status in TRANSIENT)


def to_error(failure: Failure, place: Place, *, attempts: int = 1) -> HubError:
    """Return the error that a failure is, with what to do about it."""
    what, hint = _explain(failure, place, attempts)
    return HubError(what, where=place.where, hint=hint)


_AGAIN = "run the command again later: it skips what is already uploaded"
_BY_STATUS: Mapping[int, tuple[str, str | None]] = {
    401: (
        "{doing}: the hub does not accept the token{says}",
        "it may have expired: create a new one at {settings}, then hf auth login or set HF_TOKEN",
    ),
    402: ("{doing}: out of storage, or payment required{says}", "free storage of {owner} or extend it: {billing}"),
    403: (
        "{doing}: the token may not write to {repo}{says}",
        "use a token with the right to write to it ({settings}), or propose the change: --create-pr",
    ),
    404: (
        "{doing}: no such repository, or the token may not see it{says}",
        "check the name, and that the token's user is a member of the organization",
    ),
    409: ("{doing}: another change is under way{says}", "run the command again in a minute"),
    412: (
        "somebody else committed to {revision} meanwhile; nothing of this push was committed",
        "run the command again: ckpt plans again, and skips what is already uploaded",
    ),
    413: (
        "{doing}: too large for the hub{says}",
        "write smaller files (ckpt gather --max-shard-size 5GB), or leave some out (--exclude GLOB)",
    ),
    429: ("{doing}: too many requests{tries}{wait}{says}", "run the command again later"),
}
_BY_CODE: Mapping[str, tuple[str, str | None]] = {
    "GatedRepo": ("{doing}: the repository is gated{says}", "ask for access at {page}"),
    "RevisionNotFound": (
        "{repo} has no revision {revision!r}",
        "create that branch on the hub first, or push to main ({page}/tree/main)",
    ),
    "EntryNotFound": ("{doing}: the hub does not have the file{says}", None),
}
"""X-Error-Code → what and hint, before the status counts."""
_NOT_IN_NAMESPACE = (
    "the token may not create repositories in {owner}{says}",
    "use a token with the right to write to repositories of {owner}: {settings}",
)


def _explain(failure: Failure, place: Place, attempts: int) -> tuple[str, str | None]:
    status, message = failure.status, failure.message
    tries = f" after {attempts} tries" if attempts > 1 else ""
    if failure.is_lasting:
        return f"{place.doing}: {message}", _lasting_hint(failure)
    if status is None:
        return _unreachable(failure, place, tries)
    if (code := failure.code or "") in _BY_CODE and status in (403, 404):
        what, hint = _BY_CODE[code]
    elif failure.is_quota:
        what, hint = _BY_STATUS[402]
    elif status == 403 and place.namespace_only:
        what, hint = _NOT_IN_NAMESPACE
    elif status in _BY_STATUS:
        what, hint = _BY_STATUS[status]
    elif status >= 500:
        what, hint = "{doing}: the hub failed with status {status}{tries}{says}", _AGAIN
    else:
        what, hint = "{doing}: the hub refused with status {status}{says}", None
    words = {
        "doing": place.doing,
        "repo": place.repo,
        "revision": place.revision,
        "status": status,
        "tries": tries,
        "says": f" (the hub says: {message})" if message else "",
        "wait": "" if failure.retry_after_s is None else f"; retry after {failure.retry_after_s:.0f} s",
        "owner": place.repo.partition("/")[0],
        "page": f"{place.endpoint}/{place.repo}",
        "settings": f"{place.endpoint}/settings/tokens",
        "billing": f"{place.endpoint}/settings/billing",
    }
    return what.format(**words), hint and hint.format(**words)


def _lasting_hint(failure: Failure) -> str | None:
    if _QUOTA.search(failure.message):
        return "free storage on the hub or extend it (settings, billing)"
    return None if failure.is_json else "check the address of the hub: a proxy or a login page may have answered"


def _unreachable(failure: Failure, place: Place, tries: str) -> tuple[str, str | None]:
    detail = f": {failure.message}" if failure.message else ""
    if failure.was_sent:
        what = f"{place.doing}: the connection to the hub broke{tries}{detail}"
        return what, "run the command again: it skips what is already uploaded"
    return (
        f"{place.doing}: cannot reach the hub{tries}{detail}",
        "check the network, and HF_ENDPOINT and HTTPS_PROXY if they are set",
    )
