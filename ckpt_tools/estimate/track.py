"""A training step without data: real FSDP2 code on fake tensors, with PyTorch's own memory tracker. Imports torch.

The tracker is private to PyTorch (`torch.distributed._tools`), and so are the fake process group and parts of what it
counts by: `refuse_torch` says which versions are known to work. Run it in a process of its own; the fake process group
is the process's default group.

Source: `torch/distributed/_tools/fsdp2_mem_tracker.py` and `mem_tracker.py` of torch 2.13.
"""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map_only

from ckpt_tools.description.layout import Mesh
from ckpt_tools.errors import CkptError
from ckpt_tools.estimate.model import batch_of, build, shard
from ckpt_tools.estimate.options import DTYPE_BYTES, OPTIMIZERS, Case
from ckpt_tools.estimate.report import Memory, Moment
from ckpt_tools.estimate.timeline import Timeline
from ckpt_tools.floors import FLOORS, is_older
from ckpt_tools.fsdp2 import build_device_mesh
from ckpt_tools.fsdp2.internals import local_of
from ckpt_tools.fsdp2.local import assemble
from ckpt_tools.models.recipe import Batch, Recipe, find_loss, loss_of

_CPU = torch.device("cpu")
_GROUPS = {
    "Sharded Param": "params",
    "Buffer": "params",
    "Sharded Grad": "grads",
    "OptState": "optimizer",
    "Activation": "activations",
    "Temp": "activations",
    "Inputs": "activations",
    "Unsharded Param": "gathered",
    "Unsharded Grad": "gathered",
    "All Gather": "gathered",
    "Reduce Scatter": "gathered",
}
"""The tracker's categories → ours."""
_HOST = ("params", "grads", "optimizer")
"""What offload keeps in host memory."""


def refuse_torch(version: str = torch.__version__) -> str | None:
    """Say why a torch of this version cannot track, or return None."""
    if is_older(version, FLOORS["torch"]):
        return f"torch {version} is older than {'.'.join(map(str, FLOORS['torch']))}, whose tracker ckpt uses"
    try:
        from torch.distributed._tools import fsdp2_mem_tracker
        from torch.testing._internal.distributed import fake_pg
    except ImportError as error:
        return f"torch {version} has no tracker for FSDP2: {error}"
    names = ("_update_peak_stats", "get_tracker_snapshot", "reset_mod_stats", "track_inputs")
    missing = [name for name in names if not hasattr(fsdp2_mem_tracker.FSDPMemTracker, name)]
    kinds = {kind.value for kind in getattr(fsdp2_mem_tracker, "_FSDPRefType", ())}
    missing += sorted(kinds ^ set(_GROUPS)) + ([] if hasattr(fake_pg, "FakeStore") else ["FakeStore"])
    if missing:
        return f"the tracker of torch {version} differs ({', '.join(missing)})"
    return None


def track(recipe: Recipe, case: Case) -> Memory | str:
    """Return what one rank's memory comes to in a training step, or why that cannot be said."""
    if case.quantize is not None:
        return "4-bit layers are not tracked"
    if case.state_dtype not in (None, case.master_dtype):
        return f"PyTorch's optimizers keep their state in the parameters' dtype, {case.master_dtype}"
    reason = refuse_torch()
    if reason is not None:
        return reason
    try:
        with _fake_world(case.mesh) as mesh, _one_sample_a_row(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _track(recipe, case, mesh)
    except CkptError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a model does with values that are not there
        text = str(error).strip().splitlines()
        return f"the model cannot run without data: {type(error).__name__}: {text[0][:200] if text else ''}"
    finally:
        gc.collect()


@contextmanager
def _fake_world(mesh: Mesh) -> Iterator[DeviceMesh]:
    """Make this process rank 0 of a group that nobody else is in, and whose collectives move nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=mesh.world_size, store=FakeStore())
    try:
        yield build_device_mesh(mesh)
    finally:
        dist.destroy_process_group()


@contextmanager
def _one_sample_a_row() -> Iterator[None]:
    """Let transformers take rows of a batch for one sample each.

    It looks into position ids for several, cannot without data, and would then make a mask of all pairs of tokens and
    copies of the keys' and values' heads, which training on one sample a row does not.
    """
    try:
        from transformers import masking_utils
    except ImportError:
        yield
        return
    name = "find_packed_sequence_indices"
    original = getattr(masking_utils, name, None)
    if original is None:  # another version, which does not look
        yield
        return

    def none_packed(position_ids: torch.Tensor) -> None:  # noqa: ARG001 - transformers' signature
        return None

    setattr(masking_utils, name, none_packed)
    try:
        yield
    finally:
        setattr(masking_utils, name, original)


def _track(recipe: Recipe, case: Case, mesh: DeviceMesh) -> Memory:
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = build(recipe, case)
    batch = batch_of(recipe, _base_of(model), case)
    shard(model, mesh, recipe, case)
    shapes = {id(p): tuple(local_of(p).shape) for p in model.parameters()}
    # Tables of frequencies that a model keeps beside its buffers are real.
    with FakeTensorMode(allow_non_fake_inputs=True):
        _fill(model, shapes)
        inputs = tree_map_only(torch.Tensor, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype), batch)
        return measure(model, inputs, case)


def _base_of(model: nn.Module) -> nn.Module:
    get_base = getattr(model, "get_base_model", None)
    return get_base() if callable(get_base) else model


def _fill(model: nn.Module, shapes: dict[int, tuple[int, ...]]) -> None:
    """Put tensors on the CPU, without data if a fake mode is active, in the place of those on meta; ties stay."""
    made: dict[int, nn.Parameter] = {}
    state: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in made:
            local = torch.empty(shapes[id(parameter)], dtype=parameter.dtype)
            made[id(parameter)] = nn.Parameter(assemble(local, parameter), requires_grad=parameter.requires_grad)
        state[name] = made[id(parameter)]
    model.load_state_dict(state, strict=False, assign=True)
    for module in model.modules():
        for name, buffer in list(module._buffers.items()):  # noqa: SLF001 - registering anew would forget persistence
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)  # noqa: SLF001


def measure(model: nn.Module, batch: Batch, case: Case) -> Memory:
    """Train a sharded model two steps on the CPU; return what the second takes: by then the optimizer has its state.

    Works with real tensors and ranks as well as with fake ones.
    """
    optimizer = optimizer_of(model, case)
    _fill_state(optimizer)
    tracker = _tracker_class()(model, optimizer)
    tracker.host = _HOST if case.offload else ()
    tracker.track_inputs(tuple(leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)))
    line = tracker.timeline
    with tracker, line.following(model, blocks_of(model)):
        output = model(**batch)
        loss = loss_of(output, find_loss(output))
        del output  # as trainers do: it holds the logits
        line.phase = "backward"
        line.enter("")
        loss.backward()  # type: ignore[no-untyped-call]
        del loss
        grads = tracker.now()["grads"]
        line.phase = "step"
        line.enter("")
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        held = tracker.now()
    passing = _passing(model, case)

    def on_device(found: dict[str, int]) -> dict[str, int]:
        step = 0 if case.offload else max(0, found["optimizer"] - held["optimizer"])
        more = {"optimizer": found["optimizer"] - step, "gathered": found["gathered"] + passing, "step": step}
        return found | more | dict.fromkeys(tracker.host, 0)

    at_peak = on_device(tracker.best)
    return Memory(
        params=held["params"],
        grads=grads,
        optimizer=held["optimizer"],
        activations=tracker.most["activations"],
        gathered=tracker.most["gathered"] + passing,
        peak=sum(at_peak.values()),
        host=held["params"] + grads + held["optimizer"] if case.offload else 0,
        at_peak=at_peak,
        moments=tuple(Moment(phase=phase, block=name, held=on_device(found)) for phase, name, found in line.moments),
    )


def _fill_state(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer make its state, as a first step would; the parameters' values do not matter here."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def optimizer_of(model: nn.Module, case: Case) -> torch.optim.Optimizer:
    """Return the case's optimizer, over what is trained; it goes parameter by parameter.

    The default on GPUs takes all parameters at once, and copies of them; `fused=True` does not.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if case.optimizer == "adamw":
        return torch.optim.AdamW(trained, foreach=False)
    if case.optimizer == "adam":
        return torch.optim.Adam(trained, foreach=False)
    return torch.optim.SGD(trained, lr=1e-3, momentum=0.9 * OPTIMIZERS[case.optimizer], foreach=False)


def blocks_of(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the units that FSDP gathers one by one; () of a model that ckpt did not shard."""
    from ckpt_tools.fsdp2 import plan_of

    plan = plan_of(model)
    return tuple(plan.blocks) if plan is not None else ()


def _passing(model: nn.Module, case: Case) -> int:
    """Return what passes through the device on its way from and to host memory: the largest block's part."""
    if not case.offload:
        return 0
    most = 0
    for name in blocks_of(model):
        total = 0
        for parameter in model.get_submodule(name).parameters():
            local = local_of(parameter)
            total += local.numel() * local.element_size()
            total += local.numel() * DTYPE_BYTES[case.reduce_dtype] if parameter.requires_grad else 0
        most = max(most, total)
    return most


def _tracker_class() -> Any:  # noqa: ANN401 - private to torch, imported late
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    class Tracker(FSDPMemTracker):  # type: ignore[no-untyped-call]
        """Keeps the peak of what is on the device, and the most of every group, instead of peaks by module."""

        host: tuple[str, ...] = ()
        """Groups that are not on the device."""

        def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            super().__init__(model, optimizer)
            self.most = dict.fromkeys(_GROUPS.values(), 0)
            self.best = dict(self.most)
            self.highest = -1
            self.timeline = Timeline(self.now)

        def now(self) -> dict[str, int]:
            """Return the bytes of every group."""
            found = dict.fromkeys(_GROUPS.values(), 0)
            for kind, nbytes in self._curr_mem_snap.get(_CPU, {}).items():
                group = _GROUPS.get(getattr(kind, "value", kind))
                if group is not None:
                    found[group] += nbytes
            return found

        def _update_peak_stats(self, peak_state: object) -> None:  # noqa: ARG002 - the tracker's own signature
            found = self.now()
            for group, nbytes in found.items():
                if nbytes > self.most[group]:
                    self.most[group] = nbytes
            total = sum(nbytes for group, nbytes in found.items() if group not in self.host)
            if total > self.highest:
                self.highest = total
                self.best = copy.copy(found)
            self.timeline.see(found, total)

    return Tracker
