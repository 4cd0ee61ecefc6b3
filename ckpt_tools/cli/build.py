"""The command line of a command, made from the options class of the library's function that it shows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

import typer

from ckpt_tools.cli.output import Output
from ckpt_tools.options import Argument, Option, Parameter, options_of, parameter, parameters
from ckpt_tools.remote.places import set_storage
from ckpt_tools.text import escape_name

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Call(Generic[Result]):
    """A call of the library as the user said it, still to be made."""

    function: Callable[..., Result]
    given: Mapping[str, Any]
    """Option → value, of those that are given or have a default."""

    def __call__(self, **more: object) -> Result:
        """Make it, with what only the library takes, or in place of what is given."""
        return self.function(**{**self.given, **more})

    def shown(self, name: str) -> str:
        """Return an argument as it may be printed."""
        return escape_name(str(self.given[name]))


def command(run: Callable[..., int], function: Callable[..., object] | None) -> Callable[..., int]:
    """Return the command as typer reads it.

    `run` makes the call of the library's function (made by `takes`; None without one), prints the result and returns
    the exit code. It gets a `Call`, and as keywords its own options, beside those of that function, and `output`. A
    keyword of a class of options stands for those of its options that the function does not have.
    """
    options = () if function is None else options_of(function)
    stated = [each for each in options if isinstance(each.stated, Argument | Option)]
    hints = get_type_hints(run, include_extras=True)
    keywords = [each for each in inspect.signature(run).parameters.values() if each.kind is each.KEYWORD_ONLY]
    groups = {
        each.name: hints[each.name] for each in keywords if is_dataclass(hints[each.name]) and each.name != "output"
    }
    taken = {each.name for each in stated}
    own = []
    for each in keywords:
        if each.name in groups:
            own += [one for one in parameters(groups[each.name]) if _is_new_option(one, taken)]
        elif each.name != "output":
            own.append(parameter(each.name, hints[each.name], each.default))
    shows = parameters(Output) if "output" in hints else ()
    if "progress" not in {each.name for each in options}:
        shows = tuple(each for each in shows if each.name != "progress")
    known = {each.name: each for each in (*stated, *own, *shows)}

    def callback(**values: Any) -> int:  # noqa: ANN401 - whatever typer reads
        given = {name: value for name, value in values.items() if not _is_absent(known[name], value)}
        more: dict[str, Any] = {each.name: given.pop(each.name) for each in own if each.name in given}
        for each in (*own, *shows):
            each.check(values[each.name])
        for name, group in groups.items():
            names = [each.name for each in parameters(group) if each.name in more]
            more[name] = group(**{each: more.pop(each) for each in names})
        if shows:
            shown = {each.name: given.pop(each.name) for each in shows if each.name in given}
            more["output"] = output = Output(**shown)
            set_storage(output.storage)
        return run(*(() if function is None else (Call(function, given),)), **more)

    made = [_typed(each) for each in (*_in_order(stated, own), *shows)]
    callback.__dict__["__signature__"] = inspect.Signature(made)
    return callback


def _in_order(stated: Iterable[Parameter], own: Iterable[Parameter]) -> list[Parameter]:
    """Put a command's own options first; whatever names another option follows that."""
    ordered = [each for each in stated if not _after(each)]
    place = 0
    for each in (*filter(_after, stated), *own):
        if _after(each):
            place = next(number for number, other in enumerate(ordered, 1) if other.name == _after(each))
        ordered.insert(place, each)
        place += 1
    return sorted(ordered, key=lambda each: not isinstance(each.stated, Argument))


def _is_new_option(each: Parameter, taken: Collection[str]) -> bool:
    return isinstance(each.stated, Option) and each.name not in taken


def _after(each: Parameter) -> str | None:
    return each.stated.after if isinstance(each.stated, Option) else None


def _is_absent(each: Parameter, value: object) -> bool:
    return value is None or (isinstance(each.stated, Option) and value == each.stated.none)


def _typed(each: Parameter) -> inspect.Parameter:
    """Return the parameter that typer reads."""
    default = each.default
    option = each.stated
    info: object = None
    if isinstance(option, Argument):
        default = None if default == () else default
        info = typer.Argument(metavar=option.metavar, help=option.help)
    elif isinstance(option, Option):
        default = None if option.is_tristate or default == () else option.none or default
        info = typer.Option(
            *filter(None, (option.short, each.flag)),
            envvar=f"CKPT_{each.name.upper()}" if option.env else None,
            metavar=option.metavar or "|".join(filter(None, (option.none, *each.words))) or None,
            min=option.min,
            max=option.max,
            help=option.help,
        )
    kind = _kind(each)
    return inspect.Parameter(
        each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )


def _kind(each: Parameter) -> Any:  # noqa: ANN401 - a type
    """Return the type that the command line reads a value as."""
    parts = (each.hint, *get_args(each.hint))
    if any(get_origin(part) is Sequence for part in parts):
        return list[str] | None
    is_word = any(get_origin(part) is Literal for part in parts)
    kinds = (bool, str) if is_word else (bool, str, float, int)
    kind: type = next((kind for kind in kinds if kind in parts), str)
    is_tristate = isinstance(each.stated, Option) and each.stated.is_tristate
    return kind | None if each.default is None or is_tristate else kind
