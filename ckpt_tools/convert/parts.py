"""The parts of a step that a job writes: what is known of them once they are built, and that they are right."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable, Iterator

from ckpt_tools.checkpoint.formats.digest import digest_bytes
from ckpt_tools.checkpoint.formats.file_names import METADATA_NAME
from ckpt_tools.checkpoint.formats.manifest import MANIFEST_NAME, FileRecord
from ckpt_tools.checkpoint.formats.opening import open_path
from ckpt_tools.checkpoint.formats.scan import DANGER
from ckpt_tools.checkpoint.formats.step import open_step
from ckpt_tools.checks.step import verify_step
from ckpt_tools.checks.verify import verify
from ckpt_tools.errors import CkptError
from ckpt_tools.storage.sink import Sink

OF_SOURCE = ("part-of-a-model", "hollow", "damaged-asset", DANGER)
"""Codes of findings about what was written that its source has as well, and that was said of it."""


def can_adopt(path: str, *, num_workers: int) -> bool:
    """Had an interrupted run of the same job finished the part, every byte as it was written? Else remove it."""
    if not os.path.lexists(path):
        return False
    try:
        with open_path(path, as_part=True) as opened:
            if opened.manifest is not None and verify(opened, level="data", num_workers=num_workers).ok:
                return True
    except CkptError:
        pass
    shutil.rmtree(path)
    return False


def record_parts(sink: Sink, names: Collection[str]) -> Iterator[tuple[str, FileRecord]]:
    """Yield what the manifest of a step says of its parts: their `.metadata` and manifests, which say the rest."""
    if not names:
        return
    with sink.reader() as written:
        there = written.list_files()
        for part in names:
            for document in (METADATA_NAME, MANIFEST_NAME):
                name = f"{part}/{document}"
                if name not in there:  # files of ranks have no .metadata
                    continue
                content = written.read(name, 0, written.size(name))
                yield name, FileRecord(nbytes=len(content), digest=digest_bytes(content))


def check_step(directory: str, names: Iterable[str]) -> None:
    """Open a step as a user would, and compare it with what was to be written."""
    opened = open_step(directory)
    if opened is None:  # one of files of ranks, whose parts were looked at one by one
        with open_path(directory, as_part=True) as whole:
            if whole.step is None or sorted(part.directory for part in whole.step.parts) != sorted(names):
                raise _unlike("its parts are not those of the plan", directory)
        return
    with opened as step:
        result = verify_step(step, level="structure", num_workers=1, purpose="weights")
        if errors := [error for error in result.errors if error.code not in OF_SOURCE]:
            raise _unlike(errors[0].what, errors[0].where)
        found = {part.directory for part in step.step.parts}
        if found != set(names) and not (step.step.is_repository and found.issuperset(names)):
            raise _unlike("its parts are not those of the plan", directory)


def _unlike(what: str, where: str) -> CkptError:
    hint = "nothing was published; please report this with the output of `ckpt env`"
    return CkptError(f"what was written does not pass its own check: {what}", where=where, hint=hint)
