"""`check-lora --base` against the libraries themselves: what they load as it was trained is ok, and nothing else is.

Adapters of 33 kinds of models, healthy and damaged. The bulk is `full`; a few of every sort always run.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
from adapters import world_adapters, world_pipelines
from adapters.families import save_dcp
from adapters.world_models import LANGUAGE
from adapters.world_oracle import TOLERANCE, Worlds, does_what_was_trained
from safetensors.torch import load_file

from ckpt_tools import api
from ckpt_tools.adapters.check import check_lora
from ckpt_tools.errors import UnreadableError, UsageError

HARMLESS = frozenset({"mistral: names twice", "mistral: a module too many", "qwen-image: other targets"})
"""Damages behind which the library still finds the whole adapter: ckpt says them all the same."""
NOT_JUDGED = frozenset({"mistral: unknown type"})
"""Of a kind of which nothing is known: neither ok nor wrong."""
UNREADABLE = frozenset({"mistral: rank -2", "mistral: rank as text", "mistral: alpha as text", "mistral: names twice"})
QUICK = frozenset(
    {
        "phi3, fused qkv", "gpt2, Conv1D and all biases", "gpt-oss, experts", "bert, biases of its targets", "sd15",
        "wan", "phi3: prefix lost", "gpt-oss: experts lost", "mistral: targets too few", "t5: decoder lost",
        "wan: prefix lost", "whisper: a task that breaks it", "mistral: one B zero", "sd15: one B lost",
    }
)  # fmt: skip


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    return Worlds(tmp_path_factory.mktemp("worlds"))


@pytest.mark.full(but=QUICK)
@pytest.mark.parametrize("name", [*world_adapters.HEALTHY, *world_pipelines.HEALTHY])
def test_healthy_adapter_is_ok(name: str, worlds: Worlds) -> None:
    trained = worlds.trained(name)
    assert does_what_was_trained(trained, trained.directory)
    result = check_lora(trained.directory, base=trained.base)
    assert result.verdict == "loads", (result.findings, result.not_checked)
    assert not [finding for finding in result.findings if finding.severity != "info"]


@pytest.mark.full(but=QUICK)
@pytest.mark.parametrize("name", [*world_adapters.DAMAGED, *world_pipelines.DAMAGED])
def test_damaged_adapter_is_never_ok(name: str, worlds: Worlds, tmp_path: Path) -> None:
    trained = worlds.damaged(name, tmp_path)
    assert does_what_was_trained(trained, tmp_path) is (name in HARMLESS)
    try:
        result = check_lora(tmp_path, base=trained.base)
    except UnreadableError as error:  # a field of an impossible type, two tensors for one factor
        assert name in UNREADABLE, error  # noqa: PT017
        return
    wanted = "unknown" if name in NOT_JUDGED else "fails"
    assert result.verdict == wanted, (result.findings, result.not_checked)


# Bases whose tensors have other names on disk than in the live model that the adapter was trained on

TASKS = {
    "t5, feed-forward": "SEQ_2_SEQ_LM", "mistral, head saved": "CAUSAL_LM", "whisper": None, "wav2vec2": None,
    "clip": None, "vit": None,
}  # fmt: skip
"""Adapter → the task type for which PEFT's forward is one that the model understands."""
BASES = (
    *TASKS, "llava", "llava, head and projector", "llava, language model alone", "paligemma", "gemma3-images, DoRA",
    "mistral3", "internvl", "mllama", "qwen2.5-vl", "qwen3-vl", "dinov2", "mixtral, experts",
    "gpt2, published without its head", "bert, published without its head", "t5, an embedding", "bart, embeddings",
)  # fmt: skip
QUICK_BASES = {
    "llava", "llava, head and projector", "qwen2.5-vl", "gpt2, published without its head", "t5, an embedding",
    "t5, feed-forward", "whisper",
}  # fmt: skip
NOT_MERGED = {
    "t5, an embedding", "bart, embeddings",  # one of the names of a shared tensor
    "bert, published without its head",  # its trained head is not in the base
}  # fmt: skip


def save_training(adapter: Path, path: Path) -> None:
    """Save what was trained as `dcp.save` has it, under the names of the wrapped model."""
    state = {}
    for name, tensor in load_file(adapter / "adapter_model.safetensors").items():
        parent, _, leaf = name.rpartition(".")
        if ".base_layer." in name:
            continue  # PEFT saves a head that it adapts, and does not train its weight
        if "lora_" not in name:
            state[f"{parent}.modules_to_save.default.{leaf}"] = tensor
        elif "lora_embedding" in name:
            state[f"{name}.default"] = tensor
        else:
            state[f"{parent}.default.{leaf}"] = tensor
    save_dcp({"model": state}, path)


@pytest.mark.full(but=QUICK_BASES)
@pytest.mark.parametrize("name", BASES)
def test_exported_against_a_base_with_other_names_it_does_what_was_trained(name, worlds, tmp_path):
    trained = worlds.trained(name)
    assert api.export_lora(trained.directory, tmp_path / "peft", base=trained.base).ok
    assert does_what_was_trained(trained, tmp_path / "peft")
    assert check_lora(tmp_path / "peft", base=trained.base).ok
    assert task_in(tmp_path / "peft") == task_in(trained.directory)  # what it does not say stays unsaid
    if "experts" in name or "DoRA" in name:
        return
    save_training(trained.directory, tmp_path / "dcp")
    assert api.export_lora(tmp_path / "dcp", tmp_path / "from_dcp", base=trained.base, alpha=4).ok
    assert does_what_was_trained(trained, tmp_path / "from_dcp")
    assert name not in TASKS or task_in(tmp_path / "from_dcp") == TASKS[name]


def task_in(path: Path) -> object:
    return json.loads((path / "adapter_config.json").read_text())["task_type"]


@pytest.mark.full(but=QUICK_BASES)
@pytest.mark.parametrize("name", [name for name in BASES if name not in NOT_MERGED])
def test_merged_into_a_base_with_other_names_it_does_what_was_trained(name, worlds, tmp_path):
    trained = worlds.trained(name)
    api.merge_lora(trained.base, trained.directory, tmp_path / "merged")
    world = LANGUAGE[name.partition(",")[0] if "published" not in name else "gpt2-published"]
    with warnings.catch_warnings(action="ignore"):
        model = type(world.build()).from_pretrained(tmp_path / "merged")
    assert torch.allclose(world.outputs(model), trained.meant, atol=10 * TOLERANCE)


def test_an_adapter_of_the_language_model_alone_is_not_one_of_the_model_around_it(worlds, tmp_path):
    # PEFT would find none of `model.layers…` in LLaVA, whose language model is `model.language_model`.
    alone, around = worlds.trained("mistral"), worlds.trained("llava")
    result = api.export_lora(alone.directory, tmp_path / "out", base=around.base)
    assert {finding.code for finding in result.findings} == {"adapter-unmatched"}
    assert check_lora(alone.directory, base=around.base).verdict == "fails"


def test_a_base_of_another_size_is_refused_under_its_live_names(worlds, tmp_path):
    narrow, wide = worlds.trained("llava"), worlds.trained("qwen2.5-vl")
    result = api.export_lora(wide.directory, tmp_path / "out", base=narrow.base)
    assert "adapter-unmatched" in {finding.code for finding in result.findings}
    with pytest.raises(UsageError):
        api.merge_lora(narrow.base, wide.directory, tmp_path / "merged")
