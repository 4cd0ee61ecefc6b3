"""What is removed in a bucket, in which order, and what is not; on obstore's own store in memory."""

from __future__ import annotations

import json

import pytest

from ckpt_tools.runs.bucket_folder import BucketFolder
from ckpt_tools.storage.remote import store
from ckpt_tools.storage.remote.store import Bucket

obstore = pytest.importorskip("obstore", reason="obstore is missing: pip install 'ckpt-tools[remote]'")
FILES = {
    "step-1/.metadata": b"m",
    "step-1/__0_0.distcp": b"0",
    "step-1/ckpt_manifest.json": b"{}",
    "step-2/.metadata": b"",
}


@pytest.fixture
def folder(monkeypatch) -> BucketFolder:
    from obstore.store import MemoryStore

    memory = MemoryStore()
    monkeypatch.setattr(store, "_open_store", lambda *_: memory)
    found = BucketFolder("s3://bucket/run")
    for name, content in FILES.items():
        found.write(name, content)
    return found


def _names(folder: BucketFolder) -> set[str]:
    return set(folder._list())


def test_what_makes_it_a_checkpoint_goes_first_and_the_note_last(folder, monkeypatch):
    """Killed at any moment, no half of it looks whole, and the note says what is left to do."""
    deleted = []
    delete = Bucket.delete
    monkeypatch.setattr(
        Bucket, "delete", lambda self, key: (deleted.append(key.removeprefix("run/")), delete(self, key))
    )
    assert folder.remove([folder.look().find("step-1")])
    assert deleted[0] == "step-1/.metadata"
    assert deleted[-1] == ".ckpt-trash-step-1"
    assert _names(folder) == {"step-2/.metadata"}


@pytest.mark.parametrize("change", ["step-1/__0_0.distcp", "step-1/ckpt_manifest.json"])
def test_what_has_changed_since_it_was_judged_stays(folder, change):
    saved = folder.look().find("step-1")
    folder.write(change, b"another")
    assert not folder.remove([saved])
    assert _names(folder) == set(FILES)


def test_what_was_written_since_a_note_stays(folder):
    saved = folder.look().find("step-1")
    note = {"roots": saved.roots, "objects": {name: facts.version for name, facts in saved.files.items()}}
    folder.write(".ckpt-trash-step-1", json.dumps(note).encode())
    folder.write("step-1/.metadata", b"saved again")
    folder.remove_leftover(".ckpt-trash-step-1")
    assert _names(folder) == {"step-1/.metadata", "step-2/.metadata"}


@pytest.mark.parametrize("note", [b"[]", b'{"roots": ["step-1"]}', b'{"roots": ["../x"], "objects": {"a": 1}}'])
def test_damaged_note_removes_nothing_but_itself(folder, note):
    folder.write(".ckpt-trash-step-1", note)
    folder.remove_leftover(".ckpt-trash-step-1")
    assert _names(folder) == set(FILES)


def test_empty_object_is_read(folder):
    folder.write("latest", b"")
    assert folder.read("latest") == b""
    assert folder.read("none") is None
