"""What is asked of every trainer, of what one walk brought: a walk is long, so it is one test."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from trainers import worlds

from ckpt_tools import api


@dataclass(slots=True, kw_only=True)
class Walked:
    """What came out of a walk; losses are of the global batch, one per step."""

    expected: float
    """First loss of what `from_pretrained` loads from the hub model."""
    straight: list[float]
    """All losses of two ranks that started from what `shard` wrote, and saved after the second step."""
    live: dict[str, torch.Tensor]
    """By the hub's names: the trainer's weights when it saved, or its logits under "logits"."""
    back: dict[str, torch.Tensor]
    """The same of what `from_pretrained` loads of what `gather` wrote."""
    theirs: dict[int, list[float]] = field(default_factory=dict)
    """Number of ranks → losses after the trainer resumed from the step as it saved it."""
    ours: dict[int, list[float]] = field(default_factory=dict)
    """Number of ranks → losses after it resumed from what `reshard` wrote for that number."""
    steps: list[Path] = field(default_factory=list)
    """What `verify` must find sound: the step, and the resharded ones."""


def judge(walked: Walked, tmp_path: Path) -> None:
    """Assert all that a user of the trainer counts on."""
    first = pytest.approx(walked.expected, abs=1e-5)  # the mean of a batch is summed in another order
    assert walked.straight[0] == first
    assert walked.theirs[2] == walked.straight[2:]
    for num_ranks in (1, 4):
        assert walked.ours[num_ranks] == walked.theirs[num_ranks]
        assert walked.ours[num_ranks] == pytest.approx(walked.straight[2:], abs=1e-4)  # of two ranks
    assert walked.live.keys() == walked.back.keys()
    assert [name for name, tensor in walked.live.items() if not torch.equal(tensor, walked.back[name])] == []
    for step in walked.steps:
        result = api.verify(step, level="data")
        assert result.ok
        # A step for more ranks than it is from has no RNG states of the others, and nobody can make them.
        assert {finding.code for finding in result.findings} <= {"may-not-resume"}
    judge_flips(walked.steps[0], tmp_path)


def judge_flips(step: Path, tmp_path: Path) -> None:
    """Assert that `verify` finds one changed bit in any part of a step."""
    parts = [file.parent.relative_to(step) for file in step.rglob(".metadata")]
    assert parts
    for number, part in enumerate(parts):
        copy = worlds.flipped(step, tmp_path / f"flipped-{number}", part)
        assert [finding.code for finding in api.verify(copy, level="data").findings] == ["damaged-data"]
