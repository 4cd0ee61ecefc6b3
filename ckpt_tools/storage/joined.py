"""The claim of a destination that several processes build together: what every one of them must agree on."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from typing import Any

from ckpt_tools._version import __version__
from ckpt_tools.errors import DestinationExistsError, StorageError

SHARED_DIRECTORY = ".ckpt"
"""Holds the claim and the records, beside the files; hidden from whoever looks for a checkpoint."""
CLAIM_NAME = "claim"
RECORD_PREFIX = "share-"
MAX_CLAIM_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildClaim:
    """Who began to build here, and what."""

    fingerprint: str
    num_parts: int
    version: str = __version__
    host: str = ""
    pid: int = 0
    time: float = 0.0  # Seconds since 1970
    nonce: str = ""  # Tells this claim from any other
    command: str = ""  # What builds it, in JSON, for whoever comes to publish it; "" where that cannot be said

    @classmethod
    def new(cls, fingerprint: str, num_parts: int, command: str = "") -> BuildClaim:
        """Return a claim of this process."""
        here: dict[str, Any] = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}
        return cls(fingerprint=fingerprint, num_parts=num_parts, nonce=os.urandom(8).hex(), command=command, **here)

    @classmethod
    def parse(cls, content: bytes, *, where: str) -> BuildClaim:
        """Return the claim that a document states."""
        try:
            if len(content) > MAX_CLAIM_BYTES:
                raise ValueError  # noqa: TRY301 - one way to be no claim
            document = json.loads(content)
            claim = cls(**{name: document[name] for name in cls.__slots__})
            kinds = (str, int, str, str, int, float, str, str)
            is_one = all(map(isinstance, (getattr(claim, name) for name in cls.__slots__), kinds))
        except (ValueError, TypeError, KeyError, RecursionError):
            is_one = False
        if not is_one:
            what = "what several processes had begun here cannot be recognised"
            raise StorageError(what, where=where, hint="remove the directory if nothing in it is needed")
        return claim

    def build(self) -> bytes:
        """Return the document."""
        return json.dumps(asdict(self)).encode() + b"\n"

    def describe(self) -> str:
        """Say who began what: "64 parts, started 14:02 by host-3"."""
        started = time.localtime(self.time)
        today = time.strftime("%F", started) == time.strftime("%F")
        parts = f"{self.num_parts} part" + ("s" if self.num_parts != 1 else "")
        return f"{parts}, started {time.strftime('%H:%M' if today else '%F %H:%M', started)} by {self.host}"

    def check(self, fingerprint: str | None, num_parts: int, *, where: str, directory: str) -> None:
        """Raise DestinationExistsError unless the claim is of this conversion in so many parts."""
        if (self.fingerprint, self.num_parts) == (fingerprint, num_parts):
            return
        if self.fingerprint == fingerprint:
            what = f"this conversion is under way here in {self.num_parts} parts, not {num_parts} ({self.describe()})"
            hint = f"run it with --part I/{self.num_parts}, or remove {directory} to begin again"
            raise DestinationExistsError(what, where=where, hint=hint)
        what = f"another conversion is under way here ({self.describe()}): other arguments, or the source has changed"
        hint = f"wait, choose another destination, or remove {directory} if it has ended"
        raise DestinationExistsError(what, where=where, hint=hint)
