"""The model card: what is known about the weights, and what becomes of a card that is there already.

Source: the hub's documentation of model cards: a README.md that begins with YAML between two lines of dashes; of
their keys (base_model_relation, widget, license_name, …), and of its component `<Gallery />`. Names and
values come from untrusted files: nothing of them becomes markup or code. The text is card.md.j2.
"""

from __future__ import annotations

import functools
import keyword
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple, get_args

from ckpt_tools.errors import UsageError
from ckpt_tools.hub.front_matter import (
    CARD_NAME,
    UNSAID,
    front_of,
    hub_id_of,
    is_hub_id,
    newline_of,
    read_front_matter,
    with_keys,
)
from ckpt_tools.options import Doc
from ckpt_tools.options.hub import CardFields, Relation
from ckpt_tools.text import escape_name

if TYPE_CHECKING:
    import jinja2

Library = Literal["peft", "diffusers", "transformers"]  # Which library loads the weights; the hub shows its snippet
Row = tuple[str, str, str]  # (what, value, where it came from)
MAX_CARD_BYTES = 4 << 20  # A README above this size is left as it is
LISTS = ("tags", "language", "datasets", "widget")
"""Keys of which a card that is there gets what was asked for beside what it has."""
_SECTION = re.compile(r"<!-- ckpt:([a-z]+) -->.*?<!-- /ckpt:\1 -->", re.DOTALL)
_AFTER_GALLERY = re.compile(r"^<!-- ckpt:(?:trigger|load|training|settings) -->", re.MULTILINE)
_TITLE = re.compile(r"(?:\s*---\r?\n.*?\n---[ \t]*(?:\r?\n|$))?(?:\s*# [^\n]*(?:\n|$))?\s*", re.DOTALL)
_MARKUP = re.compile(r"""[\\`*_\[\]<>|&~$#!:@(){}"']""")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}", re.ASCII)
_PLAIN = re.compile(r"[\w./-]{1,255}", re.ASCII)
_BASE_PLACEHOLDER = "path/or/id/of/the/base-model"  # Stands in the code where the base model is not known by a hub id
_VLLM_RANKS = (16, 32, 64, 128, 256, 320, 512)
"""Source: vLLM, config/lora.py: what --max-lora-rank takes, from its default on."""
_MADE = {"quantized": "Quantized from", "merge": "Merged from", "finetune": "Trained from"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFacts:
    """What the code needs to know beyond the names."""

    is_adapter: bool = False  # There is a base model to load first
    auto_class: str | None = None
    """Class of transformers that loads the model (for an adapter: its base); AutoModel by default."""
    has_tokenizer: bool = False
    weight_name: str | None = None  # File name of a LoRA, where it is not the one that its library looks for
    is_pipeline: bool = False  # A whole diffusers pipeline, not one of its models
    model_class: str | None = None  # Class of diffusers that loads a single model
    component: str | None = None  # What a diffusers pipeline calls the model that an adapter of PEFT's is for
    files: Mapping[str, str] = field(default_factory=dict)  # Loader → file of its own beside `weight_name`
    rank: int | None = None  # The adapter's largest
    loaders: tuple[str, ...] = ()  # Others that take the adapter, as check-lora names them


class Sample(NamedTuple):
    """A picture or a video for the gallery; `url` is its path in the repository."""

    url: str
    prompt: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts(CardFields):
    """What a card says. None and empty: not known, so the card is silent about it."""

    title: Annotated[str | None, Doc("Heading; the repository's name by default.")] = None
    library: Annotated[Library | None, Doc("Library that loads the weights.")] = None
    load: Annotated[LoadFacts | None, Doc("What the code blocks need beyond the names.")] = None
    gallery: Annotated[tuple[Sample, ...], Doc("What `samples` holds.")] = ()
    training: Annotated[tuple[Row, ...], Doc("(fact, value, where it came from).")] = ()
    settings: Annotated[tuple[Row, ...], Doc("(setting, value, where it came from).")] = ()
    notes: Annotated[tuple[str, ...], Doc("For whoever pushes: what was left out, and why.")] = ()

    @classmethod
    def of(cls, said: CardFields) -> CardFacts:
        """Return what the user says, and no more."""
        return cls(**{each.name: getattr(said, each.name) for each in fields(CardFields)})

    @property
    def is_empty(self) -> bool:
        """True if nothing is known about the weights themselves."""
        return not any(getattr(self, field.name) for field in fields(self) if field.name not in ("notes", "training"))

    def or_else(self, other: CardFacts) -> CardFacts:
        """Return these facts, and `other`'s where they are silent; tags and notes of both."""
        pairs = {field.name: getattr(self, field.name) or getattr(other, field.name) for field in fields(self)}
        pairs["tags"] = tuple(dict.fromkeys((*other.tags, *self.tags)))
        pairs["notes"] = tuple(dict.fromkeys((*self.notes, *other.notes)))
        return CardFacts(**pairs)

    def check(self) -> None:
        """Refuse a base model or dataset that is no hub id; the hub itself judges the rest before anything is sent."""
        if self.base_model is not None and hub_id_of(self.base_model) != self.base_model:
            raise UsageError(f"{self.base_model!r} is not a hub id", hint="use --base-model ORG/NAME")
        for named in self.datasets:
            if not is_hub_id(named):
                raise UsageError(f"{named!r} is not a hub id", hint="use --dataset ORG/NAME")


def front_keys(facts: CardFacts) -> dict[str, object]:
    """Return the keys of the front matter that say `facts`."""
    tags = list(dict.fromkeys(facts.tags))
    if facts.base_model and (facts.library == "peft" or facts.relation == "adapter"):
        tags.insert(0, f"base_model:adapter:{facts.base_model}")
    is_own = facts.license_name is not None or facts.license_link is not None
    widget = [{"text": each.prompt or "-", "output": {"url": each.url}} for each in facts.gallery]
    keys: dict[str, object] = {
        "base_model": facts.base_model,
        "base_model_relation": facts.relation if facts.base_model else None,
        "library_name": facts.library,
        "license": facts.license or ("other" if is_own else None),
        "license_name": facts.license_name,
        "license_link": facts.license_link,
        "language": list(facts.languages),
        "datasets": list(facts.datasets),
        "pipeline_tag": facts.pipeline_tag,
        "tags": tags,
        "instance_prompt": facts.instance_prompt,
        "widget": widget,
    }
    return {key: value for key, value in keys.items() if value}


def facts_in(text: str) -> CardFacts:
    """Return what an existing card says; it stays so, and the card's sections must not contradict it."""
    known = {key: value for key, value in read_front_matter(text).items() if isinstance(value, str) and value}
    base, relation, library = (known.get(key) for key in ("base_model", "base_model_relation", "library_name"))
    its_relation: Relation | None = next((word for word in get_args(Relation) if word == relation), None)
    its_library: Library | None = next((word for word in get_args(Library) if word == library), None)
    base, prompt = base if base is not None and is_hub_id(base) else None, known.get("instance_prompt")
    return CardFacts(base_model=base, relation=its_relation, library=its_library, instance_prompt=prompt)


def merged_with(ours: str, theirs: str) -> tuple[str, bool]:
    """Return a README with what only another version's front matter has, and whether they say nothing different."""
    ends = [_SECTION.sub("", text[match.end() :] if (match := front_of(text)) else text) for text in (ours, theirs)]
    known, others = read_front_matter(ours), read_front_matter(theirs)
    more: dict[str, object] = {key: value for key, value in others.items() if known.get(key) in UNSAID}
    for key in LISTS:
        mine, other = known.get(key), others.get(key)
        if isinstance(mine, list) and isinstance(other, list) and any(each not in mine for each in other):
            more[key] = [*mine, *(each for each in other if each not in mine)]
    differ = any(known[key] != value for key, value in others.items() if key in known.keys() - more.keys() - {*LISTS})
    return with_keys(ours, more), ends[0].split() == ends[1].split() and not differ


def replaced_in(before: str, after: str) -> list[str]:
    """Return what the front matter said before and says otherwise now."""
    old, new = read_front_matter(before), read_front_matter(after)
    gone = [key for key in old if old[key] not in UNSAID and key not in LISTS and new.get(key) != old[key]]
    return [
        f"{CARD_NAME}: {key} was {escape_name(str(old[key]))}, now {escape_name(str(new.get(key, 'removed')))}"
        for key in gone
    ]


def notes_on(facts: CardFacts, asked: CardFacts, text: str) -> list[str]:
    """Return what the front matter of a card lacks of `facts`, and what it keeps although something else was asked."""
    known = read_front_matter(text)

    def has(here: object, value: object) -> bool:
        return here == value or (isinstance(here, list) and isinstance(value, list) and all(x in here for x in value))

    missing = [key for key in front_keys(facts) if key not in known]
    wanted = front_keys(asked).items()
    kept = [f"{key}: {known[key]}" for key, value in wanted if key in known and not has(known[key], value)]
    notes = [f"ckpt cannot extend this {CARD_NAME}: add {', '.join(missing)} yourself"] if missing else []
    notes += [f"{CARD_NAME} keeps its own values: {escape_name('; '.join(kept))}"] if kept else []
    return notes


def build_card(facts: CardFacts, *, repo: str, existing: str | None = None, asked: CardFacts | None = None) -> str:
    """Return the text of the card.

    An existing text gets the keys that its front matter lacks, and what ckpt wrote between its own comments
    (`<!-- ckpt:load -->` … `<!-- /ckpt:load -->`) is written anew. The rest stays as it is, to the letter. What was
    `asked` for in so many words joins the lists that the card has, and replaces other values.
    """
    keys, body = front_keys(facts), _render(facts, repo)
    if existing is None or not existing.strip():
        return with_keys(body, keys)
    known = read_front_matter(existing)
    text, wanted = existing, front_keys(asked or CardFacts())
    if asked is not None and asked.samples and "widget" in keys:
        wanted["widget"] = keys["widget"]
    for key in LISTS:
        here, more = known.get(key), wanted.pop(key, [])
        held = here if isinstance(here, list) else [] if here in UNSAID else [here]
        if held and isinstance(more, list) and (new := [each for each in more if each not in held]):
            text = with_keys(text, {key: [*held, *new]})
    changes = {key: value for key, value in keys.items() if known.get(key) in UNSAID}
    changes |= {key: value for key, value in wanted.items() if not isinstance(known.get(key), list)}
    if changes.get("license", known.get("license")) != known.get("license"):  # the old one's name and link go with it
        changes = {key: None for key in ("license_name", "license_link") if key in known} | changes
    text = with_keys(text, {key: value for key, value in changes.items() if known.get(key) != value})
    newline = newline_of(existing)
    anew = {match[1]: match[0].replace("\n", newline) for match in _SECTION.finditer(body)}
    if "gallery" in anew and "<Gallery" not in text:
        place = _AFTER_GALLERY.search(text) or _TITLE.match(text)
        at = 0 if place is None else place.start() if place.re is _AFTER_GALLERY else place.end()
        text = text[:at] + newline.join([anew["gallery"], "", ""]) + text[at:]
    return _SECTION.sub(lambda match: anew.get(match[1], match[0]), text)


def _render(facts: CardFacts, repo: str) -> str:
    load = facts.load or LoadFacts()
    rank = next((each for each in _VLLM_RANKS if each >= (load.rank or 0)), None)
    files = {way: load.files.get(way, load.weight_name) for way in ("diffusers", "comfyui")}
    plain = [way for way, name in files.items() if name is None or _PLAIN.fullmatch(name) is not None]
    is_named = "diffusers" in plain if load.is_adapter else load.is_pipeline or _is_class(load.model_class)
    ways = {
        "PEFT": facts.library == "peft",
        "diffusers": facts.library == "diffusers" and is_named,
        "transformers": facts.library == "transformers",
        "vLLM": "vllm" in load.loaders and facts.base_model is not None and rank is not None,
        "ComfyUI": "comfyui" in load.loaders and files["comfyui"] is not None and "comfyui" in plain,
    }
    name, known = repo.rpartition("/")[2], [way for way, is_known in ways.items() if is_known]
    is_adapter = facts.library == "peft" or load.is_adapter
    made = "An adapter for" if is_adapter else _MADE.get(facts.relation or "", "From")
    own = {"name": name, "title": facts.title or name, "base": facts.base_model or _BASE_PLACEHOLDER, "made": made}
    own["auto_class"] = load.auto_class if load.auto_class and _is_class(load.auto_class) else "AutoModel"
    text = _template().render(facts=facts, load=load, repo=repo, vllm_rank=rank, ways=known, files=files, **own)
    return text.rstrip() + "\n"


@functools.cache
def _template() -> jinja2.Template:
    import jinja2

    # Markdown: `shown` escapes what HTML's escapes would leave.
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)  # noqa: S701
    environment.filters["shown"] = _shown
    with open(os.path.join(os.path.dirname(__file__), "card.md.j2"), encoding="utf-8") as file:
        return environment.from_string(file.read())


def _shown(text: str) -> str:
    """Return text for Markdown in which nothing is markup: a name from a file must not become a link or a tag."""
    return _MARKUP.sub(lambda match: f"&#{ord(match[0])};", escape_name(text))


def _is_class(name: str | None) -> bool:
    return name is not None and _IDENTIFIER.fullmatch(name) is not None and not keyword.iskeyword(name)
