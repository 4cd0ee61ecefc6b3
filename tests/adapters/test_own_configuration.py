"""Several adapters in one checkpoint: each has the alpha, rank and type of its own configuration. PEFT is the judge."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import peft
import pytest
import torch
from adapters.families import save_dcp
from adapters.test_check_peft import Toy
from safetensors.torch import load_file, save_file

from ckpt_tools import api
from ckpt_tools.errors import UsageError

KINDS = {
    "lora": lambda n: peft.LoraConfig(r=2 + 2 * n, lora_alpha=4 + 12 * n, target_modules=["q", "v"], use_rslora=n > 0),
    "dora": lambda n: peft.LoraConfig(r=2, lora_alpha=4 + 12 * n, target_modules=["q", "v"], use_dora=True),
    "loha": lambda n: peft.LoHaConfig(r=2, alpha=4 + 12 * n, target_modules=["q", "v"]),
}


def two(kind: str, names: tuple[str, str], root: Path) -> peft.PeftModel:
    """A DCP checkpoint of a model with two adapters, their configurations beside it as PEFT puts them."""
    torch.manual_seed(0)
    model = peft.get_peft_model(Toy(), KINDS[kind](0), adapter_name=names[0])
    model.add_adapter(names[1], KINDS[kind](1))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "hada_" in name:
                parameter.normal_()
    save_dcp({"model": model.state_dict()}, root / "run")
    model.save_pretrained(root / "pre")
    for file in (root / "pre").rglob("adapter_config.json"):
        place = root / "run" / file.relative_to(root / "pre")
        place.parent.mkdir(exist_ok=True)
        shutil.copy(file, place)
    return model


@pytest.mark.parametrize("names", [("default", "style"), ("b", "weight"), ("x", "y1")], ids="-".join)
@pytest.mark.parametrize("kind", KINDS)
def test_each_adapter_of_a_checkpoint_has_its_own_configuration(
    kind: str, names: tuple[str, str], tmp_path: Path
) -> None:
    model = two(kind, names, tmp_path)
    plain = dict(copy.deepcopy(model).unload().state_dict())
    save_file(plain, tmp_path / "base.safetensors")
    for name in names:
        want = copy.deepcopy(model).merge_and_unload(adapter_names=[name]).state_dict()
        out = tmp_path / f"merged-{name}"
        api.merge_lora(tmp_path / "base.safetensors", tmp_path / "run", out, adapter_name=name, strict=True)
        got = load_file(next(out.glob("*.safetensors")))
        for key, tensor in got.items():
            assert (tensor - want[key]).abs().max() <= 1e-6 * (1 + (want[key] - plain[key]).abs().max()), (name, key)


def test_configuration_of_another_adapter_is_not_its_own(tmp_path: Path) -> None:
    two("lora", ("default", "style"), tmp_path)
    shutil.rmtree(tmp_path / "run" / "style")
    with pytest.raises(UsageError, match="is not known"):
        api.export_lora(tmp_path / "run", tmp_path / "out", adapter="style")
    api.export_lora(tmp_path / "run", tmp_path / "out", adapter="default")
