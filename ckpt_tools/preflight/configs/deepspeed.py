"""DeepSpeed's JSON on its own, as `deepspeed.initialize` or the trainer that names it reads it.

A value may be "auto": transformers' and accelerate's integrations then fill it in from their own arguments.

Source: DeepSpeed 0.19.8: `runtime/config.py` (the batch sizes; other keys of the file are dropped),
`runtime/zero/config.py` and `runtime/precision_config.py` (sections that take no other key),
`runtime/tensor_parallel/config.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.preflight.configs.deepspeed_file import OFFLOAD_DEVICES, zero_strategy
from ckpt_tools.preflight.configs.document import Document
from ckpt_tools.preflight.configs.names import known
from ckpt_tools.preflight.configs.schema import Count, Positive, Section, Truth, Word, choice
from ckpt_tools.preflight.configs.table import Given, Reader, Source, Table, mesh_row, row
from ckpt_tools.preflight.spec import Engine

_AUTO = "auto"
_TELLING = ("zero_optimization", "train_micro_batch_size_per_gpu", "zero_allow_untested_optimizer")
_MAX_DEPTH = 8


class Offload(Section, known=known("deepspeed", "offload"), unknown="error"):
    """`offload_param` and `offload_optimizer`."""

    device: Annotated[str, choice("none", *OFFLOAD_DEVICES)] | None = None


class Zero(Section, known=known("deepspeed", "zero"), unknown="error"):
    """`zero_optimization`."""

    stage: Annotated[str, choice("0", "1", "2", "3")] | None = None
    offload_param: Offload = Offload()
    offload_optimizer: Offload = Offload()


class Precision(Section, known=known("deepspeed", "precision"), unknown="error"):
    """`bf16` and `fp16`."""

    enabled: Truth | None = None


class TensorParallel(Section, unknown=None):
    """`tensor_parallel`."""

    autotp_size: Count | None = None


class Optimizer(Section, unknown=None):
    """`optimizer`."""

    type: Word | None = None


class DeepSpeed(Section, known=known("deepspeed", "config")):
    """The file."""

    zero_optimization: Zero = Zero()
    train_micro_batch_size_per_gpu: Positive | None = None
    bf16: Precision = Precision()
    fp16: Precision = Precision()
    tensor_parallel: TensorParallel = TensorParallel()
    optimizer: Optimizer = Optimizer()


def _stage(given: Given[DeepSpeed]) -> int:
    return int(given.raw.zero_optimization.stage or 0)


def _dtypes(given: Given[DeepSpeed]) -> tuple[str | None, str | None, str]:
    sections = (given.document.values or {}).get("bf16"), (given.document.values or {}).get("fp16")
    if any(isinstance(one, Mapping) and one.get("enabled") == _AUTO for one in sections):
        return None, None, "f32"
    compute = "bf16" if given.raw.bf16.enabled else "f16" if given.raw.fp16.enabled else "f32"
    return compute, compute, "f32"


def _mesh_axes(given: Given[DeepSpeed]) -> dict[str, int]:
    """Return the axes: ZeRO shards over the ranks of one tensor-parallel place; stage 0 replicates over them."""
    width = given.raw.tensor_parallel.autotp_size or 0
    return {"dp_shard" if _stage(given) else "dp_replicate": -1, **({"tp": width} if width > 1 else {})}


_AT = "zero_optimization"
_ENGINE: Engine = "deepspeed"
_TABLE: Table[DeepSpeed] = {
    "engine": row(default=_ENGINE),
    "axes": row("tensor_parallel.autotp_size", value=_mesh_axes),
    "mesh": mesh_row(),
    "strategy": row(f"{_AT}.stage", value=lambda given: zero_strategy(_stage(given))),
    "offload_params": row(
        f"{_AT}.offload_param.device",
        value=lambda given: given.raw.zero_optimization.offload_param.device in OFFLOAD_DEVICES,
    ),
    "offload_optimizer": row(
        f"{_AT}.offload_optimizer.device",
        value=lambda given: given.raw.zero_optimization.offload_optimizer.device in OFFLOAD_DEVICES,
    ),
    "param_dtype reduce_dtype master_dtype": row("bf16.enabled", "fp16.enabled", value=_dtypes),
    "optimizer": row("optimizer.type", default="adamw"),
    "batch_size": row("train_micro_batch_size_per_gpu"),
}


def _without_auto(values: Mapping[str, object], found: list[str], path: str = "") -> dict[str, object]:
    """Return a config with null for every "auto"; `found` gets where they are."""
    result: dict[str, object] = {}
    for key, value in values.items():
        here = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping) and here.count(".") < _MAX_DEPTH:
            result[key] = _without_auto(value, found, here)
        else:
            result[key] = None if value == _AUTO else value
            found += [here] if value == _AUTO else []
    return result


def _looks_like(document: Document) -> bool:
    values = document.values or {}
    return any(name in values for name in _TELLING) or "type" in _section(values, "optimizer", "train_batch_size")


def _section(values: Mapping[str, object], name: str, beside: str) -> Mapping[object, object]:
    found = values.get(name)
    return found if beside in values and isinstance(found, Mapping) else {}


def _prepare(document: Document) -> Source:
    """Make a file ready; what is left to the trainer counts as not given."""
    values = document.keyed()
    auto: list[str] = []
    options = _without_auto(values, auto)
    findings: tuple[Finding, ...] = ()
    if auto:
        what = f"{len(auto)} options are auto: the trainer that names this file fills them in, and they are not checked"
        findings = (
            Finding.info("unknown-value", auto[0], what, "check the trainer's own config, which names this one"),
        )
    return Source(model=DeepSpeed, table=_TABLE, values=values, options=options, findings=findings)


READER = Reader(
    name="deepspeed",
    looks_like=_looks_like,
    prepare=_prepare,
    written={"offload_params": "zero_optimization.offload_param.device: cpu"},
)
