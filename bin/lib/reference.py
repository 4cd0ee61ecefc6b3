"""Writes docs/reference/cli.md from the command line's own help; with --check, says whether it differs."""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import sys
from pathlib import Path

# Before typer is imported: the same text on every terminal.
for _name in [name for name in os.environ if name.startswith(("CKPT_", "TYPER_"))]:
    del os.environ[_name]
os.environ.update(
    COLUMNS="100", TERMINAL_WIDTH="100", NO_COLOR="1", TERM="dumb", LC_ALL="C.UTF-8", LANGUAGE=""
)

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "docs" / "reference" / "cli.md"

HEAD = """\
# Command reference

<!-- Written by bin/docs from the command line itself. Do not edit. -->

What `ckpt --help` and `ckpt COMMAND --help` print. Every option can also be set in the environment:
`CKPT_` and its name in capitals, `--num-workers` as `CKPT_NUM_WORKERS`. How to use the commands together:
[converting](../guides/convert.md).
"""


def command_names() -> list[str]:
    """Names of the visible commands, in the order of `ckpt --help`."""
    import typer.main

    from ckpt_tools.cli.app import app

    group = typer.main.get_command(app)
    commands = group.commands  # type: ignore[attr-defined]
    return [name for name in group.list_commands(None) if not commands[name].hidden]  # type: ignore[attr-defined]


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
    parts = [HEAD, f"## ckpt\n\n```text\n{help_text()}\n```\n"]
    parts += [f"## ckpt {name}\n\n```text\n{help_text(name)}\n```\n" for name in command_names()]
    return "\n".join(parts)


def main(arguments: list[str]) -> int:
    """Write or check; the exit code."""
    if arguments not in ([], ["--check"]):
        print("usage: bin/docs [--check]", file=sys.stderr)
        return 2
    new = render()
    old = TARGET.read_text(encoding="utf-8") if TARGET.exists() else ""
    if new == old:
        return 0
    if arguments:
        name = TARGET.relative_to(ROOT).as_posix()
        sys.stdout.writelines(difflib.unified_diff(old.splitlines(True), new.splitlines(True), name, "now"))
        print(f"{name} is not what the command line says: run bin/docs and commit it")
        return 1
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
