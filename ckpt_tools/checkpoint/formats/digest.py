"""Digests over logical bytes: xxh3_128 of the concatenated xxh3_128 digests of canonical blocks.

Equal for every format that holds the same tensor, computable block by block in any order.
"""

from __future__ import annotations

import xxhash

from ckpt_tools.checkpoint.formats.manifest import BLOCK_BYTES
from ckpt_tools.checkpoint.layout import split_blocks


def digest_block(content: bytes | memoryview) -> bytes:
    """Return the digest of one block."""
    return xxhash.xxh3_128_digest(content)


def digest_tensor(block_digests: bytes | bytearray) -> str:
    """Return a tensor's digest, hexadecimal, from its blocks' digests in order."""
    return xxhash.xxh3_128_hexdigest(bytes(block_digests))


def digest_bytes(content: bytes) -> str:
    """Return the digest of `content` as a 1-d U8 tensor."""
    blocks = split_blocks((len(content),), 8, block_bytes=BLOCK_BYTES)
    view = memoryview(content)
    parts = (digest_block(view[b.offsets[0] : b.offsets[0] + b.sizes[0]]) for b in blocks)
    return digest_tensor(b"".join(parts))
