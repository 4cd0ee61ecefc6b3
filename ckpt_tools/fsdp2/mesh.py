"""From our `Mesh` to PyTorch's `DeviceMesh`, and the parts of it that FSDP and tensor parallelism use."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ckpt_tools.checkpoint.layout import AXES, FSDP_AXIS, Mesh, MeshLike, mesh_text, parse_mesh
from ckpt_tools.errors import UsageError

FSDP_AXES = ("dp_replicate", FSDP_AXIS)  # The axes that `fully_shard` gets
TP_AXIS = "tp"


def build_device_mesh(mesh: MeshLike, device_type: str | None = None) -> DeviceMesh:
    """Return the device mesh with the axes of `mesh`, over all ranks of the process group.

    Collective: every rank calls it.

    Args:
        mesh: Axes in rank order, the last varies fastest; also 8, {"dp_shard": 8}, or text, "dp_shard=-1,tp=2",
            where -1 is inferred from the process group.
        device_type: "cpu" or "cuda"; by default the GPUs where the process group uses NCCL.

    Raises:
        UsageError: No process group, or one of another size than the mesh.
    """
    if not dist.is_initialized():
        raise UsageError(
            f"the mesh {mesh} needs a process group, but none is initialized",
            hint="call torch.distributed.init_process_group first, or start with torchrun",
        )
    mesh = parse_mesh(mesh, world_size=dist.get_world_size() if "-1" in mesh_text(mesh) else None)
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() and "nccl" in dist.get_backend_config() else "cpu"
    if dist.get_world_size() != mesh.world_size:
        raise UsageError(
            f"the mesh {mesh} has {mesh.world_size} ranks, the process group has {dist.get_world_size()}",
            hint=f"start {mesh.world_size} processes, or set one axis to -1",
        )
    names = tuple(name for name, _ in mesh.axes)
    return init_device_mesh(device_type, tuple(size for _, size in mesh.axes), mesh_dim_names=names)


def mesh_of(device_mesh: DeviceMesh) -> Mesh | None:
    """Return the `Mesh` with the axes of `device_mesh`; None when its axes have no names, or names of their own."""
    names = device_mesh.mesh_dim_names
    if names is None or any(name not in AXES for name in names):
        return None
    return Mesh(tuple(zip(names, device_mesh.mesh.shape, strict=True)))


def fsdp_mesh(device_mesh: DeviceMesh) -> DeviceMesh:
    """Return the part of `device_mesh` that FSDP uses: dp_replicate × dp_shard.

    A 1-d mesh without names is that part itself.

    Raises:
        UsageError: It has neither axis.
    """
    names = device_mesh.mesh_dim_names
    if names is None and device_mesh.ndim == 1:
        return device_mesh
    used = tuple(name for name in names or () if name in FSDP_AXES)
    if not used:
        raise UsageError(
            f"the mesh has no axis for FSDP: its axes are {', '.join(names or ('without names',))}",
            hint=f"add one: {FSDP_AXIS}=1 is enough",
        )
    return device_mesh if used == names else device_mesh[used]


def tp_mesh(device_mesh: DeviceMesh) -> DeviceMesh | None:
    """Return the `tp` axis of `device_mesh`, None when it has none."""
    names = device_mesh.mesh_dim_names or ()
    if TP_AXIS not in names:
        return None
    return device_mesh if names == (TP_AXIS,) else device_mesh[TP_AXIS]


def data_rank(device_mesh: DeviceMesh) -> tuple[int, int]:
    """Return which part of the data this rank trains on, and how many parts there are.

    Ranks along `tp` compute one batch together, so they get the same part. For
    `DistributedSampler(data, num_replicas=parts, rank=part)`.

    Raises:
        UsageError: The mesh has no axis for FSDP.
    """
    ranks = fsdp_mesh(device_mesh).mesh.flatten().tolist()
    return ranks.index(dist.get_rank()), len(ranks)
