"""What no checkpoint holds: computed by the module that owns it, never left as it was allocated.

A model on the meta device has no values for its non-persistent buffers (`inv_freq`, `position_ids`), nor for the
parameters that its files may lack. `to_empty` would give them whatever lies in memory, silently. Here they are filled
with poison first, then the owner's own initialisation runs, and what is still poison is an error. `check_buffers` finds
what others left there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.errors import UsageError
from ckpt_tools.fsdp2.catalogue import build_finding
from ckpt_tools.fsdp2.internals import non_persistent_names
from ckpt_tools.fsdp2.ties import around, owner_of
from ckpt_tools.text import first_few

_RECIPES = ("init_buffers", "reset_buffers", "_init_buffers", "_reset_buffers")
"""Methods by which modules (re)compute their buffers, by the conventions of several libraries."""
_FLAG = "_is_hf_initialized"
"""Transformers' mark on parameters and modules that must not be initialised (again)."""
_POISONS: dict[torch.dtype, tuple[int, int]] = {torch.bool: (0, 1), torch.uint8: (0xA5, 0x5A), torch.int8: (-91, 90)}
_WIDE_INTEGER = (-0x5A5A, 0x5A5B)
_RTOL = 1e-2
"""Between a buffer and its recomputation in another dtype: bf16 keeps 8 bits."""


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
    slots: dict[str, tuple[dict[str, Any], str]] = {}
    for name in names:
        module, key = owner_of(model, name)
        slots[name] = (module._parameters if key in module._parameters else module._buffers, key)  # noqa: SLF001
    before: dict[str, torch.Tensor] = {name: table[key] for name, (table, key) in slots.items()}
    is_float = all(one.is_floating_point() for one in before.values())
    passes: list[dict[str, torch.Tensor]] = []
    try:
        # Two passes with different poison: whatever differs between them, nobody has computed. NaN shows it in one.
        for which in (0,) if is_float else (0, 1):
            for name, (table, key) in slots.items():
                fresh = _poisoned(old := before[name], which)
                table[key] = nn.Parameter(fresh, requires_grad=False) if isinstance(old, nn.Parameter) else fresh
            with torch.no_grad(), _all_marked_but(model, slots.values()), torch.random.fork_rng(devices=()):
                torch.manual_seed(torch.initial_seed() if seed is None else seed)
                for owner in order:
                    _initialise(model, owner)
            passes.append({name: table[key].detach() for name, (table, key) in slots.items()})
    finally:
        for name, (table, key) in slots.items():
            table[key] = before[name]
    made = {name: value for name, value in passes[0].items() if _is_same(value, passes[-1][name])}
    left = [name for name, old in before.items() if name not in made and (isinstance(old, nn.Parameter) or old.is_meta)]
    if left:
        kind = "parameters" if isinstance(before[left[0]], nn.Parameter) else "buffers"
        raise UsageError(
            f"{len(left)} {kind} have no value: the checkpoint does not hold them and their modules do not compute "
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


def _poisoned(tensor: torch.Tensor, which: int) -> torch.Tensor:
    shape, dtype = tensor.shape, tensor.dtype
    if dtype.is_floating_point or dtype.is_complex:
        return torch.full(shape, float("nan"), dtype=dtype, device="cpu")
    return torch.full(shape, _POISONS.get(dtype, _WIDE_INTEGER)[which], dtype=dtype, device="cpu")


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and bool((one == other).all())


def _initialise(model: nn.Module, owner: str) -> None:
    """Let the module `owner` compute its tensors, by its own method or by that of the model around it."""
    module = model.get_submodule(owner)
    recipe = next((getattr(module, name) for name in _RECIPES if callable(getattr(module, name, None))), None)
    with torch.device("cpu"):
        if recipe is not None:
            recipe()
            return
        for ancestor in map(model.get_submodule, around(owner)):
            # Others have a method of this name too, but only transformers' spares what is marked.
            if is_transformers(ancestor):
                initialise: Callable[[nn.Module], None] = ancestor._init_weights  # type: ignore[assignment]  # noqa: SLF001
                initialise(module)
                return
        if callable(reset := getattr(module, "reset_parameters", None)) and module._parameters:  # noqa: SLF001
            reset()


def is_transformers(model: nn.Module) -> bool:
    """Is it a model of transformers? Told by a class's name, since importing transformers takes seconds."""
    return any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__)


@contextmanager
def _all_marked_but(model: nn.Module, slots: Iterable[tuple[Mapping[str, torch.Tensor | None], str]]) -> Iterator[None]:
    """Keep initialisers off all parameters and buffers but those in `slots`."""
    wanted = {id(table[key]) for table, key in slots}
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if id(tensor) not in wanted]
    marked = [tensor for tensor in tensors if not getattr(tensor, _FLAG, False)]
    for tensor in marked:
        setattr(tensor, _FLAG, True)
    try:
        with _guarded_initialisers():
            yield
    finally:
        for tensor in marked:
            if hasattr(tensor, _FLAG):
                delattr(tensor, _FLAG)


@contextmanager
def _guarded_initialisers() -> Iterator[None]:
    """Make `torch.nn.init` respect the marks, where transformers is there to do so."""
    try:
        from transformers.initialization import guard_torch_init_functions
    except ImportError:
        yield
        return
    with guard_torch_init_functions():
        yield


def check_buffers(model: nn.Module, *, is_fresh: bool) -> Iterator[Finding]:
    """Yield `garbage-buffer` for every buffer with NaN, and for those whose owner computes something else.

    Args:
        model: With buffers on any device; those on meta are skipped.
        is_fresh: No forward pass has run since the load, so that buffers are as initialised. Then non-persistent ones
            whose owner, or transformers, computes them are computed again, on a copy, and compared.
    """
    initialisers: dict[str, Callable[[nn.Module], object]] = {}
    for fqn, module in model.named_modules():
        initialise = getattr(module, "_init_weights", None)
        if callable(initialise):
            initialisers[fqn] = initialise
        own = next((method for name in _RECIPES if callable(method := getattr(type(module), name, None))), None)
        nearest = own or next((initialisers[name] for name in around(fqn) if name in initialisers), None)
        expected = _recompute(module, nearest) if is_fresh else {}
        for name, buffer in module.named_buffers(recurse=False):
            where = f"{fqn}.{name}" if fqn else name
            what = None if buffer.is_meta else _fault_of(buffer, expected.get(name))
            if what is not None:
                yield build_finding("garbage-buffer", where, what)


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
    return f"{int(wrong.sum())} of {buffer.numel()} elements are not what its module computes"


def _recompute(module: nn.Module, initialise: Callable[[nn.Module], object] | None) -> dict[str, torch.Tensor]:
    """Return what `initialise` makes of the module's non-persistent buffers; without those that it leaves alone.

    The module is copied without parameters and children, so that no weight can be touched.
    """
    transient = non_persistent_names(module)
    names = [name for name, buffer in module.named_buffers(recurse=False) if name in transient and not buffer.is_meta]
    if initialise is None or not names:
        return {}
    attempts = []
    for poison in (0, 1):
        bare = object.__new__(type(module))  # an FSDP module's own __new__ would run the user's __init__
        vars(bare).update(vars(module))
        vars(bare).update(_parameters={}, _modules={}, _buffers={}, _non_persistent_buffers_set=set())
        vars(bare).pop("_is_hf_initialized", None)
        for name, buffer in module.named_buffers(recurse=False):
            fresh = torch.full(buffer.shape, poison, dtype=buffer.dtype, device="cpu")
            bare.register_buffer(name, fresh)
        try:
            with torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(devices=()):
                initialise(bare)
        except Exception:  # noqa: BLE001 - a stranger's code, which may want the parameters that were left out
            return {}
        attempts.append({name: bare.get_buffer(name) for name in names})
    first, second = attempts
    # What depends on the poison was not written.
    return {name: first[name] for name in names if torch.equal(first[name], second[name])}
