"""Manage the checkpoints of a run from inside of it: verified in the background, superseded ones removed.

    trainer = Trainer(…, callbacks=[hooks.TrainerTending(keep_last=3)])             # transformers, TRL
    trainer = lightning.Trainer(…, callbacks=[hooks.LightningTending(keep_last=3)])
    tending = hooks.Tending("outputs/checkpoint", keep_last=3)                      # torchtitan, a loop of your own

A trainer's library is imported only when its class is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckpt_tools.runs.hook import BadCheckpointError as BadCheckpointError, Tending as Tending
    from ckpt_tools.runs.hook_lightning import LightningTending as LightningTending
    from ckpt_tools.runs.hook_transformers import TrainerTending as TrainerTending

_HOMES = {
    "BadCheckpointError": "hook",
    "LightningTending": "hook_lightning",
    "Tending": "hook",
    "TrainerTending": "hook_transformers",
}
__all__ = [*sorted(_HOMES)]  # noqa: PLE0604 - the names above


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"ckpt_tools.runs.{_HOMES[name]}"), name)
