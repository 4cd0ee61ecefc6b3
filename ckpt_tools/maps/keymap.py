"""Maps that people write: which tensor of the hub is which elsewhere, one line for each, read in both directions.

::

    [llama qwen2]
    # hub's names = the other's, newest spelling first
    model.layers.*.self_attn.v_proj.weight = layers.*.attention.qkv_linear.wv.weight | layers.*.attention.wv.weight
    model.layers.*.self_attn.q_proj.weight = layers.*.attention.wq.weight : rope num_attention_heads
    model.layers.*.mlp.experts.+.up_proj.weight = layers.*.moe.experts.w3
    tie lm_head.weight model.embed_tokens.weight
    drop model.layers.*.self_attn.rotary_emb.inv_freq

A section is of one or several ``model_type``; ``[*]`` is of all. ``*`` is a number that both sides have, ``+`` one that
the other side stacks on a new first axis. Several names of the hub (``a, b = c``) are joined; how, the operation says.
What stands after the colon happens from the hub's form to the other:

- ``cat DIM``: one after another
- ``rope HEADS``: the halves of every head interleaved, as complex rotary embeddings want them
- ``qkv HEADS GROUPS``: rows of q, k and v by groups of heads that share a key
- ``transpose``: the two dims exchanged

A size is a number or a key of config.json. `tie` names two of the hub's names that the other side writes both; `drop`
is what the other side does without: it keeps its name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b

from ckpt_tools.errors import UsageError
from ckpt_tools.maps import mosaic
from ckpt_tools.maps.mosaic import Mosaic
from ckpt_tools.text import first_few

Config = Mapping[str, object]
_LINE = re.compile(r"(?P<hub>[^=:|]+)=(?P<other>[^=:]+)(:(?P<operation>[^=:|]+))?")
_NAME = re.compile(r"[\w.\-*+]+")
_ARITY = {"cat": 1, "rope": 1, "qkv": 2, "transpose": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One tensor of the other side."""

    hub: tuple[str, ...]
    """Patterns of the names that it is made of."""
    other: tuple[str, ...]
    """Its own pattern, in all spellings; the first is written."""
    operation: str = ""
    sizes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyMap:
    """The map of one kind of model."""

    title: str
    lines: tuple[Line, ...]
    ties: tuple[tuple[str, str], ...] = ()
    """(name that may be missing on the hub, name of the same tensor)."""
    dropped: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """Identifies what it does."""
        return blake2b(repr((self.lines, self.ties, self.dropped)).encode(), digest_size=16).hexdigest()

    def forward(self, tensors: Mapping[str, Mosaic], config: Config) -> tuple[dict[str, Mosaic], dict[str, str]]:
        """Return the hub's tensors as the other side's, and further names of these.

        Raises:
            UsageError: A name has no line, a line lacks a name, or a size is not known.
        """
        made: dict[str, Mosaic] = {}
        places: dict[str, str] = {}
        for line, captured, columns in self._gather(tensors, lambda line: line.hub, made):
            name = _fill(line.other[0], captured)
            parts = [mosaic.stack(column, 0) if "+" in pattern else column[0] for pattern, column in columns]
            made[name] = _apply(_FORWARD, line, parts, config, name)[0]
            places |= {_fill(pattern, captured): name for pattern in line.hub}
        aliases: dict[str, str] = {}
        for missing, there in self.ties:
            wanted = [line.other[0] for line in self.lines if line.hub == (missing,)]
            if missing not in tensors and there in places:
                aliases |= dict.fromkeys(wanted, places[there])
        return made, aliases

    def backward(self, tensors: Mapping[str, Mosaic], config: Config) -> tuple[dict[str, Mosaic], dict[str, str]]:
        """Return the other side's tensors as the hub's, and which of their names are tied and left out.

        Raises:
            UsageError: As `forward`.
        """
        made: dict[str, Mosaic] = {}
        origins: dict[str, str] = {}
        for line, captured, columns in self._gather(tensors, lambda line: line.other, made):
            ((pattern, (tensor,)),) = columns
            names = [_fill(one, captured) for one in line.hub]
            for name, part in zip(names, _apply(_BACKWARD, line, [tensor], config, names[0]), strict=True):
                layers = {name.replace("+", str(at)): one for at, one in enumerate(mosaic.unstack(part, 0))}
                made |= layers if "+" in name else {name: part}
                origins[name] = _fill(pattern, captured)
        is_tied = config.get("tie_word_embeddings") is True
        pairs = [pair for pair in self.ties if is_tied and pair[0] in made and pair[1] in made]
        for left_out, _ in pairs:
            del made[left_out]
        return made, {origins[left_out]: origins[there] for left_out, there in pairs}

    def knows(self, names: Iterable[str]) -> bool:
        """Are they all names of the other side?"""
        patterns = [_compile(pattern) for line in self.lines for pattern in line.other]
        patterns += map(_compile, self.dropped)
        return all(any(pattern.fullmatch(name) for pattern in patterns) for name in names)

    def _gather(
        self, tensors: Mapping[str, Mosaic], side: Callable[[Line], Sequence[str]], kept: dict[str, Mosaic]
    ) -> Iterator[tuple[Line, str, list[tuple[str, list[Mosaic]]]]]:
        """Yield (line, number in the place of its `*`, [(pattern, its tensors by the number of `+`)]).

        What a `drop` names goes to `kept`.
        """
        patterns = [(_compile(pattern), pattern, line) for line in self.lines for pattern in side(line)]
        dropped = [_compile(pattern) for pattern in self.dropped]
        found: dict[tuple[Line, str], dict[str, dict[int, Mosaic]]] = {}
        strangers = []
        for name, tensor in tensors.items():
            for regex, pattern, line in patterns:
                if match := regex.fullmatch(name):
                    groups = match.groupdict()
                    numbered = found.setdefault((line, groups.get("layer") or ""), {}).setdefault(pattern, {})
                    numbered[int(groups.get("stack") or 0)] = tensor
                    break
            else:
                if not any(regex.fullmatch(name) for regex in dropped):
                    strangers.append(name)
                kept[name] = tensor
        if strangers:
            raise UsageError(f"{self.title} has no place for {first_few(strangers, 4)}")
        for (line, captured), columns in found.items():
            wanted = [pattern for pattern in side(line) if side(line) is line.hub or pattern in columns]
            if side(line) is not line.hub and len(wanted) > 1:
                raise UsageError(f"one tensor has two names: {first_few([_fill(w, captured) for w in wanted], 2)}")
            lacking = [_fill(pattern, captured) for pattern in wanted if pattern not in columns]
            lacking += [
                _fill(pattern, captured)
                for pattern, numbered in columns.items()
                if sorted(numbered) != list(range(len(numbered)))
            ]
            if lacking:
                raise UsageError(f"{_fill(line.other[0], captured)} also needs {first_few(lacking, 3)}")
            yield line, captured, [(p, [columns[p][at] for at in sorted(columns[p])]) for p in wanted]


@cache
def _compile(pattern: str) -> re.Pattern[str]:
    body = re.escape(pattern).replace(r"\*", r"(?P<layer>\d{1,5})").replace(r"\+", r"(?P<stack>\d{1,5})")
    return re.compile(body)


def _fill(pattern: str, captured: str) -> str:
    return pattern.replace("*", captured)


def _size(text: str, config: Config) -> int:
    inner = config.get("text_config")
    value: object = int(text) if text.isdecimal() else config.get(text)
    if value is None and isinstance(inner, Mapping):
        value = inner.get(text)
    if type(value) is not int or value < 1:
        raise UsageError(f"the map needs {text}, which config.json does not have as a positive number")
    return value


def _apply(
    ways: Mapping[str, Callable[..., list[Mosaic]]], line: Line, parts: list[Mosaic], config: Config, name: str
) -> list[Mosaic]:
    sizes = [_size(text, config) for text in line.sizes if line.operation != "cat"]
    if line.operation == "cat":
        sizes = [int(line.sizes[0]), len(line.hub)]
    try:
        return ways[line.operation](parts, *sizes)
    except ValueError as error:
        raise UsageError(f"{name}: {error}") from error


def _rope(parts: list[Mosaic], heads: int) -> list[Mosaic]:
    return [mosaic.regroup(one, 0, heads, 2, one.shape[0] // heads // 2) for one in parts]


def _unrope(parts: list[Mosaic], heads: int) -> list[Mosaic]:
    return [mosaic.regroup(one, 0, heads, one.shape[0] // heads // 2, 2) for one in parts]


def _qkv(parts: list[Mosaic], heads: int, groups: int) -> list[Mosaic]:
    query, key, value = parts
    if heads % groups:
        raise ValueError(f"{heads} heads are not in {groups} groups")
    columns = [mosaic.chunk(one, 0, groups) for one in (query, key, value)]
    return [mosaic.join([part for group in zip(*columns, strict=True) for part in group], 0)]


def _unqkv(parts: list[Mosaic], heads: int, groups: int) -> list[Mosaic]:
    (fused,) = parts
    if heads % groups or fused.shape[0] % (heads + 2 * groups):
        raise ValueError(f"{fused.shape[0]} rows are not those of {heads} heads in {groups} groups")
    head, share = fused.shape[0] // (heads + 2 * groups), heads // groups
    sizes = (share * head, head, head)
    found: list[list[Mosaic]] = [[], [], []]
    for group in mosaic.chunk(fused, 0, groups):
        start = 0
        for rows, size in zip(found, sizes, strict=True):
            rows.append(mosaic.part_of(group, 0, start, size))
            start += size
    return [mosaic.join(rows, 0) for rows in found]


_FORWARD: Mapping[str, Callable[..., list[Mosaic]]] = {
    "": lambda parts: parts,
    "cat": lambda parts, dim, _count: [mosaic.join(parts, dim)],
    "rope": _rope,
    "qkv": _qkv,
    "transpose": lambda parts: [mosaic.transpose(one, 0, 1) for one in parts],
}
_BACKWARD: Mapping[str, Callable[..., list[Mosaic]]] = {
    "": lambda parts: parts,
    "cat": lambda parts, dim, count: mosaic.chunk(parts[0], dim, count),
    "rope": _unrope,
    "qkv": _unqkv,
    "transpose": lambda parts: [mosaic.transpose(one, 0, 1) for one in parts],
}


@dataclass(slots=True)
class _Section:
    lines: list[Line] = field(default_factory=list)
    ties: list[tuple[str, str]] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)


def parse_key_maps(text: str, *, where: str) -> dict[str, KeyMap]:
    """Parse a file of maps: `model_type` (or "*") → map.

    Raises:
        UsageError: A line that has no meaning, or one name in two lines.
    """
    maps: dict[str, KeyMap] = {}
    section: tuple[tuple[str, ...], _Section] | None = None
    for number, raw in enumerate([*text.splitlines(), "[]"], 1):
        line = raw.partition("#")[0].strip()
        at = f"{where}, line {number}"
        if line.startswith("["):
            if section is not None:
                for name in section[0]:
                    if name in maps:
                        raise UsageError(f"there are two sections of {name}", where=at)
                    maps[name] = _key_map(name, section[1], where=where)
            section = (tuple(line.strip("[]").split()), _Section())
        elif line and section is None:
            raise UsageError("a map begins with a section: [llama], or [*] for any model", where=at)
        elif line and section is not None:
            _parse_line(line, section[1], at)
    return maps


def _parse_line(line: str, section: _Section, where: str) -> None:
    match line.split():
        case ["tie", missing, there]:
            section.ties.append((missing, there))
            return
        case ["drop", pattern]:
            section.dropped.append(pattern)
            return
    found = _LINE.fullmatch(line)
    if found is None:
        raise UsageError(
            f"the map has a line without a meaning: {line}",
            where=where,
            hint="HUB[, HUB…] = OTHER[ | OTHER…][ : OPERATION]",
        )
    hub = tuple(name.strip() for name in found["hub"].split(","))
    other = tuple(name.strip() for name in found["other"].split("|"))
    operation, *sizes = (found["operation"] or "").split() or [""]
    if operation and _ARITY.get(operation) != len(sizes):
        raise UsageError(
            f"{' '.join([operation, *sizes])} is no operation", where=where, hint=f"they are {', '.join(_ARITY)}"
        )
    joins = {"cat": len(hub), "qkv": 3}.get(operation, 1)
    numbers = [[name.count(sign) for name in (*hub, *other)] for sign in "*+"]
    is_sound = all(_NAME.fullmatch(name) for name in (*hub, *other)) and len(hub) == joins
    if (
        not is_sound
        or len(set(numbers[0])) > 1
        or max(numbers[0] + numbers[1]) > 1
        or any("+" in name for name in other)
    ):
        raise UsageError(
            f"the names of a line do not go together: {line}",
            where=where,
            hint="every name has the same `*`; `+` stands on the hub's side alone; several names need cat or qkv",
        )
    section.lines.append(Line(hub=hub, other=other, operation=operation, sizes=tuple(sizes)))


def _key_map(name: str, section: _Section, *, where: str) -> KeyMap:
    for side in ("hub", "other"):
        names = [pattern for line in section.lines for pattern in getattr(line, side)]
        twice = sorted({one for one in names if names.count(one) > 1})
        if twice:
            raise UsageError(f"{first_few(twice, 2)} stands in two lines: there is no way back", where=where)
    title = f"the map {os.path.basename(where)}" + ("" if name == "*" else f" [{name}]")
    return KeyMap(title=title, lines=tuple(section.lines), ties=tuple(section.ties), dropped=tuple(section.dropped))


@cache
def load_key_maps(convention: str) -> Mapping[str, KeyMap]:
    """Return the maps that come with ckpt: `model_type` → map."""
    path = os.path.join(os.path.dirname(__file__), f"{convention}.txt")
    with open(path, encoding="utf-8") as file:
        return parse_key_maps(file.read(), where=path)
