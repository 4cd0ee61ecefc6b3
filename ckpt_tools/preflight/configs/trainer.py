"""transformers' TrainingArguments, as JSON or YAML, and what TRL's scripts add to them.

Source: transformers 5.23 `training_args.py` (fields, `_process_fsdp_args`, `_apply_legacy_fsdp_to_config`),
`trainer.py`; TRL's `ModelConfig` and `SFTConfig` for adapters, quantisation and lengths.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.errors import CkptError
from ckpt_tools.preflight.configs.config import Reading, first_key
from ckpt_tools.preflight.configs.deepspeed_file import DeepSpeedFile, read_deepspeed, without_file
from ckpt_tools.preflight.configs.document import read_document
from ckpt_tools.preflight.configs.dtypes import dtype_name
from ckpt_tools.preflight.configs.fsdp_plugin import (
    SECTION,
    STRATEGIES,
    FsdpOptions,
    PluginDefaults,
    as_truth,
    option_key,
    strip_prefix,
    with_plugin,
)
from ckpt_tools.preflight.configs.mesh import build_mesh
from ckpt_tools.preflight.configs.names import known
from ckpt_tools.preflight.configs.schema import Count, Names, Number, Positive, Section, Truth, Word, validate, words
from ckpt_tools.preflight.spec import AdapterSpec, Engine, ParallelSpec

DEFAULTS = PluginDefaults(
    version=2,
    auto_wrap_policy="TRANSFORMER_BASED_WRAP",
    min_num_params=0,
    full_state_dict=True,
    cpu_ram_efficient_loading=False,
)
"""Source: `_process_fsdp_args`."""
_AXES = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
_LENGTHS = ("max_length", "max_seq_length", "model_max_length", "block_size")
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


class TrainerFsdp(FsdpOptions):
    """`fsdp_config`; each key with or without `fsdp_`."""

    known: ClassVar[frozenset[str]] = words(
        "backward_prefetch forward_prefetch limit_all_gathers xla_fsdp_settings xla_fsdp_v2 xla_fsdp_grad_ckpt"
    )

    instead: ClassVar[Mapping[str, str]] = {
        "offload_params": "cpu_offload",
        "sharding_strategy": "reshard_after_forward",
        "cpu_offload_params": "cpu_offload",
    }

    cpu_offload: Truth | None = None
    xla: Truth | None = None


class Sizes(Section):
    """`parallelism_config`, which a script makes a ParallelismConfig of."""

    known: ClassVar[frozenset[str]] = words("cp_backend sp_backend tp_handler cp_handler sp_handler")

    dp_replicate_size: Count | None = None
    dp_shard_size: Count | None = None
    tp_size: Count | None = None
    cp_size: Count | None = None
    sp_size: Count | None = None


class Trainer(Section):
    """The file."""

    extensible: ClassVar[bool] = True

    known: ClassVar[frozenset[str]] = known("trainer", "arguments", "trl")

    per_device_train_batch_size: Positive | None = None
    bf16: Truth | None = None
    fp16: Truth | None = None
    optim: Word | None = None
    gradient_checkpointing: Truth | None = None
    activation_checkpointing: Truth | None = None
    # true, words, a list of words
    fsdp: Any = None
    fsdp_config: TrainerFsdp | None = None
    parallelism_config: Sizes | None = None
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


def looks_like(values: Mapping[str, object]) -> bool:
    """Are these TrainingArguments?"""
    return "per_device_train_batch_size" in values or (
        any(name in values for name in _OWN) and not any(name in values for name in _OTHERS)
    )


def read(values: Mapping[str, object], *, world_size: int | None, path: str = "") -> Reading:
    """Read a config.

    Args:
        values: The file.
        world_size: Ranks; the file does not say.
        path: The file's; an `fsdp_config` that is a path is looked for beside it too.
    """
    values, missing = _with_fsdp_file(values, path)
    normal, spell = strip_prefix(values)
    raw, findings, counted = validate(Trainer, normal, spell=spell)
    options = raw.fsdp_config or TrainerFsdp()
    items, unknown = _fsdp_words(raw.fsdp)
    is_on = items is not None
    items = items or ()
    engine = _engine(raw, options, is_on=is_on, world_size=world_size)
    axes = _axes(raw, engine)
    mixed = "bf16" if raw.bf16 else "f16" if raw.fp16 else None
    stored = dtype_name(raw.torch_dtype or raw.dtype)
    is_fsdp = engine in ("fsdp1", "fsdp2")
    folders = (os.path.dirname(path), "")
    speed = read_deepspeed(raw.deepspeed, folders) if engine == "deepspeed" else DeepSpeedFile()
    if not speed.is_read:
        counted = without_file(counted, "deepspeed")
    spec = ParallelSpec(
        framework="trainer",
        engine=engine,
        world_size=world_size,
        axes=axes,
        mesh=None if engine == "other" or axes.get("sp", 1) > 1 else build_mesh(axes, world_size),
        param_dtype=mixed or stored,
        reduce_dtype=(mixed or stored) if is_fsdp else None,
        # accelerate widens what is trained, unless nothing is mixed.
        master_dtype="f32" if mixed is not None and is_fsdp else stored,
        strategy=speed.strategy,
        offload_params=speed.offload_params,
        offload_optimizer=speed.offload_optimizer,
        activation_checkpointing=bool(raw.gradient_checkpointing or raw.activation_checkpointing),
        adapter=_adapter(raw),
        quantize=_quantize(raw),
        optimizer=raw.optim or "adamw_torch_fused",
        seq_len=next((size for name in _LENGTHS if (size := getattr(raw, name)) is not None), None),
        batch_size=8 if raw.per_device_train_batch_size is None else raw.per_device_train_batch_size,
        model=raw.model_name_or_path,
        resume_from=_resume(raw.resume_from_checkpoint),
        keys=_keys(values),
    )
    reshard = options.reshard_after_forward
    if reshard is None and engine == "fsdp2" and "shard_grad_op" in items and "full_shard" not in items:
        reshard = False
    spec = with_plugin(
        spec,
        options,
        values,
        DEFAULTS,
        reshard=reshard,
        offloads=options.cpu_offload if options.cpu_offload is not None else "offload" in items,
    )
    return Reading(raw=raw, values=values, spec=spec, options=counted, findings=missing + findings + unknown)


def _with_fsdp_file(values: Mapping[str, object], path: str) -> tuple[Mapping[str, object], tuple[Finding, ...]]:
    """Return `values` with the options of the file that `fsdp_config` names in its place."""
    name = values.get(SECTION)
    if not isinstance(name, str):
        return values, ()
    problem = "there is no such file"
    for folder in (os.path.dirname(path), ""):  # Trainer itself looks in the current directory
        place = os.path.join(folder, name)
        if "\0" not in place and os.path.isfile(place):
            try:
                return {**values, SECTION: read_document(place).values or {}}, ()
            except CkptError as error:
                problem = error.what
                break
    finding = Finding.error(
        code="missing-file",
        where=SECTION,
        what=f"{name}: {problem}; its options count as not given",
        hint="name a JSON file, or write its options below fsdp_config",
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
            code="unknown-value",
            where="fsdp",
            what=f"{item!r} is not an option of fsdp: Trainer stops at it",
            hint="fsdp: true, and the rest in fsdp_config",
        )
        for item in items
        if item not in ("auto_wrap", "offload") and item.upper() not in STRATEGIES
    )
    return tuple(item.lower() for item in items), findings


def _engine(raw: Trainer, options: TrainerFsdp, *, is_on: bool, world_size: int | None) -> Engine:
    if is_on:
        if options.xla:
            return "other"
        return "fsdp1" if options.version == 1 else "fsdp2"
    if raw.deepspeed:
        return "deepspeed"
    return "none" if world_size == 1 else "ddp"


def _axes(raw: Trainer, engine: Engine) -> dict[str, int]:
    given = raw.parallelism_config
    if given is not None and any(getattr(given, f"{axis}_size") is not None for axis in _AXES):
        sizes = {axis: getattr(given, f"{axis}_size") for axis in _AXES}
        return {axis: 1 if size is None else size for axis, size in sizes.items()}
    if engine in ("none", "other"):
        return {}
    return {"dp_replicate": -1} if engine == "ddp" else {"dp_shard": -1}


def _adapter(raw: Trainer) -> AdapterSpec | None:
    """Return the adapter of TRL's options. Source: `trl/trainer/model_config.py:ModelConfig` (r 16, alpha 32)."""
    if not raw.use_peft:
        return None
    return AdapterSpec(
        kind="lora",
        rank=16 if raw.lora_r is None else raw.lora_r,
        alpha=32.0 if raw.lora_alpha is None else raw.lora_alpha,
        targets=raw.lora_target_modules or (),
    )


def _quantize(raw: Trainer) -> str | None:
    if raw.load_in_4bit:
        return raw.bnb_4bit_quant_type or "nf4"
    return "int8" if raw.load_in_8bit else None


def _resume(text: str | None) -> str | None:
    """Return the checkpoint to go on from; a bare `true` means the last one, which has no name yet."""
    return None if text is None or as_truth(text) is not None else text


def _keys(values: Mapping[str, object]) -> dict[str, str]:
    paths = {
        "engine": first_key(values, "fsdp", "deepspeed"),
        **{f"axes.{axis}": first_key(values, f"parallelism_config.{axis}_size") for axis in _AXES},
        "strategy": option_key(values, "reshard_after_forward") or first_key(values, "fsdp"),
        "reshard_after_forward": option_key(values, "reshard_after_forward") or first_key(values, "fsdp"),
        "offload_params": option_key(values, "cpu_offload") or first_key(values, "fsdp"),
        "param_dtype": first_key(values, "bf16", "fp16", "torch_dtype", "dtype"),
        "reduce_dtype": first_key(values, "bf16", "fp16", "torch_dtype", "dtype"),
        "master_dtype": first_key(values, "bf16", "fp16", "torch_dtype", "dtype"),
        "activation_checkpointing": first_key(values, "gradient_checkpointing", "activation_checkpointing"),
        "adapter": first_key(values, "lora_r", "use_peft"),
        "quantize": first_key(values, "load_in_4bit", "load_in_8bit"),
        "optimizer": first_key(values, "optim"),
        "seq_len": first_key(values, *_LENGTHS),
        "batch_size": first_key(values, "per_device_train_batch_size"),
        "model": first_key(values, "model_name_or_path"),
        "resume_from": first_key(values, "resume_from_checkpoint"),
    }
    return {field: path for field, path in paths.items() if path is not None}
