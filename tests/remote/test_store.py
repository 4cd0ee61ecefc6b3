"""What ckpt says of stores: objects and their ETags, and errors without anything that is nobody's business."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from remote.fault_proxy import Fault, Proxy
from remote.servers import SECRETS, Server

from ckpt_tools.cli import main
from ckpt_tools.errors import CkptError, UnreadableError, UsageError
from ckpt_tools.storage.locations import set_storage
from ckpt_tools.storage.remote import store
from ckpt_tools.storage.remote.store import Bucket, ChangedObjectError, ExistingObjectError, MissingObjectError, split

pytest.importorskip("obstore", reason="obstore is missing: pip install 'ckpt-tools[remote]'")


@pytest.fixture
def bucket(seaweed: Server, proxy: Proxy, use: Callable[..., str], impatient: None) -> Bucket:
    return Bucket(use(seaweed, proxy.url))


@pytest.mark.parametrize(
    "path", ["s3://", "s3:///key", "s3://b/a//b", "s3://b/../x", "s3://b/./x", "s3://b u/x", "s3://user:pw@b/x"]
)
def test_malformed_path_is_refused(path: str) -> None:
    with pytest.raises(UsageError):
        split(path)


def test_password_in_a_path_is_not_repeated() -> None:
    with pytest.raises(UsageError, match="a path must not contain credentials") as caught:
        split("s3://user:pass-word@bucket/x")
    assert "pass-word" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("s3://b", ("s3", "b", "")),
        ("S3://my.bucket-1/a/b/", ("s3", "my.bucket-1", "a/b")),
        ("gs://b/a b#é%20", ("gs", "b", "a b#é%20")),
    ],
)
def test_path_in_parts(path: str, parts: tuple[str, str, str]) -> None:
    assert split(path) == parts


def test_objects_are_written_listed_read_and_removed(bucket: Bucket) -> None:
    etag = bucket.put("t1/a b#é%20.bin", b"0123456789")
    (listed,) = bucket.list("t1")
    assert (listed.key, listed.nbytes, listed.etag) == ("t1/a b#é%20.bin", 10, etag)
    assert bucket.head(listed.key) == listed
    found, content = bucket.get(listed.key, 2, 3, etag=etag)
    assert (bytes(content), found.etag) == (b"234", etag)
    assert bytes(bucket.get(listed.key, 8, 5)[1]) == b"89"
    assert bucket.get_whole(listed.key, max_bytes=10)[1] == b"0123456789"
    with pytest.raises(UnreadableError, match="10 bytes where at most 9"):
        bucket.get_whole(listed.key, max_bytes=9)
    with pytest.raises(ExistingObjectError):
        bucket.put(listed.key, b"", create=True)
    bucket.put(listed.key, b"another")
    with pytest.raises(ChangedObjectError):
        bucket.get(listed.key, 0, 1, etag=etag)
    bucket.delete(listed.key)
    bucket.delete(listed.key)
    assert not list(bucket.list("t1"))
    with pytest.raises(MissingObjectError):
        bucket.head(listed.key)


def test_writer_leaves_nothing_when_it_is_left_by_an_error(bucket: Bucket) -> None:
    def write(key: str, *, fails: bool) -> None:
        with bucket.telling(key, "PUT"), bucket.open_writer(key, part_bytes=5 << 20, max_concurrency=2) as writer:
            writer.write(bytes(11 << 20))
            assert not fails

    write("t2/whole", fails=False)
    with pytest.raises(AssertionError):
        write("t2/half", fails=True)
    assert [(each.key, each.nbytes) for each in bucket.list("t2")] == [("t2/whole", 11 << 20)]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("403", "access denied: GET (AccessDenied)"),
        ("expired", "access denied: GET (ExpiredToken)"),
        ("503", "GET failed: the store answered 503 SlowDown (4 tries)"),
        ("500", "GET failed: the store answered 500 InternalError (4 tries)"),
        ("404", "no such object"),
        ("412", "the source changed while it was read"),
        ("redirect", None),  # obstore follows it; what is there is no object
        ("no-answer", "GET failed: the connection or the answer broke (4 tries)"),
        ("other-range", None),
        ("other-etag", "the source changed while it was read"),
        ("no-etag", None),
        ("error-body", None),
    ],
)
def test_error_names_the_object_and_no_secret(bucket: Bucket, proxy: Proxy, fault: Fault, says: str | None) -> None:
    etag = bucket.put("t3/object", bytes(1000))
    proxy.arm(fault, times=1000)
    with pytest.raises(CkptError) as caught:
        bucket.get("t3/object", 10, 900, etag=etag)
    assert says is None or caught.value.what == says
    assert caught.value.where == "s3://bucket/t3/object"
    assert not [secret for secret in SECRETS if secret in f"{caught.value} {caught.value.__cause__}"]


def test_wrong_settings_are_told_without_their_values(seaweed: Server, use, monkeypatch, capsys) -> None:
    root = use(seaweed)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret-91c2")
    with pytest.raises(CkptError, match="access denied: LIST") as caught:
        list(Bucket(root).list("x"))
    assert caught.value.hint == "the credentials come from AWS_ACCESS_KEY_ID (…LE7A)"
    for option, says in (("nonsense=secret-77", "no option 'nonsense' for s3://"), ("secret-77", "must be KEY=VALUE")):
        assert main(["inspect", "-v", f"{root}/x", "--storage", option]) == 2
        said = capsys.readouterr().err
        assert says in said
        assert "secret-77" not in said
    assert main(["inspect", f"{root}/x", "--storage", "secret_access_key=wrong-too-44", "--storage=region=r"]) == 1
    said = capsys.readouterr().err
    assert "access denied" in said
    assert "wrong-too-44" not in said
    set_storage([])
    use(seaweed, "http://127.0.0.1:1")
    monkeypatch.setattr(store, "_RETRIES", {"max_retries": 0})
    with pytest.raises(CkptError, match="no connection") as caught:
        Bucket(root).head("x")
    assert caught.value.hint == "check the network and the endpoint (http://127.0.0.1:1)"


def test_missing_library_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "obstore", None)
    with pytest.raises(UsageError, match="remote storage needs obstore") as caught:
        Bucket("s3://bucket")
    assert caught.value.hint == "pip install 'ckpt-tools[remote]'"
