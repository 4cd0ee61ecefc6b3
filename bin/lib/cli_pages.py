"""docs/reference/cli.md: what the command line says of itself."""

from __future__ import annotations

import contextlib
import io

HEAD = """\
# Command reference

<!-- Written by bin/docs from the command line itself. Do not edit. -->

What `ckpt --help` and `ckpt COMMAND --help` print. How the commands work together:
[converting](../guides/start-sharded.md).
"""


def help_text(*command: str) -> str:
    """What `ckpt COMMAND --help` prints."""
    from ckpt_tools.cli import main

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main([*command, "--help"])
    if code != 0:
        raise SystemExit(f"ckpt {' '.join(command)} --help ended with {code}")
    return "\n".join(line.rstrip() for line in out.getvalue().strip().splitlines())


def render() -> str:
    """The whole page."""
    from ckpt_tools.cli.commands import COMMANDS

    sections = [("ckpt", help_text()), *((f"ckpt {name}", help_text(name)) for name in COMMANDS)]
    return "\n".join([HEAD, *(f"## {title}\n\n```text\n{text}\n```\n" for title, text in sections)])
