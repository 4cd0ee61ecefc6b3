"""A part of an adapter, exported with --include and --exclude: PEFT must find what is there, and begin nothing anew."""

from __future__ import annotations

import json
import re
import warnings

import pytest
import torch
from adapters import families
from adapters.families import Case
from safetensors.torch import load_file

from ckpt_tools import api
from ckpt_tools.errors import UsageError

ROOT = "base_model.model."
LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
CASES = {
    "names": (Case({**LORA, "target_modules": ["q_proj", "down_proj"]}), ["**.layers.0.**"]),
    "one kind of two": (Case({**LORA, "target_modules": ["q_proj", "down_proj"]}), ["**.q_proj.**"]),
    "one module": (Case({**LORA, "target_modules": ["q_proj", "down_proj"]}), ["**.1.self_attn.q_proj.**"]),
    "pattern": (Case({**LORA, "target_modules": r".*\.\d\.(self_attn\.v|mlp\.down)_proj"}), ["**.1.mlp.**"]),
    "all linear layers": (Case({**LORA, "target_modules": "all-linear"}), ["**.layers.1.**", "**.k_proj.**"]),
    "layers": (Case({**LORA, "target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1]}), ["**.q_proj.**"]),
    "ranks and alphas": (
        Case({
            **LORA, "target_modules": ["q_proj", "v_proj"], "rank_pattern": {"layers.0.self_attn.q_proj": 7},
            "alpha_pattern": {"v_proj": 3},
        }),
        ["**.0.self_attn.v_proj.**"],
    ),
    "saved modules": (
        Case({**LORA, "target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}, trained=("_to_save",)),
        ["**.norm.**", "**.layers.0.**"],
    ),
    "all saved modules": (
        Case({**LORA, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, trained=("_to_save",)),
        ["**.lm_head.**"],
    ),
    "biases": (
        Case({**LORA, "target_modules": ["q_proj", "v_proj"], "bias": "lora_only"}, trained=(".bias",)),
        ["**.q_proj.**"],
    ),
    "embedding": (Case({**LORA, "target_modules": ["embed_tokens", "q_proj"]}), ["**.embed_tokens.**"]),
    "loha": (Case({"peft_type": "LOHA", "r": 4, "alpha": 6, "target_modules": ["q_proj", "k_proj"]}), ["**.0.**"]),
    "parameters": (
        Case({
            **LORA, "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        }, model="moe"),
        ["**.layers.0.**"],
    ),
    "parameters alone": (
        Case({**LORA, "target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}, model="moe"),
        ["**.layers.0.mlp.**", "**.q_proj.**"],
    ),
}  # fmt: skip


def without(model, case, globs):
    """The adapted model, with what the globs name as it was before training."""
    patterns = [re.compile(re.escape(glob).replace(r"\*\*", ".*")) for glob in globs]
    plain = dict(families.build(case.model).named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad or not any(pattern.fullmatch(name) for pattern in patterns):
                continue
            original = re.sub(r"\.(base_layer|modules_to_save\.default)(?=\.)", "", name).removeprefix(
                "base_model.model."
            )
            if original in plain:
                parameter.copy_(plain[original])
            elif any(part in name for part in ("lora_B", "lora_embedding_B", "hada_w1_b")):
                parameter.zero_()
    return model


def save(case, path, source):
    """As PEFT saves it, or as a trainer does."""
    model = families.adapt(case)
    if source == "peft":
        with warnings.catch_warnings(action="ignore"):
            model.save_pretrained(path)
    else:
        families.save_dcp({"model": model.state_dict()}, path)
        if source == "dcp with the configuration":
            settings = model.peft_config["default"].to_dict().items()
            document = {key: sorted(v) if isinstance(v, set) else v for key, v in settings}
            (path / "adapter_config.json").write_text(json.dumps(document, default=str))
    return model


@pytest.mark.parametrize("source", ["peft", "dcp with the configuration"])
@pytest.mark.parametrize("name", CASES)
def test_part_of_an_adapter_is_whole_for_peft(tmp_path, name, source):
    case, globs = CASES[name]
    model = save(case, tmp_path / "run", source)
    before = families.outputs(model, case.model)
    result = api.export_lora(tmp_path / "run", tmp_path / "out", exclude=globs)
    assert result.ok, result.findings
    assert_is_part(tmp_path / "out", case, without(model, case, globs), before)


def assert_is_part(path, case, expected, before):
    from peft import get_peft_model_state_dict

    reloaded = families.reload(path, case)
    want = families.outputs(expected, case.model)
    assert not torch.equal(want, before)
    torch.testing.assert_close(families.outputs(reloaded, case.model), want, rtol=0, atol=0)
    with warnings.catch_warnings(action="ignore"):
        held = get_peft_model_state_dict(reloaded)
    assert held.keys() == load_file(path / "adapter_model.safetensors").keys()


def test_base_in_the_source_of_which_a_part_is_left_out_proves_no_short_names(tmp_path):
    case = Case({**LORA, "target_modules": ["q_proj", "down_proj"]})
    model = save(case, tmp_path / "run", "dcp")
    before = families.outputs(model, case.model)
    result = api.export_lora(tmp_path / "run", tmp_path / "out", exclude=["**.layers.0.**"], alpha=8)
    assert result.config["target_modules"].value == ["1.mlp.down_proj", "1.self_attn.q_proj"]
    assert_is_part(tmp_path / "out", case, without(model, case, ["**.layers.0.**"]), before)


def test_part_that_is_included_is_whole_for_peft(tmp_path):
    case = Case({**LORA, "target_modules": ["q_proj", "down_proj"]})
    model = save(case, tmp_path / "run", "peft")
    before = families.outputs(model, case.model)
    api.export_lora(tmp_path / "run", tmp_path / "out", include=["**.down_proj.**"])
    assert_is_part(tmp_path / "out", case, without(model, case, ["**.q_proj.**"]), before)


def test_configuration_stays_where_no_module_is_left_out(tmp_path):
    case = Case({**LORA, "target_modules": r".*\.(q|v)_proj"})
    save(case, tmp_path / "run", "peft")
    result = api.export_lora(tmp_path / "run", tmp_path / "out", include=["**lora**"])
    assert result.config["target_modules"].value == r".*\.(q|v)_proj"


EXPERTS = Case(
    {**LORA, "target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    model="moe",
)
"""PEFT wraps one parameter inside the other: down_proj, the second, is outermost."""


def test_one_of_two_parameters_is_left_out_when_the_other_is_named(tmp_path):
    model = save(EXPERTS, tmp_path / "run", "peft")
    before = families.outputs(model, "moe")
    for globs, name in (["**.experts.lora_*.**"], "gate_up_proj"), (["**.base_layer.lora_*.**"], "down_proj"):
        out = tmp_path / name
        with pytest.raises(UsageError, match="it is not known which were left out"):
            api.export_lora(tmp_path / "run", out, exclude=globs)
        given = [f'target_parameters=["mlp.experts.{name}"]']
        api.export_lora(tmp_path / "run", out, exclude=globs, config=given)
        part = without_parameter(families.adapt(EXPERTS), nested=name == "down_proj")
        assert_is_part(out, EXPERTS, part, before)


def without_parameter(model, *, nested):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name and (".base_layer.lora_B" in name) == nested:
                parameter.zero_()
    return model


def test_checkpoint_of_adapted_parameters_alone_has_a_base_model_which_is_not_exported(tmp_path):
    save(EXPERTS, tmp_path / "run", "dcp")
    result = api.export_lora(tmp_path / "run", tmp_path / "out", alpha=8)
    assert result.conversion.num_tensors == 8, result.conversion.files
    torch.testing.assert_close(
        families.outputs(families.reload(tmp_path / "out", EXPERTS), "moe"),
        families.outputs(families.adapt(EXPERTS), "moe"),
        rtol=0,
        atol=0,
    )


def test_names_of_the_user_that_match_what_is_left_out_are_refused(tmp_path):
    case = Case({**LORA, "target_modules": ["q_proj", "v_proj"]})
    save(case, tmp_path / "run", "peft")
    given = {"exclude": ["**.layers.0.**"], "config": ['target_modules=["q_proj", "v_proj"]']}
    with pytest.raises(UsageError, match="PEFT would initialise them"):
        api.export_lora(tmp_path / "run", tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


def test_path_that_ends_another_one_that_was_left_out_becomes_a_pattern(tmp_path):
    factors = families.loras({path: (torch.ones(2, 8), torch.ones(6, 2)) for path in ("a.q", "b.a.q")}, ROOT)
    families.write_peft(tmp_path / "run", factors, r=2, lora_alpha=2, target_modules=["q"])
    result = api.export_lora(tmp_path / "run", tmp_path / "out", exclude=["**.b.**"])
    assert result.config["target_modules"].value == r"a\.q"
