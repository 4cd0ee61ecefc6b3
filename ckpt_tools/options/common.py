"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from ckpt_tools.checkpoint.layout import MeshLike
from ckpt_tools.options import AnyPath, Argument, Doc, Option, ProgressFactory

Level = Literal["structure", "data", "values"]
"""How much `verify` reads: headers, every byte, or every byte and what the values are."""
Purpose = Literal["resume", "weights"]

Source = Annotated[AnyPath, Argument("Checkpoint: file, model directory, DCP directory, training step or URL.", "SRC")]
Destination = Annotated[AnyPath, Argument("Directory to create.", "DST")]
MeshText = Annotated[
    MeshLike | None,
    Option(
        "Device mesh, e.g. dp_replicate=2,dp_shard=4,tp=2; the last axis varies fastest; -1 is inferred from "
        "--world-size. Axes: dp_replicate (ddp), dp_shard (fsdp, dp), tp, ep, cp, pp.",
        metavar="AXIS=N,…",
    ),
]
WorldSize = Annotated[int | None, Option("Number of ranks, to infer -1 in --mesh.", min=1)]
Dequantize = Annotated[
    bool, Option("Decode quantised weights to --dtype, or to the dtype in config.json (default: bytes unchanged).")
]
DTypeName = Annotated[
    str | Any,
    Option("Dtype of the model's floating-point tensors, quantised ones excepted.", metavar="keep|bf16|f16|f32"),
]
DTypeFor = Annotated[
    Sequence[str],
    Option("Dtype of these tensors, in place of --dtype (repeatable; the first match wins).", metavar="GLOB=DTYPE"),
]
MaxShardSize = Annotated[
    str | None,
    Option(
        "Maximum size of a file, e.g. 5GB (decimal) or 5GiB (default: the original files where known, else 5GB).",
        metavar="SIZE",
    ),
]
Include = Annotated[
    Sequence[str],
    Option(
        "Tensors to take (repeatable). * stays inside one dotted component, ** crosses dots, {a,b} alternates.",
        metavar="GLOB",
    ),
]
Exclude = Annotated[Sequence[str], Option("Tensors to skip (repeatable).", metavar="GLOB")]
Overwrite = Annotated[bool, Option("Replace DST; the old one stays until the new one is durable.")]
PartText = Annotated[
    str | None,
    Option(
        "Part to write, counted from 0. Run the same command for every part, on any machine; the last publishes DST.",
        metavar="I/N",
    ),
]
AsPart = Annotated[bool, Option("Accept a known part of a model (default: refused).")]
KeepPickles = Annotated[bool, Option("Copy pickles and code as well, which can run when loaded.")]
OnlyCommit = Annotated[bool, Doc("Write no part: publish what all parts have written.")]
DryRun = Annotated[bool, Option("Print the plan (files, bytes, memory, disk); write nothing.", short="-n")]
NumWorkers = Annotated[int | None, Option("Number of threads.", short="-j", env=True, min=1, max=256)]
Progress = Annotated[
    ProgressFactory | None,
    Doc("Called with the total number of bytes; returns a function that is called with each increment."),
]
ShapesFrom = Annotated[
    AnyPath | None,
    Option("Checkpoint of the same model, for the shapes of FSDP1's LOCAL_STATE_DICT pieces.", metavar="MODEL"),
]
Component = Annotated[
    str | None, Option("Model in a repository of several, e.g. unet (. for the one at the top).", metavar="NAME")
]
FORMATS = "safetensors|torch|torch-dist|dcp|step|ranks|hf-sharded|hf|deepspeed|deepspeed-fp32|torch-dir"
"""As `formats.table` has them, in its order."""
From = Annotated[str | None, Option("Format of SRC (default: detected).", name="--from", metavar=FORMATS)]

# Whose names tensors have, or are to get

ShardNames = Annotated[
    Literal["auto", "hub", "live", "torchtitan", "megatron", "meta", "torchtune"],
    Option(
        "Tensor names to write: the live model's, the hub's or a library's; auto is live where ckpt knows the "
        "architecture, else the names of SRC."
    ),
]
GatherNames = Annotated[
    Literal["auto", "hub", "live", "torchtitan", "megatron", "meta", "torchtune", "comfyui"],
    Option(
        "Tensor names: auto writes the hub's where ckpt knows the architecture; live keeps those of SRC; a library's "
        "name states the names of SRC and writes the hub's (comfyui: those of a single file, written as diffusers')."
    ),
]
OtherNames = Annotated[
    Literal["auto", "hub", "live", "torchtitan", "megatron", "meta", "torchtune"],
    Option("Tensor names: the live model's, the hub's or a library's; auto keeps those of SRC."),
]
LibraryNames = Annotated[
    Literal["auto", "torchtitan", "megatron", "meta", "torchtune"],
    Option("Library whose tensor names are compared with the hub's; auto detects it."),
]
MapFile = Annotated[
    AnyPath | None, Option("Key map from the hub's names to your own, in place of --names.", metavar="FILE")
]


_STRATEGIES = {
    "full_shard": "full_shard zero3 1",
    "shard_grad_op": "shard_grad_op zero2 2",
    "no_shard": "no_shard ddp 3",
    "hybrid_shard": "hybrid_shard hsdp 4",
    "hybrid_shard_zero2": "hybrid_shard_zero2 _hybrid_shard_zero2 5",
}
"""Sharding strategy → its own name, FSDP1's and accelerate's number."""


def find_strategy(text: str) -> str | None:
    """Return the strategy that a name in any spelling means; hybrid_shard_zero2 keeps parameters after forward."""
    key = text.strip().lower().replace("-", "_").removeprefix("shardingstrategy.")
    return next((strategy for strategy, names in _STRATEGIES.items() if key in names.split()), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshOptions:
    """How to cut, as the user said it."""

    mesh: MeshText = None
    world_size: WorldSize = None
    rules: Annotated[AnyPath | None, Option("YAML file of placement rules.", metavar="FILE")] = None
    set: Annotated[
        Sequence[str],
        Option(
            "Placement rule (repeatable; before those of --rules; the first match wins). GLOB= is FSDP alone; "
            "AXIS:F lets FSDP cut over this axis as well.",
            metavar="GLOB=AXIS:S(D),…",
        ),
    ] = ()
    tp_plan: Annotated[
        str | None, Option("Plan for tp (auto: as transformers cuts the architecture in config.json).", metavar="auto")
    ] = None
    assets: Annotated[
        AnyPath | None, Option("Directory with the config.json for --tp-plan (default: SRC).", metavar="DIR")
    ] = None
    tp_uneven: Annotated[
        Literal["refuse", "replicate"],
        Option("Tensors with a dim that tp and dp_shard both cut and tp does not divide: refused, or whole on tp."),
    ] = "refuse"
