"""A conversion never writes into its source; a source that is one file has room beside it."""

from __future__ import annotations

import json

import pytest

from ckpt_tools import api
from ckpt_tools.cli import main


@pytest.fixture
def file(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    text = json.dumps({"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}).encode()
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"abcd")
    return directory / "model.safetensors"


def test_shard_one_file_into_its_own_directory_is_done(file):
    before = file.read_bytes()
    api.shard(file, file.parent / "out", mesh="dp_shard=2")
    assert file.read_bytes() == before
    assert api.verify(file.parent / "out", against=file).findings == ()


@pytest.mark.parametrize(
    ("source", "destination"),
    [
        *(("", destination) for destination in ("", "out", "out/../../model", "link")),
        *(("model.safetensors", destination) for destination in ("", "model.safetensors")),
    ],
)
def test_shard_into_itself_or_around_itself_is_refused(file, source, destination, capsys):
    (file.parent / "link").symlink_to(file.parent)
    (file.parent / "out").mkdir()
    names, before = sorted(path.name for path in file.parent.iterdir()), file.read_bytes()
    target = file.parent / destination
    assert main(["shard", str(file.parent / source), str(target), "--mesh", "dp_shard=2", "--overwrite"]) == 2
    assert "must not contain each other" in capsys.readouterr().err
    assert (sorted(path.name for path in file.parent.iterdir()), file.read_bytes()) == (names, before)
