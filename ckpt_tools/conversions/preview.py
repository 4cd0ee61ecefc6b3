"""What a run in parts, or to a store, would take: for the notes of a dry run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckpt_tools.conversions.job import Job
from ckpt_tools.conversions.share import check_can_be_cut, elsewhere, find_place
from ckpt_tools.moving.plan import Plan, group_by_tensor
from ckpt_tools.moving.split import Part
from ckpt_tools.moving.task import Task
from ckpt_tools.remote.places import is_remote, open_shared_sink
from ckpt_tools.units import format_duration, format_size

_BYTES_PER_S = 5e8
"""Of one machine and a store in its region; where nothing was measured."""
_MAX_ITEMS = 1 << 17
"""Of a plan that is gone through block by block: a second or two."""


def preview(job: Job, plan: Plan) -> tuple[int, list[str]]:
    """Return the memory that it takes beside buffers, and what else, in words; nothing for one process and a disk."""
    part = job.part or Part(index=0, count=1)
    if part.count == 1 and not is_remote(job.destination):
        return 0, []
    check_can_be_cut(job)
    place = find_place(job, part)
    files = [place.files[i] for i in place.shares[part.index]]
    sizes = [job.target.files[file] for file in files]
    memory, passes = 0, [range(len(files))]
    notes: list[str] = []
    if is_remote(job.destination):
        with open_shared_sink(job.destination) as sink:
            memory, said = sink.preview(sizes)
            notes += said
            passes = list(sink.passes(sizes))
    if part.count > 1:
        notes.append(f"part {part} of that is {len(files)} data files, {format_size(sum(sizes))}")
    runs = [[files[i] for i in span] for span in passes]
    return memory, [*notes, _describe_reading(job, plan, place.files, runs, sum(sizes))]


def _describe_reading(job: Job, plan: Plan, every: Sequence[str], passes: Iterable[Sequence[str]], written: int) -> str:
    read = num_items = 0
    for files in filter(None, passes):
        before = elsewhere(job, set(every[: every.index(files[0])]))
        planned = plan.files_of(frozenset(files))
        num_items += sum(len(file.copies) for file in planned)
        if num_items > _MAX_ITEMS:
            return "how often source bytes are read was not computed; at most twice where all is cut along dim 0"
        for entry, copies in group_by_tensor(planned):
            read += Task(0, entry, copies, None, counting=False, before=before.get(entry.fqn)).read_bytes()
    factor = f", {read / written:.2f} × what is written" if written else ""
    seconds = format_duration((read + written) / _BYTES_PER_S)
    return f"reads {format_size(read)}{factor}; reading and writing at 0.5 GB/s takes {seconds}"
