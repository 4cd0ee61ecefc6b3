"""Option values that are one of a few words."""

from __future__ import annotations

from ckpt_tools.description.checkpoint import Format
from ckpt_tools.errors import UsageError
from ckpt_tools.formats.detect import FORMATS


def format_of(text: str | None) -> Format | None:
    """Return the value of `--from`.

    Raises:
        UsageError: An unknown format.
    """
    for known in FORMATS:
        if text == known:
            return known
    if text is None:
        return None
    raise UsageError(f"{text!r} is not a format", hint=f"--from takes {', '.join(FORMATS)}")
