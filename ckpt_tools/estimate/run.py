"""Estimate from a process that imports no torch."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count

from ckpt_tools.checkpoint.formats.hollow_copy import skeleton
from ckpt_tools.checkpoint.formats.opening import open_path
from ckpt_tools.checkpoint.layout import Mesh
from ckpt_tools.checkpoint.transform import is_optimizer
from ckpt_tools.errors import CkptError, RefusedConfigError, UsageError
from ckpt_tools.estimate import formula
from ckpt_tools.estimate.case import Case, Margin, margin_of
from ckpt_tools.estimate.model_sizes import OPTIMIZERS, Figures, figures_from_counts, figures_from_shapes
from ckpt_tools.estimate.options import SIZES_HINT, EstimateOptions, cases_of
from ckpt_tools.estimate.report import CaseEstimate, Estimate, Memory, Proposal
from ckpt_tools.memory import peak_rss_bytes
from ckpt_tools.models.config import component_of, config_path, read_config
from ckpt_tools.options import takes
from ckpt_tools.options.estimate import DEFAULT_LORA_RANK
from ckpt_tools.sandbox.child import Child, Here, build_in_sandbox
from ckpt_tools.storage.locations import exists, is_directory, is_file, likely
from ckpt_tools.storage.source import read_named_file
from ckpt_tools.text import escape_name

ESTIMATE = "ckpt_tools.estimate.run:estimate_in_child"
_PROGRESS = "progress"  # File in which a child says where it is
_NO_CONFIG = "there is no config.json, so there is no model to run"


@takes(EstimateOptions, 'ckpt_tools.estimate("model", mesh=8, gpu_memory="80GB").fits', "True")
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
            result = child.result(None, on_wait=partial(_pass_on, child, options.on_case or (lambda _: None)))
    notes = (f"estimated: {which}", *result.notes) if which else result.notes
    return replace(result, notes=notes, seconds=time.perf_counter() - start)


def _pass_on(child: Child[Estimate], on_case: Callable[[str], None]) -> None:
    with suppress(CkptError):  # it has not begun; what it writes is a stranger's
        said = read_named_file(os.path.join(child.directory, _PROGRESS), what="its progress", max_bytes=100)
        if said:  # it is not just being written
            on_case(escape_name(said.decode("utf-8", "replace")))


@contextmanager
def start_estimate(options: EstimateOptions) -> Iterator[Child[Estimate]]:
    """Lend a process that estimates."""
    relief = "stop other processes, or use only the formula (--params, --layers, --hidden)"
    with ExitStack() as stack:
        if options.path is not None:
            options = replace(options, model=stack.enter_context(skeleton(options.path)))
        options = replace(options, on_case=None)  # which stays here
        yield stack.enter_context(Child(ESTIMATE, options, Estimate, does="estimates", relief=relief, sandboxed=True))


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
        # Without a class of transformers or diffusers, the weights beside it answer.
        return file if is_file(file) and read_config(file, hint=SIZES_HINT).architecture is not None else None
    if not exists(path):
        raise UsageError("no such file or directory", where=path, hint=likely(path) or SIZES_HINT)
    if not path.endswith(".json") or path.endswith(".index.json"):
        return None
    return path


def _find_figures(options: EstimateOptions) -> tuple[str, Figures, tuple[str, ...]]:
    """Return the name, the figures and what they leave open, of a model without a config."""
    if options.path is None:
        if options.num_params is None or options.layers is None or options.hidden is None:
            raise UsageError("the size of the model is not given", hint="add --params, --layers and --hidden")
        figures = figures_from_counts(
            params=options.num_params, layers=options.layers, hidden=options.hidden, vocab=options.vocab
        )
        title = f"{options.layers} layers of width {options.hidden}"
        return title, figures, ("assumes a Llama-like decoder: gated feed-forward network, untied head",)
    try:
        with open_path(options.path, as_part=True) as opened:
            identity = opened.identity
            shapes = {entry.fqn: entry.shape for entry in opened.checkpoint.tensors if not is_optimizer(entry)}
    except CkptError as error:
        if error.hint is None:
            error.hint = SIZES_HINT
        raise
    figures, notes = figures_from_shapes(shapes)
    kinds = ", ".join(f"{block.count} × {block.params:,} parameters" for block in figures.blocks)
    title = f"{escape_name(options.path)}: {identity.title}; {len(shapes)} tensors, blocks: {kinds}"
    return title, figures, ("sizes come from the checkpoint's tensors", *notes)


# From cases to an estimate: formula and tracker side by side, what fits, and what to change when nothing does

Track = Callable[[Case], Memory | str]  # Returns what was tracked, or why it cannot be
_ROUGH = 1.5  # How far the formula may be below where it is the only opinion on a pipeline or on a cut sequence
_HOPELESS = 1.25  # A proposal that by the formula needs so many times the device's memory is not worth a tracked step
_MAX_TRACKED = 4  # Proposals that are tracked at most: each costs seconds
MIN_SEQ_LEN = 256  # Shorter sequences are not proposed
COMPILED_AWAY = 0.5
"""Part of the activations that torch.compile saves at most: element-wise results that it computes again."""
OFFLOAD_UNDERESTIMATE = 1.7
"""What a peak with offload has to be multiplied by, at most, where it is the formula's or of 4-bit weights: it is 0.59
of what PEFT's documentation ("Fully Sharded Data Parallel") says of QLoRA with FSDP and offload of a 70B model."""


def evaluate(figures: Figures, options: EstimateOptions, track: Track) -> tuple[CaseEstimate, ...]:
    """Return the estimate of every case that `options` ask for."""
    return tuple(
        _judged(figures, case, formula.estimate(figures, case), track(case), options.gpu_bytes)
        for case in cases_of(options)
    )


def _judged(
    figures: Figures, case: Case, by_formula: Memory, found: Memory | str, gpu_memory: int | None
) -> CaseEstimate:
    tracked, why_not = (None, found) if isinstance(found, str) else (found, None)
    memory = tracked or by_formula
    margin = margin_of(memory.peak, case.mesh)
    fits, doubt = None, None
    if gpu_memory is not None:
        has_experts = any(block.experts for block in figures.blocks)
        fits, doubt = judge(case, memory, margin, gpu_memory, is_tracked=tracked is not None, has_experts=has_experts)
    return CaseEstimate(
        case=case, formula=by_formula, tracked=tracked, why_not_tracked=why_not, margin=margin, fits=fits, doubt=doubt
    )


def judge(
    case: Case, memory: Memory, margin: Margin, gpu_memory: int, *, is_tracked: bool, has_experts: bool = False
) -> tuple[bool | None, str | None]:
    """Return whether a case fits; None and the reason where the estimate does not decide."""
    fits = memory.peak + margin.total <= gpu_memory
    is_doubtful = case.offload and (case.quantize is not None or not is_tracked)
    if fits and is_doubtful and memory.peak * OFFLOAD_UNDERESTIMATE + margin.total > gpu_memory:
        return None, f"with offload the estimate can be {OFFLOAD_UNDERESTIMATE} times lower than what others measured"
    is_special = case.sequence_parallel or case.fused_loss or case.mesh.size("pp") > 1
    if fits and is_special and not is_tracked and memory.peak * _ROUGH + margin.total > gpu_memory:
        return None, "only the formula was used, which is rough for this parallelism"
    if fits and has_experts and not is_tracked:
        return None, "the formula does not cover what experts keep for backward"
    if fits:
        return True, None
    kept, tp = memory.at_peak.get("activations", 0), case.mesh.size("tp")
    is_said = case.sequence_parallel or case.loss_parallel
    less = (
        (
            0 if is_said else kept * (1 - 1 / tp),
            "activations are counted whole on every tp rank: add --sequence-parallel, --loss-parallel if they are cut",
        ),
        (
            kept * COMPILED_AWAY if case.compile and not case.activation_checkpointing else 0,
            "torch.compile keeps fewer activations; how many fewer is not known",
        ),
        (
            memory.at_peak.get("optimizer", 0) if OPTIMIZERS[case.optimizer].is_paged else 0,
            "a paged optimizer can move state off the device; how much is not known",
        ),
    )
    for cut, doubt in less:
        if memory.peak - cut + margin.total <= gpu_memory:
            return None, doubt
    return fits, None


def propose(
    figures: Figures, options: EstimateOptions, cases: tuple[CaseEstimate, ...], track: Track
) -> tuple[Proposal, ...]:
    """Try changes, the cheapest first, until one fits, tracked or by the formula; none where something fits already."""
    if options.gpu_bytes is None or any(case.fits for case in cases):
        return ()
    start = min(cases, key=lambda case: case.needed).case
    proposals: list[Proposal] = []
    num_tracked = 0
    factors = (2, 4, 8) if options.world_size is None else ()  # who says how many ranks there are has no others
    for what, case in _changes(start, factors):
        if any(case == done.case for done in (*cases, *(proposal.estimate for proposal in proposals))):
            continue
        by_formula = formula.estimate(figures, case)
        needed = by_formula.peak + margin_of(by_formula.peak, case.mesh).total
        found: Memory | str = "far from fitting"
        if needed < _HOPELESS * options.gpu_bytes:
            found = track(case) if num_tracked < _MAX_TRACKED else f"at most {_MAX_TRACKED} proposals are tracked"
            num_tracked += not isinstance(found, str)
        proposals.append(Proposal(what=what, estimate=_judged(figures, case, by_formula, found, options.gpu_bytes)))
        if proposals[-1].estimate.fits:
            break
    return tuple(proposals)


def _changes(start: Case, factors: Sequence[int]) -> Iterator[tuple[str, Case]]:
    """Yield changes of `start`, what costs least first: compute, more ranks, what is trained, speed, data."""
    checkpointing = replace(start, activation_checkpointing=True, selective_checkpointing=False)
    if not start.activation_checkpointing:
        yield "--activation-checkpointing", checkpointing
    base, words = start, ""
    if start.strategy != "full_shard":
        base, words = _sharded(start), "--strategy full_shard"
        yield words, base
    if not start.activation_checkpointing:
        base = replace(base, activation_checkpointing=True, selective_checkpointing=False)
        words = f"{words} --activation-checkpointing".strip()
        yield words, base
    for factor in factors:
        mesh = _more(base.mesh, factor)
        yield f"{words} --mesh {mesh}".strip(), replace(base, mesh=mesh)
    if base.lora is None:
        adapted = replace(base, lora=DEFAULT_LORA_RANK)
        yield f"{words} --lora".strip(), adapted
    else:
        adapted = base
    added = "" if base.lora is not None else " --lora"
    if base.quantize is None:
        yield f"{words}{added} --quantize nf4".strip(), replace(adapted, quantize="nf4")
    if not base.offload:
        yield f"{words} --offload".strip(), replace(base, offload=True)
    length = base.seq_len // 2
    while length >= MIN_SEQ_LEN:
        yield f"{words} --seq-len {length}".strip(), replace(base, seq_len=length)
        length //= 2
    last = replace(adapted, quantize="nf4", offload=True, seq_len=min(base.seq_len, MIN_SEQ_LEN))
    yield f"{words}{added} --quantize nf4 --offload --seq-len {last.seq_len}".strip(), last


def _sharded(case: Case) -> Case:
    tail = tuple((name, size) for name, size in case.mesh.axes if name not in ("dp_replicate", "dp_shard"))
    num = case.mesh.size("dp_replicate") * case.mesh.size("dp_shard")
    return replace(case, strategy="full_shard", mesh=Mesh((("dp_shard", num), *tail)))


def _more(mesh: Mesh, factor: int) -> Mesh:
    return Mesh(tuple((name, size * factor if name == "dp_shard" else size) for name, size in mesh.axes))


def estimate_in_child(options: EstimateOptions, here: Here) -> Estimate:
    """Estimate; what `run.start_estimate` calls in a child."""
    start = time.perf_counter()
    config = config_of(options)
    try:
        result = by_formula(options) if config is None else _track(options, os.path.abspath(config), here)
    except RefusedConfigError as error:
        error.hint = SIZES_HINT  # there is no --factory here
        raise
    return replace(result, notes=with_assumptions(result), seconds=time.perf_counter() - start)


def _track(options: EstimateOptions, config: str, here: Here) -> Estimate:
    found = read_config(config, hint=SIZES_HINT)
    import torch

    from ckpt_tools.estimate.model import figures_of, notes_of
    from ckpt_tools.estimate.track import track
    from ckpt_tools.models.recipe_of import recipe_of

    torch.set_num_threads(1)
    try:
        recipe = recipe_of(found.values, found.where, otherwise=SIZES_HINT)
    except RefusedConfigError:
        raise
    except UsageError as error:  # without the library, or with a class that it does not know, the weights answer
        if "_class_name" not in found.values or not os.path.isdir(options.path or ""):
            raise
        result = by_formula(options)
        return replace(result, notes=(f"estimated by the formula only: {error.what}", *result.notes))
    build_in_sandbox(here, subject=f"a {recipe.title}", where=found.where, foreign=(os.path.dirname(config),))
    numbers, total = count(1), len(cases_of(options))

    def follow(case: Case) -> Memory | str:
        number = next(numbers)
        with open(os.path.join(here.directory, _PROGRESS), "w", encoding="utf-8") as file:
            file.write(f"tracing {number} of {total} ways" if number <= total else f"tracing change {number - total}")
        return track(recipe, case)

    result = estimate_of(options, recipe.title, figures_of(recipe), follow)
    return replace(result, notes=notes_of(recipe, options.seq_len))
