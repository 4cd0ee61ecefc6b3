"""Model families whose adapters have names of their own.

A new one is a table of families.toml, and its names in names/comfyui.txt.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from ckpt_tools.adapters.architectures.architecture import Architecture

with open(os.path.join(os.path.dirname(__file__), "families.toml"), "rb") as _file:
    ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
        {name: Architecture.from_table(name, table) for name, table in tomllib.load(_file).items()}
    )
"""The families by name."""


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
