"""Adapters of two FSDP2 ranks, exported and loaded by PEFT: the model must answer as it did."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from adapters import families
from fsdp2.ranks import run_ranks
from safetensors.torch import load_file

from ckpt_tools import api


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("families")
    run_ranks(2, families.save_all, str(directory), timeout=120)
    return directory


def reload(path, case):
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PEFT only warns when keys do not match
        warnings.filterwarnings("ignore", message="fan_in_fan_out|.*is_gradient_checkpointing|.*meta parameter")
        warnings.filterwarnings("ignore", message="Failed to load the CUDA|Setting boft_n_butterfly_factor")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        return PeftModel.from_pretrained(families.build(case.model), path).eval()


@pytest.mark.parametrize("name", families.CASES)
def test_adapter_of_two_ranks_exported_to_peft_answers_as_before(saved, tmp_path, name):
    case = families.CASES[name]
    result = api.export_lora(saved / name / "dcp", tmp_path / "out", **case.options)
    assert result.ok
    assert result.conversion.verified
    expected = load_file(saved / name / "logits.safetensors")["logits"]
    assert not torch.equal(expected, families.outputs(families.build(case.model), case.model))
    model = reload(tmp_path / "out", case)
    torch.testing.assert_close(families.outputs(model, case.model), expected, rtol=0, atol=0)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config == {field: found.value for field, found in result.config.items()}
    assert all(found.source for found in result.config.values())
