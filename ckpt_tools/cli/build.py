"""The command line of a command, made from the options class of the library's function that it shows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args, get_origin

import typer

from ckpt_tools.options import Argument, Option, Options, Parameter, parameters
from ckpt_tools.options.output import OutputOptions
from ckpt_tools.text import escape_name

Result = TypeVar("Result")
_VALUES = {int: "N", float: "X", str: "TEXT"}


@dataclass(frozen=True, slots=True)
class CommandCall(Generic[Result]):
    """A call of the library as the user said it, still to be made."""

    function: Callable[..., Result]
    given: Mapping[str, Any]  # Option → value, of those that are given or have a default

    def __call__(self, **more: object) -> Result:
        """Make it, with what only the library takes, or in place of what is given."""
        return self.function(**{**self.given, **more})

    def shown(self, name: str) -> str:
        """Return an argument as it may be printed."""
        return escape_name(str(self.given[name]))


def command(
    options: type | None,
    own: Sequence[type],
    resolve: Callable[[], tuple[Callable[..., int], Callable[..., object] | None]],
) -> Callable[..., int]:
    """Return the command as typer reads it.

    `options` states the options of the library's function (None without one), `own` those that only the command line
    has; what the function has as well is stated once. `resolve` returns what prints and the function, when the command
    runs. What prints gets a `Call`, an instance of every class of `own` and an `Output`, and returns the exit code.
    """
    all_stated = () if options is None else parameters(options)
    names = {each.name for each in all_stated}
    stated = [each for each in all_stated if isinstance(each.stated, Argument | Option)]
    groups = {
        kind: [
            each for each in parameters(kind) if isinstance(each.stated, Argument | Option) and each.name not in names
        ]
        for kind in own
    }
    added = [each for group in groups.values() for each in group]
    common = parameters(OutputOptions) if options is not None else ()
    shown = [each for each in common if each.name != "progress" or "progress" in names]
    known = {each.name: each for each in (*stated, *added, *shown)}

    def callback(**values: Any) -> int:  # noqa: ANN401 - whatever typer reads
        given = {name: value for name, value in values.items() if not _is_absent(known[name], value)}
        for each in (*added, *shown):
            each.check(values[each.name])

        def take(kind: Callable[..., Options], group: Iterable[Parameter]) -> Options:
            return kind(**{each.name: given.pop(each.name) for each in group if each.name in given})

        parts = [take(kind, group) for kind, group in groups.items()]
        output = take(OutputOptions, shown)
        run, function = resolve()
        if function is None:
            return run(*parts)
        from ckpt_tools.cli.output import note
        from ckpt_tools.storage.locations import set_storage
        from ckpt_tools.storage.remote.patience import set_patience
        from ckpt_tools.units import parse_duration

        set_storage(output.storage)
        set_patience(parse_duration(output.patience), (lambda _: None) if output.is_silent else note)
        return run(CommandCall(function, given), *parts, output)

    callback.__dict__["__signature__"] = inspect.Signature(
        [_typed(each) for each in (*_in_order(stated, added), *shown)]
    )
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


def _after(each: Parameter) -> str | None:
    return each.stated.after if isinstance(each.stated, Option) else None


def _is_absent(each: Parameter, value: object) -> bool:
    return value is None or (isinstance(each.stated, Option) and value == each.stated.none)


def _typed(each: Parameter) -> inspect.Parameter:
    """Return the parameter that typer reads."""
    default = each.default
    option = each.stated
    info: object = None
    kind = _kind(each)
    value = next((word for one, word in _VALUES.items() if one in (kind, *get_args(kind))), None)  # None for a flag
    if isinstance(option, Argument):
        default = None if default == () else default
        info = typer.Argument(metavar=option.metavar, help=option.help)
    elif isinstance(option, Option):
        default = None if option.is_tristate or default == () else option.none or default
        text, value = option.help, option.metavar or "|".join(filter(None, (option.none, *each.words))) or value
        if value and len(value) > 60:  # more than a line of help holds
            text, value = f"{text} One of {value.replace('|', ', ')}.", "WORD"
        info = typer.Option(
            *filter(None, (option.short, each.flag)),
            envvar=f"CKPT_{each.name.upper()}" if option.env else None,
            metavar=value,
            min=option.min,
            max=option.max,
            help=text,
        )
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
