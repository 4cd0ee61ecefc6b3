"""What --help shows: options by groups, examples, exit codes and topics."""

from __future__ import annotations

import itertools
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from typer.core import TyperArgument, TyperOption

from ckpt_tools.cli.commands import COMMANDS

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


def topics() -> dict[str, str]:
    """Return the pages of `ckpt help TOPIC`, without what the code adds to them."""
    return {name.removesuffix(".md"): _read(_TOPICS, name) for name in sorted(os.listdir(_TOPICS))}


def groups() -> dict[str, str]:
    """Return the options of all commands by group."""
    return tomllib.loads(_read(_HERE, os.pardir, "options", "groups.toml"))


def in_groups(params: Iterable[Any], main: str) -> dict[str, list[TyperOption]]:
    """Return the options of a command by heading: its main ones, then the others as the table has them."""
    left = {max(each.opts, key=len): each for each in params if isinstance(each, TyperOption)}
    ordered = {"Main options": main, **groups()}
    found = {title: [left.pop(flag) for flag in flags.split() if flag in left] for title, flags in ordered.items()}
    return {title: some for title, some in found.items() if some}


def write_root(group: Any, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - typer's
    """Write the help of all commands, from the table alone."""
    group.format_usage(ctx, formatter)
    group.format_help_text(ctx, formatter)
    width = max(map(len, COMMANDS))
    for title, listed in itertools.groupby(COMMANDS.items(), key=lambda row: row[1].group):
        _write_rows(formatter, title, [(name.ljust(width), each.short) for name, each in listed])
    _write_rows(formatter, "Options", [each.get_help_record(ctx) for each in group.get_params(ctx)])
    pages = f"`ckpt help COMMAND` prints the help of a command, `ckpt help TOPIC` a page: {', '.join(topics())}."
    _write_end(formatter, pages, EXIT_CODES)


def write_help(command: Any, ctx: Any, formatter: Any) -> None:  # noqa: ANN401 - typer's
    """Write the help of a command."""
    params, listed = command.get_params(ctx), COMMANDS[command.name]
    arguments = [each for each in params if isinstance(each, TyperArgument)]
    arguments.sort(key=lambda each: not each.required)
    words = [
        (f"{each.metavar}" if each.required else f"[{each.metavar}]") + "..." * (each.nargs != 1) for each in arguments
    ]
    formatter.write_usage(ctx.command_path, " ".join(["[OPTIONS]", *words]))
    command.format_help_text(ctx, formatter)
    _write_rows(formatter, "Arguments", [(str(each.metavar), str(each.help)) for each in arguments])
    for title, options in in_groups(params, listed.main).items():
        _write_rows(formatter, title, [each.get_help_record(ctx) for each in options])
    with formatter.section("Examples"):
        formatter.write("".join(f"  {line}\n" for line in listed.examples.strip().splitlines()))
    last = 2 if listed.options.startswith("-") else 4 + any(each.name == "destination" for each in params)
    pages = f"See also: {', '.join(f'ckpt help {name}' for name in listed.topics.split())}"
    usage = EXIT_CODES[2] if any(each.name == "mesh" for each in params) else "usage"
    meanings = (EXIT_CODES | {2: usage, 3: listed.finding}).items()
    _write_end(formatter, pages, {code: text for code, text in meanings if code <= last and text})


def _write_rows(formatter: Any, title: str, rows: Sequence[Any]) -> None:  # noqa: ANN401 - typer's
    if rows:
        with formatter.section(title):
            formatter.write_dl(rows)


def _write_end(formatter: Any, pages: str, meanings: Mapping[int, str]) -> None:  # noqa: ANN401 - typer's
    formatter.write_paragraph()
    formatter.write_text("Exit codes: " + "; ".join(f"{code} {text}" for code, text in meanings.items()) + ".")
    formatter.write_text(pages)


def _read(*parts: str) -> str:
    with open(os.path.join(*parts), encoding="utf-8") as file:
        return file.read()
