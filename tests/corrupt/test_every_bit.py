"""Single bits of a stock `.metadata`: none changes unnoticed what ckpt reads, but names that stand there only once."""

from __future__ import annotations

from pathlib import Path

import pytest
from corrupt.every_bit import NAMES, RECIPES, documented, sweep
from samples import memory_directory


@pytest.mark.full(but=["flat"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_bit_is_found_or_changes_nothing(recipe: str, pytestconfig: pytest.Config) -> None:
    """Every fifth one without `--zoo`, every seventh in the quick tier: of the eight of a byte no place is left out."""
    step = 1 if pytestconfig.getoption("zoo") else 7 if pytestconfig.getoption("quick") else 5
    with memory_directory() as root:
        RECIPES[recipe](Path(root) / "run")
        tally, misses = sweep(Path(root) / "run", step=step)
    assert misses == []
    assert tally["found"] > 0.8 * tally["tried"]
    assert (NAMES in tally) == (recipe == "flat")
    assert tally.keys() - {"tried", "found"} <= documented()
