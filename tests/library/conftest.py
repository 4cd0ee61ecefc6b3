from __future__ import annotations

from pathlib import Path

import pytest
from hub.conftest import environment as environment, hub as hub, run as run  # fixtures
from library.world import make


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what the examples name."""
    return make(tmp_path_factory.mktemp("world"))
