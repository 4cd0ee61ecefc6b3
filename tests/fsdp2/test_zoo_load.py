"""Every architecture of transformers that builds small: what `load_checkpoint` makes of its files is what was saved."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from names import zoo

from ckpt_tools.errors import CkptError
from ckpt_tools.fsdp2 import load_checkpoint

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]
_SLICES = 16


def walk(name: str, directory: Path) -> str:
    """Return "" or what is wrong; "small" for a model that does not build small."""
    saved = zoo.save(name, directory)
    if saved is None:
        return "small"
    live = zoo.build(name, saved.config.to_dict(), "meta")
    try:
        load_checkpoint(live, directory)
    except CkptError as error:
        return str(error)
    wrong = [fqn for fqn, tensor in saved.state_dict().items() if not torch.equal(tensor, live.state_dict()[fqn])]
    return f"other values: {wrong[:3]}" if wrong else ""


@pytest.mark.parametrize("at", range(_SLICES))
def test_architectures_load_what_was_saved(at: int, tmp_path: Path) -> None:
    transformers.utils.logging.set_verbosity(logging.CRITICAL)
    wrong, num_whole = {}, 0
    for name in zoo.names()[at::_SLICES]:
        what = walk(name, tmp_path / name)
        shutil.rmtree(tmp_path / name, ignore_errors=True)
        num_whole += not what
        if what not in ("", "small"):
            wrong[name] = what
    assert wrong == {}
    assert num_whole >= 14
