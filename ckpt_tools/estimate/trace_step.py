"""One training step under PyTorch's tracker, as moments: what is held while each block runs. Imports torch."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from ckpt_tools.errors import UsageError
from ckpt_tools.estimate.case import Case
from ckpt_tools.estimate.formula import Stage, state_bytes
from ckpt_tools.estimate.model import fuse_loss
from ckpt_tools.estimate.model_sizes import DTYPE_BYTES, OPTIMIZERS, TRACKED_OPTIMIZERS
from ckpt_tools.estimate.report import Memory, Moment, UntrackedError
from ckpt_tools.fsdp2.internals import local_of
from ckpt_tools.fsdp2.ties import output_layer
from ckpt_tools.models.recipe import Batch, find_loss, loss_of

_CPU = torch.device("cpu")
GROUPS = {
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
_HOST = ("params", "grads", "optimizer")  # What offload keeps in host memory
_STEP = "step"
Bytes = Mapping[str, int]  # Bytes by group


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """What one run showed."""

    moments: Mapping[str, Bytes]  # Moment ("fwd model.layers.3") → what was held when it was most in all
    most: Mapping[str, Bytes]  # Moment → the most of every group
    held: Bytes  # Between steps, gradients as they are once backward is over
    saved: int  # Activations when the last block has run forward: what a micro-batch in flight keeps
    passing: int  # What passes through the device on its way from and to host memory


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStep:
    """How a forward and its backward are run."""

    batch: Batch
    run: Callable[[nn.Module, Batch, Callable[[], None]], None]
    """Takes model, batch, and what to call between forward and backward."""
    has_pipeline: bool = False


def step_of(model: nn.Module, batch: Batch, case: Case, stage: Stage, width: int) -> TrainingStep:
    """Return how a case's step runs on a stage and prepare the model; raise UntrackedError if it cannot be cut."""
    special = case.sequence_parallel or case.loss_parallel or case.fused_loss or case.mesh.size("pp") > 1
    if not special:
        return TrainingStep(batch=batch, run=_plain_step)
    if set(batch) != {"input_ids", "labels"}:
        raise UntrackedError(f"how the sequence of a {type(model).__name__} is split is not known")
    batch = dict(batch)
    samples, tokens = batch["input_ids"].shape
    tp = case.mesh.size("tp") if case.sequence_parallel else 1
    if tokens % tp:
        raise UsageError(f"{tokens} tokens are not divisible by tp={tp}", hint="choose a --seq-len that tp divides")
    if case.sequence_parallel:
        batch["position_ids"] = torch.empty((1, tokens), dtype=torch.long, device="meta")
    if not stage.has_embedding:
        from ckpt_tools.models.replace_parameters import DTYPES

        del batch["input_ids"]
        shape = (samples, tokens // tp, width)
        batch["inputs_embeds"] = torch.empty(shape, dtype=DTYPES[case.param_dtype], device="meta")
    run = _plain_step
    if not stage.has_output:
        del batch["labels"]
        run = _passed_on
    elif case.fused_loss:
        del batch["labels"]
        output = output_layer(model)
        if output is None or tp * case.mesh.size("tp") > 1:
            raise UntrackedError("--fused-loss is supported only for output layers that tp does not shard")
        fuse_loss(output)
        run = _fused_step
    elif case.loss_parallel:
        run = _parallel_step
    return TrainingStep(batch=batch, run=run, has_pipeline=case.mesh.size("pp") > 1)


def _plain_step(model: nn.Module, batch: Batch, between: Callable[[], None]) -> None:
    output = model(**batch)
    loss = loss_of(output, find_loss(output))
    del output  # as trainers do: it holds the logits
    between()
    loss.backward()  # type: ignore[no-untyped-call]


def _parallel_step(model: nn.Module, batch: Batch, between: Callable[[], None]) -> None:
    from torch.distributed.tensor.parallel import loss_parallel

    batch = dict(batch)
    labels = batch.pop("labels").flatten()
    with loss_parallel():
        loss = functional.cross_entropy(model(**batch).logits.flatten(0, 1).float(), labels)
        between()
        loss.backward()  # type: ignore[no-untyped-call]


def _fused_step(model: nn.Module, batch: Batch, between: Callable[[], None]) -> None:
    loss = model(**batch).logits
    between()
    loss.backward()


def _passed_on(model: nn.Module, batch: Batch, between: Callable[[], None]) -> None:
    hidden = model(**batch).logits
    between()
    torch.autograd.backward(hidden, torch.empty_like(hidden))


def measure(model: nn.Module, case: Case, step: TrainingStep, labels: Mapping[str, str]) -> StepTrace:
    """Train a sharded model two steps on the CPU and return the second's moments: by then the optimizer has its state.

    Tensors and ranks may be real or fake. `labels` maps the name of a block to what its moments are called.
    """
    optimizer = optimizer_of(model, case)
    _fill_state(optimizer)
    for name, tensor in step.batch.items():
        if name == "inputs_embeds":
            tensor.requires_grad_()
    tracker = _tracker_class()(model, optimizer)
    tracker.host = _HOST if case.offload else ()
    tracker.track_inputs(tuple(leaf for leaf in tree_leaves(step.batch) if isinstance(leaf, torch.Tensor)))
    for name, label in labels.items():
        tracker.follow(model.get_submodule(name), label)
    with _own_garbage(), tracker:
        if step.has_pipeline:  # gradients of the micro-batches before, on all ranks whole until the last one
            _synchronise(model, is_last=False)
            step.run(model, step.batch, tracker.turn)
            _synchronise(model, is_last=True)
            tracker.reset_mod_stats()
            tracker.restart()
        step.run(model, step.batch, tracker.turn)
        grads = tracker.now()["grads"]
        tracker.enter(_STEP)
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        held = tracker.now() | {"grads": grads}
    state = _computed_state(model, case)
    held["optimizer"] += state
    for found in (*tracker.moments.values(), *tracker.most.values()):
        found["optimizer"] += state
    return StepTrace(
        moments=tracker.moments,
        most=tracker.most,
        held=held,
        saved=tracker.saved,
        passing=_passing(model, labels, case),
    )


@contextmanager
def _own_garbage() -> Iterator[None]:
    """Collect garbage at the beginning of moments alone, and only what is new: fast, and the same in every run."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()


def _synchronise(model: Any, *, is_last: bool) -> None:  # noqa: ANN401 - FSDP's methods
    model.set_requires_gradient_sync(is_last)
    model.set_reshard_after_backward(is_last)
    model.set_is_last_backward(is_last)


def total(base: StepTrace, longer: Sequence[tuple[int, StepTrace]], case: Case, stage: Stage) -> Memory:
    """Return what all layers take: every moment grows by as much for each layer that was left out.

    `longer` has, for every row of layers, how many times one was left out and a run with one more.
    """

    def grown(select: Callable[[StepTrace], Bytes], group: str) -> int:
        first = select(base)[group]
        return first + sum(times * (select(trace)[group] - first) for times, trace in longer)

    waiting = base.saved + sum(times * (trace.saved - base.saved) for times, trace in longer)
    hidden = waiting - base.saved if case.offload_activations else 0
    others = 0 if case.offload_activations else round((stage.in_flight - 1) * waiting)
    on_host = _HOST if case.offload else ("optimizer",) if case.offload_optimizer else ()
    held = {group: grown(lambda trace: trace.held, group) for group in _HOST}
    best: dict[str, int] = {}
    line: dict[str, Bytes] = {}
    activations = gathered = 0
    for moment in base.moments:
        at = {group: grown(lambda trace, key=moment: trace.moments[key], group) for group in base.held}  # type: ignore[misc]
        most = {group: grown(lambda trace, key=moment: trace.most[key], group) for group in base.held}  # type: ignore[misc]
        at["step"] = 0
        if moment == _STEP:
            at["step"] = 0 if case.offload else max(0, at["optimizer"] - held["optimizer"])
            at["optimizer"] = min(at["optimizer"], held["optimizer"])
        else:
            cut = min(hidden, at["activations"]) if case.offload_activations else 0
            at["activations"] += others - cut
            most["activations"] += others - cut
        at["gathered"] += base.passing
        for group in on_host:
            if case.offload or moment != _STEP:
                at[group] = 0
        activations, gathered = max(activations, most["activations"]), max(gathered, most["gathered"])
        line[moment] = at
        if not best or sum(at.values()) > sum(best.values()):
            best = at
    host = sum(held.values()) if case.offload else held["optimizer"] if case.offload_optimizer else 0
    return Memory(
        params=held["params"],
        grads=held["grads"],
        optimizer=held["optimizer"],
        activations=activations,
        gathered=gathered + base.passing,
        peak=sum(best.values()),
        host=host + round(stage.in_flight * hidden),
        at_peak=best,
        moments=_timeline(line),
    )


_PHASES = {"begin": "forward", "fwd": "forward", "after": "forward", "turn": "backward", "bwd": "backward"}


def _timeline(held: Mapping[str, Bytes]) -> tuple[Moment, ...]:
    """Return the moments of a step as people see it: what is between two blocks belongs to the first."""
    found: list[Moment] = []
    names = list(held)
    for name, after in zip(names, [*names[1:], ""], strict=True):
        kind, _, block = name.partition(" ")
        is_between = kind == "after" and after.startswith("fwd")
        if is_between and sum(held[name].values()) <= sum(found[-1].held.values()):
            continue
        if is_between:
            found.pop()
        block = block if is_between or kind != "after" else ""
        found.append(Moment(phase=_PHASES.get(kind, _STEP), block=block, held=held[name]))
    return tuple(found)


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
    if not _is_run(case):
        return torch.optim.SGD(trained, lr=1e-3, foreach=False)
    if case.optimizer == "adamw":
        return torch.optim.AdamW(trained, foreach=False)
    if case.optimizer == "adam":
        return torch.optim.Adam(trained, foreach=False)
    return torch.optim.SGD(trained, lr=1e-3, momentum=0.9 * OPTIMIZERS[case.optimizer].values, foreach=False)


def _computed_state(model: nn.Module, case: Case) -> int:
    """Return the bytes of state that the optimizer that ran does not have and the case's has."""
    if _is_run(case):
        return 0
    return round(state_bytes(case) * sum(local_of(p).numel() for p in model.parameters() if p.requires_grad))


def _is_run(case: Case) -> bool:
    return case.optimizer in TRACKED_OPTIMIZERS and case.state_dtype in (None, case.master_dtype)


def _passing(model: nn.Module, blocks: Mapping[str, str], case: Case) -> int:
    """Return what passes through the device on its way from and to host memory: the largest block's part."""
    if not case.offload:
        return 0
    most = 0
    for name in blocks:
        part = 0
        for parameter in model.get_submodule(name).parameters():
            local = local_of(parameter)
            part += local.numel() * local.element_size()
            part += local.numel() * DTYPE_BYTES[case.reduce_dtype] if parameter.requires_grad else 0
        most = max(most, part)
    return most


def _tracker_class() -> Any:  # noqa: ANN401, C901 - private to torch, imported late
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    class Tracker(FSDPMemTracker):  # type: ignore[no-untyped-call]
        """Keeps what is on the device when it is most, for every moment of a step, instead of peaks by module."""

        host: tuple[str, ...] = ()  # Groups that are not on the device

        def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            super().__init__(model, optimizer)
            self.saved = 0
            self.restart()

        def restart(self) -> None:
            """Forget what was, and begin a forward pass."""
            self.moments: dict[str, dict[str, int]] = {}
            self.most: dict[str, dict[str, int]] = {}
            self._goes_back = False
            self.enter("begin")
            self._carried = self.now()["activations"]  # inputs, and gradients of the micro-batches before

        def enter(self, moment: str) -> None:
            """Begin a moment; what only cycles of references hold is gone by then, in every run alike."""
            gc.collect()
            self._moment, self._highest = moment, -1
            if moment in self.moments:
                self._highest = sum(size for group, size in self.moments[moment].items() if group not in self.host)
            self._update_peak_stats(None)

        def turn(self) -> None:
            """Begin backward."""
            self._goes_back = True
            self.enter("turn")

        def follow(self, block: nn.Module, label: str) -> None:
            """Make forward and backward of a block moments of their own."""

            def before(*_: object) -> None:
                if not self._goes_back:
                    self.enter(f"fwd {label}")

            def after(_module: object, _args: object, output: object) -> None:
                if self._goes_back:
                    return
                self.enter(f"after {label}")
                self.saved = self.now()["activations"] - self._carried
                tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
                if tensors and tensors[0].requires_grad:
                    tensors[0].register_hook(lambda _: self.enter(f"bwd {label}"))  # type: ignore[no-untyped-call]

            block.register_forward_pre_hook(before)
            block.register_forward_hook(after)

        def now(self) -> dict[str, int]:
            """Return the bytes of every group."""
            found = dict.fromkeys(GROUPS.values(), 0)
            for kind, nbytes in self._curr_mem_snap.get(_CPU, {}).items():
                group = GROUPS.get(getattr(kind, "value", kind))
                if group is not None:
                    found[group] += nbytes
            return found

        def _update_peak_stats(self, peak_state: object) -> None:  # noqa: ARG002 - the tracker's own signature
            found = self.now()
            most = self.most.setdefault(self._moment, dict.fromkeys(found, 0))
            for group, nbytes in found.items():
                if nbytes > most[group]:
                    most[group] = nbytes
            together = sum(nbytes for group, nbytes in found.items() if group not in self.host)
            if together > self._highest:
                self._highest = together
                self.moments[self._moment] = copy.copy(found)

    return Tracker
