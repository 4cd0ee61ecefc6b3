"""The tables of docs/concepts/detection.md are what happens; with a manifest nothing passes."""

from __future__ import annotations

import pickle

import pytest
from corrupt.every_byte import LAYOUTS, documented, made, sweep, to_table


def _tensors_of(metadata: bytes) -> object:
    """What stock torch reads of `.metadata` as far as tensors go. Only for bytes that the inert reader took."""
    read = pickle.loads(metadata)
    tensors = {fqn: entry for fqn, entry in read.state_dict_metadata.items() if hasattr(entry, "chunks")}
    return (
        {fqn: (entry.size, entry.chunks, entry.properties.dtype) for fqn, entry in tensors.items()},
        {index: info for index, info in read.storage_data.items() if index.fqn in tensors},
    )


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_byte_flipped_is_found_as_documented(layout: str, pytestconfig: pytest.Config) -> None:
    """Of DCP every third one, with `--zoo` every one."""
    step = 3 if layout.startswith("dcp") and not pytestconfig.getoption("zoo") else 1
    passed = []

    def keep(name: str, intact: bytes, damaged: bytes) -> None:
        passed.append(name)
        if name == ".metadata":
            assert _tensors_of(damaged) == _tensors_of(intact)

    with made(layout) as path:
        sizes = {entry.name: entry.stat().st_size for entry in path.iterdir()}
        tally = sweep(path, keep, step=step)
    assert sum(row[0] for row in tally.values()) == sum(-(-size // step) for size in sizes.values())
    assert to_table(tally) == documented(layout)
    total, _, data, against = tally["tensor bytes"]
    assert against == total
    if layout.endswith("-manifest"):
        assert passed == []
        assert all(row[2] == row[0] for row in tally.values())
    elif layout.startswith("dcp"):
        assert data == total
