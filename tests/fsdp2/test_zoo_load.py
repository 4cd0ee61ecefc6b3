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
    config = zoo.small_config(name)
    if config is None:
        return "small"
    try:
        saved = zoo.build(name, config, "cpu")
        with torch.no_grad():
            for parameter in saved.parameters():
                if parameter.is_floating_point():
                    parameter.normal_()
        saved.save_pretrained(directory)
        live = zoo.build(name, config, "meta")
    except Exception:  # a class that cannot be built or saved has nothing to say here
        return "small"
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
