"""`ckpt shard`, `gather`, `reshard` and `merge-lora`: what converts."""

from __future__ import annotations

import os
from typing import Annotated, Literal, cast, get_args

from ckpt_tools.api.parts import PartsFrom, find_part
from ckpt_tools.cli.build import Call
from ckpt_tools.cli.output import Output, note, print_conversion, progress_of
from ckpt_tools.conversions.job import Conversion
from ckpt_tools.errors import UsageError
from ckpt_tools.moving.share_record import MAX_PARTS
from ckpt_tools.moving.threads import one_thread_each
from ckpt_tools.options import Option
from ckpt_tools.units import parse_size


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
    memory: Annotated[
        str | None,
        Option("Memory for what is on its way to a store (default: 1GiB).", metavar="SIZE", after="num_workers"),
    ] = None,
    verify_written: Annotated[
        Literal["sample", "all"],
        Option("What to read back from a store: the ends of 64 files, or everything.", after="memory"),
    ] = "sample",
    no_conditional_writes: Annotated[
        bool,
        Option("Write to a store that cannot keep a second writer out, too.", after="verify_written"),
    ] = False,
) -> int:
    """Convert, and print what was written."""
    if memory is not None or verify_written != "sample" or no_conditional_writes:
        _set_how_to_write(memory, verify_all=verify_written == "all", conditional=not no_conditional_writes)
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


def _set_how_to_write(memory: str | None, *, verify_all: bool, conditional: bool) -> None:
    from ckpt_tools.remote.object_sink import set_write_settings
    from ckpt_tools.remote.writing import MEMORY_BYTES, WriteSettings

    memory_bytes = MEMORY_BYTES if memory is None else parse_size(memory)
    set_write_settings(WriteSettings(memory_bytes=memory_bytes, needs_conditions=conditional, verify_all=verify_all))


def convert(call: Call[Conversion], output: Output, **more: str) -> int:
    """Make the call, and print what was written."""
    one_thread_each()
    with progress_of(output) as factory:
        result = call(progress=factory, **more)
    print_conversion(result, output)
    return 0
