"""What the tests of tending share."""

from __future__ import annotations

import pytest
from remote.conftest import seaweed as seaweed, use as use
from tending import runs


@pytest.fixture(scope="session")
def template(tmp_path_factory):
    """A checkpoint that no test changes."""
    return runs.make_template(tmp_path_factory.mktemp("tending"))


@pytest.fixture
def run(tmp_path, template):
    """Three steps of a run that nobody has looked at."""
    root = tmp_path / "run"
    root.mkdir()
    for step in (10, 20, 30):
        runs.save_step(root, step, template=template)
    return root
