"""What a directory's own files say for its card. Nothing is guessed: what they do not say is left out.

Source of the tasks: huggingface.co/tasks; diffusers 0.42, pipelines/__init__.py, and the tags of its training examples.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ckpt_tools.adapters.architectures import ARCHITECTURES
from ckpt_tools.adapters.read.sidecars import ASSUMED
from ckpt_tools.checkpoint.formats.format import read_document
from ckpt_tools.checkpoint.formats.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, parse_manifest
from ckpt_tools.checkpoint.formats.opening import read_file
from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.hub.card import CardFacts, LoadFacts, Row
from ckpt_tools.hub.check import ADAPTER_CONFIG, DIFFUSERS_LORA, PIPELINE_CONFIG, Kind
from ckpt_tools.hub.front_matter import CARD_NAME, UNSAID, hub_id_of, is_hub_id, read_front_matter
from ckpt_tools.hub.training import ai_toolkit_config, training_facts, value_at
from ckpt_tools.models.config import CONFIG_NAME, config_in
from ckpt_tools.options.hub import Relation
from ckpt_tools.storage.source import Source
from ckpt_tools.text import escape_name

if TYPE_CHECKING:
    from ckpt_tools.adapters.check import LoraCheck

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
_SETTINGS = ("peft_type", "r", "lora_alpha", "alpha", "use_rslora", "use_dora", "target_modules", "modules_to_save")
"""Of an adapter's config, what the card shows."""
BASE_KEYS = ("base_model_name_or_path", "ss_base_model", "ss_sd_model_name")
"""Of a header: what may be the base's hub id (diffusers, ai-toolkit, kohya)."""
_MADE: Mapping[str, Relation] = {"quantised": "quantized", "merged": "finetune", "averaged": "merge"}
"""What the manifest says of how ckpt made the weights → what the hub calls it."""
_PICTURES = ("kohya", "comfyui", "diffusers", "ai-toolkit")
"""Conventions that only adapters of image and video models have."""
_MAX_VALUE_CHARS = 200


with open(os.path.join(os.path.dirname(__file__), "tasks.toml"), "rb") as _file:
    _TASKS: Mapping[str, Any] = tomllib.load(_file)


def facts_of(
    source: Source,
    chosen: Collection[str],
    kind: Kind,
    adapters: Mapping[str, LoraCheck],
    *,
    base_model: str | None = None,
) -> CardFacts:
    """Return what the files in a directory say; `chosen` are those to be pushed."""
    if kind != "weights":  # beside and below a model lie others; below an adapter its earlier steps
        adapters = {name: check for name, check in adapters.items() if kind == "peft" and "/" not in name}
    headers: dict[str, Mapping[str, str]] = {name: {} for name in adapters}
    for name in adapters:
        with suppress(CkptError):
            headers[name] = read_file(source, name).header.metadata
    facts = _facts(source, chosen, kind)
    if base_model is not None:
        facts = replace(facts, base_model=base_model, notes=())
    if len(adapters) == 1:  # of several no single name, base or trigger word tells
        ((name, check),) = adapters.items()
        facts = _with_adapter(facts, name, check, headers[name], source)
    trigger = value_at(ai_toolkit_config(source.root), "trigger_word") if adapters else None
    prompt, training = facts.instance_prompt or _text(trigger), training_facts(source, chosen, headers.values())
    relation: Relation | None = "adapter" if adapters else _relation(source, chosen)
    notes = facts.notes
    if relation not in (None, "adapter") and facts.base_model is None:
        notes = (*notes, "the base model is not known: add --base-model ORG/NAME to put it into the card")
    return replace(facts, relation=relation, instance_prompt=prompt, training=training, notes=notes)


def _facts(source: Source, chosen: Collection[str], kind: Kind) -> CardFacts:
    if kind == "peft":
        return _peft(source)
    if kind == "transformers":
        return _transformers(config_in(source, CONFIG_NAME).values, any(name in chosen for name in _TOKENIZER))
    if kind != "diffusers":
        return CardFacts()
    is_pipeline = PIPELINE_CONFIG in chosen
    name = _text(config_in(source, PIPELINE_CONFIG if is_pipeline else CONFIG_NAME).values.get("_class_name"))
    load = LoadFacts(is_pipeline=is_pipeline, model_class=None if is_pipeline else name)
    task = task_of_class(name) if is_pipeline else None
    rows = rows_of("model class", name, "its config")
    return CardFacts(library="diffusers", pipeline_tag=task, load=load, settings=rows)


def _relation(source: Source, chosen: Collection[str]) -> Relation | None:
    if MANIFEST_NAME not in chosen:
        return None
    made = parse_manifest(read_document(source, MANIFEST_NAME, MAX_MANIFEST_BYTES)).source
    return next((relation for key, relation in _MADE.items() if key in made), None)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def rows_of(name: str, value: object, origin: str) -> tuple[Row, ...]:
    """Return the row that shows a setting; none for one that says nothing."""
    if value is None or value in ([], {}) or (value is False and not origin.startswith("assumed")):
        return ()
    shown = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return ((name, shown if len(shown) <= _MAX_VALUE_CHARS else shown[: _MAX_VALUE_CHARS - 1] + "…", origin),)


def base_model_of(text: str | None, *, root: str) -> tuple[str | None, tuple[str, ...]]:
    """Return the base's hub id, or None and notes where `text` is a local path, perhaps relative to `root`."""
    if text is None:
        return None, ("the base model is not known: the card does not name it",)
    found = hub_id_of(text)
    if found is not None and not (found == text and _is_here(text, root)):
        return found, ()
    what = f"the base model is a local path ({escape_name(text)})"
    return None, (f"{what}, which the card leaves out; name it with --base-model",)


def _is_here(text: str, root: str) -> bool:
    return os.path.exists(text) or os.path.exists(os.path.join(root, text))


def _peft(source: Source) -> CardFacts:
    config = config_in(source, ADAPTER_CONFIG).values
    auto_class, pipeline_tag = (*_TASKS["peft"].get(str(config.get("task_type")), ()), None, None)[:2]
    if auto_class is None and str(value_at(config, "auto_mapping.parent_library")).startswith("transformers"):
        auto_class = _text(value_at(config, "auto_mapping.base_model_class"))
    base, notes = base_model_of(_text(config.get("base_model_name_or_path")), root=source.root)
    family = str(config.get("peft_type") or "lora").lower()
    settings = tuple(row for key in _SETTINGS for row in rows_of(key, config.get(key), ADAPTER_CONFIG))
    load, tags = LoadFacts(is_adapter=True, auto_class=auto_class), (family,) if family.isalnum() else ()
    about = CardFacts(base_model=base, library="peft", pipeline_tag=pipeline_tag, notes=notes)
    return replace(about, tags=tags, load=load, settings=settings)


def _with_adapter(
    facts: CardFacts, name: str, check: LoraCheck, metadata: Mapping[str, str], source: Source
) -> CardFacts:
    """Add what check-lora and the header tell of the only adapter."""
    takes = tuple(report.loader for report in check.loaders if report.is_whole)
    family = next((each for each in ARCHITECTURES.values() if each.name == check.architecture), None)
    family_name = "" if family is None else family.title
    is_diffusion = family is not None or check.convention in _PICTURES
    is_peft = facts.library == "peft"
    base, notes = facts.base_model, facts.notes
    if not is_peft and base is None:
        named = next((metadata[key] for key in BASE_KEYS if key in metadata), None)
        base, notes = base_model_of(named, root=source.root)
    load = facts.load or LoadFacts(is_adapter=True)
    loaders = tuple(each for each in takes if is_diffusion == (each == "comfyui"))
    weight_name = name if is_diffusion and (not is_peft or "comfyui" in takes) else None
    component = family.main.component if family is not None and is_peft else None
    load = replace(load, rank=max(check.ranks, default=None), loaders=loaders)
    load = replace(load, weight_name=weight_name, component=component)
    tags = facts.tags or tuple(filter(str.isalnum, check.kind.split("+")))
    library = facts.library or ("diffusers" if "diffusers" in takes or name == DIFFUSERS_LORA else None)
    task = facts.pipeline_tag
    if is_diffusion:
        family_name = family_name or (base or "").rpartition("/")[2]
        task = task or task_of_adapter(family_name, base)
        more = ("lora", task, tag_of(family_name), library if library == "diffusers" else None, "template:sd-lora")
        tags = (*tags, *filter(None, more))
    tags, settings = tuple(dict.fromkeys(tags)), (*(facts.settings or _checked(check)), *_assumed(metadata))
    trigger = _text(metadata.get("modelspec.trigger_phrase"))
    facts = replace(facts, base_model=base, library=library, pipeline_tag=task, instance_prompt=trigger)
    return replace(facts, tags=tags, load=load, settings=settings, notes=notes)


def _checked(check: LoraCheck) -> tuple[Row, ...]:
    """Return what the factors themselves show, where no config does."""
    alpha = check.alpha
    return (
        *rows_of("type", check.kind, "its tensors"),
        *rows_of("rank", check.rank, "its tensors"),
        *(rows_of("alpha", f"{alpha.value:g}", alpha.source) if alpha is not None else ()),
        *rows_of("modules", check.num_modules, "its tensors"),
    )


def _assumed(metadata: Mapping[str, str]) -> tuple[Row, ...]:
    """Return the settings that the export assumed since nothing recorded them (`adapters.settings.header_of`)."""
    pairs = (each.partition("=") for each in metadata.get(ASSUMED, "").split(", ") if each)
    return tuple((name, value, "assumed: not recorded") for name, _, value in pairs)


def refuse_contradictions(card: str, kind: Kind, adapters: Mapping[str, LoraCheck], base_model: str | None) -> None:
    """Refuse a card whose keys contradict each other, the files or the base that the adapter's config will name."""
    keys, own = read_front_matter(card), [check for name, check in adapters.items() if "/" not in name]
    license_id, name, relation = (keys.get(key) for key in ("license", "license_name", "base_model_relation"))
    is_adapter = kind == "peft" or (kind == "weights" and bool(own))
    found = []
    if name not in UNSAID and license_id not in ("other", *UNSAID):
        found.append(f"license is {license_id}, but license_name is {name} (--license)")
    if relation not in UNSAID and (relation == "adapter") != is_adapter and (is_adapter or kind != "weights"):
        found.append(f"base_model_relation is {relation}, but this is {'an' if is_adapter else 'no'} adapter")
    base = keys.get("base_model")
    if base_model is not None and base_model not in (base if isinstance(base, list) else [base]):
        found.append(f"base_model is {base}, but the base model is {base_model}, and ckpt cannot replace it there")
    tag = tag_of(str(base).rpartition("/")[2])
    for check in own:
        classes = next((each.classes for each in ARCHITECTURES.values() if each.name == check.architecture), None)
        family = tag_of(classes[0]) if classes else check.architecture
        if (
            tag
            and family
            and tag != family
            and not any("shared" in _TASKS["families"].get(each, ()) for each in (tag, family))
        ):
            found.append(f"base_model is {base}, but the adapter is for {check.architecture}")
    if found:
        hint = "correct README.md, or give the option: --license, --base-model-relation, --base-model"
        raise UsageError(f"the model card contradicts itself: {escape_name(found[0])}", where=CARD_NAME, hint=hint)


def refuse_assumed(adapters: Mapping[str, LoraCheck]) -> None:
    """Refuse settings that the export which wrote an adapter assumed: in public others take them for recorded."""
    for name, check in adapters.items():
        if check.assumed:
            what = f"nothing records {', '.join(check.assumed)}; the export that wrote this file assumed it"
            hint = "export it again with --config FIELD=VALUE or the run's adapter_config.json, or add --accept-assumed"
            raise UsageError(what, where=name, hint=hint)


def configs_naming(
    source: Source, names: Collection[str], base_model: str | None, *, accept_assumed: bool
) -> Iterator[tuple[str, bytes, str]]:
    """Yield (path, content, note) of each adapter_config.json that would name another base than the card, or a path.

    A directory on the trainer's machine is nothing that a stranger can load; the file itself stays as it is.
    """
    for path in names:
        if path.rpartition("/")[2] != ADAPTER_CONFIG:
            continue
        values = dict(config_in(source, path).values)
        old = _text(values.get("base_model_name_or_path"))
        is_path = old is not None and (not is_hub_id(old) or _is_here(old, source.root))
        new = base_model or base_model_of(old, root=source.root)[0] or (None if is_path else old)
        if old == new or not (is_path or (path == ADAPTER_CONFIG and new is not None)):
            continue
        if new is None and not accept_assumed:
            what = f"the base model is a local path ({escape_name(str(old))}), which nobody else can load"
            hint = "name it: --base-model ORG/NAME; or publish the adapter without its base: --accept-assumed"
            raise UsageError(what, where=path, hint=hint)
        content = json.dumps(values | {"base_model_name_or_path": new}, indent=2, ensure_ascii=False)
        note = f"{path} names {old or 'no base model'}; the uploaded file names {new or 'none'}"
        yield path, content.encode() + b"\n", escape_name(note)


def _transformers(config: Mapping[str, object], has_tokenizer: bool) -> CardFacts:
    name = _text(value_at(config, "architectures.0"))
    heads = (head for end, head in _TASKS["heads"].items() if name is not None and name.endswith(end))
    auto_class, pipeline_tag = next(heads, (None, None))
    if auto_class is None and str(name).endswith("ForConditionalGeneration") and "vision_config" in config:
        auto_class, pipeline_tag = "AutoModelForImageTextToText", "image-text-to-text"
    settings = (
        *rows_of("architecture", name, CONFIG_NAME),
        *rows_of("model type", config.get("model_type"), CONFIG_NAME),
        *rows_of("dtype", config.get("dtype") or config.get("torch_dtype"), CONFIG_NAME),
    )
    load = LoadFacts(auto_class=auto_class, has_tokenizer=has_tokenizer)
    return CardFacts(library="transformers", pipeline_tag=pipeline_tag, load=load, settings=settings)


def task_of_class(name: str | None) -> str | None:
    """Return the task of a pipeline of diffusers'; None where its name does not tell."""
    return _task(tag_of(name or ""), name or "")


def task_of_adapter(family: str, base_model: str | None) -> str | None:
    """Return the task of an adapter: of models whose modules have the same names, the base's own name tells which."""
    tag = tag_of(family)
    if tag is None or (base_model is None and "all" not in _TASKS["families"][tag]):
        return None
    return _task(tag, (base_model or "").rpartition("/")[2])


def tag_of(family: str) -> str | None:
    """Return the tag under which the hub lists models of a family, by its name or class."""
    plain = re.sub(r"[-.\s]", "", family).lower()
    return next((tag for tag, each in _TASKS["families"].items() if plain.startswith(tuple(each["begins"]))), None)


def _task(tag: str | None, name: str) -> str | None:
    usual = None if tag is None else str(_TASKS["families"][tag]["task"])
    variant = next((each.get("task") for each in _TASKS["variants"] if re.search(each["words"], name)), usual)
    # Of sounds, shapes and videos there is editing as well.
    return None if variant == "image-to-image" and usual != "text-to-image" else variant
