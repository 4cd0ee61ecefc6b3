"""`check-lora --base` for image and video models: its own base is right, and no other one is.

The truth about the own base is the library's: PEFT loads its directory, and a pipeline of diffusers its file, into
diffusers' class, and the weights are those that were trained, or not. A base of another family, another width or
another depth is never the adapter's.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from bin_lib import bin_modules
from safetensors.torch import load_file, save_file

from ckpt_tools.adapters.check import check_lora
from ckpt_tools.adapters.export import export_lora

Tensors = dict[str, torch.Tensor]
LIB = Path(__file__).resolve().parents[2] / "bin" / "lib" / "loaders"
MODELS = tuple(name for name in yaml.safe_load((LIB / "toys.yaml").read_text(encoding="utf-8")) if name != "sd2")
"""All but SD 2, whose names are those of SD 1."""
FAMILIES = ("LoRA", "DoRA", "LoHa", "LoKr")
QUICK = {("sd15", "LoRA"), ("flux1", "DoRA"), ("wan", "LoHa")}
EXACT = 1e-5
OTHER = dict(zip(MODELS, (*MODELS[1:], MODELS[0]), strict=True)) | {"sd15": "sdxl"}
"""Model → one of another family."""


@dataclass(slots=True)
class Worlds:
    """Bases and adapters of toy models, made once."""

    root: Path
    modules: dict[str, Any]
    _weights: dict[str, Tensors] = field(default_factory=dict)
    _made: dict[tuple[str, str], tuple[dict[str, Path], Tensors]] = field(default_factory=dict)

    def toy(self, name: str) -> Any:
        return self.modules["toy_models"].toys()[name]

    def base(self, name: str, kind: str = "own") -> Path:
        """Return the directory of a model: its own, or a wider or a shorter one."""
        directory = self.root / name / kind
        if not directory.exists():
            model = self.toy(name).build(**({} if kind == "own" else getattr(self.toy(name), kind)))
            self._weights[f"{name}/{kind}"] = {each: tensor.clone() for each, tensor in model.state_dict().items()}
            model.save_pretrained(directory)
        return directory

    def adapters(self, name: str, family: str) -> tuple[dict[str, Path], Tensors]:
        """Return an adapter of a model as PEFT's directory and as diffusers' file, and the trained weights."""
        if (name, family) in self._made:
            return self._made[name, family]
        directory = self.root / name / family
        meant = self.modules["trained"].train(self.toy(name), self.base(name), family, directory / "peft")
        tensors = load_file(directory / "peft" / "adapter_model.safetensors")
        config = json.loads((directory / "peft" / "adapter_config.json").read_text())
        component = self.toy(name).component
        header = {f"{component}.{key}": value for key, value in config.items()}
        file = directory / "diffusers" / "pytorch_lora_weights.safetensors"
        file.parent.mkdir()
        renamed = {f"{component}.{each.removeprefix('base_model.model.')}": factor for each, factor in tensors.items()}
        save_file(renamed, file, metadata={"format": "pt", "lora_adapter_metadata": json.dumps(header)})
        files = {"peft": directory / "peft" / "adapter_model.safetensors", "diffusers": file}
        self._made[name, family] = files, meant
        return files, meant

    def is_as_trained(self, name: str, loader: str, file: Path, meant: Tensors) -> bool:
        """Load a file with the library: are the weights those that were trained?"""
        job = {"loader": loader, "file": str(file), "model": str(self.base(name))}
        with warnings.catch_warnings(action="ignore"):
            try:
                found = self.modules["loader_installed"].load(self.toy(name), job)
            except Exception:  # whatever it raises: the question is whether it does
                return False
        own = self._weights[f"{name}/own"]
        error = self.modules["trained"].error({each: found[each] for each in own}, meant, own)
        return error is not None and error <= EXACT


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    names = ("toy_models", "trained", "loader_installed")
    try:
        with warnings.catch_warnings(action="ignore"):
            modules = dict(zip(names, bin_modules(*names, directory=LIB), strict=True))
            yield Worlds(tmp_path_factory.mktemp("bases"), modules)
    finally:
        for name in names:
            sys.modules.pop(name, None)


def full(*values: str, marks: Sequence[pytest.MarkDecorator] = ()) -> Any:
    return pytest.param(*values, marks=[pytest.mark.full, *marks])


CASES = [
    (name, family)
    if (name, family) in QUICK
    else full(name, family, marks=[pytest.mark.zoo] * ((number + at) % 2))  # of every model and family every second
    for number, name in enumerate(MODELS)
    for at, family in enumerate(FAMILIES)
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "family"), CASES)
def test_own_base_is_right_and_no_other_is(name: str, family: str, worlds: Worlds) -> None:
    files, meant = worlds.adapters(name, family)
    others = [worlds.base(name, "wider"), worlds.base(name, "shorter"), worlds.base(OTHER[name])]
    for loader, file in files.items():
        source = file.parent if loader == "peft" else file
        result = check_lora(source, base=worlds.base(name))
        assert result.judges == (loader,)
        is_right = worlds.is_as_trained(name, loader, file, meant)
        assert result.verdict == ("loads" if is_right else "fails"), (loader, is_right, result.findings)
        for base in others:
            wrong = check_lora(source, base=base)
            assert wrong.verdict == "fails", (loader, base, wrong.not_checked)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["wan", *map(full, ("flux2", "sdxl", "z-image", "hidream"))])
def test_lokr_for_comfyui_fits_its_own_base_alone(name: str, worlds: Worlds, tmp_path: Path) -> None:
    """Its factors go into fused weights, and the table of docs/dev/loaders.md holds that ComfyUI loads them."""
    files, _ = worlds.adapters(name, "LoKr")
    export_lora(files["peft"].parent, tmp_path / "out", to="comfyui", base=worlds.base(name))
    (file,) = (tmp_path / "out").glob("*.safetensors")
    bases = [worlds.base(name), worlds.base(name, "wider"), worlds.base(name, "shorter"), worlds.base(OTHER[name])]
    verdicts = [check_lora(file, base=base).verdict for base in bases]
    assert verdicts == ["loads", "fails", "fails", "fails"]
