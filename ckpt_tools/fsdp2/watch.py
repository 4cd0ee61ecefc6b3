"""Look over FSDP2's shoulder while a model runs: what it logs, what it cannot see, what mixes sharded with whole."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Literal, TextIO
from weakref import WeakKeyDictionary, ref

import torch
import torch.utils.checkpoint
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.checkpoint.names import group_names
from ckpt_tools.errors import UnreadableError
from ckpt_tools.fsdp2 import internals
from ckpt_tools.fsdp2.catalogue import build_finding, build_warning
from ckpt_tools.fsdp2.collective import this_rank
from ckpt_tools.fsdp2.compare_ranks import Trace, read_structure
from ckpt_tools.fsdp2.internals import shown
from ckpt_tools.text import first_few

_MAX_DEPTH = 3  # Levels of attributes that are searched for hidden tensors
_PATIENCE_S = 1.0  # What other ranks get to stop writing their traces
_MAX_SAMPLE_ELEMS = 4096  # Elements of every parameter that a step is compared on
Mode = Literal["grad", "no_grad", "reentrant"]
_MAX_EVENTS = 200_000  # Events that are kept in memory; a watch is for some steps, not for a training run


class Watch:
    """What was seen. Filled while the context is open, readable afterwards."""

    def __init__(self, model: nn.Module, trace: TextIO | None = None, directory: Path | None = None) -> None:
        # Weak, since the model leads to its last watch.
        self._names = WeakKeyDictionary({module: fqn for fqn, module in model.named_modules()})
        self._model = ref(model)
        self._trace = trace
        self._directory = directory
        self._depth: dict[int, int] = {}
        self._views: dict[str, list[tuple[torch.Tensor, int]]] = {}
        self._is_new_pass = True
        self._versions: dict[int, int] = {}  # Group → version of its shards when they were gathered
        self.is_open = True
        """Is it still watching?"""
        self.modes: dict[int, Mode] = {}
        """First module of a group (its id) → how it ran since the last backward pass began."""
        self._samples: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.events: list[str] = []
        """Passes of groups, in order: "pre_forward layers.0"."""
        self.findings: list[Finding] = []
        """What was wrong, once each."""

    def changed_views(self) -> tuple[str, ...]:
        """Return the modules whose output was a view and has been written in place since."""
        return tuple(
            fqn for fqn, views in self._views.items() if any(internals.version_of(t) != old for t, old in views)
        )

    def settled_traces(self) -> tuple[Trace, ...]:
        """Return the traces of all ranks that share the directory, once they have stopped growing; () without one."""
        if self._directory is None:
            return ()
        deadline = time.monotonic() + _PATIENCE_S
        sizes: list[int] | None = None
        while True:
            found = [path.stat().st_size for path in sorted(self._directory.glob("rank-*.trace"))]
            if found == sizes or time.monotonic() > deadline:
                return read_traces(self._directory)
            sizes = found
            time.sleep(0.2)

    def report(self, code: str, where: str, what: str) -> None:
        """Add a finding unless it is there already."""
        if not any((found.code, found.where) == (code, where) for found in self.findings):
            self.findings.append(build_finding(code, where, what))

    def see(self, message: str) -> None:
        """Take one message of FSDP2's logger."""
        kind = message.removeprefix("FSDP::").partition(" ")[0]
        is_pass = kind in ("pre_forward", "post_forward", "pre_backward", "post_backward")
        event = internals.read_event(sys._getframe(1)) if is_pass else None  # noqa: SLF001 - who logs is a caller
        if event is None:
            if kind == "root_pre_forward":
                self._depth.clear()  # of an iteration that failed
            self._write(kind)
            return
        fqn = "+".join(shown(self._names.get(module, "?")) for module in event.modules)
        missing = f" without {','.join(event.without_grad)}" if event.without_grad else ""
        self._write(f"{kind} {fqn}{missing}")
        in_backward = internals.is_in_backward()
        self._compare(kind, event)
        if kind == "pre_forward":
            self._note_mode(id(event.modules[0]), in_backward=in_backward)
        if in_backward:
            self._is_new_pass = True
            return
        if kind == "pre_forward":
            self._depth[event.key] = self._depth.get(event.key, 0) + 1
        elif kind == "post_forward":
            self._leave(event, fqn)

    def _compare(self, kind: str, event: internals.GroupEvent) -> None:
        """Report gathered parameters that are no longer what this rank's shard says, although that did not change."""
        if kind == "pre_forward":
            # What differs by now is old: shards have moved under parameters that were still gathered.
            self._versions[event.key] = -1 if event.written else event.version
        elif event.written and self._versions.get(event.key) == event.version:
            what = "was written in place while it was gathered, and the shard was not: FSDP2 discards that"
            self.report("lost-write", event.written[0], f"{what} ({len(event.written)} parameters of its unit)")

    def _note_mode(self, key: int, *, in_backward: bool) -> None:
        if self._is_new_pass and not in_backward:
            self.modes.clear()
            self._is_new_pass = False
        if torch.is_grad_enabled():
            self.modes[key] = "grad"
        elif self.modes.get(key) != "grad":
            self.modes[key] = "reentrant" if _in_reentrant_checkpoint(sys._getframe(1)) else "no_grad"  # noqa: SLF001

    def _leave(self, event: internals.GroupEvent, fqn: str) -> None:
        depth = self._depth[event.key] = max(0, self._depth.get(event.key, 0) - 1)
        # A group of several modules is entered through each of them.
        if depth and event.reshards and len(event.modules) == 1:
            self.report("double-wrap", fqn, "was called again inside its own forward pass, which reshards at the end")
        if len(event.modules) > 1 and event.output is None:
            self._depth[event.key] = 0
        if not torch.is_grad_enabled():
            return
        visible = internals.grad_tensors(event.output)
        hidden = () if visible else tuple(_hidden_tensors(event.output, _MAX_DEPTH))
        if hidden:
            kind = type(event.output).__name__
            self.report("opaque-output", fqn, f"returns a {kind}, in which FSDP2 cannot see the tensors ({hidden[0]})")
        # A detached alias shares the version counter and outlives the module's own reference.
        views = [t for t in visible if internals.base_of(t) is not None]
        self._views[fqn] = [(t.detach(), internals.version_of(t)) for t in views]

    def _write(self, line: str) -> None:
        if len(self.events) < _MAX_EVENTS:
            self.events.append(line)
            if self._trace is not None:
                self._trace.write(line + "\n")

    def before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Keep a sample of what an optimizer is about to move: where there is a gradient and a learning rate."""
        if internals.is_off_limits():  # a compiled step: what it runs is traced
            return
        self._samples, model = [], self._model()
        own = {id(p) for p in model.parameters()} if model is not None else set()
        own |= (
            {id(p.sharded) for each in internals.read_groups(model) for p in each.params} if model is not None else own
        )
        for group in optimizer.param_groups:
            rate = float(group.get("lr", 0))
            # A warm-up begins with steps too small to be seen, or of nothing.
            is_full = rate > 0 and rate >= 0.1 * float(group.get("initial_lr", rate))
            for parameter in group["params"] if is_full else ():
                if id(parameter) in own and parameter.grad is not None and not parameter.is_meta:
                    parts = [internals.local_of(t) for t in (parameter, parameter.grad)]
                    if {type(part) for part in parts} != {torch.Tensor}:  # who knows what their functions do
                        continue
                    weight, gradient = (part.flatten() for part in parts)
                    if bool(gradient[:_MAX_SAMPLE_ELEMS].any()):
                        self._samples.append((parameter, weight[:_MAX_SAMPLE_ELEMS].clone()))

    def after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Report a step that moved nothing."""
        if internals.is_off_limits():
            return
        samples, self._samples, model = self._samples, [], self._model()
        still = [
            (parameter, old)
            for parameter, old in samples
            if torch.equal(internals.local_of(parameter).flatten()[:_MAX_SAMPLE_ELEMS], old)
        ]
        # In float32 that a few stand still is rounding, once; in 16 bits it is for good.
        told = still if len(still) == len(samples) else [each for each in still if each[1].element_size() == 2]
        if not told or model is None or any(found.code == "unchanged" for found in self.findings):
            return
        names = [find_parameter(model, parameter) or "?" for parameter, _ in told]
        dtypes = ", ".join(sorted({str(old.dtype).removeprefix("torch.") for _, old in told}))
        rates = ", ".join(sorted({f"{float(group['lr']):.3g}" for group in optimizer.param_groups}))
        what = f"{len(told)} of {len(samples)} parameters with gradients did not move ({dtypes}, learning rate {rates})"
        kinds = first_few(group_names(names, None), 4)
        self.findings.append(build_warning("unchanged", type(optimizer).__name__, f"{what}: {kinds}"))

    def see_state_dict(self, module: nn.Module) -> None:
        """Take a `state_dict()` that is about to reshard `module`'s group."""
        model = self._model()
        for group in internals.read_groups(model) if model is not None else ():
            if group.training == "FORWARD" and any(param.module is module for param in group.params):
                site = _outer_site()
                what = f"state_dict() reshards it while its forward pass runs ({site})"
                self.report("mid-forward-reshard", shown(group.fqn), what)


def _in_reentrant_checkpoint(frame: FrameType | None) -> bool:
    """Is the first, gradient-less pass of a reentrant checkpoint running in `frame`?"""
    while frame is not None:
        if frame.f_code.co_name == "forward" and frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


def find_parameter(model: nn.Module, tensor: torch.Tensor) -> str | None:
    """Return the FQN of the parameter that `tensor` is, or is a view of; None when it is neither."""
    address = _address(tensor)
    for group in internals.read_groups(model):
        for param in group.params:
            if param.sharded is tensor or (address and address == _address(param.sharded)):
                return param.fqn
    for fqn, parameter in model.named_parameters():
        if parameter is tensor or (address and address == _address(parameter)):
            return fqn
    return None


def _address(tensor: torch.Tensor) -> int:
    local = internals.local_of(tensor)
    return 0 if local.is_meta else local.untyped_storage().data_ptr()


def _hidden_tensors(output: object, depth: int) -> Iterator[str]:
    """Yield where objects that no pytree opens hold tensors that require gradients."""
    if isinstance(output, torch.Tensor):
        if output.requires_grad:
            yield "tensor"
        return
    if depth == 0 or output is None or isinstance(output, str | bytes | int | float | nn.Module | type):
        return
    if isinstance(output, Mapping):
        parts = [(str(key), value) for key, value in output.items()]
    elif isinstance(output, list | tuple | set | frozenset):
        parts = [(str(index), value) for index, value in enumerate(output)]
    else:
        parts = [(f".{key}", value) for key, value in getattr(output, "__dict__", {}).items()]
    for name, value in parts:
        for below in _hidden_tensors(value, depth - 1):
            yield name if below == "tensor" else f"{name}{below}"


def _outer_site() -> str:
    """Return the nearest line outside of torch and of this package."""
    own = os.path.dirname(__file__)
    library = os.path.dirname(torch.__file__)
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith((own, library)):
            return f"{os.path.basename(frame.filename)}:{frame.lineno} in {frame.name}"
    return "?"


_LAST: WeakKeyDictionary[nn.Module, Watch] = WeakKeyDictionary()


def last_watch(model: nn.Module | None) -> Watch | None:
    """Return the latest watch of `model`; with None, of any model that still lives."""
    if model is not None:
        return _LAST.get(model)
    watches = list(_LAST.values())
    return watches[-1] if watches else None


@contextmanager
def watch(model: nn.Module, *, traces: str | os.PathLike[str] | None = None) -> Iterator[Watch]:
    """Watch `model` run: for `diagnose`, which then knows more, and for what fails silently.

    Changes no result, compiled functions included. Reads every gathered parameter twice a step (a tenth of a step of
    512 tokens on a CPU), and on GPUs waits for that: for smoke tests and for hunting, not for training.

    Args:
        model: The root. It may be sharded before or inside the context.
        traces: Directory for this rank's `rank-N.trace`, written as things happen, so that it outlives an abort.
            Ranks that share it can be compared (`read_traces`, `compare_traces`, `diagnose`).

    Yields:
        What is seen; `findings` and `events` stay readable afterwards.

    Raises:
        UsageError: It was to begin inside a compiled or transformed function, or while a CUDA graph is captured.
    """
    internals.refuse_off_limits("watch")
    with ExitStack() as stack:
        file = None
        if traces is not None:
            rank = this_rank()
            path = Path(traces)
            path.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(path / f"rank-{rank}.trace", "w", buffering=1, encoding="utf-8"))
            file.write(json.dumps({"rank": rank, "structure": read_structure(model)}) + "\n")
        seen = Watch(model, file, None if traces is None else Path(traces))
        _LAST.pop(model, None)
        _LAST[model] = seen
        for module in model.modules():
            handle = internals.add_state_dict_hook(module, seen.see_state_dict)
            stack.callback(handle.remove)
        stack.callback(setattr, seen, "is_open", False)
        stack.callback(register_optimizer_step_pre_hook(seen.before_step).remove)
        stack.callback(register_optimizer_step_post_hook(seen.after_step).remove)
        stack.enter_context(_listen(seen))
        yield seen


@contextmanager
def _listen(seen: Watch) -> Iterator[None]:
    """Take FSDP2's DEBUG messages, and keep them from everybody who did not ask for them."""
    logger = logging.getLogger(internals.LOGGER)
    level, wanted = logger.level, logger.getEffectiveLevel()

    def take(record: logging.LogRecord) -> bool:
        if record.levelno == logging.DEBUG:
            seen.see(record.getMessage())
        return record.levelno >= wanted

    logger.addFilter(take)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeFilter(take)


def read_traces(directory: str | os.PathLike[str]) -> tuple[Trace, ...]:
    """Read every rank's trace, finished or not, in rank order.

    Raises:
        UnreadableError: A file is not a trace.
    """
    found = []
    for path in sorted(Path(directory).glob("rank-*.trace")):
        header, *lines = path.read_text(encoding="utf-8").split("\n")
        try:
            fields = json.loads(header)
            rank, structure = int(fields["rank"]), tuple(map(str, fields["structure"]))
        except (ValueError, KeyError, TypeError) as error:
            raise UnreadableError(f"not the trace of a rank: {error}", where=str(path)) from error
        # Without its newline the last line was cut short.
        found.append(Trace(rank=rank, structure=structure, events=tuple(lines[:-1])))
    return tuple(sorted(found, key=lambda trace: trace.rank))
