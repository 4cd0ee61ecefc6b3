"""Names that are neither the hub's nor transformers': whose they are, and what all that have them make of them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ckpt_tools.errors import UsageError
from ckpt_tools.maps.convert import Converted
from ckpt_tools.maps.hold import Held, hold
from ckpt_tools.maps.keymap import KeyMap, load_key_maps
from ckpt_tools.maps.mosaic import Mosaic
from ckpt_tools.maps.table import load_table
from ckpt_tools.text import first_few

CONVENTIONS = ("torchtitan", "megatron", "meta")
"""Each is a file of `maps`; see `maps.keymap`."""
_Config = Mapping[str, object]


class UnclearNamesError(UsageError):
    """What tensors are by the hub's names is not clear, so that nobody is to go on as if it were."""

    code = "unclear-names"


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """One that has certain names for a model."""

    name: str
    key_map: KeyMap
    is_of_class: bool
    """Is the map of the model's class itself, rather than of its `model_type`?"""


def map_of(maps: Mapping[str, KeyMap], architecture: str, config: _Config) -> KeyMap | None:
    """Return the map of a model: that of its class, or of its `model_type`."""
    return maps.get(architecture) or maps.get(str(config.get("model_type")))


def conventions_of(names: Collection[str], architecture: str, config: _Config) -> tuple[Convention, ...]:
    """Return the conventions that have all of these names for a model."""
    found = []
    for name in CONVENTIONS:
        maps = load_key_maps(name)
        key_map = map_of(maps, architecture, config)
        if key_map is not None and key_map.knows(names):
            found.append(Convention(name=name, key_map=key_map, is_of_class=architecture in maps))
    return tuple(found)


def agreed(known: Sequence[Convention], tensors: Mapping[str, Mosaic], config: _Config) -> Converted:
    """Return what conventions make of tensors for the hub.

    Raises:
        UnclearNamesError: They do not make the same.
        UsageError: A tensor is lacking, or not as they need it.
    """
    first, *others = (convention.key_map.backward(tensors, config) for convention in known)
    if any(other.mosaics != first.mosaics or other.aliases != first.aliases for other in others):
        names = [convention.name for convention in known]
        raise UnclearNamesError(
            f"these are names of {' and of '.join(names)}, which mean different tensors by them",
            hint=f"say whose they are: --names {' or --names '.join(names)}",
        )
    return first


def refuse_lost(found: Converted, *, where: str) -> None:
    """Refuse what the hub has no place for.

    Raises:
        UnclearNamesError: There is some: without it, the model may compute something else.
    """
    if found.lost:
        glob = shlex.quote("**" + re.sub(r"\d+", "*", found.lost[0]))
        raise UnclearNamesError(
            f"the hub has no place for {first_few(found.lost)}: without, the model may not compute what was trained",
            where=where,
            hint=f"leave it out where it does not matter (all zeros, say): --exclude {glob}",
        )


def check_whole(hub: Collection[str], architecture: str, config: _Config) -> None:
    """Refuse a file in which tensors are lacking, where the architecture is known: a library's model lacks them, too.

    Raises:
        UsageError: Some are.
    """
    expected = load_table().expected(architecture, config)
    held = Held() if expected is None else hold(hub, expected, config)
    if lacking := [*held.missing, *held.incomplete]:
        raise UsageError(f"a {architecture} has tensors that the file has not: {first_few(lacking, 4)}")
