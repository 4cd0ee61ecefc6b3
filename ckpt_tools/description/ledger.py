"""What a source records of its own bytes, and what became of each record: held, failed, or not held because."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ckpt_tools.errors import UnreadableError

KINDS = {"digests": "digest", "crcs": "CRC-32", "sizes": "file size", "shapes": "shape"}
LEFT_OUT = "their tensors are left out"
"""The one reason that says nothing of the result."""


@dataclass(slots=True)
class Ledger:
    """Counts witnesses by kind. One that fails is an error; one that nobody has settled is not held."""

    registered: Counter[str] = field(default_factory=Counter)
    held: Counter[str] = field(default_factory=Counter)
    missed: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(kind, why) → how many were not held."""

    def compare(self, kind: str, name: str, found: object, recorded: object, root: str) -> None:
        """Register what a manifest records, and settle it unless `found` is None.

        Raises:
            UnreadableError: It is something else.
        """
        self.registered[kind] += 1
        if found is not None and found != recorded:
            raise UnreadableError(
                f"{name} is not what the manifest recorded: its {KINDS[kind]} is {found}, recorded was {recorded}",
                where=root,
                hint="`ckpt verify` lists everything that is wrong; restore the checkpoint, or if a trainer has saved "
                "over it on purpose, remove ckpt_manifest.json",
            )
        self.held[kind] += found is not None

    def miss(self, kind: str, why: str, count: int) -> None:
        """Register witnesses that cannot be held."""
        self.registered[kind] += count
        self.missed[kind, why] += count

    def add(self, other: Ledger) -> None:
        """Take over the entries of another source or part."""
        self.registered += other.registered
        self.held += other.held
        self.missed += other.missed

    @property
    def checked(self) -> dict[str, int]:
        """How many witnesses of each kind were held."""
        return {kind: self.held[kind] for kind in KINDS}

    @property
    def is_whole(self) -> bool:
        """Was every witness held of what was taken?"""
        return all(why == LEFT_OUT for _, why in self._not_held())

    @property
    def not_checked(self) -> tuple[str, ...]:
        """What was not held, and why, in words."""
        rows = ((count, self.registered[kind], KINDS[kind], why) for (kind, why), count in self._not_held().items())
        return tuple(
            f"{count} of {total} recorded {kind}s: not held, because {why}" for count, total, kind, why in rows
        )

    def _not_held(self) -> Counter[tuple[str, str]]:
        rest = self.registered - self.held
        rest.subtract(kind for kind, _ in self.missed.elements())
        return self.missed + Counter({(kind, "not all of it was read"): count for kind, count in rest.items()})
