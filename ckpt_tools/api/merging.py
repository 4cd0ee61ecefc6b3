"""`merge_lora`."""

from __future__ import annotations

import math
import os
from contextlib import ExitStack

from ckpt_tools.adapters.ecosystems.peft.config import parse_overrides
from ckpt_tools.adapters.merge import merging_job
from ckpt_tools.adapters.options import MergeOptions
from ckpt_tools.adapters.read.opening import read_adapter
from ckpt_tools.conversions.job import Conversion
from ckpt_tools.conversions.run import run
from ckpt_tools.errors import UsageError
from ckpt_tools.formats.opening import open_path
from ckpt_tools.options import default_num_workers, takes


@takes(MergeOptions)
def merge_lora(options: MergeOptions) -> Conversion:
    """Merge an adapter of any family into its base, streaming.

    Tensors that the adapter does not change are copied as bytes. Adapted ones are computed in float32 and cast once.
    Memory: a few blocks and the adapter; for families that mix the rows of a weight (LyCORIS' OFT and BOFT, DoRA by
    column) a few times the largest weight that they adapt. A base of safetensors gives safetensors; one in DCP gives
    DCP, on its mesh.

    Raises:
        UsageError: A module that does not fit the base, or an unknown setting on which the result depends.
        UnreadableError: Base or adapter are incomplete or damaged.
        MergeUnchangedError: Tensors come out unchanged, although the adapter changes them.
        DestinationExistsError: The destination exists.
    """
    if not math.isfinite(options.scale) or not options.scale:
        what = "is no number" if options.scale else "leaves nothing of what the adapter adds"
        raise UsageError(f"a scale of {options.scale:g} {what}", where="--scale", hint="1 adds it as it was trained")
    workers = options.num_workers or default_num_workers(computes=True)
    with ExitStack() as stack:
        opened = stack.enter_context(open_path(os.fspath(options.base), format=options.format))
        read = stack.enter_context(
            read_adapter(
                os.fspath(options.adapter),
                adapter_name=options.adapter_name,
                include=options.include,
                exclude=options.exclude,
                settings=parse_overrides(options.config),
            )
        )
        job = stack.enter_context(merging_job(opened, read, options, num_workers=workers))
        return run(job, dry_run=options.dry_run)
