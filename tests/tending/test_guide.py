"""What docs/guides/retention.md shows is what happens."""

from __future__ import annotations

import os

import pytest
from seeds import guide
from steps import toy_steps


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_guides_loop_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    guide.run("retention", "loop", {"train_step": lambda: {"model": toy_steps.state_of(0)}})
    there = sorted(each for each in os.listdir("run") if not each.startswith((".", "latest-good")))
    assert there == ["step-3", "step-4"]
