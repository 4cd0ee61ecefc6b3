"""The configuration from tensors, compared with PEFT's own rules; what nothing says is marked, field by field."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from adapters import families
from hypothesis import given, strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from ckpt_tools import api
from ckpt_tools.adapters.base.model import parents_of
from ckpt_tools.adapters.check import check_lora
from ckpt_tools.adapters.ecosystems.peft.config_rules import matched
from ckpt_tools.adapters.ecosystems.peft.infer_config import exact_pattern, minimal_saved, minimal_suffixes
from ckpt_tools.adapters.families import PEFT_TYPES
from ckpt_tools.adapters.families.lokr import factorization
from ckpt_tools.adapters.families.oft import adjusted
from ckpt_tools.adapters.read.sidecars import ASSUMED, by_pattern
from ckpt_tools.cli import main
from ckpt_tools.errors import CkptError, UsageError

ROOT = "base_model.model."


@given(st.integers(1, 3000), st.one_of(st.just(-1), st.integers(1, 64)))
def test_factorization_is_peft_s(dimension, factor):
    from peft.tuners.lokr.layer import factorization as theirs

    assert factorization(dimension, factor) == theirs(dimension, factor)


@pytest.mark.parametrize("factor", [-1, 1, 2, 3, 4, 6, 8, 16, 64])
def test_factorization_divides_every_size_as_peft_does(factor):
    from peft.tuners.lokr.layer import factorization as theirs  # five seconds, which collecting tests should not take

    for size in (*range(1, 400), 768, 1000, 1021, 2048, 3072, 11008):
        assert factorization(size, factor) == theirs(size, factor), size


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


@pytest.mark.parametrize(
    ("config", "task"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "CAUSAL_LM"),
        ({"architectures": ["BertForSequenceClassification"]}, "SEQ_CLS"),
        # With a task type PEFT's forward would give it input_ids.
        ({"architectures": ["Wav2Vec2ForSequenceClassification"], "conv_dim": [8]}, None),
    ],
)
def test_task_type_comes_from_the_base_s_architecture(config, task, tmp_path):
    head = torch.ones(2, 6)
    (tmp_path / "base").mkdir()
    write({"m.q.weight": torch.ones(6, 8), "classifier.weight": head}, tmp_path / "base" / "model.safetensors")
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    tensors = pairs({"m.q": 4}) | {"base_model.model.classifier.weight": head}
    assert config_of(tensors, tmp_path, alpha=8, base=tmp_path / "base")["task_type"] == task


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
        ({f"{ROOT}q.oft_R.weight": torch.randn(2, 7)}, {}, "fits no block size", None),
        ({f"{ROOT}q.oft_R.weight": torch.randn(2, 6)}, {"alpha": 8}, "--alpha needs a LoRA", None),
        (
            pairs({"a.q": 4}) | {f"{ROOT}b.hada_w{i}_{s}": torch.randn(4, 4) for i in "12" for s in "ab"},
            {"alpha": 8}, "a PEFT adapter has one type, but this one has loha and lora", "one by one",
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
    companions = {
        "peft_type": "LORA", "r": 4, "lora_alpha": 32, "target_modules": r".*\.(q|k)", "init_lora_weights": "pissa",
        "lora_dropout": 0.1, "use_rslora": True, "base_model_name_or_path": "org/base", "mystery": 1,
    }  # fmt: skip
    (tmp_path / "adapter_config.json").write_text(json.dumps(companions))
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
    companions = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q"], "layers_to_transform": [0]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(companions))
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
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], **setting}
    source = families.write_peft(tmp_path / "a", pairs({"model.layers.0.self_attn.q_proj": 4}), **config)
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
    config = {
        "peft_type": "OFT", "oft_block_size": 4, "r": 0, "use_cayley_neumann": True, "num_cayley_neumann_terms": 5,
        "coft": False, "block_share": False, "peft_version": version,
    }  # fmt: skip
    source = families.write_peft(tmp_path / "a", {f"{ROOT}q.oft_R.weight": torch.randn(2, 6)}, **config)
    write({"q.weight": torch.randn(6, 8)}, tmp_path / "base.safetensors")
    if is_refused:
        with pytest.raises(UsageError, match="computed different rotations"):
            api.merge_lora(tmp_path / "base.safetensors", source, tmp_path / "out")
    else:
        api.merge_lora(tmp_path / "base.safetensors", source, tmp_path / "out")
        assert (tmp_path / "out").exists()


# What nothing says of an adapter: marked; --strict refuses; impossible alphas are errors

FIELDS = ["use_rslora=false", "init_lora_weights=true", "alpha_pattern={}"]


@pytest.fixture
def source(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name in ("q_proj", "v_proj"):
        for side, shape in (("A", (4, 8)), ("B", (6, 4))):
            key = f"base_model.model.model.layers.0.self_attn.{name}.lora_{side}.default.weight"
            tensors[key] = torch.randn(shape, generator=generator)
    families.save_dcp({"model": tensors}, tmp_path / "dcp")
    base = {f"model.layers.0.self_attn.{name}.weight": torch.ones(6, 8) for name in ("q_proj", "v_proj")}
    (tmp_path / "base").mkdir()
    save_file(base, tmp_path / "base/model.safetensors")
    return tmp_path


def test_what_nothing_says_is_marked_in_output_json_and_file(source, capsys):
    assert main(["export-lora", str(source / "dcp"), str(source / "out"), "--alpha", "8", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["assumed"] == FIELDS
    assert [each["where"] for each in document["findings"] if each["code"] == "assumed"] == [
        text.partition("=")[0] for text in FIELDS
    ]
    for text in FIELDS:
        assert document["config"][text.partition("=")[0]]["source"].startswith("assumed")
    with safe_open(source / "out/adapter_model.safetensors", "pt") as opened:
        assert opened.metadata()["ckpt_assumed"] == ", ".join(FIELDS)
    assert main(["export-lora", str(source / "dcp"), str(source / "out2"), "--alpha", "8"]) == 0
    shown = capsys.readouterr().out
    assert "use_rslora is assumed to be false" in shown
    assert "--config use_rslora=false" in shown


def test_strict_refuses_until_everything_is_said(source, capsys):
    arguments = ["export-lora", str(source / "dcp"), str(source / "out"), "--alpha", "8", "--strict"]
    assert main(arguments) == 3
    assert not (source / "out").exists()
    capsys.readouterr()
    (source / "dcp/adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]})
    )
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["assumed"] == []


def test_what_the_user_says_is_not_assumed(source):
    config = ("use_rslora=true", "init_lora_weights=true")
    result = api.export_lora(source / "dcp", source / "out", alpha=8, config=config)
    assert result.assumed == ("alpha_pattern={}",)
    assert result.config["use_rslora"].value is True


def test_weights_that_are_the_base_s_prove_the_initialisation(source):
    """PiSSA and the like change the base: a checkpoint that holds it unchanged was begun without them."""
    tensors = {"base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight": torch.ones(6, 8)}
    for side, shape in (("A", (4, 8)), ("B", (6, 4))):
        tensors[f"base_model.model.model.layers.0.self_attn.q_proj.lora_{side}.default.weight"] = torch.randn(shape)
    families.save_dcp({"model": tensors}, source / "whole")
    assert "init_lora_weights=true" in api.export_lora(source / "whole", source / "a", alpha=8).assumed
    proven = api.export_lora(source / "whole", source / "b", alpha=8, base=source / "base")
    assert proven.assumed == ("use_rslora=false",)


def test_merge_says_what_it_assumes_and_strict_refuses(source):
    result = api.merge_lora(source / "base", source / "dcp", source / "merged", alpha=8)
    assert [note for note in result.notes if note.startswith("assumed: use_rslora=false")]
    with pytest.raises(CkptError, match="use_rslora is assumed") as caught:
        api.merge_lora(source / "base", source / "dcp", source / "strict", alpha=8, strict=True)
    assert caught.value.exit_code == 3
    assert not (source / "strict").exists()


SAID = {"r": 4, "lora_alpha": 8, "peft_type": "LORA", "use_rslora": False}
RUNS = {
    "run_config.yaml": "peft:\n  _target_: megatron.bridge.peft.lora.LoRA\n  alpha: 8\n  dim: 4\n",
    "torchtune_config.yaml": "model:\n  _component_: torchtune.models.llama3.lora_llama3_8b\n  lora_alpha: 8\n",
    "args.json": json.dumps({"tuner_type": "lora", "lora_alpha": 8.0, "use_rslora": False}),
    "lora_train_meta.json": json.dumps({"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"}),
    "config.yaml": "config:\n  process:\n  - network:\n      linear_alpha: 8\n",
    "lycoris_config.json": json.dumps({"linear_alpha": 8}),
}
"""What trainers put beside their checkpoints, of an alpha of 8."""


@pytest.mark.parametrize("name", RUNS)
def test_what_a_trainer_s_file_says_is_used_and_cited(name, source):
    (source / "dcp" / name).write_text(RUNS[name])
    result = api.export_lora(source / "dcp", source / "out")
    assert (result.config["lora_alpha"].value, result.config["lora_alpha"].source) == (8, name)
    assert ("use_rslora=false" in result.assumed) is (name != "args.json")
    if name in ("args.json", "torchtune_config.yaml"):  # above the checkpoint
        (source / "dcp" / name).rename(source / name)
        assert api.export_lora(source / "dcp", source / "again").config["lora_alpha"].source == name


@pytest.mark.parametrize("name", RUNS)
def test_files_of_trainers_that_contradict_each_other_are_refused(name, source):
    (source / "dcp" / name).write_text(RUNS[name])
    (source / "dcp/adapter_config.json").write_text(json.dumps(SAID | {"lora_alpha": 16}))
    with pytest.raises(CkptError, match=f"16 in adapter_config.json, and 8.* in {name}"):
        api.export_lora(source / "dcp", source / "out")
    assert not (source / "out").exists()
    (source / "dcp/adapter_config.json").write_text(json.dumps(SAID | {"lora_alpha": 0}))
    assert api.export_lora(source / "dcp", source / "out").config["lora_alpha"].source == name


@pytest.mark.parametrize("text", ["[]", "peft: [1]", "{", "peft: {alpha: [8]}", "lora_alpha: {a: 1}", "- 1", "\0", ""])
def test_a_file_of_somebody_else_says_nothing(text, source):
    for name in ("run_config.yaml", "torchtune_config.yaml", "args.json", "config.yaml"):
        (source / "dcp" / name).write_text(text)
    with pytest.raises(UsageError, match="alpha of 2 modules"):
        api.export_lora(source / "dcp", source / "out")


@pytest.mark.parametrize(
    "config", [{"coft": True}, {"use_cayley_neumann": True, "coft": False, "peft_version": "0.21.0"}, {}]
)
def test_merge_asks_what_rotations_depend_on(config, source):
    """A checkpoint without a configuration may be of COFT, whose projection depends on eps."""
    name = "base_model.model.model.layers.0.self_attn.q_proj.oft_R.default.weight"
    families.save_dcp({"model": {name: torch.randn(2, 6) * 0.1}}, source / "oft")
    said = [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in ({"use_cayley_neumann": False} | config).items()
    ]
    missing = {"coft": "eps", "use_cayley_neumann": "num_cayley_neumann_terms"}.get(next(iter(config), ""), "coft")
    with pytest.raises(UsageError, match=f"{missing} is not known"):
        api.merge_lora(source / "base", source / "oft", source / "merged", config=said)
    value = {"coft": "false"}.get(missing, "5")
    api.merge_lora(source / "base", source / "oft", source / "merged", config=[*said, f"{missing}={value}"])


@pytest.mark.parametrize("alpha", [-5.0, 0.0, 1e9, float("nan"), float("inf")])
def test_impossible_alphas_are_errors(source, alpha):
    with pytest.raises(UsageError, match="--alpha must be above 0"):
        api.export_lora(source / "dcp", source / "out", alpha=alpha)
    with pytest.raises(UsageError, match="--alpha must be above 0"):
        api.merge_lora(source / "base", source / "dcp", source / "merged", alpha=alpha)
    assert not (source / "out").exists()
    assert not (source / "merged").exists()


def test_what_an_export_assumed_stays_assumed_of_its_files(source, capsys):
    assert api.export_lora(source / "dcp", source / "out", alpha=8).assumed == tuple(FIELDS)
    again = api.export_lora(source / "out", source / "again")
    assert again.assumed == tuple(FIELDS)
    assert [each.where for each in again.findings if each.code == "assumed"] == [x.partition("=")[0] for x in FIELDS]
    assert ASSUMED not in json.loads((source / "again/adapter_config.json").read_text())
    with safe_open(source / "again/adapter_model.safetensors", "pt") as opened:
        assert opened.metadata()[ASSUMED] == ", ".join(FIELDS)
    result = check_lora(source / "again", base=source / "base")
    assert [text.partition(" (")[0] for text in result.not_checked if "assumed" in text] == FIELDS
    assert main(["export-lora", str(source / "again"), str(source / "strict"), "--strict"]) == 3
    assert not (source / "strict").exists()
    assert main(["merge-lora", str(source / "base"), str(source / "again"), str(source / "merged"), "--strict"]) == 3
    assert "use_rslora is assumed" in capsys.readouterr().err


def test_what_is_said_of_an_exported_file_is_no_longer_assumed(source):
    api.export_lora(source / "dcp", source / "out", alpha=8)
    said = api.export_lora(source / "out", source / "said", config=("use_rslora=false", "init_lora_weights=true"))
    assert said.assumed == ("alpha_pattern={}",)
    config = json.loads((source / "out/adapter_config.json").read_text()) | {"use_rslora": True}
    (source / "out/adapter_config.json").write_text(json.dumps(config))  # the training run's
    assert "use_rslora=false" not in api.export_lora(source / "out", source / "other").assumed
