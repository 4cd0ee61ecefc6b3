"""Tend the checkpoints of a run from inside of it: verified in the background, superseded ones removed.

    trainer = Trainer(…, callbacks=[hooks.TrainerTending(keep_last=3)])             # transformers, TRL
    trainer = lightning.Trainer(…, callbacks=[hooks.LightningTending(keep_last=3)])
    tending = hooks.Tending("outputs/checkpoint", keep_last=3)                      # torchtitan, a loop of your own

A trainer's library is imported only when its class is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckpt_tools.hooks.of_lightning import LightningTending as LightningTending
    from ckpt_tools.hooks.of_transformers import TrainerTending as TrainerTending
    from ckpt_tools.hooks.tending import BadCheckpointError as BadCheckpointError, Tending as Tending

_HOMES = {
    "BadCheckpointError": "tending",
    "LightningTending": "of_lightning",
    "Tending": "tending",
    "TrainerTending": "of_transformers",
}
__all__ = [*sorted(_HOMES)]  # noqa: PLE0604 - the names above


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
