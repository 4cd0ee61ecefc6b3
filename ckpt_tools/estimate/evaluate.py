"""From cases to an estimate: formula and tracker side by side, what fits, and what to change when nothing does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ckpt_tools.description.layout import Mesh
from ckpt_tools.estimate import formula
from ckpt_tools.estimate.case import Case
from ckpt_tools.estimate.figures import Figures
from ckpt_tools.estimate.margin import Margin, margin_of
from ckpt_tools.estimate.options import EstimateOptions, cases_of
from ckpt_tools.estimate.report import CaseEstimate, Memory, Proposal
from ckpt_tools.estimate.tables import OPTIMIZERS
from ckpt_tools.options.estimate import DEFAULT_LORA_RANK

Track = Callable[[Case], Memory | str]
"""Returns what was tracked, or why it cannot be."""
_ROUGH = 1.5
"""How far the formula may be below where it is the only opinion on a pipeline or on a cut sequence."""
_HOPELESS = 1.25
"""A proposal that by the formula needs so many times the device's memory is not worth a tracked step."""
_MAX_TRACKED = 4
"""Proposals that are tracked at most: each costs seconds."""
MIN_SEQ_LEN = 256
"""Shorter sequences are not proposed."""
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
        case=case,
        formula=by_formula,
        tracked=tracked,
        why_not_tracked=why_not,
        margin=margin,
        fits=fits,
        doubt=doubt,
    )


def judge(
    case: Case, memory: Memory, margin: Margin, gpu_memory: int, *, is_tracked: bool, has_experts: bool = False
) -> tuple[bool | None, str | None]:
    """Return whether a case fits; None and the reason where the estimate does not decide."""
    fits = memory.peak + margin.total <= gpu_memory
    is_doubtful = case.offload and (case.quantize is not None or not is_tracked)
    if fits and is_doubtful and memory.peak * OFFLOAD_UNDERESTIMATE + margin.total > gpu_memory:
        return None, f"with offload the estimate is as low as 1/{OFFLOAD_UNDERESTIMATE} of what was measured elsewhere"
    is_special = case.sequence_parallel or case.fused_loss or case.mesh.size("pp") > 1
    if fits and is_special and not is_tracked and memory.peak * _ROUGH + margin.total > gpu_memory:
        return None, "by the formula alone, which knows this parallelism only roughly"
    if fits and has_experts and not is_tracked:
        return None, "the formula does not know what experts keep for backward"
    if fits:
        return True, None
    kept, tp = memory.at_peak.get("activations", 0), case.mesh.size("tp")
    is_said = case.sequence_parallel or case.loss_parallel
    less = (
        (
            0 if is_said else kept * (1 - 1 / tp),
            "activations are counted whole on every tp rank: pass --sequence-parallel, --loss-parallel if they are cut",
        ),
        (
            kept * COMPILED_AWAY if case.compile and not case.activation_checkpointing else 0,
            "torch.compile keeps fewer activations, and how many fewer is not known",
        ),
        (
            memory.at_peak.get("optimizer", 0) if OPTIMIZERS[case.optimizer].is_paged else 0,
            "pages of the optimizer's state can leave the device, and how many will is not known",
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
    for what, case in _changes(start):
        if any(case == done.case for done in (*cases, *(proposal.estimate for proposal in proposals))):
            continue
        by_formula = formula.estimate(figures, case)
        needed = by_formula.peak + margin_of(by_formula.peak, case.mesh).total
        found: Memory | str = "by the formula it is far from fitting"
        if needed < _HOPELESS * options.gpu_bytes:
            found = track(case) if num_tracked < _MAX_TRACKED else "enough proposals were tracked"
            num_tracked += not isinstance(found, str)
        proposals.append(Proposal(what=what, estimate=_judged(figures, case, by_formula, found, options.gpu_bytes)))
        if proposals[-1].estimate.fits:
            break
    return tuple(proposals)


def _changes(start: Case) -> Iterator[tuple[str, Case]]:
    """Yield changes of `start`, what costs least first: compute, hardware, what is trained, speed, data."""
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
    for factor in (2, 4, 8):
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
