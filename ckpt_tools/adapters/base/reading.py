"""What of a base model an adapter is held against: names and shapes, from headers alone."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ckpt_tools.adapters.adapter import Adapter, Sourced
from ckpt_tools.adapters.architectures.choose import model_family_of
from ckpt_tools.adapters.base.frozen import refuse_changed
from ckpt_tools.adapters.base.model import BaseModel, adapted_paths, as_named, live_tensors, without_predictors
from ckpt_tools.adapters.base.slots import stacked_experts
from ckpt_tools.adapters.base.tied import HEAD, tied_embeddings
from ckpt_tools.adapters.base.trainers import in_hub_names
from ckpt_tools.adapters.read.assemble import known_shape
from ckpt_tools.adapters.read.opening import OpenedAdapter
from ckpt_tools.adapters.read.sidecars import base_config
from ckpt_tools.description.checkpoint import TensorEntry
from ckpt_tools.description.transform import plain_names
from ckpt_tools.errors import UsageError
from ckpt_tools.formats.opening import open_path

_TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}
"""End of an architecture's name → PEFT's task type. Source: peft 0.21 `utils/peft_types.py`."""
_READS_NO_TEXT = frozenset(
    {"audio_config", "conv_dim", "feature_projection_input_dim", "image_size", "input_feat_per_channel"}
    | {"num_channels", "num_mel_bins", "patch_size", "vision_config"}
)
"""Fields of configs whose models take sound or images: with a task type PEFT's forward would give them `input_ids`."""
_SEQ_2_SEQ = """
    BigBirdPegasus Blenderbot BlenderbotSmall Bart FSMT LED LongT5 M2M100 MBart MT5 Mvp NllbMoe PLBart Pegasus PegasusX
    ProphetNet SwitchTransformers T5 T5Gemma UMT5
"""
"""Models of whose …ForConditionalGeneration the first input is text: speech and image models are called alike.
Source: transformers 5.23, `main_input_name` of every class of this name with `is_encoder_decoder`."""


def read_base(path: str | os.PathLike[str]) -> BaseModel:
    """Read the headers of a base model."""
    with open_path(os.fspath(path)) as opened:
        tensors = plain_names(opened.checkpoint)
        config = base_config(opened)
        shapes = {name: slot.shape for name, slot in stacked_experts(tensors).items()}
        shapes |= {name: known_shape(entry) for name, entry in tensors.items()}
        if tied := tied_embeddings(opened, tensors):
            shapes[HEAD] = tied[0].shape
        return BaseModel(
            shapes=without_predictors(shapes, config),
            source="--base",
            family=model_family_of(shapes, config),
            task_type=_task_type(config),
            config=config,
        )


def on_base(read: OpenedAdapter, base: str | os.PathLike[str] | None) -> OpenedAdapter:
    """Return an adapter of a trainer's own model under the names of the base's; errors as `in_hub_names`."""
    if base is None or read.adapter.convention != "trainer":
        return read
    with open_path(os.fspath(base)) as opened:
        return in_hub_names(read, base_config(opened))


def base_of(read: OpenedAdapter, base: str | os.PathLike[str] | None) -> tuple[BaseModel | None, bool]:
    """Return the base model as the adapter names it, and whether its weights are proven to be the training run's."""
    if base is None:
        return _base_in(read.adapter), False
    replicated = read.adapter.settings.get("layer_replication")
    if replicated is not None and replicated.value:
        raise UsageError(
            "layer_replication repeats layers of the base: the names of the adapter's modules are not the base's",
            where="--base",
            hint="leave it out",
        )
    is_proven = False
    if read.adapter.base_tensors:
        with open_path(os.fspath(base)) as opened:
            tensors = live_tensors(plain_names(opened.checkpoint), base_config(opened))
            is_proven = refuse_changed(read.adapter, read.opened, opened, tensors)
    return as_named(read_base(base), adapted_paths(read.adapter)), is_proven


def _base_in(adapter: Adapter[TensorEntry]) -> BaseModel | None:
    """Return the base model that a training checkpoint holds beside the adapter."""
    if not adapter.base_shapes:
        return None
    return BaseModel(
        shapes=adapter.base_shapes, source="the base model in the source", family=model_family_of(adapter.base_shapes)
    )


def _task_type(config: Mapping[str, object]) -> Sourced[object] | None:
    """Return PEFT's task type, where its forward for that task is one that the model understands."""
    architectures = config.get("architectures")
    source = "architecture in the base's config.json"
    for name in architectures if isinstance(architectures, list) else ():
        if not isinstance(name, str):
            continue
        if name.removesuffix("ForConditionalGeneration") in _SEQ_2_SEQ.split():
            return Sourced("SEQ_2_SEQ_LM", source)
        for end, task in _TASKS.items():
            if name.endswith(end) and (task == "CAUSAL_LM" or _READS_NO_TEXT.isdisjoint(config)):
                return Sourced(task, source)
    return None
