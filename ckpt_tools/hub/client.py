"""The one way to the hub: the real client, with timeouts, bounded retries and errors that name no secret."""

from __future__ import annotations

import base64
import functools
import importlib
import json
import logging
import os
import re
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from ckpt_tools.errors import HubError, UsageError
from ckpt_tools.hub.front_matter import CARD_NAME
from ckpt_tools.hub.plan import KeepAnswer, LocalFile, Remote
from ckpt_tools.storage.remote.account import Account
from ckpt_tools.storage.remote.hub_source import HubSource, open_commit
from ckpt_tools.storage.remote.server_checks import RefusalError, scrub
from ckpt_tools.storage.remote.source import RemoteFile
from ckpt_tools.storage.remote.web import CONNECT_TIMEOUT_S, MAX_WAIT_S, TRANSIENT, retry_after
from ckpt_tools.storage.source import Source

if TYPE_CHECKING:
    import httpx2


# What the hub refused or failed at, in the user's terms; no secret gets into it

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


@functools.cache
def _texts() -> Mapping[str, Any]:
    with open(os.path.join(os.path.dirname(__file__), "refusals.toml"), "rb") as file:
        return tomllib.load(file)


def explain(
    refusal: RefusalError, doing: str, repo: str, *, revision: str, endpoint: str, attempts: int, creates: bool
) -> tuple[str, str | None]:
    """Return what happened and what to do about it; `creates`: the request was to create the repository."""
    tries = f" after {attempts} tries" if attempts > 1 else ""
    if refusal.status is None:
        return _unanswered(refusal, doing, tries)
    text = _words(refusal, refusal.status, creates=creates)
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
    return text["what"].format(**words), text["hint"].format(**words) if "hint" in text else None


def _words(refusal: RefusalError, status: int, *, creates: bool) -> Any:  # noqa: ANN401 - of refusals.toml
    by_status, by_code = _texts()["status"], _texts()["code"]
    if status in (403, 404) and refusal.code in by_code:
        return by_code[refusal.code]
    if status in (403, 507) and _QUOTA.search(refusal.message):
        return by_status["402"]
    if status == 403 and creates:
        return by_code["NotInNamespace"]
    return by_status.get(str(status), by_status["5xx" if status >= 500 else "other"])


def _unanswered(refusal: RefusalError, doing: str, tries: str) -> tuple[str, str | None]:
    detail = f": {refusal.message}" if refusal.message else ""
    reason = _plain(refusal.message)
    if refusal.is_lasting and _QUOTA.search(refusal.message):
        return f"{doing}{detail}", "free storage on the hub or extend it (settings, billing)"
    if refusal.is_lasting:
        hint = "check the address of the hub: a proxy or a login page may have answered"
        return f"{doing}{detail}", hint if refusal.code == "NotJson" else None
    if refusal.was_sent:
        return f"{doing}: the connection to the hub was lost{tries}{reason}", _texts()["again"]
    hint = "check the network, and HF_ENDPOINT and HTTPS_PROXY if they are set"
    return f"{doing}: cannot reach the hub{tries}{reason}", hint


def _plain(message: str) -> str:
    found = (words for known, words in _texts()["network"].items() if re.search(known, message, re.IGNORECASE))
    return "".join(f": {words}" for words in [next(found, None)] if words)


T = TypeVar("T")
Log = Callable[[str], None]
WAITS_S = (1.0, 2.0, 4.0, 8.0)  # Pauses between the tries of one request: five tries
MAX_CONNECTS = 3  # Tries to reach a hub that does not even take the connection
SILENCE_TIMEOUT_S = 300.0
"""Without a byte in either direction; a large commit takes the hub a minute. The client's own default is for ever."""
ASK_FILES = 256  # Files in one question about how they will be kept; the hub's own limit
SAMPLE_BYTES = 512  # First bytes of a file that it asks for, and tells text from


class Hub:
    """Requests about one repository at one revision; a `repo` without namespace is one of the token's user."""

    def __init__(self, account: Account, repo: str, *, revision: str | None, log: Log) -> None:
        from huggingface_hub import HfApi

        self.account, self.revision, self.log = account, revision or "main", log
        self.api: HfApi = HfApi(endpoint=account.endpoint, token=account.token, library_name="ckpt-tools")
        try:
            _utils().validate_repo_id(repo)
        except ValueError:
            hint = "use ORG/NAME with letters, digits, '-', '_' and '.'"
            raise UsageError(f"{repo!r} is not a valid repository name", hint=hint) from None
        self.repo = repo
        if "/" not in repo:  # a bare name on the hub is somebody's old model, not one's own
            doing = "looking up the token's owner"
            self.repo = f"{self.call(doing, lambda: str(self.api.whoami()['name']))}/{repo}"

    @property
    def where(self) -> str:
        """For the second line of an error."""
        at = "" if self.revision == "main" else f" at {self.revision}"
        return f"{self.repo}{at} on {self.account.endpoint}"

    def error(self, doing: str, refusal: RefusalError, *, attempts: int = 1, creates: bool = False) -> HubError:
        """Return the error that a refusal is, with what to do about it."""
        known = {"revision": self.revision, "endpoint": self.account.endpoint}
        what, hint = explain(refusal, doing, self.repo, attempts=attempts, creates=creates, **known)
        return HubError(what, where=self.where, hint=hint)

    def unexpected(self, doing: str) -> HubError:
        """Return the error for a response that cannot be understood."""
        return HubError(f"{doing}: unexpected response from the hub", where=self.where)

    def call(self, doing: str, work: Callable[[], T], *, creates: bool = False, retries: bool = True) -> T:
        """Run a request, again where that may help; raise HubError when it failed for good.

        Without `retries` only a connection that broke is tried again, since `work` repeats its own requests.
        """
        for attempt, pause_s in enumerate((*WAITS_S, None), start=1):
            _bound_session()
            try:
                return work()
            except client_errors() as error:
                refusal = to_refusal(error, self.account.token)
                asked_s = refusal.retry_after_s or 0.0
                is_away = not refusal.was_sent and attempt == MAX_CONNECTS
                is_repeated = retries or (refusal.status is None and refusal.was_sent)
                if pause_s is None or is_away or asked_s > MAX_WAIT_S or not (is_transient(refusal) and is_repeated):
                    raise self.error(doing, refusal, attempts=attempt, creates=creates) from None
            self.pause(doing, max(pause_s, asked_s))
        raise AssertionError("the last try returns or raises")

    def pause(self, doing: str, seconds: float) -> None:
        """Wait before another try."""
        self.log(f"{doing}: retrying in {seconds:.0f} s")
        time.sleep(seconds)

    def snapshot(self, commit: str | None = None) -> Remote:
        """Return what the repository holds at the revision, or at a commit."""
        from huggingface_hub.errors import RepositoryNotFoundError
        from huggingface_hub.hf_api import RepoFile

        doing = "reading the repository"

        def info() -> Any:  # noqa: ANN401 - ModelInfo
            try:
                return self.api.model_info(self.repo, revision=commit or self.revision)
            except RepositoryNotFoundError as error:
                if error.response.status_code != 404:  # 401: an anonymous or refused request looks the same
                    raise
                return None

        def tree(commit: str) -> dict[str, RemoteFile]:
            found = {}
            for each in self.api.list_repo_tree(self.repo, revision=commit, recursive=True):
                if isinstance(each, RepoFile):
                    nbytes, oid = (each.size, each.blob_id) if each.lfs is None else (each.lfs.size, each.lfs.sha256)
                    found[each.path] = RemoteFile(nbytes=nbytes, version={"oid": oid})
            return found

        found = self.call(doing, info)
        if found is None:
            return Remote(exists=False, files={})
        if found.id.lower() != self.repo.lower():  # the hub led to another page
            raise HubError(f"{self.repo} has been renamed to {found.id}", where=self.where, hint=f"use {found.id}")
        files = {} if found.sha is None else self.call(doing, lambda: tree(found.sha))
        return Remote(exists=True, private=found.private, commit=found.sha, files=files)

    def has(self, repo: str) -> bool:
        """Return True if the hub shows this token a repository."""
        try:
            return self.api.model_info(repo) is not None
        except client_errors():
            return False

    def titles(self, *, since: str | None) -> list[str]:
        """Return the titles of the commits after `since`, the newest first; none where the history cannot be read."""
        try:
            rows = self._commits()
            return [row["title"] for row in rows[: [row["id"] for row in rows].index(since) if since else None]]
        except (HubError, KeyError, TypeError, ValueError):
            return []

    def was_last(self, title: str) -> bool:
        """Return True if the newest commit has this title, and none but the user of this token as its author."""
        try:
            row = self._commits()[0]
            user = self.call("reading the history", lambda: self.api.whoami()["name"])
            return row["title"] == title and {author["user"] for author in row["authors"]} == {user}
        except (HubError, LookupError, TypeError):
            return False

    def _commits(self) -> list[dict[str, Any]]:
        route = f"models/{self.repo}/commits/{quote(self.revision, safe='')}"
        return self._request("reading the history", "GET", route) or []

    def open(self, remote: Remote, paths: Iterable[str]) -> HubSource:
        """Open some of what a repository holds, to read it from the hub itself."""
        return open_commit(self.repo, remote.commit or "", {path: remote.files[path] for path in paths}, self.account)

    def create(self, *, private: bool) -> None:
        """Create the repository; no harm if somebody else just has."""
        doing = "creating the repository"
        self.call(doing, lambda: self.api.create_repo(self.repo, private=private, exist_ok=True), creates=True)

    def ask(self, source: Source, files: Sequence[LocalFile], *, create_pr: bool) -> dict[str, KeepAnswer]:
        """Ask how the hub will keep `files`; nothing is stored. A pull request (`create_pr`) takes fewer rights."""
        doing = "asking the hub how it stores the files"
        found: dict[str, KeepAnswer] = {}
        for start in range(0, len(files), ASK_FILES):
            rows = []
            for file in files[start : start + ASK_FILES]:
                sample = base64.b64encode(file.read(source, 0, min(SAMPLE_BYTES, file.nbytes)))
                rows.append({"path": file.path, "sample": sample.decode("ascii"), "size": file.nbytes})
            document = self._request(doing, "POST", self._route("preupload", create_pr=create_pr), {"files": rows})
            try:
                for row in document["files"]:
                    found[row["path"]] = KeepAnswer(row["uploadMode"], row.get("shouldIgnore") is True)
            except (AttributeError, KeyError, TypeError):
                raise self.unexpected(doing) from None
        if any(file.path not in found or found[file.path].mode not in ("lfs", "regular") for file in files):
            raise self.unexpected(doing)
        return found

    def offers_xet(self, *, create_pr: bool) -> bool:
        """Return True if this hub has Xet; raise HubError if the token may not write here or the hub is away."""
        route = self._route("xet-write-token", create_pr=create_pr)
        return self._request("asking the hub for its storage", "GET", route) is not None

    def validate_card(self, text: str) -> None:
        """Raise HubError with the hub's reasons if it does not take a model card: it would refuse the commit."""
        document = {"repoType": "model", "content": text}
        found = self._request("checking the model card", "POST", "validate-yaml", document, answers=400)
        rows = found.get("errors") if isinstance(found, dict) else None
        reasons = [str(row.get("message")) for row in rows or () if isinstance(row, dict)]
        if reasons:
            what = f"the hub rejects the model card: {scrub('; '.join(reasons), self.account.token)}"
            raise HubError(what, where=CARD_NAME, hint="fix README.md or the option, or push without a card: --no-card")

    def _route(self, name: str, *, create_pr: bool) -> str:
        return f"models/{self.repo}/{name}/{quote(self.revision, safe='')}" + "?create_pr=1" * create_pr

    def _request(self, doing: str, method: str, route: str, document: object = None, *, answers: int = 200) -> Any:  # noqa: ANN401
        """Return the JSON of a route that the client has no function for; None where a hub of one's own has it not."""
        headers = _utils().build_hf_headers(token=self.account.token, library_name="ckpt-tools")

        def work() -> Any:  # noqa: ANN401
            url = f"{self.account.endpoint}/api/{route}"
            response = _utils().get_session().request(method, url, json=document, headers=headers)
            status = response.status_code
            if status in (405, 501) or (status == 404 and "X-Error-Code" not in response.headers):
                return None
            if status != answers:
                _utils().hf_raise_for_status(response)
            return response.json()

        return self.call(doing, work)


# The client's connections and logs are shared with whatever else runs in this process.


def _utils() -> Any:  # noqa: ANN401 - the module re-exports its names in a way that type checkers do not see
    return importlib.import_module("huggingface_hub.utils")


def _bound_session(*, undo: bool = False) -> None:
    """Bound the waiting of the client's connections before every request, since it replaces them; or `undo` that."""
    import httpx2

    try:
        session: httpx2.Client = _utils().get_session()
    except (ImportError, OSError, ValueError) as error:
        hint = "check the proxies (HTTPS_PROXY, HTTP_PROXY, ALL_PROXY) and certificates (SSL_CERT_FILE) that are set"
        raise HubError(f"cannot set up a connection{_plain(str(error))}", hint=hint) from None
    ours, theirs = httpx2.Timeout(SILENCE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S), httpx2.Timeout(None)
    if session.timeout == (ours if undo else theirs):
        session.timeout = theirs if undo else ours
    hooks = [hook for hook in session.event_hooks["response"] if hook is not _refuse_long_waits]
    session.event_hooks = session.event_hooks | {"response": hooks if undo else [*hooks, _refuse_long_waits]}


def _refuse_long_waits(response: httpx2.Response) -> None:
    """End what the client would otherwise sleep through: it waits as long as it is asked to, be it a day."""
    asked_s = retry_after(response.headers) if response.status_code in (429, 503) else None
    if asked_s is not None and asked_s > MAX_WAIT_S:
        raise refusal_of(response, None)


@contextmanager
def quiet_client(token: str | None, log: Log, *, bars: bool) -> Iterator[None]:
    """Pass on what the client logs without its secrets, and let it draw no progress bars unless they are wanted."""
    utils = _utils()

    class Relay(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            log(scrub(record.getMessage(), token))

    logger = logging.getLogger("huggingface_hub")
    handlers, propagate, relay = logger.handlers[:], logger.propagate, Relay(logging.WARNING)
    logger.handlers, logger.propagate = [relay], False
    hide = not bars and not utils.are_progress_bars_disabled()
    if hide:
        utils.disable_progress_bars()
    try:
        yield
    finally:
        with suppress(HubError):  # there was no connection to begin with
            _bound_session(undo=True)
        logger.handlers, logger.propagate = handlers, propagate
        if hide:
            utils.enable_progress_bars()
