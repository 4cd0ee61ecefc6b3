"""The model card: what is known about the weights, and what becomes of a card that is there already.

Source: the hub's documentation of model cards: a README.md that begins with YAML between two lines of dashes; of
their keys (base_model_relation, widget, license_name, …), and of its component `<Gallery />`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Literal, get_args

from ckpt_tools.errors import UsageError
from ckpt_tools.hub.front_matter import hub_id_of, is_hub_id, read_front_matter
from ckpt_tools.options import Doc
from ckpt_tools.options.hub import CardFields, Relation

Library = Literal["peft", "diffusers", "transformers"]
"""Which library loads the weights; the hub shows its snippet."""
Row = tuple[str, str, str]
"""(what, value, where it came from)."""
MAX_CARD_BYTES = 4 << 20
"""A README above this size is left as it is."""
LISTS = ("tags", "language", "datasets", "widget")
"""Keys of which a card that is there gets what was asked for beside what it has."""


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
class Sample:
    """A picture or a video for the gallery."""

    url: str
    """Its path in the repository."""
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
        """Is there nothing to say of the weights themselves?"""
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
            raise UsageError(f"{self.base_model!r} is not a hub id", hint="--base-model takes ORG/NAME")
        for named in self.datasets:
            if not is_hub_id(named):
                raise UsageError(f"{named!r} is not a hub id", hint="--dataset takes ORG/NAME")


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
    return CardFacts(
        base_model=base if base is not None and is_hub_id(base) else None,
        relation=next((word for word in get_args(Relation) if word == relation), None),
        library=next((word for word in get_args(Library) if word == library), None),
        instance_prompt=known.get("instance_prompt"),
    )


def missing_keys(facts: CardFacts, text: str) -> tuple[str, ...]:
    """Return the keys that `facts` know and the front matter of a card does not have."""
    known = read_front_matter(text)
    return tuple(key for key in front_keys(facts) if key not in known)


def kept_keys(asked: CardFacts, text: str) -> tuple[str, ...]:
    """Return the keys of which the card says something else than what was asked for."""
    known = read_front_matter(text)

    def says(key: str, value: object) -> bool:
        here = known[key]
        return here == value or (isinstance(here, list) and isinstance(value, list) and all(x in here for x in value))

    wanted = front_keys(asked).items()
    return tuple(f"{key}: {known[key]}" for key, value in wanted if key in known and not says(key, value))
