"""Check that one DCP directory has what the trainer that saved it resumes from."""

from __future__ import annotations

from collections.abc import Iterator

from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.formats.opening import Opened
from ckpt_tools.formats.steps import missing_of_trainer


def check_trainer(opened: Opened) -> Iterator[Finding]:
    """Yield what the trainer would look for in vain."""
    if not opened.format.loads_by_dcp:
        return
    for name, what in (*opened.missing, *missing_of_trainer(opened.checkpoint, opened.beside)):
        yield Finding.warning("missing-part", name, what, "restore it, or take the model alone out: ckpt gather")
