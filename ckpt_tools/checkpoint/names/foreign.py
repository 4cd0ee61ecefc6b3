"""Whose names they are, when they are not those of the architecture."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache

from ckpt_tools.tables import read_rows

FACTOR = (
    r"(?:^|[._])(?:lora_|lycoris_|hada_|lokr_|boft_|oft_|dora_scale|vera_|ia3_|randlora_|fourierft_|hra_u|shira_|bone_"
    r"|trainable_tokens_|ln_tuning_|adamss_|beft_|c3a_|deft_|delora_|frod_|glora_|gralora_|hira_|lily_|miss_block|osf_"
    r"|peanut_|poly_lora|poly_router|psoft_|pvera_|road_|supertuning_|tinylora_|unilora_|vblora_|waveft_)"
)
"""Pattern of what stands in the name of a factor: LoRA's family, and kinds that are only recognised."""
_FACTOR = re.compile(FACTOR)


def is_factor(name: str) -> bool:
    """Is this the name of an adapter's own tensor, in the form of any library?"""
    return _FACTOR.search(name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class NameOrigin:
    """Something that names tensors its own way."""

    code: str
    names: re.Pattern[str]  # Some of its names match this, and nobody else's
    what: str  # The names are …
    way_on: str  # What to do; {source} and {destination} stand for the paths


ADAPTER = "adapter"  # Code of what is an adapter's

FLAT = "FSDP1 flat parameters, whose original names and shapes are not in the files"
FLAT_WAY = "load it with its own FSDP1 code on as many ranks, and save FULL_STATE_DICT or SHARDED_STATE_DICT"


@cache
def origins() -> tuple[NameOrigin, ...]:
    """Return everything that is known to name tensors its own way: the rows of `foreign.tsv`."""
    return tuple(
        NameOrigin(
            code=row["code"],
            names=re.compile(row["names"].replace(" | ", "|").replace("{factor}", FACTOR)),
            what=row["what"],
            way_on=row["way_on"].replace("{flat}", FLAT_WAY),
        )
        for row in read_rows(__package__, "foreign.tsv")
    )


def origins_of(names: Collection[str]) -> tuple[NameOrigin, ...]:
    """Return whose names they are, those with most names first; empty when nobody's that is known."""
    counts = {origin.code: sum(1 for name in names if origin.names.search(name)) for origin in origins()}
    found = [origin for origin in origins() if counts[origin.code]]
    return tuple(sorted(found, key=lambda origin: -counts[origin.code]))


def is_adapter(names: Collection[str]) -> bool:
    """Do all names belong to an adapter?"""
    adapter = next(origin for origin in origins() if origin.code == ADAPTER)
    return bool(names) and all(adapter.names.search(name) for name in names)


def common_prefix(names: Collection[str]) -> tuple[str, ...]:
    """Return what may stand before all names, with its dot: the longest first."""
    split = [name.split(".")[:-1] for name in names]
    shared: list[str] = []
    for components in zip(*split, strict=False):
        if len(set(components)) > 1:
            break
        shared.append(components[0])
    return tuple(".".join(shared[:end]) + "." for end in range(len(shared), 0, -1))
