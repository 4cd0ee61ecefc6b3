"""axolotl's YAML.

Source: axolotl 0.21: `utils/schemas/` (fields and defaults; a key that is none is dropped silently),
`utils/schemas/validation.py:check_fsdp_version_in_fsdp_config` (a missing version is 1), `utils/distributed.py:
_get_parallel_config_kwargs`, `utils/trainer.py:setup_fsdp_envs` and `prepare_optim_env`, `utils/config/__init__.py`
(dtypes), `monkeypatch/accelerate/parallelism_config.py` (expert parallelism is an axis of its own, the outermost).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ckpt_tools.preflight.configs.config import Reading, first_key
from ckpt_tools.preflight.configs.deepspeed_file import DeepSpeedFile, read_deepspeed, without_file
from ckpt_tools.preflight.configs.fsdp_plugin import (
    FsdpOptions,
    PluginDefaults,
    Version,
    as_truth,
    option_key,
    strip_prefix,
    with_plugin,
)
from ckpt_tools.preflight.configs.mesh import build_mesh
from ckpt_tools.preflight.configs.names import known
from ckpt_tools.preflight.configs.schema import Count, Names, Number, Positive, Section, Truth, Word, validate
from ckpt_tools.preflight.spec import AdapterSpec, Engine, ParallelSpec

DEFAULTS = PluginDefaults(
    version=2,
    auto_wrap_policy="TRANSFORMER_BASED_WRAP",
    min_num_params=0,
    full_state_dict=True,
    cpu_ram_efficient_loading=False,
)
"""axolotl hands its options on to TrainingArguments, whose defaults these are."""
ORDER = ("ep", "dp_replicate", "dp_shard", "cp", "tp")
"""Rank order."""
_SIZES = {
    "ep": ("expert_parallel_size",),
    "dp_replicate": ("dp_replicate_size",),
    "dp_shard": ("dp_shard_size",),
    "cp": ("context_parallel_size", "sequence_parallel_degree"),
    "tp": ("tensor_parallel_size",),
}


class AxolotlFsdp(FsdpOptions):
    """`fsdp_config`; keys with `fsdp_` are taken too."""

    known: ClassVar[frozenset[str]] = known("axolotl", "fsdp_config")

    instead: ClassVar[Mapping[str, str]] = {"cpu_offload": "offload_params"}

    offload_params: Truth | None = None


class Axolotl(Section):
    """The file."""

    known: ClassVar[frozenset[str]] = known("axolotl", "config")

    base_model: Word | None = None
    adapter: Word | None = None
    lora_r: Count | None = None
    lora_alpha: Number | None = None
    lora_target_modules: Names | None = None
    lora_target_linear: Truth | None = None
    load_in_4bit: Truth | None = None
    load_in_8bit: Truth | None = None
    gptq: Truth | None = None
    # auto, full, true
    bf16: Word | None = None
    fp16: Truth | None = None
    fp8: Truth | None = None
    bfloat16: Truth | None = None
    float16: Truth | None = None
    fsdp: Any = None
    fsdp_version: Version | None = None
    fsdp_config: AxolotlFsdp | None = None
    deepspeed: Any = None
    dp_shard_size: Count | None = None
    dp_replicate_size: Count | None = None
    tensor_parallel_size: Count | None = None
    context_parallel_size: Count | None = None
    sequence_parallel_degree: Count | None = None
    expert_parallel_size: Count | None = None
    optimizer: Word | None = None
    sequence_len: Positive | None = None
    micro_batch_size: Positive | None = None
    # true, offload, offload_disk, unsloth
    gradient_checkpointing: Word | None = None
    activation_checkpointing: Word | None = None
    resume_from_checkpoint: Word | None = None


def looks_like(values: Mapping[str, object]) -> bool:
    """Is this axolotl's?"""
    return "base_model" in values


def read(values: Mapping[str, object], *, world_size: int | None) -> Reading:
    """Read a config.

    Args:
        values: The file.
        world_size: Ranks; the file does not say.
    """
    normal, spell = strip_prefix(values)
    raw, findings, counted = validate(Axolotl, normal, spell=spell)
    options = raw.fsdp_config or AxolotlFsdp()
    engine = _engine(raw, options, values, world_size)
    axes = _axes(raw, engine)
    mesh = build_mesh(axes, world_size, order=ORDER)
    compute, stored, is_mixed = _dtypes(raw)
    is_fsdp = engine in ("fsdp1", "fsdp2")
    speed = read_deepspeed(raw.deepspeed) if engine == "deepspeed" else DeepSpeedFile()
    if not speed.is_read:
        counted = without_file(counted, "deepspeed")
    spec = ParallelSpec(
        framework="axolotl",
        engine=engine,
        world_size=world_size,
        axes=axes,
        mesh=mesh,
        strategy=speed.strategy,
        param_dtype=compute,
        reduce_dtype=compute if is_fsdp else None,
        # axolotl's own FSDP2 does not widen what it loads, accelerate's FSDP1 does.
        master_dtype="f32" if engine == "fsdp1" and is_mixed else stored,
        offload_params=speed.offload_params,
        offload_optimizer=speed.offload_optimizer,
        activation_checkpointing=any(
            word is not None and as_truth(word) is not False
            for word in (raw.gradient_checkpointing, raw.activation_checkpointing)
        ),
        adapter=_adapter(raw),
        quantize="nf4" if raw.load_in_4bit else "int8" if raw.load_in_8bit else "gptq" if raw.gptq else None,
        optimizer=raw.optimizer or "adamw_torch_fused",
        seq_len=512 if raw.sequence_len is None else raw.sequence_len,
        batch_size=1 if raw.micro_batch_size is None else raw.micro_batch_size,
        model=raw.base_model,
        resume_from=None if as_truth(raw.resume_from_checkpoint) is not None else raw.resume_from_checkpoint,
        keys=_keys(values),
    )
    spec = with_plugin(
        spec,
        options,
        values,
        DEFAULTS,
        reshard=options.reshard_after_forward,
        offloads=bool(options.offload_params),
    )
    return Reading(raw=raw, values=values, spec=spec, options=counted, findings=findings)


def _engine(raw: Axolotl, options: AxolotlFsdp, values: Mapping[str, object], world_size: int | None) -> Engine:
    if raw.fsdp or values.get("fsdp_config"):
        # Releases that take the list `fsdp` mean FSDP1 by a missing version; 0.20 and later have none but FSDP2.
        version = raw.fsdp_version or options.version or (1 if raw.fsdp else DEFAULTS.version)
        return "fsdp2" if version == 2 else "fsdp1"
    if raw.deepspeed:
        return "deepspeed"
    return "none" if world_size == 1 else "ddp"


def _axes(raw: Axolotl, engine: Engine) -> dict[str, int]:
    """Return the axes, with what axolotl fills in: all ranks that are left, to shard over or to replicate over."""
    axes = {
        "ep": raw.expert_parallel_size,
        "cp": raw.context_parallel_size or raw.sequence_parallel_degree,
        "tp": raw.tensor_parallel_size,
    }
    sizes = {axis: size for axis, size in axes.items() if size is not None and size > 1}
    shard, replicate = raw.dp_shard_size, raw.dp_replicate_size
    sizes |= {name: size for name, size in (("dp_replicate", replicate), ("dp_shard", shard)) if size and size > 1}
    if engine == "none":
        return sizes
    if "dp_shard" in sizes:
        sizes.setdefault("dp_replicate", -1)
    elif engine in ("fsdp1", "fsdp2", "deepspeed"):
        sizes["dp_shard"] = -1
    elif "dp_replicate" not in sizes:
        sizes["dp_replicate"] = -1
    return sizes


def _dtypes(raw: Axolotl) -> tuple[str, str, bool]:
    """Return in which dtype a model computes, in which it is loaded, and whether accelerate mixes precisions.

    bf16 is "auto" unless said otherwise, which means bf16 on every GPU that has it, and gives way to fp16.
    """
    word = "auto" if raw.bf16 is None else raw.bf16.lower()
    if as_truth(word) is True or (word == "auto" and not raw.fp16):
        return "bf16", "bf16", True
    if word == "full" or raw.bfloat16:
        return "bf16", "bf16", False
    if raw.fp16:
        return "f16", "f16", True
    if raw.float16:
        return "f16", "f16", False
    return ("bf16", "f32", True) if raw.fp8 else ("f32", "f32", False)


def _adapter(raw: Axolotl) -> AdapterSpec | None:
    if raw.adapter is None or as_truth(raw.adapter) is False:
        return None
    kind = "lora" if raw.adapter.lower() == "qlora" else raw.adapter.lower()
    targets = ("all-linear",) if raw.lora_target_linear else raw.lora_target_modules or ()
    return AdapterSpec(kind=kind, rank=raw.lora_r, alpha=raw.lora_alpha, targets=targets)


def _keys(values: Mapping[str, object]) -> dict[str, str]:
    dtype = first_key(values, "bf16", "bfloat16", "fp16", "float16", "fp8")
    paths = {
        "engine": first_key(values, "fsdp_config", "fsdp", "deepspeed"),
        **{f"axes.{axis}": first_key(values, *names) for axis, names in _SIZES.items()},
        "strategy": option_key(values, "reshard_after_forward"),
        "reshard_after_forward": option_key(values, "reshard_after_forward"),
        "offload_params": option_key(values, "offload_params"),
        "param_dtype": dtype,
        "reduce_dtype": dtype,
        "master_dtype": dtype,
        "activation_checkpointing": first_key(values, "gradient_checkpointing", "activation_checkpointing"),
        "adapter": first_key(values, "lora_r", "adapter"),
        "quantize": first_key(values, "load_in_4bit", "load_in_8bit", "gptq"),
        "optimizer": first_key(values, "optimizer"),
        "seq_len": first_key(values, "sequence_len"),
        "batch_size": first_key(values, "micro_batch_size"),
        "model": first_key(values, "base_model"),
        "resume_from": first_key(values, "resume_from_checkpoint"),
    }
    return {field: path for field, path in paths.items() if path is not None}
