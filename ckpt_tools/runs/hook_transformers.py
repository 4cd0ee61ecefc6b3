"""Tending as a callback of transformers' Trainer, which TRL's trainers and axolotl take too."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ckpt_tools.runs.hook import Tending


class TrainerTending(TrainerCallback):
    """Tends the Trainer's output directory; takes the settings of `Tending`, `directory` among them."""

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 - those of Tending
        self._settings = settings
        self._tending: Tending | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:  # noqa: ANN401, ARG002 - the library's
        """Begin; settings that make no sense end the run here."""
        known = {"model": given.get("model"), "resumed_from": args.resume_from_checkpoint, "directory": args.output_dir}
        self._tending = Tending(**known | self._settings, rank=0 if state.is_world_process_zero else 1)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ANN401, ARG002 - the library's
        """Let the new checkpoint be verified."""
        if self._tending is not None:
            best = state.best_model_checkpoint
            self._tending.saved(f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}", keep=[best] if best else [])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ANN401, ARG002 - the library's
        """Tell what was found."""
        if self._tending is not None:
            self._tending.check()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ANN401, ARG002 - the library's
        """Wait for the last verification."""
        if self._tending is not None:
            self._tending.close()
