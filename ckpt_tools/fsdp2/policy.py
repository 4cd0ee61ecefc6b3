"""How a model is sharded: strategy, precision, offload, and when parameters are resharded.

Source: `fully_shard` and `MixedPrecisionPolicy` of torch 2.13 (`torch/distributed/fsdp/_fully_shard`); the names
and numbers of FSDP1's `ShardingStrategy`, which accelerate's `fsdp_sharding_strategy` still takes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from ckpt_tools.errors import UsageError
from ckpt_tools.options.common import find_strategy
from ckpt_tools.tables import read_rows

INSTEAD = {row["option"]: row["do"] for row in read_rows(__package__, "instead.tsv")}
"""Option that FSDP1 and its launchers have, and `fully_shard` has not → what to do."""


class Answers:
    """Refuses FSDP1's options by name."""

    __slots__ = ()

    def __new__(cls, *_: object, **options: object) -> Self:
        """Refuse FSDP1's options with what to do instead."""
        for name in options:
            if name in INSTEAD:
                raise UsageError(f"{name} is not an option of FSDP2", where=cls.__name__, hint=INSTEAD[name])
        return super().__new__(cls)


STRATEGIES = ("full_shard", "shard_grad_op", "hybrid_shard", "no_shard")
"""full_shard: parameters, gradients and optimizer state are cut over all ranks, and parameters again after forward.
shard_grad_op: the same, but parameters stay whole between forward and backward. hybrid_shard: cut along dp_shard,
copied along dp_replicate. no_shard: everything on every rank, gradients averaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision(Answers):
    """Dtypes of mixed precision; None keeps the parameters' own."""

    param_dtype: torch.dtype | None = None
    """Of the gathered parameters, hence of the computation."""
    reduce_dtype: torch.dtype | None = None
    """In which gradients are averaged; None means `param_dtype`."""
    output_dtype: torch.dtype | None = None
    """Of what the root's forward returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy(Answers):
    """Everything that `shard_model` passes on to `fully_shard`.

    Raises:
        UsageError: An unknown strategy, a reshard that contradicts it, or an option of FSDP1's.
    """

    strategy: str = "full_shard"
    """One of `STRATEGIES`."""
    precision: Precision = field(default_factory=Precision)
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""
    reshard_after_forward: bool | int | None = None
    """What becomes of a block's parameters after its forward: cut again (True), kept (False), or cut over so many
    ranks only (an int that divides the ranks of dp_shard). None leaves it to the strategy."""
    reshard_root: bool = False
    """Cut the root's parameters again after forward; backward needs them first, so they are kept by default."""
    pin_memory: bool | None = None
    """Pin what `cpu_offload` keeps in host memory; None where there is a GPU."""
    prefetch_forward: int = 0
    """How many of the following blocks are gathered ahead in forward. 0 leaves it to FSDP2, which gathers the next
    one while a block computes; 1 asks for it earlier, 2 and more use more memory."""
    prefetch_backward: int = 0
    """The same for the blocks before, in backward."""
    ignored: tuple[str, ...] = ()
    """Globs on FQNs of frozen parameters, or modules of them, that FSDP leaves alone: whole on every rank."""

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise UsageError(f"unknown strategy {self.strategy!r}", hint=f"choose from {', '.join(STRATEGIES)}")
        raf = self.reshard_after_forward
        if self.strategy == "shard_grad_op" and raf not in (None, False):
            raise UsageError(
                f"shard_grad_op keeps parameters after forward, which reshard_after_forward={raf} contradicts",
                hint="use full_shard",
            )
        if min(self.prefetch_forward, self.prefetch_backward) < 0:
            raise UsageError("the number of blocks to prefetch must not be negative")
        if self.strategy == "no_shard" and raf is not None:
            raise UsageError("no_shard has nothing to reshard", hint="leave out reshard_after_forward")

    @property
    def reshard(self) -> bool | int:
        """What `reshard_after_forward` comes to for a block."""
        if self.strategy in ("shard_grad_op", "no_shard"):
            return False
        return True if self.reshard_after_forward is None else self.reshard_after_forward

    def check_mesh(self, mesh: DeviceMesh) -> None:
        """Raise UsageError unless `mesh` (the part for FSDP) suits the strategy."""
        names = mesh.mesh_dim_names or ()
        has = f"the mesh has {', '.join(names) or '×'.join(map(str, mesh.mesh.shape))}"
        if self.strategy == "hybrid_shard" and mesh.ndim != 2:
            raise UsageError(
                f"hybrid_shard needs the axes dp_replicate and dp_shard, but {has}",
                hint="use for example dp_replicate=2,dp_shard=4",
            )
        if self.strategy == "no_shard" and mesh.ndim != 1:
            raise UsageError(f"no_shard needs one axis, but {has}", hint=f"use for example dp_replicate={mesh.size()}")
        if self.strategy in ("full_shard", "shard_grad_op"):
            if mesh.ndim != 1:
                raise UsageError(
                    f"{self.strategy} shards over one axis, but {has}", hint="use hybrid_shard, or only dp_shard"
                )
            if names == ("dp_replicate",):
                raise UsageError(
                    f"{self.strategy} shards along dp_shard, but the mesh has only dp_replicate",
                    hint="use no_shard, or name the axis dp_shard",
                )
        size = mesh.size(mesh.ndim - 1)
        raf = self.reshard
        if type(raf) is int and (raf < 2 or size % raf):
            raise UsageError(
                f"reshard_after_forward={raf} must be at least 2 and divide the {size} ranks of dp_shard",
                hint="use True, False, or a number that divides them",
            )

    def kwargs(self, mesh: DeviceMesh, *, root: bool = False) -> dict[str, object]:
        """Return the keyword arguments for `fully_shard` (for `replicate` with no_shard).

        `mesh` is what `fsdp_mesh` returns; the `root` keeps its parameters after forward unless `reshard_root`.
        """
        self.check_mesh(mesh)
        # Pinning needs an accelerator.
        pin = self.pin_memory
        if pin is None:
            pin = torch.cuda.is_available() and mesh.device_type != "cpu"
        arguments: dict[str, object] = {
            "mesh": mesh,
            "mp_policy": MixedPrecisionPolicy(
                self.precision.param_dtype, self.precision.reduce_dtype, self.precision.output_dtype if root else None
            ),
            "offload_policy": CPUOffloadPolicy(pin_memory=pin) if self.cpu_offload else OffloadPolicy(),
        }
        if self.strategy != "no_shard":
            raf = self.reshard
            arguments["reshard_after_forward"] = (raf if self.reshard_root else False) if root else raf
        return arguments


def parse_strategy(text: str) -> str:
    """Return the strategy that `text` names: ours, FSDP1's in any case, or accelerate's number 1 to 5.

    The fifth, HYBRID_SHARD_ZERO2, is hybrid_shard whose parameters stay after forward; `parse_policy` keeps that.

    Raises:
        UsageError: No strategy.
    """
    return _parse(text)[0]


def parse_policy(text: str, *, precision: Precision | None = None, cpu_offload: bool = False) -> Policy:
    """Return the policy that a strategy's name stands for; see `parse_strategy`.

    Raises:
        UsageError: No strategy.
    """
    strategy, raf = _parse(text)
    return Policy(
        strategy=strategy, precision=precision or Precision(), cpu_offload=cpu_offload, reshard_after_forward=raf
    )


def _parse(text: str) -> tuple[str, bool | None]:
    found = find_strategy(str(text))
    if found is None:
        raise UsageError(
            f"unknown strategy {text!r}",
            hint=f"choose from {', '.join(STRATEGIES)}; FSDP1's names and accelerate's numbers work too",
        )
    plain = found.removesuffix("_zero2")
    return plain, None if plain == found else False
