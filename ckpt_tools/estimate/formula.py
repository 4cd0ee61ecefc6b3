"""Memory of one rank by arithmetic alone: the second opinion, and the only one where nothing can be tracked.

All results are bytes of the rank that holds the most. Letters:

    P  parameters of the model        T  that are trained: P, or adapters F  that are frozen: none, or P
    B  parameters of the largest block (what FSDP gathers at once)        B' those of them that are trained
    R  parameters in no block: the root's (embeddings, last norm, output) R' those of them that are trained
    Q  parameters that are quantised  L  number of blocks                 N  ranks that share a parameter
    m  bytes of a trained parameter between steps (master dtype)          q  the same for a frozen one
    c  bytes of a gathered parameter (param dtype)   r  bytes of a gradient on its way (reduce dtype)
    k  values of optimizer state per trained value   o  bytes of one of them (m with PyTorch's own optimizers)
    t  tokens of a step: sequence length × batch size
    h  width of the hidden state      O  outputs of all matrices of a block, summed up      V  rows of the output layer

Held all the time, per rank:

    params     (T·m + F·q) / N       with nf4: Q/2 / N packed, and 0.127 bits per weight of scales on every rank
    grads      T·m / N               from a block's backward to the end of the step
    optimizer  k·T·o / N

Activations. A block keeps what its matrices put out, once as it comes and once behind the element-wise operation that
follows, and the input of its norms: t·c·(2·O + 2·h). For a Llama block (O = 5·h + 2·f) these are 12·h + 4·f values per
token, against 11·h + 4·f that PyTorch keeps. With activation checkpointing every block keeps t·c·h, its input, and one
block at a time all of it. The loss takes t·V·12: logarithms of probabilities in f32, and with them
first the logits twice (as they come, and in f32), then two gradients in f32.

Gathered, when parameters are resharded: c·(R + 2·B), the root, a block and the next one, which is fetched early; when
they are kept: c·P, and c·B for the buffer that the next one arrives in. nf4 blocks are gathered packed, and one matrix
at a time is unpacked.

Tensor parallelism divides P, B, R and all that follows from them, and of a block's activations all but 8·h, its two
norms', since every rank has these for all of h; with sequence parallelism all but 2·h, what its two halves have
gathered. The loss is computed on every rank, or divided with loss parallelism. Context parallelism divides t.

Of a pipeline the formula answers for the stage that needs the most: its blocks, and its part of the root; activations
once for every micro-batch in flight; and T·r of gradients that wait for the last one.

Left out: attention that keeps its scores (eager, soft-capped), copies that some models make of keys and values, the
buffers of experts, and everything that is no matrix (convolutions, state-space models). There the tracker is right.

The peak is the largest of four moments:

    loss       what is held + gathered + all activations + the loss' own
    first      backward of the last block: what is held + gathered + its gradients B'·(c + r) and the output's
               + all activations
    last       backward of the first block: the same with the gradients of all others, and its own activations alone
    step       what is held + all gradients + two copies of this rank's part of the largest matrix

With offload, parameters, gradients and optimizer state are not on the device, and B·(m + r)/N passes through it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ckpt_tools.errors import UsageError
from ckpt_tools.estimate.case import Case
from ckpt_tools.estimate.model_sizes import DTYPE_BYTES, NF4_SCALE_BYTES, OPTIMIZERS, Block, Figures
from ckpt_tools.estimate.report import Memory

NF4_BYTES = 0.5  # Of a packed weight
LOSS_BYTES = 12  # Per token and word
STEP_COPIES = 2  # Temporary copies of one parameter in a step that goes parameter by parameter (`foreach=False`)


def estimate(figures: Figures, case: Case) -> Memory:
    """Return the memory of one rank in bytes."""
    stages = stages_of(figures.num_blocks, case)
    return max((_stage(_part(figures, stage, case), case, stage) for stage in stages), key=lambda found: found.peak)


def _part(figures: Figures, stage: Stage, case: Case) -> Figures:
    """Return the figures of a pipeline's stage: kinds of blocks are dealt out evenly."""
    if case.mesh.size("pp") == 1:
        return figures
    share = stage.count / figures.num_blocks
    blocks = tuple(replace(block, count=math.ceil(block.count * share)) for block in figures.blocks)
    rows = min(figures.root, figures.vocab * figures.hidden)
    root = rows * (stage.has_embedding + stage.has_output)
    params = root + sum(block.count * block.params for block in blocks)
    return replace(figures, params=params, blocks=blocks, vocab=figures.vocab if stage.has_output else 0)


def _stage(figures: Figures, case: Case, stage: Stage) -> Memory:
    largest = figures.largest
    # T, F, B', R' and Q
    trained, frozen, block_trained, root_trained, quantised = figures.params, 0, largest.params, figures.root, 0
    if case.lora is not None:
        trained = sum(block.count * case.lora * block.matrix_sides for block in figures.blocks)
        frozen, block_trained, root_trained = figures.params, case.lora * largest.matrix_sides, 0
        if case.quantize:
            quantised = sum(block.count * block.matrices for block in figures.blocks)
    tp = case.mesh.size("tp")
    shards = case.num_shards * tp
    c, r, m = (DTYPE_BYTES[name] for name in (case.param_dtype, case.reduce_dtype, case.master_dtype))
    q = m if case.lora is None else DTYPE_BYTES[case.frozen_dtype]
    plain = frozen - quantised
    params = (trained * m + plain * q + quantised * NF4_BYTES) / shards
    params += quantised * NF4_SCALE_BYTES / tp
    grads = trained * m / shards
    optimizer = state_bytes(case) * trained / shards

    # Experts are gathered from the ranks that have the same ones.
    block = (largest.params - largest.experts * (1 - 1 / case.num_expert_ranks)) * c / tp
    whole = (figures.params + (trained if case.lora else 0)) * c / tp
    unpacked = 0.0
    if case.quantize:
        block = (largest.matrices * NF4_BYTES + (largest.params - largest.matrices) * c) / tp
        whole -= quantised * (c - NF4_BYTES) / tp
        unpacked = largest.widest * c / tp
    block += block_trained * c / tp if case.lora else 0
    root = figures.root * c / tp
    gathered = whole + block if case.is_kept else root + 2 * block
    gathered += unpacked

    tokens = (figures.tokens or case.tokens_per_sample) * case.samples
    cut = tp if case.sequence_parallel else 1
    acts = [tokens * c * _kept_values(each, tp, case) for each in figures.blocks]
    one = max(acts, default=0.0)
    saved = sum((each.count * act for each, act in zip(figures.blocks, acts, strict=True)), start=0.0)
    if case.activation_checkpointing:
        saved = sum(tokens * c * each.hidden * each.count for each in figures.blocks) / cut
    elif case.selective_checkpointing:
        kept = (each.count * (2 * each.hidden + each.outputs / 2) for each in figures.blocks)
        saved = tokens * c * sum(kept) / (tp if case.sequence_parallel else 1)
    else:
        one = 0.0
    waiting = (stage.in_flight - 1) * saved
    if case.offload_activations:
        waiting, saved = 0.0, saved / max(1, figures.num_blocks)
    loss = tokens * figures.vocab * LOSS_BYTES / (tp if case.loss_parallel else 1)
    if case.fused_loss:
        loss = float(2 * tokens * c + figures.vocab * c) * figures.hidden
    # Gradients of the micro-batches before wait on all ranks whole.
    whole_grads = trained * r / tp if case.num_micro_batches > 1 else 0.0

    flying = block_trained * (c + r) / tp + min(root_trained, figures.vocab * figures.hidden) * c / tp
    others = max(0.0, grads - (block_trained + root_trained) * m / shards)
    biggest = max(largest.widest, figures.vocab * figures.hidden) if case.lora is None else block_trained
    step = STEP_COPIES * biggest * m / shards
    early = gathered - (0 if not case.is_kept else block)
    late = unpacked + flying + root + (block if case.is_kept else 2 * block)
    moments = (
        # grads, gathered, activations, step
        (0.0, early + whole_grads, waiting + saved + loss, 0.0),
        (0.0, gathered + flying + whole_grads, waiting + saved + one, 0.0),
        (others, late, waiting + one + saved / max(1, figures.num_blocks), 0.0),
        (grads, 0.0, 0.0, step),
    )
    away = case.offload or case.offload_optimizer
    held = 0.0 if case.offload else params
    state = 0.0 if case.offload else optimizer
    passing = largest.params * (q + (r if case.lora is None else 0)) / shards if case.offload else 0.0

    def total(moment: tuple[float, float, float, float]) -> float:
        if case.offload:
            return passing + moment[1] + moment[2]
        return held + sum(moment) + (state if moment[3] or not away else 0.0)

    best = max(moments, key=total)
    is_there = best[3] > 0 or not away
    at_peak = {
        "params": 0 if case.offload else round(params),
        "grads": 0 if case.offload else round(best[0]),
        "optimizer": round(state) if is_there else 0,
        "activations": round(best[2]),
        "gathered": round(best[1] + passing),
        "step": 0 if case.offload else round(best[3]),
    }
    return Memory(
        params=round(params),
        grads=round(grads),
        optimizer=round(optimizer),
        activations=round(waiting + saved + max(loss, one)),
        gathered=round(gathered + flying + whole_grads + passing),
        peak=sum(at_peak.values()),
        host=round(params + grads + optimizer) if case.offload else round(optimizer) if away else 0,
        at_peak=at_peak,
    )


def _kept_values(block: Block, tp: int, case: Case) -> float:
    """Return how many values per token a block keeps for backward."""
    values = 2 * block.outputs + 2 * block.hidden
    # With sequence parallelism only what the column-wise layers of both halves have gathered is whole.
    whole = min((2 if case.sequence_parallel else 8) * block.hidden, values)
    return whole + (values - whole) / tp


def state_bytes(case: Case) -> float:
    """Return the optimizer's bytes per trained value."""
    kind = OPTIMIZERS[case.optimizer]
    return kind.values * (kind.nbytes or DTYPE_BYTES[case.state_dtype or case.master_dtype])


# Stages of a pipeline: which layers a rank has, and how many micro-batches it keeps activations of. No torch.


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What one rank of a pipeline has of the model."""

    rank: int
    first: int
    count: int  # Its layers: of all of its stages together, where a schedule gives it several
    has_embedding: bool = True
    has_output: bool = True
    in_flight: float = 1.0  # Forwards whose activations it keeps at one time, each through all of its layers


def stages_of(num_layers: int, case: Case) -> tuple[Stage, ...]:
    """Return the stages that can need the most: the first, one from the middle, the last.

    Layers are dealt out as torchtitan does (`generate_llm_fqn_per_model_part`): embedding and output weigh as much as a
    layer each, and what is left over goes to the first stages.
    """
    num = case.mesh.size("pp")
    if num == 1:
        return (Stage(rank=0, first=0, count=num_layers),)
    base, extra = divmod(num_layers + 2, num)
    if num_layers < num:
        raise UsageError(f"pp={num} has more stages than the model layers ({num_layers})", where="--mesh")
    counts = [base + (rank < extra) for rank in range(num)]
    counts[0] -= 1
    counts[-1] -= 1
    return tuple(
        Stage(
            rank=rank,
            first=sum(counts[:rank]),
            count=counts[rank],
            has_embedding=rank == 0,
            # A V gives the first rank the last stage as well.
            has_output=rank == (0 if case.schedule == "zbv" else num - 1),
            in_flight=_in_flight(rank, num, case),
        )
        for rank in sorted({0, min(1, num - 1), num - 1})
    )


def _in_flight(rank: int, num: int, case: Case) -> float:
    """Return how many micro-batches a rank keeps, as `torch.distributed.pipelining.schedules` warms up."""
    limit = float(case.num_micro_batches)
    if case.schedule == "gpipe":
        return limit
    if case.schedule == "1f1b":
        return min(limit, num - rank)
    if case.schedule == "zbv":
        return min(limit, num)
    # Two stages a rank: all of a round through the first, then the warm-up of the second, and the one that is run.
    factor = 2 if case.schedule == "interleaved-1f1b" else 1
    return min(limit, (num + factor * (num - 1 - rank) + 1) / 2)
