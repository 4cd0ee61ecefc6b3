"""What every sink promises, one suite for all of them: a directory, one of several processes, a prefix of a bucket."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from samples import content

from ckpt_tools.errors import DestinationExistsError, StorageError, UnreadableError
from ckpt_tools.storage.remote import store as remote_store
from ckpt_tools.storage.remote.object_sink import ObjectSink, WriteSettings
from ckpt_tools.storage.remote.store import Bucket
from ckpt_tools.storage.shared_staging import SharedStaging
from ckpt_tools.storage.sink import Sink
from ckpt_tools.storage.staging import Staging

FILES = {"data": content(300_000, 1), "in/more": content(10, 2), "empty": b"", "manifest": b"{}", "marker": b"done"}
STEPS = ("create", "write", "sync", "document", "publish")
PASS = "share-00000-of-00001-pass-000.json"


@dataclass
class Kind:
    open: Callable[..., Sink]
    """Given whose work it is, takes part in writing; several may be open at once."""
    there: Callable[[], dict[str, bytes]]
    """What a reader finds; nothing before the whole is there."""
    left: Callable[[], list[str]]
    """Whatever lies there, found by readers or not."""
    faults: dict[str, tuple[object, str]]
    """Step → what of the system below fails in it: an object and the name of its function."""


def files_below(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.fixture(params=["directory", "shared", "bucket"])
def kind(request, tmp_path: Path, monkeypatch) -> Kind:
    out = tmp_path / "out"
    if request.param == "bucket":
        memory = pytest.importorskip("obstore", reason="pip install 'ckpt-tools[remote]'").store.MemoryStore()
        monkeypatch.setattr(remote_store, "_open_store", lambda *_: memory)
        bucket = Bucket("s3://bucket/run")

        def names() -> list[str]:
            return sorted(each.key.removeprefix("run/") for each in bucket.list("run"))

        def there() -> dict[str, bytes]:
            found = names() if "marker" in names() else []
            return {name: bucket.get_whole(f"run/{name}", max_bytes=1 << 20)[1] for name in found}

        opened, left = lambda: ObjectSink(bucket, settings=WriteSettings()), names
        faults = dict.fromkeys(STEPS, (bucket.obstore, "put"))  # a file of one part is sent when it is whole
    else:
        is_shared = request.param == "shared"
        opened = (lambda: SharedStaging(str(out))) if is_shared else lambda: Staging(str(out), overwrite=False)
        there, left = lambda: files_below(out), lambda: sorted(os.listdir(tmp_path))
        faults = dict.fromkeys(STEPS, (os, "fsync")) | {"create": (os, "posix_fallocate"), "write": (os, "pwritev")}

    def take_part(whose: str = "mine") -> Sink:
        sink = opened()
        if isinstance(sink, Staging) and not isinstance(sink, SharedStaging):
            sink.begin(whose * 8)
        else:
            sink.join(whose * 8, 1)
            sink.begin(PASS)
        return sink

    return Kind(open=take_part, there=there, left=left, faults=faults)


def steps(sink: Sink) -> Iterator[str]:
    """Write everything; yield before each step which one comes."""
    for name in ("data", "in/more", "empty"):
        yield "create"
        sink.create(name, len(FILES[name]))
        yield "write"
        for at in range(0, len(FILES[name]), 100_000):
            sink.write(name, at, [FILES[name][at : at + 100_000]])
        yield "sync"
        sink.sync(name)
    yield "document"
    sink.write_document("manifest", FILES["manifest"])
    sink.write_marker("marker", FILES["marker"])
    yield "publish"
    sink.publish()


def test_all_is_there_at_once_and_nothing_beside_it(kind: Kind) -> None:
    with kind.open() as sink:
        for step in steps(sink):
            assert kind.there() == {}, step
            if step == "publish":
                with sink.reader() as reader:
                    assert {name: reader.read(name, 0, len(raw)) for name, raw in FILES.items()} == FILES
    assert kind.there() == FILES
    assert kind.left() in (["out"], sorted(FILES))


def test_what_is_discarded_leaves_nothing(kind: Kind) -> None:
    for _ in zip(range(4), steps(sink := kind.open()), strict=False):
        pass
    sink.discard()
    assert kind.left() == []


@pytest.mark.parametrize("failing", STEPS)
def test_error_at_any_step_publishes_nothing_and_says_where(kind: Kind, failing: str, monkeypatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def run() -> None:
        with monkeypatch.context() as patch, kind.open() as sink:
            for step in steps(sink):
                if step == failing:
                    patch.setattr(*kind.faults[step], fail)

    with pytest.raises(StorageError) as caught:
        run()
    assert caught.value.where
    assert kind.there() == {}
    with kind.open() as sink:
        assert [*steps(sink)]
    assert kind.there() == FILES


def test_of_two_writers_of_different_things_the_second_is_refused(kind: Kind) -> None:
    with kind.open() as first:
        with pytest.raises(DestinationExistsError):
            kind.open("other")
        assert [*steps(first)]
    assert kind.there() == FILES
    with pytest.raises(DestinationExistsError):
        kind.open("other")


@pytest.mark.parametrize("name", ["../out2", "/etc/x", "a/../../x", "a\0b"])
def test_name_that_leads_out_is_refused(kind: Kind, name: str) -> None:
    with kind.open() as sink, pytest.raises(UnreadableError, match="leads out"):
        sink.create(name, 1)
