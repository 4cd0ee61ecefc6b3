"""Options of `average`, `extract`, `rename` and `commit`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from ckpt_tools.options import AnyPath, Argument, Option, common


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

    sources: Annotated[Sequence[AnyPath], Argument("Checkpoints of one model, of any formats.", "SRC")] = field(
        kw_only=False
    )
    destination: common.Destination = field(kw_only=False)
    weights: Annotated[
        str | None, Option("Weight of every source, 1 together (default: equal weights).", metavar="W,W,…")
    ] = None
    ema: Annotated[
        float | None,
        Option("Exponential moving average instead, oldest source first: how much of it stays.", metavar="DECAY"),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractOptions(WritingOptions):
    """The options of `extract`."""

    source: common.Source = field(kw_only=False)
    destination: common.Destination = field(kw_only=False)
    include: common.Include = ()
    exclude: common.Exclude = ()
    layers: Annotated[
        int | None, Option("Only the first N layers, with a config.json that says so.", metavar="N", min=1)
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RenameOptions(WritingOptions):
    """The options of `rename`."""

    source: common.Source = field(kw_only=False)
    destination: common.Destination = field(kw_only=False)
    map: Annotated[AnyPath | None, Option("Key map, from the hub's names to those to write.", metavar="FILE")] = None
    names: Annotated[
        Literal["comfyui"] | None, Option("Instead of --map: diffusers' model as the single file that ComfyUI loads.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitOptions:
    """The options of `commit`."""

    destination: common.Destination = field(kw_only=False)
    progress: common.Progress = None
