"""Maps that people write: which tensor of the hub is which elsewhere, one line for each, read in both directions.

::

    [llama qwen2]
    # hub's names = the other's, newest spelling first
    model.layers.*.self_attn.v_proj.weight = layers.*.attention.qkv_linear.wv.weight | layers.*.attention.wv.weight
    model.layers.*.self_attn.q_proj.weight = layers.*.attention.wq.weight : rope num_attention_heads
    model.layers.*.mlp.experts.+.up_proj.weight = layers.*.moe.experts.w3 | layers.*.mlp.experts.fc1.weight+
    tie lm_head.weight model.embed_tokens.weight
    drop model.layers.*.self_attn.rotary_emb.inv_freq
    skip rope.freqs

A section is of one or several ``model_type`` or classes of models; ``[*]`` is of all. ``*`` and ``+`` are numbers, of
the layer and of the expert. One that a name of the other side lacks is stacked there, on a new first axis: above, `w3`
is all experts of a layer, and ``fc1.weight7`` is expert 7.

- ``a, b = c : cat 0``: several names of one side are one tensor of the other (``c = a, b : cut 0``)
- ``same a``: ``a = a``
- ``a.{b,c} = d.{e,f}``: ``a.b = d.e`` and ``a.c = d.f``; second braces of names are for every choice of the first
- ``a = b | c``: spellings of the same; all are read, the first is written; ``b[.*].c`` is ``b.*.c | b.c``
- ``a = b if d | c``: `b` is written where the hub has `d`
- ``or a, b = c : cat 0``: another way to lay the same out; read, never written
- ``model.layers.{*+num_hidden_layers}.x = mtp.*.x``: numbers begin at a key of config.json on the hub
- ``again model.layers.* = layers.* as model.layers.{*+num_hidden_layers} = mtp.*``: the lines above that begin so, once
  more with other beginnings
- ``count + num_experts num_local_experts``: how many there are on the hub, by one of these keys of config.json
- ``count visual.blocks.* vision_config.depth``: the same of one list alone
- ``tie a b``: two of the hub's names that are one tensor, which the other side writes both
- ``drop a``: what the other side does without; it keeps its name
- ``skip b``: what the hub does without, because it is computed; left out on the way there
- ``lost b if a | c``: what the other side has beside `a`, and the hub has no place for: written as float32 zeros, one
  for each row of `a`, and left out on the way back while it is zeros; to leave out anything else is for the user to say

At the end of a name that is dropped, skipped or lost, ``**`` is anything.

What stands after the colon happens to every tensor by itself from the hub's form to the other, in this order and
apart by ``;``, and is undone in the opposite order on the way back:

- ``cat DIM [LENGTH…]``: one after another, alike in length if nothing is said; ``rest`` is what the others leave,
  in equal shares
- ``cut DIM [LENGTH…]``: the opposite
- ``swap DIM [LENGTH]``: halves exchanged, of tensors of this length alone if one is said
- ``transpose``: the last two dims exchanged
- ``rope HEADS``: the halves of every head interleaved, as complex rotary embeddings want them
- ``qkv HEADS GROUPS``: rows of q, k and v by groups of heads that share a key
- ``crop ROWS``: the other side may have more rows, of padding; they are left out on the way to the hub, and said
- ``pad ROWS PADDED``: the last of ROWS again and again, until there are PADDED; the way back is that of `crop`
- ``repeat GROUPS ALL``: every group of rows several times in a row, until there are ALL; on the way to the hub one of
  each is taken, once the others are found to be equal
- ``flatten DIM SIZE SIZE…``: dims of these sizes as one, in row-major order; ``rest`` is any size
- ``unflatten DIM SIZE SIZE…``: the opposite

A size is a number, a key of config.json (``vision_config.depth`` is a key inside another) or a product of these
(``num_attention_heads*attention_head_dim``). Heads must be as long as the `head_dim` beside their
key in config.json, where there is one (``vision_config.head_dim`` for ``vision_config.num_heads``).
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from typing import TypeVar

from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.checkpoint.names import mosaic
from ckpt_tools.checkpoint.names.convert import Converted
from ckpt_tools.checkpoint.names.keymap_lines import (
    SIGNS,
    Line,
    MapSection,
    Numbers,
    Patterns,
    Spelling,
    fill,
    parse_sections,
    shift_of,
    signs_of,
)
from ckpt_tools.checkpoint.names.keymap_steps import Config, Copy, apply, has_size, size_of, undo
from ckpt_tools.checkpoint.names.mosaic import Mosaic
from ckpt_tools.errors import UsageError
from ckpt_tools.tables import read_packaged
from ckpt_tools.text import first_few

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyMap:
    """The map of one kind of model."""

    title: str
    section: MapSection

    @property
    def digest(self) -> str:
        """Identifies what it writes: what is read alone does not count."""
        lines = [(line.hub, line.may_be_written) for line in self.section.written]
        stated = repr((lines, self.section.ties, self.section.dropped))
        return blake2b(stated.encode(), digest_size=16).hexdigest()

    def forward(self, tensors: Mapping[str, Mosaic], config: Config) -> Converted:
        """Return the hub's tensors as the other side's, and further names of these."""
        lines = self.section.written
        found, made = self._sort(tensors, [(line, line.hub) for line in lines], config)
        self._check_counts(found, config)
        places: dict[str, str] = {}
        for line, items in found.items():
            columns: dict[str, dict[Numbers, Mosaic]] = defaultdict(dict)
            for numbers, parts in items.items():
                spelling = _spelling(line, numbers, tensors, config)
                at = fill(spelling.names[0], line.signs, numbers)
                with _naming_line(at):
                    results = apply(spelling.steps, parts, config)
                for pattern, result in zip(spelling.names, results, strict=True):
                    columns[pattern][numbers] = result
                places |= {_hub_name(pattern, line, numbers, config): at for pattern in line.hub}
            for pattern, column in columns.items():
                made |= _stacked(pattern, line.signs, column)
        aliases: dict[str, str] = {}
        for missing, there in self.section.ties:
            wanted = [line.spellings[0].names[0] for line in lines if line.hub == (missing,)]
            if missing not in tensors and there in places:
                aliases |= dict.fromkeys(wanted, places[there])
        news: dict[str, Mosaic] = {}
        for one, numbers in self._lost_beside(tensors):
            name, companions = (
                fill(each, signs_of(one.companions), numbers) for each in (one.names[0], one.companions)
            )
            rows = tensors[companions].shape[:1]
            news[name] = mosaic.whole(f"{mosaic.ZEROS}{rows}", BY_NAME["F32"], rows)
        made |= news
        notes = [f"not in the files, written as zeros: {first_few(list(news))}"] if news else []
        return Converted(mosaics=made, aliases=aliases, notes=tuple(notes))

    def backward(self, tensors: Mapping[str, Mosaic], config: Config) -> Converted:
        """Return the other side's tensors as the hub's, and which of their names are tied and left out."""
        skipped = Patterns([(name, None) for name in self.section.skipped])
        left_out = [name for name in tensors if skipped.knows(name)]
        wanted = {name: tensor for name, tensor in tensors.items() if name not in left_out}
        notes = [f"left out {first_few(left_out)}, which the model computes when it is built"] if left_out else []
        lost = Patterns([(name, None) for one in self.section.lost for name in one.names])
        sides = [((line, one), one.names) for line in self.section.lines for one in line.spellings]
        found, made = self._sort(wanted, sides, config)
        origins: dict[str, str] = {}
        copies: list[Copy] = []
        for (line, spelling), items in found.items():
            for numbers, parts in _unstacked(line, spelling, items):
                at = fill(spelling.names[0], line.signs, numbers)
                with _naming_line(at):
                    undone = undo(spelling.steps, parts, config)
                names = [_hub_name(pattern, line, numbers, config) for pattern in line.hub]
                if twice := [name for name in names if name in made]:
                    raise UsageError(f"one tensor has two names: {first_few([origins.get(twice[0], twice[0]), at])}")
                made |= zip(names, undone.tensors, strict=True)
                origins |= dict.fromkeys(names, at)
                copies += undone.copies
                if undone.left_out:
                    notes.append(f"left out {undone.left_out} rows of padding of {first_few([at])}")
        is_tied = config.get("tie_word_embeddings") is True
        pairs = [pair for pair in self.section.ties if is_tied and pair[0] in made and pair[1] in made]
        for missing, _ in pairs:
            del made[missing]
        aliases = {origins[missing]: origins[there] for missing, there in pairs}
        return Converted(
            mosaics=made,
            aliases=aliases,
            copies=tuple(copies),
            notes=tuple(notes),
            lost=tuple(name for name in wanted if lost.knows(name)),
        )

    def reads(self, names: Iterable[str]) -> bool:
        """Are they all names of the hub?"""
        hub = (name for line in self.section.written for name in line.hub)
        return all(map(Patterns([(name, None) for name in (*hub, *self.section.dropped)]).knows, names))

    def knows(self, names: Iterable[str]) -> bool:
        """Are they all names of the other side?"""
        spellings = [one for line in self.section.lines for one in line.spellings]
        patterns = [name for one in (*spellings, *self.section.lost) for name in one.names]
        every = Patterns([(name, None) for name in (*patterns, *self.section.dropped, *self.section.skipped)])
        return all(every.knows(name) for name in names)

    def _check_counts(self, found: Mapping[Line, Mapping[Numbers, object]], config: Config) -> None:
        """Refuse a hub's model that is not whole: layers that are lacking, or experts in some of them."""
        there: dict[tuple[tuple[str, ...], str, Numbers], set[int]] = defaultdict(set)
        counts = dict(self.section.counts)
        for line, items in found.items():
            for at, place in enumerate(() if shift_of(line.hub[0]) else line.lists):
                if keys := counts.get(place) or counts.get(place[-1]):
                    pattern = line.hub[0] if at else place  # layers have all experts, lines are not of all layers
                    for numbers in items:
                        there[keys, pattern, numbers[:at]].add(numbers[at])
        for (keys, pattern, before), own in there.items():
            key = next((one for one in keys if has_size(one, config)), keys[0])
            count = size_of(key, config)
            if odd := sorted(own.symmetric_difference(range(count))):
                where = fill(pattern, SIGNS[: len(before)], before)
                verb = "is missing" if odd[0] < count else "is one too many"
                raise UsageError(
                    f"{key} is {count} in config.json, but number {odd[0]} of {where} {verb}",
                    hint="if another key of config.json says how many there are, add to the map: "
                    f"count {pattern[: max(map(pattern.find, SIGNS)) + 1]} KEY",
                )

    def _lost_beside(self, tensors: Iterable[str]) -> Iterator[tuple[Spelling, Numbers]]:
        """Yield what the other side has beside tensors of the hub, and the hub has not: once for each number."""
        firsts: dict[str, Spelling] = {}
        for one in self.section.lost:
            firsts.setdefault(one.companions, one)
        patterns = Patterns([(companions, one) for companions, one in firsts.items() if companions])
        for name in tensors:
            yield from ((one, numbers) for _, numbers, one in patterns.all(name))

    def _sort(
        self, tensors: Mapping[str, Mosaic], sides: Sequence[tuple[T, tuple[str, ...]]], config: Config
    ) -> tuple[dict[T, dict[Numbers, list[Mosaic]]], dict[str, Mosaic]]:
        """Return {side: {numbers in its names: tensors, in the order of the side's names}}, and what a `drop` names."""
        patterns = Patterns([(name, (side, names)) for side, names in sides for name in names])
        lost = [name for one in self.section.lost for name in one.names]
        kept_as_is = Patterns([(name, None) for name in (*self.section.dropped, *lost)])
        columns: dict[T, dict[Numbers, dict[str, Mosaic]]] = {}
        kept: dict[str, Mosaic] = {}
        outliers: list[str] = []
        for name, tensor in tensors.items():
            for pattern, numbers, (side, _) in patterns.all(name):
                shifted = _shifted(pattern, numbers, config, -1)
                if min(shifted, default=0) >= 0:
                    columns.setdefault(side, {}).setdefault(shifted, {})[pattern] = tensor
                    break
            else:
                kept[name] = tensor
                outliers += [] if kept_as_is.knows(name) else [name]
        if outliers:
            raise UsageError(f"{self.title} has no place for {first_few(outliers, 4)}")
        found: dict[T, dict[Numbers, list[Mosaic]]] = {}
        for side, names in sides:
            for numbers, there in columns.get(side, {}).items():
                every = {name: fill(name, signs_of(name), _shifted(name, numbers, config, 1)) for name in names}
                if lacking := [every[name] for name in names if name not in there]:
                    some = every[next(iter(there))]
                    raise UsageError(f"{first_few([some])} also needs {first_few(lacking)}")
                found.setdefault(side, {})[numbers] = [there[name] for name in names]
        return found, kept


@contextmanager
def _naming_line(name: str) -> Iterator[None]:
    """Say where it was that tensors were not as they should be."""
    try:
        yield
    except ValueError as error:
        raise UsageError(f"{first_few([name])}: {error}") from error


def _spelling(line: Line, numbers: Numbers, tensors: Mapping[str, Mosaic], config: Config) -> Spelling:
    """Return how a line is written: the first way whose condition the hub's tensors meet."""
    for one in line.may_be_written:
        if not one.companions or _hub_name(one.companions, line, numbers, config) in tensors:
            return one
    needed = [_hub_name(one.companions, line, numbers, config) for one in line.may_be_written]
    own = _hub_name(line.hub[0], line, numbers, config)
    raise UsageError(f"{first_few([own])} needs one of {first_few(needed)} beside it")


def _shifted(pattern: str, numbers: Numbers, config: Config, sign: int) -> Numbers:
    """Return the numbers with what a pattern adds to the first, once more or (-1) taken away."""
    key = shift_of(pattern)
    return (numbers[0] + sign * size_of(key, config), *numbers[1:]) if key else numbers


def _hub_name(pattern: str, line: Line, numbers: Numbers, config: Config) -> str:
    return fill(pattern, line.signs, _shifted(pattern, numbers, config, 1))


def _stacked(pattern: str, signs: str, column: Mapping[Numbers, Mosaic]) -> dict[str, Mosaic]:
    """Return tensors by the names of a pattern; what it has no sign for is stacked."""
    own = signs_of(pattern)
    if own == signs:
        return {fill(pattern, signs, numbers): tensor for numbers, tensor in column.items()}
    *_, last = (sign for sign in signs if sign not in own)
    at = signs.index(last)
    groups: dict[Numbers, dict[int, Mosaic]] = defaultdict(dict)
    for numbers, tensor in column.items():
        groups[(*numbers[:at], *numbers[at + 1 :])][numbers[at]] = tensor
    rest = signs.replace(last, "")
    made = {}
    for numbers, layers in groups.items():
        name = fill(pattern, rest, numbers)
        if lacking := sorted(set(range(len(layers))) - layers.keys()):
            raise UsageError(f"{first_few([name])} is made of {max(layers) + 1} tensors, without number {lacking[0]}")
        with _naming_line(name):
            made[numbers] = mosaic.stack([layers[number] for number in range(len(layers))], 0)
    return _stacked(pattern, rest, made)


def _unstacked(
    line: Line, spelling: Spelling, items: Mapping[Numbers, list[Mosaic]]
) -> Iterator[tuple[Numbers, list[Mosaic]]]:
    """Yield (numbers, tensors) of a line out of tensors in which some of the numbers are dims."""
    own = spelling.signs
    stacked = [sign for sign in line.signs if sign not in own]
    for numbers, parts in items.items():
        if not stacked:
            yield numbers, parts
            continue
        by_sign = dict(zip(own, numbers, strict=True))
        name = fill(spelling.names[0], own, numbers)
        counts = {part.shape[: len(stacked)] for part in parts}
        if len(counts) > 1 or len(counts.copy().pop()) < len(stacked):
            raise UsageError(f"{first_few([name])}: its first {len(stacked)} dims should be numbers of {stacked}")
        grid = [(by_sign, parts)]
        for sign in stacked:
            grid = [
                ({**known, sign: at}, list(layer))
                for known, tensors in grid
                for at, layer in enumerate(zip(*(mosaic.unstack(one, 0) for one in tensors), strict=True))
            ]
        for known, tensors in grid:
            yield tuple(known[sign] for sign in line.signs), tensors


def parse_key_maps(text: str, *, where: str, is_own: bool = False) -> dict[str, KeyMap]:
    """Parse a file of maps: `model_type`, class of models or "*" → map."""
    title = f"the map {os.path.basename(where)}"
    return {
        name: KeyMap(title=title if name == "*" else f"{title} [{name}]", section=section)
        for name, section in parse_sections(text, where=where, is_own=is_own).items()
    }


@cache
def load_key_maps(convention: str) -> Mapping[str, KeyMap]:
    """Return the maps that come with ckpt: `model_type` or class of models → map."""
    name = f"{convention}.txt"
    return parse_key_maps(read_packaged(__package__, name), where=name, is_own=True)


def of_weights(maps: Iterable[KeyMap], *, title: str) -> KeyMap:
    """Return the map of a model's weights and biases where `maps` have its modules: those of `load_key_maps`."""

    def ended(names: tuple[str, ...], end: str) -> tuple[str, ...]:
        return tuple(f"{name}.{end}" for name in names)

    lines = [
        Line(
            hub=ended(line.hub, end),
            spellings=tuple(replace(one, names=ended(one.names, end)) for one in line.spellings),
            is_written=line.is_written,
        )
        for each in maps
        for line in each.section.lines
        for end in ("weight", "bias")
    ]
    return KeyMap(title=title, section=MapSection(lines=tuple(lines)))
