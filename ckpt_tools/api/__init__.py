"""One function per verb, with the command line's names and defaults; the command line is a thin face on these."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ckpt_tools.api.conversions import gather, reshard, shard
from ckpt_tools.api.estimating import estimate
from ckpt_tools.api.preflighting import preflight
from ckpt_tools.api.reading import diff, inspect, open_checkpoint, verify
from ckpt_tools.api.training import smoke
from ckpt_tools.api.workers import ProgressFactory, default_num_workers

if TYPE_CHECKING:
    from ckpt_tools.adapters.check import check_lora
    from ckpt_tools.adapters.export import export_lora
    from ckpt_tools.api.merging import merge_lora
    from ckpt_tools.api.pushing import push

__all__ = [
    "ProgressFactory",
    "check_lora",
    "default_num_workers",
    "diff",
    "estimate",
    "export_lora",
    "gather",
    "inspect",
    "merge_lora",
    "open_checkpoint",
    "preflight",
    "push",
    "reshard",
    "shard",
    "smoke",
    "verify",
]

_ON_USE = {
    "check_lora": "ckpt_tools.adapters.check",
    "export_lora": "ckpt_tools.adapters.export",
    "merge_lora": "ckpt_tools.api.merging",
    "push": "ckpt_tools.api.pushing",
}
"""Name → module: loaded when it is asked for, so that the other commands need not wait for it."""


def __getattr__(name: str) -> object:
    if name in _ON_USE:
        found: object = getattr(import_module(_ON_USE[name]), name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
