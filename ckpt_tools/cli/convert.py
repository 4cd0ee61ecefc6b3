"""`ckpt shard`, `gather`, `reshard` and `merge-lora`: what converts."""

from __future__ import annotations

import os
from typing import Annotated, cast, get_args

from ckpt_tools.api.parts import PartsFrom, find_part
from ckpt_tools.cli.build import Call
from ckpt_tools.cli.output import Output, note, print_conversion, progress_of
from ckpt_tools.conversions.job import Conversion
from ckpt_tools.errors import UsageError
from ckpt_tools.formats.share_record import MAX_PARTS
from ckpt_tools.moving.threads import one_thread_each
from ckpt_tools.options import Option


def run(
    call: Call[Conversion],
    *,
    output: Output,
    parts: Annotated[
        str,
        Option(
            "What says in the environment which part this process is (auto: torchrun, if it runs); with --on how many.",
            metavar="|".join((*get_args(PartsFrom), "N")),
            after="part",
        ),
    ] = "auto",
    on: Annotated[
        str | None,
        Option("Run all parts as tasks of a Ray cluster.", metavar="ray|ray://HOST:PORT", after="parts"),
    ] = None,
) -> int:
    """Convert, and print what was written."""
    is_number = parts.isascii() and parts.isdecimal() and 0 < int(parts) <= MAX_PARTS
    if parts not in get_args(PartsFrom) and not (is_number and on is not None):
        words = ", ".join(get_args(PartsFrom))
        raise UsageError(f"--parts must be one of {words}, or with --on a number, got {parts!r}")
    if on is not None:
        from ckpt_tools.api.on_ray import convert_on_ray

        if "part" in call.given or call.given.get("dry_run"):
            raise UsageError("--on runs all parts", hint="leave out --part and --dry-run")
        count = int(parts) if is_number else None
        print_conversion(convert_on_ray(call.function, call.given, on=on, num_parts=count, say=note), output)
        return 0
    if call.given.get("engine") == "dtensor" and parts == "auto":  # its processes are ranks
        parts = "none"
    part = None if "part" in call.given else find_part(os.environ, cast("PartsFrom", parts))
    return convert(call, output, **({} if part is None else {"part": str(part)}))


def convert(call: Call[Conversion], output: Output, **more: str) -> int:
    """Make the call, and print what was written."""
    one_thread_each()
    with progress_of(output) as factory:
        result = call(progress=factory, **more)
    print_conversion(result, output)
    return 0
