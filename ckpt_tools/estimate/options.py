"""What to estimate: one model, and one or several ways to train it. No torch."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any

from ckpt_tools.checkpoint.layout import Mesh, parse_mesh
from ckpt_tools.errors import UsageError
from ckpt_tools.estimate.case import DEFAULT_WORLD_SIZE, Case
from ckpt_tools.estimate.model_sizes import DTYPE_BYTES, GPUS, OPTIMIZERS, gpu_bytes
from ckpt_tools.options import Doc, refuse_other
from ckpt_tools.options.common import find_strategy
from ckpt_tools.options.estimate import DEFAULT_LORA_RANK, SCHEDULES, EstimateFields, TrainingOptions
from ckpt_tools.units import parse_count, parse_size

STRATEGIES = ("no_shard", "shard_grad_op", "full_shard", "hybrid_shard")
"""From the one that needs the most memory; side by side they stand in this order."""

NODE_SIZE = 8  # Ranks that hybrid_shard cuts over when the mesh does not say
MAX_COUNT = 10**15  # Parameters, tokens or layers; more are a slip of the keyboard
MAX_WORLD_SIZE = 10**6
SIZES_HINT = "name a config.json, its directory or a checkpoint, or write --params 7B --layers 32 --hidden 4096"
"""What says how large a model is."""


_DP = ("dp_replicate", "dp_shard")


@dataclass(frozen=True, kw_only=True)
class EstimateOptions(EstimateFields):
    """The options of `ckpt estimate`, and what follows from them."""

    on_case: Annotated[
        Callable[[str], None] | None, Doc('Called often while steps are traced, e.g. with "tracing 3 of 12 ways".')
    ] = None

    def __post_init__(self) -> None:
        gpu_bytes = self.gpu_bytes
        _check_source(self)
        for option, value in (("--seq-len", self.seq_len), ("--batch-size", self.batch_size)):
            if value < 1:
                raise UsageError(f"{option} must be at least 1, got {value}")
            _check_count(option, value)
        for name in ("param_dtype", "reduce_dtype", "master_dtype", "frozen_dtype", "state_dtype"):
            if name != "state_dtype" or self.state_dtype is not None:
                refuse_other(getattr(self, name), DTYPE_BYTES, "a dtype", f"--{name.replace('_', '-')}")
        if self.optimizer not in OPTIMIZERS:
            raise UsageError(
                f"unknown optimizer {self.optimizer!r}", hint=f"--optimizer must be one of {', '.join(OPTIMIZERS)}"
            )
        if self.rank is not None and self.rank < 1:
            raise UsageError(f"--lora-rank must be at least 1, got {self.rank}", hint="for example --lora-rank 16")
        _check_count("--lora-rank", self.rank or 1)
        if self.quantize is not None:
            refuse_other(self.quantize, ("nf4",), "a quantisation", "--quantize")
        if self.quantize is not None and self.rank is None:
            raise UsageError("quantised weights cannot be trained", hint="add --lora, which trains adapters instead")
        if gpu_bytes is not None and gpu_bytes < 1 and self.gpu is None:
            raise UsageError("--gpu-memory must be positive", hint="for example --gpu-memory 80GB")
        for case in cases_of(self):
            _check_case(case)

    @property
    def path(self) -> str | None:
        """The model's."""
        return None if self.model is None else os.fspath(self.model)

    @property
    def num_params(self) -> int | None:
        """Parameters, where they are said instead of a model."""
        return parse_count(self.params) if isinstance(self.params, str) else self.params

    @property
    def gpu_bytes(self) -> int | None:
        """Memory of a device."""
        if self.gpu is not None:
            found = gpu_bytes(self.gpu)
            if found is None or self.gpu_memory is not None:
                both = "--gpu and --gpu-memory both set the device memory"
                raise UsageError(
                    f"unknown device {self.gpu!r}" if found is None else both,
                    hint=f"--gpu must be one of {', '.join(GPUS)}; or give the memory: --gpu-memory 80GB",
                )
            return found
        return parse_size(self.gpu_memory) if isinstance(self.gpu_memory, str) else self.gpu_memory

    @property
    def strategies(self) -> tuple[str, ...]:
        """Side by side; "all" stands for `STRATEGIES`; none for what suits the mesh."""
        return (self.strategy,) if isinstance(self.strategy, str) else tuple(self.strategy or ())

    @property
    def rank(self) -> int | None:
        """Rank of the adapters; `lora` itself may say it."""
        if self.lora_rank is not None or self.lora is None or isinstance(self.lora, bool):
            return self.lora_rank or (DEFAULT_LORA_RANK if self.lora else None)
        return self.lora


def _check_case(case: Case) -> None:
    """Refuse what contradicts itself."""
    tp, pp = case.mesh.size("tp"), case.mesh.size("pp")
    needs = (
        ("--sequence-parallel", case.sequence_parallel, tp > 1, "tp"),
        ("--loss-parallel", case.loss_parallel, tp > 1, "tp"),
        ("--micro-batches", case.micro_batches is not None, pp > 1, "pp"),
    )
    for option, is_given, has_axis, axis in needs:
        if is_given and not has_axis:
            raise UsageError(f"{option} needs a mesh with a {axis} axis", hint=f"add {axis}=N to --mesh")
    refuse_other(case.schedule, SCHEDULES, "a schedule", "--schedule")
    if case.loss_parallel and case.fused_loss:
        raise UsageError("--loss-parallel and --fused-loss exclude each other", hint="drop one of them")
    if case.activation_checkpointing and case.selective_checkpointing:
        raise UsageError("--selective-checkpointing and --activation-checkpointing exclude each other", hint="drop one")
    if case.num_micro_batches > case.batch_size:
        raise UsageError(f"{case.num_micro_batches} micro-batches exceed the batch size of {case.batch_size}")
    ranks = case.live_mesh.size("dp_shard") * tp
    if case.num_expert_ranks > 1 and (case.strategy == "no_shard" or ranks % case.num_expert_ranks):
        raise UsageError(
            f"experts cannot be sharded over {case.num_expert_ranks} of {ranks} ranks",
            hint="choose an --expert-parallel that divides dp_shard × cp × tp",
        )


def _check_source(options: EstimateOptions) -> None:
    figures = {"--params": options.num_params, "--layers": options.layers, "--hidden": options.hidden}
    given = [name for name, value in figures.items() if value is not None]
    if options.model is not None:
        extra = given + (["--vocab"] if options.vocab is not None else [])
        if extra:
            raise UsageError(f"MODEL and {', '.join(extra)} both describe the model", hint="drop one of them")
        return
    if len(given) < len(figures):
        missing = [name for name in figures if name not in given]
        raise UsageError(
            f"the size of the model is not given: {', '.join(missing)} missing" if given else "no model given",
            hint=SIZES_HINT,
        )
    for name, value in (*figures.items(), ("--vocab", options.vocab)):
        least = 0 if name == "--vocab" else 1
        if value is not None and value < least:
            raise UsageError(f"{name} must be at least {least}, got {value}")
        if value is not None:
            _check_count(name, value)


def _check_count(option: str, value: int) -> None:
    if value > MAX_COUNT:
        raise UsageError(f"{option} must be at most {MAX_COUNT}")


def _check_world(world: int) -> None:
    if not 1 <= world <= MAX_WORLD_SIZE:
        raise UsageError(f"--world-size must be between 1 and {MAX_WORLD_SIZE}, got {world}")


def parse_strategy(text: str) -> str:
    """Return one of `STRATEGIES`, or hybrid_shard_zero2, for any spelling of it."""
    name = find_strategy(text)
    if name is None:
        raise UsageError(f"unknown strategy {text!r}", hint=f"choose from {', '.join(STRATEGIES)}, or all")
    return name


def cases_of(options: EstimateOptions) -> tuple[Case, ...]:
    """Return every combination that is asked for, strategies first."""
    world = options.world_size
    if world is not None:
        _check_world(world)
    given = None
    if options.mesh is not None:
        text = str(options.mesh)
        needs = "-1" in text.replace(" ", "").replace("=", ",").split(",")
        given = parse_mesh(text, world_size=(world or DEFAULT_WORLD_SIZE) if needs else world)
        world = given.world_size
    world = world or DEFAULT_WORLD_SIZE
    _check_world(world)
    names = [parse_strategy(text) for text in options.strategies if text != "all"]
    if "all" in options.strategies:
        is_even = (world // math.prod(size for _, size in _tail(given))) % 2 == 0
        names = [name for name in STRATEGIES if name != "hybrid_shard" or is_even]
    if not names:
        names = [natural_strategy(given)]
    names = list(dict.fromkeys(names))
    is_one = len(names) == 1
    common: dict[str, Any] = {each.name: getattr(options, each.name) for each in fields(TrainingOptions)}
    recomputes = options.activation_checkpointing
    return tuple(
        Case(
            strategy=name,
            mesh=mesh_for(name, given, world, strict=is_one),
            activation_checkpointing=again,
            lora=options.rank,
            **common,
        )
        for name in names
        for again in ((False, True) if recomputes == "both" else (bool(recomputes),))
    )


def natural_strategy(mesh: Mesh | None) -> str:
    """Return what a mesh is usually for."""
    names = {name for name, _ in mesh.axes} if mesh is not None else set()
    if "dp_replicate" not in names:
        # Every micro-batch would gather the parameters anew.
        return "shard_grad_op" if mesh is not None and mesh.size("pp") > 1 else "full_shard"
    return "hybrid_shard" if "dp_shard" in names else "no_shard"


def _tail(given: Mesh | None) -> tuple[tuple[str, int], ...]:
    """Return the axes that are not data-parallel."""
    return tuple((name, size) for name, size in given.axes if name not in _DP) if given is not None else ()


def mesh_for(strategy: str, given: Mesh | None, world: int, *, strict: bool) -> Mesh:
    """Return the mesh on which `strategy` uses all `world` ranks.

    Data-parallel axes of `given` are put together anew where the strategy needs others, or refused with `strict`.
    """
    wanted = ("dp_replicate", "dp_shard") if strategy.startswith("hybrid") else ("dp_shard",)
    if strategy == "no_shard":
        wanted = ("dp_replicate",)
    tail = _tail(given)
    dp = tuple((name, size) for name, size in given.axes if name in _DP) if given is not None else ()
    if given is not None and tuple(name for name, _ in dp) == wanted:
        return given
    # A world over dp_shard alone can be told to copy instead of cutting, as smoke does.
    if given is not None and strict and dp and not (strategy == "no_shard" and len(dp) == 1):
        names = ", ".join(name for name, _ in dp)
        raise UsageError(
            f"{strategy} needs {' and '.join(wanted)}, but the mesh has {names}",
            where=f"--mesh {given}",
            hint=f"use for example --mesh {','.join(f'{name}=2' for name in wanted)}, or drop --strategy",
        )
    num = world
    for _, size in tail:
        num //= size
    if not strategy.startswith("hybrid"):
        return Mesh(((wanted[0], num), *tail))
    if num % 2:
        raise UsageError(f"hybrid_shard needs an even number of ranks, got {num}", hint="or add --mesh")
    shard = NODE_SIZE if num > NODE_SIZE and num % NODE_SIZE == 0 else num // 2
    return Mesh((("dp_replicate", num // shard), ("dp_shard", shard), *tail))
