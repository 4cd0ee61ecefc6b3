"""What a trainer's reader is made of: a table, rows of `fields.tsv`, with one for each field of the spec.

A row names the options that say the field, what it is where none is given, and a function where it takes more than the
first of them that is given. The value and the key that messages name come from the same row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, get_args

from pydantic import AliasChoices

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.options.preflight import Framework
from ckpt_tools.preflight.configs.config import Config, Options
from ckpt_tools.preflight.configs.document import Document
from ckpt_tools.preflight.configs.launch import launched_ranks
from ckpt_tools.preflight.configs.names import gone, installed_and_listed
from ckpt_tools.preflight.configs.schema import OptionSection, Spell, validate
from ckpt_tools.preflight.plain_values import as_truth, find_value, is_variable
from ckpt_tools.preflight.spec import Engine, ParallelSpec, build_mesh, sharding_strategy
from ckpt_tools.tables import read_rows
from ckpt_tools.text import first_few

FSDP: tuple[Engine, ...] = ("fsdp1", "fsdp2")


@dataclass(slots=True, kw_only=True)
class Given:
    """What the function of a row looks at, and adds to: findings other than those on names and types."""

    raw: Any  # The options in their types; one of a wrong type, or whose value is not in the file, counts as not given
    values: object
    document: Document
    spec: ParallelSpec
    spell: Spell
    findings: list[Finding] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    contents: dict[str, Mapping[str, object]] = field(default_factory=dict)
    moot: list[str] = field(default_factory=list)  # Options whose values matter to nothing, given the others

    @property
    def is_fsdp(self) -> bool:
        """Is the model wrapped by FSDP of either version?"""
        return self.spec.engine in FSDP

    def keys(self, option: str) -> tuple[str, ...]:
        """Return the names of an option, of all versions."""
        info = type(self.raw).model_fields.get(option)
        alias = None if info is None else info.validation_alias
        return tuple(map(str, alias.choices)) if isinstance(alias, AliasChoices) else (option,)

    def has_value(self, option: str) -> bool:
        """Is the value of an option in the file, if the option is?"""
        return not any(is_variable(find_value(self.values, key)) for key in self.keys(option))


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldRow:
    """Where one field of the spec comes from, or several that are said together."""

    options: tuple[str, ...] = ()  # Options that say it; the first that is given counts, and is named in messages
    default: object = None
    value: Value | None = None
    """Its value, where that is not the first option's; of several fields, one for each."""
    engines: tuple[Engine, ...] = ()
    has_value: bool = True  # False: the options say something of the field, and its value comes from elsewhere

    def evaluate(self, given: Given) -> object:
        """Return the field's value."""
        if self.value is not None:
            return self.value(given)
        found = (value_at(given.raw, option) for option in self.options)
        return next((value for value in found if value not in (None, "")), self.default)

    def find_key(self, given: Given) -> str | None:
        """Return the key path that says it, in the user's spelling."""
        keys = (key for option in self.options for key in given.keys(option))
        return next((given.spell(key) for key in keys if find_value(given.values, key) is not None), None)


Value = Callable[[Given], object]
Table = Mapping[str, FieldRow]
"""Field of the spec (`axes.tp` for one axis; several with blanks between) → its row; a row may look at those above."""


def row(*options: str, default: object = None, value: Value | None = None) -> FieldRow:
    """Make a row; see `FieldRow`."""
    return FieldRow(options=options, default=default, value=value)


def read_table(name: str, places: Mapping[str, str] = MappingProxyType({}), **values: Value) -> Table:
    """Make a table of `fields.tsv`; `values` are the functions that it names, `places` what stands for `{at}`."""
    rows = (each for each in read_rows(__package__, "fields.tsv") if each["table"] == name)
    return {each["fields"]: _row(each, places, values) for each in rows}


def _row(written: Mapping[str, str], places: Mapping[str, str], values: Mapping[str, Value]) -> FieldRow:
    options = () if written["options"] == "-" else tuple(written["options"].format_map(places).split())
    default, name = written["default"], written["value"]
    value = values.get(name)
    if value is None and name not in ("-", "elsewhere"):
        value = partial(_SHARED[name], next(iter(options), ""))
    return FieldRow(
        options=options,
        default=int(default) if default.removeprefix("-").isdecimal() else _DEFAULTS.get(default, default),
        value=value,
        engines=tuple(engine for engine in get_args(Engine) if engine in written["engines"].split()),
        has_value=name != "elsewhere",
    )


def _reshard(option: str, given: Given) -> tuple[str, bool]:
    """Return an FSDP2 strategy, where a missing option means that parameters are given back."""
    reshards = value_at(given.raw, option) is not False
    return sharding_strategy(given.spec, reshards=reshards), reshards


def _resumed(option: str, given: Given) -> object:
    """Return the checkpoint to go on from; a bare `true` means the last one, which has no name yet."""
    text = value_at(given.raw, option)
    return None if as_truth(text) is not None else text


_DEFAULTS: Mapping[str, object] = {"-": None, "true": True, "false": False, "()": ()}
_SHARED: Mapping[str, Callable[[str, Given], object]] = {
    "mesh": lambda _, given: build_mesh(given.spec.axes, given.spec.world_size),
    "not": lambda option, given: not value_at(given.raw, option),
    "ranks": lambda _, given: launched_ranks(given.document.commands),
    "reshard": _reshard,
    "resumed": _resumed,
}
"""Words of `fields.tsv` that every reader has: `axes` over all ranks, ranks that a launcher starts, …"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderInput:
    """A document, made ready for one table; `noun` is what an option is called, `check` adds what else is wrong."""

    model: type[OptionSection]
    table: Table
    by_engine: Mapping[Engine, Table] = field(default_factory=dict)
    values: Mapping[str, object]
    options: Mapping[str, object] | None = None  # The same in the spelling of `model`, where that is another one
    spell: Spell = str
    part: Callable[[Any], OptionSection] = lambda raw: raw
    root: str = ""
    added: Collection[str] = ()  # Paths of options that the user adds on purpose, whatever the framework has
    words: tuple[str, ...] = ()
    noun: str = "key"
    findings: tuple[Finding, ...] = ()
    check: Callable[[Given], None] = lambda _: None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerReader:
    """One trainer: how its configs are told, and made ready for its table."""

    name: Framework
    looks_like: Callable[[Document], bool]
    prepare: Callable[[Document], ReaderInput]


def read_source(name: Framework, source: ReaderInput, document: Document, *, world_size: int | None) -> Config:
    """Read a document by its trainer's table."""
    options = source.values if source.options is None else source.options
    raw, findings, counted = validate(
        source.model, options, spell=source.spell, added=source.added, words=source.words, what=source.noun
    )
    given: Given = Given(
        raw=source.part(raw),
        values=find_value(options, source.root) if source.root else options,
        document=document,
        spec=ParallelSpec(framework=name, engine="other", world_size=world_size),
        spell=lambda path: source.spell(f"{source.root}.{path}" if source.root else path),
    )
    _fill(given, source.table)
    _fill(given, source.by_engine.get(given.spec.engine, {}))
    source.check(given)
    given.findings += _release_notes(name, options, source.spell)
    world = source.table.get("world_size", FieldRow())
    return Config(
        framework=name,
        path=document.path,
        values=source.values,
        spec=given.spec,
        options=_recounted(counted, given),
        contents=given.contents,
        assumed=document.assumed,
        world_keys=tuple(given.spell(key) for option in world.options for key in given.keys(option)),
        findings=(*source.findings, *findings, *given.findings),
    )


def _release_notes(name: Framework, options: Mapping[str, object], spell: Spell) -> Iterator[Finding]:
    """Yield what to say of releases: options that the newest one does not have, and lists that are behind."""
    known = name.replace("-", "_")
    left = {option: gone(known)[option] for option in options if option in gone(known)}
    if left:
        shown = first_few([f"{spell(option)} ({last})" for option, last in left.items()], 6)
        what = f"the newest release that is known does not have these any more, and this is the last that has: {shown}"
        yield Finding.info(
            "older-release", spell(next(iter(left))), what, "check them yourself if the run uses a newer release"
        )
    behind = installed_and_listed(known)
    if behind is not None:
        what = f"{behind[0]} is installed here, but ckpt knows the options of {behind[1]}"
        yield Finding.info("newer-release", "", what, "a newer ckpt-tools may know its options")


def _fill(given: Given, table: Table) -> None:
    """Give the spec what the rows of a table say; the first row of a field that finds a key names it."""
    for name, one in table.items():
        fields, key = name.split(), one.find_key(given)
        changes: dict[str, Any] = {}
        if key is not None:
            changes["keys"] = {**given.spec.keys, **{field: key for field in fields if field not in given.spec.keys}}
        is_known = name == "world_size" and given.spec.world_size is not None
        if one.has_value and not is_known and (not one.engines or given.spec.engine in one.engines):
            found = one.evaluate(given)
            changes |= zip(fields, found if isinstance(found, tuple) and len(fields) > 1 else (found,), strict=True)
        axis = name.removeprefix("axes.")
        if axis != name and name in changes:
            size = changes.pop(name)
            changes["axes"] = {**given.spec.axes, axis: size} if size is not None else given.spec.axes
        given.spec = replace(given.spec, **changes)


def _recounted(options: Options, given: Given) -> Options:
    """Return the account with the files that could not be read as unread, and without what matters to nothing."""
    options = options.without_unread({given.spell(key) for option in given.moot for key in given.keys(option)})
    files = [path for path in map(given.spell, given.unread) if path not in options.unread]
    return replace(options, unread=(*options.unread, *files), understood=options.understood - len(files))


def value_at(raw: object, path: str) -> object:
    """Return a field of a section, or of one inside it; None where there is no such section."""
    for part in path.split("."):
        raw = getattr(raw, part) if isinstance(raw, OptionSection) and part in type(raw).model_fields else None
    return raw
