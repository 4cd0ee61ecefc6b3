"""Damaged safetensors files and HF directories."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from corrupt import damage
from samples import MODEL, content, files_of, safetensors_bytes, shard_model, staging_left, tensor, write_model

from ckpt_tools import api
from ckpt_tools.cli import main
from ckpt_tools.errors import UnreadableError

SHARD = ("shard",)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


@pytest.fixture
def indexed(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", num_files=3)


@pytest.fixture
def refuses_hf(refuses):
    """As `refuses`; the conversion that takes such a source is `shard`, and `gather`, which rewrites it."""

    def check(path: Path, *, finding: str | None = None, conversions=("shard", "gather"), **options) -> str:
        options.setdefault("exit_code", 4)
        return refuses(path, finding=finding, conversions=conversions, **options)

    return check


def _index(model: Path) -> Path:
    return model / "model.safetensors.index.json"


def _edit_index(model: Path, edit) -> None:
    document = json.loads(_index(model).read_text())
    edit(document)
    _index(model).write_text(json.dumps(document))


# One file


@pytest.mark.parametrize("nbytes", [1, 100, 2000])
def test_file_truncated_is_unreadable(model: Path, refuses_hf, nbytes: int) -> None:
    path = model / "model.safetensors"
    damage.truncate(path, min(nbytes, path.stat().st_size - 3))
    refuses_hf(model)
    refuses_hf(path)


def test_file_extended_is_unreadable(model: Path, refuses_hf) -> None:
    with (model / "model.safetensors").open("ab") as file:
        file.write(b"x")
    assert "unknown bytes" in refuses_hf(model)


@pytest.mark.parametrize("size", [0, 7, 8])
def test_file_empty_is_unreadable(model: Path, refuses_hf, size: int) -> None:
    (model / "model.safetensors").write_bytes(bytes(size))
    refuses_hf(model)


@pytest.mark.parametrize("length", [0, 10_000_000, (1 << 64) - 1])
def test_header_length_lies_is_unreadable(model: Path, refuses_hf, length: int) -> None:
    path = model / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])
    refuses_hf(model)


def _with_header(path: Path, text: bytes) -> None:
    raw = path.read_bytes()
    data = raw[8 + int.from_bytes(raw[:8], "little") :]
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("text", [b"not json", b'{"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}'])
def test_header_replaced_is_unreadable(model: Path, refuses_hf, text: bytes) -> None:
    """What else headers cannot say: tests/unit/test_safetensors.py."""
    _with_header(model / "model.safetensors", text)
    refuses_hf(model)


def test_file_is_a_symlink_out_of_the_directory_is_refused(model: Path, tmp_path: Path, refuses_hf) -> None:
    (model / "model.safetensors").rename(tmp_path / "weights.safetensors")
    (model / "model.safetensors").symlink_to("../weights.safetensors")
    assert "leads out" in refuses_hf(model)


def test_file_dangling_symlink_is_refused(model: Path, refuses_hf) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to("nowhere")
    refuses_hf(model)


def test_file_is_a_fifo_is_refused(model: Path, refuses_hf) -> None:
    (model / "model.safetensors").unlink()
    os.mkfifo(model / "model.safetensors")
    refuses_hf(model)
    refuses_hf(model / "model.safetensors")


def test_asset_is_a_symlink_out_of_the_directory_is_refused(model: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "secret").write_text("secret")
    (model / "vocab.txt").symlink_to(tmp_path / "secret")
    assert main(["shard", str(model), str(tmp_path / "out"), "--mesh", "dp_shard=2", "--json"]) == 4
    assert "leads out" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert staging_left(tmp_path) == []


def test_names_that_would_drive_a_terminal_are_escaped(tmp_path: Path, capsys) -> None:
    evil = "a\x1b[2J\x9b\u202e[red]\n.weight"
    model = write_model(tmp_path / "model", {evil: tensor("F32", 4), "../../x": tensor("F32", 2)})
    assert main(["inspect", str(model), "--tensors"]) == 0
    assert main(["verify", str(model)]) == 0
    shard = ["shard", str(model), str(tmp_path / "run"), "--mesh", "dp_shard=2"]
    assert main([*shard, "-v"]) == 0
    assert main(["inspect", str(tmp_path / "run"), "--tensors", "--tensor", evil]) == 0
    assert main([*shard, "--set", "nothing=tp:S(0)"]) != 0
    assert main(["gather", str(tmp_path / "run"), str(tmp_path / "back")]) == 0
    assert files_of(tmp_path / "back") == files_of(model)
    damage.truncate(tmp_path / "run" / "__0_0.distcp", 30)
    assert main(["verify", str(tmp_path / "run")]) == 3
    out, err = capsys.readouterr()
    for text in (out, err):
        assert not any(char in text for char in "\x1b\x9b\u202e")
    assert "\\x1b[2J" in out


# Several files


PART = "model-{:05d}-of-00003.safetensors".format
BROKEN = {
    "a file missing": (lambda model: (model / PART(2)).unlink(), "1 of 3 files"),
    "too many tensors": (lambda model: _edit_index(model, lambda d: d["weight_map"].update(ghost=PART(1))), "ghost"),
    "too few tensors": (lambda model: _edit_index(model, lambda d: d["weight_map"].pop("model.step")), "model.step"),
    "files mixed up": (lambda model: damage.swap(model / PART(1), model / PART(2)), ""),
    "a tensor in two files": (lambda model: (model / PART(2)).write_bytes((model / PART(1)).read_bytes()), ""),
    "no index": (lambda model: _index(model).unlink(), "restore the index"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_files_that_their_index_does_not_describe_are_unreadable(indexed: Path, refuses_hf, kind: str) -> None:
    change, word = BROKEN[kind]
    change(indexed)
    assert word in refuses_hf(indexed)


@pytest.mark.parametrize("raw", [b"{", b'{"weight_map": {"model.step": "../model.safetensors"}}'])
def test_index_replaced_is_unreadable(indexed: Path, tmp_path: Path, refuses_hf, raw: bytes) -> None:
    """What else is no index: tests/unit/test_hf.py."""
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(MODEL))
    _index(indexed).write_bytes(raw)
    refuses_hf(indexed)


# What ckpt gathered


@pytest.fixture
def gathered(tmp_path: Path, monkeypatch) -> Path:
    run = shard_model(tmp_path)
    api.gather(run, tmp_path / "gathered")
    return tmp_path / "gathered"


def test_gathered_data_bit_flipped_is_digest_mismatch(gathered: Path, refuses_hf) -> None:
    damage.flip(gathered / "model.safetensors", -3)
    refuses_hf(gathered, finding="digest-mismatch")


def test_gathered_header_bit_flipped_in_the_metadata_is_changed_document(gathered: Path, refuses) -> None:
    path = gathered / "model.safetensors"
    offset = path.read_bytes().index(b'"pt"') + 1
    damage.flip(path, offset)
    refuses(gathered, finding="changed-document", conversions=())


def test_gathered_index_bit_flipped_is_found(tmp_path: Path, refuses) -> None:
    source = write_model(tmp_path / "model", num_files=2)
    api.shard(source, tmp_path / "run", mesh="dp_shard=2")
    api.gather(tmp_path / "run", tmp_path / "gathered")
    path = _index(tmp_path / "gathered")
    damage.flip(path, path.read_bytes().index(b"total_size"))
    refuses(tmp_path / "gathered", finding="changed-document", conversions=())


def test_gathered_asset_changed_is_an_error(gathered: Path, capsys) -> None:
    (gathered / "config.json").write_bytes(b'{"model_type": "some"}\n')
    assert main(["verify", str(gathered), "--json"]) == 3
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [(f["code"], f["severity"]) for f in findings] == [("digest-mismatch", "error")]
    (gathered / "config.json").write_bytes(b"{}")
    assert main(["verify", str(gathered), "--json"]) == 3
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [(f["code"], f["severity"]) for f in findings] == [("changed-asset", "error")]


def test_gathered_asset_changed_is_refused_until_it_is_accepted(gathered: Path, tmp_path: Path) -> None:
    assert api.shard(gathered, tmp_path / "one", mesh="dp_shard=2").warnings == ()
    (gathered / "tokenizer.json").write_bytes(b'{"version": "changed"}')
    for name, more in (("two", {}), ("three", {"part": "0/1"})):
        with pytest.raises(UnreadableError, match=r"tokenizer\.json is not what") as refused:
            api.shard(gathered, tmp_path / name, mesh="dp_shard=2", **more)
        assert refused.value.hint.endswith("--accept tokenizer.json")
    assert api.verify(gathered, accept=["tokenizer.json"]).ok
    assert api.shard(gathered, tmp_path / "four", mesh="dp_shard=2").warnings == ()


# What DCP's HF writer leaves


def _sharded(directory: Path) -> Path:
    directory.mkdir()
    for rank in (1, 2):
        offsets = {"w": {"saved_offsets": [4 * (rank - 1), 0]}, "s": {"saved_offsets": []}}
        tensors = {"w": tensor("F32", 4, 3, seed=rank)}
        if rank == 1:
            tensors["s"] = tensor("F32")
        else:
            del offsets["s"]
        raw = safetensors_bytes(tensors, metadata={"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0"})
        (directory / f"shard-{rank:05d}-model-{rank:05d}-of-00002.safetensors").write_bytes(raw)
    return directory


def test_sharded_intact_gathers(tmp_path: Path) -> None:
    api.gather(_sharded(tmp_path / "sharded"), tmp_path / "out")
    entries = {entry.fqn: entry.shape for entry in api.open_checkpoint(tmp_path / "out").tensors}
    assert entries == {"w": (8, 3), "s": ()}
    raw = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert tensor("F32", 4, 3, seed=1)[2] + tensor("F32", 4, 3, seed=2)[2] in raw


def test_sharded_first_file_missing_is_refused(tmp_path: Path, refuses) -> None:
    sharded = _sharded(tmp_path / "sharded")
    (sharded / "shard-00001-model-00001-of-00002.safetensors").unlink()
    refuses(sharded, finding="incomplete-tensor")


def test_sharded_last_file_missing_is_said_to_be_unchecked(tmp_path: Path, capsys) -> None:
    """Neither shapes nor the number of ranks are recorded, so nothing can tell; that is said every time."""
    sharded = _sharded(tmp_path / "sharded")
    (sharded / "shard-00002-model-00002-of-00002.safetensors").unlink()
    assert main(["verify", str(sharded), "--json"]) == 0
    assert any("global shapes" in text for text in json.loads(capsys.readouterr().out)["not_checked"])
    assert main(["gather", str(sharded), str(tmp_path / "out"), "--json"]) == 0
    assert any("last ones are missing" in text for text in json.loads(capsys.readouterr().out)["notes"])


@pytest.mark.parametrize(
    "info",
    ["", "[]", "{}", '{"w": {}}', '{"w": {"saved_offsets": [0]}}', '{"w": {"saved_offsets": [-1, 0]}}',
     '{"w": {"saved_offsets": [0.5, 0]}}', '{"w": {"saved_offsets": "00"}}', '{"w": 3}'],
)  # fmt: skip
def test_sharded_info_malformed_is_unreadable(tmp_path: Path, refuses, info: str) -> None:
    sharded = _sharded(tmp_path / "sharded")
    raw = safetensors_bytes({"w": tensor("F32", 4, 3)}, metadata={"DCP_SHARDING_INFO": info})
    (sharded / "shard-00002-model-00002-of-00002.safetensors").write_bytes(raw)
    refuses(sharded, finding=None)


def test_sharded_chunks_overlapping_is_found(tmp_path: Path, refuses) -> None:
    sharded = _sharded(tmp_path / "sharded")
    info = json.dumps({"w": {"saved_offsets": [2, 0]}})
    raw = safetensors_bytes({"w": tensor("F32", 4, 3)}, metadata={"DCP_SHARDING_INFO": info})
    (sharded / "shard-00002-model-00002-of-00002.safetensors").write_bytes(raw)
    refuses(sharded, finding="overlapping-chunks")


def test_file_with_noise_for_a_name_is_left_out(model: Path, tmp_path: Path) -> None:
    """A name that is not UTF-8 is a name like any other: carried along, escaped when shown."""
    with open(os.fsencode(model) + b"/no\xff\xfetes.txt", "wb") as file:
        file.write(content(9))
    api.shard(model, tmp_path / "run", mesh="dp_shard=2")
    api.gather(tmp_path / "run", tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(model)
