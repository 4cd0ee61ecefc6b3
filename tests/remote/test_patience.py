"""An outage of a store ends nothing, as long as it is shorter than --patience; time decides, not tries."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from samples import files_of, tensor, write_model

from ckpt_tools import api
from ckpt_tools.cli import main
from ckpt_tools.storage.remote import patience
from ckpt_tools.storage.remote.store import Bucket

BIG = {f"layers.{i}.w": tensor("BF16", 64, 1 << 12, seed=i) for i in range(12)}
OUTAGE_S = 4.0
"""Twice as long as eight tries took that hardly waited longer each time."""


@pytest.fixture(autouse=True)
def _as_set_out() -> object:
    yield
    patience.set_patience(patience.DEFAULT_S, lambda _: None)


@pytest.mark.full
@pytest.mark.parametrize(
    ("verb", "fault", "when"),
    [
        ("write", "503", 0.5),
        ("write", "503", 1.0),
        ("write", "reset", 0.5),
        ("read", "503", 0.0),
        ("read", "no-answer", 0.5),
    ],
)
def test_outage_ends_nothing(verb, fault, when, seaweed, proxy, use, tmp_path: Path, request) -> None:
    model = write_model(tmp_path / "model", BIG)
    root = f"{use(seaweed, proxy.url)}/patience-{request.node.callspec.id}"
    api.shard(model, tmp_path / "here", mesh="dp_shard=2")
    source, first, second = (str(tmp_path / "here"), f"{root}/a", f"{root}/b")
    if verb == "read":
        api.reshard(source, f"{root}/there", mesh="dp_shard=2")
        source, first, second = f"{root}/there", str(tmp_path / "a"), str(tmp_path / "b")
    proxy.arm(None)
    api.gather(source, first)
    count = len(proxy.seen)
    proxy.fail(fault, at=min(round(when * count), count - 1), seconds=OUTAGE_S)
    began = time.monotonic()
    assert api.gather(source, second).published
    assert proxy.num_damaged > 3
    assert time.monotonic() - began >= OUTAGE_S
    if verb == "read":
        assert files_of(Path(second)) == files_of(Path(first))
    assert api.verify(second, against=str(model)).ok


@pytest.mark.full
def test_patience_ends_and_says_so(seaweed, proxy, use, tmp_path: Path, capsys) -> None:
    model = write_model(tmp_path / "model", {"x": tensor("F32", 8)})
    root = f"{use(seaweed, proxy.url)}/impatient"
    proxy.fail("503", at=0, seconds=60.0)
    began = time.monotonic()
    assert main(["shard", str(model), f"{root}/a", "--mesh", "2", "--patience", "7s"]) == 1
    assert 2.0 < time.monotonic() - began < 50.0  # 7 s, and not the minute of the outage
    said = capsys.readouterr().err
    assert "does not answer; it is asked again for up to 7 s (--patience)" in said
    assert "503 SlowDown" in said
    assert main(["verify", f"{root}/a", "--patience", "soon"]) == 2


def test_people_are_told_once_that_a_store_is_late_and_once_that_it_answers(monkeypatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(patience, "_LOOK_S", 0.01)
    monkeypatch.setattr(patience, "LATE_S", 0.05)
    monkeypatch.setattr(patience, "_watcher", None)
    patience.set_patience(9.0, said.append)
    for wait_s in (0.0, 0.2):
        with patience.watched("HEAD", "s3://b"):
            time.sleep(wait_s)
    with suppress(KeyError), patience.watched("HEAD", "s3://other"):
        time.sleep(0.2)
        raise KeyError
    with patience.watched("GET", "s3://slow"):  # many bytes, perhaps
        time.sleep(0.2)
    late = "does not answer; it is asked again for up to 9 s (--patience)"
    assert said == [f"s3://b {late}", "s3://b answers again", f"s3://other {late}"]


def test_pauses_grow_to_a_limit_and_a_server_may_ask_for_longer_ones() -> None:
    assert [patience.pause_s(tries) for tries in (0, 1, 2, 9, 4000)] == [0.5, 1.0, 2.0, 10.0, 10.0]
    assert patience.pause_s(1, asked_s=30.0) == 30.0


def test_nobody_watches_when_nothing_is_under_way(monkeypatch) -> None:
    monkeypatch.setattr(patience, "_LOOK_S", 0.01)
    with patience.watched("HEAD", "s3://b"):
        pass
    ends = time.monotonic() + 5
    while any(thread.name == "ckpt-store-watch" for thread in threading.enumerate()) and time.monotonic() < ends:
        time.sleep(0.01)
    assert not any(thread.name == "ckpt-store-watch" for thread in threading.enumerate())


def test_pages_of_a_listing_are_requests_of_their_own(monkeypatch) -> None:
    """Whoever takes long over what was listed does not wait for the store."""
    said: list[str] = []
    monkeypatch.setattr(patience, "_LOOK_S", 0.01)
    monkeypatch.setattr(patience, "LATE_S", 0.05)
    monkeypatch.setattr(patience, "_watcher", None)
    patience.set_patience(9.0, said.append)
    bucket = Bucket.__new__(Bucket)
    bucket.root, bucket.store = "s3://b", None
    row = {"path": "a", "size": 1, "last_modified": datetime.now(UTC), "e_tag": None, "version": None}
    bucket.obstore = SimpleNamespace(list=lambda *_, **__: [[row]] * 3)
    for _ in bucket.list(""):
        time.sleep(0.15)
    assert said == []
