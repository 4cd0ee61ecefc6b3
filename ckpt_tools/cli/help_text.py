"""What --help shows beside Typer's own: options by groups, examples, exit codes and topics."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from typer.core import TyperArgument, TyperOption

from ckpt_tools.cli.commands import ListedCommand

EXIT_CODES = {
    0: "done",
    1: "failed (I/O, fault, the hub)",
    2: "usage, impossible mesh or rules",
    3: "problems found, or too little was readable to decide",
    4: "not a complete, readable checkpoint",
    5: "destination exists",
    130: "interrupted",
}
_HERE = os.path.dirname(__file__)
_TOPICS = os.path.join(_HERE, "topics")


def topics() -> list[str]:
    """Return the topics that have a page."""
    return sorted(name.removesuffix(".md") for name in os.listdir(_TOPICS))


def read_topic(name: str) -> str:
    """Return the text of a topic's page."""
    with open(os.path.join(_TOPICS, f"{name}.md"), encoding="utf-8") as file:
        return file.read()


@cache
def groups() -> dict[str, str]:
    """Return the options of all commands by group."""
    with open(os.path.join(_HERE, os.pardir, "options", "groups.toml"), "rb") as file:
        return tomllib.load(file)


def in_groups(options: Iterable[TyperOption], main: str) -> dict[str, list[TyperOption]]:
    """Return the options of a command by heading: its main ones, then the others as the table has them."""
    left = {max(each.opts, key=len): each for each in options}
    ordered = {"Main options": main, **groups()}
    found = {title: [left.pop(flag) for flag in flags.split() if flag in left] for title, flags in ordered.items()}
    return {title: some for title, some in found.items() if some}


def usage_words(params: Iterable[Any]) -> list[str]:
    """Return the arguments of a command as its usage shows them."""
    many: dict[str, bool] = {}
    for each in params:
        if isinstance(each, TyperArgument):
            many[str(each.metavar)] = each.nargs != 1 or str(each.metavar) in many
    return [name + "..." * is_many for name, is_many in many.items()]


def write_options(ctx: Any, formatter: Any, params: Sequence[Any], main: str) -> None:  # noqa: ANN401 - typer's
    """Write the arguments and the options of a command."""
    arguments = sorted((each for each in params if isinstance(each, TyperArgument)), key=lambda each: not each.required)
    if arguments:
        with formatter.section("Arguments"):
            formatter.write_dl([(each.metavar, each.help) for each in arguments])
    for title, options in in_groups((each for each in params if isinstance(each, TyperOption)), main).items():
        with formatter.section(title):
            formatter.write_dl([each.get_help_record(ctx) for each in options])


def write_end(formatter: Any, listed: ListedCommand, params: Iterable[Any]) -> None:  # noqa: ANN401 - typer's
    """Write examples, exit codes and topics."""
    with formatter.section("Examples"):
        formatter.write("".join(f"  {line}\n" for line in listed.examples.strip().splitlines()))
    last = 2 if listed.options.startswith("-") else 4 + any(each.name == "destination" for each in params)
    meanings = EXIT_CODES | {3: listed.finding}
    formatter.write_paragraph()
    formatter.write_text(
        f"Exit codes: {_say((code for code in meanings if code <= last and meanings[code]), meanings)}"
    )
    formatter.write_text(f"See also: {', '.join(f'ckpt help {name}' for name in listed.topics.split())}")


def root_end() -> str:
    """Return what the help of all commands ends with."""
    pages = f"`ckpt help COMMAND` prints the help of a command, `ckpt help TOPIC` a page: {', '.join(topics())}."
    return f"{pages}\n\nExit codes: {_say(EXIT_CODES)}"


def _say(codes: Iterable[int], meanings: Mapping[int, str] = EXIT_CODES) -> str:
    return "; ".join(f"{code} {meanings[code]}" for code in codes) + "."
