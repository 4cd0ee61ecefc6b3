"""`ckpt export-lora`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_tools import api
from ckpt_tools.cli import adapter_options, hub_options, options
from ckpt_tools.cli.output import conversion_json, note, print_conversion, print_json, progress_of, say, say_findings
from ckpt_tools.cli.push import print_push
from ckpt_tools.cli.streams import complete
from ckpt_tools.errors import UsageError
from ckpt_tools.hub.card import CardFacts, hub_id_of
from ckpt_tools.hub.plan import PushResult
from ckpt_tools.hub.push import result_json as push_json
from ckpt_tools.text import escape_name

if TYPE_CHECKING:
    from ckpt_tools.adapters.export import Export

Source = Annotated[
    str,
    typer.Argument(
        metavar="SRC", help="What holds the adapter: a training checkpoint (DCP), a PEFT directory, a safetensors file."
    ),
]
To = Annotated[
    str, typer.Option("--to", envvar="CKPT_TO", metavar="peft|diffusers|kohya|comfyui", help="Whose format to write.")
]
BaseModel = Annotated[
    str | None,
    typer.Option("--base-model", envvar="CKPT_BASE_MODEL", metavar="ORG/NAME", help="Hub id of the base model."),
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
Push = Annotated[
    str | None,
    typer.Option(
        "--push", envvar="CKPT_PUSH", metavar="REPO", help="Then push it to the hub, as `ckpt push DST REPO` does."
    ),
]


def export_lora(
    source: Source,
    destination: options.Destination,
    to: To = "peft",
    alpha: adapter_options.Alpha = None,
    base_model: BaseModel = None,
    base: adapter_options.Base = None,
    adapter: adapter_options.AdapterName = None,
    config: adapter_options.Config = None,
    architecture: adapter_options.Architecture = None,
    svd_rank: SvdRank = None,
    dtype: options.DType = "keep",
    include: options.Include = None,
    exclude: options.Exclude = None,
    push: Push = None,
    private: hub_options.Private = False,
    create_pr: hub_options.CreatePr = False,
    revision: hub_options.Revision = None,
    commit_message: hub_options.Message = None,
    license: hub_options.License = None,  # noqa: A002 - the option's name
    endpoint: hub_options.Endpoint = None,
    strict: adapter_options.Strict = False,
    overwrite: options.Overwrite = False,
    dry_run: options.DryRun = False,
    from_format: options.From = None,
    progress: options.ProgressMode = "auto",
    json: options.Json = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> int:
    """Take a LoRA, or a relative of it, out of any checkpoint, and write it for an ecosystem; nothing else is read."""
    if push is None and (private or create_pr or revision or commit_message or license or endpoint):
        raise UsageError("nothing is pushed", hint="these options come with --push REPO")
    send = functools.partial(
        _push,
        repo=push or "",
        private=private,
        create_pr=create_pr,
        revision=revision,
        commit_message=commit_message,
        license=license,
        endpoint=endpoint,
        say=None if quiet or json else note,
    )
    pushed = None
    with progress_of(progress, quiet=quiet or json) as factory:
        export = functools.partial(
            api.export_lora,
            source,
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
            strict=strict,
            progress=factory,
            format=from_format,
        )
        result = export(destination, overwrite=overwrite, dry_run=dry_run)
        if push is not None and dry_run and result.ok:
            result, pushed = _push_dry(result, export, send)
    done = complete(escape_name(destination)) if result.ok and not dry_run else contextlib.nullcontext()
    with done:
        if not json:
            _print(result, quiet=quiet, verbose=verbose)
        if push is not None and not dry_run and result.ok:
            pushed = send(result)
        if json:
            document = export_json(result)
            print_json(document if pushed is None else {**document, "push": push_json(pushed)})
        elif pushed is not None:
            print_push(pushed, quiet=quiet, verbose=verbose)
    return 0 if result.ok and (pushed is None or pushed.ok) else 3


def _push_dry(
    planned: Export, export: Callable[[str], Export], send: Callable[..., PushResult]
) -> tuple[Export, PushResult | None]:
    """Compare what would be written with what the hub has: only whole files can be, so they are written aside.

    Returns:
        The plan, with what the values tell as well, and that of the push; None when nothing would be written.
    """
    name = os.path.basename(os.path.abspath(planned.conversion.destination))
    with tempfile.TemporaryDirectory(prefix="ckpt-export-") as directory:
        written = export(os.path.join(directory, name))
        result = dataclasses.replace(planned, findings=written.findings)
        return result, send(written, dry_run=True) if written.ok else None


def _push(
    result: Export,
    *,
    repo: str,
    private: bool,
    create_pr: bool,
    revision: str | None,
    commit_message: str | None,
    license: str | None,  # noqa: A002 - the option's name
    endpoint: str | None,
    say: Callable[[str], None] | None,
    dry_run: bool = False,
) -> PushResult:
    """Push what was exported; its card says where every setting came from."""
    destination = result.conversion.destination
    base = result.config.get("base_model_name_or_path")
    facts = CardFacts(
        base_model=hub_id_of(str(base.value)) if base is not None and base.value else None,
        license=license,
        settings=tuple((name, str(found.value), found.source) for name, found in result.config.items()),
    )
    try:
        return api.push(
            destination,
            repo,
            private=private,
            create_pr=create_pr,
            revision=revision,
            commit_message=commit_message,
            endpoint=endpoint,
            dry_run=dry_run,
            card=facts,
            say=say,
        )
    except BaseException as error:
        if dry_run:
            raise
        shown = escape_name(destination)
        error.add_note(f"the adapter is written and complete in {shown}; to send it: ckpt push {shown} {repo}")
        raise


def export_json(result: Export) -> dict[str, object]:
    """Return the JSON document of export-lora."""
    return {
        **conversion_json(result.conversion),
        "ok": result.ok,
        "config": {name: {"value": found.value, "source": found.source} for name, found in result.config.items()},
        "assumed": list(result.assumed),
        "findings": [dataclasses.asdict(finding) for finding in result.findings],
    }


_MAX_SHOWN = 50
_MAX_VALUE_CHARS = 60


def _print(result: Export, *, quiet: bool, verbose: bool) -> None:
    say_findings(result.findings, most=None if verbose else _MAX_SHOWN)
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
