"""The configuration from tensors, held against PEFT's own rules."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, strategies as st
from safetensors.torch import save_file

from ckpt_tools import api
from ckpt_tools.adapters.base.model import parents_of
from ckpt_tools.adapters.ecosystems.peft.config import exact_pattern, minimal_saved, minimal_suffixes
from ckpt_tools.adapters.ecosystems.peft.config_rules import matched
from ckpt_tools.adapters.families import PEFT_TYPES
from ckpt_tools.adapters.families.lokr import factorization
from ckpt_tools.adapters.families.oft import adjusted
from ckpt_tools.adapters.read.sidecars import by_pattern
from ckpt_tools.errors import UsageError

ROOT = "base_model.model."


@given(st.integers(1, 3000), st.one_of(st.just(-1), st.integers(1, 64)))
def test_factorization_is_peft_s(dimension, factor):
    from peft.tuners.lokr.layer import factorization as theirs

    assert factorization(dimension, factor) == theirs(dimension, factor)


@given(st.integers(1, 600), st.integers(1, 600))
def test_block_sizes_are_adjusted_as_peft_does(dimension, wanted):
    from peft.tuners.oft.layer import OFTLayer

    if dimension % wanted or wanted > dimension:  # PEFT only then
        assert adjusted(dimension, wanted) == OFTLayer.adjust_oft_parameters(None, dimension, wanted)
    else:
        assert adjusted(dimension, wanted) == wanted


NAMES = st.lists(st.sampled_from("abq"), min_size=1, max_size=4).map(".".join)


@given(st.sets(NAMES, min_size=1, max_size=12), st.data())
def test_minimal_suffixes_match_the_adapted_modules_alone_by_peft_s_rule(names, data):
    from peft.tuners.tuners_utils import check_target_module_exists

    modules = parents_of(f"{name}.weight" for name in names)
    adapted = data.draw(st.sets(st.sampled_from(sorted(modules)), min_size=1))
    found = minimal_suffixes(adapted, modules)
    target = exact_pattern(adapted) if found is None else list(found)
    config = SimpleNamespace(target_modules=target)
    assert {name for name in modules if check_target_module_exists(config, name)} == adapted
    assert {name for name in modules if matched(target, name)} == adapted


@given(
    st.lists(st.tuples(st.sampled_from(["q", "^a.q", r"a\.q", "b.*q", "^q", "a|b"]), st.integers()), max_size=3), NAMES
)
def test_patterns_are_looked_up_as_peft_does(rows, path):
    from peft.utils.other import get_pattern_key

    table = dict(rows)
    found, value = by_pattern(table, path, where="x")
    key = get_pattern_key(table.keys(), path)
    assert (found, value) == (key in table, table.get(key))


@given(st.sets(NAMES, min_size=1, max_size=8), st.data())
def test_names_of_saved_modules_match_these_alone_by_peft_s_rule(names, data):
    modules = parents_of(f"{name}.weight" for name in names)
    saved = data.draw(st.sets(st.sampled_from(sorted(names)), min_size=1))
    found = minimal_saved(saved, modules)
    if found is None:
        assert any(module.endswith(name) for name in saved for module in modules - saved)
    else:
        assert {name for name in modules if any(name.endswith(key) for key in found)} == saved


def write(tensors, path):
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path


def pairs(ranks, width=8, height=6, **extra):
    tensors = {}
    for path, rank in ranks.items():
        tensors[f"{ROOT}{path}.lora_A.weight"] = torch.randn(rank, width)
        tensors[f"{ROOT}{path}.lora_B.weight"] = torch.randn(height, rank)
        for name, shape in extra.items():
            tensors[f"{ROOT}{path}.{name}"] = torch.randn(shape)
    return tensors


def config_of(tensors, tmp_path, **options):
    result = api.export_lora(write(tensors, tmp_path / "a.safetensors"), tmp_path / "out", **options)
    assert result.ok, result.findings
    return {name: found.value for name, found in result.config.items()}


def test_most_frequent_rank_is_the_rank_and_the_others_are_patterns_for_one_module_each(tmp_path):
    config = config_of(pairs({"m.1.q": 4, "m.11.q": 8, "m.2.q": 4, "x.m.1.q": 2}), tmp_path, alpha=16)
    assert config["r"] == 4
    assert config["lora_alpha"] == 16
    assert config["alpha_pattern"] == {}
    assert config["rank_pattern"] == {r"^m\.11\.q": 8, r"^x\.m\.1\.q": 2}
    assert config["target_modules"] == ["m.1.q", "m.11.q", "m.2.q", "x.m.1.q"]


def base_of(tmp_path, *names):
    return write({name: torch.ones(6, 8) for name in names}, tmp_path / "base.safetensors")


def test_targets_are_shortened_where_the_base_proves_it(tmp_path):
    base = base_of(tmp_path, "m.1.q.weight", "m.2.q.weight", "m.1.k.weight", "head.weight")
    config = config_of(pairs({"m.1.q": 4, "m.2.q": 4}), tmp_path, alpha=8, base=base)
    assert config["target_modules"] == ["q"]


def test_targets_that_no_list_can_name_are_a_pattern(tmp_path):
    base = base_of(tmp_path, "q.weight", "m.q.weight")
    config = config_of(pairs({"q": 4}), tmp_path, alpha=8, base=base)
    assert config["target_modules"] == "q"  # a text is a pattern for whole paths


def test_alpha_is_written_as_a_whole_number_where_it_is_one(tmp_path):
    config = config_of(pairs({"m.q": 4}), tmp_path, alpha=8.0)
    assert json.dumps(config["lora_alpha"]) == "8"
    assert config_of(pairs({"m.q": 4}), tmp_path, alpha=0.5, overwrite=True)["lora_alpha"] == 0.5


def test_task_type_comes_from_the_base_s_architecture(tmp_path):
    (tmp_path / "base").mkdir()
    write({"m.q.weight": torch.ones(6, 8)}, tmp_path / "base" / "model.safetensors")
    (tmp_path / "base" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert config_of(pairs({"m.q": 4}), tmp_path, alpha=8, base=tmp_path / "base")["task_type"] == "CAUSAL_LM"


@pytest.mark.parametrize(
    ("tensors", "options", "what", "hint"),
    [
        (
            pairs({"a.q": 4}, lora_magnitude_vector=(6,)) | pairs({"b.q": 4}), {"alpha": 8},
            "1 of 2 modules have magnitudes", "separately",
        ),
        ({f"{ROOT}q.oft_R.weight": torch.randn(2, 6)}, {}, "use_cayley_neumann, coft", "--config coft=true|false"),
        (
            {f"{ROOT}q.oft_R.weight": torch.randn(2, 6)}, {"config": ["use_cayley_neumann=true", "coft=true"]},
            "num_cayley_neumann_terms, peft_version, eps", "--config eps=VALUE",
        ),
        ({f"{ROOT}q.oft_R.weight": torch.randn(1, 6)}, {}, "block_share", "--config block_share=true|false"),
        ({f"{ROOT}q.oft_R.weight": torch.randn(2, 7)}, {}, "no rotations of any block size", None),
        ({f"{ROOT}q.oft_R.weight": torch.randn(2, 6)}, {"alpha": 8}, "--alpha needs a LoRA", None),
        (
            pairs({"a.q": 4}) | {f"{ROOT}b.hada_w{i}_{s}": torch.randn(4, 4) for i in "12" for s in "ab"},
            {"alpha": 8}, "an adapter of PEFT has one type, but here are loha and lora", "one by one",
        ),
        (
            {f"{ROOT}q.lokr_w1": torch.randn(2, 2), f"{ROOT}q.lokr_w2": torch.randn(4, 4)}, {"alpha": 8},
            "the rank of 'q' is not known", "--config r=VALUE",
        ),
        (
            pairs({"mlp.experts": 8}) | pairs({"mlp.experts.base_layer": 8}), {"alpha": 8},
            "PEFT's target_parameters", "--config r=VALUE",
        ),
        (
            pairs({"mlp.experts": 8}) | pairs({"mlp.experts.base_layer": 8}), {"alpha": 8, "config": ["r=2"]},
            "parameters of modules", "target_parameters",
        ),
    ],
    ids=[
        "some-magnitudes", "oft", "oft-more", "oft-shared", "oft-odd", "oft-alpha", "families", "lokr-rank",
        "experts-rank", "experts-names",
    ],
)  # fmt: skip
def test_what_cannot_be_inferred_is_asked_for_or_refused(tmp_path, tensors, options, what, hint):
    path = write(tensors, tmp_path / "a.safetensors")
    with pytest.raises(UsageError) as caught:
        api.export_lora(path, tmp_path / "out", **options)
    assert what in caught.value.what
    assert hint is None or hint in caught.value.hint
    assert not (tmp_path / "out").exists()


def test_full_differences_are_not_peft_s(tmp_path):
    path = write({"lycoris_q.diff": torch.randn(6, 8)}, tmp_path / "a.safetensors")
    base = base_of(tmp_path, "q.weight")
    with pytest.raises(UsageError, match="PEFT has no form for full differences"):
        api.export_lora(path, tmp_path / "out", base=base)


def test_saved_module_whose_name_ends_another_s_goes_into_the_base_s_own(tmp_path):
    import warnings

    from peft import PeftModel
    from torch import nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.q, self.head, self.lm_head = nn.Linear(8, 6), nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            return self.lm_head(self.head(self.q(x)))

    save_file(Model().state_dict(), tmp_path / "base.safetensors")
    head = {f"{ROOT}head.weight": torch.randn(6, 6), f"{ROOT}head.bias": torch.randn(6)}
    config = config_of(pairs({"q": 4}) | head, tmp_path, alpha=8, base=tmp_path / "base.safetensors")
    assert config["modules_to_save"] is None
    with warnings.catch_warnings(action="error"):
        model = PeftModel.from_pretrained(Model(), tmp_path / "out")
    assert torch.equal(model.get_submodule("base_model.model.head").weight, head[f"{ROOT}head.weight"])
    assert torch.equal(model.get_submodule("base_model.model.lm_head").weight, Model().lm_head.weight)


def test_settings_of_a_configuration_beside_the_tensors_are_kept(tmp_path):
    write(pairs({"m.q": 4, "m.k": 4}), tmp_path / "adapter_model.safetensors")
    beside = {
        "peft_type": "LORA", "r": 4, "lora_alpha": 32, "target_modules": r".*\.(q|k)", "init_lora_weights": "pissa",
        "lora_dropout": 0.1, "use_rslora": True, "base_model_name_or_path": "org/base", "mystery": 1,
    }  # fmt: skip
    (tmp_path / "adapter_config.json").write_text(json.dumps(beside))
    result = api.export_lora(tmp_path, tmp_path.parent / f"{tmp_path.name}-out", base_model="org/other")
    config = {name: found.value for name, found in result.config.items()}
    assert config["target_modules"] == r".*\.(q|k)"
    assert config["init_lora_weights"] == "pissa"
    assert config["lora_dropout"] == 0.1
    assert config["use_rslora"] is True
    assert config["base_model_name_or_path"] == "org/other"
    assert "mystery" not in config


def test_targets_of_a_configuration_that_do_not_cover_the_adapter_are_replaced(tmp_path):
    write(pairs({"m.q": 4, "m.k": 4}), tmp_path / "adapter_model.safetensors")
    beside = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q"], "layers_to_transform": [0]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(beside))
    result = api.export_lora(tmp_path, tmp_path.parent / f"{tmp_path.name}-out")
    assert result.config["target_modules"].value == ["m.k", "m.q"]
    assert "layers_to_transform" not in result.config


def test_fields_are_those_of_peft_s_own_configurations():
    import dataclasses

    from peft import PEFT_TYPE_TO_CONFIG_MAPPING

    for kind, family in PEFT_TYPES.items():
        theirs = {field.name for field in dataclasses.fields(PEFT_TYPE_TO_CONFIG_MAPPING[kind])}
        assert family.is_carried or family.peft_fields == theirs - {"peft_type", "runtime_config"}


@pytest.mark.parametrize(
    ("setting", "what"),
    [
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is pissa_niter_4: the base was changed"),
        ({"init_lora_weights": "olora"}, "init_lora_weights is olora"),
        ({"use_qalora": True}, "QALoRA pools"),
        ({"alora_invocation_tokens": [1, 2]}, "aLoRA acts only on"),
        ({"layer_replication": [[0, 1]]}, "layers are replicated"),
    ],
)
def test_variant_that_its_factors_do_not_tell_stays_peft_s(tmp_path, setting, what):
    source = tmp_path / "a"
    source.mkdir()
    write(pairs({"model.layers.0.self_attn.q_proj": 4}), source / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], **setting}
    (source / "adapter_config.json").write_text(json.dumps(config))
    write({"model.layers.0.self_attn.q_proj.weight": torch.ones(6, 8)}, tmp_path / "base.safetensors")
    assert api.export_lora(source, tmp_path / "peft").config[next(iter(setting))].value == next(iter(setting.values()))
    for refused in (
        lambda: api.export_lora(source, tmp_path / "out", to="comfyui"),
        lambda: api.merge_lora(tmp_path / "base.safetensors", source, tmp_path / "out"),
    ):
        with pytest.raises(UsageError) as caught:
            refused()
        assert what in caught.value.what
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("version", "is_refused"), [(None, True), ("0.17.1", True), ("0.18.0", False), ("0.21.2", False)]
)
def test_rotations_of_an_older_peft_are_not_merged(tmp_path, version, is_refused):
    source = tmp_path / "a"
    source.mkdir()
    write({f"{ROOT}q.oft_R.weight": torch.randn(2, 6)}, source / "adapter_model.safetensors")
    config = {
        "peft_type": "OFT", "oft_block_size": 4, "r": 0, "use_cayley_neumann": True, "num_cayley_neumann_terms": 5,
        "coft": False, "block_share": False, "peft_version": version,
    }  # fmt: skip
    (source / "adapter_config.json").write_text(json.dumps(config))
    write({"q.weight": torch.randn(6, 8)}, tmp_path / "base.safetensors")
    if is_refused:
        with pytest.raises(UsageError, match="computed different rotations"):
            api.merge_lora(tmp_path / "base.safetensors", source, tmp_path / "out")
    else:
        api.merge_lora(tmp_path / "base.safetensors", source, tmp_path / "out")
        assert (tmp_path / "out").exists()
