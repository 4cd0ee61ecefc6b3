"""The table of commands, in the order in which --help shows them. The data is commands.toml."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple


class ListedCommand(NamedTuple):
    """What is known of a command before it is loaded: names, of what is imported when it is needed."""

    run: str  # Module of this package whose `run`, or the function named after a dot, prints the result
    options: str
    """Classes in `ckpt_tools.options`: of the library's function (- without one), then of the command line alone."""
    short: str  # Its row in `ckpt --help`
    help: str
    topics: str  # Those of `ckpt help` that belong to it
    examples: str
    group: str
    main: str = ""  # Options that --help shows first
    finding: str = ""  # What exit code 3 means, if it occurs


def _read_table() -> dict[str, ListedCommand]:
    with open(
        os.path.join(os.path.dirname(__file__), "commands.toml"), "rb"
    ) as file:  # importlib.resources costs 10 ms
        groups = tomllib.load(file).items()
    return {name: ListedCommand(**each, group=group) for group, listed in groups for name, each in listed.items()}


COMMANDS = _read_table()


def load(name: str) -> Callable[..., int]:
    """Return a command as typer reads it: its options are imported, and what runs when it is called."""
    from ckpt_tools.cli.build import command

    found = COMMANDS[name]
    stated, *own = map(_find, found.options.split())

    def resolve() -> tuple[Callable[..., int], Callable[..., object] | None]:
        from ckpt_tools import api

        module, _, function = found.run.partition(".")
        run: Callable[..., int] = getattr(import_module(f"ckpt_tools.cli.{module}"), function or "run")
        return run, None if stated is None else getattr(api, name.replace("-", "_"))

    return command(stated, own, resolve)


def _find(name: str) -> Any:  # noqa: ANN401 - a class, or None for -
    module, _, kind = name.rpartition(".")
    return getattr(import_module(f"ckpt_tools.options.{module}"), kind) if module else None
