"""The names that trainers give to the checkpoints of a run, and the step that a name tells.

Numbers are compared inside of a series alone: `epoch_3` is neither before nor after `step_500`.

Source: transformers 5.23 and diffusers (`checkpoint-N`), torchtitan (`step-N`), accelerate 1.15 (`checkpoint_N`; its
examples `step_N`, `epoch_N`), verl and OpenRLHF (`global_step_N`, `global_stepN`), Megatron (`iter_N`), Lightning 2.6
(`epoch=E-step=N.ckpt`), ai-toolkit (`name_000000500.safetensors`).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cache

from ckpt_tools.checkpoint.formats.table import detect_format
from ckpt_tools.storage.locations import is_remote, local, open_source

POINTERS = ("latest", "latest_checkpointed_iteration.txt", "latest_step.txt")
"""Files beside the checkpoints that name the one to resume from: DeepSpeed's, verl's and Megatron's."""
_DIRECTORY = re.compile(r"(checkpoint[-_]|step[-_]|epoch_|global_step_?|iter_)(\d{1,18})", re.ASCII)
_ADAPTER = re.compile(r"(.+_)(\d{9})(_[A-Za-z]\w*)?(\.safetensors)?", re.ASCII)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?", re.ASCII)
_LIGHTNING = re.compile(r"(step|epoch)=(\d{1,18})(?!\d)", re.ASCII)
_IN_NAME = re.compile(rf"([A-Za-z_][\w/]*)=({_NUMBER.pattern})(?=[-.]|$)", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesPlace:
    """What a name tells."""

    name: str  # Of the checkpoint: that of its file or directory, or what the names of its several files have in common
    series: str  # Checkpoints of one series follow each other by their steps
    step: int | None  # None where the name has no number: `last.ckpt`


def parse_name(name: str, *, is_directory: bool) -> SeriesPlace | None:
    """Return whose checkpoint is called so; None for what no trainer saves."""
    if is_directory and (found := _DIRECTORY.fullmatch(name)):
        return SeriesPlace(name=name, series=f"{found[1]}*", step=int(found[2]))
    if name.endswith(".ckpt") and not name.startswith("."):
        steps = {key: int(number) for key, number in _LIGHTNING.findall(name)}
        series = _NUMBER.sub("*", name) if steps else name
        return SeriesPlace(name=name, series=series, step=steps.get("step", steps.get("epoch")))
    found = _ADAPTER.fullmatch(name)
    if found and not name.startswith(".") and is_directory == (found[4] is None):
        # A model of several experts has a file for each: name_000000500_high_noise.safetensors.
        common = name if found[3] is None else f"{found[1]}{found[2]}{found[4] or ''}"
        return SeriesPlace(name=common, series=f"{found[1]}*{found[4] or ''}", step=int(found[2]))
    return None


@cache
def place_of(name: str) -> SeriesPlace | None:
    """Return whose checkpoint has this name, whether of a file or of a directory."""
    return parse_name(name, is_directory=True) or parse_name(name, is_directory=False)


def checkpoints_in(path: str) -> list[str]:
    """Return the checkpoints in the folder of a run on this machine, in order; none where it is one itself."""
    if is_remote(path) or not os.path.isdir(local(path)):
        return []
    with open_source(path) as source:
        files = source.list_files()
    if detect_format(files, is_file=False) is not None:
        return []
    names = {file.partition("/")[0]: "/" in file for file in files}
    places = (parse_name(name, is_directory=is_directory) for name, is_directory in names.items())
    found = sorted((each.series, each.step or 0, each.name) for each in places if each is not None)
    return [os.path.join(path, name) for *_, name in found if name in names]


def metric_in_name(name: str, metric: str) -> float | None:
    """Return the metric that Lightning has put into a name: `epoch=1-step=20-val_loss=0.25.ckpt`."""
    return next((float(value) for key, value in _IN_NAME.findall(name) if key == metric), None)
