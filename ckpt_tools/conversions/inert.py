"""What a conversion copies is inert: pickles and code that came along stay behind, unless they are asked for."""

from __future__ import annotations

from ckpt_tools.checks.trainer import judge
from ckpt_tools.conversions.job import Job
from ckpt_tools.errors import UnreadableError
from ckpt_tools.formats.scan import describe_executable, scan_files, why_not_inert
from ckpt_tools.formats.table import format_of
from ckpt_tools.text import escape_name, first_few


def make_inert(job: Job, *, keep: bool) -> None:
    """Take out of a job's assets what could run more than torch needs; with `keep`, only say so.

    An item that calls something dangerous, and a file that the trainer does not resume without, are refused.
    """
    found = {asset.file: why_not_inert(source, asset.source_file, asset.nbytes) for source, asset in job.assets}
    told = [f"{file} ({why})" for file, why in found.items() if why]
    if job.target.blobs:
        opened = job.opened
        items = scan_files(opened.source, opened.checkpoint.files, job.source.blobs, chosen=()).executables
        for each in items:
            name = each.file.split("!")[1]
            if each.verdict == "dangerous" and not keep:
                raise UnreadableError(
                    f"loading the item {name!r} would run {describe_executable(each)}",
                    where=each.file,
                    hint=f"--exclude {escape_name(name)!r} leaves it out; --keep-pickles copies it",
                )
            told += [f"{name} ({describe_executable(each)})"] * (each.verdict == "dangerous")
    if told and keep:
        job.notes.append(f"copied pickles and code, which run when they are loaded: {first_few(told, 6)}")
    elif told:
        left = {asset.source_file: found[asset.file] for _, asset in job.assets if found[asset.file]}
        target = format_of(job.target)
        if (target.loads_by_dcp or target.has_parts) and (needed := sorted(left.keys() & judge(job.opened).needed)):
            raise UnreadableError(
                f"loading {needed[0]} could run {left[needed[0]]}, and the trainer does not resume without it",
                where=job.opened.source.root,
                hint="--keep-pickles copies it; `ckpt gather`, or --for plain, takes the model alone",
            )
        job.notes.append(f"left out pickles and code: {first_few(told, 6)}; --keep-pickles copies them")
        job.assets = [(source, asset) for source, asset in job.assets if not found[asset.file]]
