"""Models of the frameworks' configs: what a value may be, and findings instead of exceptions where it is not.

Values are taken in every form that the frameworks themselves take them: a truth may be the word `yes`, a count may be
text, a list of names may be joined by commas. What they would stop at is a finding here, and the option counts as not
given.

Source: argparse's `type=int`; for truths, `as_truth`.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    create_model,
    model_validator,
)

from ckpt_tools.checkpoint.entries import Finding, Severity
from ckpt_tools.preflight.configs.config import Options
from ckpt_tools.preflight.configs.names import inside, known
from ckpt_tools.preflight.plain_values import as_truth, dtype_name, find_value, is_typo, is_variable, join_path
from ckpt_tools.tables import read_rows
from ckpt_tools.text import first_few, nearest

# What becomes of every option of a config: read, known, passed over, not known, or not to be read here.

_DECIDES = re.compile(
    r"fsdp|offload|shard|parallel|replicate|_degree|(^|_)(tp|cp|ep|pp|sp)_size|nproc|num_processes|num_machines|nnodes"
    r"|n_gpus|num_gpus|dtype|precision|(^|_)(bf16|fp16|fp8)|bfloat16|float16|(gradient|activation)_checkpoint|recompute"
    r"|batch_size|seq_len|sequence_len|max_len|max_length|optim|quant|(4|8)bit|lora|adapter|zero_stage|wrap"
)
_MAX_GROUPED = 12
MAX_GUESSES = 200  # Unknown names of one file that are compared with the known ones

Spell = Callable[[str], str]  # Key path in normalised values → key path in the user's file
Status = Literal["read", "known", "passed over", "misspelt", "unknown"]
"""read: a reader looks at it. known: the trainer has it, and nothing that is checked depends on it. passed over: it
lies in a part of the config that is not looked at. misspelt: it is none, and one that is has nearly its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigOption:
    """One option of a config; a mapping that nothing looks into is one, of several values."""

    path: tuple[str | int, ...]
    value: object
    status: Status
    num_values: int = 1
    near: str | None = None
    severity: Severity | None = None


def without_variables(values: Mapping[str, object]) -> dict[str, object]:
    """Return a config without the options whose values are not in the file."""
    return {key: _without(value) for key, value in values.items() if not _is_variable_leaf(value)}


def _is_variable_leaf(value: object) -> bool:
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        return False
    return is_variable(value)


def _without(value: object) -> object:
    if isinstance(value, Mapping):
        return without_variables(value)
    return [_without(item) for item in value] if isinstance(value, list) else value


def names_of(model: type[OptionSection]) -> dict[str, str]:
    """Return option → field, for all options that a section reads."""
    names: dict[str, str] = {}
    for field, info in model.model_fields.items():
        alias = info.validation_alias
        if isinstance(alias, AliasChoices):
            names |= {str(name): field for name in alias.choices}
        else:
            names[info.alias or field] = field
    return names


def option_names(model: type[OptionSection]) -> frozenset[str]:
    """Return the options of a section, read here or not."""
    return model.known | names_of(model).keys()


def options_of(
    model: type[OptionSection],
    values: Mapping[str, object],
    path: tuple[str | int, ...] = (),
    *,
    guesses: Iterator[int] | None = None,
) -> Iterator[ConfigOption]:
    """Yield every option of a config, or of its part at `path`; `guesses` limits comparisons with known names."""
    guesses = iter(range(MAX_GUESSES)) if guesses is None else guesses
    sections, fields = dict(_sections(model)), names_of(model)
    for key, value in values.items():
        here = (*path, key)
        if key in sections:
            inner, is_list = sections[key]
            items = list(enumerate(value)) if is_list and isinstance(value, list) else [(None, value)]
            for index, item in items:
                at = here if index is None else (*here, index)
                if isinstance(item, Mapping):
                    yield from options_of(inner, item, at, guesses=guesses)
                elif item is not None:
                    yield ConfigOption(path=at, value=item, status="read")
        elif key in fields:
            yield ConfigOption(path=here, value=value, status="read")
        elif key in model.known:
            yield from _known(inside(model.known, key), here, value, guesses)
        else:
            names = frozenset(name for name in model.known if "/" not in name) | fields.keys()
            yield _unknown(model, here, value, names if next(guesses, None) is not None else frozenset())


def _known(
    names: frozenset[str], path: tuple[str | int, ...], value: object, guesses: Iterator[int]
) -> Iterator[ConfigOption]:
    """Yield an option that the framework has and no field reads; `names` are those inside it, where they are known."""
    if names and isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from _known(names, (*path, index), item, guesses)
        return
    if not isinstance(value, Mapping) or not value or not names:
        status: Status = "passed over" if isinstance(value, Mapping) and value else "known"
        yield ConfigOption(path=path, value=value, status=status, num_values=_count(value))
        return
    for key, inner in value.items():
        here = (*path, key)
        if key in names:
            yield from _known(inside(names, str(key)), here, inner, guesses)
            continue
        siblings = frozenset(name for name in names if "/" not in name)
        near = nearest(str(key), siblings) if next(guesses, None) is not None else None
        if near is not None and is_typo(str(key), near):
            yield ConfigOption(path=here, value=inner, status="misspelt", near=near, severity="warning")
        else:
            yield ConfigOption(path=here, value=inner, status="passed over", num_values=_count(inner))


def _unknown(
    model: type[OptionSection], path: tuple[str | int, ...], value: object, names: frozenset[str]
) -> ConfigOption:
    """Return an option that is none of `names`: an error only if it is misspelt; newer releases may have others."""
    key = str(path[-1])
    near = model.instead.get(key) or (nearest(key, names) if names else None)
    is_misspelt = near is not None and (key in model.instead or is_typo(key, near))
    severity: Severity | None = model.unknown
    if is_misspelt and near is not None and (near in names_of(model) or decides(near)):
        severity = "error"
    elif near is None and model.extensible:
        severity = "info"
    elif not is_misspelt and severity == "error":
        severity = "warning"
    status: Status = "misspelt" if is_misspelt else "passed over" if severity is None else "unknown"
    return ConfigOption(path=path, value=value, status=status, num_values=_count(value), near=near, severity=severity)


def _sections(model: type[OptionSection]) -> Iterator[tuple[str, tuple[type[OptionSection], bool]]]:
    """Yield the fields that are sections themselves, and whether there is a list of them."""
    for name, field in model.model_fields.items():
        is_list = get_origin(field.annotation) is list
        inner = get_args(field.annotation)[0] if is_list else field.annotation
        if isinstance(inner, type) and issubclass(inner, OptionSection):
            yield name, (inner, is_list)


def _count(value: object) -> int:
    return sum(_count(item) for item in value.values()) if isinstance(value, Mapping) and value else 1


def account(options: Iterable[ConfigOption], *, spell: Spell = str, words: Iterable[str] = ()) -> Options:
    """Return how much of a config is understood; `words` of a command line may stand for any number of options."""
    counts: dict[Status, int] = {"read": 0, "known": 0, "passed over": 0, "misspelt": 0, "unknown": 0}
    unknown: list[str] = []
    deciding: list[str] = []
    unread: list[str] = []
    variables: list[str] = []
    for option in options:
        counts[option.status] += option.num_values
        where = spell(join_path(*option.path))
        if option.status in ("misspelt", "unknown"):
            unknown.append(where)
            if option.status == "unknown" and decides(str(option.path[-1])):
                deciding.append(where)
        elif is_variable(option.value):
            (unread if option.status == "read" else variables).append(where)
    return Options(
        read=sum(counts.values()),
        understood=counts["read"] + counts["known"] - len(unread),
        passed_over=counts["passed over"],
        num_foreign=counts["unknown"],
        unknown=tuple(unknown),
        deciding=tuple(deciding),
        unread=tuple(unread),
        words=tuple(words),
        variables=tuple(variables),
    )


def check_names(options: Iterable[ConfigOption], *, spell: Spell = str, what: str = "key") -> tuple[Finding, ...]:
    """Return the findings on options that are not known: errors each on its own, what is less in one."""
    findings: list[Finding] = []
    others: list[Finding] = []
    for option in options:
        if option.severity is None:
            continue
        found = _unknown_key(option, spell, what)
        (findings if option.severity == "error" else others).append(found)
    return (*findings, *_grouped(others, what))


def _unknown_key(option: ConfigOption, spell: Spell, what: str) -> Finding:
    where = spell(join_path(*option.path))
    near = None
    if option.near is not None:
        parent = spell(join_path(*option.path[:-1])) + "." if len(option.path) > 1 else ""
        near = spell(join_path(*option.path[:-1], option.near)).removeprefix(parent)
    problem = f"there is no such {what}" + (f"; the nearest one is {near}" if near else "")
    hint = f"write {near}" if near else f"remove it, or check which version of the framework has this {what}"
    return Finding(code="unknown-key", severity=option.severity or "info", where=where, what=problem, hint=hint)


def _grouped(findings: list[Finding], what: str) -> tuple[Finding, ...]:
    if len(findings) < 2:
        return tuple(findings)
    severity: Severity = "warning" if any(one.severity == "warning" for one in findings) else "info"
    shown = ", ".join(
        one.where + (f" ({hint.removeprefix('write ')}?)" if (hint := one.hint or "").startswith("write ") else "")
        for one in findings[:_MAX_GROUPED]
    )
    problem = f"{len(findings)} {what}s are not known: {shown}" + (", …" if len(findings) > _MAX_GROUPED else "")
    advice = f"correct misspelled {what}s, or check which version of the framework has these {what}s"
    return (Finding(code="unknown-key", severity=severity, where=findings[0].where, what=problem, hint=advice),)


def check_variables(options: Options, values: Mapping[str, object]) -> tuple[Finding, ...]:
    """Return what to say of options whose values are not in the file."""
    findings: list[Finding] = []
    words = dict.fromkeys(options.words)
    if words:
        shown = first_few(words, _MAX_GROUPED)
        what = f"not checked: options that {shown} may expand to, which are not in the file"
        findings.append(Finding.warning("unread-options", next(iter(words)), what, "write the options themselves"))
    findings += [
        Finding.warning(
            "unknown-value",
            path,
            f"{_shown(values, path)}is not in the file: its value is not checked",
            "write the value itself",
        )
        for path in options.unread[:_MAX_GROUPED]  # the report lists them all
    ]
    if options.variables:
        shown = first_few(options.variables, 6)
        what = f"set by variables, which do not affect the checks: {shown}"
        findings.append(Finding.info("unknown-value", options.variables[0], what))
    return tuple(findings)


def _shown(values: Mapping[str, object], path: str) -> str:
    """Return the beginning of the value at a path, or the option itself, and a blank."""
    node = find_value(values, path.removeprefix("--"))
    return f"{node[:60] if isinstance(node, str) else path} "


def decides(name: str) -> bool:
    """Does an option of this name decide what a run needs in memory, or how it is sharded?"""
    return _DECIDES.search(name) is not None


_MAX_DIGITS = 18
MAX_FINDINGS = 200
"""Findings of one kind on one file; whoever hands in another thing than a config needs no list of everything in it."""
_MAX_SHOWN = 60


def _whole_number(value: object) -> int:
    if isinstance(value, str):
        text = value.strip()
        if text.removeprefix("-").removeprefix("+").isdecimal() and len(text) <= _MAX_DIGITS:
            return int(text)
    elif isinstance(value, float):
        if value.is_integer() and abs(value) < 10**_MAX_DIGITS:
            return int(value)
    elif type(value) is int and abs(value) < 10**_MAX_DIGITS:
        return value
    raise ValueError("a whole number")


def _positive(value: object) -> int:
    try:
        number = _whole_number(value)
    except ValueError:
        number = 0
    if number < 1:
        raise ValueError("a whole number, 1 or more")
    return number


def _number(value: object) -> float:
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
    raise ValueError("a number")


def _truth(value: object) -> bool:
    truth = as_truth(value) if isinstance(value, (str, int)) else None
    if truth is None:
        raise ValueError("true or false")
    return truth


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"  # a bare `no` in YAML
    if isinstance(value, (str, int, float)):
        return str(value).strip()
    raise ValueError("text")


def _names(value: object) -> tuple[str, ...]:
    items = value.split(",") if isinstance(value, str) else value
    if isinstance(items, (list, tuple)) and all(isinstance(item, str) for item in items):
        return tuple(item.strip() for item in items if item.strip())
    raise ValueError("names, as a list or separated by commas")


def _choice(written: str) -> Callable[[object], str]:
    """Return what checks text that is one of some words, `a|b`; their case counts in `=a|b` only."""
    known = written.removeprefix("=").split("|")

    def check(value: object) -> str:
        try:
            word = _word(value)
        except ValueError:
            word = ""
        if not written.startswith("="):
            word = {name.lower(): name for name in known}.get(word.lower(), word)
        if word in known:
            return word
        raise ValueError(f"one of {', '.join(known)}")

    return check


def _dtype(value: object) -> str:
    name = dtype_name(_word(value))
    if name is None:
        raise ValueError("a dtype: bf16, fp16 or fp32, or their long names")
    return name


def _version(value: object) -> int:
    if str(value).strip() in ("1", "2") and not isinstance(value, bool):
        return int(str(value))
    raise ValueError("1 or 2")


STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""Strategies of FSDP1 by their numbers, from 1."""
STATE_DICTS = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
"""Kinds of state dicts by their numbers, from 1."""


def _one_of(names: tuple[str, ...], value: object) -> str:
    text = str(value).strip().upper()
    if text in names:
        return text
    if text.isdecimal() and len(text) == 1 and 1 <= int(text) <= len(names):
        return names[int(text) - 1]
    raise ValueError(f"one of {', '.join(names)}")


_DEVICES = ("CPU", "GPU", "NPU", "MLU", "SDAA", "MUSA", "XPU", "HPU", "NEURON")
_TYPES = {"NO", "FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA", "TPU", *(f"MULTI_{device}" for device in _DEVICES)}
"""Source: `accelerate/utils/dataclasses.py:DistributedType`."""


def _distributed_type(value: object) -> str:
    if value is False:
        return "NO"  # a bare NO in YAML
    if isinstance(value, str) and value in _TYPES:
        return value
    raise ValueError(f"one of {', '.join(sorted(_TYPES))}, in capitals")


_FORMS: Mapping[str, Callable[[object], object]] = {
    "any": lambda value: value,
    "count": _whole_number,
    "positive": _positive,
    "number": _number,
    "truth": _truth,
    "word": _word,
    "dtype": _dtype,
    "names": _names,
    "version": _version,
    "strategy": partial(_one_of, STRATEGIES),
    "state_dict": partial(_one_of, STATE_DICTS),
    "distributed_type": _distributed_type,
}
"""Form of an option in `options.tsv` → what makes its value of what is written, or raises ValueError."""


class OptionSection(BaseModel):
    """One mapping of a config. Options that no field reads are kept as they are; null counts as not given."""

    model_config = ConfigDict(extra="allow", protected_namespaces=(), frozen=True)

    known: ClassVar[frozenset[str]] = frozenset()  # Options that the framework has and no field here reads
    unknown: ClassVar[Severity | None] = "warning"
    """What another option is: an error where the framework stops at it; None where it takes anything."""
    extensible: ClassVar[bool] = False
    """Do scripts add options of their own? Then one that resembles none of these is worth a mention only."""
    instead: ClassVar[Mapping[str, str]] = MappingProxyType({})

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: object) -> object:
        if not isinstance(values, Mapping):
            return values
        return {key: value for key, value in values.items() if value is not None}


@cache
def section(name: str) -> type[OptionSection]:
    """Make the section of a name in `sections.tsv` of its options in `options.tsv`."""
    own = next(row for row in read_rows(__package__, "sections.tsv") if row["section"] == name)
    above = OptionSection if own["above"] == "-" else section(own["above"])
    fields: dict[str, Any] = {}
    instead = dict(above.instead)
    for row in read_rows(__package__, "options.tsv"):
        if (row["section"], row["form"]) == (name, "instead"):
            instead[row["option"]] = row["names"]
        elif row["section"] == name:
            fields[row["option"]] = _field(row["form"], row["names"].split())
    made = create_model(name, __base__=above, **fields)
    lists = [] if own["known"] == "-" else own["known"].split()
    made.known = frozenset(chain.from_iterable(map(_names_in, lists))) if lists else above.known
    severities: dict[str, Severity | None] = {"error": "error", "info": "info", "any": None}
    made.unknown = severities.get(own["unknown"], above.unknown)
    made.extensible, made.instead = own["unknown"] == "extended" or above.extensible, instead
    return made


def _names_in(written: str) -> Iterable[str]:
    """Return the names of a list, or a part of them, as `sections.tsv` has it."""
    path, sign, text = re.split(r"([:=]|$)", written, maxsplit=1)
    if "/" not in path:
        return (path,)
    names = (name for name in known(*path.split("/")) if name.startswith(text))
    return (name.removeprefix(text) for name in names) if sign == ":" else names


def _field(form: str, names: list[str]) -> tuple[Any, Any]:
    if form.startswith("["):
        return list[section(form[1:-1])], Field(default_factory=list)  # type: ignore[misc]
    if form.startswith("{"):
        return section(form[1:-1]), section(form[1:-1])()
    alias = None if names == ["-"] else AliasChoices(*names)
    check = _FORMS.get(form) or _choice(form)
    return Annotated[Any, PlainValidator(check)], Field(default=None, validation_alias=alias)


def validate(
    model: type[OptionSection],
    values: Mapping[str, object],
    *,
    spell: Spell = str,
    added: Collection[str] = (),
    words: Iterable[str] = (),
    what: str = "key",
) -> tuple[OptionSection, tuple[Finding, ...], Options]:
    """Return a config as its model, findings on types and names, and how much is understood."""
    findings: list[Finding] = []
    options = [
        replace(one, status="passed over", severity=None)
        if one.severity != "error" and join_path(*one.path) in added and one.status in ("unknown", "misspelt")
        else one
        for one in options_of(model, values)
    ]
    left: Any = copy.deepcopy(without_variables(values))
    while True:
        try:
            checked = model.model_validate(left)
            break
        except ValidationError as error:
            # Every round removes what was wrong with the last, so this ends.
            for problem in error.errors(include_url=False, include_context=True):
                findings.append(_wrong_type(problem, spell))
                _remove(left, problem["loc"])
    findings += check_names(options, spell=spell, what=what)
    return checked, tuple(findings[:MAX_FINDINGS]), account(options, spell=spell, words=words)


def _wrong_type(problem: Any, spell: Spell) -> Finding:  # noqa: ANN401 - pydantic's ErrorDetails, whose context is untyped
    kind = problem["type"]
    if kind == "value_error":
        expected = str(problem["ctx"]["error"])
    else:
        expected = "a list" if kind == "list_type" else "a mapping of options"
    where = spell(join_path(*problem["loc"]))
    return Finding.error(
        "wrong-type", where, f"expected {expected}, found {describe(problem['input'])}", f"{where}: {expected}"
    )


def _remove(values: Any, location: tuple[str | int, ...]) -> None:  # noqa: ANN401 - any value of a config
    *parents, last = location
    for part in parents:
        values = values[part]
    if isinstance(last, int):
        values[last] = {}  # an empty section: its neighbours keep their places
    else:
        del values[last]


def describe(value: object) -> str:
    """Say what a value is, for a message: `text 'eight'`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"text {_short(value)!r}"
    if isinstance(value, (int, float)):
        return f"the number {_short(str(value)) if abs(value) < 1e300 else 'out of range'}"
    if isinstance(value, Mapping):
        return f"a mapping of {len(value)} keys"
    return f"a list of {len(value)}" if isinstance(value, (list, tuple)) else type(value).__name__


def _short(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 1] + "…"
