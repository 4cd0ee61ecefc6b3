"""The code of the guides is what the tests run: blocks of docs/guides/*.md by name.

A block that starts with three backquotes, `python`, and a name is run with the names that the test gives it.
"""

from __future__ import annotations

import re
from pathlib import Path

GUIDES = Path(__file__).resolve().parents[2] / "docs" / "guides"
_BLOCK = re.compile(r"^```python (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(guide):
    """Return name → code of every named block of a guide."""
    found = _BLOCK.findall((GUIDES / f"{guide}.md").read_text(encoding="utf-8"))
    names = [name for name, _ in found]
    if len(names) != len(set(names)) or not names:
        raise ValueError(f"{guide}.md: {names}")
    return dict(found)


def run(guide, name, namespace):
    """Run one block in `namespace`, which the block may add to; return it."""
    text = (GUIDES / f"{guide}.md").read_text(encoding="utf-8")
    code = blocks(guide)[name]
    line = text[: text.index(f"```python {name}\n")].count("\n") + 1
    exec(compile("\n" * line + code, f"docs/guides/{guide}.md", "exec"), namespace)
    return namespace
