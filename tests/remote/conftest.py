"""The local hub of tests/hub, and commands against it; nothing ever leaves 127.0.0.1."""

from __future__ import annotations

import pytest
from hub.conftest import environment as environment, hub as hub, naps as naps, run as run

from ckpt_tools.remote import hub_source


@pytest.fixture(autouse=True)
def _fresh(monkeypatch, tmp_path) -> None:
    """No branch is remembered from another test, and no cache of the user's is looked at."""
    monkeypatch.setattr(hub_source, "_pinned", {})
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub-cache"))
