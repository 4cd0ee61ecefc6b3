"""Estimate from a process that imports no torch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from ckpt_tools.description.transform import is_optimizer
from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.estimate.evaluate import Track, evaluate, propose
from ckpt_tools.estimate.figures import Figures, figures_from_counts, figures_from_shapes
from ckpt_tools.estimate.options import SIZES_HINT, EstimateOptions
from ckpt_tools.estimate.report import Estimate
from ckpt_tools.formats.opening import open_path
from ckpt_tools.formats.skeleton import skeleton
from ckpt_tools.memory import peak_rss_bytes
from ckpt_tools.models.config import component_of, config_path, read_config
from ckpt_tools.options import takes
from ckpt_tools.processes.child import Child
from ckpt_tools.remote.places import exists, is_directory, is_file
from ckpt_tools.text import escape_name

ESTIMATE = "ckpt_tools.estimate.child:estimate"
_NO_CONFIG = "there is no config.json, so there is nothing to run"


@takes(EstimateOptions)
def estimate(options: EstimateOptions) -> Estimate:
    """Estimate how much memory training a model takes on the rank that holds the most; nothing is allocated.

    With a config.json, a training step runs without data and is tracked; otherwise a formula gives the estimate.

    Raises:
        UsageError: Invalid options, an impossible mesh, or a model that cannot be built.
        UnreadableError: The checkpoint cannot be described.
    """
    start = time.perf_counter()
    which = ""
    if options.path is not None:
        path, which = component_of(options.path)
        options = replace(options, model=path)
    if config_of(options) is None:
        result = by_formula(options)
        result = replace(result, notes=with_assumptions(result))
    else:
        with start_estimate(options) as child:
            result = child.result(None)
    notes = (f"estimated is {which}", *result.notes) if which else result.notes
    return replace(result, notes=notes, seconds=time.perf_counter() - start)


@contextmanager
def start_estimate(options: EstimateOptions) -> Iterator[Child[Estimate]]:
    """Lend a process that estimates."""
    relief = "stop other processes, or use only the formula (--params, --layers, --hidden)"
    with ExitStack() as stack:
        if options.path is not None:
            options = replace(options, model=stack.enter_context(skeleton(options.path)))
        yield stack.enter_context(Child(ESTIMATE, options, Estimate, does="estimates", relief=relief, walled=True))


def by_formula(options: EstimateOptions) -> Estimate:
    """Return what the formula says, from figures or from a checkpoint's headers."""
    title, figures, notes = _find_figures(options)
    return replace(estimate_of(options, title, figures, lambda _: _NO_CONFIG), notes=notes)


def estimate_of(options: EstimateOptions, title: str, figures: Figures, track: Track) -> Estimate:
    """Return what is estimated of a model, without notes."""
    cases = evaluate(figures, options, track)
    return Estimate(
        model=title,
        params=figures.params,
        cases=cases,
        gpu_memory=options.gpu_bytes,
        proposals=propose(figures, options, cases, track),
        peak_rss_bytes=peak_rss_bytes(),
    )


def with_assumptions(result: Estimate) -> tuple[str, ...]:
    """Return the notes of an estimate, and what its cases assume."""
    return (*result.notes, *dict.fromkeys(text for each in result.cases for text in each.case.assumptions))


def config_of(options: EstimateOptions) -> str | None:
    """Return the path of the config.json that `options.model` names, or None."""
    path = options.path
    if path is None:
        return None
    if is_directory(path):
        file = config_path(path)
        return file if is_file(file) and _names_architecture(file) else None
    if not exists(path):
        raise UsageError("no such file or directory", where=path, hint=SIZES_HINT)
    if not path.endswith(".json") or path.endswith(".index.json"):
        return None
    return path


def _names_architecture(path: str) -> bool:
    """Does it name a class of transformers or diffusers? Otherwise the weights beside it answer."""
    return read_config(path, hint=SIZES_HINT).architecture is not None


def _find_figures(options: EstimateOptions) -> tuple[str, Figures, tuple[str, ...]]:
    """Return the name, the figures and what they leave open, of a model without a config."""
    if options.path is None:
        if options.num_params is None or options.layers is None or options.hidden is None:
            raise UsageError("the size of the model is not given", hint="--params, --layers and --hidden")
        figures = figures_from_counts(
            params=options.num_params, layers=options.layers, hidden=options.hidden, vocab=options.vocab
        )
        title = f"{options.layers} layers of width {options.hidden}"
        return title, figures, ("a decoder like Llama's is assumed: gated feed-forward network, two embeddings",)
    try:
        with open_path(options.path, as_part=True) as opened:
            identity = opened.identity
            shapes = {entry.fqn: entry.shape for entry in opened.checkpoint.tensors if not is_optimizer(entry)}
    except CkptError as error:
        if error.hint is None:
            error.hint = SIZES_HINT
        raise
    figures, notes = figures_from_shapes(shapes)
    kinds = ", ".join(f"{block.count} of {block.params:,} parameters" for block in figures.blocks)
    title = f"{escape_name(options.path)}: {identity.title}; {len(shapes)} tensors, blocks: {kinds}"
    return title, figures, ("sizes are those of the checkpoint's tensors", *notes)
