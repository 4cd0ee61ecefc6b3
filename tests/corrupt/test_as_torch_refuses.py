"""What stock torch cannot read is not read here either, and a map that says nothing is none."""

from __future__ import annotations

import pickle
import pickletools
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt_tools.checkpoint.formats.dcp_metadata import parse_metadata
from ckpt_tools.checkpoint.formats.opening import open_path
from ckpt_tools.errors import UnreadableError


def test_metadata_whose_objects_are_made_in_another_way(tmp_path: Path) -> None:
    """Each object of a real file in turn, called or not: what torch does not unpickle, ckpt does not read."""
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"w": torch.ones(3), "x": "text"}, checkpoint_id=tmp_path, no_dist=True)
    data = (tmp_path / ".metadata").read_bytes()
    refused = 0
    for opcode, _, position in pickletools.genops(data):
        if opcode.name in ("NEWOBJ", "REDUCE") and position is not None:
            other = b"R" if opcode.name == "NEWOBJ" else b"\x81"
            changed = data[:position] + other + data[position + 1 :]
            with pytest.raises(UnreadableError, match="is made by"):
                parse_metadata(changed)
            try:
                pickle.loads(changed)
            except Exception:  # whatever the class raises
                refused += 1
    assert refused >= 8


@pytest.mark.parametrize("tag", ["cpu:0", "meta:0", "cpq", "", "CPU", "cuda:", "cudax"])
def test_stream_whose_location_torch_does_not_restore(tmp_path: Path, tag: str) -> None:
    path = tmp_path / "model.pt"
    torch.save({"w": torch.ones(3)}, path, _use_new_zipfile_serialization=False)
    whole, old = path.read_bytes(), b"\x03\0\0\0cpu"
    assert whole.count(old) == 1
    path.write_bytes(whole.replace(old, len(tag).to_bytes(4, "little") + tag.encode()))
    with pytest.raises(RuntimeError):
        torch.load(path, weights_only=True)
    with pytest.raises(UnreadableError, match="on the device"):
        open_path(str(path))
