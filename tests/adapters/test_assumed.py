"""What nothing says of an adapter is marked, field by field; --strict refuses; impossible alphas are errors."""

from __future__ import annotations

import json

import pytest
import torch
from adapters import families
from safetensors import safe_open
from safetensors.torch import save_file

from ckpt_tools import api
from ckpt_tools.adapters.check import check_lora
from ckpt_tools.adapters.read.sidecars import ASSUMED
from ckpt_tools.cli import main
from ckpt_tools.errors import CkptError, UsageError

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
    assert [text.partition(",")[0] for text in result.not_checked if "assumed" in text] == FIELDS
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
