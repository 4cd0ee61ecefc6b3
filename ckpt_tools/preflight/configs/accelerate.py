"""accelerate's YAML, as `accelerate config` writes it and `accelerate launch --config_file` reads it.

Source: accelerate 1.15: `commands/config/config_args.py:ClusterConfig`, `commands/launch.py:launch_command_parser` and
`_validate_launch_command` (defaults; keys of `fsdp_config` with and without `fsdp_`), `utils/launch.py`,
`utils/dataclasses.py:FullyShardedDataParallelPlugin`, `parallelism_config.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.preflight.configs.deepspeed import OFFLOAD_DEVICES, read_deepspeed, zero_strategy
from ckpt_tools.preflight.configs.document import Document
from ckpt_tools.preflight.configs.field_rows import Given, ReaderInput, Table, TrainerReader, read_table, row
from ckpt_tools.preflight.configs.fsdp_plugin import (
    PluginDefaults,
    plugin_mesh,
    plugin_rows,
    v1_strategy,
    v2_strategy,
    without_prefix,
)
from ckpt_tools.preflight.configs.schema import STRATEGIES, section
from ckpt_tools.preflight.plain_values import dtype_name, find_value
from ckpt_tools.preflight.spec import Engine

DEFAULTS = PluginDefaults(
    auto_wrap_policy=None, min_num_params=10**8, full_state_dict=False, cpu_ram_efficient_loading=True
)
"""Source: the defaults of `accelerate launch`'s command line, which the file overrides."""
_AXES = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
_NO_ENGINE = ("", "NO")
_ASKED_FOR = -1  # `num_processes` that the launcher is to be told. Source: `ClusterConfig`, `_validate_launch_command`.


OPTIONS = section("accelerate")


def _world_size(given: Given) -> int | None:
    declared: int | None = given.raw.num_processes
    if declared is not None and declared > 0:
        return declared
    return 1 if given.raw.distributed_type == "NO" else None


def _engine(given: Given) -> Engine:
    kind = given.raw.distributed_type or ""
    if kind == "FSDP":
        return "fsdp2" if given.raw.fsdp_config.version == 2 else "fsdp1"
    if kind.startswith("MULTI_"):
        return "ddp"
    if kind == "DEEPSPEED":
        return "deepspeed"
    return "none" if kind in _NO_ENGINE else "other"


def _axes(given: Given) -> dict[str, int]:
    """Return the axes. Without a `parallelism_config`, or with an empty one, FSDP shards over all ranks."""
    raw, engine = given.raw, given.spec.engine
    if raw.parallelism_config.model_dump(exclude_none=True):
        axes = {axis: given.spec.axes.get(axis, 1) for axis in _AXES}
        # `_validate_accelerator` makes replicas of all ranks where every size is 1.
        return {"dp_replicate": -1} if engine == "ddp" and set(axes.values()) == {1} else axes
    strategy = raw.fsdp_config.sharding_strategy or ""
    if engine == "ddp" or (engine == "fsdp1" and strategy == "NO_SHARD"):
        return {"dp_replicate": -1}
    if engine == "fsdp1" and strategy.startswith("HYBRID"):
        # FSDP1 shards inside a machine and replicates over machines.
        return {"dp_replicate": raw.num_machines or 1, "dp_shard": -1}
    return {"dp_shard": -1} if engine in ("fsdp1", "fsdp2", "deepspeed") else {}


def _dtypes(given: Given) -> tuple[str | None, str | None, str | None]:
    precision = (given.raw.mixed_precision or "no").lower()
    mixed = "bf16" if precision == "fp8" else dtype_name(precision)
    # FSDP averages in the dtype that computes; under DDP gradients are as wide as the parameters.
    # What is trained is widened before it is sharded (`prepare_model`, `fsdp2_prepare_model`); ZeRO keeps a copy.
    is_widened = mixed is not None and (given.is_fsdp or given.spec.engine == "deepspeed")
    return mixed, mixed if given.is_fsdp else None, "f32" if is_widened else None


def _zero(given: Given) -> tuple[str | None, bool, bool]:
    """Return what `deepspeed_config` says, or the file that it names. The launcher's default is stage 2."""
    options = given.raw.deepspeed_config
    if options.deepspeed_config_file is not None and options.deepspeed_config_file.lower() != "none":
        return read_deepspeed(given, "deepspeed_config.deepspeed_config_file", options.deepspeed_config_file)
    stage = 2 if options.zero_stage is None else options.zero_stage
    devices = (options.offload_param_device, options.offload_optimizer_device)
    return zero_strategy(stage), devices[0] in OFFLOAD_DEVICES, devices[1] in OFFLOAD_DEVICES


_TABLE = read_table("accelerate", engine=_engine, world_size=_world_size, axes=_axes, mesh=plugin_mesh, dtypes=_dtypes)
_BY_ENGINE: Mapping[Engine, Table] = {
    "deepspeed": read_table("accelerate.deepspeed", zero=_zero),
    **plugin_rows(
        DEFAULTS,
        offload=row("fsdp_config.offload_params", default=False),
        v1=row(
            "fsdp_config.sharding_strategy",
            value=lambda given: v1_strategy(given.raw.fsdp_config.sharding_strategy or STRATEGIES[0]),
        ),
        v2=row("fsdp_config.reshard_after_forward", value=v2_strategy),
    ),
}


def _check(given: Given) -> None:
    if find_value(given.values, "distributed_type") is None:
        what = "distributed_type is missing, and accelerate refuses a file without it"
        given.findings.append(Finding.error("missing-key", "distributed_type", what, "distributed_type: FSDP"))
    count = given.raw.num_processes
    if count is not None and count < 1 and count != _ASKED_FOR:
        what = f"num_processes must be at least 1, got {count}"
        hint = "set num_processes to the total number of ranks on all machines"
        given.findings.append(Finding.error("wrong-type", "num_processes", what, hint))


def _looks_like(document: Document) -> bool:
    values = document.values or {}
    return "distributed_type" in values or ("compute_environment" in values and "num_processes" in values)


READER = TrainerReader(
    name="accelerate",
    looks_like=_looks_like,
    prepare=lambda document: without_prefix(
        ReaderInput(model=OPTIONS, table=_TABLE, by_engine=_BY_ENGINE, values=document.keyed(), check=_check)
    ),
)
