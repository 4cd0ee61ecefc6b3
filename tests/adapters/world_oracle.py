"""The judge of the world's adapters: the libraries load them, and the model computes what it was trained to, or not."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from adapters import world_adapters, world_pipelines
from adapters.test_diffusers import pipeline_of
from adapters.world_adapters import Config, Tensors
from adapters.world_models import IMAGE, LANGUAGE, World
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

PEFT_FILE = "adapter_model.safetensors"
PEFT_CONFIG = "adapter_config.json"
DIFFUSERS_FILE = "pytorch_lora_weights.safetensors"
HEADER = "lora_adapter_metadata"
TOLERANCE = 1e-4
"""Of outputs around 1: the same float32 products, in the same order."""


@dataclass(frozen=True, slots=True)
class Trained:
    """An adapter as its library saved it."""

    base: Path
    directory: Path
    meant: torch.Tensor
    """What the model computes with it."""
    load: Callable[[Path], torch.Tensor]
    """Loads a directory with the library, and returns what the model then computes."""


@dataclass(slots=True)
class Worlds:
    """Every model and adapter, made when it is first asked for."""

    root: Path
    _made: dict[str, Trained] = field(default_factory=dict)

    def trained(self, name: str) -> Trained:
        """Return a healthy adapter."""
        if name not in self._made:
            with warnings.catch_warnings(action="ignore"):
                self._made[name] = self._image(name) if name in world_pipelines.HEALTHY else self._language(name)
        return self._made[name]

    def damaged(self, name: str, directory: Path) -> Trained:
        """Write a damaged adapter into `directory`; returns the healthy one."""
        is_image = name in world_pipelines.DAMAGED
        source, damage = world_pipelines.DAMAGED[name] if is_image else world_adapters.DAMAGED[name]
        whole = self.trained(source)
        file = DIFFUSERS_FILE if is_image else PEFT_FILE
        tensors = load_file(whole.directory / file)
        config = _header(whole.directory) if is_image else json.loads((whole.directory / PEFT_CONFIG).read_text())
        damage(tensors, config)
        _write(tensors, config, directory, is_image=is_image)
        return whole

    def _base(self, kind: str, name: str, world: World) -> Path:
        directory = self.root / kind / name
        if not directory.exists():
            world.save(directory)
        return directory

    def _language(self, name: str) -> Trained:
        import peft

        model_name, kind, config = world_adapters.HEALTHY[name]
        world = LANGUAGE[model_name]
        base = self._base("language", model_name, world)
        directory = self.root / "adapters" / str(len(self._made))

        def fresh() -> nn.Module:
            return type(world.build()).from_pretrained(base)

        model = peft.get_peft_model(fresh(), getattr(peft, f"{kind}Config")(**config))
        meant = _train(model, world, world.outputs(fresh()))
        model.save_pretrained(directory)
        return Trained(
            base, directory, meant, lambda path: world.outputs(peft.PeftModel.from_pretrained(fresh(), path))
        )

    def _image(self, name: str) -> Trained:
        from peft import LoraConfig, get_peft_model_state_dict

        model_name, config, has_header = world_pipelines.HEALTHY[name]
        mixin, world = IMAGE[model_name]
        base = self._base("image", model_name, world)
        directory = self.root / "adapters" / str(len(self._made))
        component = "unet" if model_name == "sd15" else "transformer"

        def fresh() -> nn.Module:
            return type(world.build()).from_pretrained(base)

        model = fresh()
        settings = LoraConfig(**config)
        model.add_adapter(settings)
        meant = _train(model, world, world.outputs(fresh()))
        tensors = {f"{component}.{key}": value for key, value in get_peft_model_state_dict(model).items()}
        header = (
            {f"{component}.{key}": _plain(value) for key, value in settings.to_dict().items()} if has_header else {}
        )
        _write(tensors, header, directory, is_image=True)

        def load(path: Path) -> torch.Tensor:
            denoiser = fresh()
            pipeline_of(mixin, **{component: denoiser}).load_lora_weights(str(path))
            return world.outputs(denoiser)

        return Trained(base, directory, meant, load)


def _plain(value: object) -> object:
    return sorted(value) if isinstance(value, set) else value


def _train(model: nn.Module, world: World, plain: torch.Tensor) -> torch.Tensor:
    """Give everything that is trained another value; returns what the model then computes."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    meant = world.outputs(model)
    assert not torch.allclose(meant, plain, atol=10 * TOLERANCE)
    return meant


def _header(directory: Path) -> Config:
    with safe_open(directory / DIFFUSERS_FILE, "pt") as file:
        return json.loads((file.metadata() or {}).get(HEADER, "{}"))


def _write(tensors: Tensors, config: Config, directory: Path, *, is_image: bool) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if is_image:
        metadata = {"format": "pt"} | ({HEADER: json.dumps(config)} if config else {})
        save_file(tensors, directory / DIFFUSERS_FILE, metadata=metadata)
        return
    save_file(tensors, directory / PEFT_FILE)
    (directory / PEFT_CONFIG).write_text(json.dumps(config))


def does_what_was_trained(trained: Trained, directory: Path) -> bool:
    """Load an adapter with its library: does the model compute what it did when the adapter was saved?"""
    with warnings.catch_warnings(action="ignore"):
        try:
            found = trained.load(directory)
        except Exception:  # whatever it raises: the question is whether it does
            return False
    return torch.allclose(found, trained.meant, atol=TOLERANCE)
