"""What stock torch cannot read is not read here either, and a map that says nothing is none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from samples import shard_model, write_model

from ckpt_tools.cli import main


def test_metadata_whose_classes_are_called_without_arguments(tmp_path: Path, capsys) -> None:
    run = shard_model(tmp_path)
    metadata = run / ".metadata"
    raw = metadata.read_bytes()
    changed = re.sub(rb"(_StorageInfo\x94\x93\x94\))\x81", rb"\1R", raw, count=1)
    assert changed != raw
    metadata.write_bytes(changed)
    with pytest.raises(Exception, match=r"_StorageInfo|metadata"):
        torch.distributed.checkpoint.FileSystemReader(run).read_metadata()
    (run / "ckpt_manifest.json").unlink()
    assert main(["verify", str(run)]) == 4
    assert "called without arguments" in capsys.readouterr().err


def test_stream_whose_device_is_none(tmp_path: Path, capsys) -> None:
    path = tmp_path / "model.pt"
    torch.save({"w": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    assert main(["verify", str(path)]) == 0
    path.write_bytes(path.read_bytes().replace(b"cpu", b"cpq"))
    with pytest.raises(RuntimeError, match="cpq"):
        torch.load(path, weights_only=True)
    assert main(["verify", str(path)]) == 4
    assert "of the device 'cpq'" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "# nothing\n\n"])
def test_map_that_is_empty(tmp_path: Path, capsys, text: str) -> None:
    (tmp_path / "map.txt").write_text(text)
    model = write_model(tmp_path / "model")
    assert main(["rename", str(model), str(tmp_path / "out"), "--map", str(tmp_path / "map.txt")]) == 2
    assert "the map is empty" in capsys.readouterr().err
