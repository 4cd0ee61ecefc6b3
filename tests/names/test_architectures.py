"""What transformers saves, and what is live, is accepted for its architecture exactly when from_pretrained loads it."""

from __future__ import annotations

import random

import pytest
from names.worlds import config_beside, loading_problems, save_live, tiny

from ckpt_tools import api
from ckpt_tools.errors import UsageError

QUICK = ["ViTForImageClassification"]
FULL = [
    "CLIPModel", "DeepseekV3ForCausalLM", "Gemma3ForConditionalGeneration", "GPT2LMHeadModel", "GptOssForCausalLM",
    "Qwen3MoeForCausalLM", "Wav2Vec2ForCTC",
]  # fmt: skip
"""Of every kind of conversion one: `test_zoo` walks all of them."""
ZOO = [
    "LlavaForConditionalGeneration", "MambaForCausalLM", "T5ForConditionalGeneration",
    "BartForConditionalGeneration", "BertForMaskedLM", "FalconForCausalLM", "MixtralForCausalLM", "Phi3ForCausalLM",
    "Qwen2_5_VLForConditionalGeneration", "Qwen3NextForCausalLM", "RobertaForSequenceClassification",
    "WhisperForConditionalGeneration",
]  # fmt: skip
MORE = [pytest.param(name, marks=pytest.mark.full) for name in FULL]
MORE += [pytest.param(name, marks=[pytest.mark.full, pytest.mark.zoo]) for name in ZOO]


@pytest.mark.parametrize("name", [*QUICK, *MORE])
@pytest.mark.filterwarnings("ignore")  # transformers' own, of toy configs
def test_names_are_accepted_exactly_when_they_load(tmp_path, name):
    model = tiny(name)
    model.save_pretrained(tmp_path / "hf")
    api.shard(tmp_path / "hf", tmp_path / "dcp", mesh="dp_shard=2")
    done = api.gather(tmp_path / "dcp", tmp_path / "out", max_shard_size="5GB")
    assert (done.architecture, done.warnings, done.not_checked) == (name, (), ())
    assert not loading_problems(type(model), tmp_path / "out")

    assets = config_beside(model, tmp_path / "assets")
    state = model.state_dict()
    for dropped in (None, random.Random(0).choice(sorted(state))):
        source = save_live({key: value for key, value in state.items() if key != dropped}, tmp_path / "live")
        try:
            api.gather(source, tmp_path / "out", assets=assets, overwrite=True)
            refused = False
        except UsageError:
            api.gather(source, tmp_path / "out", assets=assets, overwrite=True, allow_foreign_names=True)
            refused = True
        assert refused == bool(loading_problems(type(model), tmp_path / "out"))
