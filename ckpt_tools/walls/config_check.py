"""Looks at a config.json before anything is built of it. Pure; no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ckpt_tools.errors import RefusedConfigError
from ckpt_tools.walls.config_names import find_loaders
from ckpt_tools.walls.config_numbers import MAX_DEPTH, MAX_ITEMS, find_absurd

_LOADER_HINT = (
    "ckpt builds nothing that loads what a config names; for code that you trust, use --factory pkg.mod:callable"
)
_NUMBER_HINT = "is the file damaged? Compare it with the one that the model was published with"


def check_config(config: Mapping[str, object], where: str) -> None:
    """Refuse a config that names what a loader would load, or whose numbers are absurd.

    Args:
        config: The parsed config.json.
        where: The file, for messages.

    Raises:
        RefusedConfigError: Which key is refused, and why.
    """
    for path, part in _parts(config, where):
        for key, why in find_loaders(part):
            raise RefusedConfigError(
                f"the config is refused: {_name(path, key)}: {why}", where=where, hint=_LOADER_HINT
            )
        for key, why in find_absurd(part):
            raise RefusedConfigError(
                f"the config is refused: {_name(path, key)}: {why}", where=where, hint=_NUMBER_HINT
            )


def _name(path: tuple[str, ...], key: str) -> str:
    return ".".join(name[:100] for name in (*path, key))


def _parts(config: Mapping[str, object], where: str) -> Iterator[tuple[tuple[str, ...], Mapping[str, object]]]:
    """Yield a config and every object in it, lists of objects included, with its path."""
    waiting: list[tuple[tuple[str, ...], object]] = [((), config)]
    while waiting:
        path, value = waiting.pop()
        if not isinstance(value, (dict, list)):
            continue
        if len(path) > MAX_DEPTH:
            raise RefusedConfigError(
                f"the config is refused: more than {MAX_DEPTH} objects inside each other", where=where
            )
        if len(value) > MAX_ITEMS:
            name = ".".join(path) or "the config"
            raise RefusedConfigError(
                f"the config is refused: {name} has {len(value):,} entries, more than {MAX_ITEMS:,}", where=where
            )
        if isinstance(value, dict):
            yield path, value
            waiting += [((*path, key), item) for key, item in value.items()]
        else:
            waiting += [((*path, str(index)), item) for index, item in enumerate(value)]
