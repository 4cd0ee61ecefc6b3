"""ai-toolkit's YAML: the options that it has, and those of its plan for FSDP.

Options that it does not know it drops silently (`kwargs.get`).

Source: ai-toolkit, August 2026: `toolkit/config_modules.py` (`TrainConfig`, `ModelConfig`, `NetworkConfig` and their
defaults), `jobs/process/BaseSDTrainProcess.py`; the FSDP plan: `train.dist_mode: fsdp` wraps with FSDP1
(`FullyShardedDataParallel`, `MixedPrecision`), blocks of FLUX.2 by class, and saves SHARDED_STATE_DICT.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from ckpt_tools.description.checkpoint import Finding, Severity
from ckpt_tools.preflight.configs.ai_toolkit_names import MODEL, NETWORK, PROCESS, TRAIN
from ckpt_tools.preflight.configs.config import Reading
from ckpt_tools.preflight.configs.dtypes import dtype_name
from ckpt_tools.preflight.configs.mesh import build_mesh
from ckpt_tools.preflight.configs.schema import Count, Number, Positive, Section, Truth, Word, choice, validate, words
from ckpt_tools.preflight.spec import AdapterSpec, Engine, ParallelSpec

_PROCESS = "config.process[0]"
_FLUX2_BLOCKS = ("DoubleStreamBlock", "SingleStreamBlock")


class Train(Section):
    """`train`."""

    known: ClassVar[frozenset[str]] = TRAIN

    batch_size: Positive | None = None
    dtype: Word | None = None
    optimizer: Word | None = None
    gradient_checkpointing: Truth | None = None
    distributed: Truth | None = None
    dist_backend: Word | None = None
    dist_mode: Annotated[str, choice("none", "ddp", "fsdp", "fsdp1", "fsdp2")] | None = None
    fsdp_auto_wrap: Truth | None = None
    fsdp_sharding: Annotated[str, choice("full", "hybrid")] | None = None
    fsdp_mixed_precision: Word | None = None
    fsdp_cpu_offload: Truth | None = None
    fsdp_backward_prefetch: Truth | None = None


class Model(Section):
    """`model`."""

    known: ClassVar[frozenset[str]] = MODEL

    name_or_path: Word | None = None
    arch: Word | None = None
    dtype: Word | None = None
    quantize: Truth | None = None
    qtype: Word | None = None
    low_vram: Truth | None = None
    layer_offloading: Truth | None = None
    split_model_over_gpus: Truth | None = None


class Network(Section):
    """`network`."""

    known: ClassVar[frozenset[str]] = NETWORK

    type: Word | None = None
    rank: Count | None = None
    linear: Count | None = None
    alpha: Number | None = None
    linear_alpha: Number | None = None
    lokr_full_rank: Truth | None = None
    network_kwargs: Any = None
    pretrained_lora_path: Word | None = None


class Process(Section):
    """One of `config.process`; its other options depend on its type."""

    known: ClassVar[frozenset[str]] = PROCESS
    extensible: ClassVar[bool] = True

    train: Train | None = None
    model: Model | None = None
    network: Network | None = None


class Job(Section):
    """`config`."""

    known: ClassVar[frozenset[str]] = words("name device save_root training_folder output_folder")

    process: list[Process] | None = None


class AiToolkit(Section):
    """The file."""

    known: ClassVar[frozenset[str]] = words("job meta")
    unknown: ClassVar[Severity | None] = "info"

    config: Job | None = None


def looks_like(values: Mapping[str, object]) -> bool:
    """Is this ai-toolkit's?"""
    job = values.get("config")
    return isinstance(job, Mapping) and "process" in job


def read(values: Mapping[str, object], *, world_size: int | None) -> Reading:
    """Read a config; the first process is the one that counts.

    Args:
        values: The file.
        world_size: Ranks; the file does not say.
    """
    raw, findings, counted = validate(AiToolkit, values)
    processes = (raw.config.process if raw.config is not None else None) or []
    if len(processes) != 1:
        findings += (_not_one(len(processes)),)
    process = processes[0] if processes else Process()
    train, model = process.train or Train(), process.model or Model()
    engine = _engine(train, world_size)
    is_fsdp = engine in ("fsdp1", "fsdp2")
    sharding = train.fsdp_sharding or "full"
    if is_fsdp and sharding == "hybrid":
        findings += (_unknown_nodes(),)
    axes = _axes(engine, sharding)
    compute = dtype_name(train.dtype or "fp32")
    mixed = dtype_name(train.fsdp_mixed_precision) if is_fsdp and train.fsdp_mixed_precision else compute
    quantised = bool(model.quantize)
    spec = ParallelSpec(
        framework="ai-toolkit",
        engine=engine,
        world_size=world_size,
        axes=axes,
        mesh=build_mesh(axes, world_size),
        strategy=f"{sharding}_shard" if is_fsdp else None,
        reshard_after_forward=True if is_fsdp else None,
        param_dtype=mixed,
        reduce_dtype=mixed if is_fsdp else None,
        master_dtype="f32" if process.network is not None else compute,
        offload_params=is_fsdp and bool(train.fsdp_cpu_offload),
        activation_checkpointing=train.gradient_checkpointing is not False,
        wrap_classes=_wrap_classes(train, model) if is_fsdp else (),
        wraps_blocks=not is_fsdp or train.fsdp_auto_wrap is not False,
        adapter=_adapter(process.network),
        quantize=(model.qtype or "qfloat8").partition("|")[0] if quantised else None,
        optimizer=train.optimizer or "adamw",
        batch_size=1 if train.batch_size is None else train.batch_size,
        state_dict_type="SHARDED_STATE_DICT" if is_fsdp else None,
        model=model.name_or_path,
        resume_from=process.network.pretrained_lora_path if process.network is not None else None,
        keys=_keys(values),
    )
    return Reading(raw=raw, values=values, spec=spec, options=counted, findings=findings)


def _engine(train: Train, world_size: int | None) -> Engine:
    mode = train.dist_mode or "none"
    if mode.startswith("fsdp"):
        return "fsdp2" if mode == "fsdp2" else "fsdp1"
    return "ddp" if mode == "ddp" or (world_size is not None and world_size > 1) else "none"


def _axes(engine: Engine, sharding: str) -> dict[str, int]:
    if engine == "none":
        return {}
    if engine == "ddp":
        return {"dp_replicate": -1}
    return {"dp_replicate": -1, "dp_shard": -1} if sharding == "hybrid" else {"dp_shard": -1}


def _wrap_classes(train: Train, model: Model) -> tuple[str, ...]:
    is_flux2 = (model.arch or "").lower().startswith("flux2")
    return _FLUX2_BLOCKS if is_flux2 and train.fsdp_auto_wrap is not False else ()


def _adapter(network: Network | None) -> AdapterSpec | None:
    """Return the adapter. A LoKr of full rank, the default, has no rank and no scale of its own."""
    if network is None:
        return None
    kind = (network.type or "lora").lower()
    options = network.network_kwargs if isinstance(network.network_kwargs, Mapping) else {}
    named = options.get("only_if_contains")
    targets = tuple(str(name) for name in named) if isinstance(named, list) else ()
    if kind == "lokr" and network.lokr_full_rank is not False:
        return AdapterSpec(kind=kind, targets=targets)
    rank = next((size for size in (network.rank, network.linear) if size is not None), 4)
    alpha = next((value for value in (network.linear_alpha, network.alpha) if value is not None), 1.0)
    return AdapterSpec(kind=kind, rank=rank, alpha=alpha, targets=targets)


def _not_one(count: int) -> Finding:
    if count == 0:
        what, hint = "there is no process, so nothing is trained", "config.process: a list with one training process"
    else:
        what, hint = f"{count} processes run one after the other; the first one is checked", "check each on its own"
    severity: Severity = "error" if count == 0 else "info"
    return Finding(code="several-processes", severity=severity, where="config.process", what=what, hint=hint)


def _unknown_nodes() -> Finding:
    return Finding.info(
        code="unknown-value",
        where=f"{_PROCESS}.train.fsdp_sharding",
        what="hybrid shards inside a machine, and the config does not say how many ranks a machine has: no mesh",
        hint="fsdp_sharding: full shards over all ranks",
    )


def _keys(values: Mapping[str, object]) -> dict[str, str]:
    job = values.get("config")
    processes = job.get("process") if isinstance(job, Mapping) else None
    process = processes[0] if isinstance(processes, list) and processes else None
    paths = {
        "engine": "train.dist_mode",
        "axes.dp_shard": "train.fsdp_sharding",
        "strategy": "train.fsdp_sharding",
        "param_dtype": "train.fsdp_mixed_precision train.dtype",
        "reduce_dtype": "train.fsdp_mixed_precision train.dtype",
        "offload_params": "train.fsdp_cpu_offload",
        "activation_checkpointing": "train.gradient_checkpointing",
        "wrap_classes": "train.fsdp_auto_wrap",
        "adapter": "network.linear network.rank network.type",
        "quantize": "model.quantize",
        "optimizer": "train.optimizer",
        "batch_size": "train.batch_size",
        "model": "model.name_or_path",
        "resume_from": "network.pretrained_lora_path",
    }
    keys = {}
    for field, names in paths.items():
        for name in names.split():
            section, _, option = name.partition(".")
            found = process.get(section) if isinstance(process, Mapping) else None
            if isinstance(found, Mapping) and found.get(option) is not None:
                keys[field] = f"{_PROCESS}.{name}"
                break
    return keys
