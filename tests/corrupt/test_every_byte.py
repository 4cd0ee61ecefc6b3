"""The tables of docs/dev/detection.md are what happens; with a manifest nothing passes.

Single bits of a stock `.metadata` too: none changes unnoticed what ckpt reads, but names that stand there only once.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from corrupt import every_bit
from corrupt.every_byte import LAYOUTS, documented, made, sweep, to_table
from samples import memory_directory


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


@pytest.mark.full(but=["flat"])
@pytest.mark.parametrize("recipe", every_bit.RECIPES)
def test_every_bit_is_found_or_changes_nothing(recipe: str, pytestconfig: pytest.Config) -> None:
    """Every fifth one without `--zoo`, every seventh in the quick tier: of the eight of a byte no place is left out."""
    step = 1 if pytestconfig.getoption("zoo") else 7 if pytestconfig.getoption("quick") else 5
    with memory_directory() as root:
        every_bit.RECIPES[recipe](Path(root) / "run")
        tally, misses = every_bit.sweep(Path(root) / "run", step=step)
    assert misses == []
    assert tally["found"] > 0.8 * tally["tried"]
    assert (every_bit.NAMES in tally) == (recipe == "flat")
    assert tally.keys() - {"tried", "found"} <= every_bit.documented()
