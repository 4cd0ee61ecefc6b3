"""Write a checkpoint to a bucket, so that it is there whole or not at all for everybody who looks for its marker.

A prefix cannot be renamed, so files go to their final keys at once, and the marker (`.metadata`, an index) is put
last, only where there is none. What is known until then lies in `.ckpt/` below the prefix: the claim, which keeps
conversions of something else out, and a record for each run of files that is finished.
See docs/dev/reliability.md.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from ckpt_tools.errors import CkptError, DestinationExistsError, StorageError, UnreadableError, UsageError
from ckpt_tools.signals import hold_signals
from ckpt_tools.storage.claim import CLAIM_NAME, MAX_CLAIM_BYTES, RECORD_PREFIX, SHARED_DIRECTORY, BuildClaim
from ckpt_tools.storage.journal import BlockRecord
from ckpt_tools.storage.remote.object_source import ObjectSource
from ckpt_tools.storage.remote.store import Bucket, ExistingObjectError, MissingObjectError, StoredObject
from ckpt_tools.storage.remote.upload import Checked, Upload, held_bytes_of, part_bytes_of, sending
from ckpt_tools.storage.sink import SharedSink
from ckpt_tools.storage.source import Source
from ckpt_tools.storage.virtual import VirtualFile, VirtualSource
from ckpt_tools.text import first_few, is_plain_path
from ckpt_tools.units import format_size

# How to write to buckets: what was asked for, in which passes, and what that takes. Pure; nothing is sent

MEMORY_BYTES = 1 << 30  # For the parts of open objects, where nobody says otherwise
_PASS_BYTES = 64 << 30  # More are too much to lose: what a killed pass has written is written again
_FEW_REQUESTS = 8  # Of each kind, for the claim, records, documents and the marker
_DOLLARS_PER_PUT, _DOLLARS_PER_GET, _DOLLARS_PER_BYTE_MONTH = 5e-6, 4e-7, 0.023e-9
"""S3 Standard, us-east-1, within the region."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteSettings:
    """How to write to buckets."""

    memory_bytes: int = MEMORY_BYTES  # For the parts of open objects
    needs_conditions: bool = True  # Refuse a store that overwrites where it should create
    verify_all: bool = False  # Read everything back, not the ends of some objects


def describe_writing(sizes: Sequence[int], memory_bytes: int, *, num_sampled: int) -> str:
    """Say what writing files of these sizes takes: requests, passes, memory, and about what that costs."""
    parts = [-(-nbytes // part_bytes_of(nbytes)) for nbytes in sizes]
    puts = _FEW_REQUESTS + sum(1 if count <= 1 else count + 2 for count in parts)
    gets = _FEW_REQUESTS + len(sizes) + 2 * num_sampled
    passes = len(cut_passes(sizes, memory_bytes))
    again = f" in {passes} passes (a block that two passes need is read twice)" if passes > 1 else ""
    part = format_size(max(map(part_bytes_of, sizes), default=0))
    dollars = puts * _DOLLARS_PER_PUT + gets * _DOLLARS_PER_GET
    return (
        f"about {puts} PUT and {gets} GET requests for {format_size(sum(sizes))}{again}, in parts of {part}, "
        f"with at most {format_size(memory_bytes)} of memory for parts; at the list prices of S3 Standard about "
        f"${dollars:.2f}, and ${sum(sizes) * _DOLLARS_PER_BYTE_MONTH:.2f} a month to keep"
    )


def cut_passes(sizes: Sequence[int], memory_bytes: int) -> list[range]:
    """Cut files of these sizes into runs that fit into memory when all are open, and are not too much to lose."""
    cuts, held, total = [0], 0, 0
    for i, nbytes in enumerate(sizes):
        held, total = held + held_bytes_of(nbytes), total + nbytes
        if i > cuts[-1] and (held > memory_bytes or total > _PASS_BYTES):
            cuts.append(i)
            held, total = held_bytes_of(nbytes), nbytes
    return [range(start, end) for start, end in zip(cuts, [*cuts[1:], len(sizes)], strict=True)]


_WORK = f"{SHARED_DIRECTORY}/"
_CLAIM = _WORK + CLAIM_NAME
_JOINED = _WORK + "joined"
"""Made by whoever finds the claim of another process: from then on nobody removes what lies there."""
_MAX_RECORD_BYTES = 256 << 20
_MAX_SAMPLED_FILES = 64
_THREADS = 16


_settings = WriteSettings()


def set_write_settings(settings: WriteSettings) -> None:
    """Set how sinks write that are opened from now on."""
    global _settings  # noqa: PLW0603 - as `store.set_options`
    _settings = settings


def open_sink(path: str, *, overwrite: bool) -> ObjectSink:
    """Open a prefix for writing; see `remote.places`."""
    if overwrite:
        raise UsageError("a store cannot replace a checkpoint atomically", where=path, hint="write to a new prefix")
    return ObjectSink(Bucket(path), settings=_settings)


class ObjectSink(SharedSink):
    """A prefix of a bucket under construction.

    Args:
        bucket: The bucket; its `key` is the prefix.
        settings: How to write.
    """

    goes_front_to_back = True

    def __init__(self, bucket: Bucket, *, settings: WriteSettings) -> None:
        self.destination = bucket.label(bucket.key)
        self.records = {}
        self._bucket = bucket
        self._settings = settings
        self._claim: BuildClaim | None = None
        self._is_mine = False
        """The claim is of this process."""
        self._lock = threading.Lock()
        self._uploads: dict[str, Upload] = {}
        self._documents: dict[str, bytes] = {}
        self._marker: tuple[str, bytes] | None = None
        self._num_records = 0
        self._own_records: set[str] = set()
        self._num_sampled = 0
        self._sampling = threading.BoundedSemaphore(4)
        self._is_over = False

    def _key(self, name: str) -> str:
        return f"{self._bucket.key}/{name}" if self._bucket.key else name

    def _list(self, below: str = "") -> dict[str, StoredObject]:
        """Return name → object of what is there."""
        prefix = self._key(below).rstrip("/")
        skipped = len(self._key(""))
        return {found.key[skipped:]: found for found in self._bucket.list(prefix)}

    # Beginning

    def begin(self, fingerprint: str | None = None) -> None:
        """Nothing smaller than a pass is continued."""
        del fingerprint

    # Whose a prefix is while it is built says one small object, made where there is none, that everybody can read.
    # It is no lock and has no lease. Runs of one fingerprint write the same bytes and are welcome; others are refused.

    def find_claim(self) -> BuildClaim | None:
        """Return what is being built here."""
        key = self._key(_CLAIM)
        try:
            _, content = self._bucket.get_whole(key, max_bytes=MAX_CLAIM_BYTES)
        except MissingObjectError:
            return None
        return BuildClaim.parse(content, where=self._bucket.label(key))

    def _take_claim(self, mine: BuildClaim, *, conditional: bool) -> tuple[BuildClaim, bool]:
        """Make the claim where there is none; return the one that is there, and whether the store keeps conditions.

        Without `conditional`, the store is not asked for conditions, and nothing is known of them.
        """
        found = self.find_claim()
        if found is None:
            try:
                self._bucket.put(self._key(_CLAIM), mine.build(), create=conditional)
                found = mine
            except StorageError:
                # "It exists" can be one's own, whose answer was lost; so can any other failure.
                found = self.find_claim()
                if found is None:
                    raise
        self._check_claim(found, mine)
        with contextlib.suppress(ExistingObjectError):
            if conditional:
                self._bucket.put(self._key(_CLAIM), found.build(), create=True)
            return found, False
        return found, True

    def _check_claim(self, found: BuildClaim, mine: BuildClaim) -> None:
        found.check(mine.fingerprint, mine.num_parts, where=self.destination, directory=self.destination)

    def join(self, fingerprint: str, num_parts: int) -> None:
        """Look at what is there, and claim the prefix; see `SharedSink`."""
        there = self._look()
        mine = BuildClaim.new(fingerprint, num_parts, self.command)
        needs = self._settings.needs_conditions
        self._claim, is_kept = self._take_claim(mine, conditional=needs)
        self._is_mine = self._claim.nonce == mine.nonce
        self._num_records = sum(name.startswith(_WORK + RECORD_PREFIX) for name in there)
        if self._is_mine:
            self._look_again()
        elif is_kept:
            self._put(_JOINED, b"")
        if is_kept:
            return
        if needs:
            what = "this store ignores If-None-Match: two writers could both win"
            hint = "use a store that honours it, or add --no-conditional-writes and let one run write at a time"
            raise StorageError(what, where=self.destination, hint=hint)
        self.notes += ("--no-conditional-writes: there was no protection against a second writer",)

    def _look(self) -> dict[str, StoredObject]:
        there = self._list()
        others = [name for name in there if not name.startswith(_WORK)]
        if others and _CLAIM not in there:
            raise self._not_empty(others)
        return there

    def _look_again(self) -> None:
        """Nobody can begin any more: did somebody publish between the first look and the claim?"""
        others = [name for name in self._list() if not name.startswith(_WORK)]
        if others:
            self._is_mine, self._claim = False, None
            self._bucket.delete(self._key(_CLAIM))
            raise self._not_empty(others)

    def _not_empty(self, others: Sequence[str]) -> DestinationExistsError:
        what = f"the prefix is not empty: {first_few(others, limit=3)}"
        return DestinationExistsError(what, where=self.destination, hint="choose another prefix")

    def preview(self, sizes: Sequence[int]) -> tuple[int, Sequence[str]]:
        """Look whether it could begin, and say what writing files of these sizes takes and costs."""
        self._look()
        memory, held = self._settings.memory_bytes, sum(map(held_bytes_of, sizes))
        num_sampled = len(sizes) if self._settings.verify_all else min(len(sizes), _MAX_SAMPLED_FILES)
        return min(memory, held), (describe_writing(sizes, memory, num_sampled=num_sampled),)

    def passes(self, sizes: Sequence[int]) -> Sequence[range]:
        """Cut files into runs whose open parts fit into the memory that is allowed; see `SharedSink`."""
        return cut_passes(sizes, self._settings.memory_bytes)

    def check_space(self, needed_bytes: int) -> None:
        """Nobody knows how much a bucket takes."""

    # Files

    def create(self, file: str, nbytes: int, gaps: Iterable[tuple[int, int]] = ()) -> None:
        """Begin an object; nothing is sent yet."""
        if not is_plain_path(file) or file.startswith(_WORK):
            raise UnreadableError("a file name leads out of the destination", where=file)
        upload = Upload(self._bucket, self._key(file), nbytes, spare=self._spare_parts, gaps=gaps)
        with self._lock:
            self._uploads[file] = upload

    def _spare_parts(self) -> int:
        """Return how many parts of each open object may be on their way: memory is shared evenly."""
        with self._lock:
            held = sum(part_bytes_of(each.nbytes) for each in self._uploads.values() if each.stored is None)
        return self._settings.memory_bytes // max(1, held) - 1

    def write(self, file: str, offset: int, buffers: list[memoryview | bytes]) -> int:
        """Write `buffers`, one after the other, from `offset` on; return the number of bytes."""
        try:
            return self._uploads[file].write(offset, buffers)
        except CkptError as error:
            error.where = error.where or self._bucket.label(self._key(file))
            raise

    def sync(self, file: str) -> None:
        """Let the object appear, and read some of it back."""
        checked: Checked = "all" if self._settings.verify_all else "none"
        with self._lock:
            if self._num_sampled < _MAX_SAMPLED_FILES and checked == "none":
                self._num_sampled += 1
                checked = "sample"
        with self._sampling:
            self._uploads[file].close(checked)

    def read_into(self, file: str, offset: int, buffer: memoryview) -> bool:
        """Objects are written anew, unless a record says that they are there."""
        del file, offset, buffer
        return False

    def record(self, tensor: int, block: int, record: BlockRecord) -> None:
        """Nothing smaller than a pass is continued."""

    def identity(self, file: str) -> Mapping[str, object] | None:
        """Return size and ETag of an object that is there."""
        upload = self._uploads.get(file)
        try:
            stored = upload.stored if upload is not None else None
            stored = stored or self._bucket.head(self._key(file))
        except MissingObjectError:
            return None
        return {"nbytes": stored.nbytes, "etag": stored.etag}

    def write_document(self, file: str, content: bytes) -> None:
        """Write a small object."""
        self._documents[file] = content
        self._put(file, content)

    def _put(self, name: str, content: bytes) -> None:
        with sending(self._bucket, self._key(name)):
            self._bucket.put(self._key(name), content)

    def write_marker(self, file: str, content: bytes) -> None:
        """Keep the marker for `publish`."""
        self._marker = file, content

    # Records

    def put_record(self, name: str, content: bytes) -> None:
        """Write a record; see `SharedSink`."""
        self._put(_WORK + name, content)
        self._own_records.add(_WORK + name)
        self._num_records += 1

    def records_there(self) -> Mapping[str, bytes]:
        """Return the records of every part, by name."""
        names = [name for name in self._list(SHARED_DIRECTORY) if name.startswith(_WORK + RECORD_PREFIX)]
        with ThreadPoolExecutor(_THREADS) as threads:
            found = list(threads.map(self._read_record, names))
        return {
            name.removeprefix(_WORK): content for name, content in zip(names, found, strict=True) if content is not None
        }

    def _read_record(self, name: str) -> bytes | None:
        try:
            return self._bucket.get_whole(self._key(name), max_bytes=_MAX_RECORD_BYTES)[1]
        except MissingObjectError:  # a twin has finished and tidies up
            return None

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Let anybody publish: all write the same, and one puts the marker."""
        yield True

    # Ending

    @property
    def kept_in(self) -> str:
        """Where the claim and the records lie."""
        return f"{self.destination}/{SHARED_DIRECTORY}"

    @property
    def num_kept(self) -> int:
        """Records, and objects that are there or were begun."""
        return self._num_records + len(self._uploads) if self._claim is not None else 0

    def reader(self) -> Source:
        """Open the prefix with the marker that is not there yet."""
        below = ObjectSource(self._bucket)
        if self._marker is None:
            return below
        name, content = self._marker
        return VirtualSource(below, {name: VirtualFile.of(content)}, listed=True)

    def publish(self) -> None:
        """Put the marker, without which nothing here is a checkpoint, and remove what is known beside it."""
        there = self._list()
        for name, upload in self._uploads.items():
            self._check_there(name, there.get(name), upload.nbytes, upload.stored)
        for name, content in self._documents.items():
            self._check_there(name, there.get(name), len(content), None)
        sent = sum(each.nbytes for each in self._uploads.values())
        seen = sum(each.checked_bytes for each in self._uploads.values())
        if seen < sent:
            text = f"{format_size(sent - seen)} of {format_size(sent)} were not read back (use --verify-written all)"
            self.not_checked = (text,)
        with hold_signals():
            self._put_marker()
            self.is_published = self._is_over = True
            try:
                self._remove_work()
            except CkptError as error:
                self.notes += (f"{self.kept_in} could not be removed ({error.what}): it is no longer needed",)

    def _check_there(self, name: str, found: StoredObject | None, nbytes: int, stored: StoredObject | None) -> None:
        same = found is not None and found.nbytes == nbytes
        if same and found is not None and stored is not None and None not in (stored.etag, found.etag):
            same = stored.etag == found.etag
        if not same:
            what = "an object is gone, or is not the one that was written"
            hint = "another writer uses this prefix: stop it, then run the same command again"
            raise StorageError(what, where=self._bucket.label(self._key(name)), hint=hint)

    def _put_marker(self) -> None:
        claim = self.find_claim()
        if claim is not None and self._claim is not None:
            self._check_claim(claim, self._claim)
        if self._marker is None:
            return
        name, content = self._marker
        key = self._key(name)
        failed: StorageError | None = None
        try:
            if claim is not None:
                self._bucket.put(key, content, create=self._settings.needs_conditions)
                return
        except StorageError as error:
            failed = error
        # It may be there all the same: the answer was lost, or a twin was faster and has removed the claim.
        try:
            _, found = self._bucket.get_whole(key, max_bytes=len(content))
        except MissingObjectError:
            raise failed or StorageError("the claim is gone", where=f"{self.destination}/{_CLAIM}") from None
        except UnreadableError:  # longer
            found = b""
        if found != content:
            self._is_mine = False  # what was written may be theirs: nothing is removed
            what = "another conversion has published here"
            raise DestinationExistsError(what, where=self._bucket.label(key), hint="choose another prefix")

    def _remove_work(self) -> None:
        """Remove records, then the claim: without it they would be somebody else's."""
        names = self._own_records | (self._list(SHARED_DIRECTORY).keys() - {_CLAIM})
        with ThreadPoolExecutor(_THREADS) as threads:
            list(threads.map(lambda name: self._bucket.delete(self._key(name)), names))
        self._bucket.delete(self._key(_CLAIM))

    def keep(self) -> None:
        """Give up what is under way; the claim and finished files stay for the next run of the same command."""
        self._abort()
        self._is_over = True

    def _abort(self) -> None:
        def abort(upload: Upload) -> None:
            with contextlib.suppress(CkptError):  # the store forgets it by itself, where a rule says so
                upload.abort()

        with ThreadPoolExecutor(_THREADS) as threads:
            list(threads.map(abort, self._uploads.values()))

    def discard(self) -> None:
        """Remove what this run wrote, when nobody else has a part in it. Does nothing after `publish` or `keep`."""
        if self._is_over:
            return
        self._is_over = True
        self._abort()
        if self._claim is None:
            return
        with contextlib.suppress(CkptError):
            there = self.find_claim()
            if there is None:  # the same command, run elsewhere, has published: what is left there is of this run
                self._remove_work()
                return
            is_mine = self._is_mine and there.nonce == self._claim.nonce and there.num_parts == 1
            if not is_mine or _JOINED in self._list(SHARED_DIRECTORY):
                return
            for name in (*self._uploads, *self._documents):
                self._bucket.delete(self._key(name))
            self._remove_work()
