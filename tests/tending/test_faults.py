"""Nothing verified is lost, whatever happens: random lives of a folder in a bucket (on a disk: `tests/lives`)."""

from __future__ import annotations

import os
import random
from unittest.mock import patch

import pytest
from tending.runs import flip

from ckpt_tools import api
from ckpt_tools.storage.remote.store import Bucket
from ckpt_tools.storage.run_leases import RECORD_NAME


class _KilledError(BaseException):
    """The process ends here; nothing of ckpt's catches it."""


class _Store:
    """A bucket that the test writes to as a trainer does."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.bucket = Bucket(root)

    def save(self, name: str, path, *, without=()) -> None:
        for file in sorted(path.rglob("*")):
            if file.is_file() and file.name not in without:
                self.bucket.put(self._key(f"{name}/{file.relative_to(path)}"), file.read_bytes())

    def _key(self, file: str) -> str:
        return f"{self.bucket.key}/{file}"

    def content(self) -> dict[str, dict[str, bytes]]:
        found: dict[str, dict[str, bytes]] = {}
        start = len(self.bucket.key) + 1
        for each in self.bucket.list(self.bucket.key):
            name, _, file = each.key[start:].partition("/")
            if file:
                found.setdefault(name, {})[file] = bytes(self.bucket.get_whole(each.key, max_bytes=1 << 20)[1])
        return found


def dying(left):
    """Let requests that change something fail from the Nth on, as those of a process that was killed."""

    def count(method):
        def call(self, *args, **kwargs):
            nonlocal left
            left -= 1
            if left <= 0:
                raise _KilledError
            return method(self, *args, **kwargs)

        return call

    return patch.multiple(Bucket, put=count(Bucket.put), delete=count(Bucket.delete))


def walk_in_bucket(root, template, seed, damaged):
    """Return how many checkpoints were removed."""
    chance = random.Random(seed)
    store = _Store(f"{root}/run-{seed}")
    whole = {file.name: file.read_bytes() for file in template.iterdir()}
    step = removed = 0
    for _ in range(4):
        step += chance.randint(1, 9)
        act = chance.choice(["save", "save", "save", "half", "damaged"])
        source = damaged if act == "damaged" else template
        store.save(f"step-{step}", source, without=(".metadata",) if act == "half" else ())
        before = store.content()
        killed_at = chance.randint(1, 12) if chance.random() < 0.6 else 1 << 30
        try:
            with dying(killed_at):
                api.watch(store.root, once=True, settle=0, keep_last=1)
        except _KilledError:
            pass
        after = store.content()
        good = {name for name, content in before.items() if content == whole}
        for name in before:
            if before[name] == after.get(name):
                continue
            removed += 1
            assert name in good or ".metadata" not in before[name], f"seed {seed}: {name} was not good"
            assert ".metadata" not in after.get(name, {}), f"seed {seed}: half of {name} looks whole"
            later = [each for each in good if int(each[5:]) > int(name[5:]) and after.get(each) == whole]
            assert later, f"seed {seed}: {name} was the last good one"
    api.watch(store.root, once=True, settle=0, keep_last=1)
    assert not any("trash" in each.key for each in store.bucket.list(store.bucket.key))
    return removed


@pytest.mark.full
def test_nothing_is_lost_in_random_runs_in_a_bucket(seaweed, use, template, tmp_path):
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in template.iterdir():
        (damaged / file.name).write_bytes(file.read_bytes())
    flip(damaged / "__0_0.distcp")
    root = use(seaweed)
    count = int(os.environ.get("WALKS", "3"))
    assert sum(walk_in_bucket(f"{root}/{os.getpid()}", template, seed, damaged) for seed in range(count)) > 0


@pytest.mark.full
def test_bucket_is_watched_and_pruned(seaweed, use, template):
    store = _Store(f"{use(seaweed)}/pruned-{os.getpid()}")
    for step in (1, 2):
        store.save(f"step-{step}", template)
    store.save("step-3", template, without=(".metadata",))
    store.save("samples", template)
    pruned = api.watch(store.root, once=True, settle=0, keep_last=1)
    assert pruned.verified == ("step-1", "step-2")
    assert pruned.removed == ("step-1",)
    assert pruned.unknown == ("samples",)
    assert sorted(store.content()) == ["samples", "step-2", "step-3"]
    store.save("step-2", template.parent / "template")  # written again: other or the same ETags, whole in any case
    store.bucket.put(store._key("step-2/more"), b"x")
    assert api.prune(store.root, keep_last=1).removed == ()
    assert store.bucket.get_whole(store._key(RECORD_NAME), max_bytes=1 << 20)


@pytest.mark.full
def test_note_of_a_killed_prune_spares_what_was_saved_since(seaweed, use, template):
    store = _Store(f"{use(seaweed)}/spared-{os.getpid()}")
    for step in (1, 2):
        store.save(f"step-{step}", template)
    api.watch(store.root, once=True, settle=0)
    with pytest.raises(_KilledError), dying(3):  # the note, the first object, and no further
        api.prune(store.root, keep_last=1)
    assert ".metadata" not in store.content()["step-1"]
    other = {file.name: file.read_bytes() + b" " for file in template.iterdir()}
    for name, content in other.items():
        store.bucket.put(store._key(f"step-1/{name}"), content)
    api.prune(store.root, keep_last=2)
    assert store.content()["step-1"] == other
    assert not any("trash" in each.key for each in store.bucket.list(store.bucket.key))
