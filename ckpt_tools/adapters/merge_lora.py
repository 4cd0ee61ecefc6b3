"""`merge_lora`."""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

from ckpt_tools.adapters.ecosystems.peft.infer_config import parse_overrides
from ckpt_tools.adapters.merge import Weighted, merging_job
from ckpt_tools.adapters.read.opening import read_adapter
from ckpt_tools.checkpoint.entries import Asset, Checkpoint
from ckpt_tools.checkpoint.formats import step as steps_format
from ckpt_tools.checkpoint.formats.file_names import is_weights
from ckpt_tools.checkpoint.formats.manifest import MANIFEST_NAME
from ckpt_tools.checkpoint.formats.opening import Opened
from ckpt_tools.checkpoint.formats.repositories import PIPELINE_NAME
from ckpt_tools.convert.job import Conversion, Job, check_separate
from ckpt_tools.convert.run import run
from ckpt_tools.convert.to_step import outer_job
from ckpt_tools.errors import UsageError
from ckpt_tools.models.config import CONFIG_NAME, component_of
from ckpt_tools.options import default_num_workers, takes
from ckpt_tools.options.adapters import MergeOptions
from ckpt_tools.storage.locations import is_file, open_source
from ckpt_tools.text import first_few

# Merge into the directory of a diffusers pipeline: each component that an adapter is for, and the rest as it is

_KOHYA = re.compile(r"lora_(te\d?|unet|transformer)_")
_ENCODERS = {"te": (1,), "te1": (1,), "te2": (2,), "te3": (3, 2)}
"""What kohya calls a text encoder → its number, the first that is there. FLUX's T5 is te3 without a third."""


@contextmanager
def pipeline_job(options: MergeOptions, adapters: Mapping[str, Weighted], *, num_workers: int) -> Iterator[Job]:
    """Yield the job that writes a pipeline with adapters merged into its components; otherwise as `merging_job`."""
    path, destination = os.fspath(options.base), os.fspath(options.destination)
    trained = os.path.basename(component_of(path)[0])
    with ExitStack() as stack:
        source = stack.enter_context(open_source(path))
        files = source.list_files()
        components = {
            os.path.dirname(name) for name in files if name.count("/") == 1 and name.endswith(f"/{CONFIG_NAME}")
        }
        chosen: dict[str, dict[str, Weighted]] = defaultdict(dict)
        for name, given in adapters.items():
            for component, paths in _components(given, options.component or trained, components, options).items():
                modules = [module for module in given[0].adapter.modules if module.path in paths]
                read = given[0]._replace(adapter=given[0].adapter.with_modules(modules))
                chosen[component][name] = read, given[1]
        parts = {}
        for component, own in chosen.items():
            base, into = os.path.join(path, component), os.path.join(destination, component)
            one = replace(options, base=base, destination=into)
            parts[component] = stack.enter_context(merging_job(one, own, num_workers=num_workers))
        root = Checkpoint(root=source.root, format=steps_format.FORMAT.name, tensors=())
        job = outer_job(Opened(format=steps_format.FORMAT, checkpoint=root, source=source), destination, parts, None)
        check_separate(job.opened, destination)
        rest = {
            name: size for name, size in files.items() if name.partition("/")[0] not in parts and name != MANIFEST_NAME
        }
        models = [name for name in rest if "/" not in name and is_weights(name)]
        job.assets = [(source, Asset(file=name, nbytes=size)) for name, size in rest.items() if name not in models]
        job.notes = [
            f"a diffusers pipeline: {first_few(list(parts))} changed; {len(job.assets)} other files are copied"
        ]
        job.notes += [f"left out, as whole models without the change: {first_few(models)}"] if models else []
        job.overwrite, job.num_workers, job.progress = options.overwrite, num_workers, options.progress
        job.keep_pickles = options.keep_pickles
        job.edit_bytes = max(part.edit_bytes for part in parts.values())

        def prepare() -> None:  # before the job is told from others, of which parts may be there
            for part in parts.values():
                if part.prepare is not None:
                    part.prepare()
                    part.prepare = None

        job.prepare = prepare
        yield job


def _components(
    given: Weighted, trained: str, components: Collection[str], options: MergeOptions
) -> Mapping[str, Collection[str]]:
    """Return component → paths of the modules that are for it, by their names."""
    found: dict[str, set[str]] = defaultdict(set)
    for module in given[0].adapter.modules:
        first, flat = module.path.partition(".")[0], _KOHYA.match(module.path)
        names: tuple[str, ...] = (trained,)
        if flat is not None:
            numbers = _ENCODERS.get(flat[1], ())
            names = tuple("text_encoder" + f"_{number}" * (number > 1) for number in numbers) or names
        elif first in components or first.startswith("text_encoder"):
            names = (first,)
        component = next((name for name in names if name in components), names[0])
        component = trained if options.component else component
        found[component].add(module.path)
    if missing := sorted(found.keys() - components):
        what = f"the pipeline has no component {missing[0]!r}: {first_few(sorted(components), 9)}"
        hint = "--component NAME chooses one for the whole adapter; --exclude GLOB leaves tensors out"
        raise UsageError(what, where=os.fspath(options.base), hint=hint)
    return found


@takes(MergeOptions, 'ckpt_tools.merge_lora("model", "adapter", "merged").verified', "True")
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
        raise UsageError(f"--combine {options.combine} needs several adapters", hint="ckpt merge-lora BASE A B DST")
    workers = options.num_workers or default_num_workers(computes=True)
    is_pipeline = is_file(os.path.join(os.fspath(options.base), PIPELINE_NAME))
    if options.component and not is_pipeline:
        raise UsageError(f"--component needs a diffusers pipeline, with a {PIPELINE_NAME}", hint="leave it out")
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
        raise UsageError("the same adapter is given twice", where=twice[0], hint="weight it with --weights")
    given = options.weights if isinstance(options.weights, str) else ",".join(map(str, options.weights))
    flag, wanted = ("--weights", given) if given else ("--scale", str(options.scale))
    if options.scale is not None and (given or len(paths) > 1):
        raise UsageError("--scale applies to a single adapter", hint="use --weights, with one number for each")
    try:
        weights = [1.0] * len(paths) if wanted == "None" else [float(part) for part in wanted.split(",")]
    except ValueError:
        raise UsageError(f"--weights must be numbers, got {given!r}", hint="--weights 1,0.5") from None
    if len(weights) != len(paths):
        what = f"--weights has {len(weights)} numbers for {len(paths)} adapters"
        raise UsageError(what, hint="give one number for each, in the same order")
    if not all(map(math.isfinite, weights)) or not any(weights):
        what = f"{flag} {wanted} " + ("is not a number" if any(weights) else "adds nothing")
        raise UsageError(what, where=flag, hint="1 adds an adapter as it was trained")
    return weights
