"""`ckpt merge-lora`."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpt_tools import api
from ckpt_tools.cli import adapter_options, options
from ckpt_tools.cli.gather import MaxShardSize
from ckpt_tools.cli.output import print_conversion, progress_of
from ckpt_tools.formats.table import FORMATS

Base = Annotated[
    str,
    typer.Argument(metavar="BASE", help="The base model: a safetensors file, a model directory or a DCP directory."),
]
Adapter = Annotated[
    str, typer.Argument(metavar="ADAPTER", help="A PEFT directory, a safetensors file, or a training checkpoint.")
]
Scale = Annotated[
    float, typer.Option("--scale", envvar="CKPT_SCALE", metavar="X", help="Multiplies what the adapter adds.")
]
Include = Annotated[
    list[str] | None,
    typer.Option(
        "--include", envvar="CKPT_INCLUDE", metavar="GLOB", help="Only these tensors of the adapter (repeatable)."
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        "--exclude", envvar="CKPT_EXCLUDE", metavar="GLOB", help="Without these tensors of the adapter (repeatable)."
    ),
]
From = Annotated[
    str | None,
    typer.Option(
        "--from",
        envvar="CKPT_FROM",
        metavar="|".join(FORMATS),
        help="Format of BASE; detected by default.",
    ),
]


def merge_lora(
    base: Base,
    adapter: Adapter,
    destination: options.Destination,
    dtype: options.DType = "keep",
    scale: Scale = 1.0,
    alpha: adapter_options.Alpha = None,
    adapter_name: adapter_options.AdapterName = None,
    config: adapter_options.Config = None,
    max_shard_size: MaxShardSize = None,
    include: Include = None,
    exclude: Exclude = None,
    strict: adapter_options.Strict = False,
    overwrite: options.Overwrite = False,
    dry_run: options.DryRun = False,
    num_workers: options.NumWorkers = None,
    from_format: From = None,
    progress: options.ProgressMode = "auto",
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> int:
    """Merge an adapter (LoRA, DoRA, LoHa, LoKr, OFT, BOFT, …) into its base, streaming."""
    with progress_of(progress, quiet=quiet or json) as factory:
        result = api.merge_lora(
            base,
            adapter,
            destination,
            dtype=dtype,
            scale=scale,
            alpha=alpha,
            adapter_name=adapter_name,
            config=config or (),
            max_shard_size=max_shard_size,
            include=include or (),
            exclude=exclude or (),
            strict=strict,
            overwrite=overwrite,
            dry_run=dry_run,
            num_workers=num_workers,
            progress=factory,
            format=from_format,
        )
    print_conversion(result, as_json=json, quiet=quiet, verbose=verbose)
    return 0
