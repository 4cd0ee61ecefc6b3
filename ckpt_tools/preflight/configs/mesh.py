"""Axes as a config names them → the mesh of its ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ckpt_tools.description.layout import AXES, FSDP_AXIS, Mesh
from ckpt_tools.preflight.spec import ParallelSpec

ORDER = ("pp", "dp_replicate", FSDP_AXIS, "cp", "tp")
"""Rank order in accelerate, torchtitan and the others: tensor-parallel ranks are neighbours.

Source: `accelerate/parallelism_config.py:_get_mesh`, torchtitan `ParallelDims.build_mesh`.
"""


def build_mesh(axes: Mapping[str, int], world_size: int | None, *, order: Sequence[str] = ORDER) -> Mesh | None:
    """Return the mesh of `axes` over all ranks, or None where they do not fit together or the ranks are not known.

    One axis may be -1, the rest; axes that are not in `order` take no ranks of their own.
    """
    sizes = {name: axes.get(name, 1) for name in order if name in AXES}
    rest = [name for name, size in sizes.items() if size == -1]
    if any(size < 1 for size in sizes.values() if size != -1) or len(rest) > 1:
        return None
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if rest:
        if world_size is None or world_size % fixed:
            return None
        sizes[rest[0]] = world_size // fixed
    elif world_size is not None and fixed != world_size:
        return None
    if all(size == 1 for size in sizes.values()):
        return Mesh(((FSDP_AXIS, 1),))
    return Mesh(tuple((name, size) for name, size in sizes.items() if size > 1))


def resolved(spec: ParallelSpec, axis: str) -> int | None:
    """Return the ranks of an axis; None where it is the rest of a world that is not known."""
    size = spec.axes.get(axis, 1)
    if size != -1:
        return size
    return spec.mesh.size(axis) if spec.mesh is not None else None


def sharding_strategy(spec: ParallelSpec, *, reshards: bool) -> str:
    """Return the strategy of an FSDP2 mesh in the words of FSDP1; with `reshards`, parameters do not stay."""
    shard, cp, replicas = (resolved(spec, name) for name in (FSDP_AXIS, "cp", "dp_replicate"))
    experts = 1 if spec.mesh is None else spec.mesh.size("ep")  # more than 1 where ep has ranks of its own
    if shard == 1 and cp == 1 and experts == 1:
        return "no_shard"
    if replicas is not None and replicas > 1:
        return "hybrid_shard"
    return "full_shard" if reshards else "shard_grad_op"
