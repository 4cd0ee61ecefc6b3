"""`ckpt export-lora`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import tempfile
from collections.abc import Callable
from typing import Any

from ckpt_tools import api
from ckpt_tools.adapters.export import Export
from ckpt_tools.cli.build import CommandCall
from ckpt_tools.cli.convert import print_conversion
from ckpt_tools.cli.output import note, print_json, progress_of, say, say_findings
from ckpt_tools.cli.push import print_push
from ckpt_tools.cli.streams import complete
from ckpt_tools.errors import UsageError
from ckpt_tools.hub.card import CardFacts
from ckpt_tools.hub.facts import rows_of
from ckpt_tools.hub.front_matter import hub_id_of
from ckpt_tools.hub.plan import PushResult
from ckpt_tools.hub.training import training_of
from ckpt_tools.options.hub import CardFields, ExportPush
from ckpt_tools.options.output import OutputOptions
from ckpt_tools.text import escape_name


def run(call: CommandCall[Export], how: ExportPush, card: CardFields, output: OutputOptions) -> int:
    """Export, print the configuration, and push if asked to."""
    push = how.push
    if push is None and (how != ExportPush() or card != CardFields()):
        raise UsageError("options of push need --push REPO", hint="add --push REPO, or leave these options out")
    send = functools.partial(_push, card=CardFacts.of(card), how=how, log=None if output.is_silent else note)
    pushed = None
    dry_run = call.given["dry_run"]
    with progress_of(output) as factory:
        # What is assumed is refused in public: by the export, before anything is written.
        stated = {"strict": True} if push is not None and not how.accept_assumed else {}
        export = functools.partial(call, progress=factory, **stated)
        result = export()
        if push is not None and dry_run and result.ok:
            result, pushed = _push_dry(result, export, send)
    is_done = result.ok and not dry_run
    with complete(call.shown("destination")) if is_done else contextlib.nullcontext():
        if not output.json:
            _print(result, output)
            if stated and any(each.code == "assumed" for each in result.findings):
                note("to publish it all the same, with what is assumed: --accept-assumed")
        if push is not None and is_done:
            pushed = send(result)
        if output.json:
            document = result.to_dict()
            print_json(document if pushed is None else {**document, "push": pushed.to_json()})
        elif pushed is not None:
            print_push(pushed, output)
    return 0 if result.ok and (pushed is None or pushed.ok) else 3


def _push_dry(
    planned: Export, export: Callable[..., Export], send: Callable[..., PushResult]
) -> tuple[Export, PushResult | None]:
    """Compare what would be written with what the hub has: only whole files can be, so they are written aside.

    The push is None when nothing would be written; the plan knows what the values tell as well.
    """
    name = os.path.basename(os.path.abspath(planned.conversion.destination))
    with tempfile.TemporaryDirectory(prefix="ckpt-export-") as directory:
        written = export(destination=os.path.join(directory, name), overwrite=False, dry_run=False)
        result = dataclasses.replace(planned, findings=written.findings)
        return result, send(written, dry_run=True) if written.ok else None


_BASE_KEYS = ("base_model_name_or_path", "base_model")


def _push(result: Export, *, card: CardFacts, how: ExportPush, **more: Any) -> PushResult:  # noqa: ANN401
    """Push what was exported, with the options of `push`; its card says where every setting came from."""
    destination = result.conversion.destination
    options = {each.name: getattr(how, each.name) for each in dataclasses.fields(how) if each.name != "push"}
    named = next((result.config[key].value for key in _BASE_KEYS if key in result.config), None)
    known = {name: found for name, found in result.config.items() if name not in _BASE_KEYS}  # which may be a path
    facts = dataclasses.replace(
        card,
        base_model=hub_id_of(str(named)) if named else None,
        training=training_of(result.conversion.source),
        settings=tuple(row for name, found in known.items() for row in rows_of(name, found.value, found.source)),
    )
    try:
        return api.push(destination, str(how.push), card=facts, **options, **more)
    except BaseException as error:
        if not more.get("dry_run"):
            shown = escape_name(destination)
            error.add_note(
                f"the adapter is written and complete in {shown}; to upload it: ckpt push {shown} {how.push}"
            )
        raise


_MAX_SHOWN = 50
_MAX_VALUE_CHARS = 60


def _print(result: Export, output: OutputOptions) -> None:
    say_findings(result.findings, most=None if output.verbose else _MAX_SHOWN)
    if not result.ok:
        say(f"nothing was written to {escape_name(result.conversion.destination)}")
        return
    print_conversion(result.conversion, output)
    if output.quiet:
        return
    for name, found in result.config.items():
        value = escape_name(str(found.value))
        if len(value) > _MAX_VALUE_CHARS and not output.verbose:
            value = value[: _MAX_VALUE_CHARS - 1] + "…"
        say(f"  {name:<28} {value:<24} {escape_name(found.source)}")
