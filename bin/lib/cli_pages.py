"""docs/reference/cli.md: what the command line says of itself, each option once."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

HEAD = """\
# Command reference

<!-- Written by bin/docs from the command line itself. Do not edit. -->

What `ckpt COMMAND --help` says. Options of many commands are described once, under [shared options](#shared-options);
under a command are its own. Which command does what: [the list of tasks](../guides/which-page.md). Results and exit
codes: [findings](findings.md), [JSON](json.md).
"""
SHARED = 4
"""An option that so many commands have in the same words is described apart."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """An argument or option, as the help of its command shows it."""

    name: str
    """How it is written in short: `--mesh`."""
    syntax: str
    text: str

    @property
    def line(self) -> str:
        """Its line of a list."""
        return f"- `{self.syntax}`: {self.text}\n"


def parameters(command: str) -> tuple[str, str, list[Parameter]]:
    """What a command is for, how it is used, and what it takes."""
    from ckpt_tools.cli.app import _load

    loaded = _load(command)
    context = loaded.make_context(f"ckpt {command}", [], resilient_parsing=True)
    found = []
    for each in loaded.params:
        record = each.get_help_record(context)
        if record is not None and "--help" not in each.opts:
            found.append(Parameter(max(each.opts, key=len), record[0], _one_line(record[1])))
    return (loaded.help or "").strip(), loaded.get_usage(context).removeprefix("Usage: ").strip(), found


def _one_line(text: str) -> str:
    """A text as Markdown, without the spaces that line up its brackets."""
    return re.sub(r"([*<_|])", r"\\\1", " ".join(text.split()))


def render() -> str:
    """The whole page."""
    from ckpt_tools.cli.commands import COMMANDS

    commands = {name: parameters(name) for name in COMMANDS}
    count = Counter(each for *_, found in commands.values() for each in found)
    shared = [each for each, number in count.items() if number >= SHARED and each.name.startswith("-")]
    parts = [HEAD, "## Shared options\n", "".join(each.line for each in sorted(shared, key=lambda each: each.name))]
    first: dict[Parameter, str] = {}
    for name, (purpose, usage, found) in commands.items():
        own = [each for each in found if each not in shared and each not in first]
        parts += [f"## ckpt {name}\n", f"{purpose}\n", f"```text\n{usage}\n```\n", "".join(each.line for each in own)]
        for other in dict.fromkeys(first[each] for each in found if each in first):
            again = ", ".join(f"`{each.name}`" for each in found if first.get(each) == other)
            parts.append(f"As in [ckpt {other}](#ckpt-{other}): {again}.\n")
        if known := ", ".join(f"`{each.name}`" for each in found if each in shared):
            parts.append(f"Shared: {known}.\n")
        first |= {each: name for each in own if each.name.startswith("-")}
    return "\n".join(part for part in parts if part)
