"""FSDP2 models: mesh, policies, wrapping, loading, saving, training steps, and checks of all of these.

This package imports torch; it is imported only where a model is built.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ckpt_tools.fsdp2.audit import PHASES, audit
from ckpt_tools.fsdp2.blocks import Blocks, find_blocks
from ckpt_tools.fsdp2.buffers import materialise_buffers
from ckpt_tools.fsdp2.catalogue import CATALOGUE
from ckpt_tools.fsdp2.compare_ranks import Trace, compare_ranks, compare_traces
from ckpt_tools.fsdp2.diagnose import Diagnosis, diagnose
from ckpt_tools.fsdp2.entry_methods import Methods
from ckpt_tools.fsdp2.internals import GroupState, snapshot
from ckpt_tools.fsdp2.load import LoadReport, load_checkpoint
from ckpt_tools.fsdp2.local import local_box, placements_of
from ckpt_tools.fsdp2.lora import adapter_state, add_lora, finish_adapters, load_adapters, load_base
from ckpt_tools.fsdp2.mesh import build_device_mesh, data_rank, fsdp_mesh, mesh_of, tp_mesh
from ckpt_tools.fsdp2.optimizer import load_optimizer, step_on_whole, switch_optimizer
from ckpt_tools.fsdp2.policy import STRATEGIES, Policy, Precision, parse_policy, parse_strategy
from ckpt_tools.fsdp2.qlora import Quantisation, load_quantised, quantise_linears
from ckpt_tools.fsdp2.save import async_save_checkpoint, save_checkpoint
from ckpt_tools.fsdp2.scatter import rank0_load
from ckpt_tools.fsdp2.state import PerRank, RngState
from ckpt_tools.fsdp2.train import (
    accumulate,
    clip_grad_norm,
    frozen,
    offload_optimizer,
    parameter_groups,
    update_average,
)
from ckpt_tools.fsdp2.watch import Watch, read_traces, watch
from ckpt_tools.fsdp2.wrap import ShardedPlan, TpPlan, plan_of, shard_model

__all__ = [
    "CATALOGUE", "PHASES", "STRATEGIES", "Blocks", "Diagnosis", "GroupState", "LoadReport", "Methods", "PerRank",
    "Policy", "Precision", "Quantisation", "RngState", "ShardedPlan", "TpPlan", "Trace", "Watch", "accumulate",
    "adapter_state", "add_lora", "async_save_checkpoint", "audit", "build_device_mesh", "clip_grad_norm",
    "compare_ranks", "compare_traces", "data_rank", "diagnose", "find_blocks", "finish_adapters", "frozen",
    "fsdp_mesh", "load_adapters", "load_base", "load_checkpoint", "load_optimizer", "load_quantised", "local_box",
    "materialise_buffers", "mesh_of", "offload_optimizer", "parameter_groups", "parse_policy", "parse_strategy",
    "placements_of", "plan_of", "quantise_linears", "rank0_load", "read_sharding", "read_traces", "save_checkpoint",
    "shard_model", "snapshot", "step_on_whole", "switch_optimizer", "tp_mesh", "update_average", "watch",
]  # fmt: skip


def __getattr__(name: str) -> Any:  # noqa: ANN401 - PEP 562
    if name == "read_sharding":  # of the room above, which reads configs: found here, where a script looks for it
        return import_module("ckpt_tools.preflight.policy").read_sharding
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
