"""The sidecar: what is written is read back; anything else is refused."""

import json
import math

import pytest

from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.checkpoint.formats.manifest import (
    FileRecord,
    Manifest,
    Origin,
    TensorRecord,
    build_manifest,
    parse_manifest,
)
from ckpt_tools.checkpoint.layout import Mesh, Replicate, Shard
from ckpt_tools.errors import UnreadableError

MANIFEST = Manifest(
    writer="ckpt 1",
    format="dcp",
    mesh=Mesh((("dp_shard", 2), ("tp", 2))),
    tensors={
        "a.\u00fc": TensorRecord(
            dtype=BY_NAME["BF16"], shape=(4, 2), digest="0" * 32, placements={"dp_shard": Shard(0), "tp": Replicate()}
        ),
        'b"\n': TensorRecord(dtype=BY_NAME["F4"], shape=(), digest="1" * 32),
    },
    blobs={"../any/name": FileRecord(nbytes=3, digest="2" * 32)},
    assets={"sub/config.json": FileRecord(nbytes=0, digest="3" * 32)},
    documents={".metadata": FileRecord(nbytes=7, digest="4" * 32)},
    files={"__0_0.distcp": 1 << 40},
    source={"name": "base", "format": "hf", "files": {"x": {"nbytes": 1, "mtime_ns": 2}}},
    origin=Origin(
        headers={"m.safetensors": '{"a": 1}  '},
        index_name="m.safetensors.index.json",
        index_text="{}\n",
        prefix="model.",
    ),
)


def test_manifest_is_read_back() -> None:
    for manifest in (MANIFEST, Manifest(writer="w", format="hf", mesh=None, tensors={})):
        assert parse_manifest(build_manifest(manifest)) == manifest


def test_manifest_is_json_with_a_line_per_key() -> None:
    text = build_manifest(MANIFEST)
    document = json.loads(text)
    assert document["schema_version"] == 1
    assert document["mesh"] == [["dp_shard", 2], ["tp", 2]]
    assert len(text.splitlines()) == len(document) + 2
    assert list(document)[-1] == "checksum"


@pytest.mark.parametrize("cut", [0, 1, 10, 200, -1, -3, -40])
def test_manifest_truncated_is_refused(cut: int) -> None:
    with pytest.raises(UnreadableError, match="checksum"):
        parse_manifest(build_manifest(MANIFEST)[:cut])


def test_manifest_with_any_byte_changed_or_something_after_it_is_refused() -> None:
    text = build_manifest(MANIFEST)
    for offset in range(len(text)):
        changed = bytearray(text)
        changed[offset] ^= 2
        with pytest.raises(UnreadableError):
            parse_manifest(bytes(changed))
    for more in (b"\n", b" ", b"{}", b'"checksum": ""'):
        with pytest.raises(UnreadableError):
            parse_manifest(text + more)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_manifest_numbers_that_json_lacks_are_refused(value: float, tmp_path) -> None:
    from corrupt import damage

    (tmp_path / damage.MANIFEST).write_bytes(build_manifest(MANIFEST))
    damage.edit_manifest(tmp_path, lambda document: document["files"].update(x=value))
    with pytest.raises(UnreadableError, match="manifest is"):
        parse_manifest((tmp_path / damage.MANIFEST).read_bytes())
