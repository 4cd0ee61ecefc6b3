"""Tiny models of many kinds, built as users have them: a directory of config.json and safetensors, and an input."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

Inputs = dict[str, torch.Tensor]
IDS = torch.arange(1, 9)[None]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A model that adapters are made for."""

    build: Callable[[], nn.Module]
    """With random weights."""
    inputs: Callable[[], Inputs]
    """Of its forward."""
    published: str = ""
    """The part of it that its base directory holds; all of it by default."""

    def save(self, directory: Path) -> None:
        """Write it as `save_pretrained` does."""
        model = self.build()
        part = getattr(model, self.published) if self.published else model
        part.save_pretrained(directory)

    def outputs(self, model: nn.Module) -> torch.Tensor:
        """Return what the model computes."""
        with torch.no_grad():
            found = model.eval()(**self.inputs())
        first = found[0] if isinstance(found, tuple) else next(v for v in found.values() if v is not None)
        return first if isinstance(first, torch.Tensor) else first[0]


def _ids() -> Inputs:
    return {"input_ids": IDS.clone()}


def _pairs() -> Inputs:
    return {"input_ids": IDS.clone(), "decoder_input_ids": IDS[:, :4].clone()}


def _pixels() -> Inputs:
    torch.manual_seed(3)
    return {"pixel_values": torch.randn(1, 3, 16, 16)}


def _speech() -> Inputs:
    torch.manual_seed(3)
    return {"input_features": torch.randn(1, 8, 20), "decoder_input_ids": IDS[:, :4].clone()}


def _sound() -> Inputs:
    return {"input_values": torch.randn(1, 400, generator=torch.Generator().manual_seed(0))}


def _both() -> Inputs:
    return _ids() | _pixels()


_TABLES = tomllib.loads((Path(__file__).parent / "world_language.toml").read_text())


def _settled(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with what it has of a shared one."""
    like, own = _TABLES["shared"].get(table.get("like"), {}), {key: table[key] for key in table if key != "like"}
    return like | {key: _settled(value) if isinstance(value, dict) else value for key, value in own.items()}


def _of_transformers(settings: dict[str, Any]) -> World:
    architecture, inputs = settings.pop("class"), settings.pop("inputs", "ids")

    def build() -> nn.Module:
        import transformers

        torch.manual_seed(0)
        kind = getattr(transformers, architecture)
        model = kind(kind.config_class(**settings))
        with torch.no_grad():  # what is as small as at first would hide what is lost
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
        return model

    return World(build=build, inputs=globals()[f"_{inputs}"])


_WHOLE = {name: _of_transformers(_settled(table)) for name, table in _TABLES["models"].items()}
LANGUAGE: Mapping[str, World] = _WHOLE | {
    "gpt2-published": replace(_WHOLE["gpt2"], published="transformer"),
    "bert-published": replace(_WHOLE["bert"], published="bert"),
}
"""Models of transformers; "published" ones lie without their heads on the disk, as on the hub."""


# Image and video models of diffusers', of families that ckpt has no tables of names for

_MODELS = tomllib.loads((Path(__file__).parent / "world_models.toml").read_text())


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def _picture(*shape: int, text: int) -> Inputs:
    return {
        "hidden_states": _random(*shape),
        "encoder_hidden_states": _random(1, 4, text),
        "timestep": torch.tensor([5]),
    }


_INPUTS: Mapping[str, Callable[[], Inputs]] = {
    "sd15": lambda: {
        "sample": _random(1, 4, 8, 8), "timestep": torch.tensor([5]), "encoder_hidden_states": _random(1, 4, 16),
    },
    "sana": lambda: _picture(1, 4, 8, 8, text=8),
    "wan": lambda: _picture(1, 4, 2, 8, 8, text=16),
    "ltx": lambda: _picture(1, 8, 4, text=16) | {
        "encoder_attention_mask": torch.ones(1, 4), "num_frames": 2, "height": 2, "width": 2,
    },
    "cogvideox": lambda: _picture(1, 2, 4, 8, 8, text=8),
    "hunyuan-video": lambda: _picture(1, 4, 2, 4, 4, text=16) | {
        "encoder_attention_mask": torch.ones(1, 4), "pooled_projections": _random(1, 8),
        "guidance": torch.tensor([1000.0]),
    },
    "lumina2": lambda: _picture(1, 4, 8, 8, text=16) | {"encoder_attention_mask": torch.ones(1, 4, dtype=torch.bool)},
    "qwen-image": lambda: _picture(1, 16, 16, text=16) | {
        "encoder_hidden_states_mask": torch.ones(1, 4), "timestep": torch.tensor([0.5]), "img_shapes": [(1, 4, 4)],
    },
    "z-image": lambda: {"x": [_random(4, 1, 4, 4)], "t": torch.tensor([0.5]), "cap_feats": [_random(4, 16)]},
    "hidream": lambda: {
        "hidden_states": _random(1, 4, 8, 8), "encoder_hidden_states_t5": _random(1, 4, 16),
        "encoder_hidden_states_llama3": _random(4, 1, 4, 16), "pooled_embeds": _random(1, 8),
        "timesteps": torch.tensor([5]),
    },
}  # fmt: skip
_MIXINS = {
    "sd15": "StableDiffusion", "ltx": "LTXVideo", "cogvideox": "CogVideoX", "hunyuan-video": "HunyuanVideo",
    "qwen-image": "QwenImage", "z-image": "ZImage", "hidream": "HiDreamImage",
}  # fmt: skip


def _of_diffusers(name: str) -> World:
    def build() -> nn.Module:
        import diffusers

        torch.manual_seed(0)
        settings = dict(_MODELS[name])
        return getattr(diffusers, settings.pop("class"))(**settings)

    return World(build=build, inputs=_INPUTS[name])


IMAGE: Mapping[str, tuple[str, World]] = {
    name: (f"{_MIXINS.get(name, name.title())}LoraLoaderMixin", _of_diffusers(name)) for name in _MODELS
}
"""Family → (the mixin of its pipelines, its model)."""
