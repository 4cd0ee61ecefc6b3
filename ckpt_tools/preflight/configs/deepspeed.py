"""DeepSpeed's JSON on its own, as `deepspeed.initialize` or the trainer that names it reads it.

A value may be "auto": transformers' and accelerate's integrations then fill it in from their own arguments.

Source: DeepSpeed 0.19.8: `runtime/config.py` (the batch sizes; other keys of the file are dropped),
`runtime/zero/config.py` and `runtime/precision_config.py` (sections that take no other key),
`runtime/tensor_parallel/config.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.errors import CkptError
from ckpt_tools.preflight.configs.document import Document, find_file, read_document
from ckpt_tools.preflight.configs.field_rows import Given, ReaderInput, Table, TrainerReader, read_table, row, value_at
from ckpt_tools.preflight.configs.schema import section

# DeepSpeed's own JSON, as Trainer, axolotl and accelerate are told of it: a path, or its content.
# Source: DeepSpeed's "Configuration JSON" (`zero_optimization`); `transformers/integrations/deepspeed.py`, which opens
# a relative path from the current directory.

_STRATEGIES = {0: "no_shard", 2: "shard_grad_op", 3: "full_shard"}
OFFLOAD_DEVICES = ("cpu", "nvme")  # Where parameters and optimizer state can go


_MAX_PARENTS = 4

Stage = tuple[str | None, bool, bool]
"""The stage in FSDP's words, and whether parameters and optimizer state lie elsewhere."""


def read_deepspeed(given: Given, option: str, value: object) -> Stage:
    """Read what an option says of sharding, content or a path; a file that cannot be read here is noted as unread."""
    if isinstance(value, str):
        folders = ["", os.path.dirname(os.path.abspath(given.document.path))]
        for _ in range(_MAX_PARENTS - 1):  # by name: what a script writes lies in no folder that is there
            folders.append(os.path.dirname(folders[-1]))
        place = find_file(value, folders)
        try:
            value = None if place is None else read_document(place).values
        except CkptError:
            value = None
        given.contents |= {} if value is None else {option: value}
    zero = value.get("zero_optimization") if isinstance(value, Mapping) else None
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    if not isinstance(value, Mapping) or not isinstance(stage, int):
        given.unread.append(option)
    if not isinstance(zero, Mapping):
        return zero_strategy(0) if isinstance(value, Mapping) else None, False, False
    strategy = zero_strategy(stage) if isinstance(stage, int) else None
    return strategy, _offloads(zero.get("offload_param")), _offloads(zero.get("offload_optimizer"))


def deepspeed_rows(option: str = "deepspeed") -> Table:
    """Return the rows of what an option says."""
    read = row(value=lambda given: read_deepspeed(given, option, value_at(given.raw, option)))
    return {"strategy offload_params offload_optimizer": read}


def _offloads(value: object) -> bool:
    return isinstance(value, Mapping) and value.get("device") in OFFLOAD_DEVICES


def zero_strategy(stage: int) -> str | None:
    """Return a ZeRO stage in the words of FSDP; stage 1 has none."""
    return _STRATEGIES.get(stage)


_AUTO = "auto"
_TELLING = ("zero_optimization", "train_micro_batch_size_per_gpu", "zero_allow_untested_optimizer")
_MAX_DEPTH = 8


_OPTIONS = section("deepspeed")


def _stage(given: Given) -> int:
    return int(given.raw.zero_optimization.stage or 0)


def _dtypes(given: Given) -> tuple[str | None, str | None, str]:
    sections = (given.document.values or {}).get("bf16"), (given.document.values or {}).get("fp16")
    if any(isinstance(one, Mapping) and one.get("enabled") == _AUTO for one in sections):
        return None, None, "f32"
    compute = "bf16" if given.raw.bf16.enabled else "f16" if given.raw.fp16.enabled else "f32"
    return compute, compute, "f32"


def _mesh_axes(given: Given) -> dict[str, int]:
    """Return the axes: ZeRO shards over the ranks of one tensor-parallel place; stage 0 replicates over them."""
    width = given.raw.tensor_parallel.autotp_size or 0
    return {"dp_shard" if _stage(given) else "dp_replicate": -1, **({"tp": width} if width > 1 else {})}


_TABLE = read_table(
    "deepspeed",
    axes=_mesh_axes,
    strategy=lambda given: zero_strategy(_stage(given)),
    offload_params=lambda given: given.raw.zero_optimization.offload_param.device in OFFLOAD_DEVICES,
    offload_optimizer=lambda given: given.raw.zero_optimization.offload_optimizer.device in OFFLOAD_DEVICES,
    dtypes=_dtypes,
)


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
    optimizer = values.get("optimizer") if "train_batch_size" in values else None
    return any(name in values for name in _TELLING) or (isinstance(optimizer, Mapping) and "type" in optimizer)


def _prepare(document: Document) -> ReaderInput:
    """Make a file ready; what is left to the trainer counts as not given."""
    values = document.keyed()
    auto: list[str] = []
    options = _without_auto(values, auto)
    what = f"{len(auto)} options are auto: the trainer that uses this file sets them, so they are not checked"
    hint = "check the trainer's own config, which refers to this one"
    findings = tuple(Finding.info("unknown-value", path, what, hint) for path in auto[:1])
    return ReaderInput(model=_OPTIONS, table=_TABLE, values=values, options=options, findings=findings)


READER = TrainerReader(name="deepspeed", looks_like=_looks_like, prepare=_prepare)
