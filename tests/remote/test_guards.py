"""Guards of what is written to a bucket and read from one, on obstore's own store in memory: quick."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta

import pytest
from remote.servers import Server
from remote.site import Answer, site
from samples import content

from ckpt_tools.errors import CkptError, DestinationExistsError, StorageError, UnreadableError
from ckpt_tools.storage.remote import store as remote_store
from ckpt_tools.storage.remote.object_sink import ObjectSink, WriteSettings
from ckpt_tools.storage.remote.object_source import ObjectSource, open_place
from ckpt_tools.storage.remote.store import Bucket

obstore = pytest.importorskip("obstore", reason="obstore is missing: pip install 'ckpt-tools[remote]'")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Bucket:
    from obstore.store import MemoryStore

    memory = MemoryStore()
    monkeypatch.setattr(remote_store, "_open_store", lambda *_: memory)
    return Bucket("s3://bucket/run")


def _sink(bucket: Bucket, fingerprint: str = "mine", **settings: object) -> ObjectSink:
    sink = ObjectSink(bucket, settings=WriteSettings(**settings))
    sink.join(fingerprint, 1)
    return sink


def _written(sink: ObjectSink, raw: bytes = b"0123456789") -> ObjectSink:
    sink.create("data", len(raw))
    sink.write("data", 0, [raw])
    sink.sync("data")
    sink.write_document("manifest", b"{}")
    sink.write_marker("marker", b"done")
    return sink


def _names(bucket: Bucket) -> list[str]:
    return sorted(found.key.removeprefix("run/") for found in bucket.list("run"))


# Writing


@pytest.mark.parametrize("document", [True, False])
@pytest.mark.parametrize("other", [b"too short", b"9876543210", None], ids=["length", "etag", "gone"])
def test_object_that_another_has_replaced_is_not_published(bucket: Bucket, other: bytes | None, document: bool) -> None:
    sink = _written(_sink(bucket))
    if document and other is not None:
        bucket.put("run/manifest", b"other")
    elif other is None:
        bucket.delete("run/manifest" if document else "run/data")
    else:
        bucket.put("run/data", other)
    with pytest.raises(StorageError, match="is gone, or is not the one that was written"):
        sink.publish()
    assert "marker" not in _names(bucket)


@pytest.mark.parametrize(
    ("change", "says"),
    [(lambda raw: raw[:-1], "bytes where 10 were sent"), (lambda raw: b"?" + raw[1:], "are not those sent")],
    ids=["shorter", "flipped"],
)
def test_store_that_keeps_something_else_is_found_out(bucket, change, says, monkeypatch) -> None:
    put, sink = Bucket.put, _sink(bucket)
    monkeypatch.setattr(Bucket, "put", lambda self, key, raw, **more: put(self, key, change(raw), **more))
    with pytest.raises(StorageError, match=says):
        _written(sink)


def test_who_leaves_removes_what_is_its_own_alone(bucket: Bucket) -> None:
    first = _written(_sink(bucket))
    second = _written(_sink(bucket))  # of the same conversion: from now on it needs what is there
    there = _names(bucket)
    assert {"data", "manifest", ".ckpt/claim", ".ckpt/joined"} <= set(there)
    first.discard()
    assert _names(bucket) == there
    second.discard()
    assert _names(bucket) == there
    third = _written(_sink(bucket))
    third.publish()
    assert _names(bucket) == ["data", "manifest", "marker"]


def test_who_is_alone_leaves_nothing(bucket: Bucket) -> None:
    _written(_sink(bucket)).discard()
    assert _names(bucket) == []


def test_who_finds_another_claim_in_the_end_removes_and_publishes_nothing(bucket: Bucket) -> None:
    sink = _written(_sink(bucket))
    claim = sink.find_claim()
    assert claim is not None
    bucket.put("run/.ckpt/claim", replace(claim, fingerprint="theirs", nonce="theirs").build())
    there = _names(bucket)
    with pytest.raises(DestinationExistsError, match="another conversion"):
        sink.publish()
    sink.discard()
    assert _names(bucket) == there


@pytest.mark.parametrize("theirs", [b"done", b"gone", b"longer than ours"])
def test_marker_that_is_there_already_is_ours_or_an_error(bucket: Bucket, theirs: bytes) -> None:
    sink = _written(_sink(bucket))
    bucket.put("run/marker", theirs)
    if theirs == b"done":  # a twin was faster, or the answer was lost
        sink.publish()
        return
    with pytest.raises(DestinationExistsError, match="another conversion has published here"):
        sink.publish()
    sink.discard()
    assert bucket.get_whole("run/marker", max_bytes=99)[1] == theirs


def test_prefix_that_others_have_written_to_is_left_alone(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.put("run/theirs", b"x")
    with pytest.raises(DestinationExistsError, match="not empty: theirs"):
        _sink(bucket)
    with pytest.raises(DestinationExistsError, match="not empty: theirs"):
        ObjectSink(bucket, settings=WriteSettings()).preview([10])  # of a dry run, which claims nothing
    assert _names(bucket) == ["theirs"]
    bucket.delete("run/theirs")
    look = ObjectSink._look

    def late(self: ObjectSink) -> object:  # somebody publishes after the first look
        found = look(self)
        bucket.put("run/theirs", b"x")
        return found

    monkeypatch.setattr(ObjectSink, "_look", late)
    with pytest.raises(DestinationExistsError, match="not empty: theirs"):
        _sink(bucket)
    assert _names(bucket) == ["theirs"]


def test_another_conversion_is_kept_out_and_a_careless_store_refused(bucket, monkeypatch) -> None:
    with _sink(bucket), pytest.raises(DestinationExistsError, match="another conversion is under way"):
        _sink(bucket, "theirs")
    put = Bucket.put
    monkeypatch.setattr(Bucket, "put", lambda self, key, raw, create=False: put(self, key, raw))
    with pytest.raises(StorageError, match="ignores If-None-Match"):
        _sink(bucket)


# Reading


@pytest.mark.parametrize("etags", [True, False])
@pytest.mark.parametrize("raw", [b"9876543210", b"longer than it was"])
def test_object_that_has_changed_since_it_was_listed_is_not_read(bucket, raw, etags, monkeypatch) -> None:
    if not etags:
        stored = remote_store._stored
        monkeypatch.setattr(remote_store, "_stored", lambda meta: replace(stored(meta), etag=None))
    bucket.put("run/data", b"0123456789")
    with ObjectSource(bucket) as source:
        assert source.size("data") == 10
        if not etags and len(raw) == 10:  # of the time whole seconds count; another size is seen within one
            facts = source._facts("data")
            source.files()["data"] = replace(facts, version={"modified": "2026-01-01T00:00:00Z"})  # type: ignore[index]
        bucket.put("run/data", raw)
        with pytest.raises(CkptError, match="the source changed while it was read"):
            source.read("data", 0, 4)


def test_name_that_leads_out_is_not_listed(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.put("run/data", b"x")
    stored = remote_store._stored
    monkeypatch.setattr(remote_store, "_stored", lambda meta: replace(stored(meta), key="run/../../etc/passwd"))
    with ObjectSource(bucket) as source, pytest.raises(UnreadableError, match="leads out"):
        source.list_files()


def test_half_a_write_is_no_checkpoint(bucket: Bucket) -> None:
    sink = _written(_sink(bucket))
    with pytest.raises(UnreadableError, match="a write was not finished"):
        open_place("s3://bucket/run")
    manifest = {"files": {"data": 10}, "assets": {}, "documents": {"marker": {}}}
    bucket.put("run/ckpt_manifest.json", json.dumps(manifest).encode())
    with pytest.raises(UnreadableError, match="a write was not finished"):
        open_place("s3://bucket/run")
    sink.publish()
    with open_place("s3://bucket/run")[0] as source:
        assert "marker" in source.list_files()


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, bytes], Bucket]]:
    """A server that says one thing of an object's range, whatever is asked, and sends a body that ends anywhere."""
    with site({}) as server:
        fake = Server(name="answering", url=server.url, is_careful=False)
        for name, value in fake.environment(None).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(remote_store, "_RETRIES", {"max_retries": 0, "retry_timeout": timedelta(seconds=1)})

        def answer(said: str, body: bytes) -> Bucket:
            headers = {"Content-Range": said, "ETag": '"e"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
            server.pages["/bucket/x"] = lambda _: Answer(206, headers, body)
            return Bucket("s3://bucket")

        yield answer


@pytest.mark.parametrize(
    ("said", "nbytes"),
    [("bytes 2-4/10", 2), ("bytes 2-4/10", 4), ("bytes 3-5/10", 3), ("bytes 2-3/10", 2), ("bytes 2-4/4", 3)],
)
def test_answer_that_is_not_what_was_asked_for_is_refused(answering, said, nbytes) -> None:
    assert bytes(answering("bytes 2-4/10", b"234").get("x", 2, 3, etag='"e"')[1]) == b"234"
    with pytest.raises(CkptError):
        answering(said, content(nbytes)).get("x", 2, 3, etag='"e"')
