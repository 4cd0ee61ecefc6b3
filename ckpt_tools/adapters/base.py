"""What of a base model an adapter is held against: names and shapes, from headers alone."""

from __future__ import annotations

import os

from ckpt_tools.adapters.adapter import Sourced
from ckpt_tools.adapters.assemble import known_shape
from ckpt_tools.adapters.sidecars import read_json
from ckpt_tools.adapters.slots import of_model
from ckpt_tools.adapters.target_settings import BaseModel
from ckpt_tools.adapters.tied import HEAD, tied_embeddings
from ckpt_tools.opening import Opened, open_path
from ckpt_tools.transform import plain_names

_TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}
"""End of an architecture's name → PEFT's task type. Source: peft 0.21 `utils/peft_types.py`."""


def read_base(path: str | os.PathLike[str]) -> BaseModel:
    """Read the headers of a base model.

    Args:
        path: A safetensors file, an HF directory or a DCP directory.

    Raises:
        UnreadableError: Not a complete, readable checkpoint.
    """
    with open_path(os.fspath(path)) as opened:
        tensors = plain_names(opened.checkpoint)
        shapes = {name: slot.shape for name, slot in of_model(tensors).items()}
        shapes |= {name: known_shape(entry) for name, entry in tensors.items()}
        if tied := tied_embeddings(opened, tensors):
            shapes[HEAD] = tied[0].shape
        return BaseModel(shapes=shapes, source="--base", task_type=_task_type(opened))


def _task_type(opened: Opened) -> Sourced[object] | None:
    if opened.checkpoint.format == "safetensors" or not any(a.file == "config.json" for a in opened.checkpoint.assets):
        return None
    config = read_json(opened.source, "config.json")
    architectures = config.get("architectures")
    is_encoder_decoder = config.get("is_encoder_decoder") is True
    for name in architectures if isinstance(architectures, list) else ():
        for end, task in _TASKS.items():
            # Image-text models are called alike, and are causal.
            if isinstance(name, str) and name.endswith(end) and (task != "SEQ_2_SEQ_LM" or is_encoder_decoder):
                return Sourced(task, "architecture in the base's config.json")
    return None
