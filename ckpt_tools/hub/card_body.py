"""The text of a model card: card.md.j2 filled with facts, and what becomes of a card that is there.

Names and values come from untrusted files: nothing of them becomes markup or code.
"""

from __future__ import annotations

import keyword
import re
from importlib.resources import files

from ckpt_tools.hub.card import LISTS, CardFacts, LoadFacts, front_keys
from ckpt_tools.hub.front_matter import newline_of, read_front_matter, with_keys
from ckpt_tools.text import escape_name

_SECTION = re.compile(r"<!-- ckpt:([a-z]+) -->.*?<!-- /ckpt:\1 -->", re.DOTALL)
_MARKUP = re.compile(r"""[\\`*_\[\]<>|&~$#!:@(){}"']""")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}", re.ASCII)
_PLAIN = re.compile(r"[\w./-]{1,255}", re.ASCII)
_BASE_PLACEHOLDER = "path/or/id/of/the/base-model"
"""Stands in the code where the base model is not known by a hub id."""
_VLLM_RANKS = (16, 32, 64, 128, 256, 320, 512)
"""Source: vLLM, config/lora.py: what --max-lora-rank takes, from its default on."""
_MADE = {"quantized": "Quantized from", "merge": "Merged from", "finetune": "Trained from"}


def build_card(facts: CardFacts, *, repo: str, existing: str | None = None, asked: CardFacts | None = None) -> str:
    """Return the text of the card.

    An existing text gets the keys that its front matter lacks, and what ckpt wrote between its own comments
    (`<!-- ckpt:load -->` … `<!-- /ckpt:load -->`) is written anew. The rest stays as it is, to the letter. What was
    `asked` for in so many words joins the lists that the card has.
    """
    keys, body = front_keys(facts), _render(facts, repo)
    if existing is None or not existing.strip():
        return with_keys(body, keys)
    known = read_front_matter(existing)
    wanted = {} if asked is None else front_keys(asked)
    if asked is not None and asked.samples and "widget" in keys:
        wanted["widget"] = keys["widget"]
    text = existing
    for key in LISTS:
        here, more = known.get(key), wanted.get(key, [])
        if isinstance(here, list) and isinstance(more, list) and (new := [each for each in more if each not in here]):
            text = with_keys(text, {key: [*here, *new]})
    text = with_keys(text, {key: value for key, value in keys.items() if key not in known})
    anew = {match[1]: match[0].replace("\n", newline_of(existing)) for match in _SECTION.finditer(body)}
    return _SECTION.sub(lambda match: anew.get(match[1], match[0]), text)


def _render(facts: CardFacts, repo: str) -> str:
    from jinja2 import Environment, StrictUndefined

    load = facts.load or LoadFacts()
    is_adapter = facts.library == "peft" or load.is_adapter
    rank = next((each for each in _VLLM_RANKS if each >= (load.rank or 0)), None)
    is_plain = load.weight_name is None or _PLAIN.fullmatch(load.weight_name) is not None
    ways = {
        "PEFT": facts.library == "peft",
        "diffusers": facts.library == "diffusers"
        and (is_plain if load.is_adapter else load.is_pipeline or _is_class(load.model_class)),
        "transformers": facts.library == "transformers",
        "vLLM": "vllm" in load.loaders and facts.base_model is not None and rank is not None,
        "ComfyUI": "comfyui" in load.loaders and load.weight_name is not None and is_plain,
    }
    # Markdown: `shown` escapes what HTML's escapes would leave.
    environment = Environment(trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)  # noqa: S701
    environment.filters["shown"] = _shown
    template = environment.from_string(files("ckpt_tools.hub").joinpath("card.md.j2").read_text(encoding="utf-8"))
    text = template.render(
        facts=facts,
        load=load,
        repo=repo,
        name=repo.rpartition("/")[2],
        title=facts.title or repo.rpartition("/")[2],
        base=facts.base_model or _BASE_PLACEHOLDER,
        made="An adapter for" if is_adapter else _MADE.get(facts.relation or "", "From"),
        auto_class=load.auto_class if _is_class(load.auto_class) else "AutoModel",
        vllm_rank=rank,
        ways=[way for way, is_known in ways.items() if is_known],
    )
    return text.rstrip() + "\n"


def _shown(text: str) -> str:
    """Return text for Markdown in which nothing is markup: a name from a file must not become a link or a tag."""
    return _MARKUP.sub(lambda match: f"&#{ord(match[0])};", escape_name(text))


def _is_class(name: str | None) -> bool:
    return name is not None and _IDENTIFIER.fullmatch(name) is not None and not keyword.iskeyword(name)
