"""Shard a model: tensor parallelism first, then the blocks, then the root."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate as TorchReplicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from ckpt_tools.checkpoint.layout import FSDP_AXIS, Placement, Shard
from ckpt_tools.checkpoint.transform import strip_wrappers
from ckpt_tools.errors import UsageError
from ckpt_tools.floors import refuse_older
from ckpt_tools.fsdp2.blocks import Blocks, find_blocks
from ckpt_tools.fsdp2.entry_methods import Methods, find_methods, register_methods
from ckpt_tools.fsdp2.internals import checkpoint_activations, replicate_function
from ckpt_tools.fsdp2.local import placements_of
from ckpt_tools.fsdp2.mesh import FSDP_AXES, TP_AXIS, fsdp_mesh, tp_mesh
from ckpt_tools.fsdp2.policy import Policy
from ckpt_tools.fsdp2.ties import Ties, find_parameters, owner_of, tied_groups
from ckpt_tools.transfer.placement.rule import STYLES

# Tensor parallelism before FSDP: styles by module, as transformers and PyTorch name them

TpPlan = Mapping[str, str | ParallelStyle]
"""Module FQN (`*` is one component) → style, by transformers' name or as PyTorch's object."""

_MEANT = (nn.Linear, nn.Embedding)


def find_styles(model: nn.Module, plan: TpPlan | str) -> dict[str, str | ParallelStyle]:
    """Return module FQN → style for every module that `plan` names; "auto" takes the plan of the model itself."""
    if isinstance(plan, str):
        if plan != "auto":
            raise UsageError(f"unknown plan {plan!r}", hint='use "auto", or a mapping of module names to styles')
        own = getattr(model, "tp_plan", None)
        if not isinstance(own, Mapping) or not own:
            raise UsageError(
                f"{type(model).__name__} defines no tensor-parallel plan",
                where="tp_plan",
                hint='pass one: {"layers.*.q_proj": "colwise", "layers.*.o_proj": "rowwise"}',
            )
        found = _expand(model, own, optional=True)
        if not found:
            raise UsageError(
                f"the tensor-parallel plan of {type(model).__name__} matches none of its modules",
                where="tp_plan",
                hint="adapters rename modules: pass a plan with the names in model.named_modules()",
            )
        return found
    return _expand(model, plan, optional=False)


def _expand(model: nn.Module, plan: TpPlan, *, optional: bool) -> dict[str, str | ParallelStyle]:
    modules = dict(model.named_modules())
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    found: dict[str, str | ParallelStyle] = {}
    for key, style in plan.items():
        pattern = re.compile(r"\.".join("[^.]+" if part == "*" else re.escape(part) for part in key.split(".")))
        matches = [name for name in modules if pattern.fullmatch(name) or pattern.fullmatch(strip_wrappers(name))]
        is_parameter = any(pattern.fullmatch(name) or pattern.fullmatch(strip_wrappers(name)) for name in parameters)
        if not matches and not is_parameter and optional:
            continue
        if not matches and not is_parameter:
            raise UsageError(f"the plan's {key!r} matches no module", where="tp_plan")
        if isinstance(style, str):
            if style in ("", "replicate") or (not matches and STYLES.get(style) == "whole"):
                continue
            if is_parameter or style not in _BUILD:
                raise UsageError(
                    f"the style {style!r} of {key!r} is not supported on live models",
                    where="tp_plan",
                    hint=f"supported are {', '.join(_BUILD)}; leave the module out to keep it whole",
                )
        found |= dict.fromkeys(matches, style)
    return found


_BUILD: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=TorchReplicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=TorchReplicate()),
    "rowwise": RowwiseParallel,
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=TorchReplicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=TorchReplicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=TorchReplicate()),
    "embedding_colwise": lambda: ColwiseParallel(output_layouts=TorchReplicate()),
}


def apply_styles(model: nn.Module, styles: Mapping[str, str | ParallelStyle], mesh: DeviceMesh) -> None:
    """Cut the modules along `mesh`, and share again what was shared; refuse uneven cuts and torn attention heads."""
    ties = tied_groups(model)
    for name, style in styles.items():  # all of them first: a model that is cut in part is of no use
        if isinstance(style, str):
            _check(model, name, model.get_submodule(name), style, mesh.size())
    for name, style in styles.items():
        parallelize_module(model.get_submodule(name), mesh, _BUILD[style]() if isinstance(style, str) else style)
    _tie_again(model, ties)


def _check(model: nn.Module, name: str, module: nn.Module, style: str, size: int) -> None:
    if not isinstance(module, _MEANT):
        raise UsageError(
            f"{style} applies to linear layers and embeddings, but this is a {type(module).__name__}", where=name
        )
    dim = _weight_dim(module, style)
    length = module.weight.shape[dim]
    if length % size:
        raise UsageError(
            f"{style} shards dim {dim} of the weight, whose size {length} is not divisible by tp={size}",
            where=name,
            hint="leave the module out of the plan, or choose a size that divides it",
        )
    head_dim = getattr(model.get_submodule(name.rpartition(".")[0]), "head_dim", None)
    if isinstance(head_dim, int) and head_dim > 0 and isinstance(module, nn.Linear) and (length // size) % head_dim:
        raise UsageError(
            f"tp={size} would split attention heads: {length // head_dim} heads of {head_dim} features",
            where=name,
            hint="choose a tp that divides the number of (key-value) heads",
        )


def _weight_dim(module: nn.Module, style: str) -> int:
    colwise = style.startswith(("colwise", "embedding_colwise"))
    if isinstance(module, nn.Embedding):
        return 1 if colwise else 0
    return 0 if colwise else 1


def cuts_of(model: nn.Module) -> dict[str, Placement]:
    """Return FQN → how the tp axis cuts it, for the parameters that are DTensors by now (before FSDP)."""
    found: dict[str, Placement] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        if isinstance(parameter, DTensor) and parameter.placements[0].is_shard():
            found[fqn] = Shard(parameter.placements[0].dim)  # type: ignore[attr-defined]
    return found


def _tie_again(model: nn.Module, ties: Ties) -> None:
    """Share the parameters of each group again; cutting one of them has made it a parameter of its own."""
    for group in ties:
        owners = [owner_of(model, fqn) for fqn in group]
        parameters = [module._parameters[name] for module, name in owners]  # noqa: SLF001
        kinds = {tuple(p.placements) if isinstance(p, DTensor) else None for p in parameters}
        if len(kinds) > 1:
            raise UsageError(
                f"tied parameters must be sharded the same way: {', '.join(group)}",
                where="tp_plan",
                hint="use the same dim for all of them (colwise for a head, embedding_rowwise for its embedding)",
            )
        for module, name in owners:
            module._parameters[name] = parameters[0]  # noqa: SLF001


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
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    ignored_params: Collection[nn.Parameter] = (),
    meshes: Mapping[str, DeviceMesh] | None = None,
    dp_mesh_dims: Any = None,  # noqa: ANN401 - torch 2.13 has the class
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
        shard_placement_fn: As of `fully_shard`: the dim that a parameter is cut along, other than the first.
        ignored_params: Parameters that FSDP leaves alone, as `Policy.ignored`; trainable ones are yours to average.
        meshes: Block (as in `blocks`) → mesh of its own. Experts along `ep` inside of dp_shard: cut along `ep`
            before, with the rest of dp_shard as their mesh. Their gradients are divided by the ranks of `mesh`.
        dp_mesh_dims: PyTorch's `DataParallelMeshDims`: the parameters are DTensors on all of `mesh`.

    Raises:
        UsageError: What cannot work: the mesh, the policy, names, styles, and methods that would be entered twice.
    """
    policy = policy or Policy()
    if policy.strategy == "no_shard":
        refuse_older("torch", "no_shard")
    refuse_sharded(model, hint="rebuild the model, or shard only the modules that are not sharded yet")
    extra: dict[str, Any] = {}
    is_own = shard_placement_fn is not None or dp_mesh_dims is not None or bool(meshes)
    if (policy.strategy == "no_shard" and is_own) or (dp_mesh_dims is not None and (meshes or tp_plan is not None)):
        what = "no_shard excludes shard_placement_fn, meshes and dp_mesh_dims; dp_mesh_dims excludes meshes and tp_plan"
        raise UsageError(what, where="shard_model")
    if dp_mesh_dims is None:
        _check_axes(mesh, tp_plan)
        dp = fsdp_mesh(mesh)
    else:
        dp = mesh[dp_mesh_dims.replicate_names + dp_mesh_dims.shard_names]
        extra |= {"mesh": mesh, "dp_mesh_dims": dp_mesh_dims}
    policy.check_mesh(dp)
    if shard_placement_fn is not None:
        extra["shard_placement_fn"] = shard_placement_fn
    ignored = _ignored(model, policy.ignored, {id(parameter) for parameter in ignored_params})
    own = {name: own for wanted, own in (meshes or {}).items() for name in find_blocks(model, [wanted])}
    found = sorted(dict.fromkeys((*find_blocks(model, blocks), *own)), key=lambda name: -name.count("."))
    names = tuple(name for name in found if not _parameters_of(model, name) <= set(ignored))
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
    if ignored:
        extra["ignored_params"] = {model.get_parameter(fqn) for fqn in ignored}
    for name, unit in zip(names, units, strict=True):
        if activation_checkpointing:
            checkpoint_activations(unit)
        apply_policy(unit, policy, own.get(name, dp), **extra)
        if name in own:
            _average_over(unit, dp)
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
            fqn: placements_of(parameter) if is_own else _expected(fqn, policy, dp, cuts)
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
    apply: Any = replicate_function() if policy.strategy == "no_shard" else fully_shard
    apply(unit, **(policy.kwargs(dp, root=root) | extra))


def _average_over(unit: Any, dp: DeviceMesh) -> None:  # noqa: ANN401 - what fully_shard made of a module
    """Divide a unit's gradients by the ranks that see other data, which are more than those of its own mesh."""
    unit.set_gradient_divide_factor(float(dp.size()))
    if dp.device_type == "cpu":  # gloo has no sum that multiplies first
        unit.set_force_sum_reduction_for_comms(True)


def _turn_off_caches(model: nn.Module) -> None:
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False  # type: ignore[union-attr]


def refuse_sharded(model: nn.Module, *, why: str = "", hint: str) -> None:
    """Refuse a model in which something is sharded."""
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            raise UsageError(f"the model is already sharded{why}", where=name or type(model).__name__, hint=hint)


def _check_axes(mesh: DeviceMesh, tp_plan: TpPlan | str | None) -> None:
    names = mesh.mesh_dim_names or ()
    for name in names:
        if name not in (*FSDP_AXES, TP_AXIS):
            raise UsageError(
                f"the axis {name} is not supported on live models", hint=f"use {', '.join((*FSDP_AXES, TP_AXIS))}"
            )
    if tp_plan is not None and TP_AXIS not in names:
        raise UsageError("a tensor-parallel plan needs a mesh with a tp axis", hint="add tp=N to the mesh")
    if tp_plan is None and TP_AXIS in names and mesh[TP_AXIS].size() > 1:
        raise UsageError("the mesh has a tp axis, but there is no plan for it", hint='pass tp_plan="auto"')


def _ignored(model: nn.Module, globs: Sequence[str], given: Collection[int]) -> tuple[str, ...]:
    """Return what FSDP does not manage: `globs`, parameters of no dim or no element, and those `given` by their id.

    Refuse what is trainable and not given.
    """
    chosen = set(find_parameters(model, globs, "Policy.ignored"))
    found = []
    for fqn, parameter in model.named_parameters():
        is_given = id(parameter) in given
        is_scalar, is_named = not parameter.dim(), fqn in chosen
        if (is_scalar or is_named) and parameter.requires_grad and not is_given:
            what, hint = "scalar cannot be sharded", "make it a parameter of shape (1,), or freeze it"
            if not is_scalar:
                what, hint = "parameter is ignored by FSDP", "freeze it, or leave it out of Policy.ignored"
            raise UsageError(f"a trainable {what}, so its gradient would never be averaged", where=fqn, hint=hint)
        if is_scalar or is_named or is_given or not parameter.numel():
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
