"""The loader's contract: every parameter and buffer is loaded, computed by its own module, or reported.

What `from_pretrained` makes of the same files is the oracle, bit for bit; memory is poisoned before the load.
"""

from __future__ import annotations

import logging
import re
import shutil

import pytest
import torch
import transformers
from names import zoo
from safetensors.torch import load_file, save_file
from torch import nn

from ckpt_tools.errors import CkptError
from ckpt_tools.fsdp2 import load_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")
QUICK = ("MarianMTModel", "DeepseekV3ForCausalLM", "T5ForConditionalGeneration")
_SLICES, _OF = 8, 8
"""Without --zoo, one architecture of so many."""
KNOWN = dict.fromkeys(("ChineseCLIPModel", "ChineseCLIPTextModel"), "from_pretrained clears a row that it has loaded")
"""Classes that are not as from_pretrained makes them, and why."""


def poisoned(model: nn.Module) -> nn.Module:
    """Give a model on meta memory full of garbage."""
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(float("nan") if tensor.is_floating_point() else 1)
    return model


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer, each name of a shared one."""
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def differing(model: nn.Module, expected: nn.Module) -> list[str]:
    """The names whose bytes differ."""

    def content(tensor: torch.Tensor) -> tuple[object, ...]:
        return tensor.dtype, tensor.shape, tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

    found = tensors(model)
    return [name for name, one in tensors(expected).items() if content(one) != content(found[name])]


def drop(directory, is_out) -> list[str]:
    """Leave tensors out of a file."""
    file = directory / "model.safetensors"
    state = load_file(file)
    gone = [name for name in state if is_out(name)]
    save_file({name: one for name, one in state.items() if name not in gone}, file, metadata={"format": "pt"})
    return gone


def walk(name: str, directory) -> str:
    """Return "" or what is wrong; "small" for a model that does not build small."""
    saved = zoo.save(name, directory)
    if saved is None:
        return "small"
    patterns = saved._keys_to_ignore_on_load_missing or ()
    if (directory / "model.safetensors").exists():
        drop(directory, lambda key: any(re.search(pattern, key) for pattern in patterns))
    torch.manual_seed(3)
    expected, info = type(saved).from_pretrained(directory, output_loading_info=True)
    try:
        model = poisoned(zoo.build(name, saved.config.to_dict(), "meta"))
    except AttributeError:  # JevForDecision does not take its own config
        return "small"
    torch.manual_seed(3)
    try:
        load_checkpoint(model, directory)
    except CkptError as error:
        return f"refused: {error}"
    wrong = differing(model, expected)
    return f"differs: {wrong[:3]}; missing there: {sorted(info['missing_keys'])[:3]}" if wrong else ""


@pytest.mark.parametrize("name", QUICK)
def test_poisoned_memory_becomes_what_from_pretrained_makes(name, tmp_path) -> None:
    transformers.utils.logging.set_verbosity(logging.CRITICAL)
    assert walk(name, tmp_path) == ""


@pytest.mark.full
@pytest.mark.parametrize("at", range(_SLICES))
def test_every_class_that_builds_small_becomes_what_from_pretrained_makes(at, tmp_path, request) -> None:
    transformers.utils.logging.set_verbosity(logging.CRITICAL)
    wrong, tried = {}, 0
    for name in zoo.all_names()[at :: _SLICES * (1 if request.config.getoption("--zoo") else _OF)]:
        what = walk(name, tmp_path / name)
        shutil.rmtree(tmp_path / name, ignore_errors=True)
        tried += what != "small"
        if what not in ("", "small") and name not in KNOWN:
            wrong[name] = what
    print(f"{tried} classes")
    assert wrong == {}
    assert tried
