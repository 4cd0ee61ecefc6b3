"""How much memory training takes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Literal

from ckpt_tools.estimate import Case, Estimate, EstimateOptions, run_estimate
from ckpt_tools.estimate.options import DEFAULT_LORA_RANK, Training
from ckpt_tools.options import AnyPath, Argument, MeshText, Option, WorldSize, takes
from ckpt_tools.units import parse_count, parse_size


@dataclass(frozen=True, kw_only=True)
class _ModelAndRanks:
    model: Annotated[
        AnyPath | None,
        Argument("A config.json or its directory; or a checkpoint without one, for the formula alone.", "[MODEL]"),
    ] = field(default=None, kw_only=False)
    params: Annotated[
        int | str | None,
        Option(
            "Parameters (7B) of a model without a config, for the formula; with --layers and --hidden.", metavar="N"
        ),
    ] = None
    layers: Annotated[int | None, Option("With --params: number of blocks.")] = None
    hidden: Annotated[int | None, Option("With --params: hidden size.")] = None
    vocab: Annotated[int | None, Option("With --params: rows of the output layer; 0 for none.")] = None
    mesh: MeshText = None
    world_size: WorldSize = None
    strategy: Annotated[
        str | Sequence[str] | None,
        Option(
            "Sharding strategy (repeatable; default: what suits the mesh); "
            "all shows all, with and without checkpointing.",
            metavar="full_shard|shard_grad_op|hybrid_shard|no_shard|all",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class EstimateCall(Training, _ModelAndRanks):
    """The options of `estimate`, as the user says them."""

    activation_checkpointing: Annotated[
        bool | Literal["both"],
        Option(
            "Recompute activations in the backward pass.",
            name="--activation-checkpointing/--no-activation-checkpointing",
            is_tristate=True,
        ),
    ] = False
    lora: Annotated[bool | int | None, Option("Freeze the model; train LoRA adapters on its linear layers.")] = None
    lora_rank: Annotated[
        int | None, Option(f"Rank of the adapters (default: {DEFAULT_LORA_RANK}); implies --lora.", min=1)
    ] = None
    gpu_memory: Annotated[
        str | int | None,
        Option(
            "Memory of a device (80GB): shows what fits; if nothing does, suggests a change that would.",
            metavar="SIZE",
        ),
    ] = None

    @property
    def rank(self) -> int | None:
        """Rank of the adapters; `lora` itself may say it."""
        if self.lora_rank is not None or self.lora is None or isinstance(self.lora, bool):
            return self.lora_rank or (DEFAULT_LORA_RANK if self.lora else None)
        return self.lora


@takes(EstimateCall)
def estimate(options: EstimateCall) -> Estimate:
    """Say how much memory training a model takes on the rank that holds the most; nothing is allocated.

    With a config.json, a step is run without data, and tracked; otherwise a formula answers.

    Raises:
        UsageError: Options or a mesh that cannot be, or a model that cannot be built.
        UnreadableError: The checkpoint cannot be described.
    """
    strategy, both = options.strategy, options.activation_checkpointing == "both"
    common = {each.name: getattr(options, each.name) for each in fields(Training)}
    return run_estimate(
        EstimateOptions(
            model=None if options.model is None else os.fspath(options.model),
            params=parse_count(options.params) if isinstance(options.params, str) else options.params,
            layers=options.layers,
            hidden=options.hidden,
            vocab=options.vocab,
            mesh=None if options.mesh is None else str(options.mesh),
            world_size=options.world_size,
            strategies=() if strategy is None else (strategy,) if isinstance(strategy, str) else tuple(strategy),
            activation_checkpointing=(False, True) if both else (bool(options.activation_checkpointing),),
            gpu_memory=parse_size(options.gpu_memory) if isinstance(options.gpu_memory, str) else options.gpu_memory,
            case=Case(lora=options.rank, **common),
        )
    )
