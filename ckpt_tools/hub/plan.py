"""What a push would do, file by file: decided before anything is sent. Pure."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.checkpoint.formats.file_names import METADATA_NAME, is_weights
from ckpt_tools.checkpoint.formats.scan import why_not_inert
from ckpt_tools.checkpoint.globs import NameIndex, find_named
from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.results import CheckedResult
from ckpt_tools.storage.source import LocalSource, Source
from ckpt_tools.text import escape_name
from ckpt_tools.transfer.execute import Progress

if TYPE_CHECKING:
    from ckpt_tools.storage.remote.source import RemoteFile
    from ckpt_tools.storage.source import Source


# The files of a directory that is to be pushed: which ones, and what they hold

MAX_DEPTH = 32  # Directories below the root; deeper ones are refused, not left out
MAX_BLOB_BYTES = 64 << 20  # Git's own name is worked out up to this size; the hub keeps nothing as large inside of git
_STATE = re.compile(
    r"(?:optimizer|scheduler|scaler|rng_state|training_args|random_states)(?:_\d+)*\.(?:pt|pth|bin|pkl)"
    r"|(?:bf16_)?zero_pp_rank_.*_optim_states\.pt",
    re.ASCII,
)
"""Names that transformers' Trainer, accelerate and DeepSpeed give their own state."""
_SECRET = re.compile(
    r".*\.(?:env|pem|key|p12|pfx|keystore)|id_(?:rsa|dsa|ecdsa|ed25519)|(?:hf_|wandb_|api_|access_)?token(?:\.txt)?"
    r"|(?:.*[_-])?(?:credentials?|secrets?|service[_-]account)(?:[_-].*)?(?:\.(?:json|ya?ml|toml|ini|txt))?|kaggle\.json",
    re.ASCII | re.IGNORECASE,
)
"""Names of files that hold secrets; those inside of other files: `secrets`."""


def list_directory(
    source: LocalSource, *, include: Sequence[str] = (), exclude: Sequence[str] = (), keep_pickles: bool = True
) -> tuple[dict[str, int], tuple[tuple[str, str], ...]]:
    """Return the files to push with their sizes, and (path, why) of what is left out.

    Hidden files are left out, since they are a tool's own (journals, caches, .env, .git) and not the model's; the
    `.metadata` of a DCP checkpoint is its index and goes along. So are what may hold secrets and a trainer's pickled
    state, unless `include` asks for them. Links are followed inside of the directory alone. A glob without a slash
    matches the name alone, in every directory; `*` stays inside one component, `**` crosses.
    """
    files = source.list_files(max_depth=MAX_DEPTH)
    names = {path: path.rpartition("/")[2] for path in files}
    hidden = {path for path, name in names.items() if name.startswith(".") and name != METADATA_NAME}
    left_out = _odd_entries(source.root) + [(path, "hidden") for path in hidden]
    found = {path: nbytes for path, nbytes in files.items() if path not in hidden}
    included = _matching(found, include, "--include")
    excluded = _matching(found, exclude, "--exclude")
    chosen: dict[str, int] = {}
    for path, nbytes in found.items():
        if include and path not in included:
            left_out.append((path, "not in --include"))
        elif path in excluded:
            left_out.append((path, "--exclude"))
        elif not include and (reason := _why_private(names[path])) is not None:
            left_out.append((path, f"{reason}; use --include to upload it"))
        else:
            if escape_name(path) != path or "\\" in path:
                raise UsageError("the hub does not support this file name", where=path, hint="rename or exclude it")
            source.path(path)  # refuses a link that leads out
            if not keep_pickles and (runs := why_not_inert(source, path, nbytes)):
                left_out.append((path, f"loading it runs {escape_name(runs)}; use --keep-pickles to upload it"))
            else:
                chosen[path] = nbytes
    if not chosen:
        raise UsageError("there is nothing to push", where=source.root)
    return chosen, tuple(sorted(left_out))


def _why_private(name: str) -> str | None:
    """Return why a file is not uploaded unless `--include` asks for it; None if it is."""
    secret = "may hold a secret" if _SECRET.fullmatch(name) else None
    return "trainer state" if _STATE.fullmatch(name) else secret


def _odd_entries(root: str) -> list[tuple[str, str]]:
    """Return what a listing passes over: hidden directories, links to directories, links to nothing."""
    odd: list[tuple[str, str]] = []
    pending = [("", 0)]
    while pending:
        prefix, depth = pending.pop()
        with os.scandir(os.path.join(root, prefix)) as scan:
            entries = sorted(scan, key=lambda entry: entry.name)
        for entry in entries:
            path = prefix + entry.name
            if entry.is_dir(follow_symlinks=False):
                if entry.name.startswith("."):
                    odd.append((path + "/", "hidden"))
                elif depth == MAX_DEPTH:
                    raise UsageError(f"directories nested deeper than {MAX_DEPTH}", where=path)
                else:
                    pending.append((path + "/", depth + 1))
            elif entry.is_symlink() and entry.is_dir():
                odd.append((path, "a link to a directory"))
            elif not entry.is_file():
                odd.append((path, "not a file"))
    return odd


def _matching(files: Iterable[str], globs: Sequence[str], option: str) -> set[str]:
    matched: set[str] = set()
    hint = "patterns are matched against file names"
    paths = NameIndex({path: (_swap(path),) for path in files})
    names = NameIndex({path: (_swap(path.rpartition("/")[2]),) for path in files})
    for glob in globs:
        index = paths if "/" in glob else names
        matched |= find_named(f"{option} {glob}", _swap(glob), index, hint=hint, kind="file")
    return matched


def _swap(text: str) -> str:
    """Globs know components between dots; those of paths are between slashes."""
    return text.translate({ord("."): "/", ord("/"): "."})


def digest_files(
    source: Source,
    files: Iterable[str],
    *,
    num_workers: int,
    block_bytes: int = 1 << 20,
    progress: Progress | None = None,
) -> dict[str, LocalFile]:
    """Read every file, and return path → size and digests. Memory: `block_bytes` for each of `num_workers` threads."""

    def digest(path: str) -> LocalFile:
        nbytes = source.size(path)
        sha256 = hashlib.sha256()
        git = hashlib.sha1(b"blob %d\0" % nbytes, usedforsecurity=False) if nbytes <= MAX_BLOB_BYTES else None
        buffer = memoryview(bytearray(min(block_bytes, nbytes)))
        for offset in range(0, nbytes, block_bytes):
            block = buffer[: min(block_bytes, nbytes - offset)]
            source.read_into(path, offset, block)
            sha256.update(block)
            if git is not None:
                git.update(block)
            if progress is not None:
                progress(len(block))
        blob_id = None if git is None else git.hexdigest()
        return LocalFile(path=path, nbytes=nbytes, sha256=sha256.hexdigest(), blob_id=blob_id)

    with ThreadPoolExecutor(max_workers=num_workers) as pool:
        return {file.path: file for file in pool.map(digest, files)}


def file_of_bytes(path: str, content: bytes) -> LocalFile:
    """Return what a file with `content` would be."""
    git = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    sha256 = hashlib.sha256(content).hexdigest()
    return LocalFile(path=path, nbytes=len(content), sha256=sha256, blob_id=git, content=content)


def read_whole(source: Source, file: LocalFile) -> bytes:
    """Return a file that is kept inside of git; raise CkptError if it changed since it was digested."""
    content = file.read(source, 0, file.nbytes)
    if hashlib.sha256(content).hexdigest() != file.sha256:
        raise changed(file.path)
    return content


def changed(path: str) -> CkptError:
    """Return the error for a file that is written to while it is pushed."""
    hint = "wait until its writer has finished, then run the command again"
    return CkptError("the file changed while it was pushed; nothing was committed", where=path, hint=hint)


State = Literal["new", "changed", "unchanged", "ignored", "deleted", "not compared"]
"""ignored: the repository's .gitignore leaves the file out. deleted: on the hub only, and asked to go. not compared:
the hub was not asked."""
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
    is_known: bool = True  # False: the hub was not asked
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
        return self.state in ("new", "changed", "not compared")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PushResult(CheckedResult):
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
    not_searched: tuple[tuple[str, str], ...] = ()  # (path, why) of what was not searched for secrets
    notes: tuple[str, ...]
    card: str | None  # The model card that ckpt made or extended; None where it did neither
    seconds: float  # From the first request to the last

    @property
    def sent_bytes(self) -> int:
        """Size of what is new or changed."""
        return sum(file.nbytes for file in self.files if file.is_sent)

    def to_json(self) -> dict[str, object]:
        """Return it as JSON holds it."""
        document: dict[str, object] = {"ok": self.ok, **asdict(self)}
        for name in ("left_out", "not_searched"):
            document[name] = [{"path": path, "why": why} for path, why in getattr(self, name)]
        document["sent_bytes"] = self.sent_bytes
        document["checked"] = {"files": document.pop("num_checked"), "bytes": document.pop("checked_bytes")}
        document["seconds"] = round(self.seconds, 3)
        return document


def visibility(private: bool | None, *, is_new: bool) -> str:
    """Return who can read a repository, in words."""
    if private is None:
        return "the hub did not say whether it is public"
    return "private" if private else "public: everybody can read it" + "; --private for you alone" * is_new


def plan_files(
    local: Mapping[str, LocalFile], remote: Remote, answers: Mapping[str, KeepAnswer], *, delete_stale: bool = False
) -> tuple[PlannedFile, ...]:
    """Return what becomes of every file."""
    planned = []
    for path, file in local.items():
        answer, there = answers.get(path), remote.files.get(path)
        state: State = "unchanged" if remote.holds(file) else "new" if there is None else "changed"
        state = state if remote.is_known else "not compared"
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
