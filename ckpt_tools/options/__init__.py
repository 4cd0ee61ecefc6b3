"""One statement per option: a field of one frozen class has its name, type, default and help.

`takes` makes the library's function from such a class (type checkers see its fields as keywords), `cli.build` makes
the command line from it, and `bin/docs` the reference pages. The modules of this room hold the classes of all commands
and import nothing that --help need not wait for.
"""

from __future__ import annotations

import functools
import inspect
import keyword
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, fields
from typing import Annotated, Any, Literal, ParamSpec, TypeVar, cast, get_args, get_origin, get_type_hints

from ckpt_tools.checkpoint.dtypes import dtype_word
from ckpt_tools.checkpoint.layout import Mesh, mesh_text
from ckpt_tools.errors import UsageError
from ckpt_tools.text import did_you_mean

REMOTE_WORKERS = 16
"""Requests that are under way at once by default."""

P = ParamSpec("P")
Options = TypeVar("Options")
Result = TypeVar("Result")

AnyPath = str | os.PathLike[str]
ProgressFactory = Callable[[int], Callable[[int], None]]
"""Given the number of bytes to move, returns what is told of every part that was moved, and by `count` of tensors."""


@dataclass(frozen=True, slots=True)
class Doc:
    """What a field is for. Alone: a field that only the library has."""

    help: str


@dataclass(frozen=True, slots=True)
class Argument(Doc):
    """A positional argument of the command line."""

    metavar: str


@dataclass(frozen=True, slots=True)
class Option(Doc):
    """An option of the command line; what is not given here follows from the field."""

    _: KW_ONLY
    name: str | None = None
    """With both dashes; that of the field by default."""
    short: str | None = None
    metavar: str | None = None
    """By default the words of a `Literal`."""
    min: float | None = None
    max: float | None = None
    env: bool = False
    """CKPT_NAME in the environment sets it."""
    none: str | None = None
    """Word for None, and the default."""
    is_tristate: bool = False
    """Not given differs from the default, which is not shown."""
    after: str | None = None
    """The option that it follows in --help, where it is stated elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One option as its class states it."""

    name: str
    hint: Any
    """Its type, without annotations."""
    default: Any
    """`inspect.Parameter.empty` without one."""
    stated: Doc
    is_positional: bool = False

    @property
    def flag(self) -> str:
        """Its name on the command line."""
        named = self.stated.name if isinstance(self.stated, Option) else None
        return named or "--" + self.name.replace("_", "-")

    @property
    def is_path(self) -> bool:
        """Does it name a file or a directory?"""
        return any(get_origin(part) is os.PathLike for part in _flat(self.hint))

    @property
    def words(self) -> tuple[str, ...]:
        """The words that it takes; none where every text will do."""
        parts = (self.hint, *get_args(self.hint))
        if str in parts:
            return ()
        return tuple(word for part in parts if get_origin(part) is Literal for word in get_args(part))

    @property
    def text(self) -> str:
        """Its help, and the words that the command line shows in place of a value."""
        shown = self.stated.metavar if isinstance(self.stated, Option) else None
        return f"{self.stated.help} ({shown})" if shown and "|" in shown else self.stated.help

    @property
    def word(self) -> str:
        """Its name on the command line as Python can write it: `--from` is `from_`."""
        word = self.flag.partition("/")[0].removeprefix("--").replace("-", "_")
        return word + "_" * keyword.iskeyword(word)

    def read(self, value: Any) -> Any:  # noqa: ANN401 - whatever somebody gives
        """Return a value that the library was given as the command line would give it."""
        if get_origin(self.hint) is Sequence and isinstance(value, str | os.PathLike):
            value = (value,)  # one of what can be several
        if value is None:
            return None
        if Mesh in get_args(self.hint):
            return mesh_text(value)
        if self.name.endswith("dtype"):
            return dtype_word(value)
        if self.is_path:
            return _read_path(self.name, value, several=any(get_origin(part) is Sequence for part in _flat(self.hint)))
        self.check(value)
        return value

    def check(self, value: object) -> None:
        """Refuse a word that it does not take."""
        if self.words and isinstance(value, str) and value not in self.words:
            what = f"{self.flag} must be one of {', '.join(self.words)}, got {value!r}"
            raise UsageError(what, hint=did_you_mean(value, self.words))


def _flat(hint: object) -> Iterator[object]:
    """Yield a type and all that it is made of."""
    yield hint
    for part in get_args(hint):
        yield from _flat(part)


def refuse_other(value: str | None, words: Collection[str], kind: str, option: str) -> None:
    """Refuse a value that is none of an option's `words`, which are of some `kind`."""
    if value not in words:
        raise UsageError(f"{value!r} is not {kind}", hint=f"{option} takes {', '.join(words)}")


@functools.cache
def parameters(options: type) -> tuple[Parameter, ...]:
    """Return the options that a class states, in their order."""
    hints = get_type_hints(options, include_extras=True)
    return tuple(
        parameter(
            field.name,
            hints[field.name],
            inspect.Parameter.empty if field.default is MISSING else field.default,
            is_positional=not field.kw_only,
        )
        for field in fields(options)
    )


def parameter(name: str, hint: object, default: object, *, is_positional: bool = False) -> Parameter:
    """Return the option that an annotated field or parameter states."""
    bare, stated = get_args(hint) if get_origin(hint) is Annotated else (hint, Doc(""))
    return Parameter(name=name, hint=bare, default=default, stated=stated, is_positional=is_positional)


def takes(options: Callable[P, Options], *example: str) -> Callable[[Callable[[Options], Result]], Callable[P, Result]]:
    """Let a function of an options class be called with the fields of that class.

    `example` is a call of it for the docstring, and what that shows.
    """
    stated = parameters(cast("type", options))  # a class; as a `Callable` it tells P
    make: Any = options
    placed = [each for each in stated if each.is_positional]
    known = {each.word: each for each in stated} | {each.name: each for each in stated}

    def decorate(function: Callable[[Options], Result]) -> Callable[P, Result]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Result:
            values: Any = [each.read(value) for each, value in zip(placed, args, strict=False)]
            named: Any = {known[word].name: known[word].read(kwargs[word]) for word in kwargs.keys() & known.keys()}
            if unknown := kwargs.keys() - known.keys():
                raise TypeError(f"{function.__name__}() has no {min(unknown)!r}; it takes {', '.join(known)}")
            if len(named) < len(kwargs):
                raise UsageError("an option is given twice, under both of its names", hint="give it once")
            return function(make(*values, *args[len(values) :], **named))

        call.__dict__["options"] = options
        call.__dict__["__signature__"] = _signature(stated, function)
        returned = function.__annotations__["return"]
        said = inspect.getdoc(function.__globals__.get(returned)) or ""
        returns = f"{returned}: {said.splitlines()[0]}" if said else str(returned)
        call.__doc__ = _describe(stated, function.__doc__ or "", returns, example)
        return call

    return decorate


def _read_path(name: str, value: object, *, several: bool) -> object:
    """Return a path as text, or several."""
    from ckpt_tools.storage.locations import local

    if isinstance(value, str | os.PathLike):
        path = os.fspath(value)
        if isinstance(path, str):
            return local(path)
    elif several and isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_read_path(name, each, several=False) for each in value]
    raise UsageError(f"{name} must be a path, got {value!r}", hint="give text or an os.PathLike")


def options_of(function: Callable[..., object]) -> tuple[Parameter, ...]:
    """Return the options of a function that `takes` made."""
    return parameters(vars(function)["options"])


def _signature(stated: Sequence[Parameter], function: Callable[..., object]) -> inspect.Signature:
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    made = [
        inspect.Parameter(each.name, kinds[each.is_positional], default=each.default, annotation=each.hint)
        for each in sorted(stated, key=lambda each: not each.is_positional)
    ]
    return inspect.Signature(made, return_annotation=function.__annotations__["return"])


def _describe(stated: Sequence[Parameter], text: str, returns: str, example: Sequence[str]) -> str:
    """Return a docstring with the sections that the options class, the result and the example state."""
    head, raises, tail = inspect.cleandoc(text).partition("\nRaises:")
    rows = [f"    {each.name}: {each.text}" for each in sorted(stated, key=lambda each: not each.is_positional)]
    parts = ["Args:", *rows, "", "Returns:", f"    {returns}", *(["", f"Raises:{tail}"] if raises else [])]
    if example:
        parts += ["", "Example:", f"    >>> {example[0]}", *(f"    {line}" for line in example[1:])]
    return "\n".join([head.rstrip(), "", *parts])


def default_num_workers(*paths: AnyPath | None, computes: bool = False) -> int:
    """Return how many threads work by default on what these paths name.

    Two per core, at most eight, where one may wait for the disk, and one, where they compute on what they move.
    Sixteen where a path is remote: most of them wait.
    """
    from ckpt_tools.storage.locations import is_remote

    if any(path is not None and is_remote(os.fspath(path)) for path in paths):
        return REMOTE_WORKERS
    cores = len(os.sched_getaffinity(0)) or 1
    return min(8, cores if computes else 2 * cores)
