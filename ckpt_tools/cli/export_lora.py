"""`ckpt export-lora`."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpt_tools import api
from ckpt_tools.adapters.export import Export
from ckpt_tools.cli import options
from ckpt_tools.cli.output import conversion_json, print_conversion, print_json, progress_of, say
from ckpt_tools.cli.values import format_of
from ckpt_tools.text import escape_name

Source = Annotated[
    str,
    typer.Argument(
        metavar="SRC", help="What holds the adapter: a training checkpoint (DCP), a PEFT directory, a safetensors file."
    ),
]
To = Annotated[
    str, typer.Option("--to", envvar="CKPT_TO", metavar="peft|diffusers|kohya|comfyui", help="Whose format to write.")
]
Alpha = Annotated[
    float | None,
    typer.Option("--alpha", envvar="CKPT_ALPHA", metavar="VALUE", help="lora_alpha of the training run."),
]
BaseModel = Annotated[
    str | None,
    typer.Option("--base-model", envvar="CKPT_BASE_MODEL", metavar="ORG/NAME", help="Hub id of the base model."),
]
Base = Annotated[
    str | None,
    typer.Option(
        "--base", envvar="CKPT_BASE", metavar="DIR", help="The base model: modules and shapes are held against it."
    ),
]
AdapterName = Annotated[
    str | None, typer.Option("--adapter", envvar="CKPT_ADAPTER", metavar="NAME", help="Which one, of several.")
]
Config = Annotated[
    list[str] | None,
    typer.Option(
        "--config",
        envvar="CKPT_CONFIG",
        metavar="FIELD=VALUE",
        help="A setting of PEFT's configuration that neither tensors nor files tell (repeatable).",
    ),
]
Architecture = Annotated[
    str | None,
    typer.Option(
        "--architecture",
        envvar="CKPT_ARCHITECTURE",
        metavar="flux1|flux2|sdxl|sd3|llm",
        help="Model family, where the names do not tell it.",
    ),
]
SvdRank = Annotated[
    int | None,
    typer.Option(
        "--svd-rank",
        envvar="CKPT_SVD_RANK",
        metavar="R",
        min=1,
        help="Approximate what the format cannot express exactly; the error is reported.",
    ),
]


def export_lora(
    source: Source,
    destination: options.Destination,
    to: To = "peft",
    alpha: Alpha = None,
    base_model: BaseModel = None,
    base: Base = None,
    adapter: AdapterName = None,
    config: Config = None,
    architecture: Architecture = None,
    svd_rank: SvdRank = None,
    dtype: options.DType = "keep",
    include: options.Include = None,
    exclude: options.Exclude = None,
    overwrite: options.Overwrite = False,
    dry_run: options.DryRun = False,
    from_format: options.From = None,
    progress: options.ProgressMode = "auto",
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> int:
    """Take a LoRA, or a relative of it, out of any checkpoint, and write it for an ecosystem; nothing else is read."""
    with progress_of(progress, quiet=quiet or json) as factory:
        result = api.export_lora(
            source,
            destination,
            to=to,
            alpha=alpha,
            base_model=base_model,
            base=base,
            adapter=adapter,
            config=config or (),
            architecture=architecture,
            svd_rank=svd_rank,
            dtype=dtype,
            include=include or (),
            exclude=exclude or (),
            overwrite=overwrite,
            dry_run=dry_run,
            progress=factory,
            format=format_of(from_format),
        )
    if json:
        print_json(export_json(result))
    else:
        _print(result, quiet=quiet, verbose=verbose)
    return 0 if result.ok else 3


def export_json(result: Export) -> dict[str, object]:
    """Return the JSON document of export-lora."""
    return {
        **conversion_json(result.conversion),
        "ok": result.ok,
        "config": {name: {"value": found.value, "source": found.source} for name, found in result.config.items()},
        "findings": [
            {"code": f.code, "severity": f.severity, "where": f.where, "what": f.what, "hint": f.hint}
            for f in result.findings
        ],
    }


_MAX_SHOWN = 50
_MAX_VALUE_CHARS = 60


def _print(result: Export, *, quiet: bool, verbose: bool) -> None:
    shown = result.findings if verbose else result.findings[:_MAX_SHOWN]
    for finding in shown:
        say(f"{finding.severity}: {finding.code}: {finding.what}")
        say(f"   at: {finding.where}")
        if finding.hint is not None:
            say(f" hint: {finding.hint}")
    if len(shown) < len(result.findings):
        say(f"… and {len(result.findings) - len(shown)} more findings (-v shows all)")
    if not result.ok:
        say(f"nothing was written to {escape_name(result.conversion.destination)}")
        return
    print_conversion(result.conversion, as_json=False, quiet=quiet, verbose=verbose)
    if quiet:
        return
    for name, found in result.config.items():
        value = escape_name(str(found.value))
        if len(value) > _MAX_VALUE_CHARS and not verbose:
            value = value[: _MAX_VALUE_CHARS - 1] + "…"
        say(f"  {name:<28} {value:<24} {escape_name(found.source)}")
