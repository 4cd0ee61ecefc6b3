"""The one way to the hub: the real client, with timeouts, bounded retries and errors that name no secret."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from ckpt_tools.errors import HubError, LimitError, UsageError
from ckpt_tools.hub.answers import Failure, Place, to_error
from ckpt_tools.hub.front_matter import CARD_NAME
from ckpt_tools.hub.plan import Answer, LocalFile, Remote, RemoteFile
from ckpt_tools.hub.session import Say, bound_session, client_errors, client_utils, to_failure
from ckpt_tools.moving.execute import Progress
from ckpt_tools.remote.account import Account
from ckpt_tools.remote.refusals import scrub
from ckpt_tools.remote.web import MAX_WAIT_S
from ckpt_tools.storage.source import Source

if TYPE_CHECKING:
    from huggingface_hub import HfApi

T = TypeVar("T")
WAITS_S = (1.0, 2.0, 4.0, 8.0)
"""Pauses between the tries of one request: five tries."""
MAX_CONNECTS = 3
"""Tries to reach a hub that does not even take the connection."""
BLOCK_BYTES = 1 << 20
ASK_FILES = 256
"""Files in one question about how they will be kept; the hub's own limit."""
SAMPLE_BYTES = 512
"""First bytes of a file that it asks for, and tells text from."""


class Hub:
    """Requests about one repository at one revision; a `repo` without namespace is one of the token's user."""

    def __init__(self, account: Account, repo: str, *, revision: str | None, say: Say) -> None:
        from huggingface_hub import HfApi

        self.account = account
        self.revision = revision or "main"
        self.say = say
        self.api: HfApi = HfApi(endpoint=account.endpoint, token=account.token, library_name="ckpt-tools")
        try:
            client_utils().validate_repo_id(repo)
        except ValueError:
            raise UsageError(
                f"{repo!r} cannot name a repository",
                hint="write namespace/name with letters, digits, '-', '_' and '.'",
            ) from None
        self.repo = repo
        if "/" not in repo:  # a bare name on the hub is somebody's old model, not one's own
            self.repo = f"{self._who_am_i()}/{repo}"

    def _who_am_i(self) -> str:
        name = self.call("asking who the token belongs to", lambda: self.api.whoami()["name"])
        if not isinstance(name, str):
            raise self.nonsense("asking who the token belongs to")
        return name

    def place(self, doing: str, *, namespace_only: bool = False) -> Place:
        """Return what a request is about, for errors."""
        return Place(
            doing=doing,
            repo=self.repo,
            revision=self.revision,
            endpoint=self.account.endpoint,
            namespace_only=namespace_only,
        )

    def nonsense(self, doing: str) -> HubError:
        """Return the error for an answer that cannot be understood."""
        return HubError(f"{doing}: unexpected response from the hub", where=self.place(doing).where)

    def call(
        self,
        doing: str,
        work: Callable[[], T],
        *,
        namespace_only: bool = False,
        may_repeat: Callable[[Failure], bool] = lambda _: True,
    ) -> T:
        """Run a request, again where that may help; raise HubError when it failed for good."""
        for attempt, pause_s in enumerate((*WAITS_S, None), start=1):
            bound_session()
            try:
                return work()
            except client_errors() as error:
                failure = to_failure(error, self.account.token)
                asked_s = failure.retry_after_s or 0.0
                is_away = not failure.was_sent and attempt == MAX_CONNECTS
                is_hopeless = is_away or asked_s > MAX_WAIT_S or not (failure.is_transient and may_repeat(failure))
                if pause_s is None or is_hopeless:
                    place = self.place(doing, namespace_only=namespace_only)
                    raise to_error(failure, place, attempts=attempt) from None
            self.pause(doing, max(pause_s, asked_s))
        raise AssertionError("the last try returns or raises")

    def pause(self, doing: str, seconds: float) -> None:
        """Wait before another try."""
        self.say(f"{doing}: trying again in {seconds:.0f} s")
        time.sleep(seconds)

    def look(self) -> Remote:
        """Return what the repository holds at the revision."""
        from huggingface_hub.errors import RepositoryNotFoundError

        doing = "reading the repository"

        def info() -> tuple[bool | None, str | None] | None:
            try:
                found = self.api.model_info(self.repo, revision=self.revision)
            except RepositoryNotFoundError as error:
                if error.response.status_code != 404:  # 401: an anonymous or refused request looks the same
                    raise
                return None
            return found.private, found.sha

        def tree(commit: str) -> dict[str, RemoteFile]:
            from huggingface_hub.hf_api import RepoFile

            entries = self.api.list_repo_tree(self.repo, revision=commit, recursive=True)
            return {entry.path: _remote_file(entry) for entry in entries if isinstance(entry, RepoFile)}

        found = self.call(doing, info)
        if found is None:
            return Remote(repo=self.repo, exists=False, files={})
        private, commit = found
        files = {} if commit is None else self.call(doing, lambda: tree(commit))
        return Remote(repo=self.repo, exists=True, private=private, commit=commit, files=files)

    def create(self, *, private: bool) -> None:
        """Create the repository; no harm if somebody else just has."""
        self.call(
            "creating the repository",
            lambda: self.api.create_repo(self.repo, private=private, exist_ok=True),
            namespace_only=True,
        )

    def ask(self, source: Source, files: Sequence[LocalFile], *, create_pr: bool) -> dict[str, Answer]:
        """Ask how the hub will keep `files`; nothing is stored. A pull request (`create_pr`) takes fewer rights."""
        doing = "asking how the files will be kept"
        found: dict[str, Answer] = {}
        for start in range(0, len(files), ASK_FILES):
            question = {"files": [_question(source, file) for file in files[start : start + ASK_FILES]]}

            def post(question: Mapping[str, object] = question) -> Any:  # noqa: ANN401 - whatever JSON it is
                response = self.request("POST", "preupload", create_pr=create_pr, json=question)
                client_utils().hf_raise_for_status(response)
                return response.json()

            found |= self._answers(self.call(doing, post), doing)
        if any(file.path not in found for file in files):
            raise self.nonsense(doing)
        return found

    def validate_card(self, text: str) -> None:
        """Raise HubError with the hub's reasons if it does not take a model card: it would refuse the commit."""

        def post() -> Any:  # noqa: ANN401 - whatever JSON it is
            url = f"{self.account.endpoint}/api/validate-yaml"
            document = {"repoType": "model", "content": text}
            response = client_utils().get_session().post(url, json=document, headers=self.headers())
            if response.status_code == 400:
                return response.json()
            if response.status_code not in (404, 405, 501):  # a hub of one's own, or a mirror
                client_utils().hf_raise_for_status(response)
            return {}

        found = self.call("checking the model card", post)
        rows = found.get("errors") if isinstance(found, dict) else None
        reasons = [str(row.get("message")) for row in rows or () if isinstance(row, dict)]
        if reasons:
            what = f"the hub refuses the model card: {scrub('; '.join(reasons), self.account.token)}"
            raise HubError(what, where=CARD_NAME, hint="fix README.md or the option, or leave it out: --no-card")

    def request(self, method: str, route: str, *, create_pr: bool, json: object = None) -> Any:  # noqa: ANN401 - httpx2's
        """Return the response of a route about the revision, whatever its status."""
        url = f"{self.account.endpoint}/api/models/{self.repo}/{route}/{quote(self.revision, safe='')}"
        params = {"create_pr": "1"} if create_pr else None
        return client_utils().get_session().request(method, url, json=json, headers=self.headers(), params=params)

    def headers(self) -> dict[str, str]:
        """Return what a request to the hub itself bears."""
        headers: dict[str, str] = client_utils().build_hf_headers(token=self.account.token, library_name="ckpt-tools")
        return headers

    def _answers(self, document: object, doing: str) -> dict[str, Answer]:
        rows = document.get("files") if isinstance(document, dict) else None
        found = {}
        for row in rows if isinstance(rows, list) else [None]:
            if not isinstance(row, dict):
                raise self.nonsense(doing)
            path, mode = row.get("path"), row.get("uploadMode")
            if not isinstance(path, str) or mode not in ("lfs", "regular"):
                raise self.nonsense(doing)
            found[path] = Answer(mode=mode, is_ignored=row.get("shouldIgnore") is True)
        return found

    def read(self, path: str, commit: str, *, limit: int) -> bytes:
        """Return a small file of the repository."""
        parts: list[bytes] = []

        def take(block: bytes) -> None:
            parts.append(block)
            if sum(map(len, parts)) > limit:
                raise LimitError(f"more than {limit} bytes", where=path)

        self._download(path, commit, take, parts.clear)
        return b"".join(parts)

    def digest(self, path: str, commit: str, progress: Progress | None) -> tuple[str, int]:
        """Read a file of the repository, and return its sha256 and size."""
        hasher, nbytes = hashlib.sha256(), 0

        def take(block: bytes) -> None:
            nonlocal nbytes
            hasher.update(block)
            nbytes += len(block)
            if progress is not None:
                progress(len(block))

        def restart() -> None:
            nonlocal hasher, nbytes
            hasher, nbytes = hashlib.sha256(), 0

        self._download(path, commit, take, restart)
        return hasher.hexdigest(), nbytes

    def _download(self, path: str, commit: str, take: Callable[[bytes], None], restart: Callable[[], None]) -> None:
        """Hand every byte of a file to `take`; a broken connection goes on where it broke."""
        from huggingface_hub import hf_hub_url

        utils = client_utils()
        url = hf_hub_url(self.repo, path, revision=commit, endpoint=self.account.endpoint)
        headers = self.headers() | {"Accept-Encoding": "identity"}  # offsets are those of the content
        position = 0

        def stream() -> None:
            nonlocal position
            asked = headers if position == 0 else headers | {"Range": f"bytes={position}-"}
            with utils.get_session().stream("GET", url, headers=asked) as response:
                if position and response.status_code == 416:  # it broke after the last byte
                    return
                utils.hf_raise_for_status(response)
                if position and response.status_code != 206:
                    position = 0
                    restart()
                for block in response.iter_bytes(BLOCK_BYTES):
                    take(block)
                    position += len(block)

        self.call(f"reading {path} back", stream)


def _remote_file(entry: Any) -> RemoteFile:  # noqa: ANN401 - RepoFile, which a type checker finds only when installed
    lfs = entry.lfs
    if lfs is None:
        return RemoteFile(path=entry.path, nbytes=entry.size, blob_id=entry.blob_id, sha256=None)
    return RemoteFile(path=entry.path, nbytes=lfs.size, blob_id=entry.blob_id, sha256=lfs.sha256)


def _question(source: Source, file: LocalFile) -> dict[str, object]:
    sample = file.read(source, 0, min(SAMPLE_BYTES, file.nbytes))
    return {"path": file.path, "sample": base64.b64encode(sample).decode("ascii"), "size": file.nbytes}
