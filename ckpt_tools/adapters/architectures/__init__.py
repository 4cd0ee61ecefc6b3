"""Model families whose adapters have names of their own.

A new one is a table of families.toml, and its names in maps/comfyui.txt.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from importlib.resources import files

from ckpt_tools.adapters.architectures.architecture import Architecture


class _Architectures(Mapping[str, Architecture]):
    """The families by name, read when the first is asked for."""

    @cached_property
    def _table(self) -> Mapping[str, Architecture]:
        text = files(__name__).joinpath("families.toml").read_text(encoding="utf-8")
        return {name: Architecture.from_table(name, table) for name, table in tomllib.loads(text).items()}

    def __getitem__(self, name: str) -> Architecture:
        return self._table[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)


ARCHITECTURES: Mapping[str, Architecture] = _Architectures()


def candidates(paths: Iterable[str]) -> tuple[str, ...]:
    """Return the families that explain most of the names; more than one where names are shared.

    `transformer_blocks.0.attn.to_q` alone could be FLUX.1, FLUX.2, SD3 or others.
    """
    from ckpt_tools.adapters.architectures.names import readings

    names = list(dict.fromkeys(paths))
    counts = {
        name: sum(1 for path in names if readings(path, architecture))
        for name, architecture in ARCHITECTURES.items()
        if architecture.is_told_by_names
    }
    best = max(counts.values(), default=0)
    return tuple(name for name, count in counts.items() if count == best) if best else ()
