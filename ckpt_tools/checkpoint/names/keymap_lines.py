"""The text of key maps: what is written there, and what of it is refused; the form is that of `names.keymap`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import chain, product
from typing import Generic, TypeVar

from ckpt_tools.checkpoint.names.keymap_steps import OPERATIONS, LineStep, build_step
from ckpt_tools.errors import UsageError
from ckpt_tools.text import first_few

_LINE = re.compile(r"(?P<hub>[^=:|]+)=(?P<other>[^=:]+)(:(?P<steps>[^=:|]+))?")
_NAME = re.compile(r"(?:[\w.\-*+]|\{\*\+\w+\})+")
_CHOICE = re.compile(r"\{([^{}]*,[^{}]*)\}")
_OPTIONAL = re.compile(r"\[([^\[\]]*)\]")
_AGAIN = re.compile(r"(\S+) = (\S+) as (\S+) = (\S+)")
_SHIFT = re.compile(r"\{\*\+(\w+)\}")
_NUMBER = r"0|[1-9]\d{0,4}"
_ANYTHING = "**"
SIGNS = "*+"  # What stands for numbers in names, in the order in which they are stacked
Numbers = tuple[int, ...]  # What the signs of a name stand for, in the order of `SIGNS`
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """What the other side calls the tensors of a line, and what they are made by."""

    names: tuple[str, ...]
    steps: tuple[LineStep, ...] = ()
    companions: str = ""  # Name of the hub without which this is read, and not written

    @property
    def signs(self) -> str:
        """Which of `*` and `+` its names have."""
        return signs_of(self.names[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Tensors of the hub, and what they are on the other side."""

    hub: tuple[str, ...]
    spellings: tuple[Spelling, ...]  # The first that may be written is
    is_written: bool = True  # False for what is read alone

    @property
    def signs(self) -> str:
        """Which of `*` and `+` its names have."""
        return signs_of(self.hub[0])

    @property
    def lists(self) -> tuple[str, ...]:
        """What its numbers count, in the order of `signs`: names of the hub up to each of them."""
        return tuple(self.hub[0].partition(sign)[0] + sign for sign in self.signs)

    @property
    def may_be_written(self) -> tuple[Spelling, ...]:
        """The spellings with a condition before the first that has none, and that one."""
        certain = next((at for at, one in enumerate(self.spellings) if not one.companions), len(self.spellings))
        return self.spellings[: certain + 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class MapSection:
    """What a map says of one kind of model."""

    lines: tuple[Line, ...]
    ties: tuple[tuple[str, str], ...] = ()  # (name that may be missing on the hub, name of the same tensor)
    dropped: tuple[str, ...] = ()  # The hub's, which the other side does without
    skipped: tuple[str, ...] = ()  # The other side's, which the hub does without
    lost: tuple[Spelling, ...] = ()  # The other side's, which the hub has no place for
    counts: tuple[tuple[str, tuple[str, ...]], ...] = ()  # (one of `Line.lists`, or a sign for others; keys of config)

    @property
    def written(self) -> tuple[Line, ...]:
        """The lines of the way from the hub."""
        return tuple(line for line in self.lines if line.is_written)


@dataclass(slots=True)
class _Draft:
    lines: list[Line] = field(default_factory=list)
    ties: list[tuple[str, str]] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    lost: list[Spelling] = field(default_factory=list)
    counts: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)


def signs_of(pattern: str) -> str:
    """Return which of `*` and `+` a name has."""
    return "".join(sign for sign in SIGNS if sign in _unshifted(pattern))


def _unshifted(pattern: str) -> str:
    return _SHIFT.sub("*", pattern) if "{" in pattern else pattern


def shift_of(pattern: str) -> str:
    """Return the key of config.json that is added to `*` in a name; empty for none."""
    found = _SHIFT.search(pattern) if "{" in pattern else None
    return found[1] if found else ""


def fill(pattern: str, signs: str, numbers: Numbers) -> str:
    """Return the name that a pattern stands for; a sign that it has not is passed over."""
    for sign, number in zip(signs, numbers, strict=True):
        pattern = _unshifted(pattern).replace(sign, str(number))
    return pattern


class Patterns(Generic[T]):
    """Names with numbers, found by what they stand for; each has something that belongs to it."""

    # One that ends in ``**`` stands for all names that begin as it does; it has no numbers.

    def __init__(self, patterns: Iterable[tuple[str, T]]) -> None:
        self._siblings: dict[str, list[tuple[str, T]]] = {}
        self._begins: list[tuple[str, str, T]] = []
        for pattern, belongs in patterns:
            if pattern.endswith(_ANYTHING):
                self._begins.append((pattern.removesuffix(_ANYTHING), pattern, belongs))
                continue
            self._siblings.setdefault(_shape(_unshifted(pattern)), []).append((pattern, belongs))

    def all(self, name: str) -> Iterator[tuple[str, Numbers, T]]:
        """Yield (pattern, numbers in the name, what belongs to it) of all that stand for a name, in their order."""
        for pattern, belongs in self._siblings.get(_shape(name), ()):
            if found := _compile(pattern).fullmatch(name):
                groups = found.groupdict()
                yield pattern, tuple(int(groups[key]) for key in ("layer", "expert") if key in groups), belongs
        for start, pattern, belongs in self._begins:
            if name.startswith(start):
                yield pattern, (), belongs

    def knows(self, name: str) -> bool:
        """Does any stand for a name?"""
        return next(self.all(name), None) is not None


def _shape(name: str) -> str:
    """Return a name with a # for every number: equal for a pattern and all that it stands for."""
    return re.sub(r"[\d*+]+", "#", name)


@cache
def _compile(pattern: str) -> re.Pattern[str]:
    body = re.escape(_unshifted(pattern))
    return re.compile(body.replace(r"\*", f"(?P<layer>{_NUMBER})").replace(r"\+", f"(?P<expert>{_NUMBER})"))


def parse_sections(text: str, *, where: str, is_own: bool = False) -> dict[str, MapSection]:
    """Parse a file of maps: name of the section → what it says. That ckpt's own have a way back, a test proves."""
    found: dict[str, MapSection] = {}
    titles: tuple[str, ...] = ()
    draft: _Draft | None = None
    for number, raw in enumerate([*text.splitlines(), "[]"], 1):
        line = raw.partition("#")[0].strip()
        at = f"{where}, line {number}"
        if line.startswith("["):
            if draft is not None:
                section = _finish(draft, where=where, is_own=is_own)
                for title in titles:
                    if title in found:
                        raise UsageError(f"there are two sections of {title}", where=at)
                    found[title] = section
            titles, draft = tuple(line.strip("[]").split()), _Draft()
        elif line and draft is None:
            raise UsageError("start the map with a section: [llama], or [*] for any model", where=at)
        elif line and draft is not None:
            for one in _spread(line, at):
                _parse_line(one, draft, at)
    return found


def _spread(line: str, where: str) -> Iterator[str]:
    """Yield a line for every choice in braces: those that stand at the same place of their names are made alike."""
    words = [_CHOICE.split(word) for word in line.split()]
    longest = max(words, key=len)
    for at in range(1, len(longest), 2):
        if len({word[at].count(",") for word in words if at < len(word)}) > 1:
            raise UsageError(f"the names in a line have different numbers of choices: {line}", where=where)
    for chosen in product(*(range(choices.count(",") + 1) for choices in longest[1::2])):
        yield " ".join(
            "".join(text.split(",")[chosen[at // 2]] if at % 2 else text for at, text in enumerate(word))
            for word in words
        )


def _parse_line(line: str, draft: _Draft, where: str) -> None:
    word, _, rest = line.partition(" ")
    if word in ("tie", "drop", "skip", "lost", "count") and "=" not in rest:
        _parse_word(word, rest.strip(), draft, where)
        return
    if word == "again":
        _parse_again(rest.strip(), draft, where)
        return
    is_written = word != "or"
    found = _LINE.fullmatch(f"{rest} = {rest}" if word == "same" else line if is_written else rest)
    if found is None:
        hint = "HUB[, HUB…] = OTHER[, OTHER…] [if HUB] [| OTHER…] [: OPERATION[; OPERATION…]]"
        raise UsageError(f"the map has an invalid line: {line}", where=where, hint=hint)
    hub = tuple(name.strip() for name in found["hub"].split(","))
    spellings = tuple(_parse_spellings(found["other"], len(hub), found["steps"] or "", where))
    made = Line(hub=hub, spellings=spellings, is_written=is_written)
    if not _is_sound(made):
        hint = (
            "the names of one side have the same `*` and `+`, the other's none that the hub's lack; numbers of "
            "tensors change by cat, cut and qkv alone"
        )
        raise UsageError(f"the names in a line do not match each other: {line}", where=where, hint=hint)
    draft.lines.append(made)


def _parse_word(word: str, rest: str, draft: _Draft, where: str) -> None:
    """Parse a line that says something about names, and nothing of what they are made of."""
    names = rest.split()
    is_count = word == "count" and len(names) > 1 and names[0][-1] in SIGNS and names[0] not in dict(draft.counts)
    if is_count and all(part.isidentifier() for key in names[1:] for part in key.split(".")):
        draft.counts.append((names[0], tuple(names[1:])))
        return
    match word:
        case "tie" if len(names) == 2 and not any(map(signs_of, names)):
            draft.ties.append((names[0], names[1]))
        case "drop" if len(names) == 1:
            draft.dropped += names
        case "skip" if len(names) == 1:
            draft.skipped += names
        case "lost":
            found = tuple(_parse_spellings(rest, 1, "", where))
            names = [name for one in found for name in one.names]
            draft.lost += found
            names += [one.companions for one in found if one.companions]
        case _:
            names = []
    if not names or not all(_is_name(name.removesuffix(_ANYTHING)) and not shift_of(name) for name in names):
        raise UsageError(f"the map has an invalid line: {word} {rest}", where=where)


def _parse_spellings(text: str, hubs: int, steps: str, where: str) -> Iterator[Spelling]:
    for one in chain.from_iterable(map(_with_and_without, text.split("|"))):
        names, is_conditional, companions = one.strip().partition(" if ")
        others = tuple(name.strip() for name in names.split(","))
        if is_conditional and not companions.strip():
            raise UsageError(f"`if` needs a name of the hub: {one.strip()}", where=where)
        yield Spelling(names=others, steps=_parse_steps(steps, hubs, len(others), where), companions=companions.strip())


def _with_and_without(text: str) -> Iterator[str]:
    """Yield names with what stands in brackets, and without it."""
    optional = tuple(dict.fromkeys(_OPTIONAL.findall(text)))
    for kept in product((True, False), repeat=len(optional)):
        chosen = text
        for part, is_kept in zip(optional, kept, strict=True):
            chosen = chosen.replace(f"[{part}]", part if is_kept else "")
        yield chosen


def _parse_again(rest: str, draft: _Draft, where: str) -> None:
    """Repeat the lines so far, with other beginnings of their names."""
    found = _AGAIN.fullmatch(rest)
    if found is None:
        what = f"the map has an invalid line: again {rest}"
        raise UsageError(what, where=where, hint="write again HUB = OTHER as HUB = OTHER, with four name prefixes")
    hub, other, new_hub, new_other = (f"{beginning}." for beginning in found.groups())
    repeated = []
    for line in draft.lines:
        spellings = [
            replace(
                one,
                names=tuple(new_other + name.removeprefix(other) for name in one.names),
                companions=new_hub + one.companions.removeprefix(hub) if one.companions else "",
            )
            for one in line.spellings
            if all(name.startswith(other) for name in one.names)
            and (not one.companions or one.companions.startswith(hub))
        ]
        if spellings and all(name.startswith(hub) for name in line.hub):
            names = tuple(new_hub + name.removeprefix(hub) for name in line.hub)
            repeated.append(replace(line, hub=names, spellings=tuple(spellings)))
    if not repeated or not all(map(_is_sound, repeated)):
        raise UsageError(f"no line above can be repeated like this: again {rest}", where=where)
    draft.lines += repeated


def _parse_steps(text: str, hubs: int, others: int, where: str) -> tuple[LineStep, ...]:
    steps = []
    count = hubs
    for part in text.split(";") if text.strip() else ():
        operation, *sizes = part.split() or [""]
        step = build_step(operation, sizes, before=count, others=others)
        if step is None:
            known = operation in OPERATIONS
            what = f"{' '.join([operation, *sizes])!r} is not an operation" + (f" on {count} tensors" if known else "")
            raise UsageError(what, where=where, hint=f"they are {', '.join(OPERATIONS)}")
        steps.append(step)
        count = step.after
    return tuple(steps)


def _is_name(name: str) -> bool:
    return bool(_NAME.fullmatch(name)) and all(_unshifted(name).count(sign) <= 1 for sign in SIGNS)


def _is_sound(line: Line) -> bool:
    names = [*line.hub, *(name for one in line.spellings for name in (*one.names, *filter(None, [one.companions])))]
    if not all(map(_is_name, names)):
        return False
    if len({(signs_of(name), shift_of(name)) for name in line.hub}) > 1:
        return False
    own = set(signs_of(line.hub[0]))
    for spelling in line.spellings:
        count = spelling.steps[-1].after if spelling.steps else len(line.hub)
        kinds = {(signs_of(name), shift_of(name)) for name in spelling.names}
        companions = spelling.companions
        if count != len(spelling.names) or len(kinds) > 1 or any(shift for _, shift in kinds):
            return False
        if not set(next(iter(kinds))[0]) <= own or not set(signs_of(companions)) <= own - {"+"}:
            return False
        if companions and shift_of(companions) != shift_of(line.hub[0]):
            return False
    return True


def _finish(draft: _Draft, *, where: str, is_own: bool) -> MapSection:
    hub = [name for line in draft.lines if line.is_written for name in line.hub]
    others = [name for line in draft.lines for one in line.spellings for name in one.names]
    lost = [name for one in draft.lost for name in one.names]
    for names in () if is_own else ([*hub, *draft.dropped], [*others, *draft.skipped, *lost]):
        if twice := sorted(set(_overlapping(names))):
            raise UsageError(f"{first_few(twice, 2)} is in two lines, so the map cannot be reversed", where=where)
    lists = {*SIGNS, *(name for line in draft.lines for name in line.lists)}
    if strange := [name for name, _ in draft.counts if name not in lists]:
        raise UsageError(f"no line has numbers at this position: count {strange[0]}", where=where)
    draft.lines.sort(key=lambda line: not shift_of(line.hub[0]))  # later layers are not those of the others
    return MapSection(**{each.name: tuple(getattr(draft, each.name)) for each in fields(draft)})


def _overlapping(names: Sequence[str]) -> Iterator[str]:
    """Yield patterns that stand for names of others; a shifted one counts only beside another shifted one."""
    for shift in {shift_of(name) for name in names}:
        alike = [name for name in names if shift_of(name) == shift]
        shapes = Counter(_shape(_unshifted(name)) for name in alike)
        alike = [name for name in alike if shapes[_shape(_unshifted(name))] > 1]
        patterns = Patterns([(name, at) for at, name in enumerate(alike)])
        for at, name in enumerate(alike):
            signs = signs_of(name)
            if any(other != at for _, _, other in patterns.all(fill(name, signs, (0,) * len(signs)))):
                yield name
