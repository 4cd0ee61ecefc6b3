"""What a model's config.json and the headers of its weights say. No torch.

Source: the fields of transformers' `PreTrainedConfig` classes, under the names that the families use.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from ckpt_tools.checkpoint.formats.file_names import is_weights
from ckpt_tools.checkpoint.formats.opening import open_path
from ckpt_tools.checkpoint.names.match_architecture import EXPERT_COUNTS
from ckpt_tools.errors import CkptError, UnreadableError, UsageError
from ckpt_tools.models.config import CONFIG_NAME, ModelConfig, component_of, config_beside, config_path, read_config
from ckpt_tools.preflight.spec import ParallelSpec
from ckpt_tools.sandbox.check_config import check_config
from ckpt_tools.storage.locations import absolute, exists, is_directory, is_file, open_source
from ckpt_tools.text import escape_name

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads")
_INTERMEDIATE = (
    *("intermediate_size", "n_inner", "ffn_dim", "d_ff"),
    *("moe_intermediate_size", "shared_expert_intermediate_size"),
)
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
_TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")

_BLOCKS: Mapping[str, str] = {
    "bert": "BertLayer", "deepseek_v3": "DeepseekV3DecoderLayer", "falcon": "FalconDecoderLayer",
    "gemma": "GemmaDecoderLayer", "gemma2": "Gemma2DecoderLayer", "gemma3_text": "Gemma3DecoderLayer",
    "gpt2": "GPT2Block", "gpt_neox": "GPTNeoXLayer", "gpt_oss": "GptOssDecoderLayer", "llama": "LlamaDecoderLayer",
    "mistral": "MistralDecoderLayer", "mixtral": "MixtralDecoderLayer", "olmo2": "Olmo2DecoderLayer",
    "opt": "OPTDecoderLayer", "phi3": "Phi3DecoderLayer", "qwen2": "Qwen2DecoderLayer",
    "qwen2_moe": "Qwen2MoeDecoderLayer", "qwen3": "Qwen3DecoderLayer", "qwen3_moe": "Qwen3MoeDecoderLayer",
    "t5": "T5Block",
}  # fmt: skip
"""model_type → the class of its blocks, for where transformers is not installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """How the weights of the base model are packed."""

    method: str
    bits: int | None = None
    storage: str | None = None  # Dtype that the packed bytes pretend to be: uint8, bfloat16, …


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What is known of a model without its weights. None: the config does not say."""

    where: str
    architecture: str | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None  # Key and value heads; the query heads where the config names none
    num_experts: int | None = None
    vocab_size: int | None = None
    intermediate_sizes: tuple[int, ...] = ()
    max_positions: int | None = None
    tied_embeddings: bool | None = None
    quantization: Quantization | None = None
    blocks: tuple[str, ...] = ()
    module_classes: tuple[str, ...] | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """FQN → shape of every parameter, from the headers of the weights or from the built model; empty if neither."""
    stored: frozenset[str] = frozenset()

    @property
    def num_params(self) -> int | None:
        """Elements of all parameters."""
        return sum(math.prod(shape) for shape in self.shapes.values()) or None

    @property
    def is_moe(self) -> bool:
        """Has it experts?"""
        return (self.num_experts or 0) > 1


def read_facts(model: str) -> ModelFacts:
    """Read what a model's config and the headers of its weights say; `match.look_at_model` builds it for more."""
    config = checked_config(model)
    directory, name = os.path.split(config.where)
    shapes = _stored_shapes(directory) if name == CONFIG_NAME else {}
    return replace(facts_of(config.values, where=config.where), shapes=shapes, stored=frozenset(shapes))


def checked_config(model: str) -> ModelConfig:
    """Read the config.json that `model` names or holds, not by links out of it, or raise RefusedConfigError."""
    directory, name = os.path.split(config_path(absolute(model)))
    with open_source(directory) as source:
        config = config_beside(source, name)
    if config is None:
        hint = "pass the directory that the model was downloaded to"
        raise UnreadableError(f"no {name} here", where=model, hint=hint)
    check_config(config.values, config.where)
    return config


def facts_of(values: Mapping[str, object], *, where: str = CONFIG_NAME) -> ModelFacts:
    """Return what a config.json alone says."""
    text = _text_part(values)
    heads = _whole(text, _HEADS)
    tied = values.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    return ModelFacts(
        where=where,
        architecture=ModelConfig(values=values, where=where).architecture,
        num_layers=_whole(text, _LAYERS),
        num_heads=heads,
        num_kv_heads=_whole(text, _KV_HEADS) or (1 if text.get("multi_query") is True else heads),
        num_experts=_whole(text, EXPERT_COUNTS),
        vocab_size=_whole(text, ("vocab_size",)),
        intermediate_sizes=tuple(dict.fromkeys(_wholes(text, _INTERMEDIATE))),
        max_positions=_whole(text, _POSITIONS),
        tied_embeddings=tied if isinstance(tied, bool) else None,
        quantization=_quantization(values.get("quantization_config")),
        blocks=(_BLOCKS[kind],) if (kind := _word(text, "model_type") or "") in _BLOCKS else (),
    )


def _stored_shapes(directory: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights in the folder of the config; none where there are none that can be read."""
    try:
        with open_path(directory, as_part=True) as opened:
            return {entry.fqn: tuple(entry.shape) for entry in opened.checkpoint.tensors}
    except CkptError:  # a config without weights is the usual case; the checkpoint is checked on its own
        return {}


def _text_part(values: Mapping[str, object]) -> Mapping[str, object]:
    for key in _TEXT_PARTS:
        part = values.get(key)
        if isinstance(part, dict):
            return _text_part(part)
    return values


def _wholes(values: Mapping[str, object], keys: tuple[str, ...]) -> Iterator[int]:
    for key in keys:
        value = values.get(key)
        if type(value) is int and value > 0:
            yield value


def _whole(values: Mapping[str, object], keys: tuple[str, ...]) -> int | None:
    return next(_wholes(values, keys), None)


def _word(values: Mapping[str, object], key: str) -> str | None:
    value = values.get(key)
    return value.removeprefix("torch.") if isinstance(value, str) else None


def _quantization(values: object) -> Quantization | None:
    if not isinstance(values, dict):
        return None
    method = values.get("quant_method")
    found = values.get("bits")
    bits = found if type(found) is int else None
    if values.get("load_in_4bit") is True:
        bits, method = 4, method or "bitsandbytes"
    elif values.get("load_in_8bit") is True:
        bits, method = 8, method or "bitsandbytes"
    storage = _word(values, "bnb_4bit_quant_storage")
    return Quantization(method=method if isinstance(method, str) else "unknown", bits=bits, storage=storage)


# Where the model and the checkpoint of a run lie on this machine: what was passed, or what the config names.


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What there is to look at."""

    model: str | None = None
    weights: str | None = None  # Where the base model's weights are, when they are here
    checkpoint: str | None = None
    """What to load: what was passed, else what the config resumes from, else the base model's weights."""
    resumes: bool = False
    not_checked: tuple[str, ...] = ()


def find_sources(spec: ParallelSpec, *, config_path: str, model: str | None, checkpoint: str | None) -> Sources:
    """Find the model and the checkpoint, from here and from the config's folder; nothing is downloaded."""
    if checkpoint is not None and not exists(checkpoint):
        raise UsageError("there is no such checkpoint", where=checkpoint, hint="use --checkpoint PATH")
    missing: list[str] = []
    directory = _component(_find_model(spec, config_path, model, missing), missing)
    described = None if directory is None else _described(directory, missing, passed=model is not None)
    weights = directory if directory is not None and _has_weights(directory) else None
    resumes = False
    if checkpoint is not None:
        resumes = spec.resume_from is not None
    elif spec.resume_from is not None:
        checkpoint = _existing(spec.resume_from, config_path)
        resumes = checkpoint is not None
        if checkpoint is None:
            key = spec.keys.get("resume_from", "the config")
            missing.append(
                f"the checkpoint that {key} resumes from ({escape_name(spec.resume_from)}), which does not exist here: "
                "pass --checkpoint"
            )
    if checkpoint is None:
        checkpoint = weights
    if checkpoint is None and spec.resume_from is None:
        missing.append("a checkpoint: there are no weights here (--checkpoint SRC, or a --model directory with them)")
    return Sources(model=described, weights=weights, checkpoint=checkpoint, resumes=resumes, not_checked=tuple(missing))


def _find_model(spec: ParallelSpec, config_path: str, model: str | None, missing: list[str]) -> str | None:
    if model is not None:
        if not exists(model):
            raise UsageError("there is no such model", where=model, hint="use --model DIR")
        return model
    if spec.model is None:
        key = spec.keys.get("model")
        says = "the config does not name one" if key is None else f"the file does not contain the value of {key}"
        missing.append(f"the model: {says}; pass --model DIR")
        return None
    found = _existing(spec.model, config_path) or _cached(spec.model)
    if found is None:
        key = spec.keys.get("model", "the config")
        missing.append(
            f"the model: {key} names {escape_name(spec.model)}, which is not on this machine; pass --model DIR"
        )
    return found


def _existing(path: str, config_path: str) -> str | None:
    near = os.path.join(os.path.dirname(os.path.abspath(config_path)), path)
    return next((one for one in (path, near) if os.path.exists(one)), None)


def _cached(name: str) -> str | None:
    """Return the snapshot of a hub id in the local cache, if its config is there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, CONFIG_NAME)
    except HFValidationError:  # it is no hub id either
        return None
    return os.path.dirname(found) if isinstance(found, str) else None


def _component(directory: str | None, missing: list[str]) -> str | None:
    """Return the component that is trained, where `directory` is that of a diffusers pipeline."""
    if directory is None:
        return None
    try:
        found, what = component_of(directory)
    except UsageError as error:
        missing.append(f"the model's classes, names and shapes: {error.what}")
        return None
    if what:
        missing.append(f"the other parts of {escape_name(directory)}: the model is {what}")
    return found


def _described(directory: str, missing: list[str], *, passed: bool) -> str | None:
    """Return `directory` when its config.json describes a transformers model; say what it is otherwise."""
    path = config_path(directory)
    where = escape_name(directory)
    if not is_file(path) or not path.endswith(".json"):
        if passed:
            hint = "pass --model the directory that the model was downloaded to, or its config.json"
            raise UsageError("no config.json of a model", where=where, hint=hint)
        missing.append(f"the model's classes, names and shapes: there is no config.json in {where}")
        return None
    if read_config(path).architecture is None:
        missing.append(f"the model's classes, names and shapes: {where} names no architecture")
        return None
    return directory


def _has_weights(directory: str) -> bool:
    if not is_directory(directory):
        return False
    with open_source(directory) as source:
        names = source.list_files(max_depth=0)
    return any(is_weights(name) and name.endswith((".safetensors", ".metadata")) for name in names)
