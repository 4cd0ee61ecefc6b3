"""torchtitan's job config: the JSON that `debug.save_config_file` writes, or the TOML of earlier versions.

Source: torchtitan `config/configs.py` (`ParallelismConfig`, `TrainingConfig`), `distributed/parallel_dims.py`
(`ParallelDims._validate`: -1 is the rest; ep takes its ranks from dp_shard × cp × tp), `trainer.py`,
`components/checkpointer/`, `config/job_config.py` and `config_manager.py` of 2025; options of all of them are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from ckpt_tools.preflight.configs.config import Reading, first_key
from ckpt_tools.preflight.configs.mesh import build_mesh, resolved, sharding_strategy
from ckpt_tools.preflight.configs.names import known
from ckpt_tools.preflight.configs.schema import Count, Dtype, Positive, Section, Truth, Word, choice, validate
from ckpt_tools.preflight.spec import Engine, ParallelSpec

_DEGREES = {
    "pp": "pipeline_parallel_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
    "ep": "expert_parallel_degree",
}
"""Axis → option of [parallelism]."""
_SEQ_LEN = 2048
_BATCH_SIZE = 8


class Parallelism(Section):
    """[parallelism]."""

    known: ClassVar[frozenset[str]] = known("torchtitan", "parallelism")

    data_parallel_replicate_degree: Count | None = None
    data_parallel_shard_degree: Count | None = None
    fsdp_reshard_after_forward: Annotated[str, choice("default", "always", "never")] | None = None
    tensor_parallel_degree: Count | None = None
    context_parallel_degree: Count | None = None
    pipeline_parallel_degree: Count | None = None
    expert_parallel_degree: Count | None = None


class Training(Section):
    """[training]."""

    known: ClassVar[frozenset[str]] = known("torchtitan", "training")

    dtype: Dtype | None = None
    mixed_precision_param: Dtype | None = None
    mixed_precision_reduce: Dtype | None = None
    enable_cpu_offload: Truth | None = None
    seq_len: Positive | None = None
    max_context_length: Positive | None = None
    local_batch_size: Positive | None = None
    batch_size: Positive | None = None
    num_tokens_per_microbatch_per_dp_rank: Positive | None = None


class Checkpoint(Section):
    """[checkpoint]."""

    known: ClassVar[frozenset[str]] = known("torchtitan", "checkpoint")

    enable: Truth | None = None
    enable_checkpoint: Truth | None = None
    initial_load_path: Word | None = None


class ActivationCheckpoint(Section):
    """[activation_checkpoint]; its other options depend on the mode."""

    unknown: ClassVar[None] = None

    mode: Annotated[str, choice("none", "full", "selective", "memory_budget")] | None = None


class Optimizer(Section):
    """[optimizer]; its other options depend on the optimizer."""

    unknown: ClassVar[None] = None

    name: Word | None = None


class Model(Section):
    """[model]; whole configs of models lie here in some versions."""

    unknown: ClassVar[None] = None

    hf_assets_path: Word | None = None


class TorchTitan(Section):
    """The file."""

    known: ClassVar[frozenset[str]] = known("torchtitan", "job")

    hf_assets_path: Word | None = None
    parallelism: Parallelism | None = None
    training: Training | None = None
    checkpoint: Checkpoint | None = None
    activation_checkpoint: ActivationCheckpoint | None = None
    optimizer: Optimizer | None = None
    model: Model | None = None


def looks_like(values: Mapping[str, object]) -> bool:
    """Is this torchtitan's?"""
    degrees = values.get("parallelism")
    if isinstance(degrees, Mapping) and any(str(key).endswith("_degree") for key in degrees):
        return True
    beside = ("job", "parallelism", "metrics", "lr_scheduler", "activation_checkpoint", "comm")
    return isinstance(values.get("training"), Mapping) and any(isinstance(values.get(name), Mapping) for name in beside)


def read(values: Mapping[str, object], *, world_size: int | None) -> Reading:
    """Read a config.

    Args:
        values: The file.
        world_size: Ranks; the file does not say.
    """
    raw, findings, counted = validate(TorchTitan, values)
    degrees = raw.parallelism or Parallelism()
    training = raw.training or Training()
    saving = raw.checkpoint or Checkpoint()
    given = {axis: getattr(degrees, name) for axis, name in _DEGREES.items()}
    axes = {axis: (-1 if axis == "dp_shard" else 1) if size is None else size for axis, size in given.items()}
    mesh = build_mesh(axes, world_size)
    policy = degrees.fsdp_reshard_after_forward or "default"
    # A pipeline's microbatches would gather the parameters again and again: "default" keeps them then.
    reshards = {"always": True, "never": False}.get(policy, axes["pp"] == 1)
    engine = _engine(axes, world_size, resolved(axes, mesh, "dp_shard"))
    optimizer = raw.optimizer.name if raw.optimizer is not None else None
    spec = ParallelSpec(
        framework="torchtitan",
        engine=engine,
        world_size=world_size,
        axes=axes,
        mesh=mesh,
        strategy=sharding_strategy(axes, mesh, reshards=reshards) if engine == "fsdp2" else None,
        reshard_after_forward=reshards if engine == "fsdp2" else None,
        param_dtype=training.mixed_precision_param or "bf16",
        reduce_dtype=training.mixed_precision_reduce or "f32",
        master_dtype=training.dtype or "f32",
        offload_params=bool(training.enable_cpu_offload) and engine == "fsdp2",
        # Selective checkpointing, the default, keeps the results of matmuls: for memory it is nearer to none.
        activation_checkpointing=raw.activation_checkpoint is not None and raw.activation_checkpoint.mode == "full",
        optimizer=optimizer or "AdamW",
        seq_len=training.max_context_length or training.seq_len or _SEQ_LEN,
        batch_size=_batch_size(training),
        state_dict_type="SHARDED_STATE_DICT",
        model=raw.hf_assets_path or (raw.model.hf_assets_path if raw.model is not None else None),
        resume_from=saving.initial_load_path or None,
        keys=_keys(values),
    )
    return Reading(raw=raw, values=values, spec=spec, options=counted, findings=findings)


def _engine(axes: Mapping[str, int], world_size: int | None, shard: int | None) -> Engine:
    """Return the engine: `fully_shard` even over one rank, for its dtypes, except under plain replicas."""
    if world_size == 1:
        return "none"
    only_replicas = shard == 1 and all(axes[name] == 1 for name in ("cp", "tp", "pp"))
    return "ddp" if only_replicas and axes["dp_replicate"] > 1 else "fsdp2"


def _batch_size(training: Training) -> int | None:
    """Return the samples of a step; newer versions count tokens, and a sample is as long as the context."""
    tokens = training.num_tokens_per_microbatch_per_dp_rank
    if tokens is not None:
        return max(1, tokens // max(1, training.max_context_length or _SEQ_LEN))
    return training.local_batch_size or training.batch_size or _BATCH_SIZE


def _keys(values: Mapping[str, object]) -> dict[str, str]:
    paths = {
        **{f"axes.{axis}": first_key(values, f"parallelism.{name}") for axis, name in _DEGREES.items()},
        "reshard_after_forward": first_key(values, "parallelism.fsdp_reshard_after_forward"),
        "strategy": first_key(values, "parallelism.fsdp_reshard_after_forward"),
        "param_dtype": first_key(values, "training.mixed_precision_param"),
        "reduce_dtype": first_key(values, "training.mixed_precision_reduce"),
        "master_dtype": first_key(values, "training.dtype"),
        "offload_params": first_key(values, "training.enable_cpu_offload"),
        "activation_checkpointing": first_key(values, "activation_checkpoint.mode"),
        "optimizer": first_key(values, "optimizer.name"),
        "seq_len": first_key(values, "training.max_context_length", "training.seq_len"),
        "batch_size": first_key(
            values,
            "training.num_tokens_per_microbatch_per_dp_rank",
            "training.local_batch_size",
            "training.batch_size",
        ),
        "model": first_key(values, "hf_assets_path", "model.hf_assets_path"),
        "resume_from": first_key(values, "checkpoint.initial_load_path"),
    }
    return {field: path for field, path in paths.items() if path is not None}
