"""transformers' TrainingArguments, as JSON or YAML, and what TRL's scripts add to them.

Source: transformers 5.23 `training_args.py` (fields, `_process_fsdp_args`, `_apply_legacy_fsdp_to_config`),
`trainer.py`; TRL's `ModelConfig` and `SFTConfig` for adapters, quantisation and lengths.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.errors import CkptError
from ckpt_tools.preflight.configs.deepspeed_file import deepspeed_rows
from ckpt_tools.preflight.configs.document import Document, find_file, read_document
from ckpt_tools.preflight.configs.fsdp_plugin import (
    SECTION,
    STRATEGIES,
    FsdpOptions,
    PluginDefaults,
    plugin_mesh_row,
    plugin_rows,
    resumed_from,
    v2_strategy,
    without_prefix,
)
from ckpt_tools.preflight.configs.names import known
from ckpt_tools.preflight.configs.schema import Count, Names, Number, Positive, Section, Truth, Word, dtype_name
from ckpt_tools.preflight.configs.table import Given, Reader, Source, Table, named_by, row
from ckpt_tools.preflight.plain_values import as_truth
from ckpt_tools.preflight.spec import AdapterSpec, Engine

DEFAULTS = PluginDefaults(
    auto_wrap_policy="TRANSFORMER_BASED_WRAP",
    min_num_params=0,
    full_state_dict=True,
    cpu_ram_efficient_loading=False,
)
"""Source: `_process_fsdp_args`."""
_AXES = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
_OWN = (
    "output_dir",
    "fsdp",
    "fsdp_config",
    "optim",
    "model_name_or_path",
    "num_train_epochs",
    "gradient_checkpointing",
)
"""Options of which such a file has one."""
_OTHERS = (
    "base_model",
    "distributed_type",
    "compute_environment",
    "actor_rollout_ref",
    "parallelism",
    "training",
    "trainer",
)
"""Options that make it somebody else's."""
_INSTEAD = {
    "offload_params": "cpu_offload",
    "sharding_strategy": "reshard_after_forward",
    "cpu_offload_params": "cpu_offload",
}
"""Option of another's `fsdp_config` → what Trainer calls it."""


class TrainerFsdp(FsdpOptions, known=known("trainer", "fsdp_config"), instead=_INSTEAD):
    """`fsdp_config`; each key with or without `fsdp_`."""

    cpu_offload: Truth | None = None
    xla: Truth | None = None


class Sizes(Section, known=known("trainer", "parallelism_config")):
    """`parallelism_config`, which a script makes a ParallelismConfig of."""

    dp_replicate_size: Count | None = None
    dp_shard_size: Count | None = None
    tp_size: Count | None = None
    cp_size: Count | None = None
    sp_size: Count | None = None


class Trainer(Section, known=known("trainer", "arguments", "trl"), extensible=True):
    """The file."""

    per_device_train_batch_size: Positive | None = None
    bf16: Truth | None = None
    fp16: Truth | None = None
    optim: Word | None = None
    gradient_checkpointing: Truth | None = None
    activation_checkpointing: Truth | None = None
    # true, words, a list of words
    fsdp: Any = None
    fsdp_config: TrainerFsdp = TrainerFsdp()
    parallelism_config: Sizes = Sizes()
    # a path or DeepSpeed's own config
    deepspeed: Any = None
    resume_from_checkpoint: Word | None = None
    model_name_or_path: Word | None = None
    torch_dtype: Word | None = None
    dtype: Word | None = None
    max_length: Positive | None = None
    max_seq_length: Positive | None = None
    model_max_length: Count | None = None
    block_size: Count | None = None
    use_peft: Truth | None = None
    lora_r: Count | None = None
    lora_alpha: Number | None = None
    lora_target_modules: Names | None = None
    load_in_4bit: Truth | None = None
    load_in_8bit: Truth | None = None
    bnb_4bit_quant_type: Word | None = None


def _with_fsdp_file(values: Mapping[str, object], path: str) -> tuple[Mapping[str, object], tuple[Finding, ...]]:
    """Return `values` with the options of the file that `fsdp_config` names in its place."""
    name = values.get(SECTION)
    if not isinstance(name, str):
        return values, ()
    problem = "there is no such file"
    place = find_file(name, (os.path.dirname(path), ""))  # Trainer itself looks in the current directory
    if place is not None:
        try:
            return {**values, SECTION: read_document(place).values or {}}, ()
        except CkptError as error:
            problem = error.what
    finding = Finding.error(
        "missing-file",
        SECTION,
        f"{name}: {problem}; its options count as not given",
        "name a JSON file, or write its options below fsdp_config",
    )
    return {key: value for key, value in values.items() if key != SECTION}, (finding,)


def _fsdp_words(value: object) -> tuple[tuple[str, ...] | None, tuple[Finding, ...]]:
    """Return what `fsdp` says: None for off, and what it says that Trainer does not know."""
    truth = as_truth(value)
    if value in (None, "", [], ()) or truth is False:
        return None, ()
    if truth is True:
        return (), ()
    if isinstance(value, str):
        items = tuple(value.split())
    elif isinstance(value, Sequence) and all(isinstance(item, str) for item in value):
        items = tuple(value)
    else:
        items = ("",)
    findings = tuple(
        Finding.error(
            "unknown-value",
            "fsdp",
            f"{item!r} is not an option of fsdp: Trainer stops at it",
            "fsdp: true, and the rest in fsdp_config",
        )
        for item in items
        if item not in ("auto_wrap", "offload") and item.upper() not in STRATEGIES
    )
    return tuple(item.lower() for item in items), findings


def _words_of_fsdp(raw: Trainer) -> tuple[str, ...]:
    return _fsdp_words(raw.fsdp)[0] or ()


def _engine(given: Given[Trainer]) -> Engine:
    raw = given.raw
    if _fsdp_words(raw.fsdp)[0] is not None:
        if raw.fsdp_config.xla:
            return "other"
        return "fsdp1" if raw.fsdp_config.version == 1 else "fsdp2"
    if raw.deepspeed:
        return "deepspeed"
    return "none" if given.spec.world_size == 1 else "ddp"


def _axes(given: Given[Trainer]) -> dict[str, int]:
    if given.spec.axes:
        return {axis: given.spec.axes.get(axis, 1) for axis in _AXES}
    if given.spec.engine in ("none", "other"):
        return {}
    return {"dp_replicate": -1} if given.spec.engine == "ddp" else {"dp_shard": -1}


def _v2_strategy(given: Given[Trainer]) -> tuple[str, bool | None]:
    items = _words_of_fsdp(given.raw)
    return v2_strategy(given, default="shard_grad_op" not in items or "full_shard" in items)


def _offloads(given: Given[Trainer]) -> bool:
    asked = given.raw.fsdp_config.cpu_offload
    return "offload" in _words_of_fsdp(given.raw) if asked is None else asked


def _dtypes(given: Given[Trainer]) -> tuple[str | None, str | None, str | None]:
    raw = given.raw
    mixed = "bf16" if raw.bf16 else "f16" if raw.fp16 else None
    stored = dtype_name(raw.torch_dtype or raw.dtype)
    # accelerate widens what is trained, unless nothing is mixed.
    is_widened = mixed is not None and given.is_fsdp
    return mixed or stored, (mixed or stored) if given.is_fsdp else None, "f32" if is_widened else stored


def _adapter(given: Given[Trainer]) -> AdapterSpec | None:
    """Return the adapter of TRL's options. Source: `trl/trainer/model_config.py:ModelConfig` (r 16, alpha 32)."""
    raw = given.raw
    if not raw.use_peft:
        return None
    return AdapterSpec(
        kind="lora",
        rank=16 if raw.lora_r is None else raw.lora_r,
        alpha=32.0 if raw.lora_alpha is None else raw.lora_alpha,
        targets=raw.lora_target_modules or (),
    )


def _quantize(given: Given[Trainer]) -> str | None:
    if given.raw.load_in_4bit:
        return given.raw.bnb_4bit_quant_type or "nf4"
    return "int8" if given.raw.load_in_8bit else None


_TABLE: Table[Trainer] = {
    "engine": row("fsdp", "deepspeed", value=_engine),
    **{f"axes.{axis}": row(f"parallelism_config.{axis}_size") for axis in _AXES},
    "axes": row(value=_axes),
    "mesh": plugin_mesh_row(),
    "strategy reshard_after_forward": named_by("fsdp_config.reshard_after_forward", "fsdp"),
    "offload_params": named_by("fsdp_config.cpu_offload", "fsdp"),
    "param_dtype reduce_dtype master_dtype": row("bf16", "fp16", "torch_dtype", "dtype", value=_dtypes),
    "activation_checkpointing": row(
        "gradient_checkpointing",
        "activation_checkpointing",
        value=lambda given: bool(given.raw.gradient_checkpointing or given.raw.activation_checkpointing),
    ),
    "adapter": row("lora_r", "use_peft", value=_adapter),
    "quantize": row("load_in_4bit", "load_in_8bit", value=_quantize),
    "optimizer": row("optim", default="adamw_torch_fused"),
    "seq_len": row("max_length", "max_seq_length", "model_max_length", "block_size"),
    "batch_size": row("per_device_train_batch_size", default=8),
    "model": row("model_name_or_path"),
    "resume_from": row("resume_from_checkpoint", value=resumed_from),
}
_BY_ENGINE: Mapping[Engine, Table[Trainer]] = {
    "deepspeed": deepspeed_rows(is_beside=True),
    **plugin_rows(DEFAULTS, offload=row(value=_offloads), v2=row(value=_v2_strategy)),
}


def _check(given: Given[Trainer]) -> None:
    given.findings += _fsdp_words(given.raw.fsdp)[1]


def _looks_like(document: Document) -> bool:
    values = document.values or {}
    return "per_device_train_batch_size" in values or (
        any(name in values for name in _OWN) and not any(name in values for name in _OTHERS)
    )


def _prepare(document: Document) -> Source:
    values, missing = _with_fsdp_file(document.keyed(), document.path)
    return without_prefix(
        Source(model=Trainer, table=_TABLE, by_engine=_BY_ENGINE, values=values, findings=missing, check=_check)
    )


READER = Reader(
    name="trainer",
    looks_like=_looks_like,
    prepare=_prepare,
    written={
        "activation_checkpointing": "fsdp_config.activation_checkpointing: true",
        "reshard_after_forward": "fsdp_config.reshard_after_forward: true",
        "offload_params": "fsdp_config.cpu_offload: true",
    },
)
