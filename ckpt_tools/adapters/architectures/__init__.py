"""Model families whose adapters have names of their own: one file for each, and the table of them.

A new one is a file with an `Architecture`, its name in `ArchitectureName`, and an entry of `ARCHITECTURES`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from ckpt_tools.adapters.architectures.architecture import Architecture, ArchitectureName
from ckpt_tools.adapters.architectures.flux1 import FLUX1
from ckpt_tools.adapters.architectures.flux2 import FLUX2
from ckpt_tools.adapters.architectures.sd3 import SD3
from ckpt_tools.adapters.architectures.sdxl import SDXL

ARCHITECTURES: Mapping[ArchitectureName, Architecture] = MappingProxyType(
    {each.name: each for each in (FLUX1, FLUX2, SDXL, SD3)}
)
"""By name."""


def candidates(paths: Iterable[str]) -> tuple[ArchitectureName, ...]:
    """Return the families that explain most of the names; more than one where names are shared.

    `transformer_blocks.0.attn.to_q` alone could be FLUX.1, FLUX.2 or SD3.
    """
    from ckpt_tools.adapters.architectures.resolve import readings

    names = list(dict.fromkeys(paths))
    counts = {
        name: sum(1 for path in names if readings(path, architecture)) for name, architecture in ARCHITECTURES.items()
    }
    best = max(counts.values(), default=0)
    return tuple(name for name, count in counts.items() if count == best) if best else ()
