"""Comparisons: this rank's shards with the source, gradients with the reference, one model with another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

from ckpt_tools.checkpoint.dtypes import BY_TORCH_NAME
from ckpt_tools.checkpoint.entries import Finding, TensorEntry
from ckpt_tools.checkpoint.formats.opening import open_path
from ckpt_tools.checkpoint.layout import Box, Mesh, Placement, Shard, cut_tensor
from ckpt_tools.checkpoint.names.foreign import NameOrigin
from ckpt_tools.checkpoint.transform import find_model, strip_wrappers
from ckpt_tools.checks.values import (
    ALL_ZERO,
    CONSTANT,
    CONSTANT_HINT,
    NOT_FINITE,
    ZERO_HINT,
    Strange,
    is_weight,
    may_be_infinite,
    place_of,
    report_strange,
    zero_weights,
)
from ckpt_tools.fsdp2.collective import gather
from ckpt_tools.fsdp2.internals import local_of
from ckpt_tools.fsdp2.load import targets_of
from ckpt_tools.fsdp2.local import bytes_of
from ckpt_tools.fsdp2.names import architecture_of, match_names, shapes_of
from ckpt_tools.fsdp2.quant_state import quantised_of
from ckpt_tools.fsdp2.read import BoxReader
from ckpt_tools.models.conventions import CONVENTIONS
from ckpt_tools.preflight.smoke.blueprint import Blueprint
from ckpt_tools.preflight.smoke.setting import SmokeSetting
from ckpt_tools.text import first_few
from ckpt_tools.transfer.box_bytes import start_of
from ckpt_tools.transfer.value_counts import Counts, count_values
from ckpt_tools.units import format_number

LIVE_NAMES = "live-names"  # Code of a checkpoint whose names are not those of the live model
GRADIENT_FLOOR = 1e-3
"""A gradient is compared relative to its largest element, or to this part of the largest of all parameters.

Some gradients are 0 but for rounding (the bias of attention keys): relative to themselves, noise is all there is.
"""
_ROUNDING = 1e-6
"""Part of the largest gradient of all that a difference may be in any case: some units in its last place, in float32.

A UNet's biases before a norm of as many groups as channels are sums of thousands of terms that cancel.
"""


def expected_box(tensor: torch.Tensor) -> Box:
    """Return what this rank must hold, in closed form, from mesh and placements alone; all of a plain tensor."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Box((0,) * len(shape), shape)
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or ("dp_shard",)
    axes = Mesh(tuple(zip(names, mesh.mesh.shape, strict=True)))
    placements: dict[str, Placement] = {
        name: Shard(placement.dim)
        for name, placement in zip(names, tensor.placements, strict=True)
        if hasattr(placement, "dim")
    }
    coordinate = tuple(mesh.get_coordinate() or ())
    return cut_tensor(shape, axes, placements).local_box(axes.rank(coordinate))


@dataclass(frozen=True, slots=True, kw_only=True)
class NameCheck:
    """How the names of the checkpoint are those of the model."""

    title: str  # By which map they were found, for people
    note: str = ""  # What `dcp.load` needs that this run does not know of
    finding: Finding | None = None  # Why stock `dcp.load(model.state_dict())` would fail


def judge_names(model: nn.Module, blueprint: Blueprint) -> NameCheck:
    """Say by which map a loaded model's names were found, and hold them against what `dcp.load` looks for.

    Files of the hub are renamed by everybody who loads them. `dcp.load` renames nothing: names of a checkpoint that
    it reads must be the live model's, under a root or wrappers that the training script may have as well.
    """
    is_adapted = blueprint.setting.options.lora
    inner = model.get_base_model() if is_adapted else model  # type: ignore[operator]
    with open_path(blueprint.source, as_part=True) as opened:
        match = match_names(opened.checkpoint, inner, _wanted(model, blueprint), "auto")
        inside, root = find_model(opened.checkpoint)
        if is_adapted or not opened.format.loads_by_dcp:  # an adapted model's own names are nobody's checkpoint
            return NameCheck(title=match.title)
    state = {name: one for name, one in model.state_dict(keep_vars=True).items() if torch.is_tensor(one)}
    live = shapes_of({strip_wrappers(name): one for name, one in state.items()})
    stored = {strip_wrappers(entry.fqn).removeprefix(root): entry for entry in inside.tensors}
    absent = [name for name in live if name not in stored]
    reshaped = [name for name, shape in live.items() if name in stored and stored[name].shape != shape]
    if wrong := absent or reshaped:
        way_on = ["load with ckpt_tools.fsdp2.load_checkpoint(model, path), which maps names as this run did"]
        known = architecture_of(inner)
        if absent and known is not None and known.is_known:
            way_on.insert(0, _make_live(blueprint.setting))
        finding = Finding.error(
            code=LIVE_NAMES,
            where=wrong[0],
            what=f"dcp.load(model.state_dict(), ...) would fail: {len(wrong)} of the live model's {len(live)} tensors "
            f"are not in the checkpoint {'by their names' if absent else 'in their shapes'}: {first_few(wrong, 3)}",
            hint=", or ".join(way_on),
        )
        return NameCheck(title=match.title, finding=finding)
    note = ""
    if any(strip_wrappers(entry.fqn) != entry.fqn for entry in stored.values()):
        note = "the names contain wrapper prefixes: dcp.load finds them in a model that is wrapped the same way"
    elif compiled := [name for name in state if strip_wrappers(name) != name]:
        note = f"dcp.load finds {first_few(compiled, 1)} in get_model_state_dict(model), not in model.state_dict()"
    elif root:
        note = f"the names are below {root!r}: dcp.load finds them in a state dict nested the same way"
    return NameCheck(title=match.title, note=note)


def _make_live(setting: SmokeSetting) -> str:
    return f"write the live names: `ckpt reshard {setting.options.label} DST --mesh {setting.mesh} --names live`"


def foreign_names(missing: Sequence[str], num_names: int, owner: NameOrigin, setting: SmokeSetting) -> Finding:
    """Return the finding that a checkpoint has the names of somebody else's model, `owner`'s."""
    way_on = owner.way_on.replace("{source}", setting.options.label)
    if owner.code in CONVENTIONS:
        way_on = f"{_make_live(setting)}; {way_on}"
    return Finding.error(
        code=LIVE_NAMES,
        where=missing[0],
        what=f"the names are {owner.what}: {len(missing)} of {num_names} tensors of the live model are not found "
        f"by them: {first_few(missing, 3)}",
        hint=way_on,
    )


def _wanted(model: nn.Module, blueprint: Blueprint) -> dict[str, tuple[int, ...] | None]:
    """Return the names that the model has in the checkpoint of the base model."""
    shapes = shapes_of(targets_of(model)[0])
    return {base: shape for name, shape in shapes.items() if (base := blueprint.base_name(name)) is not None}


def compare_with_source(model: nn.Module, blueprint: Blueprint) -> tuple[list[Finding], int, int]:
    """Compare this rank's shards with the checkpoint's bytes; return findings, and how many tensors and bytes."""
    targets, shared = targets_of(model)
    names = {name: blueprint.base_name(name) for name in targets}
    inner = model.get_base_model() if blueprint.setting.options.lora else model  # type: ignore[operator]
    findings: list[Finding] = []
    compared = nbytes = 0
    with open_path(blueprint.source, as_part=True) as opened:
        found = match_names(opened.checkpoint, inner, _wanted(model, blueprint), "auto").found
        reader = BoxReader(opened)
        for name, tensor in targets.items():
            whole = found.get(names[name] or "")
            if whole is None or name in shared or whole.shape != tuple(tensor.shape):
                continue
            local = local_of(tensor).to("cpu")
            box = expected_box(tensor)
            wanted_values = reader.read(whole, box, local.dtype)
            compared += 1
            nbytes += local.numel() * local.element_size()
            if local.numel() != wanted_values.numel() or not torch.equal(bytes_of(local), bytes_of(wanted_values)):
                findings.append(_different(name, local, wanted_values, box))
    return findings, compared, nbytes


def _different(name: str, local: torch.Tensor, wanted: torch.Tensor, box: Box) -> Finding:
    if local.numel() != wanted.numel():
        what = f"{local.numel()} elements, but the source has {wanted.numel()}"
    else:
        count = int((local.reshape(-1) != wanted.reshape(-1)).sum())
        what = f"{count} of {local.numel()} elements differ from the source"
    return Finding.error(
        code="wrong-shard",
        where=name,
        what=f"{what} (offsets {list(box.offsets)}, sizes {list(box.sizes)})",
        hint="load after sharding, onto the same mesh, and do not initialise weights afterwards",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientErrors:
    """How gradients differ from the reference."""

    worst: float  # Largest relative error
    worst_name: str
    compared: int
    findings: Sequence[Finding]
    rounded: tuple[str, ...] = ()
    """Gradients whose difference rounding may explain: too small beside the others to be compared closely."""
    errors: Mapping[str, float] = field(default_factory=dict)
    """Name → relative error of those that were compared closely."""


def whole_gradients(model: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield the whole gradient of every trainable parameter on the CPU. Collective: one tensor at a time."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        yield name, None if gradient is None else gradient.detach().float().to("cpu")


def compare_gradients(
    model: nn.Module, reference: Mapping[str, torch.Tensor] | None, tolerance: float
) -> GradientErrors:
    """Compare gradients with the reference's. Collective; only the rank that has a reference finds anything."""
    largest = 0.0
    if reference:
        largest = max(float(gradient.abs().max()) for gradient in reference.values() if gradient.numel())
    floor = GRADIENT_FLOOR * largest
    worst, worst_name, compared = 0.0, "", 0
    findings: list[Finding] = []
    rounded: list[str] = []
    errors: dict[str, float] = {}
    for name, gradient in whole_gradients(model):
        if reference is None:
            continue
        expected = reference.get(name)
        what = None
        if gradient is None or expected is None:
            if gradient is not None and bool(gradient.any()):
                what = "it has a gradient, but the reference has none"
            elif expected is not None and bool(expected.any()):
                what = "it has no gradient, but the reference has one"
        else:
            compared += 1
            expected = expected.float().to("cpu")
            error = relative_error(gradient, expected, floor)
            if error > tolerance and relative_error(gradient, expected, largest) <= _ROUNDING:
                rounded.append(name)
                continue
            errors[strip_wrappers(name)] = error
            if not error <= worst:  # NaN counts as worst
                worst, worst_name = error, name
            if not error <= tolerance:
                off = f"{format_number(error, 2)} (relative; allowed {tolerance:.0e})"
                what = f"the gradient differs from the reference by {off}"
        if what is not None:
            hint = "check whether it is used outside its unit's forward, only on some ranks, or not managed by FSDP"
            findings.append(Finding.error(code="wrong-gradient", where=name, what=what, hint=hint))
    return GradientErrors(
        worst=worst, worst_name=worst_name, compared=compared, findings=findings, rounded=tuple(rounded), errors=errors
    )


def relative_error(value: torch.Tensor, expected: torch.Tensor, floor: float) -> float:
    """Return the largest difference, relative to the largest expected element or `floor`."""
    if not value.numel():
        return 0.0
    scale = max(float(expected.abs().max()), floor)
    difference = float((value - expected).abs().max())
    return difference / scale if scale > 0 else difference


def differing_tensors(model: nn.Module, other: nn.Module) -> list[str]:
    """Return the names whose local parts are not bitwise equal in two models that are sharded alike."""
    mine, theirs = model.state_dict(), other.state_dict()
    return [name for name, tensor in mine.items() if not _is_equal(tensor, theirs.get(name))]


def varying_buffers(model: nn.Module) -> tuple[str, ...]:
    """Return the buffers that are not the same on all ranks: running statistics of each rank's own data. Collective."""
    own = {name: xxhash.xxh3_128_hexdigest(bytes_of(b.to("cpu")).numpy().data) for name, b in model.named_buffers()}
    every = gather(own)
    return tuple(strip_wrappers(name) for name in own if len({each.get(name) for each in every}) > 1)


def differing_states(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> int:
    """Return how many tensors of optimizer state are not bitwise equal, by position."""
    mine, theirs = _states(one), _states(other)
    if len(mine) != len(theirs):
        return max(len(mine), len(theirs))
    return sum(not _is_equal(a, b) for a, b in zip(mine, theirs, strict=True))


def _states(optimizer: torch.optim.Optimizer) -> list[object]:
    found: list[object] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            found += [state[key] for key in sorted(state)]
    return found


def _is_equal(one: object, other: object) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return bool(one == other)
    a, b = local_of(one), local_of(other)
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bytes_of(a.to("cpu")), bytes_of(b.to("cpu")))


def local_bytes(tensors: Iterator[torch.Tensor]) -> int:
    """Return the bytes of this rank's own parts, each storage once."""
    seen: dict[int, int] = {}
    for tensor in tensors:
        local = local_of(tensor)
        if local.numel():
            seen[local.data_ptr()] = local.numel() * local.element_size()
    return sum(seen.values())


def strange_weights(model: nn.Module) -> list[Finding]:
    """Return what is not finite in parameters and saved buffers, the same on every rank. Collective.

    A rank counts in its own part; of a tensor that several ranks hold, or hold parts of, the first one speaks.
    """
    found: dict[str, Strange] = {}
    for rank, mine in enumerate(gather(list(_strange(model)))):
        for each in mine:
            found.setdefault(each.fqn, replace(each, rank=rank))
    return list(
        report_strange(found.values(), hint="the checkpoint contains them: `ckpt verify --level values` lists all")
    )


def constant_weights(model: nn.Module) -> dict[str, float]:
    """Return the parameters of which every element is one number, and that number. Collective."""
    mine: dict[str, tuple[float, ...]] = {}
    for fqn, parameter in model.named_parameters():
        local = local_of(parameter.detach())
        has_numbers = local.is_floating_point() and local.dtype.itemsize > 1 and local.numel() and not local.is_meta
        ends = torch.aminmax(local) if has_numbers else ()
        if len(values := {float(end) for end in ends}) < 2:
            mine[strip_wrappers(fqn)] = tuple(values)
    first, *others = gather(mine)
    every = {fqn: {*first[fqn], *(value for each in others for value in each.get(fqn, ()))} for fqn in first}
    return {
        fqn: values.pop() for fqn, values in every.items() if len(values) == 1 and all(fqn in each for each in others)
    }


def unlearned_weights(model: nn.Module, blueprint: Blueprint, constant: Mapping[str, float]) -> Iterator[Finding]:
    """Yield the checkpoint's weights that are zero or constant and, as `verify` and `stats` judge, should not be."""
    tensors = {fqn: tensor for fqn, tensor in model.named_parameters() if blueprint.base_name(fqn) is not None}
    entries = [
        TensorEntry(fqn=strip_wrappers(fqn), dtype=dtype, shape=tuple(tensor.shape), chunks=())
        for fqn, tensor in tensors.items()
        if (dtype := BY_TORCH_NAME.get(str(tensor.dtype).removeprefix("torch."))) is not None
    ]
    sizes = {entry.fqn: entry.num_elems for entry in entries}
    counts = {fqn: Counts(num_elems=n, num_zero=n * (constant.get(fqn) == 0)) for fqn, n in sizes.items()}
    with open_path(blueprint.source, as_part=True) as opened:
        zero = [*zero_weights(opened, entries, counts)]
    for entry in zero:
        yield Finding.warning(ALL_ZERO, entry.fqn, f"all {entry.num_elems} elements are 0", ZERO_HINT)
    for entry in entries:
        if (value := constant.get(entry.fqn)) and len(entry.shape) > 1 and is_weight(entry):
            what = f"all {entry.num_elems} elements are {value:g}"
            yield Finding.warning(CONSTANT, entry.fqn, what, CONSTANT_HINT)


def _strange(model: nn.Module) -> Iterator[Strange]:
    seen: set[int] = set()
    saved = model.state_dict(keep_vars=True)
    kept = {id(tensor) for tensor in saved.values() if isinstance(tensor, torch.Tensor)}
    for prefix, module in model.named_modules():
        own = [] if quantised_of(module) is not None else [*module.named_parameters(recurse=False)]
        own += [(name, buffer) for name, buffer in module.named_buffers(recurse=False) if id(buffer) in kept]
        for name, tensor in own:
            counts = None if id(tensor) in seen else _count(tensor)
            seen.add(id(tensor))
            fqn = strip_wrappers(f"{prefix}.{name}" if prefix else name)
            is_excused = not isinstance(tensor, nn.Parameter) or may_be_infinite(fqn, is_model=True, shape=tensor.shape)
            if counts is not None and (counts.num_nan or (counts.num_inf and not is_excused)):
                yield Strange(fqn=fqn, shape=tuple(tensor.shape), counts=counts, where=fqn)


def _count(tensor: torch.Tensor) -> Counts | None:
    """Count in this rank's part; the place of the first bad element is in the whole tensor."""
    local = local_of(tensor.detach())
    dtype = BY_TORCH_NAME.get(str(local.dtype).removeprefix("torch."))
    if dtype is None or local.is_meta or not local.numel():
        return None
    counts = count_values(bytes_of(local.to("cpu")).numpy().data, dtype)
    if counts is None or counts.first_bad is None:
        return counts
    box = expected_box(tensor)
    place = (o + at for o, at in zip(box.offsets, place_of(counts.first_bad, box.sizes), strict=True))
    whole = Box((0,) * len(box.sizes), tuple(tensor.shape))
    return replace(counts, first_bad=start_of(Box(tuple(place), (1,) * len(box.sizes)), whole))


# Where a loss that is not finite comes from


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstNotFinite:
    """Where the first number appeared that is not finite."""

    fqn: str
    what: str
    step: int  # How many modules had ended, or begun, before


def explain_loss(model: nn.Module, what: str, again: Callable[[], object]) -> Finding:
    """Return the finding that a loss is not finite and where that began; `again` recomputes the loss. Collective."""
    mine = _find_origin(model, again)
    origins = [(each, rank) for rank, each in enumerate(gather(mine)) if each is not None]
    if not origins:
        hint = "check whether the loss is divided by a number of tokens that can be 0, or is random"
        return Finding.error(NOT_FINITE, "the loss", f"{what}; in a second run every module's output is finite", hint)
    first, rank = min(origins, key=lambda pair: (pair[0].step, pair[1]))
    hint = "check the batch, the learning rate, and whether the dtype can represent such numbers"
    return Finding.error(NOT_FINITE, first.fqn, f"{what}; {first.what} (rank {rank})", hint)


def _find_origin(model: nn.Module, again: Callable[[], object]) -> FirstNotFinite | None:
    """Run the model once more, without gradients, and look at what goes into modules and comes out."""
    found: list[FirstNotFinite] = []
    running: list[str] = []
    steps = 0

    def enter(module: nn.Module, args: object, kwargs: object, *, fqn: str) -> None:
        nonlocal steps
        steps += 1
        if not found and _is_bad((args, kwargs)):
            where = running[-1] if running else "the batch"
            what = f"the input of {_class_of(module)} {fqn} is not finite, although no earlier module returned it"
            found.append(FirstNotFinite(fqn=where, what=what, step=steps))
        running.append(fqn)

    def leave(module: nn.Module, args: object, output: object, *, fqn: str) -> None:  # noqa: ARG001
        nonlocal steps
        steps += 1
        running.pop()
        if not found and _is_bad(output):
            what = f"{_class_of(module)} {fqn} is the first module whose output is not finite"
            found.append(FirstNotFinite(fqn=fqn, what=f"{what}; {_describe_weights(module)}", step=steps))

    with ExitStack() as stack, torch.no_grad():
        for name, module in model.named_modules():
            fqn = strip_wrappers(name) or "(root)"
            stack.callback(module.register_forward_pre_hook(partial(enter, fqn=fqn), with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(partial(leave, fqn=fqn)).remove)
        again()
    return found[0] if found else None


def _class_of(module: nn.Module) -> str:
    """Return the name of the user's class: FSDP2 derives one of its own from it."""
    return type(module).__name__.removeprefix("FSDP")


def _describe_weights(module: nn.Module) -> str:
    bad = [
        name
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        if tensor.is_floating_point() and not bool(local_of(tensor.detach()).isfinite().all())
    ]
    return f"so is its {' and '.join(bad)}" if bad else "its inputs and its own weights are finite"


def _is_bad(value: object) -> bool:
    """Is there NaN or +inf in the tensors of a value? -inf is what masks are made of."""
    if isinstance(value, torch.Tensor):
        local = local_of(value.detach())
        if local.is_meta or not (local.is_floating_point() or local.is_complex()):
            return False
        return bool(local.isnan().any()) or (not local.is_complex() and bool((local == math.inf).any()))
    if isinstance(value, dict):
        return any(map(_is_bad, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_is_bad, value))
    return any(map(_is_bad, vars(value).values())) if hasattr(value, "to_tuple") else False
