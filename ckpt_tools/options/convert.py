"""Options of `shard`, `reshard` and `gather`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from ckpt_tools.checkpoint.identity import TrainerName
from ckpt_tools.options import AnyPath, Argument, Option, common
from ckpt_tools.units import parse_size

# Options of `average`, `extract`, `rename` and `commit`


@dataclass(frozen=True, slots=True, kw_only=True)
class WritingOptions:
    """What all of these take of how to write."""

    dtype: common.DTypeName = "keep"
    dtype_for: common.DTypeFor = ()
    max_shard_size: common.MaxShardSize = None
    overwrite: common.Overwrite = False
    keep_pickles: common.KeepPickles = False
    dry_run: common.DryRun = False
    num_workers: common.NumWorkers = None
    format: common.From = None
    as_part: common.AsPart = False
    progress: common.Progress = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageOptions(WritingOptions):
    """The options of `average`."""

    sources: Annotated[Sequence[AnyPath], Argument("Checkpoints of one model, in any formats.", "SRC")] = field(
        kw_only=False
    )
    destination: common.Destination = field(kw_only=False)
    weights: Annotated[
        str | None, Option("Weight of each source, in their order, with a sum of 1 (default: equal).", metavar="W,W,…")
    ] = None
    ema: Annotated[
        float | None,
        Option("Decay of an exponential average, oldest source first (default: plain average).", metavar="DECAY"),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractOptions(WritingOptions):
    """The options of `extract`."""

    source: common.Source = field(kw_only=False)
    destination: common.Destination = field(kw_only=False)
    include: common.Include = ()
    exclude: common.Exclude = ()
    layers: Annotated[
        int | None, Option("Number of first layers to take; config.json is adapted.", metavar="N", min=1)
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RenameOptions(WritingOptions):
    """The options of `rename`."""

    source: common.Source = field(kw_only=False)
    destination: common.Destination = field(kw_only=False)
    map: Annotated[AnyPath | None, Option("Key map from the hub's names to those to write.", metavar="FILE")] = None
    names: Annotated[
        Literal["comfyui"] | None, Option("Built-in map in place of --map (comfyui: the file that ComfyUI loads).")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitOptions:
    """The options of `commit`."""

    destination: Annotated[AnyPath, Argument("Destination of the parts.", "DST")] = field(kw_only=False)
    progress: common.Progress = None


DEFAULT_MAX_SHARD_SIZE = "5GB"  # Largest HF file when nothing else says how to split, as in huggingface_hub
PartsFrom = Literal["auto", "none", "torchrun", "slurm", "k8s", "mpi"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions(common.MeshOptions):
    """What `shard` and `reshard` both take."""

    source: common.Source = field(kw_only=False)
    destination: common.Destination = field(kw_only=False)
    dtype: common.DTypeName = "keep"
    dtype_for: common.DTypeFor = ()
    dequantize: common.Dequantize = False
    prefix: Annotated[str, Option("Prefix before every name, e.g. model.", metavar="PFX")] = ""
    serialization: Annotated[
        Literal["torch", "safetensors"],
        Option("Items: torch, for dcp.load; safetensors, tensors alone, for torch's HuggingFaceStorageReader."),
    ] = "torch"
    include: common.Include = ()
    exclude: common.Exclude = ()
    trainer: Annotated[
        TrainerName | None,
        Option("Trainer whose names, prefix and directories to write.", name="--for", after="prefix"),
    ] = None
    overwrite: common.Overwrite = False
    keep_pickles: common.KeepPickles = False
    part: common.PartText = None
    only_commit: common.OnlyCommit = False
    dry_run: common.DryRun = False
    num_workers: common.NumWorkers = None
    format: common.From = None
    as_part: common.AsPart = False
    component: common.Component = None
    progress: common.Progress = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardOptions(ConvertOptions):
    """The options of `reshard`."""

    shapes_from: common.ShapesFrom = None
    names: common.OtherNames = "auto"
    map: common.MapFile = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOptions(ConvertOptions):
    """The options of `shard`."""

    engine: Annotated[
        Literal["stream", "dtensor"],
        Option(
            "Writer: stream, or dtensor, the reference path through PyTorch with one process per rank.",
            after="prefix",
        ),
    ] = "stream"
    names: common.ShardNames = "auto"
    map: common.MapFile = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherOptions:
    """The options of `gather`."""

    source: common.Source = field(kw_only=False)
    destination: common.Destination = field(kw_only=False)
    max_shard_size: common.MaxShardSize = None
    dtype: common.DTypeName = "keep"
    dtype_for: common.DTypeFor = ()
    dequantize: common.Dequantize = False
    quantize: Annotated[
        Literal["fp8"] | None,
        Option("Quantisation of linear layers (fp8: 8-bit floats, a scale per 128×128 block, as in DeepSeek-V3)."),
    ] = None
    keep_precision: Annotated[Sequence[str], Option("Tensors that --quantize skips (repeatable).", metavar="GLOB")] = ()
    strip_prefix: Annotated[
        str,
        Option(
            "Prefix to strip; auto finds the model inside a trainer's state and strips wrappers such as _orig_mod.",
            metavar="auto|none|PFX",
        ),
    ] = "auto"
    assets: Annotated[
        AnyPath | None, Option("Directory with the config and tokenizer, if SRC lacks them.", metavar="DIR")
    ] = None
    like: Annotated[
        AnyPath | None, Option("Reference model whose names, order, files and dtypes to restore.", metavar="REF")
    ] = None
    include: common.Include = ()
    exclude: common.Exclude = ()
    names: common.GatherNames = "auto"
    map: common.MapFile = None
    allow_foreign_names: Annotated[bool, Option("Allow names that do not match the architecture in config.json.")] = (
        False
    )
    overwrite: common.Overwrite = False
    keep_pickles: common.KeepPickles = False
    part: common.PartText = None
    only_commit: common.OnlyCommit = False
    dry_run: common.DryRun = False
    num_workers: common.NumWorkers = None
    format: common.From = None
    as_part: common.AsPart = False
    component: common.Component = None
    shapes_from: common.ShapesFrom = None
    to: Annotated[
        Literal["safetensors", "torch"],
        Option("Files to write: model.safetensors, or pytorch_model.bin as torch.save does."),
    ] = "safetensors"
    progress: common.Progress = None

    @property
    def max_file_nbytes(self) -> int:
        """Largest file, where nothing else says how to split."""
        return parse_size(self.max_shard_size or DEFAULT_MAX_SHARD_SIZE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Who runs a conversion, and how it writes to a store."""

    parts: Annotated[
        str,
        Option(
            "Launcher whose environment numbers the parts (auto: torchrun, if it runs); with --on, how many parts.",
            metavar="|".join((*get_args(PartsFrom), "N")),
            after="part",
        ),
    ] = "auto"
    on: Annotated[
        str | None, Option("Ray cluster that runs all parts as tasks.", metavar="ray|ray://HOST:PORT", after="parts")
    ] = None
    memory: Annotated[
        str | None,
        Option("Memory for uploads to a store (default: 1GiB).", metavar="SIZE", after="num_workers"),
    ] = None
    verify_written: Annotated[
        Literal["sample", "all"],
        Option("Bytes to read back from a store: the ends of 64 files, or all.", after="memory"),
    ] = "sample"
    no_conditional_writes: Annotated[
        bool,
        Option(
            "Also write to stores without conditional writes, where two writers can collide.", after="verify_written"
        ),
    ] = False
