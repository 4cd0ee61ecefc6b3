"""Digests: fixed by the manifest's schema, equal whatever the layout."""

import xxhash
from samples import content, small_blocks

from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.checkpoint.formats.digest import digest_block, digest_bytes, digest_tensor
from ckpt_tools.transfer.plan import blocks_of


def test_digest_of_nothing_is_fixed() -> None:
    assert digest_bytes(b"") == xxhash.xxh3_128_hexdigest(b"")
    assert digest_bytes(b"") == "99aa06d3014798d86001c324468d497f"


def test_digest_of_one_block_is_the_hash_of_its_hash() -> None:
    raw = content(1000)
    assert digest_bytes(raw) == xxhash.xxh3_128_hexdigest(xxhash.xxh3_128_digest(raw))


def test_digest_of_two_blocks_hashes_both_in_order() -> None:
    raw = content((4 << 20) + 5)
    parts = [raw[: 4 << 20], raw[4 << 20 :]]
    assert digest_bytes(raw) == xxhash.xxh3_128_hexdigest(b"".join(map(xxhash.xxh3_128_digest, parts)))


def test_digest_changes_with_any_byte_and_with_order() -> None:
    with small_blocks(64):
        raw = content(256)
        seen = {digest_bytes(raw)}
        for i in range(256):
            changed = bytearray(raw)
            changed[i] ^= 1
            seen.add(digest_bytes(bytes(changed)))
        seen.add(digest_bytes(raw[64:128] + raw[:64] + raw[128:]))
        assert len(seen) == 258


def test_digest_of_a_block_takes_memoryviews() -> None:
    assert digest_block(memoryview(b"abc")) == digest_block(b"abc")
    assert digest_tensor(bytearray(digest_block(b"abc"))) == digest_bytes(b"abc")


def test_blocks_depend_on_shape_and_width_alone() -> None:
    shape = (1000, 3000)
    one, other = (
        TensorEntry(fqn=name, dtype=BY_NAME[dtype], shape=shape, chunks=())
        for name, dtype in (("a", "F32"), ("b", "I32"))
    )
    assert list(blocks_of(one, one.dtype)) == list(blocks_of(other, other.dtype))
    assert len(blocks_of(one, one.dtype)) == 3  # 349 rows of 12,000 bytes fit into 4 MiB
