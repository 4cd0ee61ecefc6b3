"""verl's SFT trainers: `fsdp_sft_trainer.py`, and since 0.6 `sft_trainer.py`, which has an `engine`."""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_tools.preflight.configs.config import Reading
from ckpt_tools.preflight.configs.hydra import Overrides
from ckpt_tools.preflight.configs.mesh import build_mesh, sharding_strategy
from ckpt_tools.preflight.configs.verl_parts import (
    ENGINES,
    adapter_of,
    axes_of,
    dtypes_of,
    engine_of,
    keys_of,
    validate_tree,
)
from ckpt_tools.preflight.configs.verl_schema import (
    Data,
    Fsdp,
    Optimizer,
    Runner,
    Sft,
    SftFsdp,
    SftModel,
    SftOther,
    WrapPolicy,
)
from ckpt_tools.preflight.spec import ParallelSpec


def read_sft(values: Mapping[str, object], world_size: int | None, overrides: Overrides | None) -> Reading:
    """Read a file for one of the SFT trainers."""
    model = values.get("model")
    if isinstance(model, Mapping) and "partial_pretrain" in model:
        return _read_fsdp_sft(values, world_size, overrides)
    return _read_engine_sft(values, world_size, overrides)


def _read_engine_sft(values: Mapping[str, object], world_size: int | None, overrides: Overrides | None) -> Reading:
    """Read a file for `sft_trainer.py`, whose `engine` is FSDP's unless a group says otherwise."""
    chosen = engine_of(overrides, "engine")
    raw, findings, counted = validate_tree(Sft if chosen == "fsdp" else SftOther, values, overrides)
    fsdp, optim = Fsdp(), Optimizer()
    if isinstance(raw, Sft):
        fsdp, optim = raw.engine or fsdp, raw.optim or optim
    model, data, runner = raw.model or SftModel(), raw.data or Data(), raw.trainer or Runner()
    engine = ENGINES.get(fsdp.strategy or chosen, "other")
    is_fsdp = engine != "other"
    axes = axes_of(fsdp, world_size)
    mesh = build_mesh(axes, world_size) if is_fsdp else None
    axes["sp"] = fsdp.ulysses_sequence_parallel_size or 1
    compute, reduce = dtypes_of(fsdp)
    reshards = fsdp.reshard_after_forward is not False
    wrap = fsdp.wrap_policy or WrapPolicy()
    spec = ParallelSpec(
        framework="verl",
        engine=engine,
        world_size=world_size,
        axes=axes if is_fsdp else {},
        mesh=mesh,
        strategy=sharding_strategy(axes, mesh, reshards=reshards) if is_fsdp else None,
        reshard_after_forward=reshards if is_fsdp else None,
        param_dtype=compute,
        reduce_dtype=reduce,
        master_dtype=fsdp.model_dtype or "f32",
        offload_params=engine == "fsdp2" and bool(fsdp.offload_policy),
        activation_checkpointing=model.enable_gradient_checkpointing is not False,
        wrap_classes=wrap.transformer_layer_cls_to_wrap or (),
        wrap_min_num_params=(wrap.min_num_params or None) if engine == "fsdp1" else None,
        adapter=adapter_of(model),
        optimizer=optim.optimizer or "AdamW",
        seq_len=1024 if data.max_length is None else data.max_length,
        batch_size=4 if data.micro_batch_size_per_gpu is None else data.micro_batch_size_per_gpu,
        state_dict_type="SHARDED_STATE_DICT",
        model=model.path,
        resume_from=runner.resume_from_path,
        keys=keys_of(values, _ENGINE_KEYS),
    )
    return Reading(raw=raw, values=values, spec=spec, options=counted, findings=findings)


def _read_fsdp_sft(values: Mapping[str, object], world_size: int | None, overrides: Overrides | None) -> Reading:
    """Read a file for `fsdp_sft_trainer.py`: one mesh of all ranks, and bf16 computation, always."""
    raw, findings, counted = validate_tree(Sft, values, overrides)
    model, data = raw.model or SftModel(), raw.data or Data()
    fsdp = model.fsdp_config or SftFsdp()
    engine = ENGINES.get(model.strategy or "fsdp2", "other")
    runner = raw.trainer or Runner()
    axes: dict[str, int] = {"dp_shard": -1}
    mesh = build_mesh(axes, world_size)
    axes["sp"] = raw.ulysses_sequence_parallel_size or 1
    wrap = fsdp.wrap_policy or WrapPolicy()
    spec = ParallelSpec(
        framework="verl",
        engine=engine,
        world_size=world_size,
        axes=axes,
        mesh=mesh if engine != "other" else None,
        strategy=sharding_strategy(axes, mesh, reshards=True) if engine != "other" else None,
        reshard_after_forward=True if engine != "other" else None,
        param_dtype="bf16",
        reduce_dtype="f32",
        master_dtype=fsdp.model_dtype or "f32",
        offload_params=bool(fsdp.offload_params),
        activation_checkpointing=model.enable_gradient_checkpointing is not False,
        wrap_classes=wrap.transformer_layer_cls_to_wrap or (),
        wrap_min_num_params=(wrap.min_num_params or None) if engine == "fsdp1" else None,
        adapter=adapter_of(model),
        optimizer=(raw.optim.optimizer if raw.optim is not None else None) or "AdamW",
        seq_len=1024 if data.max_length is None else data.max_length,
        batch_size=4 if data.micro_batch_size_per_gpu is None else data.micro_batch_size_per_gpu,
        state_dict_type="SHARDED_STATE_DICT",
        model=model.partial_pretrain,
        resume_from=runner.resume_from_path,
        keys=keys_of(values, _SFT_KEYS),
    )
    return Reading(raw=raw, values=values, spec=spec, options=counted, findings=findings)


_SFT_KEYS: Mapping[str, tuple[str, ...]] = {
    "engine": ("model.strategy",),
    "axes.sp": ("ulysses_sequence_parallel_size",),
    "master_dtype": ("model.fsdp_config.model_dtype",),
    "offload_params": ("model.fsdp_config.offload_params",),
    "activation_checkpointing": ("model.enable_gradient_checkpointing",),
    "wrap_classes": ("model.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap",),
    "wrap_min_num_params": ("model.fsdp_config.wrap_policy.min_num_params",),
    "adapter": ("model.lora_rank",),
    "optimizer": ("optim.optimizer",),
    "seq_len": ("data.max_length",),
    "batch_size": ("data.micro_batch_size_per_gpu",),
    "model": ("model.partial_pretrain",),
    "resume_from": ("trainer.resume_from_path",),
}


_ENGINE_KEYS: Mapping[str, tuple[str, ...]] = {
    "engine": ("engine.strategy",),
    "axes.dp_shard": ("engine.fsdp_size",),
    "axes.dp_replicate": ("engine.fsdp_size",),
    "axes.sp": ("engine.ulysses_sequence_parallel_size",),
    "strategy": ("engine.reshard_after_forward",),
    "reshard_after_forward": ("engine.reshard_after_forward",),
    "param_dtype": ("engine.mixed_precision.param_dtype", "engine.dtype"),
    "reduce_dtype": ("engine.mixed_precision.reduce_dtype",),
    "master_dtype": ("engine.model_dtype",),
    "offload_params": ("engine.offload_policy",),
    "activation_checkpointing": ("model.enable_gradient_checkpointing",),
    "wrap_classes": ("engine.wrap_policy.transformer_layer_cls_to_wrap",),
    "wrap_min_num_params": ("engine.wrap_policy.min_num_params",),
    "adapter": ("model.lora_rank", "model.lora_adapter_path"),
    "optimizer": ("optim.optimizer",),
    "seq_len": ("data.max_length",),
    "batch_size": ("data.micro_batch_size_per_gpu",),
    "model": ("model.path",),
    "resume_from": ("trainer.resume_from_path",),
}
