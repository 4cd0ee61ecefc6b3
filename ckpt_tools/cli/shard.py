"""`ckpt shard` and `ckpt reshard`."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpt_tools import api
from ckpt_tools.cli import options
from ckpt_tools.cli.output import print_conversion, progress_of

Engine = Annotated[
    str,
    typer.Option(
        "--engine",
        envvar="CKPT_ENGINE",
        metavar="stream|dtensor",
        help="stream, or the reference path through torch: one process per rank, distribute_tensor, dcp.save.",
    ),
]


def shard(
    source: options.Source,
    destination: options.Destination,
    mesh: options.Mesh = None,
    world_size: options.WorldSize = None,
    rules: options.Rules = None,
    set_rules: options.Set = None,
    tp_plan: options.TpPlan = None,
    dtype: options.DType = "keep",
    prefix: options.Prefix = "",
    engine: Engine = "stream",
    include: options.Include = None,
    exclude: options.Exclude = None,
    overwrite: options.Overwrite = False,
    dry_run: options.DryRun = False,
    num_workers: options.NumWorkers = None,
    from_format: options.From = None,
    progress: options.ProgressMode = "auto",
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> int:
    """Convert full safetensors into a DTensor-sharded DCP checkpoint."""
    with progress_of(progress, quiet=quiet or json) as factory:
        result = api.shard(
            source,
            destination,
            mesh=mesh,
            world_size=world_size,
            rules=rules,
            set=set_rules or (),
            tp_plan=tp_plan,
            dtype=dtype,
            prefix=prefix,
            engine=engine,
            include=include or (),
            exclude=exclude or (),
            overwrite=overwrite,
            dry_run=dry_run,
            num_workers=num_workers,
            progress=factory,
            format=from_format,
        )
    print_conversion(result, as_json=json, quiet=quiet, verbose=verbose)
    return 0


def reshard(
    source: options.Source,
    destination: options.Destination,
    mesh: options.Mesh = None,
    world_size: options.WorldSize = None,
    rules: options.Rules = None,
    set_rules: options.Set = None,
    tp_plan: options.TpPlan = None,
    dtype: options.DType = "keep",
    prefix: options.Prefix = "",
    include: options.Include = None,
    exclude: options.Exclude = None,
    overwrite: options.Overwrite = False,
    dry_run: options.DryRun = False,
    num_workers: options.NumWorkers = None,
    from_format: options.From = None,
    progress: options.ProgressMode = "auto",
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> int:
    """Convert a sharded checkpoint for another mesh, optimizer state and non-tensor items included."""
    with progress_of(progress, quiet=quiet or json) as factory:
        result = api.reshard(
            source,
            destination,
            mesh=mesh,
            world_size=world_size,
            rules=rules,
            set=set_rules or (),
            tp_plan=tp_plan,
            dtype=dtype,
            prefix=prefix,
            include=include or (),
            exclude=exclude or (),
            overwrite=overwrite,
            dry_run=dry_run,
            num_workers=num_workers,
            progress=factory,
            format=from_format,
        )
    print_conversion(result, as_json=json, quiet=quiet, verbose=verbose)
    return 0
