"""A training step without data: real FSDP2 code on fake tensors, with PyTorch's own memory tracker. Imports torch.

The tracker is private to PyTorch (`torch.distributed._tools`), and so are the fake process group and parts of what it
counts by: `refuse_torch` says which versions are known to work. Run it in a process of its own; the fake process group
is the process's default group.

Source: `torch/distributed/_tools/fsdp2_mem_tracker.py` and `mem_tracker.py` of torch 2.13.
"""

from __future__ import annotations

import gc
import re
import warnings
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from ckpt_tools.checkpoint.layout import Mesh
from ckpt_tools.errors import CkptError
from ckpt_tools.estimate.case import Case
from ckpt_tools.estimate.formula import Stage, stages_of
from ckpt_tools.estimate.model import batch_of, build, shard
from ckpt_tools.estimate.report import Memory, UntrackedError
from ckpt_tools.estimate.trace_step import GROUPS, StepTrace, measure, step_of, total
from ckpt_tools.floors import FLOORS, is_older
from ckpt_tools.fsdp2 import build_device_mesh, find_blocks
from ckpt_tools.fsdp2.internals import local_of
from ckpt_tools.fsdp2.local import assemble
from ckpt_tools.fsdp2.lora import base_of
from ckpt_tools.fsdp2.ties import input_layer, output_layer
from ckpt_tools.models.recipe import Recipe


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
    missing += sorted(kinds ^ set(GROUPS)) + ([] if hasattr(fake_pg, "FakeStore") else ["FakeStore"])
    if missing:
        return f"the tracker of torch {version} is not the expected one ({', '.join(missing)})"
    return None


def track(recipe: Recipe, case: Case) -> Memory | str:
    """Return what one rank's memory comes to in a training step, or why that cannot be said."""
    reason = refuse_torch()
    if reason is not None:
        return reason
    try:
        with _fake_world(case.live_mesh) as mesh, _as_on_devices():
            return _worst_stage(recipe, case, mesh)
    except CkptError:
        raise
    except UntrackedError as error:
        return str(error)
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
def _as_on_devices() -> Iterator[None]:
    """Keep tensors without data from being treated in another way than those with.

    DTensor computes shapes of whole tensors in a fake mode of its own, as it does beside real tensors: the tracker
    leaves out what another mode makes; in its own it would count whole logits that no rank ever has. transformers looks
    into position ids for several samples in a row, cannot without data, and would then make a mask of all pairs of
    tokens and copies of the keys' and values' heads, which training on one sample a row does not.
    """
    from torch.distributed.tensor import _sharding_prop as propagation

    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        stack.enter_context(_finding_nothing(propagation, "detect_fake_mode"))
        with suppress(ImportError):
            from transformers import masking_utils

            stack.enter_context(_finding_nothing(masking_utils, "find_packed_sequence_indices"))
        yield


@contextmanager
def _finding_nothing(module: object, name: str) -> Iterator[None]:
    """Let a function return None, in the versions that have it."""
    original = getattr(module, name, None)
    if original is not None:
        setattr(module, name, lambda *_, **__: None)
    try:
        yield
    finally:
        if original is not None:
            setattr(module, name, original)


def _worst_stage(recipe: Recipe, case: Case, mesh: DeviceMesh) -> Memory:
    with torch.device("meta"):
        model = recipe.build()
    rows = rows_of(model, find_blocks(model, recipe.blocks(model)))
    if case.mesh.size("pp") == 1:
        (stage,) = stages_of(0, case)
        return _track_stage(recipe, case, mesh, rows, stage)
    if len(rows) != 1:
        raise UntrackedError("pipelines are supported only for models with a single stack of layers")
    found = []
    for stage in stages_of(len(rows[0].kinds), case):
        part = replace(rows[0], kinds=rows[0].kinds[stage.first : stage.first + stage.count], start=stage.first)
        found.append(_track_stage(recipe, case, mesh, (part,), stage))
    return max(found, key=lambda memory: memory.peak)


def _track_stage(recipe: Recipe, case: Case, mesh: DeviceMesh, rows: tuple[LayerRow, ...], stage: Stage) -> Memory:
    """Track as few layers as tell all, and all of them where the model does not run with few."""
    cuts = {row: slim(row.kinds) for row in rows}
    base = {row.name: row.shifted(cut.base) for row, cut in cuts.items()}
    short = {row: cut for row, cut in cuts.items() if cut.left_out}
    try:
        first = _run(recipe, case, mesh, base, stage)
        more = [
            (cut.left_out, _run(recipe, case, mesh, base | {row.name: row.shifted(cut.longer)}, stage))
            for row, cut in short.items()
        ]
        return total(first, more, case, stage)
    except (CkptError, UntrackedError):
        raise
    except Exception:
        if not short:
            raise
    whole = {row.name: row.shifted(range(len(row.kinds))) for row in rows}
    return total(_run(recipe, case, mesh, whole, stage), [], case, stage)


def _run(recipe: Recipe, case: Case, mesh: DeviceMesh, kept: Mapping[str, Sequence[int]], stage: Stage) -> StepTrace:
    from torch._subclasses.fake_tensor import FakeTensorMode

    before: dict[str, str] = {}

    def prepare(model: nn.Module) -> None:
        before.update(keep_layers(model, kept))
        if case.mesh.size("pp") > 1:
            cut_stage(model, stage)

    with torch.device("meta"):
        width = width_of(recipe.build()) if not stage.has_embedding else 0
    model = build(recipe, case, prepare)
    base = base_of(model) or model
    batch = batch_of(recipe, base, case)
    step = step_of(base, batch, case, stage, width)
    blocks = shard(model, mesh, recipe, case)
    shapes = {id(p): tuple(local_of(p).shape) for p in model.parameters()}
    # Tables of frequencies that a model keeps beside its buffers are real.
    with FakeTensorMode(allow_non_fake_inputs=True):
        _fill(model, shapes)
        inputs = tree_map_only(torch.Tensor, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype), step.batch)
        labels = {block: before.get(block.removeprefix("base_model.model."), block) for block in blocks}
        return measure(model, case, replace(step, batch=inputs), labels)


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


# Fewer layers that tell as much: layers of one kind are equal, so one more of them shows what each adds

_SHOWN = 4
"""Layers that are kept of a row of equal ones: the first, the second, the last but one, the last. Neighbours of a layer
decide what is gathered beside it, so these four stand for all."""
_LONGEST_PERIOD = 12  # Layers of several kinds may take turns, every so many


@dataclass(frozen=True, slots=True)
class Slim:
    """Layers to run in place of all, and how to tell from them what all would take."""

    base: tuple[int, ...]  # Indices of those that are kept
    longer: tuple[int, ...]  # The same with one more of what repeats
    left_out: int  # How many times what `longer` has more than `base` is missing in `base`


def slim(kinds: Sequence[Hashable]) -> Slim:
    """Choose the layers to run: the fewest that show every kind, and what one more of the most frequent adds.

    Equal `kinds` take the same memory. All layers run, and none is left out, where running fewer twice is not cheaper.
    """
    everything = tuple(range(len(kinds)))
    best, cost = Slim(everything, everything, 0), len(kinds)
    for period in range(1, min(_LONGEST_PERIOD, len(kinds) // 2) + 1):
        units = max(2, -(-_SHOWN // period))
        start = 0
        while start + period < len(kinds):
            end = start + period
            while end < len(kinds) and kinds[end] == kinds[end - period]:
                end += 1
            repeats = (end - start) // period
            left_out = repeats - units
            kept = len(kinds) - left_out * period
            if left_out > 0 and 2 * kept + period < cost:
                head = start + period * -(-units // 2)
                tail = start + period * (repeats - units // 2)
                longer = everything[: head + period] + everything[tail:]
                best, cost = Slim(everything[:head] + everything[tail:], longer, left_out), 2 * kept + period
            start = max(end - period, start) + 1
    return best


# The layers of a model as rows of equal ones, and the model with some of them only

_INDEXED = re.compile(r"(.+)\.(\d+)")
_COUNTED = ("layer_idx", "layer_id", "layer_number", "block_idx")  # What differs between layers that are equal


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRow:
    """The blocks in one list of modules."""

    name: str  # FQN of the list
    kinds: tuple[Hashable, ...]  # What each of its members is; equal ones take the same memory
    start: int = 0  # Of a stage: which member `kinds` begins with

    def shifted(self, indices: Iterable[int]) -> tuple[int, ...]:
        """Return indices into `kinds` as indices into the list."""
        return tuple(self.start + index for index in indices)


def rows_of(model: nn.Module, blocks: Iterable[str]) -> tuple[LayerRow, ...]:
    """Return the lists that consist of blocks."""
    members: dict[str, set[int]] = defaultdict(set)
    for block in blocks:
        match = _INDEXED.fullmatch(block)
        if match is not None:
            members[match[1]].add(int(match[2]))
    found = []
    for name, indices in members.items():
        modules = model.get_submodule(name)
        if isinstance(modules, nn.ModuleList) and indices == set(range(len(modules))):
            found.append(LayerRow(name=name, kinds=tuple(map(_kind, modules))))
    return tuple(found)


def _kind(layer: nn.Module) -> Hashable:
    """Return all that decides what a layer takes: classes, plain attributes, and the parameters."""
    parts: list[Hashable] = []
    for name, module in layer.named_modules():
        values = {key: value for key, value in vars(module).items() if isinstance(value, (bool, int, float, str))}
        plain = tuple(sorted((key, value) for key, value in values.items() if key not in _COUNTED))
        parts.append((name, type(module), plain))
    parts += [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in layer.named_parameters()]
    return tuple(parts)


def keep_layers(model: nn.Module, kept: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Leave out all layers but those in `kept`, by list; return the FQN of every layer left → the FQN that it had."""
    before: dict[str, str] = {}
    for name, indices in kept.items():
        modules = list(model.get_submodule(name).children())
        num = len(modules)
        path, _, key = name.rpartition(".")
        setattr(model.get_submodule(path), key, nn.ModuleList(modules[index] for index in indices))
        before |= {f"{name}.{new}": f"{name}.{old}" for new, old in enumerate(indices)}
        for config in _configs(model):
            for field, value in list(vars(config).items()):
                if isinstance(value, (list, tuple)) and len(value) == num:
                    config.__dict__[field] = type(value)(value[index] for index in indices)
    return before


def _configs(model: nn.Module) -> list[Any]:
    found: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "__dict__"):
            found[id(config)] = config
    return list(found.values())


def cut_stage(model: nn.Module, stage: Stage) -> None:
    """Leave out embedding and output where a stage has none; raise UntrackedError if the model does not name them."""
    if not stage.has_embedding:
        _leave_out(model, input_layer(model))
    if not stage.has_output:
        _leave_out(model, output_layer(model))


def width_of(model: nn.Module) -> int:
    """Return the width of what an embedding puts out."""
    embedding = input_layer(model)
    return 0 if embedding is None else int(embedding.embedding_dim)  # type: ignore[arg-type]


def _leave_out(model: nn.Module, layer: nn.Module | None) -> None:
    if layer is None:
        raise UntrackedError(f"how a pipeline splits a {type(model).__name__} is not known")
    for module in model.modules():
        for key, child in list(module.named_children()):
            if child is layer:
                setattr(module, key, nn.Identity())
