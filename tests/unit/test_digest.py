"""Digests: fixed by the manifest's schema, equal whatever the layout."""

import xxhash
from samples import content

from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.checkpoint.formats.digest import digest_bytes
from ckpt_tools.transfer.plan import blocks_of


def test_digest_is_the_hash_of_the_hashes_of_blocks_in_order() -> None:
    assert digest_bytes(b"") == xxhash.xxh3_128_hexdigest(b"") == "99aa06d3014798d86001c324468d497f"
    raw = content((4 << 20) + 5)
    for blocks in ([raw[:1000]], [raw[: 4 << 20], raw[4 << 20 :]]):
        digests = b"".join(map(xxhash.xxh3_128_digest, blocks))
        assert digest_bytes(b"".join(blocks)) == xxhash.xxh3_128_hexdigest(digests)


def test_blocks_depend_on_shape_and_width_alone() -> None:
    shape = (1000, 3000)
    one, other = (
        TensorEntry(fqn=name, dtype=BY_NAME[dtype], shape=shape, chunks=())
        for name, dtype in (("a", "F32"), ("b", "I32"))
    )
    assert list(blocks_of(one, one.dtype)) == list(blocks_of(other, other.dtype))
    assert len(blocks_of(one, one.dtype)) == 3  # 349 rows of 12,000 bytes fit into 4 MiB
