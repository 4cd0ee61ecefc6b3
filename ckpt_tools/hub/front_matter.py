"""The YAML between the first two lines of dashes of a model card: read, extended, and otherwise kept to the letter."""

from __future__ import annotations

import re
from typing import Any

import yaml

from ckpt_tools.errors import UnreadableError

CARD_NAME = "README.md"
"""Where the hub looks for a card."""

_FRONT = re.compile(r"\ufeff?---[ \t]*\r?\n(?P<yaml>.*?)(?P<end>^---[ \t]*(?:\r?\n|\Z))", re.DOTALL | re.MULTILINE)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_OLD_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
"""Of a model from before there were namespaces ("gpt2")."""
_NO_IDS = (".git", ".", ".safetensors", ".ckpt", ".pt", ".pth", ".bin", ".gguf")
"""Ends of what looks like an id and is a file."""
_CACHE = re.compile(r"(?:^|/)models--([\w.-]+?)--([\w.-]+?)(?:/|$)", re.ASCII)


def hub_id_of(text: str) -> str | None:
    """Return the hub id that `text` is, or that a path into the hub's cache stands for; None for any other path."""
    if _HUB_ID.fullmatch(text) and ".." not in text and "--" not in text and not text.endswith(_NO_IDS):
        return text
    cached = _CACHE.search(text.replace("\\", "/"))
    return f"{cached[1]}/{cached[2]}" if cached else None


def is_hub_id(text: str) -> bool:
    """Is it an id of the hub, be it one from before there were namespaces?"""
    return hub_id_of(text) == text or _OLD_ID.fullmatch(text) is not None


def dump(keys: dict[str, object]) -> str:
    """Return YAML that says `keys`, without the lines of dashes."""
    if not keys:
        return ""
    return yaml.safe_dump(keys, sort_keys=False, allow_unicode=True, width=1000, default_flow_style=False)


def read_front_matter(text: str) -> dict[str, object]:
    """Return the keys of a README's front matter; none if it has none."""
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


def newline_of(text: str) -> str:
    """Return what ends the lines of a text."""
    return "\r\n" if "\r\n" in text.partition("\n")[0] + "\n" else "\n"


def extend(existing: str, keys: dict[str, object]) -> str:
    """Return the card with the keys that its front matter lacks; unchanged where that takes no more lines."""
    known = read_front_matter(existing)
    newline = newline_of(existing)
    added = dump({key: value for key, value in keys.items() if key not in known}).replace("\n", newline)
    if not added:
        return existing
    match = _FRONT.match(existing)
    if match is None:
        return f"---{newline}{added}---{newline}{newline}{existing}"
    at = match.start("end")
    # A mapping in braces, or one that ends in "...", takes no more lines: it stays as it is.
    return _if_says(existing[:at] + added + existing[at:], {**keys, **known}, existing)


def unite(existing: str, lists: dict[str, list[object]]) -> str:
    """Return the card with what `lists` has beyond the lists of its front matter appended to these.

    Keys that are missing or hold no list stay as they are; so does everything where YAML's own marks do not tell the
    lines of a list from the others (aliases, braces).
    """
    for key, values in lists.items():
        match, known = _FRONT.match(existing), read_front_matter(existing)
        here = known.get(key)
        more = [value for value in values if isinstance(here, list) and value not in here]
        if match is None or not isinstance(here, list) or not more:
            continue
        root: Any = yaml.compose(match["yaml"], Loader=yaml.SafeLoader)
        node = next(value for name, value in root.value if name.value == key)
        start, end = node.start_mark.index, node.end_mark.index
        front, newline = match["yaml"], newline_of(existing)
        if node.flow_style:
            text = yaml.safe_dump([*here, *more], default_flow_style=True, width=10**6, allow_unicode=True).strip()
        else:
            end = start + len(front[start:end].rstrip())
            indent = " " * node.start_mark.column
            rows = yaml.safe_dump(more, sort_keys=False, allow_unicode=True, width=1000).splitlines()
            text = front[start:end] + "".join(f"{newline}{indent}{row}" for row in rows)
        at = match.start("yaml")
        merged = existing[: at + start] + text + existing[at + end :]
        existing = _if_says(merged, {**known, key: [*here, *more]}, existing)
    return existing


def _if_says(merged: str, keys: dict[str, object], otherwise: str) -> str:
    try:
        return merged if read_front_matter(merged) == keys else otherwise
    except UnreadableError:
        return otherwise


def local_bases(text: str) -> tuple[str, ...]:
    """Return the values of a front matter's base_model that are no hub ids: paths on the machine that trained."""
    value = read_front_matter(text).get("base_model")
    values = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(str(each) for each in values if not is_hub_id(str(each)))


def refuse_local_base(text: str) -> None:
    """Refuse a card that names its base model by a path, as PEFT writes it: the hub takes ids alone."""
    if local_bases(text):
        raise _local_base(text)


def _local_base(text: str) -> UnreadableError:
    return UnreadableError(
        f"the model card names the base model by a local path: base_model is {local_bases(text)[0]}",
        where=CARD_NAME,
        hint="--base-model ORG/NAME puts the hub id into the uploaded card; or fix README.md",
    )


def name_base(text: str, base_model: str | None) -> str:
    """Put a hub id where a card has a local path as its base model; the rest stays as it is, to the letter."""
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
