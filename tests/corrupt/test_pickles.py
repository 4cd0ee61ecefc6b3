"""Mutated pickles under the watch; `python -m corrupt.pickles` tries as many as it is told to."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from corrupt import pickles
from samples import memory_directory


@pytest.mark.full
def test_mutated_pickles_are_refused_or_harmless() -> None:
    outcome = pickles.run(240, seed=1)
    assert outcome.problems == []
    assert outcome.tried == 240
    assert outcome.armed > 60
    assert outcome.codes[0] > 0  # some are still sound, so the others came as far as they could
    assert "0 executions" in str(outcome)


def test_attack_that_is_executed_is_seen() -> None:
    """The commands work: the stock reader runs the mutations' originals."""
    with memory_directory() as root:
        attack = pickles.Attack(Path(root), seed=0)
        assert not attack.executed()
        pickle.loads(attack.exploits[0])
        assert attack.executed()
