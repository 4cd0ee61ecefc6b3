"""Models of strangers' configs in smoke runs: walls around every rank; nobody is blamed for what ckpt itself did."""

from __future__ import annotations

import json
import tempfile

import pytest
from corrupt.strangers.attacks import BY_DEED, fill
from corrupt.strangers.runner import Canary

from ckpt_tools.errors import RefusedConfigError, UsageError

XLNET = {
    "architectures": ["XLNetLMHeadModel"], "model_type": "xlnet",
    "d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64, "vocab_size": 200,
}  # fmt: skip
BERT = {
    "architectures": ["BertForMaskedLM"], "model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 200,
}  # fmt: skip


def write(directory, config):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


@pytest.mark.full
def test_model_that_has_no_limit_of_positions_runs(farm, tmp_path):
    report = farm.smoke(model=write(tmp_path / "model", XLNET), steps=1)
    assert report.ok, report.findings
    assert report.reload_same_world.bitwise


@pytest.mark.full
def test_model_that_fails_by_itself_is_no_finding_about_fsdp(farm, tmp_path):
    """The class takes this config, and no batch: an embedding without rows."""
    with pytest.raises(UsageError, match="a BertForMaskedLM fails unsharded, without FSDP") as caught:
        farm.smoke(model=write(tmp_path / "model", BERT | {"type_vocab_size": 0}))
    assert "--factory" in caught.value.hint
    assert caught.value.where.endswith("config.json")


def test_model_that_ckpt_cannot_feed_is_no_finding():
    import torch

    from ckpt_tools.models.hf_recipe import HfRecipe

    with pytest.raises(UsageError, match="ckpt cannot make a batch for a BertForMaskedLM: AttributeError"):
        HfRecipe(BERT, "config.json").batch(torch.nn.Linear(1, 1), 0)


@pytest.mark.full
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("deed", ["unpickle", "popen", "connect", "import_file", "c_open"])
def test_deed_in_a_rank_ends_the_run_with_what_it_tried(farm, tmp_path, deed, late):
    canary = Canary(tmp_path)
    try:
        config = fill(BY_DEED[f"deed-{deed}"], canary.words) | {"late": late, "vocab_size": 32}
        model = write(canary.place, config)
        canary.seen()
        with pytest.raises(RefusedConfigError) as caught:
            farm.smoke(model=model, plugin="corrupt.strangers.tomorrow:register")
        harm = [event for event in canary.harm() if "config.json" not in event]
        assert harm == []
    finally:
        canary.close()
    assert "TomorrowModel" in caught.value.what
    assert caught.value.exit_code == 2


@pytest.mark.full
def test_factory_is_the_users_own_code_and_has_no_walls(farm, tmp_path):
    (tmp_path / "own.txt").write_text("16")
    (tmp_path / "own_factory.py").write_text(
        "from pathlib import Path\nfrom ckpt_tools.models.builtin import SmallTransformer\n"
        "def make():\n    Path(__file__).with_name('own.txt').read_text()\n    return SmallTransformer()\n"
    )
    assert farm.smoke(factory="own_factory:make", path=tmp_path, steps=1).ok


@pytest.mark.parametrize(
    ("error", "kind", "what"),
    [
        (MemoryError(), UsageError, "needs more memory than allowed"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"), UsageError, "more memory than"),
        (PermissionError(13, "Permission denied"), RefusedConfigError, "needs files or hosts"),
        (
            RuntimeError("open failed: Permission denied (os error 13)"),
            RefusedConfigError,
            "needs files or hosts",
        ),
        (
            ValueError("head_dim\n" + "x" * 10_000),
            UsageError,
            "does not describe a LlamaForCausalLM: ValueError: head_dim",
        ),
    ],
)
def test_what_a_class_raises_is_told_as_what_it_was(error, kind, what):
    from ckpt_tools.models.config_recipe import refusal

    found = refusal(error, "LlamaForCausalLM", "config.json")
    assert type(found) is kind
    assert what in found.what
    assert len(found.what) < 300


def test_cut_that_the_class_refuses_is_ckpts_own(models):
    from ckpt_tools.models.hf_recipe import HfRecipe
    from ckpt_tools.sandbox.audit import Sandbox, in_sandbox

    recipe = HfRecipe(json.loads((models / "llama" / "config.json").read_text()), "config.json").shallower(1)
    recipe._values["hidden_size"] = "wide"
    sandbox = Sandbox(subject="a model", where="config.json", scratch=tempfile.gettempdir())
    with in_sandbox(sandbox), pytest.raises(UsageError, match="ckpt cut the model down") as caught:
        recipe.build()
    assert "--model" in caught.value.hint


def test_numbers_in_dropout_keep_their_type():
    """Configs are strict: MPT's attn_pdrop is whole, and ESM's token_dropout is no probability."""
    from ckpt_tools.models.hf_recipe import HfRecipe

    config = BERT | {"attn_pdrop": 1, "token_dropout": True, "hidden_dropout_prob": 0.1}
    values = HfRecipe(config, "config.json").settled()
    assert [repr(values[key]) for key in ("attn_pdrop", "token_dropout", "hidden_dropout_prob")] == ["0", "True", "0.0"]
