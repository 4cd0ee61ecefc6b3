"""Trained tokens (PEFT's TrainableTokens and trainable_token_indices) against PEFT's own forward and merge."""

from __future__ import annotations

import copy
import json
import shutil
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import toys
from adapters.peft_world import randomise

from ckpt_tools import api
from ckpt_tools.errors import CkptError, UsageError

LORA = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
BOTH = {"embed_tokens": [1, 5], "lm_head": [3]}
SAME = {"embed_tokens": [1, 5], "lm_head": [1, 5]}
TEXT = torch.tensor([[1, 5, 3, 7, 9, 1]])
CASES = {
    "list": ("llama", False, "Lora", LORA | {"trainable_token_indices": [5, 1]}),
    "list, tied": ("llama", True, "Lora", LORA | {"trainable_token_indices": [5, 1]}),
    "two layers": ("llama", False, "Lora", LORA | {"trainable_token_indices": BOTH}),
    "two layers, tied alike": ("llama", True, "Lora", LORA | {"trainable_token_indices": SAME}),
    "two layers, tied unlike": ("llama", True, "Lora", LORA | {"trainable_token_indices": BOTH}),
    "head": ("llama", False, "Lora", LORA | {"trainable_token_indices": {"lm_head": [3]}}),
    "beside a head that is saved": (
        "llama", False, "Lora", LORA | {"trainable_token_indices": [1], "modules_to_save": ["lm_head"]},
    ),
    "beside a head's LoRA, tied": (
        "llama", True, "Lora", LORA | {"trainable_token_indices": [1], "target_modules": ["q_proj", "lm_head"]},
    ),
    "alone": ("llama", False, "TrainableTokens", {"token_indices": [5, 1]}),
    "alone, tied": ("llama", True, "TrainableTokens", {"token_indices": [5, 1], "target_modules": ["embed_tokens"]}),
    "alone, two layers": (
        "llama", False, "TrainableTokens", {"token_indices": [5, 1], "target_modules": ["embed_tokens", "lm_head"]},
    ),
    "gpt2, tied": ("gpt2", True, "TrainableTokens", {"token_indices": [5, 1], "target_modules": ["wte"]}),
}  # fmt: skip
UNMERGEABLE = ("two layers, tied unlike", "beside a head's LoRA, tied")
"""A tied base has one tensor for what the adapter makes two."""


class World(NamedTuple):
    model: torch.nn.Module
    trained: torch.nn.Module
    path: Path


def world(path: Path, name: str) -> World:
    """Train an adapter; save its base, PEFT's files, and DCP directories with and without the frozen weights."""
    import peft
    import torch.distributed.checkpoint as dcp

    kind, is_tied, config, fields = CASES[name]
    torch.manual_seed(0)
    small = {"intermediate_size": 32, "num_hidden_layers": 1} if kind == "llama" else {"n_layer": 1}
    model = toys.build(kind, **small, vocab_size=32, tie_word_embeddings=is_tied).eval()
    with warnings.catch_warnings(action="ignore"):
        model.save_pretrained(path / "base")
        trained = peft.get_peft_model(copy.deepcopy(model), getattr(peft, f"{config}Config")(**fields)).eval()
        randomise(trained, lambda each: "lora_" in each or "trainable_tokens_delta" in each)
        trained.save_pretrained(path / "peft")
        state = trained.state_dict()
        own = {each: t for each, t in state.items() if "lora_" in each or "_delta" in each or "to_save" in each}
        dcp.save({"model": state}, checkpoint_id=path / "whole")
        dcp.save(own, checkpoint_id=path / "own")
    return World(model, trained, path)


def config_of(name: str) -> list[str]:
    fields = CASES[name][3]
    return [f"{key}={json.dumps(value)}" for key, value in fields.items() if "indices" in key]


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TEXT).logits


QUICK = ("list, tied", "alone")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in CASES])
def test_what_is_exported_checked_and_merged_is_what_was_trained(name: str, tmp_path: Path) -> None:
    from peft import PeftModel

    model, trained, path = world(tmp_path, name)
    wanted = logits(trained)
    alpha = None if "lora_alpha" not in CASES[name][3] else 4
    for source, options in (
        ("peft", {}),
        ("whole", {"alpha": alpha, "config": config_of(name)}),
        ("own", {"alpha": alpha, "config": config_of(name), "base": path / "base"}),
    ):
        out = path / f"from-{source}"
        assert api.export_lora(path / source, out, **options).ok
        with warnings.catch_warnings(action="ignore"):
            loaded = PeftModel.from_pretrained(copy.deepcopy(model), out).eval()
        assert torch.equal(logits(loaded), wanted), source
        assert api.check_lora(out, base=path / "base").verdict == "loads"
    if name in UNMERGEABLE:
        with pytest.raises(UsageError, match=r"lm_head|ties"):
            api.merge_lora(path / "base", path / "peft", path / "merged")
        return
    api.merge_lora(path / "base", path / "peft", path / "merged")
    with warnings.catch_warnings(action="ignore"):
        merged = type(model).from_pretrained(path / "merged").eval()
    assert (logits(merged) - wanted).abs().max() <= 1e-6


def test_a_tied_base_that_stores_its_head_gets_the_rows_twice(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    _, trained, path = world(tmp_path, "list, tied")
    file = path / "base" / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file, {"format": "pt"})
    api.merge_lora(path / "base", path / "peft", path / "merged")
    merged = load_file(path / "merged" / "model.safetensors")
    rows = trained.base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta["default"]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(merged[name][[5, 1]], rows)


def said_of_export(path: Path) -> str:
    try:
        return str(api.export_lora(path / "peft", path / "out").findings)
    except CkptError as error:
        return str(error)


@pytest.mark.full
@pytest.mark.parametrize(
    ("indices", "what"),
    [
        ([1, 2, 3], "2 rows, and indices of 3"),
        ([-1, 2], "from 0 on"),
        ([1, 1], "different"),
        ([1.5, 2], "whole numbers"),
        (None, "not recorded"),
        ("1,5", "not recorded"),
        ({"wte": [1, 5]}, "not recorded"),
        ([1, 100], "resized before"),
    ],
)
def test_tokens_that_cannot_be_meant_are_refused(indices: object, what: str, tmp_path: Path) -> None:
    path = world(tmp_path, "list").path
    file = path / "peft" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"trainable_token_indices": indices}))
    result = api.check_lora(path / "peft", base=path / "base")
    if "resized" in what:  # PEFT loads it once the model has as many rows
        assert [finding.code for finding in result.findings] == ["loader-needs"]
    else:
        assert result.verdict == "fails"
        assert what in said_of_export(path)
    with pytest.raises(CkptError, match=what):
        api.merge_lora(path / "base", path / "peft", path / "merged")
    assert not (path / "merged").exists()
    assert not (path / "out").exists()


@pytest.mark.full
def test_rows_of_another_width_are_for_another_base(tmp_path: Path) -> None:
    path = world(tmp_path, "alone").path
    toys.build("llama", hidden_size=24, intermediate_size=32, vocab_size=32).save_pretrained(path / "other")
    assert api.check_lora(path / "peft", base=path / "other").verdict == "fails"


def test_tokens_that_were_left_out_are_not_asked_for(tmp_path: Path) -> None:
    path = world(tmp_path, "list").path
    api.export_lora(path / "peft", path / "out", exclude=["**trainable_tokens_**"])
    assert "trainable_token_indices" not in json.loads((path / "out" / "adapter_config.json").read_text())
    with pytest.raises(UsageError, match="cannot be written"):
        api.export_lora(path / "peft", path / "tokens", include=["**trainable_tokens_**"])


@pytest.mark.full
def test_vllm_refuses_them_and_scale_leaves_them(tmp_path: Path) -> None:
    path = world(tmp_path, "list").path
    assert api.check_lora(path / "peft", loaders=["vllm"]).verdict == "fails"
    shutil.rmtree(path / "whole")
    notes = api.merge_lora(path / "base", path / "peft", path / "merged", scale=0.5).notes
    assert any("no scale applies" in note for note in notes)
