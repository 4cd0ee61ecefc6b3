"""Base models of image and video families: diffusers' tensors and those of single files, which ComfyUI loads.

A family is a section of single_files.txt. The keys themselves say which one a model is of: all are the family's, and
all that the family has are there, or nothing is converted.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import prod
from typing import Any

from ckpt_tools.checkpoint.names.convert import Config, Converted
from ckpt_tools.checkpoint.names.foreign import is_factor
from ckpt_tools.checkpoint.names.keymap import KeyMap, load_key_maps, of_weights, parse_key_maps
from ckpt_tools.checkpoint.names.keymap_lines import Line, MapSection, Patterns, fill
from ckpt_tools.checkpoint.names.keymap_steps import look_up
from ckpt_tools.checkpoint.names.mosaic import Mosaic
from ckpt_tools.errors import UsageError
from ckpt_tools.tables import read_packaged
from ckpt_tools.text import first_few

CONVENTION = "comfyui"  # What `--names` calls the keys of single files
_ROOTS = ("model.diffusion_model.", "diffusion_model.", "first_stage_model.", "vae.")
"""What may stand in front of all names of a single file."""
_WORDS = ("title", "class", "of", "spell", "also", "root", "width", "may", "flag", "without", "unused")
_Tensors = Mapping[str, Mosaic]


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleFileFamily:
    """A kind of base models; the fields are words of single_files.txt."""

    title: str
    key_map: KeyMap
    classes: tuple[str, ...]
    root: str
    width: str
    may: tuple[tuple[re.Pattern[str], ...], ...]
    firsts: frozenset[int]  # of `may`: those that the first blocks have, and none after one without them
    flags: tuple[tuple[str, re.Pattern[str]], ...]  # key of config.json → the tensors that it says are there
    unused: tuple[str, ...]
    counts: tuple[tuple[str, tuple[str, ...]], ...]
    names: tuple[Patterns[None], ...]  # of the single file, of diffusers

    def to_single_file(self, tensors: _Tensors, config: Config) -> Converted:
        """Return diffusers' tensors as those of a single file."""
        self._check_whole(tensors, config)
        found = self.key_map.forward(tensors, self._sizes(tensors, [self.width]))
        return replace(found, mosaics={self.root + name: one for name, one in found.mosaics.items()})

    def to_diffusers(self, tensors: _Tensors, config: Config) -> Converted:
        """Return a single file's tensors, without what stands in front of all names, as diffusers'."""
        used = {name: tensor for name, tensor in tensors.items() if name not in self.unused}
        lines = self.key_map.section.lines
        spelled = [one.names[0] for line in lines if line.hub == (self.width,) for one in line.spellings]
        found = self.key_map.backward(used, self._sizes(used, spelled))
        self._check_whole(found.mosaics, config)
        left_out = [name for name in tensors if name not in used]
        notes = [f"left out {first_few(left_out)}, which {self.title} does not use"] if left_out else []
        return replace(found, notes=(*found.notes, *notes))

    def outliers(self, names: Iterable[str], *, is_diffusers: bool) -> list[str]:
        """Return the names that are not the family's."""
        return [name for name in names if not self.names[is_diffusers].knows(name)]

    def _sizes(self, tensors: _Tensors, names: Sequence[str]) -> dict[str, int]:
        """Return what the map asks of a config.json, by the weight that is as high as the model is wide."""
        width = max((sum(tensors[name].shape[:1]) for name in names if name in tensors), default=0)
        if self.width and not width:
            raise self._lacks([self.width])
        return {"num_attention_heads": 1, "attention_head_dim": width, "hidden_size": width}

    def _check_whole(self, names: Collection[str], config: Config) -> None:
        """Refuse a model in which tensors are lacking, or blocks that config.json counts."""
        lines = self.key_map.section.written
        counts = {place: _count(place, names) for place in {place for line in lines for place in line.lists}}
        for place, (key, *_) in self.counts:
            if (said := look_up(key, config)) not in (None, counts[place]):
                raise UsageError(f"config.json has {key} {said}, but there are {counts[place]} of {place}")
        for key, pattern in self.flags:
            said, is_there = look_up(key, config), any(map(pattern.fullmatch, names))
            if said is not None and bool(said) != is_there:
                raise UsageError(
                    f"config.json has {key} {said}, but its tensors are {'present' if is_there else 'missing'}"
                )
        groups: dict[tuple[Any, ...], list[str]] = defaultdict(list)
        for line in lines:
            numbers = [range(counts[place]) for place in line.lists]
            if prod(map(len, numbers)) > len(names):
                raise self._lacks(line.hub)
            for name in (fill(pattern, line.signs, each) for each in product(*numbers) for pattern in line.hub):
                alike = ((at, one.fullmatch(name)) for at, group in enumerate(self.may) for one in group)
                groups[next(((at, *found.groups()) for at, found in alike if found), ())].append(name)
        lacking = [name for name in groups.pop(()) if name not in names]
        last: dict[int, int] = {}  # block with something of a group that only the first ones have
        for (at, *block), group in groups.items():
            if at in self.firsts and any(name in names for name in group):
                last[at] = max(last.get(at, 0), int(block[0]))
        for (at, *block), group in groups.items():
            missing = [name for name in group if name not in names]
            is_gap = at in last and int(block[0]) < last[at]
            lacking += missing if is_gap or len(missing) < len(group) else []
        if lacking:
            raise self._lacks(lacking)

    def _lacks(self, names: Sequence[str]) -> UsageError:
        return UsageError(f"{self.title} needs tensors that are missing (diffusers' names): {first_few(names, 4)}")


def convert(tensors: _Tensors, config: Config, *, is_diffusers: bool) -> tuple[SingleFileFamily, Converted]:
    """Return a base model's family, and its tensors, diffusers' or a single file's, by the names of the other side."""
    root = "" if is_diffusers else next((r for r in _ROOTS if all(name.startswith(r) for name in tensors)), "")
    plain = {name[len(root) :]: tensor for name, tensor in tensors.items()}
    said = config.get("_class_name")
    families = [one for one in load_families() if said in (None, *one.classes)]
    if not families:
        known = ", ".join(one.title for one in load_families())
        raise UsageError(f"config.json names {said}, but ckpt only has maps of {known}")
    strange = {one.title: one.outliers(plain, is_diffusers=is_diffusers) for one in families}
    found, refused = [], []
    for one in (one for one in families if not strange[one.title]):
        try:
            found.append((one, (one.to_single_file if is_diffusers else one.to_diffusers)(plain, config)))
        except UsageError as error:
            refused.append(error)
    if len(found) > 1:
        whose = " and of ".join(one.title for one, _ in found)
        raise UsageError(f"the keys are those of {whose}", hint="put the model's config.json beside the weights")
    if not found:
        raise refused[0] if refused else _unknown(plain, families, strange, is_diffusers=is_diffusers)
    return found[0]


def _unknown(
    names: Collection[str],
    families: Sequence[SingleFileFamily],
    strange: Mapping[str, Sequence[str]],
    *,
    is_diffusers: bool,
) -> UsageError:
    """Return the refusal of keys that no family has all of."""
    nearest, others = min(strange.items(), key=lambda one: len(one[1]))
    whose = "diffusers'" if is_diffusers else "a single file's"
    if any(map(is_factor, names)):
        return UsageError("these are the keys of an adapter", hint="ckpt export-lora SRC DST --to comfyui|diffusers")
    if any(not one.outliers(names, is_diffusers=not is_diffusers) for one in families):
        return UsageError("the keys already are those that would be written", hint="leave out --names")
    if len(others) > len(names) // 2:
        hint = "ckpt has no other maps, or config.json names this model"
        return UsageError(f"the keys are not {whose} of {', '.join(strange)}", hint=hint)
    return UsageError(
        f"{nearest} has no place for {first_few(others, 4)}",
        hint="--include 'model.diffusion_model.**' chooses one of several models; --exclude leaves out the rest",
    )


def _count(place: str, names: Iterable[str]) -> int:
    """Return how long a list is of which some names are there, at least 1."""
    pattern = re.compile(re.escape(place).replace(r"\*", r"(\d+)").replace(r"\+", r"(\d+)") + r"\.")
    return 1 + max((int(found[found.re.groups]) for name in names if (found := pattern.match(name))), default=0)


def _pattern(glob: str) -> re.Pattern[str]:
    text = re.escape(glob).replace(r"\*\*", ".*").replace(r"\*", r"(\d+)")
    return re.compile(text.replace(r"\{", "(?:").replace(r"\}", ")").replace(",", "|"))


@cache
def load_families() -> tuple[SingleFileFamily, ...]:
    """Return the families that come with ckpt."""
    name = "single_files.txt"
    lines = read_packaged(__package__, name).splitlines()
    said: dict[str, dict[str, list[str]]] = {}
    for at, line in enumerate(lines):
        word, _, rest = line.partition(" ")
        if line.startswith("["):
            said[line.strip("[]")] = {word: [] for word in _WORDS}
        elif word in _WORDS:
            said[next(reversed(said))][word].append(rest)
            lines[at] = ""
    maps = parse_key_maps("\n".join(lines), where=name, is_own=True)
    return tuple(_family(rows, maps[name].section) for name, rows in said.items())


def _family(rows: Mapping[str, Sequence[str]], own: MapSection) -> SingleFileFamily:
    words = {word: " ".join(rest).split() for word, rest in rows.items()}
    title, without = " ".join(words["title"]), tuple(map(_pattern, words["without"]))
    modules = [line for name in words["of"] for line in load_key_maps(CONVENTION)[name].section.lines]
    modules += [each for rule in rows["also"] for each in _siblings(tuple(modules), rule)]
    if words["spell"]:
        modules = [replace(line, spellings=line.spellings[::-1]) for line in modules]
    weights = of_weights([KeyMap(title=title, section=MapSection(lines=tuple(modules)))], title=title).section.lines
    lines = (*(line for line in weights if not any(one.fullmatch(line.hub[0]) for one in without)), *own.lines)
    own_names = (*(name for line in lines for one in line.spellings for name in one.names), *words["unused"])
    sides = (own_names, [name for line in lines for name in line.hub])
    return SingleFileFamily(
        title=title,
        key_map=KeyMap(title=title, section=MapSection(lines=lines)),
        classes=tuple(words["class"]),
        root="".join(words["root"]),
        width="".join(f"{module}.weight" for module in words["width"]),
        may=tuple(tuple(map(_pattern, group.removeprefix("first ").split())) for group in rows["may"]),
        firsts=frozenset(at for at, group in enumerate(rows["may"]) if group.startswith("first ")),
        flags=tuple((key, _pattern(glob)) for key, glob in (line.split() for line in rows["flag"])),
        unused=tuple(words["unused"]),
        counts=own.counts,
        names=tuple(Patterns((name, None) for name in side) for side in sides),
    )


def _siblings(modules: Iterable[Line], rule: str) -> Iterator[Line]:
    """Yield modules beside others, as an `also` has them."""
    hub, other, new_hub, new_other = (f".{end}" for end in re.split(r" = | as ", rule))
    for line in modules:
        (name, *_), (one, *_) = line.hub, line.spellings
        if name.endswith(hub) and one.names[0].endswith(other):
            spelling = replace(one, names=(one.names[0].removesuffix(other) + new_other,))
            yield replace(line, hub=(name.removesuffix(hub) + new_hub,), spellings=(spelling,))
