"""Damaged DCP directories: every damage has its code, and nothing is made of it."""

from __future__ import annotations

import json
import shutil
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from corrupt import damage
from samples import MODEL, content, files_of, shard_model, tensor

from ckpt_tools import api
from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.checkpoint.entries import Chunk
from ckpt_tools.checkpoint.formats.dcp_metadata import build_metadata
from ckpt_tools.checkpoint.formats.torch_zip import item_frame
from ckpt_tools.checkpoint.layout import Box
from ckpt_tools.cli import main

UP = "model.layers.0.up.weight"
EMBED = "model.embed.weight"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return shard_model(tmp_path)


# Files


DATA_FILES = {
    "truncated": (lambda path: damage.truncate(path, 1), "short-file"),
    "missing": (Path.unlink, "missing-file"),
    "empty": (lambda path: path.write_bytes(b""), "short-file"),
    "a directory": (lambda path: (path.unlink(), path.mkdir()), "missing-file"),
    "of unlike items, swapped": (lambda path: damage.swap(path, path.with_name("__0_0.distcp")), "short-file"),
    "random bytes": (lambda path: path.write_bytes(content(path.stat().st_size)), "bad-item"),
}


@pytest.mark.parametrize("manifest", [True, False])
@pytest.mark.parametrize("kind", DATA_FILES)
def test_distcp_damaged_is_found(run: Path, refuses, kind: str, manifest: bool) -> None:
    if not manifest:
        damage.forget_manifest(run)
    change, finding = DATA_FILES[kind]
    change(run / "__1_0.distcp")
    assert "__1_0.distcp" in refuses(run, finding=finding)


def test_distcp_extended_is_long_file(run: Path, capsys) -> None:
    with (run / "__1_0.distcp").open("ab") as file:
        file.write(b"more")
    assert main(["verify", str(run), "--json"]) == 3
    assert {f["code"] for f in json.loads(capsys.readouterr().out)["findings"]} == {"long-file"}


def test_distcp_swapped_of_equal_size_is_digest_mismatch(tmp_path: Path, refuses) -> None:
    run = shard_model(tmp_path, tensors={"w": tensor("F32", 8, 4), "v": tensor("U8", 16)})
    damage.swap(run / "__0_0.distcp", run / "__1_0.distcp")
    refuses(run, finding="digest-mismatch")


def test_metadata_missing_is_named_as_a_killed_save(run: Path, refuses) -> None:
    (run / ".metadata").unlink()
    assert "killed" in refuses(run, finding=None)


@pytest.mark.parametrize("raw", [b"", b"\x80\x04" + content(500, 1)])
def test_metadata_replaced_by_noise_is_unreadable(run: Path, refuses, raw: bytes) -> None:
    (run / ".metadata").write_bytes(raw)
    refuses(run, finding=None)


@pytest.mark.parametrize(("name", "finding"), [(".metadata", None), ("__0_0.distcp", "bad-item")])
def test_symlink_out_of_the_root_is_refused(run: Path, tmp_path: Path, refuses, name: str, finding) -> None:
    (run / name).rename(tmp_path / "elsewhere")
    (run / name).symlink_to(tmp_path / "elsewhere")
    assert "leads out" in refuses(run, finding=finding)


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
    before, after = frame.before, frame.after(zlib.crc32(payload))
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


def first(edit: Callable[[Chunk], Chunk]) -> Callable[[Path], None]:
    """Edit the first chunk of `UP`."""
    return lambda run: damage.edit_chunks(run, UP, lambda chunks: (edit(chunks[0]), *chunks[1:]))


def shaped(fqn: str, *shape: int) -> Callable[[Path], None]:
    return lambda run: damage.edit_metadata(run, lambda e: replace(e, shape=shape) if e.fqn == fqn else e)


def overlap_chunks(run: Path) -> None:
    damage.edit_chunks(run, UP, lambda chunks: (chunks[0], replace(chunks[1], box=Box((4, 0), (8, 8)))))
    shaped(UP, 12, 8)(run)


def overlap_spans(run: Path) -> None:
    other = damage.item_span(run, EMBED)
    first(lambda chunk: replace(chunk, span=replace(chunk.span, offset=other.offset + 64)))(run)


def longer(delta: int) -> Callable[[Path], None]:
    return first(lambda chunk: replace(chunk, span=replace(chunk.span, nbytes=chunk.span.nbytes + delta)))


LIES = {
    "chunks halved": (lambda run: damage.edit_chunks(run, UP, lambda chunks: chunks[:1]), "incomplete-tensor"),
    "chunks gone": (lambda run: damage.edit_chunks(run, UP, lambda chunks: ()), "incomplete-tensor"),
    "size claimed huge": (shaped(EMBED, 100_000_000, 8), "incomplete-tensor"),
    "size claimed small": (shaped(EMBED, 3, 8), "chunk-outside-tensor"),
    "chunks overlapping": (overlap_chunks, "overlapping-chunks"),
    "spans overlapping": (overlap_spans, "overlapping-spans"),
    "span beyond the file": (first(lambda c: replace(c, span=replace(c.span, offset=1 << 40))), "short-file"),
    "length 64 short": (longer(-64), "bad-item"),
    "length 1 short": (longer(-1), "bad-item"),
    "length 1 long": (longer(1), "bad-item"),
    "length 64 long": (longer(64), "bad-item"),
}


@pytest.mark.parametrize("lie", LIES)
def test_metadata_that_lies_is_found(run: Path, refuses, lie: str) -> None:
    damage.forget_manifest(run)
    edit, finding = LIES[lie]
    edit(run)
    said = refuses(run, finding=finding)
    assert "rows 8..16 of 16" in said or lie != "chunks halved"


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


def test_length_too_short_for_the_chunk_is_unreadable(run: Path, refuses) -> None:
    first(lambda chunk: replace(chunk, span=replace(chunk.span, nbytes=20)))(run)
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
    before, after = frame.before, frame.after(zlib.crc32(payload))
    return before + payload + after


@pytest.mark.parametrize("kind", ["deflated", "without data.pkl", "without version, and torch loads nothing"])
def test_item_that_is_no_tensor_of_torch_is_bad_item(run: Path, refuses, kind: str) -> None:
    """What else is none: tests/unit/test_torch_zip.py."""
    damage.forget_manifest(run)
    left = kind.partition("without ")[2].partition(",")[0]
    compression = zipfile.ZIP_DEFLATED if kind == "deflated" else zipfile.ZIP_STORED
    item = damage.read_item(run, UP)
    item = damage.rezip(item, lambda all_: [e for e in all_ if e[0] != f"archive/{left}"], compression=compression)
    damage.replace_item(run, UP, item)
    refuses(run, finding="bad-item", conversions=() if left == "version" else ("gather", "reshard"))


def test_metadata_that_would_run_code_is_refused(run: Path, refuses, monkeypatch) -> None:
    monkeypatch.chdir(run.parent)
    (run / ".metadata").write_bytes(b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x0btouch owned\x94\x85R.")
    refuses(run, finding=None)
    assert not Path("owned").exists()


@pytest.mark.parametrize(
    "file", ["../run2/__0_0.distcp", "a/../__0_0.distcp", "./__0_0.distcp", "//etc/passwd", "{run}/__0_0.distcp"]
)
def test_metadata_path_leading_out_is_unreadable(run: Path, tmp_path: Path, refuses, file: str) -> None:
    shutil.copytree(run, tmp_path / "run2")
    first(lambda chunk: replace(chunk, span=replace(chunk.span, file=file.format(run=run))))(run)
    refuses(run, finding=None)
