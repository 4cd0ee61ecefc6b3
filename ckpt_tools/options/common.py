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

Source = Annotated[
    AnyPath, Argument("A safetensors file, a model directory, a DCP directory or a training step.", "SRC")
]
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
    bool, Option("Decode quantised weights, as --dtype says or config.json; without it their bytes stay as they are.")
]
DTypeName = Annotated[
    str | Any, Option("Cast the model's floating-point tensors, but no quantised ones.", metavar="keep|bf16|f16|f32")
]
DTypeFor = Annotated[
    Sequence[str],
    Option("Cast these floating-point tensors otherwise (repeatable; the first match wins).", metavar="GLOB=DTYPE"),
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
        "Only these tensors (repeatable). * stays inside one dotted component, ** crosses, {a,b} alternates.",
        metavar="GLOB",
    ),
]
Exclude = Annotated[Sequence[str], Option("Skip these tensors (repeatable).", metavar="GLOB")]
Overwrite = Annotated[bool, Option("Replace DST; the old one is kept until the new one is durable.")]
PartText = Annotated[
    str | None,
    Option(
        "Write one part of N, from 0: run the same command once for each, anywhere; the last one publishes DST.",
        metavar="I/N",
    ),
]
AsPart = Annotated[bool, Option("Take a known part of a model as what it is; without it a part is refused.")]
KeepPickles = Annotated[bool, Option("Copy pickles and code that the checkpoint brought along.")]
OnlyCommit = Annotated[bool, Doc("Write no part: publish what all parts have written.")]
DryRun = Annotated[bool, Option("Plan only: files, bytes, memory, disk. Writes nothing.", short="-n")]
NumWorkers = Annotated[int | None, Option("Number of threads.", short="-j", env=True, min=1, max=256)]
Progress = Annotated[ProgressFactory | None, Doc("Makes the receiver of progress.")]
ShapesFrom = Annotated[
    AnyPath | None,
    Option("Checkpoint of the same model, for the shapes of FSDP1's LOCAL_STATE_DICT pieces.", metavar="MODEL"),
]
Component = Annotated[
    str | None, Option("One model of several in a repository, e.g. unet (. for the one at the top).", metavar="NAME")
]
FORMATS = "safetensors|torch|torch-dist|dcp|step|ranks|hf-sharded|hf|deepspeed|deepspeed-fp32|torch-dir"
"""As `formats.table` has them, in its order."""
From = Annotated[str | None, Option("Format of SRC (default: detected).", name="--from", metavar=FORMATS)]

# Whose names tensors have, or are to get

ShardNames = Annotated[
    Literal["auto", "hub", "live", "torchtitan", "megatron", "meta", "torchtune"],
    Option(
        "Names to write: those of the live model, of the hub's files, or of a library; auto is live where ckpt knows "
        "the architecture, else the file's."
    ),
]
GatherNames = Annotated[
    Literal["auto", "hub", "live", "torchtitan", "megatron", "meta", "torchtune", "comfyui"],
    Option(
        "Names to write: auto is hub where ckpt knows the architecture; live keeps those of SRC; a library's name says "
        "whose those are, and writes the hub's (comfyui: of a single file of an image or video model, diffusers')."
    ),
]
OtherNames = Annotated[
    Literal["auto", "hub", "live", "torchtitan", "megatron", "meta", "torchtune"],
    Option(
        "Names of the weights: those of the live model, of the hub's files, or of a library; auto keeps those of SRC."
    ),
]
LibraryNames = Annotated[
    Literal["auto", "torchtitan", "megatron", "meta", "torchtune"],
    Option("Library whose names are compared with the hub's; auto finds it."),
]
MapFile = Annotated[
    AnyPath | None, Option("Key map of your own, from the hub's names to others, instead of --names.", metavar="FILE")
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
            "Placement rule (repeatable; before those of --rules; the first match wins); GLOB= means FSDP only, "
            "AXIS:F that FSDP cuts over this axis, too.",
            metavar="GLOB=AXIS:S(D),…",
        ),
    ] = ()
    tp_plan: Annotated[
        str | None, Option("Cut along tp as transformers cuts the architecture that config.json names.", metavar="auto")
    ] = None
    assets: Annotated[
        AnyPath | None, Option("Directory with the config.json for --tp-plan, where SRC has none.", metavar="DIR")
    ] = None
    tp_uneven: Annotated[
        Literal["refuse", "replicate"],
        Option(
            "Tensors whose dim both tp and dp_shard cut and tp does not divide: refuse them, or keep them whole on tp."
        ),
    ] = "refuse"
