"""The tensors of a file as those of the live model, and back: names and shapes in, mosaics out.

What loading and saving do are rules of the table (`renames`, `operations`). Nothing is guessed: a name that goes
nowhere, a part that is not there or an operation that needs the model is an error, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ckpt_tools.checkpoint.names.match_architecture import match_names
from ckpt_tools.checkpoint.names.mosaic import Mosaic
from ckpt_tools.checkpoint.names.operations import Shapes, run
from ckpt_tools.checkpoint.names.patterns import matches, missing, tree
from ckpt_tools.checkpoint.names.table import Expected
from ckpt_tools.checkpoint.names.transformers_renames import Route, renamed, routes, routes_back
from ckpt_tools.errors import UsageError
from ckpt_tools.text import first_few

Config = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """A model's tensors by the names of the other side."""

    mosaics: Mapping[str, Mosaic]  # Name on the other side → what it is made of; what that side drops keeps its name
    aliases: Mapping[str, str] = field(default_factory=dict)  # Further name of a tensor → the one in `mosaics`
    copies: tuple[tuple[Mosaic, Mosaic], ...] = ()  # What must be equal: of several copies, one stays
    notes: tuple[str, ...] = ()  # What was left out, for people
    lost: tuple[str, ...] = ()  # Of `mosaics`, what the other side has no place for


def to_live(tensors: Mapping[str, Mosaic], expected: Expected, config: Config) -> Converted:
    """Return what loading makes of a file's tensors, each whole; raise `UsageError` unless they are the whole model."""
    held = match_names(tensors, expected, config)
    if not held.is_whole:
        lacking = [*held.foreign, *held.missing, *held.incomplete]
        raise UsageError(f"its tensors are not those of a {expected.architecture}: {first_few(lacking, 4)}")

    def has(name: str) -> bool:
        return matches(expected.names, name, expected.counts)

    made = convert(tensors, expected, has, config)
    live = {name: tensor for name, tensor in made.items() if has(name)}
    used = {source for tensor in live.values() for source in tensor.sources}
    aliases = dict(_aliases(live, expected))
    excused = {*held.contract.computed, *held.contract.anew}
    lacking = [n for n in missing(expected.names, tree([*live, *aliases]), expected.counts) if n not in excused]
    if lacking:
        raise UsageError(f"a {expected.architecture} has tensors that are not in the file: {first_few(lacking, 4)}")
    return Converted(
        mosaics=live | {name: tensor for name, tensor in tensors.items() if name not in used and name not in aliases},
        aliases=aliases,
        notes=held.contract.notes,
    )


def to_hub(tensors: Mapping[str, Mosaic], expected: Expected, config: Config) -> Converted:
    """Return what saving makes of a live model's tensors; of those that are tied, one stays."""
    aliases = dict(_tied(tensors, expected))
    kept = {name: tensor for name, tensor in tensors.items() if name not in aliases}
    made = _run(routes_back(kept, expected.save_rules), kept, config)
    new = renamed(made, expected.save_rules)
    hub = {new[name]: tensor for name, tensor in made.items()}
    if len(hub) < len(made):
        raise UsageError("several tensors would be saved under one name")
    return Converted(mosaics=hub, aliases=aliases)


def convert(
    tensors: Mapping[str, Mosaic],
    expected: Expected,
    has: Callable[[str], bool],
    config: Config,
    shapes: Shapes | None = None,
) -> dict[str, Mosaic]:
    """Return everything that loading makes of tensors; those that go nowhere are left out."""
    # `has` says whether the live model has a name; some operations need its `shapes`.
    found = routes(tensors, expected.rules, expected.base, has)
    return _run((route for route in found if has(route.new)), tensors, config, shapes)


def _run(
    found: Iterable[Route], tensors: Mapping[str, Mosaic], config: Config, shapes: Shapes | None = None
) -> dict[str, Mosaic]:
    """Do the conversions of some routes; tensors without one keep what they are."""
    made: dict[str, Mosaic] = {}
    names: dict[str, str] = {}
    groups: dict[str, tuple[Route, dict[str, list[Mosaic]]]] = {}
    for route in found:
        if route.rule is None:
            if route.new in made:
                raise UsageError(f"{names[route.new]!r} and {route.name!r} are both named {route.new!r} in the model")
            made[route.new], names[route.new] = tensors[route.name], route.name
            continue
        _, columns = groups.setdefault(route.new, (route, {source: [] for source in route.rule.sources}))
        columns[route.source].append(tensors[route.name])
    for route, columns in groups.values():
        if len({len(column) for column in columns.values()}) > 1:
            raise UsageError(f"the parts of {first_few(route.targets, 2)} are not complete")
        try:
            made |= run(route.rule.operations if route.rule else "", columns, route.targets, config, shapes)
        except ValueError as error:
            raise UsageError(f"{first_few(route.targets, 2)}: {error}") from error
    return made


def _aliases(live: Mapping[str, Mosaic], expected: Expected) -> Iterator[tuple[str, str]]:
    """Yield (name that the model has and the file has not, name of the same tensor that is there)."""
    absent = list(missing(expected.names, tree(live), expected.counts))
    for tie in expected.ties:
        for wanted, there in ((tie.target, tie.source), (tie.source, tie.target)):
            for name in dict.fromkeys((*_names_like(wanted, expected), *absent)):
                if name not in live and (other := partner(name, wanted, there, live)) is not None:
                    yield name, other


def _tied(tensors: Mapping[str, Mosaic], expected: Expected) -> Iterator[tuple[str, str]]:
    """Yield (name that saving leaves out, name under which the tensor is saved)."""
    for tie in expected.ties:
        for name in tensors:
            other = partner(name, tie.target, tie.source, tensors)
            if other is not None and other != name:
                yield name, other


def partner(name: str, pattern: str, other: str, there: Iterable[str]) -> str | None:
    """Return the name beside a tied one, when both are of one shape."""
    match = re.match(pattern, name)
    if match is None:
        return None
    rest = name[match.end() :]
    if not rest.startswith(".") and rest:
        return None
    matching = [one for one in there if (found := re.match(other, one)) and one[found.end() :] == rest]
    return matching[0] if matching else None


def _names_like(pattern: str, expected: Expected) -> Iterator[str]:
    """Yield the model's own names that begin as a tie says; only ties of plain names are found this way."""
    plain = re.sub(r"\\(.)", r"\1", pattern)
    if re.search(r"[\[\](){}|?*+^$]", plain):
        return
    node = expected.names
    for component in plain.split("."):
        following = node.step(component)
        if following is None:
            return
        node = following
    stack = [(plain, node)]
    while stack:
        path, node = stack.pop()
        if node.is_name:
            yield path
        stack += [(f"{path}.{component}", child) for component, child in node.children.items()]
