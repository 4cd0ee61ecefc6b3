"""Options of what reads and writes no checkpoint: `inspect`, `verify`, `diff`, `stats` and `scan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from ckpt_tools.options import AnyPath, Argument, Option, common
from ckpt_tools.options.output import Html

By = Literal["rank", "file", "dtype", "module"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenOptions:
    """The options of `open_checkpoint` and `identify`, which are no commands."""

    path: common.Source = field(kw_only=False)
    format: common.From = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectOptions(common.MeshOptions):
    """The options of `inspect`; those of `MeshOptions` show a layout that is not on disk."""

    source: common.Source = field(kw_only=False)
    include: common.Include = ()
    exclude: common.Exclude = ()
    names: common.OtherNames = "auto"
    map: common.MapFile = None
    format: common.From = None
    component: common.Component = None
    shapes_from: common.ShapesFrom = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectView:
    """What `ckpt inspect` shows."""

    tensors: Annotated[bool, Option("List every tensor.")] = False
    tensor: Annotated[Sequence[str], Option("Tensor whose chunks to show (repeatable).", metavar="FQN")] = ()
    by: Annotated[By | None, Option("Only table to show.")] = None
    html: Html = None


CheckedPart = Annotated[
    str | None,
    Option(
        "Read only part I of N of the tensors (counted from 0); results of the parts are not combined.", metavar="I/N"
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """The options of `verify`."""

    source: common.Source = field(kw_only=False)
    against: Annotated[AnyPath | None, Option("Copy to compare with, bit for bit, in any format.", metavar="REF")] = (
        None
    )
    names: common.LibraryNames = "auto"
    level: Annotated[
        common.Level,
        Option("Depth: structure, headers alone; data, every byte; values, also NaN, Inf and all-zero weights."),
    ] = "data"
    purpose: Annotated[
        common.Purpose | None,
        Option("Purpose: resume, everything that the trainer needs; or weights (default: as saved).", name="--for"),
    ] = None
    part: CheckedPart = None
    accept: Annotated[
        Sequence[str],
        Option("File that was changed on purpose, to record in the manifest (repeatable).", metavar="FILE"),
    ] = ()
    num_workers: common.NumWorkers = None
    format: common.From = None
    component: common.Component = None
    shapes_from: common.ShapesFrom = None
    progress: common.Progress = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyView:
    """What `ckpt verify` takes beside one checkpoint."""

    more: Annotated[
        Sequence[AnyPath], Argument("Further checkpoints; a run's folder stands for all in it.", "SRC")
    ] = ()
    html: Html = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffOptions:
    """The options of `diff`."""

    a: Annotated[AnyPath, Argument("Checkpoint in any format.", "A")] = field(kw_only=False)
    b: Annotated[AnyPath, Argument("Checkpoint to compare it with, in any format.", "B")] = field(kw_only=False)
    keys_only: Annotated[bool, Option("Compare names, shapes and dtypes alone; read no tensor.")] = False
    atol: Annotated[float | None, Option("Absolute tolerance (default: bitwise).", min=0)] = None
    rtol: Annotated[float | None, Option("Relative tolerance.", min=0)] = None
    include: common.Include = ()
    exclude: common.Exclude = ()
    names: common.LibraryNames = "auto"
    component: common.Component = None
    part: CheckedPart = None
    num_workers: common.NumWorkers = None
    progress: common.Progress = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffView:
    """What `ckpt diff` shows."""

    tensors: Annotated[bool, Option("List every tensor that differs (default: up to 20, then by module).")] = False
    html: Html = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsOptions:
    """The options of `stats`."""

    source: common.Source = field(kw_only=False)
    against: Annotated[
        AnyPath | None,
        Option("Earlier checkpoint of the same model, in any format, to measure the update from.", metavar="OTHER"),
    ] = None
    frozen: Annotated[
        Sequence[str], Option("Tensors that were not trained (repeatable; needs --against).", metavar="GLOB")
    ] = ()
    rank: Annotated[bool, Option("Also measure the effective rank of a sample of 256 rows of every matrix.")] = False
    dequantize: Annotated[bool, Option("Measure quantised weights decoded; else packed ones are left out.")] = False
    include: common.Include = ()
    exclude: common.Exclude = ()
    names: common.LibraryNames = "auto"
    num_workers: common.NumWorkers = None
    format: common.From = None
    component: common.Component = None
    shapes_from: common.ShapesFrom = None
    progress: common.Progress = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsView:
    """What `ckpt stats` shows."""

    tensors: Annotated[bool, Option("List every tensor (default: a line for the same weight of all layers).")] = False
    html: Html = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanOptions:
    """The options of `scan`."""

    source: Annotated[AnyPath, Argument("Any file or directory, or a repository of the hub.", "SRC")] = field(
        kw_only=False
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanView:
    """How `ckpt scan` prints its result."""

    format: Annotated[Literal["text", "json", "sarif"], Option("Output format (json: same as --json).")] = "text"
