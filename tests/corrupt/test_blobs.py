"""Non-tensor items of a stock checkpoint: their zip records have CRC-32s, so damage is found without unpickling."""

from __future__ import annotations

import io
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from corrupt import damage
from samples import content, without_ranks

from ckpt_tools import api
from ckpt_tools.checkpoint.entries import BlobEntry, ByteSpan
from ckpt_tools.checkpoint.formats.dcp_metadata import build_metadata, parse_metadata
from ckpt_tools.checkpoint.formats.torch_zip import check_archive
from ckpt_tools.errors import UnreadableError

STATE = {"w": torch.arange(12.0).reshape(3, 4), "step": {"epoch": 3, "rng": torch.arange(40), "name": "x" * 50}}
NO_PICKLE = "not a pickle of protocol 2 or later: it does not begin with PROTO"
NAMES = "1 name that .metadata stores only once"
VALUES = "whether the values are finite (use --level values)"


def saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def check(item: bytes) -> bool:
    return check_archive(len(item), lambda offset, nbytes: item[offset : offset + nbytes])


@pytest.fixture
def stock(tmp_path: Path) -> Path:
    with without_ranks():
        dcp.save(STATE, checkpoint_id=tmp_path / "stock", no_dist=True)
    return tmp_path / "stock"


def test_blob_of_torch_save_is_checked_whole() -> None:
    assert check(saved(STATE["step"]))
    assert check(saved([torch.ones(3) for _ in range(200)]))  # more records than a tensor's item may have


def test_blob_with_any_record_byte_flipped_is_damaged() -> None:
    item = saved(STATE["step"])
    with zipfile.ZipFile(io.BytesIO(item)) as archive:
        offsets = [
            info.header_offset + 30 + len(info.filename.encode()) + int.from_bytes(item[at : at + 2], "little") + i
            for info in archive.infolist()
            for at in [info.header_offset + 28]
            for i in range(info.file_size)
        ]
    assert len(offsets) > 500
    for offset in offsets:
        with pytest.raises(UnreadableError, match="is damaged: its CRC-32 differs"):
            check(item[:offset] + bytes([item[offset] ^ 1]) + item[offset + 1 :])


@pytest.mark.parametrize("item", [b"", b"PK\3", content(100), b"\x80\x02N."])
def test_blob_that_is_no_zip_is_not_checked(item: bytes) -> None:
    assert not check(item)


@pytest.mark.parametrize("item", [b"PK\3\4" + content(100), content(100) + b"PK\5\6" + bytes(18), saved(1)[:-1]])
def test_blob_that_is_half_a_zip_is_refused(item: bytes) -> None:
    with pytest.raises(UnreadableError):
        check(item)


def test_blob_without_crcs_is_not_checked() -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        assert not check(saved(torch.arange(40)))
    finally:
        torch.serialization.set_crc32_options(before)


def test_stock_checkpoint_with_damaged_blob_is_damaged_item(stock: Path) -> None:
    assert api.verify(stock).not_checked == (VALUES, NAMES)
    assert api.verify(stock, level="values").not_checked == (NAMES,)
    blob = next(blob for blob in api.open_checkpoint(stock).blobs if blob.fqn == "step.name")
    raw = (stock / blob.span.file).read_bytes()
    damage.flip(stock / blob.span.file, raw.index(b"x" * 50))
    result = api.verify(stock)
    assert [(finding.code, finding.severity) for finding in result.findings] == [("damaged-item", "error")]
    assert "step.name" in result.findings[0].what
    assert api.verify(stock, level="structure").not_checked == (
        "the bytes of the tensors (use --level data)",
        "what 2 non-tensor items hold (use --level data)",
        NAMES,
    )


def test_stock_checkpoint_with_a_blob_that_is_no_zip_says_so(tmp_path: Path, stock: Path) -> None:
    (stock / "free.distcp").write_bytes(b"free form")
    parsed = parse_metadata((stock / ".metadata").read_bytes())
    blob = BlobEntry(fqn="free", span=ByteSpan(file="free.distcp", offset=0, nbytes=9))
    (stock / ".metadata").write_bytes(build_metadata(parsed.tensors, (*parsed.blobs, blob)))
    result = api.verify(stock)
    assert result.ok
    assert result.not_checked == (
        f"what 1 of {len(parsed.blobs) + 1} non-tensor items hold, which have no checksum",
        f"what non-tensor items mean, beyond their bytes: free (not known: {NO_PICKLE})",
        VALUES,
        NAMES.replace("of 4", "of 5"),
    )
    # What --against compares bit for bit are tensors.
    shutil.copytree(stock, tmp_path / "copy")
    told = f"against the reference: free: an object that is not read: {NO_PICKLE}"
    assert api.verify(stock, against=tmp_path / "copy").not_checked == (*result.not_checked, told)
