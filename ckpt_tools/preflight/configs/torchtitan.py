"""torchtitan's config: the JSON of `debug.save_config_file`, the function that a launch line names, or TOML.

Source: torchtitan 0.1 to 0.3: `config/configs.py` (`ParallelismConfig`, `TrainingConfig`), `parallel_dims.py`
(`ParallelDims._validate`: -1 is the rest; ep takes its ranks from dp_shard × cp × tp), `trainer.py`,
`components/checkpointer/`, `config/job_config.py` and `config_manager.py` of 2025; options of all of them are known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.preflight.configs.document import Document
from ckpt_tools.preflight.configs.flags import read_flags, started
from ckpt_tools.preflight.configs.hydra import put
from ckpt_tools.preflight.configs.launch import launched_ranks
from ckpt_tools.preflight.configs.mesh import resolved, sharding_strategy
from ckpt_tools.preflight.configs.names import known
from ckpt_tools.preflight.configs.schema import Count, Dtype, Names, Number, Positive, Section, Truth, Word, choice
from ckpt_tools.preflight.configs.table import Given, Reader, Source, Table, mesh_row, row
from ckpt_tools.preflight.configs.torchtitan_registry import NotCertainError, find_registry, read_function
from ckpt_tools.preflight.spec import AdapterSpec, Engine

_SEQ_LEN = 2048


class Parallelism(Section, known=known("torchtitan", "parallelism")):
    """[parallelism]."""

    data_parallel_replicate_degree: Count | None = None
    data_parallel_shard_degree: Count | None = None
    fsdp_reshard_after_forward: Annotated[str, choice("default", "always", "never")] | None = None
    tensor_parallel_degree: Count | None = None
    context_parallel_degree: Count | None = None
    pipeline_parallel_degree: Count | None = None
    expert_parallel_degree: Count | None = None
    enable_sequence_parallel: Truth | None = None
    disable_loss_parallel: Truth | None = None
    pipeline_parallel_schedule: Word | None = None
    pipeline_parallel_microbatch_size: Positive | None = None


class Training(Section, known=known("torchtitan", "training")):
    """[training]."""

    dtype: Dtype | None = None
    mixed_precision_param: Dtype | None = None
    mixed_precision_reduce: Dtype | None = None
    enable_cpu_offload: Truth | None = None
    seq_len: Positive | None = None
    max_context_length: Positive | None = None
    local_batch_size: Positive | None = None
    batch_size: Positive | None = None
    num_tokens_per_microbatch_per_dp_rank: Positive | None = None


class Checkpoint(Section, known=known("torchtitan", "checkpoint")):
    """[checkpoint]."""

    enable: Truth | None = None
    enable_checkpoint: Truth | None = None
    initial_load_path: Word | None = None


class ActivationCheckpoint(Section, unknown=None):
    """[activation_checkpoint]; its other options depend on the mode, and since 0.3 say which it is."""

    kind: Word | None = Field(default=None, alias="class")  # of a function of the registry
    # Fields of `SelectiveAC.Config` and `MemoryBudgetAC.Config`; `FullAC.Config` has none of its own.
    force_recompute_mm_shapes_by_fqns: Any = None
    memory_budget: Any = None
    preserve_rng_state: Truth | None = None
    mode: Annotated[str, choice("none", "full", "selective", "memory_budget")] | None = None
    selective_ac_option: Word | None = None


class ParamGroup(Section, known=known("torchtitan", "param_group"), unknown=None):
    """One of `optimizer.param_groups`, since 0.3."""

    optimizer_name: Word | None = None


class Optimizer(Section, unknown=None):
    """[optimizer]; its other options depend on the optimizer."""

    name: Word | None = None
    param_groups: list[ParamGroup] = Field(default_factory=list)


class Converter(Section, known=known("torchtitan", "converter"), unknown=None):
    """One of `model_spec.converters`, as a function of the registry gives it."""

    rank: Count | None = None
    alpha: Number | None = None
    target_modules: Names | None = None


class ModelSpec(Section, known=known("torchtitan", "model_spec"), unknown=None):
    """What `model_registry` makes; `flavor` is one of the model's sizes."""

    flavor: Word | None = None
    converters: list[Converter] = Field(default_factory=list)


class Model(Section, unknown=None):
    """[model]; whole configs of models lie here in some versions."""

    hf_assets_path: Word | None = None


class TorchTitan(Section, known=known("torchtitan", "job")):
    """The file."""

    hf_assets_path: Word | None = None
    parallelism: Parallelism = Parallelism()
    training: Training = Training()
    checkpoint: Checkpoint = Checkpoint()
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    optimizer: Optimizer = Optimizer()
    model: Model = Model()
    model_spec: ModelSpec = ModelSpec()


def _adapter(given: Given[TorchTitan]) -> AdapterSpec | None:
    """Return the adapter: `LoRAConverter` alone of the converters has a rank."""
    for one in given.raw.model_spec.converters:
        if one.rank is not None:
            return AdapterSpec(rank=one.rank, alpha=one.alpha, targets=one.target_modules or ())
    return None


def _engine(given: Given[TorchTitan]) -> Engine:
    """Return the engine: `fully_shard` even over one rank, for its dtypes, except under plain replicas."""
    spec = given.spec
    if spec.world_size == 1:
        return "none"
    only_replicas = resolved(spec, "dp_shard") == 1 and all(spec.axes[name] == 1 for name in ("cp", "tp", "pp"))
    return "ddp" if only_replicas and spec.axes["dp_replicate"] > 1 else "fsdp2"


def _strategy(given: Given[TorchTitan]) -> tuple[str, bool]:
    policy, spec = given.raw.parallelism.fsdp_reshard_after_forward or "default", given.spec
    # A pipeline's microbatches would gather the parameters again and again: "default" keeps them then.
    reshards = {"always": True, "never": False}.get(policy, spec.axes["pp"] == 1)
    return sharding_strategy(spec, reshards=reshards), reshards


_SELECTIONS = {"SelectiveAC": "op", "MemoryBudgetAC": "memory_budget"}


def _checkpointing(given: Given[TorchTitan]) -> tuple[bool, str | None]:
    """Return whether blocks run again whole, or which selection of them does.

    The default is selective: of operations since 0.3, whose JSON tells the class by its fields; before, of every second
    block.
    """
    section = given.raw.activation_checkpoint
    is_default = "activation_checkpoint" not in given.raw.model_fields_set
    if section.kind is not None:
        return section.kind == "FullAC", _SELECTIONS.get(section.kind)
    if section.mode is None and (not is_default or "model_spec" in given.raw.model_fields_set):
        if section.memory_budget is not None:
            return False, "memory_budget"
        if section.force_recompute_mm_shapes_by_fqns is not None or is_default:
            return False, "op"
        return section.preserve_rng_state is not None, None
    if section.mode in (None, "selective"):
        return False, section.selective_ac_option or "2"
    return section.mode == "full", "memory_budget" if section.mode == "memory_budget" else None


def _optimizer(given: Given[TorchTitan]) -> str:
    """Return the optimizer; where groups have several, that of the last, which takes what the others leave."""
    section = given.raw.optimizer
    names = [group.optimizer_name for group in section.param_groups if group.optimizer_name is not None]
    return section.name or (names[-1] if names else "") or "AdamW"


def _batch_size(given: Given[TorchTitan]) -> int:
    """Return the samples of a step; newer versions count tokens, and a sample is as long as the context."""
    training = given.raw.training
    tokens = training.num_tokens_per_microbatch_per_dp_rank
    if tokens is not None:
        return max(1, tokens // max(1, training.max_context_length or _SEQ_LEN))
    return training.local_batch_size or training.batch_size or 8


_TABLE: Table[TorchTitan] = {
    "world_size": row(value=lambda given: launched_ranks(given.document.commands)),
    "axes.pp": row("parallelism.pipeline_parallel_degree", default=1),
    "axes.dp_replicate": row("parallelism.data_parallel_replicate_degree", default=1),
    "axes.dp_shard": row("parallelism.data_parallel_shard_degree", default=-1),
    "axes.cp": row("parallelism.context_parallel_degree", default=1),
    "axes.tp": row("parallelism.tensor_parallel_degree", default=1),
    "axes.ep": row("parallelism.expert_parallel_degree", default=1),
    "mesh": mesh_row(),
    "engine": row(value=_engine),
    "strategy reshard_after_forward": row(
        "parallelism.fsdp_reshard_after_forward", value=_strategy, engines=("fsdp2",)
    ),
    "param_dtype": row("training.mixed_precision_param", default="bf16"),
    "reduce_dtype": row("training.mixed_precision_reduce", default="f32"),
    "master_dtype": row("training.dtype", default="f32"),
    "offload_params": row("training.enable_cpu_offload", default=False, engines=("fsdp2",)),
    "activation_checkpointing selective_checkpointing": row("activation_checkpoint.mode", value=_checkpointing),
    "sequence_parallel": row("parallelism.enable_sequence_parallel", default=True),
    "loss_parallel": row(
        "parallelism.disable_loss_parallel", value=lambda given: not given.raw.parallelism.disable_loss_parallel
    ),
    "schedule": row("parallelism.pipeline_parallel_schedule", default="1F1B"),
    "micro_batch": row("parallelism.pipeline_parallel_microbatch_size", default=1),
    "adapter": row("model_spec.converters", value=_adapter),
    "optimizer": row("optimizer.name", "optimizer.param_groups", value=_optimizer),
    "seq_len": row("training.max_context_length", "training.seq_len", default=_SEQ_LEN),
    "batch_size": row(
        "training.num_tokens_per_microbatch_per_dp_rank",
        "training.local_batch_size",
        "training.batch_size",
        value=_batch_size,
    ),
    "state_dict_type": row(default="SHARDED_STATE_DICT"),
    "model": row("hf_assets_path", "model.hf_assets_path"),
    "resume_from": row("checkpoint.initial_load_path"),
}


def _program(command: Sequence[str], at: int) -> int:
    return int(command[at] == "torchtitan.train" or command[at].endswith(("torchtitan/train.py", "run_train.sh")))


def _looks_like(document: Document) -> bool:
    if document.values is None:
        words = started(document.commands, _program) or ()
        return any(word.partition("=")[0] == "--module" for word in words)
    values = document.values
    degrees = values.get("parallelism")
    if isinstance(degrees, Mapping) and any(str(key).endswith("_degree") for key in degrees):
        return True
    beside = ("job", "parallelism", "metrics", "lr_scheduler", "activation_checkpoint", "comm")
    return isinstance(values.get("training"), Mapping) and any(isinstance(values.get(name), Mapping) for name in beside)


def _prepare(document: Document) -> Source:
    words = started(document.commands, _program)
    if words is None or document.values is not None:
        return Source(model=TorchTitan, table=_TABLE, values=document.keyed())
    options, unread = read_flags(words)
    values, named, findings = _registered(options, document)
    for path, value in options.items():
        *parents, last = path.split(".")
        is_off = last.startswith("no_") and value is True
        put(values, [*parents, last.removeprefix("no_") if is_off else last], False if is_off else value)
    words = (*unread, *named)
    return Source(model=TorchTitan, table=_TABLE, values=values, words=words, findings=findings, spell=_as_flag)


def _as_flag(path: str) -> str:
    return f"--{path}"


def _registered(
    options: dict[str, object], document: Document
) -> tuple[dict[str, object], tuple[str, ...], tuple[Finding, ...]]:
    """Return the config that a launch line names; else the words that name it, and why it was not read."""
    module, name, file = (options.pop(key, None) for key in ("module", "config", "job.config_file"))
    if not isinstance(module, str) or not isinstance(name, str):
        return {}, (f"--job.config_file {file}" if file else "--module and --config of torchtitan.train",), ()
    try:
        return dict(read_function(find_registry(module, document), name)), (), ()
    except NotCertainError as error:
        hint = "start it once with --debug.save_config_file config.json, and check the file that it writes"
        found = Finding.info("unread-options", f"--config {name}", str(error), hint)
        return {}, (f"--module {module} --config {name}",), (found,)


READER = Reader(
    name="torchtitan",
    looks_like=_looks_like,
    prepare=_prepare,
    written={
        "activation_checkpointing": "activation_checkpoint.mode: full",
        "reshard_after_forward": "parallelism.fsdp_reshard_after_forward: always",
        "offload_params": "training.enable_cpu_offload: true",
    },
)
