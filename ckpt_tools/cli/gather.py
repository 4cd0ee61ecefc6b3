"""`ckpt gather`."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpt_tools import api
from ckpt_tools.cli import options
from ckpt_tools.cli.output import print_conversion, progress_of

MaxShardSize = Annotated[
    str | None,
    typer.Option(
        "--max-shard-size",
        envvar="CKPT_MAX_SHARD_SIZE",
        metavar="SIZE",
        help="Largest file, e.g. 5GB (decimal) or 5GiB. Default: the original files where known, else 5GB.",
    ),
]
StripPrefix = Annotated[
    str,
    typer.Option(
        "--strip-prefix",
        envvar="CKPT_STRIP_PREFIX",
        metavar="auto|none|PFX",
        help="auto finds the model inside a trainer's state and strips wrappers such as _orig_mod.",
    ),
]
Assets = Annotated[
    str | None,
    typer.Option(
        "--assets", envvar="CKPT_ASSETS", metavar="DIR", help="Config, tokenizer, … to put beside the weights."
    ),
]
Like = Annotated[
    str | None,
    typer.Option(
        "--like", envvar="CKPT_LIKE", metavar="REF", help="Restore this model's names, order, files and dtypes."
    ),
]
ForeignNames = Annotated[
    bool,
    typer.Option(
        "--allow-foreign-names",
        help="Write names that the architecture in config.json does not have, or not all of its names.",
    ),
]


def gather(
    source: options.Source,
    destination: options.Destination,
    max_shard_size: MaxShardSize = None,
    dtype: options.DType = "keep",
    strip_prefix: StripPrefix = "auto",
    assets: Assets = None,
    like: Like = None,
    include: options.Include = None,
    exclude: options.Exclude = None,
    allow_foreign_names: ForeignNames = False,
    overwrite: options.Overwrite = False,
    dry_run: options.DryRun = False,
    num_workers: options.NumWorkers = None,
    from_format: options.From = None,
    progress: options.ProgressMode = "auto",
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> int:
    """Convert a sharded checkpoint into full safetensors that transformers loads."""
    with progress_of(progress, quiet=quiet or json) as factory:
        result = api.gather(
            source,
            destination,
            max_shard_size=max_shard_size,
            dtype=dtype,
            strip_prefix=strip_prefix,
            assets=assets,
            like=like,
            include=include or (),
            exclude=exclude or (),
            allow_foreign_names=allow_foreign_names,
            overwrite=overwrite,
            dry_run=dry_run,
            num_workers=num_workers,
            progress=factory,
            format=from_format,
        )
    print_conversion(result, as_json=json, quiet=quiet, verbose=verbose)
    return 0
