"""Every architecture that builds small: hub → sharded → stock load → back, and trained → hub, every value compared.

What transformers itself loads and saves is the oracle. A name that goes nowhere, a tensor that is missing or one whose
values differ fails; so does a model that ckpt writes by other names without saying so.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from names import zoo

from ckpt_tools.cli import main
from ckpt_tools.errors import CkptError
from ckpt_tools.fsdp2 import load_checkpoint

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]
_SLICES = 16
_FEWEST = 14
"""Architectures of a slice that go the whole way; 295 of all in transformers 5.23 (`bin/test --zoo` walks them)."""
_OF = 8
"""Without --zoo, one architecture of so many."""


def walk(name: str, directory: Path, values: dict[str, Any] | None = None) -> str:
    """Return "" or what is wrong; "small" for a model that does not build small. `values` change its config."""
    live = zoo.save(name, directory / "hub", values)
    if live is None:
        return "small"
    hub, sharded, back = (str(directory / part) for part in ("hub", "dcp", "back"))
    state = live.state_dict()
    if what := load_on_meta(name, live, hub):
        return what
    if main(["shard", hub, sharded, "--mesh", "dp_shard=2", "-q"]) or main(["verify", hub, sharded, "-q"]):
        return "not sharded"
    loaded = {fqn: torch.zeros_like(tensor) for fqn, tensor in state.items()}
    try:
        dcp.load(loaded, checkpoint_id=sharded)
    except dcp.api.CheckpointException:
        return "not loaded"
    if any(not torch.equal(tensor, loaded[fqn]) for fqn, tensor in state.items()):
        return "other values"
    if main(["gather", sharded, back, "-q"]):
        return "not gathered"
    if any((directory / "back" / one.name).read_bytes() != one.read_bytes() for one in (directory / "hub").iterdir()):
        return "other bytes"
    dcp.save(state, checkpoint_id=directory / "run")
    if main(["gather", str(directory / "run"), str(directory / "out"), "--assets", hub, "-q"]):
        return "trained: not gathered"
    again, info = type(live).from_pretrained(directory / "out", output_loading_info=True)
    if any(info.values()):
        return f"trained: {sorted(what for what, names in info.items() if names)}"
    if any(not torch.equal(tensor, state[fqn]) for fqn, tensor in again.state_dict().items()):
        return "trained: other values"
    return ""


def load_on_meta(name: str, saved: transformers.PreTrainedModel, hub: str) -> str:
    """Return "" or what is wrong with what `load_checkpoint` makes of a model's files."""
    made = zoo.build(name, saved.config.to_dict(), "meta")
    try:
        load_checkpoint(made, hub)
    except CkptError as error:
        return f"load_checkpoint: {error}"
    found = made.state_dict()
    wrong = [fqn for fqn, tensor in saved.state_dict().items() if not torch.equal(tensor, found[fqn])]
    return f"load_checkpoint: other values: {wrong[:3]}" if wrong else ""


@pytest.mark.parametrize("at", range(_SLICES))
def test_architectures_go_the_whole_way_or_say_that_they_do_not(at: int, tmp_path: Path, capsys, request) -> None:
    is_whole = request.config.getoption("--zoo")
    transformers.utils.logging.set_verbosity(logging.CRITICAL)
    num_whole, wrong = 0, {}
    for name in zoo.part(at, _SLICES, whole=is_whole, of=_OF):
        directory = tmp_path / name
        directory.mkdir()
        what = walk(name, directory)
        said = capsys.readouterr().err
        shutil.rmtree(directory)
        num_whole += not what
        # Where the table does not know a model's own names, those of the file are kept, and that is said.
        if what and what != "small" and not (what == "not loaded" and "names of the file" in said):
            wrong[name] = what, said[-1000:]
    assert wrong == {}
    assert num_whole >= _FEWEST // (1 if is_whole else _OF)
