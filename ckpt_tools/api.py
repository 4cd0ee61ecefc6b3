"""One function per verb, with the command line's names and defaults; the command line is a thin layer over these.

A verb is loaded when it is asked for: nobody waits for the others.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckpt_tools.adapters.check import check_lora as check_lora
    from ckpt_tools.adapters.export import export_lora as export_lora
    from ckpt_tools.adapters.extract import extract_lora as extract_lora
    from ckpt_tools.adapters.merge_lora import merge_lora as merge_lora
    from ckpt_tools.adapters.resize import resize_lora as resize_lora
    from ckpt_tools.checks.commands import diff as diff, stats as stats, verify as verify
    from ckpt_tools.convert.average_rename import average as average, extract as extract, rename as rename
    from ckpt_tools.convert.commands import commit as commit, gather as gather, reshard as reshard, shard as shard
    from ckpt_tools.convert.inspect import (
        identify as identify,
        inspect as inspect,
        open_checkpoint as open_checkpoint,
        scan as scan,
    )
    from ckpt_tools.estimate.run import estimate as estimate
    from ckpt_tools.hub.push import push as push
    from ckpt_tools.options import ProgressFactory as ProgressFactory, default_num_workers as default_num_workers
    from ckpt_tools.preflight.run import preflight as preflight
    from ckpt_tools.preflight.smoke import smoke as smoke
    from ckpt_tools.runs.commands import prune as prune, watch as watch

_ROOMS = {
    "adapters.check": "check_lora",
    "adapters.export": "export_lora",
    "adapters.extract": "extract_lora",
    "adapters.resize": "resize_lora",
    "convert.commands": "commit gather reshard shard",
    "estimate.run": "estimate",
    "adapters.merge_lora": "merge_lora",
    "preflight.run": "preflight",
    "hub.push": "push",
    "checks.commands": "diff stats verify",
    "convert.inspect": "identify inspect open_checkpoint scan",
    "runs.commands": "prune watch",
    "preflight.smoke": "smoke",
    "convert.average_rename": "average extract rename",
    "options": "ProgressFactory default_num_workers",
}
"""Module → names that are public here."""
_HOMES = {name: f"ckpt_tools.{room}" for room, names in _ROOMS.items() for name in names.split()}
__all__ = [*sorted(_HOMES)]  # noqa: PLE0604 - the names above


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = found
    return found
