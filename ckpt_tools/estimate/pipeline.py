"""Stages of a pipeline: which layers a rank has, and how many micro-batches it keeps activations of. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_tools.errors import UsageError
from ckpt_tools.estimate.case import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What one rank of a pipeline has of the model."""

    rank: int
    first: int
    count: int
    """Its layers: of all of its stages together, where a schedule gives it several."""
    has_embedding: bool = True
    has_output: bool = True
    in_flight: float = 1.0
    """Forwards whose activations it keeps at one time, each through all of its layers."""


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
