"""Settings against tensors: what was lost, contradicts the options or is another adapter's is never passed over."""

from __future__ import annotations

import copy
import json
import warnings

import pytest
import torch
from adapters.peft_world import randomise
from adapters.test_merge import adapt, assert_merged, configs, llama, save_model
from adapters.test_merge_base import embedding_config
from safetensors.torch import load_file, save_file

from ckpt_tools import api
from ckpt_tools.errors import CkptError, UsageError


def test_adapter_in_a_directory_beside_the_default_one_is_the_one_that_is_taken(tmp_path):
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings(action="ignore"):
        model = get_peft_model(llama(), LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj"]))
        model.add_adapter("two", LoraConfig(r=2, lora_alpha=9, target_modules=["o_proj"]))
        randomise(model, lambda name: "lora_" in name)
        model.save_pretrained(tmp_path / "both")
    api.export_lora(tmp_path / "both", tmp_path / "out", adapter="two")
    expected = load_file(tmp_path / "both" / "two" / "adapter_model.safetensors")
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["lora_alpha"] == 9


@pytest.mark.parametrize("lost", ["all", "one"])
def test_magnitudes_that_were_lost_are_an_error_everywhere(tmp_path, lost):
    model = llama()
    base = save_model(model, tmp_path / "base")
    expected = adapt(model, configs()["dora"], tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    whole = load_file(file)
    gone = [name for name in whole if "magnitude" in name and (lost == "all" or "q_proj" in name)]
    save_file({name: tensor for name, tensor in whole.items() if name not in gone}, file)
    report = api.check_lora(tmp_path / "adapter", loaders=["peft"])
    (finding,) = [f for f in report.findings if f.code == "adapter-missing-factor"]
    assert len(gone) == 1 or f"({len(gone)} times: " in finding.what
    assert not report.ok
    with pytest.raises(CkptError, match="use_dora is true"):
        api.merge_lora(base, tmp_path / "adapter", tmp_path / "out")
    assert not api.export_lora(tmp_path / "adapter", tmp_path / "out").ok
    assert not (tmp_path / "out").exists()

    save_file(whole, file)
    assert api.check_lora(tmp_path / "adapter", base=base, loaders=["peft"]).ok
    api.merge_lora(base, tmp_path / "adapter", tmp_path / "out")
    assert_merged(tmp_path / "out", expected, base)


def test_lora_bias_that_was_lost_is_an_error(tmp_path):
    model = llama(attention_bias=True)
    base = save_model(model, tmp_path / "base")
    adapt(model, embedding_config(target_modules=["q_proj"], lora_bias=True), tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    assert api.check_lora(tmp_path / "adapter", base=base, loaders=["peft"]).ok
    save_file({name: tensor for name, tensor in load_file(file).items() if not name.endswith("bias")}, file)
    report = api.check_lora(tmp_path / "adapter", loaders=["peft"])
    assert any(f.code == "adapter-missing-factor" and "B_bias" in f.what for f in report.findings)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"config": ['target_modules=["k_proj"]']}, "does not match"),
        ({"config": ['modules_to_save=["lm_head"]']}, "whole: none"),
        ({"architecture": "nonsense"}, "unknown model family"),
    ],
)
def test_options_that_the_tensors_contradict_are_refused_not_ignored(tmp_path, options, what):
    adapt(llama(), embedding_config(target_modules=["q_proj"]), tmp_path / "adapter")
    with pytest.raises(UsageError, match=what):
        api.export_lora(tmp_path / "adapter", tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.0.self_attn.k_proj.bias",
        "model.layers.0.self_attn.k_proj.base_layer.bias",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_proj.base_layer.bias",
        "model.layers.0.self_attn.nothing.bias",
    ],
)
@pytest.mark.parametrize("with_base", [True, False])
def test_simulated_peft_takes_the_base_s_own_tensors_as_the_real_one_does(tmp_path, name, with_base):
    from peft import PeftModel

    model = llama(attention_bias=True)
    base = save_model(model, tmp_path / "base")
    adapt(model, embedding_config(target_modules=["q_proj"]), tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    plain = name.replace(".base_layer", "")
    before = model.state_dict().get(plain, torch.zeros(32))
    save_file(load_file(file) | {f"base_model.model.{name}": before + 1}, file)
    with warnings.catch_warnings(action="ignore"):
        loaded = PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "adapter").merge_and_unload().state_dict()
    is_taken = plain in loaded and torch.allclose(loaded[plain], before + 1)
    report = api.check_lora(tmp_path / "adapter", base=base if with_base else None, loaders=["peft"])
    if with_base or "nothing" not in name:
        assert report.loaders[0].is_whole is is_taken


@pytest.mark.parametrize("options", [{}, {"target_modules": ["q_proj"], "bias": "all"}], ids=["embedding", "biases"])
def test_what_peft_saves_itself_is_ok(tmp_path, options):
    model = llama(attention_bias=True)
    base = save_model(model, tmp_path / "base")
    adapt(model, embedding_config(**options), tmp_path / "adapter")
    assert api.check_lora(tmp_path / "adapter", loaders=["peft"]).verdict == "unknown"
    assert api.check_lora(tmp_path / "adapter", base=base, loaders=["peft"]).ok
