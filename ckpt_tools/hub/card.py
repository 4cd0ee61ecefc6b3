"""The model card: what is known about the weights, the code that loads them, and where every setting came from.

Source: the hub's documentation of model cards: a README.md that begins with YAML between two lines of dashes.
"""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass, fields
from typing import Literal

import yaml

from ckpt_tools.errors import UnreadableError
from ckpt_tools.text import escape_name

Library = Literal["peft", "diffusers", "transformers"]
"""Which library loads the weights; the hub shows its snippet."""

CARD_NAME = "README.md"
"""Where the hub looks for a card."""
MAX_CARD_BYTES = 4 << 20
"""A README above this size is left as it is."""

_FRONT = re.compile(r"\ufeff?---[ \t]*\r?\n(?P<yaml>.*?)(?P<end>^---[ \t]*(?:\r?\n|\Z))", re.DOTALL | re.MULTILINE)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_OLD_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
"""Of a model from before there were namespaces ("gpt2")."""
_CACHE = re.compile(r"(?:^|/)models--([\w.-]+?)--([\w.-]+?)(?:/|$)", re.ASCII)
_MARKUP = re.compile(r"""[\\`*_\[\]<>|&~$#!:@(){}"']""")

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}", re.ASCII)
_PLAIN = re.compile(r"[\w./-]{1,255}", re.ASCII)
_BASE_PLACEHOLDER = "path/or/id/of/the/base-model"
"""Stands in the code where the base model is not known by a hub id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFacts:
    """What the code needs to know beyond the names."""

    is_adapter: bool = False
    """There is a base model to load first."""
    auto_class: str | None = None
    """Class of transformers that loads the model (for an adapter: its base); AutoModel by default."""
    has_tokenizer: bool = False
    weight_name: str | None = None
    """File name of a LoRA for diffusers, where it is not the one that diffusers looks for."""
    is_pipeline: bool = False
    """A whole diffusers pipeline, not one of its models."""
    model_class: str | None = None
    """Class of diffusers that loads a single model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """What a card says. None and empty: not known, so the card is silent about it."""

    title: str | None = None
    """Heading; the repository's name by default."""
    base_model: str | None = None
    """Hub id of the model that the adapter is for, or that was trained further."""
    library: Library | None = None
    tags: tuple[str, ...] = ()
    pipeline_tag: str | None = None
    """The hub's name of the task ("text-generation")."""
    license: str | None = None
    """The hub's name of the licence ("apache-2.0"); never guessed."""
    load: LoadFacts | None = None
    """What the code block needs beyond the names."""
    settings: tuple[tuple[str, str, str], ...] = ()
    """(setting, value, where it came from)."""
    notes: tuple[str, ...] = ()
    """For whoever pushes, not for the card: what was left out, and why."""

    @property
    def is_empty(self) -> bool:
        """Is there nothing to say?"""
        return not any(getattr(self, field.name) for field in fields(self) if field.name != "notes")

    def or_else(self, other: CardFacts) -> CardFacts:
        """Return these facts, and `other`'s where they are silent."""
        pairs = {field.name: getattr(self, field.name) or getattr(other, field.name) for field in fields(self)}
        pairs["notes"] = tuple(dict.fromkeys((*self.notes, *other.notes)))
        return CardFacts(**pairs)


def hub_id_of(text: str) -> str | None:
    """Return the hub id that `text` is, or that a path into the hub's cache stands for; None for any other path."""
    if _HUB_ID.fullmatch(text) and ".." not in text and "--" not in text and not text.endswith((".git", ".")):
        return text
    cached = _CACHE.search(text.replace("\\", "/"))
    return f"{cached[1]}/{cached[2]}" if cached else None


def build_card(facts: CardFacts, *, repo: str, existing: str | None = None) -> str:
    """Return the text of the card.

    An existing text stays as it is, to the letter; only the keys that its front matter lacks are added.

    Raises:
        UnreadableError: The front matter of `existing` is no YAML mapping, which the hub would refuse too.
    """
    if existing is not None and existing.strip():
        return _merge(existing, _front_matter(facts))
    front = _dump(_front_matter(facts))
    return (f"---\n{front}---\n\n" if front else "") + _body(facts, repo)


def _front_matter(facts: CardFacts) -> dict[str, object]:
    tags = list(dict.fromkeys(facts.tags))
    if facts.base_model and facts.library == "peft":
        tags.insert(0, f"base_model:adapter:{facts.base_model}")
    keys: dict[str, object] = {
        "base_model": facts.base_model,
        "library_name": facts.library,
        "license": facts.license,
        "pipeline_tag": facts.pipeline_tag,
        "tags": tags,
    }
    return {key: value for key, value in keys.items() if value}


def _dump(keys: dict[str, object]) -> str:
    if not keys:
        return ""
    return yaml.safe_dump(keys, sort_keys=False, allow_unicode=True, width=1000, default_flow_style=False)


def read_front_matter(text: str) -> dict[str, object]:
    """Return the keys of a README's front matter; none if it has none.

    Raises:
        UnreadableError: It is not a YAML mapping.
    """
    match = _FRONT.match(text)
    if match is None:
        return {}
    try:
        found = yaml.safe_load(match["yaml"])
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _bad_front("is not valid YAML") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise _bad_front("is not a mapping of keys to values")
    return {str(key): value for key, value in found.items()}


def _bad_front(what: str) -> UnreadableError:
    return UnreadableError(
        f"the front matter of the model card {what}",
        where=CARD_NAME,
        hint="fix the part between the first two lines of dashes; the hub refuses it as well",
    )


def _merge(existing: str, keys: dict[str, object]) -> str:
    known = read_front_matter(existing)
    newline = "\r\n" if "\r\n" in existing.partition("\n")[0] + "\n" else "\n"
    added = _dump({key: value for key, value in keys.items() if key not in known}).replace("\n", newline)
    if not added:
        return existing
    match = _FRONT.match(existing)
    if match is None:
        return f"---{newline}{added}---{newline}{newline}{existing}"
    at = match.start("end")
    merged = existing[:at] + added + existing[at:]
    try:
        is_sound = read_front_matter(merged) == {**keys, **known}
    except UnreadableError:
        is_sound = False
    # A mapping in braces, or one that ends in "...", takes no more lines: it stays as it is.
    return merged if is_sound else existing


def local_bases(text: str) -> tuple[str, ...]:
    """Return the values of a front matter's base_model that are no hub ids: paths on the machine that trained."""
    value = read_front_matter(text).get("base_model")
    values = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(str(each) for each in values if hub_id_of(str(each)) != each and not _OLD_ID.fullmatch(str(each)))


def refuse_local_base(text: str) -> None:
    """Refuse a card that names its base model by a path, as PEFT writes it: the hub takes ids alone.

    Raises:
        UnreadableError: It does.
    """
    if local_bases(text):
        raise _local_base(text)


def _local_base(text: str) -> UnreadableError:
    return UnreadableError(
        f"the model card names the base model by a local path: base_model is {local_bases(text)[0]}",
        where=CARD_NAME,
        hint="--base-model ORG/NAME puts the hub id into the uploaded card; or fix README.md",
    )


def name_base(text: str, base_model: str | None) -> str:
    """Put a hub id where a card has a local path as its base model; the rest stays as it is, to the letter.

    Raises:
        UnreadableError: There is such a path, and no id for it or no plain line that has it.
    """
    bases = local_bases(text)
    if not bases:
        return text
    match = _FRONT.match(text)
    if base_model is None or match is None or len(bases) > 1:
        raise _local_base(text)
    old = re.escape(bases[0])
    front = re.sub(
        rf"^(base_model:[ \t]*)[\"']?{old}[\"']?(?=[ \t]*\r?$)",
        rf"\g<1>{base_model}",
        match["yaml"],
        flags=re.MULTILINE,
    )
    front = re.sub(rf"(base_model:\w+:){old}(?=[\"']?[ \t]*\r?$)", rf"\g<1>{base_model}", front, flags=re.MULTILINE)
    named = text[: match.start("yaml")] + front + text[match.end("yaml") :]
    if read_front_matter(named).get("base_model") != base_model:
        raise _local_base(text)
    return named


def missing_keys(facts: CardFacts, text: str) -> tuple[str, ...]:
    """Return the keys that `facts` know and the front matter of a card does not have."""
    known = read_front_matter(text)
    return tuple(key for key in _front_matter(facts) if key not in known)


def _body(facts: CardFacts, repo: str) -> str:
    title = facts.title or repo.rpartition("/")[2]
    parts = [f"# {_shown(title)}"]
    if facts.base_model:
        is_adapter = facts.library == "peft" or (facts.load is not None and facts.load.is_adapter)
        kind = "An adapter for" if is_adapter else "From"
        parts.append(f"{kind} [{_shown(facts.base_model)}](https://huggingface.co/{facts.base_model}).")
    code = _load_code(facts.library, repo=repo, base_model=facts.base_model, load=facts.load or LoadFacts())
    if code is not None:
        parts.append(f"## How to load it\n\n```python\n{code}```")
    if facts.settings:
        rows = [f"| {_shown(name)} | {_shown(value)} | {_shown(source)} |" for name, value, source in facts.settings]
        parts.append("\n".join(["## Settings\n", "| setting | value | known from |", "|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def _shown(text: str) -> str:
    """Return text for Markdown in which nothing is markup: a name from a file must not become a link or a tag."""
    return _MARKUP.sub(lambda match: f"&#{ord(match[0])};", escape_name(text))


def _load_code(library: str | None, *, repo: str, base_model: str | None, load: LoadFacts) -> str | None:
    """Return Python that loads the weights, or None where nothing certain can be said."""
    base = base_model or _BASE_PLACEHOLDER
    if library == "peft":
        return _peft(repo, base, load)
    if library == "diffusers":
        return _diffusers(repo, base, load)
    if library == "transformers":
        return _transformers(repo, load)
    return None


def _class(name: str | None, default: str) -> str:
    return name if name is not None and _is_class(name) else default


def _is_class(name: str) -> bool:
    return _IDENTIFIER.fullmatch(name) is not None and not keyword.iskeyword(name)


def _peft(repo: str, base: str, load: LoadFacts) -> str:
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
        weight = load.weight_name if load.weight_name is not None and _PLAIN.fullmatch(load.weight_name) else None
        argument = f', weight_name="{weight}"' if weight else ""
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
