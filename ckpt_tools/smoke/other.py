"""The world that reloads what another one has saved."""

from __future__ import annotations

import math
from dataclasses import replace

from ckpt_tools.description.layout import Mesh
from ckpt_tools.fsdp2 import Policy
from ckpt_tools.fsdp2.mesh import TP_AXIS
from ckpt_tools.processes.journal import RankLog
from ckpt_tools.smoke.messages import Saved
from ckpt_tools.smoke.setting import Setting

_FSDP_AXES = ("dp_shard", "dp_replicate")


def other_mesh(mesh: Mesh) -> Mesh:
    """Return a mesh of another size: fewer ranks along the first axis that can spare some, or two for one."""
    sizes = dict(mesh.axes)
    for name in _FSDP_AXES:
        size = sizes.get(name, 1)
        if size > 1:
            return Mesh(tuple((n, max(1, size // 2) if n == name else s) for n, s in mesh.axes))
    if sizes.get(TP_AXIS, 1) > 1:
        return Mesh(tuple((n, 1 if n == TP_AXIS else s) for n, s in mesh.axes))
    grown = next(name for name in _FSDP_AXES if name in sizes)
    return Mesh(tuple((n, 2 if n == grown else s) for n, s in mesh.axes))


def setting_for(setting: Setting, log: RankLog) -> tuple[Setting | None, str]:
    """Return what the other world runs, or None and why there is none.

    Args:
        setting: Of the world that trained.
        log: Of its rank 0.
    """
    mesh = other_mesh(setting.mesh)
    devices = log.fact("num_devices", int)
    if log.fact("device", str) == "cuda" and devices is not None and devices < mesh.world_size:
        return None, f"a world of {mesh.world_size} needs as many GPUs, and there are {devices}"
    policy = setting.policy
    if policy.strategy == "hybrid_shard" and len([n for n, _ in mesh.axes if n != TP_AXIS]) < 2:
        policy = Policy(strategy="full_shard", precision=policy.precision)
    options = replace(setting.options, mesh=str(mesh), nproc=None, strategy=policy.strategy)
    return replace(setting, mesh=mesh, policy=policy, options=options), ""


def saved_by(setting: Setting, reloading: Setting, log: RankLog) -> Saved:
    """Return what the other world has to know of the save."""
    loss = log.fact("saved_loss", float)
    return Saved(
        path=log.fact("saved_path", str) or "",
        loss=math.nan if loss is None else loss,
        source=log.fact("source", str) or "",
        num_layers=log.fact("num_layers", int),
        is_exact=setting.mesh.size(TP_AXIS) == reloading.mesh.size(TP_AXIS),
    )
