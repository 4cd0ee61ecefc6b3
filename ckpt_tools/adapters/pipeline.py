"""Merge into the directory of a diffusers pipeline: each component that an adapter is for, and the rest as it is."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from ckpt_tools.adapters.merge import Weighted, merging_job
from ckpt_tools.checkpoint.entries import Asset, Checkpoint
from ckpt_tools.checkpoint.formats import step as steps_format
from ckpt_tools.checkpoint.formats.file_names import is_weights
from ckpt_tools.checkpoint.formats.manifest import MANIFEST_NAME
from ckpt_tools.checkpoint.formats.opening import Opened
from ckpt_tools.convert.job import Job, check_separate
from ckpt_tools.convert.to_step import outer_job
from ckpt_tools.errors import UsageError
from ckpt_tools.models.config import CONFIG_NAME, component_of
from ckpt_tools.options.adapters import MergeOptions
from ckpt_tools.storage.locations import open_source
from ckpt_tools.text import first_few

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
