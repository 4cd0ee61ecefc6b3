"""One function per verb, with the command line's names and defaults; the command line is a thin face on these."""

from __future__ import annotations

from ckpt_tools.adapters.check import check_lora
from ckpt_tools.adapters.export import export_lora
from ckpt_tools.api.conversions import gather, reshard, shard
from ckpt_tools.api.estimating import estimate
from ckpt_tools.api.merging import merge_lora
from ckpt_tools.api.preflighting import preflight
from ckpt_tools.api.pushing import push
from ckpt_tools.api.reading import diff, inspect, open_checkpoint, verify
from ckpt_tools.api.training import smoke
from ckpt_tools.api.workers import ProgressFactory, default_num_workers

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
