# ruff: noqa: SLF001 - the one file that touches what PyTorch keeps to itself
"""PyTorch's private FSDP2 attributes, read in one place and handed on under public names.

Everything that is not documented by PyTorch is named here and nowhere else, so that a new release breaks one file,
with an error that says so.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_state.py, _fsdp_param_group.py and _fsdp_param.py of PyTorch 2.13.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils.hooks import RemovableHandle

from ckpt_tools.errors import CkptError, UsageError

LOGGER = "torch.distributed.fsdp.fully_shard"
"""Name of the logger that tells, at DEBUG, when a group enters and leaves its passes."""

StridedShard = _StridedShard  # FSDP's mark for a cut inside of tensor parallelism's cut of the same dim

_P = ParamSpec("_P")
_R = TypeVar("_R")
Sharding = Literal["SHARDED", "SHARDED_POST_FORWARD", "UNSHARDED"]
Training = Literal["IDLE", "FORWARD", "PRE_BACKWARD", "POST_BACKWARD"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedParam:
    """One parameter of a group, with the live tensors."""

    fqn: str  # Its first name in the model
    module: nn.Module  # The module that it is registered on
    sharded: torch.Tensor  # What the rank keeps: a DTensor in a sound model
    registered: torch.Tensor | None  # What the module has under that name now
    shared: tuple[tuple[str, torch.Tensor | None], ...]
    """Further names that it had when it was sharded, with what they hold now."""
    uid: int | None  # The same number for the same original parameter
    placements: tuple[Placement, ...] | None  # As sharded; None where PyTorch keeps them in another form
    mesh: DeviceMesh | None  # As sharded
    first_dtype: torch.dtype | None  # Its dtype at the first forward pass; None before
    gathered: torch.Tensor | None
    """What forward passes use; its storage is empty while the parameter is sharded. None before the first one."""
    has_unreduced: bool  # Is there a gradient of this rank alone?


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpGroup:
    """One parameter group, with the live modules."""

    modules: tuple[nn.Module, ...]  # What `fully_shard` was called on
    fqns: tuple[str, ...]
    params: tuple[ManagedParam, ...]
    sharding: Sharding  # Which form is registered
    training: Training
    expected_after_forward: Sharding  # By its strategy
    reshards_after_backward: bool  # False while a user keeps parameters gathered between backward passes
    mesh: DeviceMesh  # What it communicates over
    replicated: bool  # `replicate()` rather than `fully_shard`
    compute_dtype: torch.dtype | None  # What parameters and forward's arguments are cast to

    @property
    def fqn(self) -> str:
        """FQN of its first module."""
        return self.fqns[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitState:
    """One `fully_shard` call: its modules and the groups it made, none where no parameter was left."""

    modules: tuple[nn.Module, ...]
    fqns: tuple[str, ...]
    is_root: bool | None  # None before the first forward pass
    groups: tuple[FsdpGroup, ...]  # Usually one
    keeps: bool  # Do its parameters stay gathered after forward, as a root's usually do?


def _guarded(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Tell a changed PyTorch from a mistake of the user."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except (AttributeError, ImportError) as error:
            raise CkptError(
                f"FSDP2 in this PyTorch release has different internals: {error}",
                where=f"torch {torch.__version__}",
                hint="use a PyTorch release that ckpt was tested with (`ckpt env` lists them)",
            ) from error

    return call


@_guarded
def read_states(model: nn.Module) -> tuple[UnitState, ...]:
    """Return every `fully_shard` and `replicate` call below `model`, in the order of `named_modules`."""
    names = {module: fqn for fqn, module in model.named_modules()}
    seen: set[int] = set()
    states: list[UnitState] = []
    for module in names:
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        if id(state) in seen:
            continue
        seen.add(id(state))
        fqns = tuple(names[each] for each in state._modules if each in names)
        groups = tuple(_read_group(group, fqns, names) for group in _raw_groups(state))
        # PyTorch decides about the root in its first forward pass.
        is_first = not states and state._is_root is None and getattr(state, "_auto_reshard_after_forward", True)
        states.append(
            UnitState(
                modules=tuple(state._modules),
                fqns=fqns,
                is_root=state._is_root,
                groups=groups,
                keeps=bool(is_first) or all(group.expected_after_forward == "UNSHARDED" for group in groups),
            )
        )
    return tuple(states)


@contextmanager
def restored_settings(model: nn.Module) -> Iterator[None]:
    """Give back what was set of gradients and of resharding after backward, once a block is done."""
    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    held = [group for state in states for group in _raw_groups(state)] + [state._state_ctx for state in states]
    settings = ("reduce_grads", "all_reduce_grads", "reshard_after_backward", "is_last_backward")
    before = [(each, name, getattr(each, name)) for each in held for name in settings if hasattr(each, name)]
    try:
        yield
    finally:
        for each, name, value in before:
            setattr(each, name, value)


def _raw_groups(state: object) -> Sequence[object]:
    groups: Sequence[object] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return groups
    group = state._fsdp_param_group  # type: ignore[attr-defined] # before 2.12 there was one at most
    return () if group is None else (group,)


def _read_group(group: object, fqns: tuple[str, ...], names: dict[nn.Module, str]) -> FsdpGroup:
    raw = group
    # `set_requires_all_reduce(False)` keeps what replicas have not averaged yet.
    partial = getattr(raw, "_partial_reduce_output", None) is not None
    info, after = raw.mesh_info, raw.post_forward_mesh_info  # type: ignore[attr-defined]
    expected: Sharding = "UNSHARDED" if after is None else "SHARDED" if after == info else "SHARDED_POST_FORWARD"
    return FsdpGroup(
        modules=tuple(raw.modules),  # type: ignore[attr-defined]
        fqns=fqns,
        params=tuple(_read_param(param, names, is_partial=partial) for param in raw.fsdp_params),  # type: ignore[attr-defined]
        sharding=cast("Sharding", raw._sharded_state.name),  # type: ignore[attr-defined]
        training=cast("Training", raw._training_state.name),  # type: ignore[attr-defined]
        expected_after_forward=expected,
        reshards_after_backward=bool(raw.reshard_after_backward),  # type: ignore[attr-defined]
        mesh=info.mesh,
        replicated=getattr(info, "shard_mesh_dim", None) is None,
        compute_dtype=raw.mp_policy.param_dtype,  # type: ignore[attr-defined]
    )


def _read_param(param: object, names: dict[nn.Module, str], *, is_partial: bool) -> ManagedParam:
    info = param._module_info  # type: ignore[attr-defined]
    dims = getattr(param.mesh_info, "dp_mesh_dims", None)  # type: ignore[attr-defined]
    flattened = dims is not None and len(dims.shard_names) > 1
    return ManagedParam(
        fqn=_join(names.get(info.module, "?"), info.param_name),
        module=info.module,
        sharded=param.sharded_param,  # type: ignore[attr-defined]
        registered=info.module._parameters.get(info.param_name),
        shared=tuple(
            (_join(names.get(module, "?"), name), module._parameters.get(name))
            for module, name in zip(info.shared_modules, info.shared_param_names, strict=True)
        ),
        uid=getattr(param, "_orig_param_uid", None),
        placements=None if flattened else getattr(param, "_spmd_placements", None),
        mesh=None if flattened else getattr(param, "_spmd_mesh", None),
        first_dtype=getattr(param, "orig_dtype", None),
        gathered=(gathered := getattr(param, "_unsharded_param", None)),
        has_unreduced=is_partial
        or getattr(param, "unsharded_accumulated_grad", None) is not None
        or (gathered is not None and gathered.grad is not None),
    )


def _join(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def read_groups(model: nn.Module) -> tuple[FsdpGroup, ...]:
    """Return all parameter groups below `model`."""
    return tuple(group for state in read_states(model) for group in state.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupState:
    """One parameter group."""

    modules: tuple[str, ...]
    """FQNs of the modules that it was made for; "" is the model itself."""
    parameters: tuple[str, ...]
    """FQNs of its parameters."""
    sharding: Sharding
    """Which form of the parameters is registered on the modules."""
    training: Training
    """Where the group is in its forward or backward pass."""
    expected_after_forward: Sharding
    """Where a forward pass leaves it, by its strategy and by whether it is the root."""
    is_root: bool | None
    """Does a forward pass start here? None before the first one."""
    mesh: tuple[tuple[str, int], ...]
    """Axes and sizes that its parameters are sharded or replicated over."""
    replicated: bool
    """Is it replicated only (`replicate()`), not sharded?"""


def snapshot(model: nn.Module) -> tuple[GroupState, ...]:
    """Return the sharding state of every FSDP2 group below `model`, as values that outlive it."""
    return tuple(
        GroupState(
            modules=group.fqns,
            parameters=tuple(param.fqn for param in group.params),
            sharding=group.sharding,
            training=group.training,
            expected_after_forward=group.expected_after_forward,
            is_root=state.is_root,
            mesh=mesh_axes(group.mesh),
            replicated=group.replicated,
        )
        for state in read_states(model)
        for group in state.groups
    )


def shown(fqn: str) -> str:
    """Return a module's FQN for people: the model itself has an empty one."""
    return fqn or "(root)"


def mesh_axes(mesh: DeviceMesh) -> tuple[tuple[str, int], ...]:
    """Return the axes of a mesh with their sizes; unnamed ones are numbered."""
    names = mesh.mesh_dim_names or tuple(str(index) for index in range(mesh.ndim))
    return tuple((name, mesh.size(index)) for index, name in enumerate(names))


@_guarded
def registered_methods(module: nn.Module) -> tuple[str, ...]:
    """Return the methods of one module that `register_fsdp_forward_method` has wrapped."""
    return tuple(
        name
        for name, value in vars(module).items()
        if (code := getattr(getattr(value, "__func__", None), "__code__", None)) is not None
        and is_wrapped_method(code.co_name, code.co_filename)
    )


def is_wrapped_method(name: str, file: str) -> bool:
    """Is this code the wrapper that `register_fsdp_forward_method` puts around a method?"""
    return name == "wrapped_method" and file.endswith("_fully_shard.py")


def grad_tensors(output: object) -> tuple[torch.Tensor, ...]:
    """Return the tensors in `output` that FSDP2 can see and that require gradients."""
    try:
        from torch.distributed.fsdp._common_utils import collect_grad_tensors
    except ImportError:  # before 2.12: whatever a pytree is
        leaves = torch.utils._pytree.tree_leaves(output)
        return tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad)
    return tuple(collect_grad_tensors(output))


def is_in_backward() -> bool:
    """Is autograd running on this thread?"""
    return bool(torch._C._current_graph_task_id() != -1)


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return what `tensor` is a view of."""
    return tensor._base


def version_of(tensor: torch.Tensor) -> int:
    """Return how often its storage was written in place."""
    return tensor._version


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part without a node in autograd; a plain tensor is itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def non_persistent_names(module: nn.Module) -> frozenset[str]:
    """Return the names of a module's own buffers that are in no state dict."""
    return frozenset(module._non_persistent_buffers_set)


def add_state_dict_hook(module: nn.Module, hook: Callable[[nn.Module], None]) -> RemovableHandle:
    """Call `hook(module)` before `module.state_dict()` (PyTorch's own function has no types)."""
    handle = module.register_state_dict_pre_hook(lambda owner, *_: hook(owner))  # type: ignore[no-untyped-call]
    return cast("RemovableHandle", handle)


def replicate_function() -> Any:  # noqa: ANN401 - with overloads upstream
    """Return `replicate`, FSDP2's form of data parallelism without sharding."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return replicate


def checkpoint_activations(unit: nn.Module) -> None:
    """Recompute `unit` in backward. The composable form changes no names and no module, and FSDP knows it."""
    from torch.distributed._composable.checkpoint_activation import checkpoint

    checkpoint(unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEvent:
    """What a group logged, with what was to be seen at that moment."""

    key: int  # The same for the same group
    modules: tuple[nn.Module, ...]
    reshards: bool  # Will its forward pass end with sharded parameters?
    without_grad: tuple[str, ...]
    """Trainable parameters that this backward pass has not reached (meaningful in "post_backward")."""
    output: object  # What the module returned (in "post_forward")
    version: int  # How often its shards were written in place
    written: tuple[str, ...]
    """Gathered parameters of which this rank's part is not its shard."""


@_guarded
def read_event(frame: FrameType | None) -> GroupEvent | None:
    """Find the group that is logging: the nearest frame whose `self` is one."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    for _ in range(16):
        if frame is None:
            return None
        group = frame.f_locals.get("self")
        if isinstance(group, FSDPParamGroup):
            return GroupEvent(
                key=id(group),
                modules=tuple(group.modules),
                reshards=group.post_forward_mesh_info is not None,
                without_grad=tuple(_without_grad(group)) if frame.f_code.co_name == "post_backward" else (),
                output=frame.f_locals.get("output"),
                version=sum(version_of(local_of(param.sharded_param)) for param in group.fsdp_params),
                written=tuple(_written(group)),
            )
        frame = frame.f_back
    return None


def _without_grad(group: object) -> Iterator[str]:
    for param in group.fsdp_params:  # type: ignore[attr-defined]
        unsharded = getattr(param, "_unsharded_param", None)
        if not param.sharded_param.requires_grad or unsharded is None:
            continue
        if unsharded.grad is None and param.unsharded_accumulated_grad is None:
            yield param._param_fqn or param._module_info.param_name


def _written(group: object) -> Iterator[str]:
    if group._sharded_state.name != "UNSHARDED" or is_off_limits():  # type: ignore[attr-defined]
        return
    for param in group.fsdp_params:  # type: ignore[attr-defined]
        shard, gathered = local_of(param.sharded_param), local_of(param._unsharded_param)
        if type(shard) is not torch.Tensor or type(gathered) is not torch.Tensor:  # gathered by code of its own
            continue
        size, rank = (getattr(param.mesh_info, f"shard_mesh_{name}", default) for name, default in _ALONE)
        own = gathered.chunk(size, param.fsdp_placement.dim)[rank : rank + 1]
        if any(not _is_same(part, shard.to(part.device, part.dtype)) for part in own):
            yield param._param_fqn or param._module_info.param_name


_ALONE = (("size", 1), ("rank", 0))  # Of a mesh that shards nothing


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other) or torch.equal(one.nan_to_num(), other.nan_to_num())


def groups_of_ranks() -> frozenset[dist.ProcessGroup]:
    """Return every process group that this rank is in."""
    return frozenset(dist.distributed_c10d._world.pg_map)


def collectives_of(groups: Iterable[dist.ProcessGroup]) -> int:
    """Return how many collectives these groups have begun: their own count, which nobody has to intercept."""
    backends = {group._get_backend(device) for group in groups for device in group._device_types}
    return sum(cast("Any", backend)._get_sequence_number_for_group() for backend in backends)


@contextmanager
def alone() -> Iterator[None]:
    """Let the default process group be a loop-back: this rank and no other. Collective when it begins."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    own, default = groups[dist.get_rank()], dist.distributed_c10d._get_default_group()
    dist.distributed_c10d._update_default_pg(own)
    try:
        yield
    finally:
        dist.distributed_c10d._update_default_pg(default)


def is_off_limits() -> bool:
    """May nothing be looked at now: is a graph being traced or captured, or a function transformed?"""
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def refuse_off_limits(name: str) -> None:
    """Refuse to look at anything from inside of what is traced, transformed, captured or compiled."""
    if is_off_limits() or _is_in_compiled(sys._getframe(1)):
        what = f"{name} cannot be used inside a compiled or transformed function, or while a CUDA graph is captured"
        raise UsageError(what, where=name, hint="use it around the call: it changes nothing that runs inside of it")


def _is_in_compiled(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and frame.f_code.co_filename.endswith("eval_frame.py"):
            return True
        frame = frame.f_back
    return False


def owner_of_frame(frame: FrameType, model: nn.Module | None) -> tuple[tuple[nn.Module, ...], str] | None:
    """Return the modules and the parameter's name if FSDP2's own code for one group or parameter runs in `frame`."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    subject = frame.f_locals.get("self")
    if isinstance(subject, FSDPParam):
        info = subject._module_info
        names = {} if model is None else {module: fqn for fqn, module in model.named_modules()}
        return (info.module,), _join(names.get(info.module, type(info.module).__name__), info.param_name)
    if isinstance(subject, FSDPParamGroup):
        return tuple(subject.modules), ""
    return None
