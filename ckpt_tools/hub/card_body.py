"""The text of a model card, section by section: what it is, how to load it, and where every setting came from.

Names and values come from files that nobody vouches for: nothing of them becomes markup or code.
"""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass, field

from ckpt_tools.text import escape_name

Row = tuple[str, str, str]
"""(what, value, where it came from)."""

_MARKUP = re.compile(r"""[\\`*_\[\]<>|&~$#!:@(){}"']""")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}", re.ASCII)
_PLAIN = re.compile(r"[\w./-]{1,255}", re.ASCII)
_BASE_PLACEHOLDER = "path/or/id/of/the/base-model"
"""Stands in the code where the base model is not known by a hub id."""
_VLLM_RANKS = (16, 32, 64, 128, 256, 320, 512)
"""Source: vLLM, config/lora.py: what --max-lora-rank takes, from its default on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFacts:
    """What the code needs to know beyond the names."""

    is_adapter: bool = False
    """There is a base model to load first."""
    auto_class: str | None = None
    """Class of transformers that loads the model (for an adapter: its base); AutoModel by default."""
    has_tokenizer: bool = False
    weight_name: str | None = None
    """File name of a LoRA, where it is not the one that its library looks for."""
    is_pipeline: bool = False
    """A whole diffusers pipeline, not one of its models."""
    model_class: str | None = None
    """Class of diffusers that loads a single model."""
    component: str | None = None
    """What a diffusers pipeline calls the model that an adapter of PEFT's is for."""
    rank: int | None = None
    """The adapter's largest."""
    loaders: tuple[str, ...] = ()
    """Others that take the adapter, as check-lora names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardBody:
    """What the sections are made of."""

    title: str
    repo: str
    base_model: str | None = None
    relation: str | None = None
    library: str | None = None
    instance_prompt: str | None = None
    has_gallery: bool = False
    load: LoadFacts = field(default_factory=LoadFacts)
    training: tuple[Row, ...] = ()
    settings: tuple[Row, ...] = ()


def sections(body: CardBody) -> tuple[str, dict[str, str]]:
    """Return the heading, and name → text of every section that has something to say."""
    found = {
        "about": _about(body),
        "gallery": "<Gallery />" if body.has_gallery else None,
        "trigger": f"## Trigger words\n\n{_shown(body.instance_prompt)}" if body.instance_prompt else None,
        "load": _load(body),
        "training": _table("Training", "fact", body.training),
        "settings": _table("Settings", "setting", body.settings),
    }
    return f"# {_shown(body.title)}", {name: text for name, text in found.items() if text}


def _about(body: CardBody) -> str | None:
    if not body.base_model:
        return None
    is_adapter = body.library == "peft" or body.load.is_adapter
    made = {"quantized": "Quantized from", "merge": "Merged from", "finetune": "Trained from"}
    kind = "An adapter for" if is_adapter else made.get(body.relation or "", "From")
    return f"{kind} [{_shown(body.base_model)}](https://huggingface.co/{body.base_model})."


def _table(title: str, what: str, rows: tuple[Row, ...]) -> str | None:
    if not rows:
        return None
    shown = [f"| {_shown(name)} | {_shown(value)} | {_shown(source)} |" for name, value, source in rows]
    return "\n".join([f"## {title}\n", f"| {what} | value | known from |", "|---|---|---|", *shown])


def _shown(text: str) -> str:
    """Return text for Markdown in which nothing is markup: a name from a file must not become a link or a tag."""
    return _MARKUP.sub(lambda match: f"&#{ord(match[0])};", escape_name(text))


# How to load it


def _load(body: CardBody) -> str | None:
    """Return how each library loads the weights, or None where nothing certain can be said."""
    found = {
        "PEFT": _fenced("python", _peft(body)) if body.library == "peft" else None,
        "diffusers": _fenced("python", _diffusers(body)) if body.library == "diffusers" else None,
        "transformers": _fenced("python", _transformers(body)) if body.library == "transformers" else None,
        "vLLM": _fenced("sh", _vllm(body)) if "vllm" in body.load.loaders else None,
        "ComfyUI": _comfyui(body) if "comfyui" in body.load.loaders else None,
    }
    ways = {name: text for name, text in found.items() if text}
    if not ways:
        return None
    if len(ways) == 1:
        return "## How to load it\n\n" + next(iter(ways.values()))
    return "\n\n".join(["## How to load it", *(f"### {name}\n\n{text}" for name, text in ways.items())])


def _fenced(language: str, code: str | None) -> str | None:
    return f"```{language}\n{code}```" if code is not None else None


def _class(name: str | None, default: str) -> str:
    return name if name is not None and _is_class(name) else default


def _is_class(name: str) -> bool:
    return _IDENTIFIER.fullmatch(name) is not None and not keyword.iskeyword(name)


def _peft(body: CardBody) -> str:
    base, load = body.base_model or _BASE_PLACEHOLDER, body.load
    if load.component is not None and _is_class(load.component):
        model = f"pipeline.{load.component}"
        return (
            "from diffusers import DiffusionPipeline\n"
            "from peft import PeftModel\n"
            "\n"
            f'pipeline = DiffusionPipeline.from_pretrained("{base}")\n'
            f'{model} = PeftModel.from_pretrained({model}, "{body.repo}")\n'
        )
    auto = _class(load.auto_class, "AutoModel")
    return (
        "from peft import PeftModel\n"
        f"from transformers import {auto}\n"
        "\n"
        f'base = {auto}.from_pretrained("{base}")\n'
        f'model = PeftModel.from_pretrained(base, "{body.repo}")\n'
    )


def _diffusers(body: CardBody) -> str | None:
    base, repo, load = body.base_model or _BASE_PLACEHOLDER, body.repo, body.load
    if load.is_adapter:
        if load.weight_name is not None and not _PLAIN.fullmatch(load.weight_name):
            return None
        is_usual = load.weight_name in (None, "pytorch_lora_weights.safetensors")
        argument = "" if is_usual else f', weight_name="{load.weight_name}"'
        return (
            "from diffusers import DiffusionPipeline\n"
            "\n"
            f'pipeline = DiffusionPipeline.from_pretrained("{base}")\n'
            f'pipeline.load_lora_weights("{repo}"{argument})\n'
        )
    if load.is_pipeline:
        return f'from diffusers import DiffusionPipeline\n\npipeline = DiffusionPipeline.from_pretrained("{repo}")\n'
    if load.model_class is not None and _is_class(load.model_class):
        return f'from diffusers import {load.model_class}\n\nmodel = {load.model_class}.from_pretrained("{repo}")\n'
    return None


def _transformers(body: CardBody) -> str:
    auto = _class(body.load.auto_class, "AutoModel")
    names = f"{auto}, AutoTokenizer" if body.load.has_tokenizer else auto
    code = f'from transformers import {names}\n\nmodel = {auto}.from_pretrained("{body.repo}")\n'
    if body.load.has_tokenizer:
        code += f'tokenizer = AutoTokenizer.from_pretrained("{body.repo}")\n'
    return code


def _vllm(body: CardBody) -> str | None:
    name = body.repo.rpartition("/")[2]
    if not body.base_model or not _PLAIN.fullmatch(name):
        return None
    largest = body.load.rank or 0
    if largest > _VLLM_RANKS[-1]:
        return None
    rank = next(each for each in _VLLM_RANKS if each >= largest)
    option = f" --max-lora-rank {rank}" if rank > _VLLM_RANKS[0] else ""
    return f"vllm serve {body.base_model} --enable-lora{option} --lora-modules {name}={body.repo}\n"


def _comfyui(body: CardBody) -> str | None:
    name = body.load.weight_name
    if name is None or not _PLAIN.fullmatch(name):
        return None
    link = f"[{_shown(name)}](https://huggingface.co/{body.repo}/resolve/main/{name})"
    return f"Download {link} into ComfyUI/models/loras, and choose it in the node Load LoRA."
