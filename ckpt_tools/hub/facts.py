"""What a directory's own configs say for its card. Nothing is guessed: what they do not say is left out."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

from ckpt_tools.errors import CkptError
from ckpt_tools.formats.opening import read_file
from ckpt_tools.hub.card import CardFacts, LoadFacts, hub_id_of
from ckpt_tools.hub.check import ADAPTER_CONFIG, DIFFUSERS_LORA, PIPELINE_CONFIG, Kind
from ckpt_tools.models.config import CONFIG_NAME, config_in
from ckpt_tools.storage.source import Source
from ckpt_tools.text import escape_name

_TASKS = {
    "CAUSAL_LM": ("AutoModelForCausalLM", "text-generation"),
    "SEQ_2_SEQ_LM": ("AutoModelForSeq2SeqLM", None),
    "SEQ_CLS": ("AutoModelForSequenceClassification", "text-classification"),
    "TOKEN_CLS": ("AutoModelForTokenClassification", "token-classification"),
    "QUESTION_ANS": ("AutoModelForQuestionAnswering", "question-answering"),
    "FEATURE_EXTRACTION": ("AutoModel", "feature-extraction"),
}
"""PEFT's task_type → what loads the base, and the hub's name of the task."""
_HEADS = {
    "ForCausalLM": ("AutoModelForCausalLM", "text-generation"),
    "LMHeadModel": ("AutoModelForCausalLM", "text-generation"),
    "ForMaskedLM": ("AutoModelForMaskedLM", "fill-mask"),
    "ForSequenceClassification": ("AutoModelForSequenceClassification", "text-classification"),
    "ForTokenClassification": ("AutoModelForTokenClassification", "token-classification"),
    "ForQuestionAnswering": ("AutoModelForQuestionAnswering", "question-answering"),
    "ForImageClassification": ("AutoModelForImageClassification", "image-classification"),
}
"""How the name of a model's class ends → what loads it, and the hub's name of the task."""
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
_SETTINGS = ("peft_type", "r", "lora_alpha", "alpha", "use_rslora", "use_dora", "target_modules", "modules_to_save")
"""Of an adapter's config, what the card shows."""
_MAX_VALUE_CHARS = 200


def facts_of(source: Source, chosen: Collection[str], kind: Kind) -> CardFacts:
    """Return what the configs in a directory say.

    Raises:
        UnreadableError: A config is not what it should be.
    """
    tokenizer = any(name in chosen for name in _TOKENIZER)
    if kind == "peft":
        return _peft(source)
    if kind == "diffusers-lora":
        return _diffusers_lora(source)
    if kind == "transformers":
        return _transformers(_config(source, CONFIG_NAME), tokenizer)
    if kind == "diffusers":
        is_pipeline = PIPELINE_CONFIG in chosen
        config = _config(source, PIPELINE_CONFIG if is_pipeline else CONFIG_NAME)
        name = _text(config.get("_class_name"))
        load = LoadFacts(is_pipeline=is_pipeline, model_class=None if is_pipeline else name)
        return CardFacts(library="diffusers", load=load, settings=_rows("model class", name, "its config"))
    return CardFacts()


def _config(source: Source, name: str) -> Mapping[str, object]:
    return config_in(source, name).values


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _rows(name: str, value: object, origin: str) -> tuple[tuple[str, str, str], ...]:
    if value is None or value == [] or value is False:
        return ()
    shown = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    if len(shown) > _MAX_VALUE_CHARS:
        shown = shown[: _MAX_VALUE_CHARS - 1] + "…"
    return ((name, shown, origin),)


def base_model_of(text: str | None, *, root: str) -> tuple[str | None, tuple[str, ...]]:
    """Return the base model's hub id, and what to tell the user when there is none.

    Args:
        text: As a config has it: a hub id, or a path on the machine that trained.
        root: Directory of the config, to which the path may be relative.
    """
    if text is None:
        return None, ("the base model is not known: the card does not name it",)
    found = hub_id_of(text)
    is_here = os.path.exists(text) or os.path.exists(os.path.join(root, text))
    if found is not None and not (found == text and is_here):
        return found, ()
    return None, (
        f"the base model is a local path ({escape_name(text)}), which the card leaves out; --base-model names it",
    )


def _peft(source: Source) -> CardFacts:
    config = _config(source, ADAPTER_CONFIG)
    auto_class, pipeline_tag = _TASKS.get(str(config.get("task_type")), (None, None))
    mapping = config.get("auto_mapping")
    if (
        auto_class is None
        and isinstance(mapping, dict)
        and str(mapping.get("parent_library")).startswith("transformers")
    ):
        auto_class = _text(mapping.get("base_model_class"))
    base, notes = base_model_of(_text(config.get("base_model_name_or_path")), root=source.root)
    family = str(config.get("peft_type") or "lora").lower()
    settings = tuple(row for key in _SETTINGS for row in _rows(key, config.get(key), ADAPTER_CONFIG))
    return CardFacts(
        base_model=base,
        library="peft",
        tags=(family,) if family.isalnum() else (),
        pipeline_tag=pipeline_tag,
        load=LoadFacts(is_adapter=True, auto_class=auto_class),
        settings=settings,
        notes=notes,
    )


def _diffusers_lora(source: Source) -> CardFacts:
    try:
        metadata = read_file(source, DIFFUSERS_LORA).header.metadata
    except CkptError:
        metadata = {}
    base, notes = base_model_of(_text(metadata.get("base_model_name_or_path")), root=source.root)
    return CardFacts(
        base_model=base,
        library="diffusers",
        tags=("lora",),
        load=LoadFacts(is_adapter=True),
        notes=notes,
    )


def _transformers(config: Mapping[str, object], has_tokenizer: bool) -> CardFacts:
    architectures = config.get("architectures")
    name = _text(architectures[0]) if isinstance(architectures, list) and architectures else None
    ending = next((end for end in _HEADS if name is not None and name.endswith(end)), None)
    auto_class, pipeline_tag = _HEADS[ending] if ending is not None else (None, None)
    settings = (
        *_rows("architecture", name, CONFIG_NAME),
        *_rows("model type", config.get("model_type"), CONFIG_NAME),
        *_rows("dtype", config.get("dtype") or config.get("torch_dtype"), CONFIG_NAME),
    )
    return CardFacts(
        library="transformers",
        pipeline_tag=pipeline_tag,
        load=LoadFacts(auto_class=auto_class, has_tokenizer=has_tokenizer),
        settings=settings,
    )
