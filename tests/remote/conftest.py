"""Stores that live as long as the session, the hub of tests/hub, and the settings that lead to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from hub.conftest import environment as environment, hub as hub, run as run
from remote.fault_proxy import Proxy, fault_proxy
from remote.servers import BUCKET, Server, rclone, seaweedfs

from ckpt_tools.storage.remote import hub_source, store, web


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No branch is remembered from another test, and no cache of the user's is looked at."""
    monkeypatch.setattr(hub_source, "_pinned", {})
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub-cache"))


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses between tries, which are noted and not made; others are, as threads that poll would spin."""
    taken: list[float] = []
    monkeypatch.setattr(
        web, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + sum(taken), sleep=taken.append)
    )
    return taken


@pytest.fixture(scope="session")
def seaweed() -> Iterator[Server]:
    """SeaweedFS: the store that keeps its promises."""
    pytest.importorskip("obstore", reason="obstore is missing: pip install 'ckpt-tools[remote]'")
    with seaweedfs() as server:
        yield server


@pytest.fixture(scope="session")
def careless() -> Iterator[Server]:
    """rclone: the store that ignores conditions."""
    pytest.importorskip("obstore", reason="obstore is missing: pip install 'ckpt-tools[remote]'")
    with rclone() as server:
        yield server


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that points the environment at a server (and a proxy before it): it returns s3://bucket."""

    def point(server: Server, url: str | None = None) -> str:
        for name, value in server.environment(url).items():
            monkeypatch.setenv(name, value)
        return f"s3://{BUCKET}"

    return point


@pytest.fixture
def proxy(seaweed: Server) -> Iterator[Proxy]:
    """A proxy before SeaweedFS that damages nothing until it is told to."""
    with fault_proxy(seaweed.url) as running:
        yield running


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again after hundredths of a second, and wait for answers no longer than two."""
    monkeypatch.setattr(store, "_CLIENT", {"connect_timeout": timedelta(seconds=2), "timeout": timedelta(seconds=2)})
    backoff = {"init_backoff": timedelta(milliseconds=10), "max_backoff": timedelta(milliseconds=50), "base": 2}
    retries = {"max_retries": 3, "retry_timeout": timedelta(seconds=8), "backoff": backoff}
    monkeypatch.setattr(store, "_RETRIES", retries)
