"""Damaged DCP directories: every damage has its code, and nothing is made of it."""

from __future__ import annotations

import json
import shutil
import struct
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from corrupt import damage
from samples import MODEL, content, files_of, shard_model, tensor

from ckpt_tools import api
from ckpt_tools.cli import main
from ckpt_tools.description.dtypes import BY_NAME
from ckpt_tools.description.layout import Box
from ckpt_tools.formats.dcp_metadata import build_metadata
from ckpt_tools.formats.torch_zip import item_frame

UP = "model.layers.0.up.weight"
EMBED = "model.embed.weight"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return shard_model(tmp_path)


# Files


@pytest.mark.parametrize("manifest", [True, False])
def test_distcp_truncated_is_short_file(run: Path, refuses, manifest: bool) -> None:
    if not manifest:
        damage.forget_manifest(run)
    damage.truncate(run / "__1_0.distcp", 1)
    said = refuses(run, finding="short-file")
    assert "__1_0.distcp" in said


def test_distcp_extended_is_long_file(run: Path, capsys) -> None:
    with (run / "__1_0.distcp").open("ab") as file:
        file.write(b"more")
    assert main(["verify", str(run), "--json"]) == 3
    assert {f["code"] for f in json.loads(capsys.readouterr().out)["findings"]} == {"long-file"}


@pytest.mark.parametrize("manifest", [True, False])
def test_distcp_missing_is_missing_file(run: Path, refuses, manifest: bool) -> None:
    if not manifest:
        damage.forget_manifest(run)
    (run / "__1_0.distcp").unlink()
    said = refuses(run, finding="missing-file")
    assert "__1_0.distcp" in said


def test_distcp_empty_is_short_file(run: Path, refuses) -> None:
    (run / "__0_0.distcp").write_bytes(b"")
    refuses(run, finding="short-file")


def test_distcp_is_a_directory_is_missing_file(run: Path, refuses) -> None:
    (run / "__0_0.distcp").unlink()
    (run / "__0_0.distcp").mkdir()
    refuses(run, finding="missing-file")


def test_distcp_swapped_of_unlike_items_is_found(run: Path, refuses) -> None:
    damage.swap(run / "__0_0.distcp", run / "__1_0.distcp")
    refuses(run, finding="short-file")


def test_distcp_swapped_of_equal_size_is_digest_mismatch(tmp_path: Path, refuses) -> None:
    run = shard_model(tmp_path, tensors={"w": tensor("F32", 8, 4), "v": tensor("U8", 16)})
    damage.swap(run / "__0_0.distcp", run / "__1_0.distcp")
    refuses(run, finding="digest-mismatch")


def test_distcp_random_bytes_is_bad_item(run: Path, refuses) -> None:
    path = run / "__0_0.distcp"
    path.write_bytes(content(path.stat().st_size))
    refuses(run, finding="bad-item")
    damage.forget_manifest(run)
    refuses(run, finding="bad-item")


def test_metadata_missing_is_named_as_a_killed_save(run: Path, refuses) -> None:
    (run / ".metadata").unlink()
    assert "killed" in refuses(run, finding=None)


@pytest.mark.parametrize("raw", [b"", b"\x80", content(500), b"\x80\x04" + content(500, 1), b"\xff" * 40])
def test_metadata_replaced_by_noise_is_unreadable(run: Path, refuses, raw: bytes) -> None:
    (run / ".metadata").write_bytes(raw)
    refuses(run, finding=None)


def test_metadata_truncated_is_unreadable(run: Path, refuses) -> None:
    damage.truncate(run / ".metadata", 10)
    refuses(run, finding=None)


def test_metadata_symlink_out_of_the_root_is_refused(run: Path, tmp_path: Path, refuses) -> None:
    (run / ".metadata").rename(tmp_path / "elsewhere")
    (run / ".metadata").symlink_to(tmp_path / "elsewhere")
    assert "leads out" in refuses(run, finding=None)


def test_distcp_symlink_out_of_the_root_is_refused(run: Path, tmp_path: Path, refuses) -> None:
    (run / "__0_0.distcp").rename(tmp_path / "elsewhere")
    (run / "__0_0.distcp").symlink_to(tmp_path / "elsewhere")
    assert "leads out" in refuses(run, finding="bad-item")


def test_foreign_distcp_is_a_warning_and_does_not_matter(run: Path, tmp_path: Path, capsys) -> None:
    (run / "__7_0.distcp").write_bytes(content(100))
    assert main(["verify", str(run), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [(f["code"], f["severity"]) for f in document["findings"]] == [("unreferenced-file", "warning")]
    assert main(["gather", str(run), str(tmp_path / "out"), "-q"]) == 0
    assert files_of(tmp_path / "out") == files_of(tmp_path / "model")


# Bits


@pytest.mark.parametrize("manifest", [True, False])
@pytest.mark.parametrize("fqn", [EMBED, UP, "model.step"])
def test_payload_bit_flipped_is_damaged_data(run: Path, refuses, fqn: str, manifest: bool) -> None:
    if not manifest:
        damage.forget_manifest(run)
    path, offset = damage.payload_offset(run, fqn)
    damage.flip(path, offset + 5)
    said = refuses(run, finding="damaged-data")
    assert fqn in said
    assert "CRC-32" in said


def test_payload_bit_flipped_of_one_tensor_leaves_others_convertible(run: Path, tmp_path: Path) -> None:
    path, offset = damage.payload_offset(run, UP)
    damage.flip(path, offset)
    assert main(["gather", str(run), str(tmp_path / "out"), "--exclude", UP, "-q"]) == 0
    assert len(api.open_checkpoint(tmp_path / "out").tensors) == len(MODEL) - 1


def test_item_with_wrong_crc_on_purpose_is_found_by_the_digest(run: Path, refuses) -> None:
    path = run / damage.item_span(run, EMBED).file
    entry = next(e for e in api.open_checkpoint(run).tensors if e.fqn == EMBED)
    span, box = entry.chunks[0].span, entry.chunks[0].box
    frame = item_frame(entry.dtype, box.sizes)
    payload = content(frame.payload_nbytes, 77)
    before, after = frame.seal(zlib.crc32(payload))
    raw = bytearray(path.read_bytes())
    raw[span.offset : span.offset + span.nbytes] = before + payload + after
    path.write_bytes(raw)
    refuses(run, finding="digest-mismatch")


@pytest.mark.parametrize("offset", [0, 40, 100, -1, -20, -60])
def test_item_frame_bit_flipped_is_bad_item(run: Path, refuses, offset: int) -> None:
    span = damage.item_span(run, UP)
    at = span.offset + (offset if offset >= 0 else span.nbytes + offset)
    damage.flip(run / span.file, at, 0x55)
    refuses(run, finding="bad-item", conversions=("gather", "reshard") if offset != -60 else ())


def test_manifest_bit_flipped_is_unreadable(run: Path, refuses) -> None:
    damage.flip(run / damage.MANIFEST, 300)
    assert "checksum" in refuses(run, finding=None)


@pytest.mark.parametrize("raw", [b"", b"{}", b"\xff\xfe", b"[1]", b'{"schema_version": 1}'])
def test_manifest_replaced_is_unreadable(run: Path, refuses, raw: bytes) -> None:
    (run / damage.MANIFEST).write_bytes(raw)
    refuses(run, finding=None)


def test_manifest_of_a_newer_schema_is_unreadable(run: Path, refuses) -> None:
    damage.edit_manifest(run, lambda document: document.update(schema_version=2))
    assert "newer" in refuses(run, finding=None)


@pytest.mark.parametrize(
    "edit",
    [
        lambda d: d["tensors"][UP].update(shape=[-1, 8]),
        lambda d: d["tensors"][UP].update(shape="16"),
        lambda d: d["tensors"][UP].update(dtype="F128"),
        lambda d: d["tensors"][UP].update(digest=7),
        lambda d: d["tensors"][UP].update(placements={"dp_shard": "S(x)"}),
        lambda d: d.update(tensors=[]),
        lambda d: d.update(mesh=[["dp_shard", 0]]),
        lambda d: d.update(mesh=[["dp_shard", "2"]]),
        lambda d: d.pop("origin"),
        lambda d: d["origin"].update(index_name="../../victim"),
        lambda d: d["origin"].update(headers={"/etc/victim": "{}"}),
        lambda d: d.update(files={"a": -1}),
        lambda d: d.update(assets={"a": {}}),
    ],
)
def test_manifest_malformed_is_unreadable(run: Path, refuses, edit) -> None:
    damage.edit_manifest(run, edit)
    refuses(run, finding=None)


@pytest.mark.parametrize("table", ["assets", "documents", "files"])
@pytest.mark.parametrize("name", ["../victim", "{tmp}/victim", "a/../../victim", "", "a\0b"])
def test_manifest_name_leading_out_is_unreadable(run: Path, tmp_path: Path, refuses, table: str, name: str) -> None:
    record = {"nbytes": 6, "digest": "00" * 16}
    name = name.format(tmp=tmp_path)
    damage.edit_manifest(run, lambda d: d[table].update({name: 6 if table == "files" else record}))
    refuses(run, finding=None)
    assert not (tmp_path / "victim").exists()


def test_manifest_of_other_tensors_is_manifest_mismatch(run: Path, refuses) -> None:
    def edit(document: dict) -> None:
        document["tensors"]["model.ghost"] = document["tensors"].pop("model.step")

    damage.edit_manifest(run, edit)
    refuses(run, finding="manifest-mismatch", conversions=())


def test_manifest_of_other_bytes_is_digest_mismatch(run: Path, refuses) -> None:
    damage.edit_manifest(run, lambda d: d["tensors"][UP].update(digest="0" * 32))
    refuses(run, finding="digest-mismatch")


def test_manifest_gone_leaves_what_dcp_itself_has(run: Path, tmp_path: Path) -> None:
    damage.forget_manifest(run)
    result = api.verify(run)
    assert result.ok
    assert main(["gather", str(run), str(tmp_path / "out"), "-q", "--strip-prefix", "none"]) == 0
    assert api.diff(tmp_path / "out", tmp_path / "model").equal


# Metadata that lies


def test_chunks_halved_is_incomplete_tensor(run: Path, refuses) -> None:
    damage.forget_manifest(run)
    damage.edit_chunks(run, UP, lambda chunks: chunks[:1])
    said = refuses(run, finding="incomplete-tensor")
    assert "rows 8..16 of 16" in said


def test_chunks_gone_is_incomplete_tensor(run: Path, refuses) -> None:
    damage.forget_manifest(run)
    damage.edit_chunks(run, UP, lambda chunks: ())
    refuses(run, finding="incomplete-tensor")


def test_size_claimed_huge_is_incomplete_tensor(run: Path, refuses) -> None:
    damage.forget_manifest(run)
    damage.edit_metadata(run, lambda e: replace(e, shape=(100_000_000, 8)) if e.fqn == EMBED else e)
    refuses(run, finding="incomplete-tensor")


def test_size_claimed_small_is_chunk_outside_tensor(run: Path, refuses) -> None:
    damage.forget_manifest(run)
    damage.edit_metadata(run, lambda e: replace(e, shape=(3, 8)) if e.fqn == EMBED else e)
    refuses(run, finding="chunk-outside-tensor")


def test_chunks_overlapping_is_overlapping_chunks(run: Path, refuses) -> None:
    damage.forget_manifest(run)

    def edit(chunks):
        return (chunks[0], replace(chunks[1], box=Box((4, 0), (8, 8))))

    damage.edit_chunks(run, UP, edit)
    damage.edit_metadata(run, lambda e: replace(e, shape=(12, 8)) if e.fqn == UP else e)
    refuses(run, finding="overlapping-chunks")


def test_spans_overlapping_is_overlapping_spans(run: Path, refuses) -> None:
    damage.forget_manifest(run)
    other = damage.item_span(run, EMBED)

    def edit(chunks):
        span = chunks[0].span
        return (replace(chunks[0], span=replace(span, offset=other.offset + 64)), *chunks[1:])

    damage.edit_chunks(run, UP, edit)
    refuses(run, finding="overlapping-spans")


def test_spans_of_two_tensors_equal_is_a_tie_when_they_are_alike(tmp_path: Path) -> None:
    run = shard_model(tmp_path, "dp_shard=1", {"a": tensor("F32", 4, seed=1)})
    damage.forget_manifest(run)
    (entry,) = api.open_checkpoint(run).tensors
    (run / ".metadata").write_bytes(build_metadata((entry, replace(entry, fqn="b", path=())), ()))
    assert api.verify(run).findings == ()


@pytest.mark.parametrize("mesh", ["dp_shard=1", "dp_shard=2"])
def test_tensor_with_the_place_of_another_is_shared_item(tmp_path: Path, refuses, mesh: str) -> None:
    run = shard_model(tmp_path, mesh, {"a": tensor("F32", 4, seed=1), "b": tensor("F32", 4, seed=2)})
    damage.forget_manifest(run)
    spans = [chunk.span for chunk in next(e for e in api.open_checkpoint(run).tensors if e.fqn == "a").chunks]
    damage.edit_chunks(run, "b", lambda c: tuple(replace(x, span=y) for x, y in zip(c, spans, strict=True)))
    refuses(run, finding="shared-item", conversions=())


def test_chunk_with_the_place_of_another_is_shared_item(tmp_path: Path, refuses) -> None:
    run = shard_model(tmp_path, "dp_shard=2", {"a": tensor("F32", 4, seed=1)})
    damage.forget_manifest(run)
    damage.edit_chunks(run, "a", lambda c: (c[0], replace(c[1], span=c[0].span)))
    refuses(run, finding="shared-item", conversions=())


def test_tensor_missing_from_the_metadata_leaves_an_unreferenced_item(tmp_path: Path) -> None:
    run = shard_model(tmp_path, "dp_shard=1", {name: tensor("F32", 4, seed=1) for name in ("a", "b", "c")})
    damage.forget_manifest(run)
    kept = [entry for entry in api.open_checkpoint(run).tensors if entry.fqn != "b"]
    (run / ".metadata").write_bytes(build_metadata(kept, ()))
    assert [(f.code, f.severity) for f in api.verify(run).findings] == [("unreferenced-item", "warning")]


def test_span_beyond_the_file_is_short_file(run: Path, refuses) -> None:
    damage.forget_manifest(run)
    damage.edit_chunks(run, UP, lambda c: (replace(c[0], span=replace(c[0].span, offset=1 << 40)), *c[1:]))
    refuses(run, finding="short-file")


@pytest.mark.parametrize("delta", [-64, -1, 1, 64])
def test_length_lies_is_bad_item(run: Path, refuses, delta: int) -> None:
    damage.forget_manifest(run)

    def edit(chunks):
        span = chunks[0].span
        return (replace(chunks[0], span=replace(span, nbytes=span.nbytes + delta)), *chunks[1:])

    damage.edit_chunks(run, UP, edit)
    refuses(run, finding="bad-item")


def test_length_too_short_for_the_chunk_is_unreadable(run: Path, refuses) -> None:
    damage.edit_chunks(run, UP, lambda c: (replace(c[0], span=replace(c[0].span, nbytes=20)), *c[1:]))
    refuses(run, finding=None)


def test_dtype_of_metadata_differs_is_item_mismatch(tmp_path: Path, refuses) -> None:
    run = shard_model(tmp_path, tensors={"w": tensor("I16", 8, 4)})
    damage.forget_manifest(run)
    damage.edit_metadata(run, lambda e: replace(e, dtype=BY_NAME["F32"]))
    said = refuses(run, finding="item-mismatch")
    assert "I16" in said
    assert "F32" in said


def test_sizes_of_metadata_differ_is_item_mismatch(tmp_path: Path, refuses) -> None:
    run = shard_model(tmp_path, "dp_shard=1", {"w": tensor("F32", 8)})
    damage.forget_manifest(run)
    damage.replace_item(run, "w", _item("F32", (800,)))
    refuses(run, finding="item-mismatch")


def test_shape_transposed_is_item_mismatch(tmp_path: Path, refuses) -> None:
    run = shard_model(tmp_path, "dp_shard=1", {"w": tensor("F32", 8, 2)})
    damage.forget_manifest(run)
    damage.edit_metadata(
        run, lambda e: replace(e, shape=(2, 8), chunks=(replace(e.chunks[0], box=Box((0, 0), (2, 8))),))
    )
    refuses(run, finding="item-mismatch")


def test_metadata_renames_a_tensor_is_manifest_mismatch(run: Path, refuses) -> None:
    damage.edit_metadata(run, lambda e: replace(e, fqn="model.other", path=()) if e.fqn == UP else e)
    refuses(run, finding="manifest-mismatch", exit_code=2, conversions=("gather",))


# Items that lie


def _item(dtype: str, sizes: tuple[int, ...]) -> bytes:
    frame = item_frame(BY_NAME[dtype], sizes)
    payload = content(frame.payload_nbytes)
    before, after = frame.seal(zlib.crc32(payload))
    return before + payload + after


def test_item_deflated_is_bad_item(run: Path, refuses) -> None:
    damage.forget_manifest(run)
    item = damage.rezip(damage.read_item(run, UP), lambda e: e, compression=zipfile.ZIP_DEFLATED)
    damage.replace_item(run, UP, item)
    assert "compressed" in refuses(run, finding="bad-item")


def test_item_of_a_zip_bomb_is_refused_without_unpacking(run: Path, refuses) -> None:
    damage.forget_manifest(run)

    def edit(entries):
        return [(name, bytes(1 << 26) if name.endswith("data/0") else raw) for name, raw in entries]

    item = damage.rezip(damage.read_item(run, UP), edit, compression=zipfile.ZIP_DEFLATED)
    assert len(item) < 1 << 17
    damage.replace_item(run, UP, item)
    refuses(run, finding="bad-item")


@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
def test_item_with_duplicate_entries_is_bad_item(run: Path, refuses) -> None:
    damage.forget_manifest(run)

    def edit(entries):
        payload = next(entry for entry in entries if entry[0].endswith("data/0"))
        return [*entries, (payload[0], content(len(payload[1]), 9))]

    damage.replace_item(run, UP, damage.rezip(damage.read_item(run, UP), edit))
    assert "two entries" in refuses(run, finding="bad-item")


def test_item_with_two_data_records_is_bad_item(run: Path, refuses) -> None:
    damage.forget_manifest(run)
    item = damage.rezip(damage.read_item(run, UP), lambda e: [*e, ("archive/data/1", b"x" * 8)])
    damage.replace_item(run, UP, item)
    refuses(run, finding="bad-item")


@pytest.mark.parametrize("nbytes", [0, 4, 4096])
def test_item_with_a_payload_of_another_length_is_bad_item(run: Path, refuses, nbytes: int) -> None:
    damage.forget_manifest(run)

    def edit(entries):
        return [(name, b"\1" * nbytes if name.endswith("data/0") else raw) for name, raw in entries]

    damage.replace_item(run, UP, damage.rezip(damage.read_item(run, UP), edit))
    refuses(run, finding="bad-item")


@pytest.mark.parametrize("name", ["data.pkl", "data/0", "version"])
def test_item_without_an_entry_that_torch_needs_is_bad_item(run: Path, refuses, name: str) -> None:
    damage.forget_manifest(run)
    item = damage.rezip(damage.read_item(run, UP), lambda e: [x for x in e if not x[0].endswith("/" + name)])
    damage.replace_item(run, UP, item)
    refuses(run, finding="bad-item", conversions=() if name == "version" else ("gather", "reshard"))


def test_item_big_endian_is_bad_item(run: Path, refuses) -> None:
    damage.forget_manifest(run)
    item = damage.rezip(
        damage.read_item(run, UP), lambda e: [(n, b"big" if n.endswith("byteorder") else raw) for n, raw in e]
    )
    damage.replace_item(run, UP, item)
    assert "little-endian" in refuses(run, finding="bad-item")


@pytest.mark.parametrize(
    "pickled",
    [
        b"cposix\nsystem\n(S'touch owned'\ntR.",
        b"\x80\x02cposix\nsystem\nq\x00X\x05\x00\x00\x00touchq\x01\x85q\x02Rq\x03.",
        b"\x80\x02cbuiltins\neval\nq\x00X\x03\x00\x00\x001+1q\x01\x85q\x02Rq\x03.",
        b"",
        b"\x80\x02}.",
        b"\x80\x02" + b"(" * 5000 + b".",
        b"\x80\x02r\xff\xff\xff\x1f.",
    ],
)
def test_item_with_another_pickle_is_bad_item_and_runs_nothing(run: Path, refuses, monkeypatch, pickled: bytes) -> None:
    monkeypatch.chdir(run.parent)
    damage.forget_manifest(run)
    item = damage.rezip(
        damage.read_item(run, UP), lambda e: [(n, pickled if n.endswith("data.pkl") else raw) for n, raw in e]
    )
    damage.replace_item(run, UP, item)
    refuses(run, finding="bad-item")
    assert not Path("owned").exists()


def test_metadata_that_would_run_code_is_refused(run: Path, refuses, monkeypatch) -> None:
    monkeypatch.chdir(run.parent)
    (run / ".metadata").write_bytes(b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x0btouch owned\x94\x85R.")
    refuses(run, finding=None)
    assert not Path("owned").exists()


@pytest.mark.parametrize("file", ["../run2/__0_0.distcp", "a/../__0_0.distcp", "./__0_0.distcp", "//etc/passwd"])
def test_metadata_path_leading_out_is_unreadable(run: Path, tmp_path: Path, refuses, file: str) -> None:
    shutil.copytree(run, tmp_path / "run2")
    damage.edit_chunks(run, UP, lambda c: (replace(c[0], span=replace(c[0].span, file=file)), *c[1:]))
    refuses(run, finding=None)


def test_metadata_path_absolute_is_unreadable(run: Path, refuses) -> None:
    absolute = str(run / "__0_0.distcp")
    damage.edit_chunks(run, UP, lambda c: (replace(c[0], span=replace(c[0].span, file=absolute)), *c[1:]))
    refuses(run, finding=None)


def test_zip64_end_that_disagrees_is_bad_item(run: Path, refuses) -> None:
    damage.forget_manifest(run)
    item = damage.read_item(run, UP)
    end64 = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, 10, 0)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, len(item) - 22, 1)
    damage.replace_item(run, UP, item[:-22] + end64 + locator + item[-22:])
    refuses(run, finding="bad-item")
