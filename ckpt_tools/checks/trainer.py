"""Check that a step has what the trainer that saved it resumes from, and that all of it is of one step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.checkpoint.formats.contracts import MODEL
from ckpt_tools.checkpoint.formats.judge import PICKLE, StepVerdict
from ckpt_tools.checkpoint.formats.opening import Opened
from ckpt_tools.checkpoint.formats.torch_zip import check_archive
from ckpt_tools.errors import UnreadableError
from ckpt_tools.options.common import Purpose
from ckpt_tools.text import escape_name

_WEIGHTS = "restore it; --for weights checks the weights alone"


def check_beside(opened: Opened) -> tuple[list[Finding], set[str]]:
    """Return the pickles beside a model of which a byte has changed, and those that their own sums prove."""
    found, proven = [], set()
    known = {*opened.checkpoint.files, *(() if opened.manifest is None else opened.manifest.assets)}
    for name, nbytes in ({} if opened.format.is_file else opened.source.list_files(max_depth=1)).items():
        if PICKLE.fullmatch(name) and nbytes and name not in known:
            try:
                if check_archive(nbytes, partial(opened.source.read, name)):
                    proven.add(name)
            except UnreadableError as error:
                found.append(Finding.error("damaged-file", name, error.what, "restore it", file=name))
    return found, proven


def check_trainer(opened: Opened, purpose: Purpose | None, verdict: StepVerdict) -> Iterator[Finding]:
    """Yield what the trainer would look for in vain, and what is of another step; by default as it was saved to be."""
    for one, other in verdict.mixed:
        hint = "restore the files of one save: a trainer that resumes from it mixes two"
        yield Finding.error("mixed-steps", one.file, f"not of one step: {one}, {other}", hint)
    if purpose == "weights":
        lost = [each for each in verdict.reasons if each.of == MODEL and each.is_sure]
        yield from (Finding.error("lost-weights", each.file, each.what, "restore it") for each in lost)
        return
    for reason in verdict.reasons:
        if opened.broken and reason.file.rpartition("/")[2].startswith("optim"):
            continue  # which is said already
        what = f"{reason.what}: {reason.does}"
        is_error = reason.is_sure or (purpose == "resume" and "stops" in reason.does)
        make = Finding.error if is_error else Finding.warning
        yield make("not-resumable" if is_error else "may-not-resume", escape_name(reason.file), what, _WEIGHTS)
    if verdict.is_weights_only and (opened.format.has_parts or purpose):
        make = Finding.info if purpose is None else Finding.error
        code = "weights-only" if purpose is None else "not-resumable"
        yield make(code, opened.source.root, "weights alone, to start from and not to resume from")
