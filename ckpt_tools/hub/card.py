"""The model card: what is known about the weights, and what becomes of a card that is there already.

Source: the hub's documentation of model cards: a README.md that begins with YAML between two lines of dashes; of
their keys (base_model_relation, widget, license_name, …), and of its component `<Gallery />`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Literal, get_args

from ckpt_tools.errors import UsageError
from ckpt_tools.hub.card_body import CardBody, LoadFacts, Row, sections
from ckpt_tools.hub.front_matter import dump, extend, hub_id_of, newline_of, read_front_matter, unite
from ckpt_tools.options import AnyPath, Doc, Option

Library = Literal["peft", "diffusers", "transformers"]
"""Which library loads the weights; the hub shows its snippet."""
Relation = Literal["adapter", "finetune", "quantized", "merge"]
"""How the hub's tree of models hangs a model under its base."""

MAX_CARD_BYTES = 4 << 20
"""A README above this size is left as it is."""
_LISTS = ("tags", "language", "datasets", "widget")
"""Keys of which a card that is there gets what was asked for beside what it has."""
_SECTION = r"<!-- ckpt:{name} -->.*?<!-- /ckpt:{name} -->"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A picture or a video for the gallery."""

    url: str
    """Its path in the repository."""
    prompt: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """What a card says. None and empty: not known, so the card is silent about it."""

    base_model: Annotated[
        str | None,
        Option("Hub id of the base model, for the model card.", metavar="ORG/NAME", after="commit_message"),
    ] = None
    relation: Annotated[
        Relation | None,
        Option("How it was made from the base model, if ckpt cannot tell.", name="--base-model-relation"),
    ] = None
    pipeline_tag: Annotated[
        str | None, Option("Task for the model card: text-to-image, text-generation, …", metavar="TASK")
    ] = None
    tags: Annotated[Sequence[str], Option("Tag for the model card (repeatable).", name="--tag", metavar="TAG")] = ()
    instance_prompt: Annotated[str | None, Option("Trigger words, for the model card.", metavar="TEXT")] = None
    samples: Annotated[
        AnyPath | None,
        Option("Directory of sample images or videos with their prompts, for the card's gallery.", metavar="DIR"),
    ] = None
    license: Annotated[str | None, Option("License for the model card: apache-2.0, other, …", metavar="NAME")] = None
    license_name: Annotated[str | None, Option("Name of a license of its own (with other).", metavar="NAME")] = None
    license_link: Annotated[str | None, Option("Where that license is: URL or LICENSE file.", metavar="LINK")] = None
    languages: Annotated[
        Sequence[str], Option("Language code for the card (repeatable).", name="--language", metavar="CODE")
    ] = ()
    datasets: Annotated[
        Sequence[str], Option("Hub id of a dataset (repeatable).", name="--dataset", metavar="ORG/NAME")
    ] = ()
    title: Annotated[str | None, Doc("Heading; the repository's name by default.")] = None
    library: Annotated[Library | None, Doc("Library that loads the weights.")] = None
    load: Annotated[LoadFacts | None, Doc("What the code blocks need beyond the names.")] = None
    gallery: Annotated[tuple[Sample, ...], Doc("What `samples` holds.")] = ()
    training: Annotated[tuple[Row, ...], Doc("(fact, value, where it came from).")] = ()
    settings: Annotated[tuple[Row, ...], Doc("(setting, value, where it came from).")] = ()
    notes: Annotated[tuple[str, ...], Doc("For whoever pushes: what was left out, and why.")] = ()

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
        """Refuse what the hub would refuse, last of all.

        Raises:
            UsageError: Not a hub id, or a license that lacks its other half.
        """
        ids = (("--base-model", self.base_model), *(("--dataset", each) for each in self.datasets))
        for option, named in ids:
            if named is not None and hub_id_of(named) != named:
                raise UsageError(f"{named!r} is not a hub id", hint=f"{option} takes ORG/NAME")
        if self.license_name is None and self.license_link is None:
            return
        if self.license not in (None, "other"):
            what = f"--license {self.license} is a license that the hub knows"
            raise UsageError(what, hint="leave out --license-name and --license-link, or set --license other")
        if self.license_name is not None and not re.fullmatch(r"[a-z0-9.-]+", self.license_name):
            raise UsageError(
                f"--license-name must be of a-z, 0-9, '-' and '.', got {self.license_name!r}",
                hint="--license-name flux-1-dev-non-commercial-license",
            )
        if self.license_link is not None and not re.fullmatch(r"https?://\S+|LICENSE(\.md|\.txt)?", self.license_link):
            raise UsageError(
                f"--license-link must be a URL or LICENSE, got {self.license_link!r}", hint="push a file named LICENSE"
            )


def build_card(facts: CardFacts, *, repo: str, existing: str | None = None, asked: CardFacts | None = None) -> str:
    """Return the text of the card.

    An existing text gets the keys that its front matter lacks, and what ckpt wrote between its own comments
    (`<!-- ckpt:load -->` … `<!-- /ckpt:load -->`) is written anew. The rest stays as it is, to the letter.

    Args:
        facts: All that is known.
        repo: namespace/name.
        existing: The card that is there.
        asked: What was asked for in so many words: joins lists that the card has.

    Raises:
        UnreadableError: The front matter of `existing` is no YAML mapping, which the hub would refuse too.
    """
    keys = front_keys(facts)
    body = CardBody(
        title=facts.title or repo.rpartition("/")[2],
        repo=repo,
        base_model=facts.base_model,
        relation=facts.relation,
        library=facts.library,
        instance_prompt=facts.instance_prompt,
        has_gallery=bool(facts.gallery),
        load=facts.load or LoadFacts(),
        training=facts.training,
        settings=facts.settings,
    )
    title, parts = sections(body)
    if existing is None or not existing.strip():
        front = dump(keys)
        head = f"---\n{front}---\n\n" if front else ""
        wrapped = [f"<!-- ckpt:{name} -->\n{text}\n<!-- /ckpt:{name} -->" for name, text in parts.items()]
        return head + "\n\n".join([title, *wrapped]) + "\n"
    if asked is not None:
        wanted = front_keys(asked) | ({"widget": keys["widget"]} if asked.samples and "widget" in keys else {})
        lists = {key: value for key, value in wanted.items() if key in _LISTS and isinstance(value, list)}
        existing = unite(existing, lists)
    text, newline = extend(existing, keys), newline_of(existing)
    for name, part in parts.items():
        before = re.search(_SECTION.format(name=name), text, re.DOTALL)
        if before is not None:
            anew = f"<!-- ckpt:{name} -->\n{part}\n<!-- /ckpt:{name} -->".replace("\n", newline)
            text = text[: before.start()] + anew + text[before.end() :]
    return text


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
    """Return what a card that is there says, which stays so: its sections must not contradict it.

    Raises:
        UnreadableError: Its front matter is no YAML mapping.
    """
    known = {key: value for key, value in read_front_matter(text).items() if isinstance(value, str) and value}
    base, relation, library = (known.get(key) for key in ("base_model", "base_model_relation", "library_name"))
    return CardFacts(
        base_model=base if base is not None and hub_id_of(base) == base else None,
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
    wanted = {key: value for key, value in front_keys(asked).items() if key not in _LISTS}
    return tuple(f"{key}: {known[key]}" for key, value in wanted.items() if key in known and known[key] != value)
