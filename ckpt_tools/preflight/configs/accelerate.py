"""accelerate's YAML, as `accelerate config` writes it and `accelerate launch --config_file` reads it.

Source: accelerate 1.15: `commands/config/config_args.py:ClusterConfig`, `commands/launch.py:launch_command_parser` and
`_validate_launch_command` (defaults; keys of `fsdp_config` with and without `fsdp_`), `utils/launch.py`,
`utils/dataclasses.py:FullyShardedDataParallelPlugin`, `parallelism_config.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import PlainValidator

from ckpt_tools.description.checkpoint import Finding, Severity
from ckpt_tools.preflight.configs.config import Reading, first_key
from ckpt_tools.preflight.configs.deepspeed_file import (
    OFFLOAD_DEVICES,
    DeepSpeedFile,
    read_deepspeed,
    without_file,
    zero_strategy,
)
from ckpt_tools.preflight.configs.dtypes import dtype_name
from ckpt_tools.preflight.configs.fsdp_plugin import (
    STRATEGIES,
    FsdpOptions,
    PluginDefaults,
    Strategy,
    option_key,
    strip_prefix,
    with_plugin,
)
from ckpt_tools.preflight.configs.mesh import build_mesh
from ckpt_tools.preflight.configs.names import known
from ckpt_tools.preflight.configs.schema import Count, Positive, Section, Truth, Word, validate, words
from ckpt_tools.preflight.spec import Engine, ParallelSpec

DEFAULTS = PluginDefaults(
    version=1,
    auto_wrap_policy=None,
    min_num_params=10**8,
    full_state_dict=False,
    cpu_ram_efficient_loading=True,
)
"""Source: the defaults of `accelerate launch`'s command line, which the file overrides."""
TYPES = words(
    """NO FSDP DEEPSPEED MEGATRON_LM XLA TPU MULTI_CPU MULTI_GPU MULTI_NPU MULTI_MLU MULTI_SDAA MULTI_MUSA MULTI_XPU
    MULTI_HPU MULTI_NEURON"""
)
"""Source: `accelerate/utils/dataclasses.py:DistributedType`."""
_SIZES = "parallelism_config.parallelism_config_{}_size"
_NO_ENGINE = ("", "NO")
_ASKED_FOR = -1
"""`num_processes` that the launcher is to be told. Source: `ClusterConfig`, `_validate_launch_command`."""


def _arguments(prefix: str) -> frozenset[str]:
    """Return the launcher's options that begin with a prefix, without it."""
    options = known("accelerate", "arguments")
    return frozenset(name.removeprefix(prefix) for name in options if name.startswith(prefix))


def _distributed_type(value: object) -> str:
    if value is False:
        return "NO"  # a bare NO in YAML
    if isinstance(value, str) and value in TYPES:
        return value
    raise ValueError(f"one of {', '.join(sorted(TYPES))}, in capitals")


class AccelerateFsdp(FsdpOptions):
    """`fsdp_config`; each key with or without `fsdp_`."""

    known: ClassVar[frozenset[str]] = _arguments("fsdp_")

    instead: ClassVar[Mapping[str, str]] = {"cpu_offload": "offload_params"}

    offload_params: Truth | None = None
    sharding_strategy: Strategy | None = None
    activation_checkpointing_offload: Truth | None = None


class Parallelism(Section):
    """`parallelism_config`."""

    known: ClassVar[frozenset[str]] = frozenset(
        f"parallelism_config_{name}" for name in _arguments("parallelism_config_")
    )

    parallelism_config_dp_replicate_size: Count | None = None
    parallelism_config_dp_shard_size: Count | None = None
    parallelism_config_tp_size: Count | None = None
    parallelism_config_cp_size: Count | None = None
    parallelism_config_sp_size: Count | None = None


class DeepSpeed(Section):
    """`deepspeed_config`."""

    known: ClassVar[frozenset[str]] = known("accelerate", "arguments")

    deepspeed_config_file: Word | None = None
    zero_stage: Count | None = None
    offload_optimizer_device: Word | None = None
    offload_param_device: Word | None = None


class Accelerate(Section):
    """The file."""

    unknown: ClassVar[Severity | None] = "error"  # the launcher raises ValueError
    known: ClassVar[frozenset[str]] = known("accelerate", "config")

    distributed_type: Annotated[str, PlainValidator(_distributed_type)] | None = None
    mixed_precision: Word | None = None
    num_processes: Count | None = None
    num_machines: Positive | None = None
    fsdp_config: AccelerateFsdp | None = None
    parallelism_config: Parallelism | None = None
    deepspeed_config: DeepSpeed | None = None


def looks_like(values: Mapping[str, object]) -> bool:
    """Is this accelerate's?"""
    return "distributed_type" in values or ("compute_environment" in values and "num_processes" in values)


def read(values: Mapping[str, object], *, world_size: int | None) -> Reading:
    """Read a config.

    Args:
        values: The file.
        world_size: Ranks; None for what the file says.
    """
    normal, spell = strip_prefix(values)
    raw, findings, counted = validate(Accelerate, normal, spell=spell)
    if values.get("distributed_type") is None:
        findings += (_no_type(),)
    if raw.num_processes is not None and raw.num_processes < 1 and raw.num_processes != _ASKED_FOR:
        findings += (_no_processes(raw.num_processes),)
    kind = raw.distributed_type or ""
    options = raw.fsdp_config or AccelerateFsdp()
    engine = _engine(kind, options)
    declared = raw.num_processes if raw.num_processes is not None and raw.num_processes > 0 else None
    world = world_size or declared or (1 if kind == "NO" else None)
    strategy = options.sharding_strategy or STRATEGIES[0]
    axes = _axes(engine, raw, strategy)
    precision = (raw.mixed_precision or "no").lower()
    mixed = "bf16" if precision == "fp8" else dtype_name(precision)
    is_fsdp = engine in ("fsdp1", "fsdp2")
    speed = raw.deepspeed_config or DeepSpeed()
    is_speed = engine == "deepspeed"
    own = _deepspeed(speed) if is_speed else DeepSpeedFile()
    if not own.is_read:
        counted = without_file(counted, "deepspeed_config.deepspeed_config_file")
    spec = ParallelSpec(
        framework="accelerate",
        engine=engine,
        world_size=world,
        axes=axes,
        # DeepSpeed makes the groups of its own sequence parallelism.
        mesh=None if engine == "other" or axes.get("sp", 1) > 1 else build_mesh(axes, world),
        strategy=own.strategy,
        param_dtype=mixed,
        # FSDP averages in the dtype that computes; under DDP gradients are as wide as the parameters.
        reduce_dtype=mixed if is_fsdp else None,
        # What is trained is widened before it is sharded (`prepare_model`, `fsdp2_prepare_model`); ZeRO keeps a copy.
        master_dtype="f32" if mixed is not None and (is_fsdp or is_speed) else None,
        offload_params=own.offload_params,
        offload_optimizer=own.offload_optimizer,
        keys=_keys(values, axes, engine),
    )
    spec = with_plugin(
        spec,
        options,
        values,
        DEFAULTS,
        strategy=strategy,
        reshard=options.reshard_after_forward,
        offloads=bool(options.offload_params),
    )
    return Reading(raw=raw, values=values, spec=spec, options=counted, findings=findings)


def _no_type() -> Finding:
    return Finding.error(
        code="missing-key",
        where="distributed_type",
        what="distributed_type is missing, and accelerate refuses a file without it",
        hint="distributed_type: FSDP",
    )


def _no_processes(count: int) -> Finding:
    return Finding.error(
        code="wrong-type",
        where="num_processes",
        what=f"{count} processes start nothing",
        hint="num_processes: how many ranks there are on all machines together",
    )


def _engine(kind: str, options: FsdpOptions) -> Engine:
    if kind == "FSDP":
        return "fsdp2" if options.version == 2 else "fsdp1"
    if kind.startswith("MULTI_"):
        return "ddp"
    if kind == "DEEPSPEED":
        return "deepspeed"
    return "none" if kind in _NO_ENGINE else "other"


def _axes(engine: Engine, raw: Accelerate, strategy: str) -> dict[str, int]:
    """Return the axes. Without a `parallelism_config`, or with an empty one, FSDP shards over all ranks."""
    section = raw.parallelism_config
    if section is not None and section.model_dump(exclude_none=True):
        sizes = {
            "dp_replicate": section.parallelism_config_dp_replicate_size,
            "dp_shard": section.parallelism_config_dp_shard_size,
            "cp": section.parallelism_config_cp_size,
            "sp": section.parallelism_config_sp_size,
            "tp": section.parallelism_config_tp_size,
        }
        axes = {axis: 1 if size is None else size for axis, size in sizes.items()}
        # `_validate_accelerator` makes replicas of all ranks where every size is 1.
        return {"dp_replicate": -1} if engine == "ddp" and set(axes.values()) == {1} else axes
    if engine == "ddp" or (engine == "fsdp1" and strategy == "NO_SHARD"):
        return {"dp_replicate": -1}
    if engine == "fsdp1" and strategy.startswith("HYBRID"):
        # FSDP1 shards inside a machine and replicates over machines.
        return {"dp_replicate": raw.num_machines or 1, "dp_shard": -1}
    return {"dp_shard": -1} if engine in ("fsdp1", "fsdp2", "deepspeed") else {}


def _keys(values: Mapping[str, object], axes: Mapping[str, int], engine: Engine) -> dict[str, str]:
    paths: dict[str, str | None] = {
        "engine": first_key(values, "distributed_type"),
        "world_size": first_key(values, "num_processes"),
        **{f"axes.{axis}": first_key(values, _SIZES.format(axis)) for axis in axes},
        **{name: first_key(values, "mixed_precision") for name in ("param_dtype", "reduce_dtype", "master_dtype")},
    }
    if engine == "deepspeed":
        paths["strategy"] = first_key(values, "deepspeed_config.zero_stage")
        paths["offload_params"] = first_key(values, "deepspeed_config.offload_param_device")
        paths["offload_optimizer"] = first_key(values, "deepspeed_config.offload_optimizer_device")
    elif engine in ("fsdp1", "fsdp2"):
        name = "sharding_strategy" if engine == "fsdp1" else "reshard_after_forward"
        paths["strategy"] = paths["reshard_after_forward"] = option_key(values, name)
        paths["offload_params"] = option_key(values, "offload_params")
    return {field: path for field, path in paths.items() if path is not None}


def _deepspeed(speed: DeepSpeed) -> DeepSpeedFile:
    """Return what `deepspeed_config` says, or the file that it names. The launcher's default is stage 2."""
    if speed.deepspeed_config_file is not None and speed.deepspeed_config_file.lower() != "none":
        return read_deepspeed(speed.deepspeed_config_file)
    return DeepSpeedFile(
        strategy=zero_strategy(2 if speed.zero_stage is None else speed.zero_stage),
        offload_params=speed.offload_param_device in OFFLOAD_DEVICES,
        offload_optimizer=speed.offload_optimizer_device in OFFLOAD_DEVICES,
    )
