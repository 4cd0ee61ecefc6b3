"""What a push would do, file by file: decided before anything is sent. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.checkpoint.formats.file_names import is_weights

if TYPE_CHECKING:
    from ckpt_tools.storage.remote.source import RemoteFile
    from ckpt_tools.storage.source import Source

State = Literal["new", "changed", "unchanged", "ignored", "deleted"]
"""ignored: the repository's .gitignore leaves the file out. deleted: on the hub only, and asked to go."""
Mode = Literal["lfs", "regular"]  # How the hub keeps a file: as a large object named by its sha256, or inside of git


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFile:
    """A file to push, and what it holds."""

    path: str  # Relative, with forward slashes
    nbytes: int
    sha256: str
    blob_id: str | None
    """Git's name of the content (SHA-1), hexadecimal; None for a file too large to be kept inside of git."""
    content: bytes | None = None  # The bytes themselves where they are not those of a file: the model card

    def read(self, source: Source, offset: int, nbytes: int) -> bytes:
        """Return a part of it."""
        content = self.content
        return source.read(self.path, offset, nbytes) if content is None else content[offset : offset + nbytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """A repository at a revision, as it was at one moment."""

    exists: bool  # False: the first push creates it
    private: bool | None = None  # None: the hub did not say
    commit: str | None = None  # What the revision stands for; None while there is no commit
    files: Mapping[str, RemoteFile]
    """Path → size of the content, and its `oid`: of a large object the sha256, inside of git the blob's id."""

    def holds(self, file: LocalFile) -> bool:
        """Return True if the hub says that it has this very content under this path."""
        there = self.files.get(file.path)
        return there is not None and there.nbytes == file.nbytes and there.version["oid"] in (file.sha256, file.blob_id)


class KeepAnswer(NamedTuple):
    """What the hub says about a file that is to come; `is_ignored`: its .gitignore leaves the file out."""

    mode: Mode
    is_ignored: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFile:
    """One line of the plan."""

    path: str  # Relative, the same on both sides
    nbytes: int  # Size here; of a file to be deleted, there
    state: State
    mode: Mode | None  # None where the hub was not asked: a repository that does not exist yet, or a file to be deleted
    sha256: str  # Of the content; empty for a file to be deleted

    @property
    def is_sent(self) -> bool:
        """True if a push uploads it."""
        return self.state in ("new", "changed")


@dataclass(frozen=True, slots=True, kw_only=True)
class PushResult:
    """What a push did; with `dry_run`, what it would do."""

    directory: str
    repo: str
    url: str
    revision: str  # Branch that was pushed to, or that the pull request is for
    dry_run: bool  # True: nothing was sent
    created: bool  # The repository was created, or would be
    private: bool | None  # Whether the repository is private; None: the hub did not say
    parent: str | None  # Commit that the plan was made on
    commit: str | None  # The new commit; None when there was nothing to commit
    pull_request: str | None  # Where to find the pull request
    files: tuple[PlannedFile, ...]  # In the order of their paths
    left_out: tuple[tuple[str, str], ...]  # (path, why) of what the directory holds and was not pushed
    num_checked: int  # Files whose bytes were read back from the hub
    checked_bytes: int
    findings: tuple[Finding, ...]  # What arrived differently
    notes: tuple[str, ...]
    seconds: float  # From the first request to the last

    @property
    def ok(self) -> bool:
        """True without a finding of severity error."""
        return not any(finding.severity == "error" for finding in self.findings)

    @property
    def sent_bytes(self) -> int:
        """Size of what is new or changed."""
        return sum(file.nbytes for file in self.files if file.is_sent)


def plan_files(
    local: Mapping[str, LocalFile], remote: Remote, answers: Mapping[str, KeepAnswer], *, delete_stale: bool = False
) -> tuple[PlannedFile, ...]:
    """Return what becomes of every file."""
    planned = []
    for path, file in local.items():
        answer, there = answers.get(path), remote.files.get(path)
        state: State = "unchanged" if remote.holds(file) else "new" if there is None else "changed"
        if state != "unchanged" and answer is not None and answer.is_ignored:
            state = "ignored"
        mode: Mode | None = answer.mode if answer is not None else None
        if mode is None and there is not None:
            mode = "lfs" if len(str(there.version["oid"])) == 64 else "regular"
        planned.append(PlannedFile(path=path, nbytes=file.nbytes, state=state, mode=mode, sha256=file.sha256))
    if delete_stale:
        planned += [
            PlannedFile(path=path, nbytes=remote.files[path].nbytes, state="deleted", mode=None, sha256="")
            for path in stale_weights(local, remote)
        ]
    return tuple(sorted(planned, key=lambda file: file.path))


def stale_weights(local: Mapping[str, LocalFile], remote: Remote) -> tuple[str, ...]:
    """Return the files with weights that only the hub has, beside new ones: a loader may prefer them."""
    directories = {path.rpartition("/")[0] for path in local if is_weights(path)}
    others = sorted(remote.files.keys() - local.keys())
    return tuple(path for path in others if is_weights(path) and path.rpartition("/")[0] in directories)
