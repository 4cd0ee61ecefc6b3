"""What the hub and a live model call the same tensors, as data: the standard library alone, no torch, no transformers.

`transformers.txt` is written by `bin/names` from transformers' own classes and conversion mapping.
"""

from ckpt_tools.checkpoint.names.foreign import common_prefix, is_adapter, is_factor, origins_of
from ckpt_tools.checkpoint.names.match_architecture import (
    NameMatch,
    config_misfits,
    group_names,
    live_names,
    match_names,
    tied,
)
from ckpt_tools.checkpoint.names.table import Expected, Table, load_table

__all__ = [
    "Expected",
    "NameMatch",
    "Table",
    "common_prefix",
    "config_misfits",
    "group_names",
    "is_adapter",
    "is_factor",
    "live_names",
    "load_table",
    "match_names",
    "origins_of",
    "tied",
]  # fmt: skip
