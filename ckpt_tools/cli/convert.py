"""`ckpt shard`, `gather` and `reshard`, and whatever else writes a checkpoint."""

from __future__ import annotations

import os
from typing import cast, get_args

from ckpt_tools.cli.build import CommandCall
from ckpt_tools.cli.output import note, note_identities, print_json, progress_of, say
from ckpt_tools.cli.streams import complete
from ckpt_tools.convert.job import Conversion
from ckpt_tools.errors import UsageError
from ckpt_tools.options.convert import PartsFrom, RunOptions
from ckpt_tools.options.output import OutputOptions
from ckpt_tools.storage.locations import is_remote
from ckpt_tools.text import counted, escape_name, first_few
from ckpt_tools.transfer.share_record import MAX_PARTS, find_part
from ckpt_tools.units import format_size, parse_size


def run(call: CommandCall[Conversion], how: RunOptions, output: OutputOptions) -> int:
    """Convert, and print what was written."""
    parts, on = how.parts, how.on
    if how != RunOptions(parts=parts, on=on):
        _set_how_to_write(how)
    is_number = parts.isascii() and parts.isdecimal() and 0 < int(parts) <= MAX_PARTS
    if parts not in get_args(PartsFrom) and not (is_number and on is not None):
        words = ", ".join(get_args(PartsFrom))
        raise UsageError(f"--parts must be one of {words}, or with --on a number, got {parts!r}")
    if on is not None:
        from ckpt_tools.convert.on_ray import convert_on_ray

        if "part" in call.given or call.given.get("dry_run"):
            raise UsageError("--on runs all parts", hint="leave out --part and --dry-run")
        count = int(parts) if is_number else None
        print_conversion(convert_on_ray(call.function, call.given, on=on, num_parts=count, say=note), output)
        return 0
    if call.given.get("engine") == "dtensor" and parts == "auto":  # its processes are ranks
        parts = "none"
    part = None if "part" in call.given else find_part(os.environ, cast("PartsFrom", parts))
    return convert(call, output, **({} if part is None else {"part": str(part)}))


def _set_how_to_write(how: RunOptions) -> None:
    from ckpt_tools.storage.remote.object_sink import MEMORY_BYTES, WriteSettings, set_write_settings

    memory_bytes = MEMORY_BYTES if how.memory is None else parse_size(how.memory)
    needs_conditions, verify_all = not how.no_conditional_writes, how.verify_written == "all"
    set_write_settings(
        WriteSettings(memory_bytes=memory_bytes, needs_conditions=needs_conditions, verify_all=verify_all)
    )


def convert(call: CommandCall[Conversion], output: OutputOptions, **more: str) -> int:
    """Make the call, and print what was written."""
    with progress_of(output) as factory:
        result = call(progress=factory, **more)
    print_conversion(result, output)
    return 0


def print_conversion(result: Conversion, output: OutputOptions) -> None:
    """Print what a conversion did; under torchrun, on the rank that published, and on every part."""
    if result.dry_run or (result.part is not None and not result.published):
        _print_conversion(result, output)
    elif result.published:
        with complete(escape_name(result.destination)):
            _print_conversion(result, output)


def _print_conversion(result: Conversion, output: OutputOptions) -> None:
    if output.json:
        print_json(result.to_dict())
        return
    note_identities([result.identity] if result.identity is not None else [], output)
    for text in result.warnings:
        note(f"warning: {text}")
    for kind, texts in {"note": result.notes, "not checked": result.not_checked}.items():
        for text in () if output.quiet else texts:
            note(f"{kind}: {text}")
    if output.quiet and not result.dry_run:  # a plan is all that a dry run was started for
        return
    destination = escape_name(result.destination)
    files = counted(len(result.files), "file")
    size = format_size(result.bytes_written)
    if result.part is not None and not result.published:
        done = result.part.count - len(result.waiting_for)
        say(f"wrote part {result.part}: {files}, {size}; {done} of {result.part.count} parts are there")
        missing = first_few([str(index) for index in result.waiting_for], 8)
        say(f"{destination} is not published yet: waiting for {missing}")
    elif result.dry_run:
        say(f"would write {files}, {size}, to {destination}")
        room = "storage" if is_remote(result.destination) else "disk"
        say(f"needs about {format_size(result.peak_rss_bytes)} of memory and {size} of {room}")
    else:
        say(f"wrote {counted(result.num_tensors, 'tensor')}, {files}, {size}, to {destination}")
        rate = format_size(result.throughput_bytes_per_s)
        say(f"in {result.seconds:.1f} s ({rate}/s), peak memory {format_size(result.peak_rss_bytes)}")
    if checked := _checked(result):
        say(f"checked: {checked}")
    if result.dry_run or output.verbose:
        shown = result.files if output.verbose or len(result.files) <= 20 else result.files[:18]
        for name, nbytes in shown:
            say(f"  {format_size(nbytes):>10}  {escape_name(name)}")
        if len(shown) < len(result.files):
            say(f"  … and {len(result.files) - len(shown):,} more (-v lists all)")


def _checked(result: Conversion) -> str:
    parts = ["structure of the result"] if result.published else []
    if result.architecture:
        parts.append(f"names against {result.architecture}")
    if count := result.checked.get("digests"):
        parts.append(f"{counted(count, 'tensor')} against the source's digests")
    if count := result.checked.get("crcs"):
        parts.append(f"{counted(count, 'chunk')} against the source's CRC-32s")
    return ", ".join(parts)
