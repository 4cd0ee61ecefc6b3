"""Rules that tie the module names of one implementation to those of another.

A model family has two spellings of its modules: the native one, of its authors (BFL's FLUX, Stability's MMDiT, the LDM
U-Net), which kohya and ComfyUI use, and the one of diffusers. A rule ties one native module to the one or several
diffusers modules that hold the same rows. `{i}` stands for a number that both sides share.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Step = Literal["same", "qkv", "qkv_mlp", "swap", "swap_if_two"]
"""How the rows of the native weight relate to those of the diffusers weights.

    same         one module, the same rows
    qkv          three modules of equal height, one below the other
    qkv_mlp      query, key and value of the input's width each, and below them the rows of the MLP
    swap         one module; its two halves (shift, scale) are the other way round in diffusers (scale, shift)
    swap_if_two  like swap where the weight has two parts; with more parts, like same (last block of SD3)
"""

_NUMBER = re.compile(r"\d+")
_HOLE = re.compile(r"\\\{(\w)\\\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One native module and the diffusers modules that hold its rows."""

    native: str
    diffusers: tuple[str, ...]
    """Paths in diffusers, in the order of their rows."""
    step: Step = "same"
    ratio: float | None = None
    """Rows of the native weight to its columns, where that tells two families apart that use one name."""

    def __post_init__(self) -> None:
        expected = {"qkv": 3, "qkv_mlp": 4}.get(self.step, 1)
        if len(self.diffusers) != expected:
            raise ValueError(f"{self.native}: {self.step} needs {expected} modules")


@dataclass(frozen=True, slots=True)
class Match:
    """A name that a rule explains."""

    rule: Rule
    numbers: tuple[tuple[str, str], ...]
    """What the holes of the rule stand for."""
    part: int | None
    """Which of the rule's diffusers modules it is; None for the native module."""

    @property
    def is_native(self) -> bool:
        """Is it the authors' name?"""
        return self.part is None or self.rule.diffusers == (self.rule.native,)

    @property
    def is_diffusers(self) -> bool:
        """Is it diffusers' name?"""
        return self.part is not None or self.rule.diffusers == (self.rule.native,)

    def native(self) -> str:
        """Return the native path."""
        return fill(self.rule.native, self.numbers)

    def diffusers(self) -> tuple[str, ...]:
        """Return the diffusers paths of all parts."""
        return tuple(fill(path, self.numbers) for path in self.rule.diffusers)


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


def attention(native: str, diffusers: str, *, added: bool = False) -> Rule:
    """Return the rule for query, key and value that the authors fuse; `added` are those of the text's stream."""
    names = ("add_q_proj", "add_k_proj", "add_v_proj") if added else ("to_q", "to_k", "to_v")
    return Rule(native=native, diffusers=tuple(f"{diffusers}.{name}" for name in names), step="qkv")


@dataclass(frozen=True, slots=True)
class Names:
    """The rules of one model, found by name."""

    rules: tuple[Rule, ...]
    """In the order of the model."""
    _by_shape: Mapping[str, tuple[tuple[str, Rule, int | None], ...]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        table: dict[str, list[tuple[str, Rule, int | None]]] = {}
        for rule in self.rules:
            for part, path in ((None, rule.native), *enumerate(rule.diffusers)):
                for text in {path, path.replace(".", "_")}:
                    table.setdefault(_shape(text), []).append((text, rule, part))
        object.__setattr__(self, "_by_shape", {shape: tuple(rows) for shape, rows in table.items()})

    def find(self, name: str) -> tuple[Match, ...]:
        """Return every reading of `name`, dotted or with underscores; one where the name is known and plain."""
        found: dict[tuple[str, int | None], Match] = {}
        for text, rule, part in self._by_shape.get(_shape(name), ()):
            hit = _pattern(text).fullmatch(name)
            if hit is None:
                continue
            match = Match(rule, tuple(sorted(hit.groupdict().items())), part)
            # A module that has one name on both sides is one reading, not two.
            key = (match.native(), None if rule.step == "same" else part)
            found.setdefault(key, match)
        return tuple(found.values())


def _shape(name: str) -> str:
    """Names that differ in numbers alone have one shape."""
    return _NUMBER.sub("#", re.sub(r"\{\w\}", "#", name))


@functools.cache
def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(_HOLE.sub(r"(?P<\1>\\d+)", re.escape(template)))
