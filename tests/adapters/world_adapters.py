"""Adapters that PEFT made for the models of `world_models`, and what can happen to them on the way."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

Tensors = dict[str, torch.Tensor]
Config = dict[str, object]
Damage = Callable[[Tensors, Config], None]

LORA: Config = {"r": 2, "lora_alpha": 4}


def _healthy(model: str, type: str = "Lora", **config: object) -> tuple[str, str, Config]:  # noqa: A002 - the field's name
    return model, type, (LORA if type == "Lora" else {}) | config


_TABLES = tomllib.loads((Path(__file__).parent / "world_adapters.toml").read_text())
HEALTHY: Mapping[str, tuple[str, str, Config]] = {name: _healthy(**table) for name, table in _TABLES.items()}
"""Name → (model, type, configuration)."""


def _names(tensors: Tensors, part: str) -> list[str]:
    found = [name for name in tensors if part in name]
    assert found, part
    return found


def drop(*parts: str) -> Damage:
    """Tensors that were not saved."""

    def damage(tensors: Tensors, _: Config) -> None:
        for name in {name for part in parts for name in _names(tensors, part)}:
            del tensors[name]

    return damage


def rename(old: str, new: str, *, first: bool = False) -> Damage:
    """Names of another model, or of another tool."""

    def damage(tensors: Tensors, _: Config) -> None:
        names = _names(tensors, old)
        for name in names[:1] if first else names:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return damage


def change(part: str, how: Callable[[torch.Tensor], torch.Tensor], *, every: bool = False) -> Damage:
    """Another tensor in the place of the first one of that name, or of every one."""

    def damage(tensors: Tensors, _: Config) -> None:
        names = _names(tensors, part)
        for name in names if every else names[:1]:
            tensors[name] = how(tensors[name]).contiguous()

    return damage


def say(**settings: object) -> Damage:
    """Another configuration."""

    def damage(_: Tensors, config: Config) -> None:
        assert any(config.get(name) != value for name, value in settings.items())
        config.update(settings)

    return damage


def forget(*names: str) -> Damage:
    """A configuration without these fields."""

    def damage(_: Tensors, config: Config) -> None:
        for name in names:
            del config[name]

    return damage


def add(name: str, *shape: int) -> Damage:
    """A tensor too many."""

    def damage(tensors: Tensors, _: Config) -> None:
        assert name not in tensors
        tensors[name] = torch.full(shape, 0.5)

    return damage


def swap(tensors: Tensors, _: Config) -> None:
    """Exchange A and B of every module."""
    for name in _names(tensors, "lora_A"):
        other = name.replace("lora_A", "lora_B")
        tensors[name], tensors[other] = tensors[other], tensors[name]


def twice(tensors: Tensors, _: Config) -> None:
    """The same module under a second spelling, of which a loader takes one."""
    name = _names(tensors, "lora_B")[0]
    tensors[name.replace("lora_B.weight", "lora_B.default.weight")] = torch.zeros_like(tensors[name])


def half(tensor: torch.Tensor) -> torch.Tensor:
    """Rows that one rank had."""
    return tensor[: len(tensor) // 2]


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    """One element that is not a number."""
    tensor = tensor.clone()
    tensor.view(-1)[0] = float("nan")
    return tensor


ROOT = "base_model.model."
DAMAGED: Mapping[str, tuple[str, Damage]] = {
    "phi3: prefix lost": ("phi3, fused qkv", rename(ROOT, "")),
    "phi3: model's prefix lost": ("phi3, fused qkv", rename("model.model.", "model.")),
    "phi3: split names": ("phi3, fused qkv", rename("qkv_proj", "q_proj")),
    "gemma2: rsLoRA forgotten": ("gemma2, rsLoRA", forget("lora_alpha")),
    "gemma2: a layer renamed": ("gemma2, rsLoRA", rename("layers.1.", "layers.7.")),
    "gemma2: one layer of all-linear lost": ("gemma2, all-linear", drop("layers.0.mlp.up_proj")),
    "gemma3: pattern matches nothing": ("gemma3, a pattern", say(target_modules=r".*\.blocks\..*_proj")),
    "gemma3: pattern matches less": ("gemma3, a pattern", say(target_modules=r".*\.layers\.1\..*q_proj")),
    "gemma3: a saved norm lost": ("gemma3, norms saved", drop("layers.1.input_layernorm")),
    "mistral: rank -2": ("mistral", say(r=-2)),
    "mistral: rank as text": ("mistral", say(r="2")),
    "mistral: no alpha": ("mistral", forget("lora_alpha")),
    "mistral: alpha 0": ("mistral", say(lora_alpha=0)),
    "mistral: alpha -4": ("mistral", say(lora_alpha=-4)),
    "mistral: alpha 1e6": ("mistral", say(lora_alpha=1e6)),
    "mistral: alpha as text": ("mistral", say(lora_alpha="4")),
    "mistral: targets too few": ("mistral", say(target_modules=["q_proj"])),
    "mistral: targets of another model": ("mistral", say(target_modules=["query_key_value"])),
    "mistral: targets too many": (
        "mistral", say(target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=False),
    ),
    "mistral: targets with a prefix": ("mistral", say(target_modules=["model.q_proj", "model.v_proj"])),
    "mistral: a target lost": ("mistral", drop("layers.0.self_attn.v_proj")),
    "mistral: A lost": ("mistral", drop("layers.0.self_attn.v_proj.lora_A")),
    "mistral: every B lost": ("mistral", drop("lora_B")),
    "mistral: A transposed": ("mistral", change("lora_A", lambda t: t.T)),
    "mistral: B transposed": ("mistral", change("lora_B", lambda t: t.T)),
    "mistral: B empty": ("mistral", change("lora_B", lambda t: t[:0])),
    "mistral: A flat": ("mistral", change("lora_A", torch.flatten)),
    "mistral: A and B swapped": ("mistral", swap),
    "mistral: not a number": ("mistral", change("lora_B", with_nan)),
    "mistral: integers": ("mistral", change("lora_B", lambda t: t.to(torch.int8), every=True)),
    "mistral: one B zero": ("mistral", change("lora_B", torch.zeros_like)),
    "mistral: one A zero": ("mistral", change("lora_A", torch.zeros_like)),
    "mistral: every B zero": ("mistral", change("lora_B", torch.zeros_like, every=True)),
    "mistral: names twice": ("mistral", twice),
    "mistral: another type": ("mistral", say(peft_type="LOHA")),
    "mistral: unknown type": ("mistral", say(peft_type="LORAX")),
    "mistral: no type": ("mistral", forget("peft_type")),
    "mistral: a module too many": ("mistral", add(f"{ROOT}model.layers.2.self_attn.q_proj.lora_A.weight", 2, 16)),
    "mistral: layers chosen no longer": (
        "mistral, layers chosen", say(layers_to_transform=None, init_lora_weights=False),
    ),
    "mistral: embedding's factor lost": ("mistral, head and embeddings", drop("lora_embedding_B")),
    "mistral: LoHa rank": ("mistral, LoHa", say(r=3)),
    "mixtral: experts not said": ("mixtral, experts", say(target_parameters=None)),
    "mixtral: an expert's factor cut": ("mixtral, experts", change("experts.lora_A", half)),
    "qwen3: trained tokens lost": ("qwen3, trained tokens", drop("trainable_tokens")),
    "qwen3: trained tokens not said": ("qwen3, trained tokens", say(trainable_token_indices=None)),
    "qwen3-moe: another parameter": ("qwen3-moe, one parameter", say(target_parameters=["experts.gate_up_proj"])),
    "qwen3-moe: no parameter": ("qwen3-moe, one parameter", say(target_parameters=["experts.up_proj"])),
    "gpt-oss: experts' base layer lost": ("gpt-oss, experts", rename(".base_layer.", ".")),
    "gpt-oss: experts lost": ("gpt-oss, experts", drop("experts")),
    "gpt2: its root lost": ("gpt2, Conv1D", rename("model.transformer.", "model.")),
    "gpt2: DoRA said": ("gpt2, Conv1D", say(use_dora=True)),
    "gpt-neox: split names": ("gpt-neox, fused qkv", rename("query_key_value", "q_proj", first=True)),
    "falcon: B of the rows": ("falcon", change("query_key_value.lora_B", half)),
    "bloom: a layer lost": ("bloom, no targets named", drop("h.1.")),
    "mamba: a target renamed": ("mamba", rename("x_proj", "dt_proj")),
    "t5: decoder lost": ("t5", drop("decoder")),
    "t5: names of BART": ("t5", rename(".q.", ".q_proj.")),
    "bart: encoder's attention": ("bart", rename("encoder_attn", "cross_attn")),
    "whisper: a task that breaks it": ("whisper", say(task_type="SEQ_2_SEQ_LM")),
    "whisper: no model's root": ("whisper", rename("model.model.", "model.")),
    "bert: biases said, and lost": ("bert, biases of its targets", drop("query.base_layer.bias")),
    "gpt2: headless, of another model": (
        "gpt2, published without its head", rename("model.transformer.", "model.bert."),
    ),
    "bart: tied embedding lost": ("bart, embeddings", drop("decoder.embed_tokens")),
    "qwen3-moe: layer of experts lost": ("qwen3-moe, attention of mixed layers", drop("layers.1.")),
    "bert: head lost": ("bert, biases of its targets", drop("classifier")),
    "deberta: a side lost": ("deberta", drop("layer.0.attention.self.value_proj.lora_A")),
    "vit: head lost": ("vit", drop("classifier")),
    "vit: kernel cut": ("vit, patches", change("lora_A", lambda t: t[..., :4])),
    "siglip: names of CLIP": ("siglip", rename("out_proj", "proj")),
    "clip: text of the vision": ("clip, text alone", rename("text_model", "vision_model")),
    "olmo2: LoKr's factor": ("olmo2, LoKr", say(decompose_factor=2)),
    "gemma2: VeRA cut": ("gemma2, VeRA", change("vera_lambda_b", half)),
}  # fmt: skip
"""Name → (healthy adapter, what happens to it)."""
