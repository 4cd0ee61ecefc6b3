"""The one way to the hub: the real client, with timeouts, bounded retries and errors that name no secret."""

from __future__ import annotations

import base64
import importlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from ckpt_tools.errors import HubError, UsageError
from ckpt_tools.hub.answers import client_errors, explain, is_transient, refusal_of, to_refusal
from ckpt_tools.hub.front_matter import CARD_NAME
from ckpt_tools.hub.plan import KeepAnswer, LocalFile, Remote
from ckpt_tools.storage.remote.account import Account
from ckpt_tools.storage.remote.hub_source import HubSource, open_commit
from ckpt_tools.storage.remote.refusals import RefusalError, scrub
from ckpt_tools.storage.remote.source import RemoteFile
from ckpt_tools.storage.remote.web import CONNECT_TIMEOUT_S, MAX_WAIT_S, retry_after
from ckpt_tools.storage.source import Source

if TYPE_CHECKING:
    import httpx2

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
            hint = "write namespace/name with letters, digits, '-', '_' and '.'"
            raise UsageError(f"{repo!r} cannot name a repository", hint=hint) from None
        self.repo = repo
        if "/" not in repo:  # a bare name on the hub is somebody's old model, not one's own
            doing = "asking who the token belongs to"
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
        self.log(f"{doing}: trying again in {seconds:.0f} s")
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
        files = {} if found.sha is None else self.call(doing, lambda: tree(found.sha))
        return Remote(exists=True, private=found.private, commit=found.sha, files=files)

    def open(self, remote: Remote, paths: Iterable[str]) -> HubSource:
        """Open some of what a repository holds, to read it from the hub itself."""
        return open_commit(self.repo, remote.commit or "", {path: remote.files[path] for path in paths}, self.account)

    def create(self, *, private: bool) -> None:
        """Create the repository; no harm if somebody else just has."""
        doing = "creating the repository"
        self.call(doing, lambda: self.api.create_repo(self.repo, private=private, exist_ok=True), creates=True)

    def ask(self, source: Source, files: Sequence[LocalFile], *, create_pr: bool) -> dict[str, KeepAnswer]:
        """Ask how the hub will keep `files`; nothing is stored. A pull request (`create_pr`) takes fewer rights."""
        doing = "asking how the files will be kept"
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
        return self._request("asking for the storage", "GET", route) is not None

    def validate_card(self, text: str) -> None:
        """Raise HubError with the hub's reasons if it does not take a model card: it would refuse the commit."""
        document = {"repoType": "model", "content": text}
        found = self._request("checking the model card", "POST", "validate-yaml", document, answers=400)
        rows = found.get("errors") if isinstance(found, dict) else None
        reasons = [str(row.get("message")) for row in rows or () if isinstance(row, dict)]
        if reasons:
            what = f"the hub refuses the model card: {scrub('; '.join(reasons), self.account.token)}"
            raise HubError(what, where=CARD_NAME, hint="fix README.md or the option, or leave it out: --no-card")

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
        raise HubError(f"no connection can be set up: {scrub(str(error), None)}", hint=hint) from None
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
