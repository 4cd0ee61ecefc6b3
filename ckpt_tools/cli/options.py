"""Options that several commands share, each spelled once."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpt_tools.formats.table import FORMATS

Source = Annotated[str, typer.Argument(metavar="SRC", help="A safetensors file, a model directory or a DCP directory.")]
Destination = Annotated[str, typer.Argument(metavar="DST", help="Directory to create.")]

Json = Annotated[bool, typer.Option("--json", envvar="CKPT_JSON", help="One JSON document on stdout.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", envvar="CKPT_QUIET", help="Errors only.")]
Verbose = Annotated[
    bool, typer.Option("-v", "--verbose", envvar="CKPT_VERBOSE", help="More detail; tracebacks of failures.")
]
ProgressMode = Annotated[
    str,
    typer.Option("--progress", envvar="CKPT_PROGRESS", metavar="auto|bar|plain|none", help="Progress on stderr."),
]
NumWorkers = Annotated[
    int | None,
    typer.Option("-j", "--num-workers", envvar="CKPT_NUM_WORKERS", min=1, max=256, help="Threads that move bytes."),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "-n", "--dry-run", envvar="CKPT_DRY_RUN", help="Plan only: files, bytes, memory, disk. Writes nothing."
    ),
]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite", envvar="CKPT_OVERWRITE", help="Replace DST; the old one stays until the new is durable."
    ),
]
Include = Annotated[
    list[str] | None,
    typer.Option(
        "--include",
        envvar="CKPT_INCLUDE",
        metavar="GLOB",
        help="Only these tensors (repeatable). * stays inside one dotted component, ** crosses, {a,b} alternates.",
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option("--exclude", envvar="CKPT_EXCLUDE", metavar="GLOB", help="Without these tensors (repeatable)."),
]
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        envvar="CKPT_FROM",
        metavar="|".join(FORMATS),
        help="Format of SRC; detected by default.",
    ),
]
Mesh = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        envvar="CKPT_MESH",
        metavar="AXIS=N,…",
        help="For example dp_replicate=2,dp_shard=4,tp=2: order is rank order, the last varies fastest; "
        "-1 is inferred from --world-size. Axes: dp_replicate (ddp), dp_shard (fsdp, dp), tp, ep, cp, pp.",
    ),
]
WorldSize = Annotated[
    int | None, typer.Option("--world-size", envvar="CKPT_WORLD_SIZE", min=1, help="Number of ranks, for -1.")
]
Rules = Annotated[
    str | None, typer.Option("--rules", envvar="CKPT_RULES", metavar="FILE", help="YAML file of placement rules.")
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        envvar="CKPT_SET",
        metavar="GLOB=AXIS:S(D),…",
        help="A placement rule (repeatable, before the file's, first match wins); GLOB= means FSDP alone.",
    ),
]
TpPlan = Annotated[
    str | None,
    typer.Option("--tp-plan", envvar="CKPT_TP_PLAN", metavar="auto", help="Take the plan of the model's config.json."),
]
DType = Annotated[
    str,
    typer.Option("--dtype", envvar="CKPT_DTYPE", metavar="keep|bf16|f16|f32", help="Cast floating-point tensors."),
]
Prefix = Annotated[
    str, typer.Option("--prefix", envvar="CKPT_PREFIX", metavar="PFX", help="Put in front of every name (model.).")
]
