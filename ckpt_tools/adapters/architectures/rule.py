"""Rules that tie the module names of one implementation to those of another.

A model family has two spellings of its modules: the native one, of its authors (BFL's FLUX, Stability's MMDiT, the LDM
U-Net), which kohya and ComfyUI use, and the one of diffusers. A rule ties one native module to the one or several
diffusers modules that hold the same rows. `{i}` stands for a number that both sides share.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Step = Literal["same", "stacked", "swap", "swap_if_two"]
"""How the rows of the native weight relate to those of the diffusers weights.

    same         one module, the same rows
    stacked      several modules, one below the other (`Rule.heights`)
    swap         one module; its two halves (shift, scale) are the other way round in diffusers (scale, shift)
    swap_if_two  like swap where the weight has two parts; with more parts, like same (last block of SD3)
"""

Spelling = Literal["native", "alias", "diffusers"]
"""Whose names: the authors', those of another implementation of theirs, diffusers'."""

_NUMBER = re.compile(r"\d+")
_HOLE = re.compile(r"\\\{(\w)\\\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One native module and the diffusers modules that hold its rows."""

    native: str
    diffusers: tuple[str, ...]
    """Paths in diffusers, in the order of their rows."""
    step: Step = "same"
    heights: tuple[int | None, ...] = ()
    """Rows of stacked parts, as multiples of the input's width; the parts of None share the others equally."""
    rest: float | None = None
    """Rows of each part of None in the published model, as a multiple of the width: for parts that an adapter leaves
    alone. None where all parts are equally high."""
    ratio: float | None = None
    """Rows of the native weight to its columns, where that tells two families apart that use one name."""
    aliases: tuple[str, ...] = ()
    """Other names of the native module, in other implementations of the authors' model."""
    parts: tuple[str, ...] = ()
    """Names of stacked parts, where such an implementation has them apart."""

    def __post_init__(self) -> None:
        if self.step == "stacked" and not self.heights:
            object.__setattr__(self, "heights", (None,) * len(self.diffusers))
        if len(self.diffusers) != max(1, len(self.heights)):
            raise ValueError(f"{self.native}: {self.step} needs {max(1, len(self.heights))} modules")

    def split(self, rows: int, columns: int | None) -> tuple[int, ...] | None:
        """Return the rows of every part of the native weight; None where they do not come out even."""
        fixed = sum(each for each in self.heights if each is not None)
        if fixed and columns is None:
            return None
        share, odd = divmod(rows - fixed * (columns or 0), self.heights.count(None))
        return None if odd or share <= 0 else self._filled(share, columns or 0)

    def complete(self, known: Mapping[int, int], columns: int | None) -> tuple[int, ...] | None:
        """Return the rows of every part, of which some are known; None where the known ones contradict the rule."""
        shares = {rows for part, rows in known.items() if self.heights[part] is None}
        if len(shares) > 1 or (columns is None and (not shares or any(self.heights))):
            return None
        share = shares.pop() if shares else round((self.rest or 1) * (columns or 0))
        whole = self._filled(share, columns or 0)
        return whole if all(whole[part] == rows for part, rows in known.items()) else None

    def _filled(self, share: int, columns: int) -> tuple[int, ...]:
        return tuple(share if each is None else each * columns for each in self.heights)


@dataclass(frozen=True, slots=True)
class Match:
    """A name that a rule explains."""

    rule: Rule
    numbers: tuple[tuple[str, str], ...]
    """What the holes of the rule stand for."""
    part: int | None
    """Which of the rule's diffusers modules it is; None for the native module."""
    template: str
    """The spelling that it was found by, with dots."""

    @property
    def is_native(self) -> bool:
        """Is it the authors' name?"""
        return self.template == self.rule.native

    @property
    def is_alias(self) -> bool:
        """Is it a name of the module in another implementation of the authors' model, perhaps the same one?"""
        return self.template in (self.rule.aliases or self.rule.parts or (self.rule.native,))

    @property
    def is_diffusers(self) -> bool:
        """Is it diffusers' name?"""
        return self.template in self.rule.diffusers

    def is_spelled(self, spellings: Collection[Spelling]) -> bool:
        """Is it spelled in one of these ways?"""
        ways = {"native": self.is_native, "alias": self.is_alias, "diffusers": self.is_diffusers}
        return any(ways[each] for each in spellings)

    def native(self) -> str:
        """Return the native path."""
        return fill(self.rule.native, self.numbers)

    def diffusers(self) -> tuple[str, ...]:
        """Return the diffusers paths of all parts."""
        return tuple(fill(path, self.numbers) for path in self.rule.diffusers)

    def spelled(self) -> str:
        """Return the path that it was found by, with dots."""
        return fill(self.template, self.numbers)


def fill(template: str, numbers: tuple[tuple[str, str], ...]) -> str:
    """Put numbers into the holes of a path."""
    for hole, number in numbers:
        template = template.replace("{" + hole + "}", number)
    return template


def rename(native: str, diffusers: str, ratio: float | None = None) -> Rule:
    """Return the rule for one module that is only called otherwise."""
    return Rule(native=native, diffusers=(diffusers,), ratio=ratio)


def embedder(native: str, diffusers: str, first: str = "in_layer", second: str = "out_layer") -> tuple[Rule, Rule]:
    """Return the rules for the two layers of an embedding."""
    return rename(f"{native}.{first}", f"{diffusers}.linear_1"), rename(f"{native}.{second}", f"{diffusers}.linear_2")


def same(*paths: str) -> tuple[Rule, ...]:
    """Return the rules for modules that both sides call alike."""
    return tuple(rename(path, path) for path in paths)


def stacked(native: str, *diffusers: str, aliases: tuple[str, ...] = ()) -> Rule:
    """Return the rule for modules of equal height that the authors fuse."""
    return Rule(native=native, diffusers=diffusers, step="stacked", aliases=aliases)


def attention(native: str, diffusers: str, *, added: bool = False, aliases: tuple[str, ...] = ()) -> Rule:
    """Return the rule for query, key and value that the authors fuse; `added` are those of the text's stream."""
    names = ("add_q_proj", "add_k_proj", "add_v_proj") if added else ("to_q", "to_k", "to_v")
    return stacked(native, *(f"{diffusers}.{name}" for name in names), aliases=aliases)


@dataclass(frozen=True)
class Names:
    """The rules of one model, found by name."""

    rules: tuple[Rule, ...]
    """In the order of the model."""

    @functools.cached_property
    def _by_shape(self) -> Mapping[str, Sequence[tuple[str, Rule, int | None, str]]]:
        table: dict[str, list[tuple[str, Rule, int | None, str]]] = {}
        for rule in self.rules:
            natives = ((None, path) for path in (rule.native, *rule.aliases))
            for part, path in (*natives, *enumerate(rule.parts), *enumerate(rule.diffusers)):
                for text in {path, path.replace(".", "_")}:
                    table.setdefault(_shape(text), []).append((text, rule, part, path))
        return table

    def find(self, name: str) -> tuple[Match, ...]:
        """Return every reading of `name`, dotted or with underscores; one where the name is known and plain."""
        found: dict[tuple[str, int | None], Match] = {}
        for match in self._hits(name):
            # A module that has one name on both sides is one reading, not two.
            key = (match.native(), None if match.rule.step == "same" else match.part)
            found.setdefault(key, match)
        return tuple(found.values())

    def find_as(self, name: str, spellings: Collection[Spelling]) -> Match | None:
        """Return the module that `name` is in one of these spellings, dotted or with underscores."""
        return next((match for match in self._hits(name) if match.is_spelled(spellings)), None)

    def _hits(self, name: str) -> Iterator[Match]:
        for text, rule, part, path in self._by_shape.get(_shape(name), ()):
            if (hit := _pattern(text).fullmatch(name)) is not None:
                yield Match(rule, tuple(sorted(hit.groupdict().items())), part, path)


def _shape(name: str) -> str:
    """Names that differ in numbers alone have one shape."""
    return _NUMBER.sub("#", re.sub(r"\{\w\}", "#", name))


@functools.cache
def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(_HOLE.sub(r"(?P<\1>\\d+)", re.escape(template)))
