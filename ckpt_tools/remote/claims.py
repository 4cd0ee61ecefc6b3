"""Say whose a prefix is while it is built: one small object, made where there is none, that everybody can read.

It is no lock and has no lease. Runs of one fingerprint write the same bytes and are welcome; others are refused.
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from typing import Any, Self

from ckpt_tools._version import __version__
from ckpt_tools.errors import DestinationExistsError, StorageError
from ckpt_tools.remote.store import Bucket, ExistingObjectError, MissingObjectError
from ckpt_tools.text import escape_name

_MAX_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What is being built, and who began."""

    fingerprint: str
    parts: int
    version: str
    host: str
    pid: int
    time: str
    nonce: str

    @classmethod
    def new(cls, fingerprint: str, num_parts: int) -> Self:
        """Return a claim of this process."""
        return cls(
            fingerprint=fingerprint,
            parts=num_parts,
            version=__version__,
            host=socket.gethostname(),
            pid=os.getpid(),
            time=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            nonce=uuid.uuid4().hex,
        )

    def encode(self) -> bytes:
        """Return it as JSON."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    def check_same(self, other: Claim, destination: str) -> None:
        """Raise DestinationExistsError unless `other` builds the same, in as many parts."""
        began = f"begun {other.time} by {other.host}"
        if other.fingerprint != self.fingerprint:
            raise DestinationExistsError(
                f"another conversion is writing here ({other.parts} parts, {began})",
                where=destination,
                hint="wait, or choose another prefix; if it has ended for good, remove everything below this one",
            )
        if other.parts != self.parts:
            raise DestinationExistsError(
                f"this conversion is under way in {other.parts} parts, not {self.parts} ({began})",
                where=destination,
                hint=f"use --part I/{other.parts}" if other.parts > 1 else "run it without --part",
            )


def read_claim(bucket: Bucket, key: str, destination: str) -> Claim | None:
    """Return the claim that is there, if any.

    Raises:
        DestinationExistsError: There is something else.
    """
    try:
        _, content = bucket.get_whole(key, max_bytes=_MAX_BYTES)
    except MissingObjectError:
        return None
    try:
        found = json.loads(content)
        values = {field.name: found[field.name] for field in fields(Claim)}
        if all(type(values[field.name]).__name__ == field.type for field in fields(Claim)):
            shown: Any = {name: escape_name(v) if isinstance(v, str) else v for name, v in values.items()}
            return Claim(**shown)
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    raise DestinationExistsError(
        "something is being written here that this version of ckpt does not know",
        where=destination,
        hint="choose another prefix",
    )


def take_claim(bucket: Bucket, key: str, mine: Claim, destination: str) -> tuple[Claim, bool]:
    """Make the claim where there is none; return the one that is there, and whether the store keeps conditions.

    Raises:
        DestinationExistsError: Somebody else is building something here, or the same in another number of parts.
        StorageError: The store cannot be reached.
    """
    found = read_claim(bucket, key, destination)
    if found is None:
        try:
            bucket.put(key, mine.encode(), create=True)
            found = mine
        except StorageError:
            # "It exists" can be one's own, whose answer was lost; so can any other failure.
            found = read_claim(bucket, key, destination)
            if found is None:
                raise
    mine.check_same(found, destination)
    try:
        bucket.put(key, found.encode(), create=True)
    except ExistingObjectError:
        return found, True
    return found, False
