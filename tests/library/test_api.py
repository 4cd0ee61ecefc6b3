"""The package's front: what `dir` lists, what the docstrings say and show."""

from __future__ import annotations

import doctest
import inspect
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from library.world import params

import ckpt_tools
from ckpt_tools.options import Option, options_of

FUNCTIONS = [name for name in ckpt_tools.__all__ if isinstance(getattr(ckpt_tools, name), types.FunctionType)]
SHOWN = [name for name in FUNCTIONS if name != "parse_mesh"]


def test_dir_is_the_public_names_and_nothing_else() -> None:
    import ckpt_tools.estimate
    import ckpt_tools.storage.source

    assert dir(ckpt_tools) == sorted(ckpt_tools.__all__)
    members = {name: getattr(ckpt_tools, name) for name in dir(ckpt_tools)}
    assert [name for name, member in members.items() if isinstance(member, types.ModuleType)] == []
    assert [name for name in members if name.startswith("_")] == ["__version__"]


def test_every_type_that_a_function_returns_is_public() -> None:
    returned = {name: str(inspect.signature(getattr(ckpt_tools, name)).return_annotation) for name in FUNCTIONS}
    assert {name: kind for name, kind in returned.items() if kind not in ckpt_tools.__all__} == {}
    assert len(set(returned.values())) == 17


def test_every_error_with_an_exit_code_of_its_own_is_public() -> None:
    assert {ckpt_tools.MissingError, ckpt_tools.UnreadableError} <= set(map(ckpt_tools.__getattr__, ckpt_tools.__all__))


@pytest.fixture
def examples(world: Path, run: object, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Run the example of a function where the files are that it names, with a hub on this machine."""
    monkeypatch.chdir(world)

    def check(name: str) -> None:
        found = doctest.DocTestFinder(recurse=False).find(
            getattr(ckpt_tools, name), name, globs={"ckpt_tools": ckpt_tools}
        )
        assert [len(test.examples) for test in found] == [1]
        said: list[str] = []
        assert not doctest.DocTestRunner().run(found[0], out=said.append).failed, "".join(said)

    return check


@pytest.mark.parametrize("name", params((name,) for name in SHOWN))
def test_example_of_a_function_shows_what_it_says(name: str, examples: Callable[[str], None]) -> None:
    examples(name)


@pytest.mark.parametrize("name", SHOWN)
def test_docstring_has_every_section(name: str) -> None:
    text: Any = inspect.getdoc(getattr(ckpt_tools, name))
    at = [text.index(f"\n\n{section}:\n") for section in ("Args", "Returns", "Raises", "Example")]
    assert at == sorted(at)
    for each in options_of(getattr(ckpt_tools, name)):
        assert f"\n    {each.name}: " in text


def test_words_of_the_command_line_name_one_option_each() -> None:
    for name in SHOWN:
        stated = [each for each in options_of(getattr(ckpt_tools, name)) if isinstance(each.stated, Option)]
        words = [each.word for each in stated]
        assert len(set(words)) == len(words)
        assert all(word.isidentifier() for word in words)
