"""What no checkpoint holds: computed by the module that owns it, never left as it was allocated.

A model on the meta device has no values for its non-persistent buffers (`inv_freq`, `position_ids`), nor for the
parameters that its files may lack. `to_empty` would give them whatever lies in memory, silently. Here they are filled
with poison first, then the owner's own initialisation runs, and what is still poison is an error. `check_buffers` finds
what others left there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from ckpt_tools.checkpoint.entries import Finding
from ckpt_tools.checkpoint.transform import strip_wrappers
from ckpt_tools.errors import UsageError
from ckpt_tools.fsdp2.catalogue import build_finding
from ckpt_tools.fsdp2.ties import around, owner_of
from ckpt_tools.text import first_few

_RECIPES = ("init_buffers", "reset_buffers", "_init_buffers", "_reset_buffers")
"""Methods by which modules (re)compute their buffers, by the conventions of several libraries."""
_POISONS: dict[torch.dtype, tuple[int, int]] = {torch.bool: (0, 1), torch.uint8: (0xA5, 0x5A), torch.int8: (-91, 90)}
_WIDE_INTEGER = (-0x5A5A, 0x5A5B)
_RTOL = 1e-2  # Between a buffer and its recomputation in another dtype: bf16 keeps 8 bits


def materialise_buffers(model: nn.Module, device: torch.device | str, *, skip: Collection[str] = ()) -> tuple[str, ...]:
    """Give every buffer on the meta device its values; return their FQNs.

    The owner computes them: transformers' `_init_weights` of the model that the module belongs to, or a method of
    the module (`init_buffers`, `reset_buffers`). Parameters are not touched.

    Args:
        model: With its parameters loaded.
        device: Where the buffers go.
        skip: FQNs to leave on meta.

    Raises:
        UsageError: Nobody computes a buffer.
    """
    on_meta = [name for name, buffer in model.named_buffers(remove_duplicate=False) if buffer.is_meta]
    names = tuple(name for name in on_meta if name not in skip)
    place(model, compute(model, names), device)
    return names


def compute(model: nn.Module, names: Collection[str], *, seed: int | None = None) -> dict[str, torch.Tensor]:
    """Return parameters and buffers as their modules initialise them, whole and on the CPU; the model stays as it is.

    As `from_pretrained` does with what a file lacks: the innermost modules first, every one by the `_init_weights` of
    the model around it, or by a method of its own. What keeps a value and is computed by nobody is left out.

    Args:
        model: On any device, sharded or not.
        names: FQNs.
        seed: Of the values that are drawn; by default that of this process (`torch.initial_seed`).

    Raises:
        UsageError: What is on the meta device, or a parameter, is computed by nobody.
    """
    if not names:
        return {}
    owners = {name for fqn in names for name in around(fqn.rpartition(".")[0])}
    order = [fqn for fqn in _inside_out(model) if fqn in owners]
    kept: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
    for fqn, module in model.named_modules():
        device = "cpu" if fqn in owners else "meta"
        kept += [(device, table, dict(table)) for table in (module._parameters, module._buffers)]  # noqa: SLF001
    slots: dict[str, tuple[dict[str, Any], str]] = {}
    for name in names:
        module, key = owner_of(model, name)
        slots[name] = (module._parameters if key in module._parameters else module._buffers, key)  # noqa: SLF001
    before: dict[str, torch.Tensor] = {name: table[key] for name, (table, key) in slots.items()}
    passes: list[dict[str, torch.Tensor]] = []
    try:
        for device, table, old in kept:  # whatever an initialiser does to the others, it does to stand-ins
            table.update({key: _stand_in(tensor, device) for key, tensor in old.items() if tensor is not None})
        # Two passes with different poison: whatever differs between them, nobody has computed. NaN shows it in one.
        for which in (0,) if all(one.is_floating_point() for one in before.values()) else (0, 1):
            for name, (table, key) in slots.items():
                table[key] = _stand_in(before[name], "cpu", which)
            with torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(devices=()):
                # Of the CPU alone: fork_rng gives nothing back to other devices.
                torch.default_generator.manual_seed(torch.initial_seed() if seed is None else seed)
                for owner in order:
                    _initialise(model, owner)
            passes.append({name: table[key].detach() for name, (table, key) in slots.items()})
    finally:
        for _, table, old in kept:
            table.update(old)
    made = {name: value for name, value in passes[0].items() if _is_same(value, passes[-1][name])}
    left = [name for name, old in before.items() if name not in made and (isinstance(old, nn.Parameter) or old.is_meta)]
    if left:
        kind = "parameters" if isinstance(before[left[0]], nn.Parameter) else "buffers"
        raise UsageError(
            f"{len(left)} {kind} without a value: the checkpoint does not contain and the modules do not compute "
            f"them: {first_few(left, 4)}",
            where=f"{type(model.get_submodule(left[0].rpartition('.')[0])).__name__}",
            hint="give the module a method init_buffers() that fills them, or build it off the meta device",
        )
    return made


def place(model: nn.Module, values: Mapping[str, torch.Tensor], device: torch.device | str) -> None:
    """Put buffers into the model."""
    for name, value in values.items():
        module, key = owner_of(model, name)
        module._buffers[key] = value.to(device)  # noqa: SLF001 - setattr would keep it too, this says what is meant


def _inside_out(module: nn.Module, fqn: str = "") -> Iterator[str]:
    """Yield the FQNs of all modules, children before their parents."""
    for key, child in module.named_children():
        yield from _inside_out(child, f"{fqn}.{key}" if fqn else key)
    yield fqn


def _stand_in(tensor: torch.Tensor, device: str, which: int | None = None) -> torch.Tensor:
    """Return a whole tensor of poison in place of another; of nothing, which transformers leaves alone, for None."""
    is_exact = not (tensor.is_floating_point() or tensor.is_complex())
    poison = _POISONS.get(tensor.dtype, _WIDE_INTEGER)[which or 0] if is_exact else float("nan")
    fresh = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    fresh = fresh if which is None else fresh.fill_(poison)
    fresh = nn.Parameter(fresh, requires_grad=False) if isinstance(tensor, nn.Parameter) else fresh
    fresh._is_hf_initialized = which is None  # type: ignore[attr-defined]  # noqa: SLF001 - transformers' own mark
    return fresh


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return not one.is_meta and one.shape == other.shape and bool((one == other).all())


def _initialise(model: nn.Module, owner: str) -> None:
    """Let the module `owner` compute its tensors, by its own method or by that of the model around it."""
    module = model.get_submodule(owner)
    ancestors = (getattr(model.get_submodule(name), "_init_weights", None) for name in around(owner))
    recipe = next((method for name in _RECIPES if callable(method := getattr(module, name, None))), None)
    initialise = next(filter(callable, ancestors), None)
    if recipe is not None:
        recipe()
    elif initialise is not None:
        initialise(module)
    elif module._parameters and callable(reset := getattr(module, "reset_parameters", None)):  # noqa: SLF001
        reset()


def is_transformers(model: nn.Module) -> bool:
    """Is it a model of transformers? Told by a class's name, since importing transformers takes seconds."""
    return any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__)


def check_buffers(model: nn.Module, *, is_fresh: bool) -> Iterator[Finding]:
    """Yield `garbage-buffer` for every buffer with NaN, and for those whose owner computes something else.

    With `is_fresh` no forward pass has run since the load: non-persistent buffers are computed again on a copy and
    compared. Buffers on meta are skipped.
    """
    saved = set(map(strip_wrappers, model.state_dict(keep_vars=True))) if is_fresh else set()
    buffers = dict(model.named_buffers(remove_duplicate=False))
    expected: dict[str, torch.Tensor] = {}
    if is_fresh:
        with suppress(Exception):  # a stranger's code, which may want the weights that it does not get
            transient = [name for name, one in buffers.items() if strip_wrappers(name) not in saved and not one.is_meta]
            expected = compute(model, transient)
    for name, buffer in buffers.items():
        what = None if buffer.is_meta else _fault_of(buffer, expected.get(name))
        if what is not None:
            yield build_finding("garbage-buffer", name, what)


def _fault_of(buffer: torch.Tensor, expected: torch.Tensor | None) -> str | None:
    if buffer.is_floating_point() and bool(buffer.isnan().any()):
        return f"{int(buffer.isnan().sum())} of {buffer.numel()} elements are NaN"
    if expected is None or expected.shape != buffer.shape:
        return None
    exact = expected.dtype == buffer.dtype
    here = buffer.detach().to("cpu")
    wrong = here != expected if exact else ~torch.isclose(here.double(), expected.double(), rtol=_RTOL)
    if not bool(wrong.any()):
        return None
    return f"{int(wrong.sum())} of {buffer.numel()} elements differ from what its module computes"
