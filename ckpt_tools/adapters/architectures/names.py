"""From a module's name in any spelling to the module: by the key maps, never by guessing.

A line of names/comfyui.txt ties the one native module, of the model's authors (BFL's FLUX, Stability's MMDiT, the LDM
U-Net), to the one or several diffusers modules that hold the same rows. kohya and ComfyUI use the native names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

from ckpt_tools.adapters.architectures.architecture import Architecture, ModelPart, Spelling
from ckpt_tools.checkpoint.names.keymap import load_key_maps
from ckpt_tools.checkpoint.names.keymap_lines import Line, Numbers, Patterns, fill, signs_of
from ckpt_tools.checkpoint.names.keymap_steps import LineStep, share_out, size_of
from ckpt_tools.errors import UsageError

_ROOTS = ("", "diffusion_model.", "model.diffusion_model.")  # What may stand in front of a native path
_LANGUAGE_MODEL = re.compile(
    r"(?:.*\.)?(?:layers|h|blocks|block|layer)\.\d+\..*(?:attn|attention|mlp|feed_forward|experts|ffn).*"
)


@dataclass(frozen=True, slots=True)
class ModulePlace:
    """A module of a pipeline."""

    part: ModelPart
    line: Line  # Its modules in diffusers, in the order of their rows, and the spellings of the native one
    numbers: Numbers
    at: int | None
    """Which of several modules the name is, in diffusers or where an implementation has them apart; None for the native
    one."""
    pattern: str  # The spelling that it was found by, with dots

    def _filled(self, pattern: str) -> str:
        return fill(pattern, signs_of(pattern), self.numbers)

    @property
    def native(self) -> str:
        """Path in the authors' implementation."""
        return self._filled(self.line.spellings[0].names[0])

    @property
    def diffusers(self) -> tuple[str, ...]:
        """Paths in diffusers of all modules that the native one holds."""
        return tuple(map(self._filled, self.line.hub))

    @property
    def _aliases(self) -> tuple[str, ...]:
        others = self.line.spellings[1:]
        return others[0].names if others else self.line.spellings[0].names

    @property
    def parts(self) -> tuple[str, ...]:
        """Paths of the parts that another implementation of the authors' model has apart."""
        return tuple(map(self._filled, self._aliases)) if len(self._aliases) > 1 else ()

    @property
    def found(self) -> str:
        """The path that it was found by, with dots."""
        return self._filled(self.pattern)

    def spelled(self, spelling: Spelling) -> str:
        """Return the native path, or the one in another implementation of the authors' model."""
        return self._filled(self._aliases[0]) if spelling == "alias" and len(self._aliases) == 1 else self.native

    def is_spelled(self, *spellings: Spelling) -> bool:
        """Is the name spelled in one of these ways?"""
        ways = {"native": self.line.spellings[0].names, "alias": self._aliases, "diffusers": self.line.hub}
        return any(self.pattern in ways[each] for each in spellings)

    @property
    def ratio(self) -> float | None:
        """Rows of the native weight to its columns, where that is known."""
        return next((ratio for end, ratio in self.part.ratios.items() if self.native.endswith(end)), None)

    @property
    def _step(self) -> LineStep | None:
        return next(iter(self.line.spellings[0].steps), None)

    @property
    def is_swapped(self) -> bool:
        """Are the halves of some such module the other way round in diffusers?"""
        return self._step is not None and self._step.operation == "swap"

    def swaps(self, rows: int | None, columns: int | None) -> bool | None:
        """Are those of this one? None where its shape, which tells, is not known."""
        sizes = self._step.sizes[1:] if self._step is not None and self.is_swapped else ()
        if not sizes:
            return self.is_swapped
        return None if rows is None or columns is None else rows == _size(sizes[0], columns)

    def split(self, rows: int, columns: int | None) -> list[int] | None:
        """Return the rows of every part of the native weight; None where they do not come out even."""
        heights = self._heights(columns)
        return None if heights is None else share_out(rows, heights)

    def complete(self, known: Mapping[int, int], columns: int | None) -> list[int] | None:
        """Return the rows of every part, of which some are known; None where the known ones contradict the map.

        Those that are not known have the share of the published model.
        """
        heights = self._heights(columns) or []
        shares = {rows for part, rows in known.items() if heights and not heights[part]}
        if not heights or len(shares) > 1 or (columns is None and not shares):
            return None
        free = round((self.ratio or len(heights)) * (columns or 0)) - sum(heights)
        share = shares.pop() if shares else free // heights.count(0)
        whole = [height or share for height in heights]
        return whole if all(whole[part] == rows for part, rows in known.items()) else None

    def _heights(self, columns: int | None) -> list[int] | None:
        """Return the rows of the parts, 0 for those that share what is left; None where columns are to tell."""
        sizes = (() if self._step is None else self._step.sizes[1:]) or ["rest"] * len(self.line.hub)
        if columns is None and any(size != "rest" for size in sizes):
            return None
        return [0 if size == "rest" else _size(size, columns or 0) for size in sizes]


def _size(text: str, columns: int) -> int:
    """Return a size of the map. An adapter has no config.json; its weight's columns are the width of the model."""
    return size_of(text, {"num_attention_heads": 1, "attention_head_dim": columns, "hidden_size": columns})


@cache
def lines_of(sections: tuple[str, ...]) -> tuple[Line, ...]:
    """Return what the key map says of a model, one line for each native module: `or` lines are spellings of it."""
    lines: dict[tuple[str, ...], Line] = {}
    for line in (each for name in sections for each in load_key_maps("comfyui")[name].section.lines):
        known = lines.setdefault(line.hub, line)
        if known is not line:
            lines[line.hub] = replace(known, spellings=(*known.spellings, *line.spellings))
    return tuple(lines.values())


@cache
def _patterns(sections: tuple[str, ...]) -> Patterns[tuple[Line, int | None, str]]:
    """Return the names of a model, with dots and with underscores."""
    found = []
    for line in lines_of(sections):
        alone = [(None, one.names[0]) for one in line.spellings if len(one.names) == 1]
        apart = [pair for one in line.spellings if len(one.names) > 1 for pair in enumerate(one.names)]
        for at, name in (*alone, *apart, *enumerate(line.hub)):
            found += [(text, (line, at, name)) for text in dict.fromkeys((name, name.replace(".", "_")))]
    return Patterns(found)


def find(name: str, part: ModelPart) -> Iterator[ModulePlace]:
    """Yield every place of a name without a prefix, dotted or with underscores, in each of its spellings."""
    for _, numbers, (line, at, pattern) in _patterns(part.sections).all(name):
        yield ModulePlace(part, line, numbers, at, pattern)


def find_as(name: str, part: ModelPart, *spellings: Spelling) -> ModulePlace | None:
    """Return the module that `name` is in one of these spellings, dotted or with underscores."""
    return next((place for place in find(name, part) if place.is_spelled(*spellings)), None)


def readings(path: str, architecture: Architecture) -> tuple[ModulePlace, ...]:
    """Return every module that `path` can mean in `architecture`; one unless the name is unknown or ambiguous."""
    found: dict[tuple[str, str, int | None], ModulePlace] = {}
    for part in architecture.parts:
        for name in _inner_names(path, part):
            for place in find(name, part):
                # A module that has one name on both sides is one reading, not two.
                key = (part.component, place.native, place.at if len(place.line.hub) > 1 else None)
                found.setdefault(key, place)
    return tuple(found.values())


def _inner_names(path: str, part: ModelPart) -> Iterator[str]:
    """Yield what is left of `path` when it is a module of `part`."""
    prefixes = [f"{part.component}.", f"{part.comfyui}.", *(f"{prefix}_" for prefix in part.kohya)]
    if not part.is_encoder:
        prefixes += _ROOTS
    for prefix in dict.fromkeys(prefixes):
        if path.startswith(prefix):
            yield path[len(prefix) :]


def place(path: str, architecture: Architecture) -> ModulePlace:
    """Return the one module that `path` means; raise UsageError for none or several."""
    found = readings(path, architecture)
    if len(found) == 1:
        return found[0]
    if not found:
        what = f"{path!r} is not a known module of {architecture.title}"
        raise UsageError(what, where=path, hint="is it an adapter for another model? Name that one with --architecture")
    shown = " or ".join(f"{each.part.component}.{each.native}" for each in found)
    raise UsageError(f"{path!r} can mean {shown}", where=path)


def is_language_model_path(path: str) -> bool:
    """Does `path` look like a module of a language model's layers?"""
    return _LANGUAGE_MODEL.fullmatch(path) is not None
