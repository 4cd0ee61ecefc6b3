"""One statement per option: the library's function, its signature and the command line come from one class."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest

import ckpt_tools
from ckpt_tools import UsageError
from ckpt_tools.adapters.architectures import ARCHITECTURES
from ckpt_tools.adapters.merge import METHODS
from ckpt_tools.cli import build
from ckpt_tools.cli.commands import COMMANDS
from ckpt_tools.options import Argument, Doc, Option, adapters, options_of, takes
from ckpt_tools.options.output import OutputOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    place: Annotated[str, Argument("Where.", "PLACE")] = field(kw_only=False)
    level: Annotated[Literal["low", "high"], Option("How much.")] = "low"
    many_times: Annotated[int, Option("Repeats.", min=1)] = 1
    on_end: Annotated[object, Doc("Told at the end.")] = None


@takes(Options)
def act(options: Options) -> str:
    """Act.

    Raises:
        UsageError: Never.
    """
    return f"{options.place} {options.level} {options.many_times}"


def test_function_is_called_with_the_fields() -> None:
    assert act("here") == "here low 1"
    assert act("here", level="high", many_times=2) == "here high 2"
    with pytest.raises(TypeError, match="levle"):
        act("here", levle="high")  # type: ignore[call-arg]
    with pytest.raises(UsageError, match="--level must be one of low, high, got 'deep'"):
        act("here", level="deep")  # type: ignore[arg-type]


def test_function_shows_its_keywords() -> None:
    found = inspect.signature(act)
    assert list(found.parameters) == ["place", "level", "many_times", "on_end"]
    assert found.parameters["many_times"].default == 1
    assert found.parameters["level"].kind is inspect.Parameter.KEYWORD_ONLY
    assert "    level: How much." in (act.__doc__ or "")
    assert (act.__doc__ or "").index("Args:") < (act.__doc__ or "").index("Raises:")


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    loud: Annotated[bool, Option("Shout.", after="level")] = False


def test_command_has_what_the_classes_state() -> None:
    def run(call: build.CommandCall[str], own: Own, output: OutputOptions) -> int:
        assert call(on_end=1) == ("here low 1" if own.loud else "here high 1")
        return 7 + output.json

    made = build.command(Options, [Own], lambda: (run, act))
    shown = ["json", "quiet", "verbose", "storage", "patience"]
    assert list(inspect.signature(made).parameters) == ["place", "level", "loud", "many_times", *shown]
    rest = {"many_times": 1, "json": False, "quiet": False, "verbose": False, "storage": None, "patience": "170s"}
    assert made(place="here", level="high", loud=False, **rest) == 7
    assert made(place="here", level="low", loud=True, **rest | {"json": True}) == 8


def test_words_of_options_are_those_of_the_tables() -> None:
    assert "|".join(METHODS) == adapters.METHODS
    assert "|".join((*ARCHITECTURES, "llm")) == adapters.ARCHITECTURES


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("env", "help")])
def test_every_option_is_explained_once(name: str) -> None:
    stated = options_of(getattr(ckpt_tools, name.replace("-", "_")))
    assert all(each.stated.help.endswith((".", "…")) for each in stated), name
    flags = [each.flag for each in stated if isinstance(each.stated, Option)]
    assert len(set(flags)) == len(flags)
