"""The page of formats, from the table."""

from ckpt_tools.checkpoint.formats.table import FORMATS, find_format

_HEAD = """# Formats

Written by `bin/docs` from the formats themselves. How each is laid out: [formats](../dev/formats.md). What `verify`
cannot see in any format: [detection](../dev/detection.md); what more in one of them is said there.
"""


def render() -> str:
    """Return the page."""
    parts = [_HEAD]
    for name in FORMATS:
        kind = find_format(name)
        parts.append(f"## `{name}`\n")
        rows = [("found by", kind.found_by), ("read", kind.about), ("written by", kind.written_by or "nothing")]
        rows.append(("known to be whole by", kind.whole_by or "not known"))
        if unseen := "; ".join(kind.unchecked):
            rows.append(("`verify` cannot see", unseen))
        parts.append("| | |\n|---|---|\n" + "".join(f"| {left} | {right} |\n" for left, right in rows))
    return "\n".join(parts)
