"""`merge_lora`."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from ckpt_tools.adapters.ecosystems.peft.config import parse_overrides
from ckpt_tools.adapters.merge import merging_job
from ckpt_tools.adapters.pipeline import pipeline_job
from ckpt_tools.adapters.read.opening import read_adapter
from ckpt_tools.checkpoint.formats.repositories import PIPELINE_NAME
from ckpt_tools.convert.job import Conversion
from ckpt_tools.convert.run import run
from ckpt_tools.errors import UsageError
from ckpt_tools.options import default_num_workers, takes
from ckpt_tools.options.adapters import MergeOptions
from ckpt_tools.storage.locations import is_file


@takes(MergeOptions)
def merge_lora(options: MergeOptions) -> Conversion:
    """Merge adapters (LoRA, DoRA, LoHa, LoKr, OFT, BOFT, …) into their base, streaming.

    Of several adapters the weighted sum of their changes is added; `combine` names other methods, those of PEFT's
    `add_weighted_adapter`, for plain LoRA. Tensors that no adapter changes are copied as bytes. Adapted ones are
    computed in float32 and cast once. Memory: a few blocks and the adapters; for families that mix the rows of a weight
    (LyCORIS' OFT and BOFT, DoRA by column) and for methods that prune products (`…_svd`) a few times the largest weight
    that they adapt. A base of safetensors gives safetensors; one in DCP gives DCP, on its mesh.

    Raises:
        UsageError: A module that does not fit the base, an unknown setting on which the result depends, or adapters
            that have no sum.
        UnreadableError: Base or adapter are incomplete or damaged.
        MergeUnchangedError: Tensors come out unchanged, although the adapter changes them.
        DestinationExistsError: The destination exists.
    """
    given = options.adapter
    paths = [os.fspath(path) for path in ([given] if isinstance(given, str | os.PathLike) else given)]
    weights = _weights(options, paths)
    if options.combine != "sum" and len(paths) < 2:
        raise UsageError(f"--combine {options.combine} is for several adapters", hint="ckpt merge-lora BASE A B DST")
    workers = options.num_workers or default_num_workers(computes=True)
    is_pipeline = is_file(os.path.join(os.fspath(options.base), PIPELINE_NAME))
    if options.component and not is_pipeline:
        raise UsageError(f"--component is for a diffusers pipeline, which has a {PIPELINE_NAME}", hint="leave it out")
    with ExitStack() as stack:
        name, chosen, settings = options.adapter_name, options.include, parse_overrides(options.config)
        read = partial(read_adapter, adapter_name=name, include=chosen, exclude=options.exclude, settings=settings)
        adapters = {path: (stack.enter_context(read(path)), w) for path, w in zip(paths, weights, strict=True)}
        make = pipeline_job if is_pipeline else merging_job
        return run(stack.enter_context(make(options, adapters, num_workers=workers)), dry_run=options.dry_run)


def _weights(options: MergeOptions, paths: Sequence[str]) -> list[float]:
    """Return what multiplies each adapter's change."""
    if not paths:
        raise UsageError("no adapter is given", hint="ckpt merge-lora BASE ADAPTER DST")
    places = list(map(os.path.realpath, paths))
    if twice := [path for path, place in zip(paths, places, strict=True) if places.count(place) > 1]:
        raise UsageError("the same adapter is given twice", where=twice[0], hint="--weights says how much it counts")
    given = options.weights if isinstance(options.weights, str) else ",".join(map(str, options.weights))
    flag, wanted = ("--weights", given) if given else ("--scale", str(options.scale))
    if options.scale is not None and (given or len(paths) > 1):
        raise UsageError("--scale is for one adapter", hint="--weights has a number for each")
    try:
        weights = [1.0] * len(paths) if wanted == "None" else [float(part) for part in wanted.split(",")]
    except ValueError:
        raise UsageError(f"--weights must be numbers, got {given!r}", hint="--weights 1,0.5") from None
    if len(weights) != len(paths):
        what = f"--weights has {len(weights)} numbers for {len(paths)} adapters"
        raise UsageError(what, hint="one for each, in their order")
    if not all(map(math.isfinite, weights)) or not any(weights):
        what = f"{flag} {wanted} " + ("is no number" if any(weights) else "leaves nothing of what is added")
        raise UsageError(what, where=flag, hint="1 adds an adapter as it was trained")
    return weights
