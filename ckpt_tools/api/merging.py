"""`merge_lora`."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import ExitStack

from ckpt_tools.adapters.ecosystems.peft.config import parse_overrides
from ckpt_tools.adapters.merge import merging_job
from ckpt_tools.adapters.options import MergeOptions
from ckpt_tools.adapters.read.opening import read_adapter
from ckpt_tools.conversions.job import Conversion
from ckpt_tools.conversions.run import run
from ckpt_tools.errors import UsageError
from ckpt_tools.formats.opening import open_path
from ckpt_tools.quantised.decoded import dequantised, is_quantised
from ckpt_tools.options import AnyPath, default_num_workers, takes


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
    paths = [os.fspath(path) for path in _listed(options.adapter)]
    weights = _weights(options, paths)
    workers = options.num_workers or default_num_workers(computes=True)
    with ExitStack() as stack:
        opened = stack.enter_context(open_path(os.fspath(options.base), format=options.format))
        if is_quantised(opened):
            opened = dequantised(opened, options.dtype)
        reads = {
            path: stack.enter_context(
                read_adapter(
                    path,
                    adapter_name=options.adapter_name,
                    include=options.include,
                    exclude=options.exclude,
                    settings=parse_overrides(options.config),
                )
            )
            for path in paths
        }
        job = stack.enter_context(merging_job(opened, reads, weights, options, num_workers=workers))
        return run(job, dry_run=options.dry_run)


def _listed(adapter: AnyPath | Sequence[AnyPath]) -> Sequence[AnyPath]:
    return [adapter] if isinstance(adapter, str | os.PathLike) else adapter


def _weights(options: MergeOptions, paths: Sequence[str]) -> list[float]:
    """Return what multiplies each adapter's change.

    Raises:
        UsageError: Not a number for each of them, or an adapter that is given twice.
    """
    places = [os.path.realpath(path) for path in paths]
    if twice := [path for path, place in zip(paths, places, strict=True) if places.count(place) > 1]:
        raise UsageError("the same adapter is given twice", where=twice[0], hint="--weights says how much it counts")
    given = options.weights if isinstance(options.weights, str) else ",".join(map(str, options.weights))
    if options.scale is not None and (given or len(paths) > 1):
        raise UsageError("--scale is for one adapter", hint="--weights has a number for each")
    flag = "--weights" if given else "--scale"
    try:
        weights = [float(part) for part in given.split(",")] if given else [1.0] * len(paths)
    except ValueError:
        raise UsageError(f"--weights must be numbers, got {given!r}", hint="--weights 1,0.5") from None
    if options.scale is not None:
        weights = [options.scale]
    if len(weights) != len(paths):
        what = f"--weights has {len(weights)} numbers for {len(paths)} adapters"
        raise UsageError(what, hint="one for each, in their order")
    if not all(map(math.isfinite, weights)) or not any(weights):
        shown = ",".join(f"{weight:g}" for weight in weights)
        what = "leaves nothing of what is added" if not any(weights) else "is no number"
        raise UsageError(f"{flag} {shown} {what}", where=flag, hint="1 adds an adapter as it was trained")
    return weights
