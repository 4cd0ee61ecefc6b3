"""The YAML at the start of a model card: found as the hub finds it, extended by whole keys, else kept to the letter.

`ModelCard` writes all of it anew: comments are lost, and YAML 1.1 turns `language: no` into false.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

import yaml

from ckpt_tools.errors import UnreadableError

CARD_NAME = "README.md"  # Where the hub looks for a card

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_OLD_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}", re.ASCII)  # Of a model from before there were namespaces ("gpt2")
_NO_IDS = (".git", ".", ".safetensors", ".ckpt", ".pt", ".pth", ".bin", ".gguf")
"""Ends of what looks like an id and is a file."""
UNSAID: tuple[object, ...] = (None, "", [])  # Values that say nothing: `base_model: ''` is none
_TEXTS = ("tags", "language", "datasets")
"""Keys whose values are text, whatever a version of YAML makes of them: `language: [no]` is Norwegian."""
_NO_TEXT = re.compile(r"[-+.]*\d[\w.:+-]*|[-+]?\.(?:inf|nan)|y|n|yes|no|on|off|true|false|null|[~=]|<<", re.IGNORECASE)
"""What some version of YAML reads as a number, a date or a boolean; 1.1, by which PyYAML quotes, knows no 1e5."""


class _Dumper(yaml.SafeDumper):
    """Quotes text that any version of YAML would take for something else."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="'" if _NO_TEXT.fullmatch(text) else None)


_Dumper.add_representer(str, _text)
_CACHE = re.compile(r"(?:^|/)models--([\w.-]+?)--([\w.-]+?)(?:/|$)", re.ASCII)


def hub_id_of(text: str) -> str | None:
    """Return the hub id that `text` is, or that a path into the hub's cache stands for; None for any other path."""
    if _HUB_ID.fullmatch(text) and ".." not in text and "--" not in text and not text.endswith(_NO_IDS):
        return text
    cached = _CACHE.search(text.replace("\\", "/"))
    return f"{cached[1]}/{cached[2]}" if cached else None


def is_hub_id(text: str) -> bool:
    """Return True for an id of the hub, be it one from before there were namespaces."""
    return hub_id_of(text) == text or _OLD_ID.fullmatch(text) is not None


def front_of(text: str) -> re.Match[str] | None:
    """Return where a README has its front matter, as the hub's own client finds it."""
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    found: re.Match[str] | None = REGEX_YAML_BLOCK.search(text)
    return found


def read_front_matter(text: str) -> dict[str, object]:
    """Return the keys of a README's front matter; none if it has none."""
    match, why = front_of(text), "is not a YAML mapping"
    try:
        found = yaml.safe_load(match[2]) if match is not None else None
        if isinstance(found, dict) and (odd := [key for key in _TEXTS if found.get(key) not in UNSAID]):
            texts = yaml.load(match[2] if match else "", yaml.BaseLoader)  # noqa: S506 - all text, no objects
            found |= {key: texts.get(key, found[key]) for key in odd}
    except (yaml.YAMLError, ValueError, RecursionError):
        found, why = [], "is not valid YAML"
    if found is not None and not isinstance(found, dict):
        hint = "fix the YAML between the first two lines of dashes; the hub rejects it too"
        raise UnreadableError(f"the front matter of the model card {why}", where=CARD_NAME, hint=hint)
    return {str(key): value for key, value in (found or {}).items()}


def newline_of(text: str) -> str:
    """Return what ends the lines of a text."""
    return "\r\n" if "\r\n" in text.partition("\n")[0] + "\n" else "\n"


def with_keys(text: str, changes: Mapping[str, object]) -> str:
    """Return the card with `changes` (None removes a key); unchanged where its lines do not take them (in braces)."""
    if not changes:
        return text
    known, newline, match = read_front_matter(text), newline_of(text), front_of(text)
    options = {"sort_keys": False, "allow_unicode": True, "width": 1000, "line_break": newline}
    dump = functools.partial(yaml.dump, Dumper=_Dumper, **options)
    lines = {key: "" if value is None else str(dump({key: value})).rstrip() for key, value in changes.items()}
    if match is None:
        return newline.join(["---", *lines.values(), "---", "", text])
    front = match[2]
    for key, own in lines.items():
        if key not in known:
            front = f"{front}{newline}{own}"
            continue
        old = re.search(rf"^([\"']?){re.escape(key)}\1[ \t]*:.*?(?=\s*^[^\s-]|\s*\Z)", front, re.MULTILINE | re.DOTALL)
        if old is None:
            return text
        front = front[: old.start()] + own + front[old.end() :]
    merged = text[: match.start(2)] + front + text[match.end(2) :]
    try:
        found = read_front_matter(merged)
        said = [{key: each[key] for key in each if each[key] is not None} for each in (found, known | dict(changes))]
        return merged if said[0] == said[1] else text
    except UnreadableError:
        return text


def name_base(text: str, base_model: str | None) -> str:
    """Put `base_model` where a card names one other; refuse a path, as PEFT writes it, that nothing replaces."""
    known = read_front_matter(text)
    value, tags = known.get("base_model"), known.get("tags")
    values = [str(each) for each in (value if isinstance(value, list) else [value]) if each not in UNSAID]
    if base_model is not None and len(values) < 2 and values != [base_model]:
        changes: dict[str, object] = {"base_model": base_model}
        old = re.compile(rf"(base_model:(?:\w+:)?){re.escape(''.join(values))}$")  # PEFT's tag, of no base as well
        if isinstance(tags, list) and any(old.match(str(tag)) for tag in tags):
            changes["tags"] = [old.sub(rf"\1{base_model}", str(tag)) for tag in tags]
        if (named := with_keys(text, changes)) != text:
            return named
    paths = [each for each in values if not is_hub_id(each)]
    if not paths:
        return text
    what = f"the model card names the base model by a local path: base_model is {paths[0]}"
    hint = "add --base-model ORG/NAME to put the hub id into the uploaded card, or fix README.md"
    raise UnreadableError(what, where=CARD_NAME, hint=hint)
