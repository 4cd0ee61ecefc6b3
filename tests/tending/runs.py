"""Toy runs: a checkpoint per step, copied from one that torch has saved."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from steps import toy_steps


def save_step(run: Path, step: int, *, template: Path, prefix: str = "step-") -> Path:
    """Save a step of torchtitan's as it is when it has come to an end."""
    return Path(shutil.copytree(template, run / f"{prefix}{step}"))


def make_template(root: Path) -> Path:
    toy_steps.save({"model": toy_steps.state_of(0)}, root / "template")
    return root / "template"


def write_state(checkpoint: Path, step: int, *, best: str | None = None, **metrics: float) -> None:
    """Write what the Trainer does at the end of a save."""
    history = [{"step": step, "loss": 1.0}, {"step": step, **metrics}]
    document = {"global_step": step, "best_model_checkpoint": best, "log_history": history}
    (checkpoint / "trainer_state.json").write_text(json.dumps(document))


def flip(file: Path) -> None:
    """Damage one byte of a tensor."""
    content = bytearray(file.read_bytes())
    tensor = toy_steps.state_of(0)["model.layers.0.up.weight"].numpy().tobytes()
    content[content.index(tensor)] ^= 1
    file.write_bytes(content)
