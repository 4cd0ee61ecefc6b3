"""What the hub refused or failed at, in the user's terms; no secret gets into it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ckpt_tools.storage.remote.refusals import RefusalError, scrub
from ckpt_tools.storage.remote.web import TRANSIENT, retry_after

if TYPE_CHECKING:
    import httpx2

_QUOTA = re.compile(r"storage|quota|billing|payment|upgrade|subscri", re.IGNORECASE)


def client_errors() -> tuple[type[Exception], ...]:
    """Return what the client raises when the hub refuses, is away or sends an unexpected response."""
    import httpx2

    return (RefusalError, httpx2.HTTPError, OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError)


def to_refusal(error: BaseException, token: str | None) -> RefusalError:
    """Return what an exception of the client means."""
    import httpx2
    from huggingface_hub.errors import OfflineModeIsEnabled

    while isinstance(error, RuntimeError) and error.__cause__ is not None:  # an upload's thread wraps what it met
        error = error.__cause__
    if isinstance(error, RefusalError):
        return error
    response = getattr(error, "response", None)
    if response is not None:
        return refusal_of(response, token, getattr(error, "server_message", None))
    message = scrub(str(error), token)
    if isinstance(error, OfflineModeIsEnabled):
        return RefusalError(None, "offline mode is on: unset HF_HUB_OFFLINE", is_lasting=True)
    if isinstance(error, (httpx2.HTTPError, ConnectionError, TimeoutError)):  # the network, not the hub or the client
        refusal = RefusalError(None, message)
        never_left = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError, httpx2.UnsupportedProtocol)
        refusal.was_sent = not isinstance(error, never_left)
        return refusal
    if isinstance(error, (OSError, RuntimeError)) and message:
        return RefusalError(None, message, is_lasting=True)
    detail = f": {message}" if type(error) is ValueError and message else ""
    code = "NotJson" if isinstance(error, json.JSONDecodeError) else None
    return RefusalError(None, f"unexpected response from the hub{detail}", code=code, is_lasting=True)


def refusal_of(response: httpx2.Response, token: str | None, message: str | None = None) -> RefusalError:
    """Return what a response refuses; `message` is what the client made of its body."""
    headers = response.headers
    message = scrub(str(message or headers.get("X-Error-Message") or ""), token)
    refusal = RefusalError(response.status_code, message, code=headers.get("X-Error-Code"))
    refusal.retry_after_s = retry_after(headers)
    return refusal


def is_transient(refusal: RefusalError) -> bool:
    """Return True if the same request may succeed a moment later."""
    return not refusal.is_lasting and (refusal.status is None or refusal.status in TRANSIENT)


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


def explain(
    refusal: RefusalError, doing: str, repo: str, *, revision: str, endpoint: str, attempts: int, creates: bool
) -> tuple[str, str | None]:
    """Return what happened and what to do about it; `creates`: the request was to create the repository."""
    tries = f" after {attempts} tries" if attempts > 1 else ""
    if refusal.status is None:
        return _unanswered(refusal, doing, tries)
    what, hint = _words(refusal, refusal.status, creates=creates)
    words = {
        "doing": doing,
        "repo": repo,
        "revision": revision,
        "status": refusal.status,
        "tries": tries,
        "says": f" (the hub says: {refusal.message})" if refusal.message else "",
        "wait": "" if refusal.retry_after_s is None else f"; retry after {refusal.retry_after_s:.0f} s",
        "owner": repo.partition("/")[0],
        "page": f"{endpoint}/{repo}",
        "settings": f"{endpoint}/settings/tokens",
        "billing": f"{endpoint}/settings/billing",
    }
    return what.format(**words), hint and hint.format(**words)


def _words(refusal: RefusalError, status: int, *, creates: bool) -> tuple[str, str | None]:
    if status in (403, 404) and (refusal.code or "") in _BY_CODE:
        return _BY_CODE[refusal.code or ""]
    if status in (403, 507) and _QUOTA.search(refusal.message):
        return _BY_STATUS[402]
    if status == 403 and creates:
        return _NOT_IN_NAMESPACE
    failed = ("{doing}: the hub failed with status {status}{tries}{says}", _AGAIN)
    return _BY_STATUS.get(
        status, failed if status >= 500 else ("{doing}: the hub refused with status {status}{says}", None)
    )


def _unanswered(refusal: RefusalError, doing: str, tries: str) -> tuple[str, str | None]:
    detail = f": {refusal.message}" if refusal.message else ""
    if refusal.is_lasting and _QUOTA.search(refusal.message):
        return f"{doing}{detail}", "free storage on the hub or extend it (settings, billing)"
    if refusal.is_lasting:
        hint = "check the address of the hub: a proxy or a login page may have answered"
        return f"{doing}{detail}", hint if refusal.code == "NotJson" else None
    if refusal.was_sent:
        return f"{doing}: the connection to the hub broke{tries}{detail}", _AGAIN
    hint = "check the network, and HF_ENDPOINT and HTTPS_PROXY if they are set"
    return f"{doing}: cannot reach the hub{tries}{detail}", hint
