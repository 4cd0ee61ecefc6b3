"""The files of a directory that is to be pushed: which ones, and what they hold."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from ckpt_tools.checkpoint.formats.file_names import METADATA_NAME
from ckpt_tools.checkpoint.formats.scan import why_not_inert
from ckpt_tools.checkpoint.globs import find_named
from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.hub.plan import LocalFile
from ckpt_tools.storage.source import LocalSource, Source
from ckpt_tools.text import escape_name
from ckpt_tools.transfer.execute import Progress

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
            left_out.append((path, f"{reason}; --include uploads it"))
        else:
            if escape_name(path) != path or "\\" in path:
                raise UsageError("the hub cannot hold a file of this name", where=path, hint="rename or exclude it")
            source.path(path)  # refuses a link that leads out
            if not keep_pickles and (runs := why_not_inert(source, path, nbytes)):
                left_out.append((path, f"loading it runs {escape_name(runs)}; --keep-pickles uploads it"))
            else:
                chosen[path] = nbytes
    if not chosen:
        raise UsageError("there is nothing to push", where=source.root)
    return chosen, tuple(sorted(left_out))


def _why_private(name: str) -> str | None:
    """Return why a file is not uploaded unless `--include` asks for it; None if it is."""
    secret = "may hold a secret" if _SECRET.fullmatch(name) else None
    return "a trainer's own state" if _STATE.fullmatch(name) else secret


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
    options = {"hint": "it is matched against file names", "kind": "file"}
    for glob in globs:
        names = {path: (_swap(path if "/" in glob else path.rpartition("/")[2]),) for path in files}
        matched |= find_named(f"{option} {glob}", _swap(glob), names, **options)
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
