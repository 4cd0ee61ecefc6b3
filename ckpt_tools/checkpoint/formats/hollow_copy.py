"""What a remote checkpoint says of itself, as a directory on this machine: for processes that have no network.

Documents and headers are copied. Tensors are holes of the right size: whoever is given one reads no values.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from ckpt_tools.checkpoint.formats import safetensors
from ckpt_tools.checkpoint.formats.file_names import METADATA_NAME
from ckpt_tools.errors import CkptError, LimitError, StorageError
from ckpt_tools.storage.locations import is_remote, open_place
from ckpt_tools.storage.source import Source

_DOCUMENTS = (".json", ".yaml", ".yml", METADATA_NAME)
_NOT_NEEDED = ("tokenizer.json", "vocab.json", "added_tokens.json")  # Megabytes that say nothing of the weights
_MAX_COPIED_BYTES = 1 << 30  # Of one file
_BLOCK_BYTES = 4 << 20


@contextmanager
def skeleton(path: str, *, whole: bool = False) -> Iterator[str]:
    """Lend a path on this machine in place of `path`, which it is where that is local."""
    # With `whole`, every byte is copied, tensors too; hidden directories are left out all the same. Errors meanwhile
    # name `path` in place of the lent one.
    if not is_remote(path):
        yield path
        return
    source, file = open_place(path)
    with source, tempfile.TemporaryDirectory(prefix="ckpt-remote-") as directory:
        files = source.list_files() if file is None else {file: source.size(file)}
        source.each(lambda name: _copy(source, name, files[name], directory, whole=whole), list(files))
        lent = directory if file is None else os.path.join(directory, file)
        try:
            yield lent
        except CkptError as error:
            base = path if file is None else os.path.dirname(path)
            for part in ("what", "where", "hint"):
                text = getattr(error, part)
                setattr(error, part, None if text is None else text.replace(directory, base))
            raise


def _copy(source: Source, name: str, nbytes: int, directory: str, *, whole: bool) -> None:
    copied = nbytes if whole else min(nbytes, _needed(source, name, nbytes))
    if copied > _MAX_COPIED_BYTES and not whole:
        raise LimitError(f"{copied} bytes, the limit is {_MAX_COPIED_BYTES}", where=source.label(name))
    path = os.path.join(directory, name)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "xb") as file:
            file.writelines(
                source.read(name, offset, min(_BLOCK_BYTES, copied - offset))
                for offset in range(0, copied, _BLOCK_BYTES)
            )
            file.truncate(nbytes)
    except OSError as error:
        raise StorageError(f"cannot copy {source.label(name)}: {error.strerror}", where=directory) from error


def _needed(source: Source, name: str, nbytes: int) -> int:
    """Return how many bytes of a file say what it holds."""
    if name.endswith(_DOCUMENTS) and os.path.basename(name) not in _NOT_NEEDED:
        return nbytes
    if name.endswith(".safetensors") and nbytes >= safetensors.LENGTH_BYTES:
        length = int.from_bytes(source.read(name, 0, safetensors.LENGTH_BYTES), "little")
        return min(safetensors.LENGTH_BYTES + length, safetensors.LENGTH_BYTES + safetensors.MAX_HEADER_BYTES)
    return 0
