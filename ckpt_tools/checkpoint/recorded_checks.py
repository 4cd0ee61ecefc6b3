"""What a source records of its own bytes, and what became of each record: held, failed, or not held because."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ckpt_tools.errors import UnreadableError

KINDS = {"digests": "digest", "crcs": "CRC-32", "sizes": "file size", "shapes": "shape"}
LEFT_OUT, IN_PART = "their tensors are left out", "not all of it was read"


@dataclass(slots=True)
class Ledger:
    """Counts witnesses by kind; one that fails is an error."""

    held: Counter[str] = field(default_factory=Counter)
    missed: Counter[tuple[str, str]] = field(default_factory=Counter)  # (kind, why) → how many were not held

    def compare(self, kind: str, name: str, found: object, recorded: object, root: str) -> None:
        """Enter what a manifest records, or raise UnreadableError; `found` is None where not all was read."""
        if found is None:
            self.missed[kind, IN_PART] += 1
        elif found == recorded:
            self.held[kind] += 1
        else:
            what = f"{name} is not what the manifest recorded: its {KINDS[kind]} is {found}, recorded was {recorded}"
            hint = "`ckpt verify` lists all that is wrong; restore it, or remove an outdated manifest"
            raise UnreadableError(what, where=root, hint=hint)

    def count_crcs(self, held: int, recorded: int) -> None:
        """Enter CRC-32s of chunks."""
        self.held["crcs"] += held
        self.missed["crcs", IN_PART] += recorded - held

    @property
    def is_whole(self) -> bool:
        """Was every witness held of what was taken?"""
        return all(why == LEFT_OUT for _, why in +self.missed)

    @property
    def checked(self) -> dict[str, int]:
        """How many witnesses of each kind were held."""
        return {kind: self.held[kind] for kind in KINDS}

    @property
    def not_checked(self) -> tuple[str, ...]:
        """What was not held, and why, in words."""
        rows = (+self.missed).items()
        return tuple(f"{n} recorded {KINDS[kind]}{'s'[: n > 1]}: unchecked, because {why}" for (kind, why), n in rows)
