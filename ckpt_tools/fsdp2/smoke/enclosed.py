"""Walls around the ranks, and around the trial before them, when the model comes from a stranger's config.json."""

from __future__ import annotations

import importlib
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import NoReturn

import torch

from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.fsdp2.smoke.launcher import free_memory
from ckpt_tools.fsdp2.smoke.messages import Saved
from ckpt_tools.fsdp2.smoke.setting import Setting
from ckpt_tools.models.config_recipe import ConfigRecipe
from ckpt_tools.sandbox import Limits, Walls, behind_walls, raise_walls
from ckpt_tools.sandbox.journal import Journal
from ckpt_tools.sandbox.ranks import Outcome

_EXIT = 3


def enclose(
    setting: Setting, journal: Journal, *, scratch: str, device: torch.device, saved: Saved | None = None
) -> None:
    """Put this process in a sandbox for the rest of its life; a breach is its last event.

    A factory is the user's own code and has no sandbox. On GPUs only Python's own walls stand: drivers and NCCL need
    devices, files and sockets.
    """
    if not isinstance(setting.recipe, ConfigRecipe):
        return

    def leave(error: CkptError) -> NoReturn:
        journal.error(error)
        os._exit(_EXIT)

    on_gpu = device.type == "cuda"
    limits = Limits() if on_gpu else Limits(memory_bytes=free_memory(device))
    raise_walls(replace(_walls(setting, setting.recipe, scratch, saved), on_breach=leave), limits, kernel=not on_gpu)


def enclosed(setting: Setting, *, scratch: str) -> AbstractContextManager[None]:
    """Return walls that stand while a context is open, for a process of the user's own: a breach raises there."""
    if not isinstance(setting.recipe, ConfigRecipe):
        return nullcontext()
    # It makes a cache directory when it is imported, and torch imports it late; ranks of our own have it already.
    importlib.import_module("torch._dynamo")
    return behind_walls(_walls(setting, setting.recipe, scratch))


def _walls(setting: Setting, recipe: ConfigRecipe, scratch: str, saved: Saved | None = None) -> Walls:
    own, model = setting.options.source, setting.options.model
    sources = (own, *(() if saved is None else (saved.source, saved.path)))
    folder = model if model is None or os.path.isdir(model) else os.path.dirname(model)
    return Walls(
        subject=f"a {recipe.title}",
        where=recipe.where,
        scratch=scratch,
        sources=tuple(os.path.abspath(path) for path in sources if path),
        foreign=() if folder is None else (os.path.abspath(folder),),
    )


def try_build(setting: Setting, journal: Journal, scratch: str) -> bool:
    """Build the model once on meta, and make a batch for it; what ckpt cannot build or feed is told in `journal`."""
    enclose(setting, journal, scratch=scratch, device=torch.device("cpu"))
    try:
        with torch.device("meta"):
            model = setting.recipe.build()
        setting.recipe.batch(model, 0)
    except CkptError as error:
        journal.error(error)
        return False
    return True


def judge_trial(setting: Setting, outcome: Outcome) -> CkptError | None:
    """Return what a trial that ended without a word means: nothing of it is the fault of FSDP2, or of the mesh."""
    if not outcome.findings:
        return None
    finding = outcome.findings[0]
    how = f"it did not end in {setting.timeout_s:.0f} s" if finding.code == "hang" else finding.what
    return UsageError(
        f"building a {setting.recipe.title} as the config says failed before any rank was started: {how}",
        where=setting.recipe.where if isinstance(setting.recipe, ConfigRecipe) else None,
        hint=finding.hint,
    )
