"""Shard a model: tensor parallelism first, then the blocks, then the root."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from ckpt_tools.checkpoint.layout import FSDP_AXIS, Placement, Shard
from ckpt_tools.errors import UsageError
from ckpt_tools.floors import refuse_older
from ckpt_tools.fsdp2.blocks import Blocks, find_blocks
from ckpt_tools.fsdp2.internals import checkpoint_activations, replicate_function
from ckpt_tools.fsdp2.mesh import FSDP_AXES, TP_AXIS, fsdp_mesh, tp_mesh
from ckpt_tools.fsdp2.methods import Methods, find_methods, register_methods
from ckpt_tools.fsdp2.policy import Policy
from ckpt_tools.fsdp2.tensor_parallel import TpPlan, apply_styles, cuts_of, find_styles
from ckpt_tools.fsdp2.ties import Ties, find_parameters, tied_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedPlan:
    """What `shard_model` did, for those who check it."""

    policy: Policy
    mesh: DeviceMesh
    """All axes, `tp` included."""
    blocks: tuple[str, ...]
    """FQNs of the units, children before parents; without the root."""
    root: bool
    """The model itself is a unit too."""
    placements: Mapping[str, Mapping[str, Placement]]
    """FQN of every managed parameter → mesh axis → placement; axes that are not named replicate."""
    ignored: tuple[str, ...]
    """FQNs of the parameters that FSDP leaves alone: scalars, what has no elements, and what the policy names."""
    ties: Ties
    """Names that share one parameter."""
    methods: Mapping[str, tuple[str, ...]]
    """FQN of a unit ("" is the root) → methods that are entries like `forward`."""
    tp_styles: Mapping[str, str]
    """FQN of a module → tensor-parallel style."""
    activation_checkpointing: bool

    @property
    def strategy(self) -> str:
        """The policy's strategy."""
        return self.policy.strategy


_PLANS: WeakKeyDictionary[nn.Module, ShardedPlan] = WeakKeyDictionary()


def plan_of(model: nn.Module) -> ShardedPlan | None:
    """Return what `shard_model` did with `model`, None when it was not sharded here."""
    return _PLANS.get(model)


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    policy: Policy | None = None,
    *,
    blocks: Blocks = "auto",
    forward_methods: Methods = (),
    tp_plan: TpPlan | str | None = None,
    activation_checkpointing: bool = False,
    root: bool = True,
) -> ShardedPlan:
    """Turn the parameters of `model` into DTensors on `mesh`, in place.

    Usually on the meta device, before a checkpoint is loaded. Every rank does the same; no data is exchanged.
    Freeze parameters and add adapters before, create the optimizer after (and after the load).

    Args:
        model: On any device; FSDP does not make ranks equal, `load_checkpoint` does.
        mesh: With the axes dp_replicate, dp_shard and tp, as far as they are needed.
        policy: Strategy, precision, offload; full_shard in the parameters' own dtypes by default.
        blocks: Modules that are gathered on their own (`find_blocks`).
        forward_methods: Methods through which callers enter other than `forward`: of the root, or by module.
        tp_plan: Styles by module for the axis `tp`; "auto" is the model's own plan.
        activation_checkpointing: Compute every block's forward again in backward instead of keeping activations.
            Turns off `config.use_cache`: a block that runs twice would put its keys in a cache twice.
        root: Make the model itself a unit, for the parameters that are in no block. Without it the caller has to
            wrap what contains the model.

    Raises:
        UsageError: What cannot work: the mesh, the policy, names, styles, and methods that would be entered twice.
    """
    policy = policy or Policy()
    refuse_sharded(model, hint="build it again, or shard only what is not sharded yet")
    _check_axes(mesh, tp_plan)
    dp = fsdp_mesh(mesh)
    policy.check_mesh(dp)
    ignored = _ignored(model, policy.ignored)
    names = tuple(name for name in find_blocks(model, blocks) if not _parameters_of(model, name) <= set(ignored))
    kept = (*(names if not policy.reshard else ()), *([""] if not (policy.reshard and policy.reshard_root) else ()))
    methods = find_methods(model, forward_methods, (*names, "") if root else names, kept)
    styles = {} if tp_plan is None else find_styles(model, tp_plan)
    ties = tied_groups(model)
    tp = tp_mesh(mesh)
    if tp is not None and styles:
        apply_styles(model, styles, tp)
    cuts = cuts_of(model)
    units = [model.get_submodule(name) for name in names]
    if activation_checkpointing:
        _turn_off_caches(model)
    extra: dict[str, Any] = {"ignored_params": {model.get_parameter(fqn) for fqn in ignored}} if ignored else {}
    for unit in units:
        if activation_checkpointing:
            checkpoint_activations(unit)
        apply_policy(unit, policy, dp, **extra)
    if root:
        apply_policy(model, policy, dp, root=True, **extra)
    _prefetch(model, names, policy)
    register_methods(model, methods)
    managed = {id(p) for module in ([model] if root else units) for p in module.parameters()}
    plan = ShardedPlan(
        policy=policy,
        mesh=mesh,
        blocks=names,
        root=root,
        placements={
            fqn: _expected(fqn, policy, dp, cuts)
            for fqn, parameter in model.named_parameters(remove_duplicate=False)
            if fqn not in ignored and id(parameter) in managed
        },
        ignored=ignored,
        ties=ties,
        methods=methods,
        tp_styles={name: style if isinstance(style, str) else type(style).__name__ for name, style in styles.items()},
        activation_checkpointing=activation_checkpointing,
    )
    _PLANS[model] = plan
    return plan


def _expected(fqn: str, policy: Policy, dp: DeviceMesh, cuts: Mapping[str, Placement]) -> dict[str, Placement]:
    placements: dict[str, Placement] = {}
    if policy.strategy != "no_shard":
        names = dp.mesh_dim_names or (FSDP_AXIS,)
        placements[names[-1]] = Shard(0)
    if fqn in cuts:
        placements[TP_AXIS] = cuts[fqn]
    return placements


def apply_policy(unit: nn.Module, policy: Policy, dp: DeviceMesh, *, root: bool = False, **extra: object) -> None:
    """Make a module a unit of FSDP."""
    apply: Any = fully_shard
    if policy.strategy == "no_shard":
        refuse_older("torch", "no_shard")
        apply = replicate_function()
    apply(unit, **policy.kwargs(dp, root=root), **extra)


def _turn_off_caches(model: nn.Module) -> None:
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # type: ignore[union-attr]


def refuse_sharded(model: nn.Module, *, why: str = "", hint: str) -> None:
    """Refuse a model in which something is sharded."""
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            raise UsageError(f"the model is sharded already{why}", where=name or type(model).__name__, hint=hint)


def _check_axes(mesh: DeviceMesh, tp_plan: TpPlan | str | None) -> None:
    names = mesh.mesh_dim_names or ()
    for name in names:
        if name not in (*FSDP_AXES, TP_AXIS):
            raise UsageError(
                f"the axis {name} is not supported on live models", hint=f"use {', '.join((*FSDP_AXES, TP_AXIS))}"
            )
    if tp_plan is not None and TP_AXIS not in names:
        raise UsageError("a tensor-parallel plan needs a mesh with the axis tp", hint="add tp=N to the mesh")
    if tp_plan is None and TP_AXIS in names and mesh[TP_AXIS].size() > 1:
        raise UsageError("the mesh has the axis tp, but no plan says what to cut along it", hint='pass tp_plan="auto"')


def _ignored(model: nn.Module, globs: Sequence[str]) -> tuple[str, ...]:
    """Return what FSDP does not manage: `globs`, and parameters of no dim or no element; refuse what is trainable."""
    chosen = set(find_parameters(model, globs, "Policy.ignored"))
    found = []
    for fqn, parameter in model.named_parameters():
        is_scalar, is_named = not parameter.dim(), fqn in chosen
        if (is_scalar or is_named) and parameter.requires_grad:
            what, hint = "scalar cannot be sharded", "make it a parameter of shape (1,), or freeze it"
            if not is_scalar:
                what, hint = "parameter is ignored by FSDP", "freeze it, or leave it out of Policy.ignored"
            raise UsageError(f"a trainable {what}, so its gradient would never be averaged", where=fqn, hint=hint)
        if is_scalar or is_named or not parameter.numel():
            found.append(fqn)
    return tuple(found)


def _parameters_of(model: nn.Module, block: str) -> set[str]:
    return {f"{block}.{name}" for name, _ in model.get_submodule(block).named_parameters()}


def _prefetch(model: nn.Module, names: Sequence[str], policy: Policy) -> None:
    """Tell every block which of the blocks beside it, in one container, are gathered ahead."""
    rows: dict[str, list[Any]] = {}
    for name, module in model.named_modules():
        if name in names:
            rows.setdefault(name.rpartition(".")[0], []).append(module)
    for row in rows.values():
        for index, block in enumerate(row):
            if policy.prefetch_forward:
                block.set_modules_to_forward_prefetch(row[index + 1 : index + 1 + policy.prefetch_forward])
            if policy.prefetch_backward:
                block.set_modules_to_backward_prefetch(row[max(0, index - policy.prefetch_backward) : index][::-1])
