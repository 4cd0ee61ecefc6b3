"""What docs/guides/tending.md shows is what happens."""

from __future__ import annotations

import os
import re

import pytest
from seeds import guide
from steps import toy_steps
from tending.runs import save_step

from ckpt_tools.cli import main

TEXT = (guide.GUIDES / "tending.md").read_text(encoding="utf-8")


def test_guide_shows_what_watch_and_prune_print(tmp_path, template, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    for step in (100, 200, 300):
        save_step(tmp_path / "run", step, template=template)
    for command, shown in re.findall(r"```console\n\$ ckpt (.*?)\n(.*?)```", TEXT, re.DOTALL):
        assert main(command.split()) == 0
        # torch's metadata is a few bytes longer in a longer temporary directory.
        assert re.sub(r"6\.4\d KiB", "6.43 KiB", capsys.readouterr().out) == shown


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_guides_loop_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    guide.run("tending", "loop", {"train_step": lambda: {"model": toy_steps.state_of(0)}})
    there = sorted(each for each in os.listdir("run") if not each.startswith((".", "latest-good")))
    assert there == ["step-3", "step-4"]
