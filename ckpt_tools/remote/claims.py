"""Say whose a prefix is while it is built: one small object, made where there is none, that everybody can read.

It is no lock and has no lease. Runs of one fingerprint write the same bytes and are welcome; others are refused.
"""

from __future__ import annotations

from ckpt_tools.errors import StorageError
from ckpt_tools.remote.store import Bucket, ExistingObjectError, MissingObjectError
from ckpt_tools.storage.joined import MAX_CLAIM_BYTES, Claim


def find_claim(bucket: Bucket, key: str) -> Claim | None:
    """Return the claim that is there, if any."""
    try:
        _, content = bucket.get_whole(key, max_bytes=MAX_CLAIM_BYTES)
    except MissingObjectError:
        return None
    return Claim.parse(content, where=bucket.label(key))


def take_claim(bucket: Bucket, key: str, mine: Claim, destination: str, *, conditional: bool) -> tuple[Claim, bool]:
    """Make the claim where there is none; return the one that is there, and whether the store keeps conditions.

    Without `conditional`, the store is not asked for conditions, and nothing is known of them.
    """
    found = find_claim(bucket, key)
    if found is None:
        try:
            bucket.put(key, mine.build(), create=conditional)
            found = mine
        except StorageError:
            # "It exists" can be one's own, whose answer was lost; so can any other failure.
            found = find_claim(bucket, key)
            if found is None:
                raise
    found.check(mine.fingerprint, mine.num_parts, where=destination, directory=destination)
    if conditional:
        try:
            bucket.put(key, found.build(), create=True)
        except ExistingObjectError:
            return found, True
    return found, False
