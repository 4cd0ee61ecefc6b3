"""The text of a model card, section by section: what it is, how to load it, and where every setting came from.

Names and values come from files that nobody vouches for: nothing of them becomes markup or code.
"""

from __future__ import annotations

import keyword
import re

from ckpt_tools.hub.card import LISTS, CardFacts, LoadFacts, Row, front_keys
from ckpt_tools.hub.front_matter import dump, extend, newline_of, unite
from ckpt_tools.text import escape_name

_SECTION = "<!-- ckpt:{0} -->\n{1}\n<!-- /ckpt:{0} -->"
_MARKUP = re.compile(r"""[\\`*_\[\]<>|&~$#!:@(){}"']""")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}", re.ASCII)
_PLAIN = re.compile(r"[\w./-]{1,255}", re.ASCII)
_BASE_PLACEHOLDER = "path/or/id/of/the/base-model"
"""Stands in the code where the base model is not known by a hub id."""
_VLLM_RANKS = (16, 32, 64, 128, 256, 320, 512)
"""Source: vLLM, config/lora.py: what --max-lora-rank takes, from its default on."""


def build_card(facts: CardFacts, *, repo: str, existing: str | None = None, asked: CardFacts | None = None) -> str:
    """Return the text of the card.

    An existing text gets the keys that its front matter lacks, and what ckpt wrote between its own comments
    (`<!-- ckpt:load -->` … `<!-- /ckpt:load -->`) is written anew. The rest stays as it is, to the letter. What was
    `asked` for in so many words joins the lists that the card has.
    """
    keys, parts = front_keys(facts), sections(facts, repo)
    if existing is None or not existing.strip():
        front = dump(keys)
        head = f"---\n{front}---\n\n" if front else ""
        title = f"# {_shown(facts.title or repo.rpartition('/')[2])}"
        return head + "\n\n".join([title, *(_SECTION.format(*part) for part in parts.items())]) + "\n"
    if asked is not None:
        wanted = front_keys(asked) | ({"widget": keys["widget"]} if asked.samples and "widget" in keys else {})
        lists = {key: value for key, value in wanted.items() if key in LISTS and isinstance(value, list)}
        existing = unite(existing, lists)
    text, newline = extend(existing, keys), newline_of(existing)
    for name, part in parts.items():
        anew = _SECTION.format(name, part).replace("\n", newline)
        before = re.search(rf"<!-- ckpt:{name} -->.*?<!-- /ckpt:{name} -->", text, re.DOTALL)
        text = text if before is None else text[: before.start()] + anew + text[before.end() :]
    return text


def sections(facts: CardFacts, repo: str) -> dict[str, str]:
    """Return name → text of every section that has something to say."""
    found = {
        "about": _about(facts),
        "gallery": "<Gallery />" if facts.gallery else None,
        "trigger": f"## Trigger words\n\n{_shown(facts.instance_prompt)}" if facts.instance_prompt else None,
        "load": _load(facts, repo),
        "training": _table("Training", "fact", facts.training),
        "settings": _table("Settings", "setting", facts.settings),
    }
    return {name: text for name, text in found.items() if text}


def _about(facts: CardFacts) -> str | None:
    if not facts.base_model:
        return None
    is_adapter = facts.library == "peft" or (facts.load is not None and facts.load.is_adapter)
    made = {"quantized": "Quantized from", "merge": "Merged from", "finetune": "Trained from"}
    kind = "An adapter for" if is_adapter else made.get(facts.relation or "", "From")
    return f"{kind} [{_shown(facts.base_model)}](https://huggingface.co/{facts.base_model})."


def _table(title: str, what: str, rows: tuple[Row, ...]) -> str | None:
    if not rows:
        return None
    shown = [f"| {_shown(name)} | {_shown(value)} | {_shown(source)} |" for name, value, source in rows]
    return "\n".join([f"## {title}\n", f"| {what} | value | known from |", "|---|---|---|", *shown])


def _shown(text: str) -> str:
    """Return text for Markdown in which nothing is markup: a name from a file must not become a link or a tag."""
    return _MARKUP.sub(lambda match: f"&#{ord(match[0])};", escape_name(text))


# How to load it


def _load(facts: CardFacts, repo: str) -> str | None:
    """Return how each library loads the weights, or None where nothing certain can be said."""
    load, base = facts.load or LoadFacts(), facts.base_model or _BASE_PLACEHOLDER
    library = facts.library
    found = {
        "PEFT": _fenced("python", _peft(repo, base, load)) if library == "peft" else None,
        "diffusers": _fenced("python", _diffusers(repo, base, load)) if library == "diffusers" else None,
        "transformers": _fenced("python", _transformers(repo, load)) if library == "transformers" else None,
        "vLLM": _fenced("sh", _vllm(repo, facts.base_model, load)) if "vllm" in load.loaders else None,
        "ComfyUI": _comfyui(repo, load) if "comfyui" in load.loaders else None,
    }
    ways = {name: text for name, text in found.items() if text}
    if len(ways) < 2:
        return "## How to load it\n\n" + next(iter(ways.values())) if ways else None
    return "\n\n".join(["## How to load it", *(f"### {name}\n\n{text}" for name, text in ways.items())])


def _fenced(language: str, code: str | None) -> str | None:
    return f"```{language}\n{code}```" if code is not None else None


def _class(name: str | None, default: str) -> str:
    return name if name is not None and _is_class(name) else default


def _is_class(name: str) -> bool:
    return _IDENTIFIER.fullmatch(name) is not None and not keyword.iskeyword(name)


def _peft(repo: str, base: str, load: LoadFacts) -> str:
    if load.component is not None:
        model = f"pipeline.{load.component}"
        return (
            "from diffusers import DiffusionPipeline\n"
            "from peft import PeftModel\n"
            "\n"
            f'pipeline = DiffusionPipeline.from_pretrained("{base}")\n'
            f'{model} = PeftModel.from_pretrained({model}, "{repo}")\n'
        )
    if load.auto_class is None:
        return f'from peft import PeftModel\n\nmodel = PeftModel.from_pretrained(base, "{repo}")  # base: {base}\n'
    auto = _class(load.auto_class, "AutoModel")
    return (
        "from peft import PeftModel\n"
        f"from transformers import {auto}\n"
        "\n"
        f'base = {auto}.from_pretrained("{base}")\n'
        f'model = PeftModel.from_pretrained(base, "{repo}")\n'
    )


def _diffusers(repo: str, base: str, load: LoadFacts) -> str | None:
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


def _transformers(repo: str, load: LoadFacts) -> str:
    auto = _class(load.auto_class, "AutoModel")
    names = f"{auto}, AutoTokenizer" if load.has_tokenizer else auto
    code = f'from transformers import {names}\n\nmodel = {auto}.from_pretrained("{repo}")\n'
    if load.has_tokenizer:
        code += f'tokenizer = AutoTokenizer.from_pretrained("{repo}")\n'
    return code


def _vllm(repo: str, base: str | None, load: LoadFacts) -> str | None:
    rank = next((each for each in _VLLM_RANKS if each >= (load.rank or 0)), None)
    if base is None or rank is None:
        return None
    option = f" --max-lora-rank {rank}" if rank > _VLLM_RANKS[0] else ""
    return f"vllm serve {base} --enable-lora{option} --lora-modules {repo.rpartition('/')[2]}={repo}\n"


def _comfyui(repo: str, load: LoadFacts) -> str | None:
    if load.weight_name is None or not _PLAIN.fullmatch(load.weight_name):
        return None
    link = f"[{_shown(load.weight_name)}](https://huggingface.co/{repo}/resolve/main/{load.weight_name})"
    return f"Download {link} into ComfyUI/models/loras, and choose it in the node Load LoRA."
