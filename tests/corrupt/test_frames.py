"""With a manifest no byte of a data file is left out: frames and padding have a digest of their own."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from corrupt import damage
from samples import shard_model

from ckpt_tools import api
from ckpt_tools.checks.verify import Verification
from ckpt_tools.options.common import Level


def codes(result: Verification) -> set[str]:
    return {finding.code for finding in result.findings}


@pytest.mark.parametrize("level", ["structure", "data"])
def test_padding_between_items_changed_is_changed_frames(tmp_path: Path, level: Level) -> None:
    run = shard_model(tmp_path)
    spans = sorted(
        (chunk.span.offset, chunk.span.offset + chunk.span.nbytes)
        for entry in api.open_checkpoint(run).tensors
        for chunk in entry.chunks
        if chunk.span.file == "__0_0.distcp"
    )
    gap = next(end for (_, end), (start, _) in pairwise(spans) if start > end)
    damage.flip(run / "__0_0.distcp", gap)
    result = api.verify(run, level=level)
    assert not result.ok
    assert [(finding.code, finding.where) for finding in result.findings] == [("changed-frames", "__0_0.distcp")]


def test_manifest_without_frames_is_read_as_before(tmp_path: Path) -> None:
    run = shard_model(tmp_path)
    damage.edit_manifest(run, lambda document: document.pop("frames"))
    assert api.verify(run).findings == ()


def test_damaged_item_is_not_reported_twice(tmp_path: Path) -> None:
    run = shard_model(tmp_path)
    path, offset = damage.payload_offset(run, "model.embed.weight")
    damage.flip(path, offset - 64 - 30)  # in the frame
    found = api.verify(run, level="structure").findings
    assert len(found) == 1, found
