"""Tending as a callback of Lightning's Trainer."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback

from ckpt_tools.errors import UsageError
from ckpt_tools.runs.hook import Tending


class LightningTending(Callback):
    """Tends the directory of the run's ModelCheckpoint; takes the settings of `Tending`, `directory` among them.

    Lightning tells when a save begins, not when it has ended: the folder is looked at before the next batch.
    """

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401 - those of Tending
        self._settings = settings
        self._tending: Tending | None = None
        self._has_saved = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ANN401 - the library's
        """Begin; raise `UsageError` where nothing says where the checkpoints go."""
        places = [each.dirpath for each in trainer.checkpoint_callbacks if getattr(each, "dirpath", None)]
        known = {"model": pl_module, "resumed_from": trainer.ckpt_path, **({"directory": places[0]} if places else {})}
        given = known | self._settings
        if "directory" not in given:
            raise UsageError("LightningTending found no ModelCheckpoint", hint="pass directory=…")
        self._tending = Tending(**given, rank=trainer.global_rank)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:  # noqa: ANN401, ARG002 - the library's
        """Note that a save begins."""
        self._has_saved = True

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: Any) -> None:  # noqa: ANN401, ARG002 - the library's
        """Let what was saved before be verified, and tell what was found."""
        if self._tending is not None:
            if self._has_saved:
                self._has_saved = False
                self._tending.saved(keep=_pointed_at(trainer))
            self._tending.check()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ANN401, ARG002 - the library's
        """Wait for the last verification."""
        if self._tending is not None:
            self._tending.saved(keep=_pointed_at(trainer))
            self._tending.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ANN401, ARG002 - the library's
        """End what is under way."""
        if self._tending is not None:
            self._tending.close(wait=False)


def _pointed_at(trainer: Any) -> list[str]:  # noqa: ANN401 - the library's
    """Return the paths that the run's ModelCheckpoints name as the best and the last."""
    names = ("best_model_path", "last_model_path")
    return [path for each in trainer.checkpoint_callbacks for name in names if (path := getattr(each, name, ""))]
