"""Buffers that no checkpoint holds: computed by the module that owns them, never left as they were allocated.

A model on the meta device has no values for its non-persistent buffers (`inv_freq`, `position_ids`).
`to_empty` would give them whatever lies in memory, silently. Here they are filled with poison first, then the
owner's own initialisation runs, and what is still poison is an error. `check_buffers` finds what others left there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

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
    if not names:
        return ()
    owners = dict.fromkeys(name.rpartition(".")[0] for name in names)
    # Two passes with different poison: whatever differs between them, nobody has computed.
    passes = []
    for which in (0, 1):
        for name in names:
            module, key = owner_of(model, name)
            buffer = module._buffers[key]  # noqa: SLF001 - setattr would keep it too, this says what is meant
            if buffer is not None:
                module._buffers[key] = _poisoned(buffer, device, which)  # noqa: SLF001
        with torch.no_grad(), _all_marked_but(model, names):
            for owner in owners:
                _compute(model, owner, device)
        passes.append({name: model.get_buffer(name).detach().clone() for name in names})
    left = [name for name in names if not _is_same(passes[0][name], passes[1][name])]
    if left:
        for name in left:  # a meta tensor fails loudly, poison does not
            module, key = owner_of(model, name)
            module._buffers[key] = passes[0][name].to("meta")  # noqa: SLF001
        raise UsageError(
            f"{len(left)} buffers have no value: the checkpoint does not hold them and their modules do not compute "
            f"them: {first_few(left, 4)}",
            where=f"{type(model.get_submodule(left[0].rpartition('.')[0])).__name__}",
            hint="give the module a method init_buffers() that fills them, or build it off the meta device",
        )
    return names


def _poisoned(buffer: torch.Tensor, device: torch.device | str, which: int) -> torch.Tensor:
    if buffer.is_floating_point() or buffer.is_complex():
        # The passes differ in this element alone: a NaN equals nothing, itself included.
        return torch.full_like(buffer, float("nan"), device=device)
    return torch.full_like(buffer, _POISONS.get(buffer.dtype, _WIDE_INTEGER)[which], device=device)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and bool((one == other).all())


def _compute(model: nn.Module, owner: str, device: torch.device | str) -> None:
    """Let the module `owner` compute its buffers, by its own method or by that of the model around it."""
    module = model.get_submodule(owner)
    recipe = next((getattr(module, name) for name in _RECIPES if callable(getattr(module, name, None))), None)
    if recipe is not None:
        with torch.device(device):
            recipe()
        return
    for ancestor in map(model.get_submodule, around(owner)):
        # Others have a method of this name too, but only transformers' spares what is marked.
        if is_transformers(ancestor):
            initialise: Callable[[nn.Module], None] = ancestor._init_weights  # type: ignore[assignment]  # noqa: SLF001
            with torch.device(device):
                initialise(module)
            return


def is_transformers(model: nn.Module) -> bool:
    """Is it a model of transformers? Told by a class's name, since importing transformers takes seconds."""
    return any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__)


@contextmanager
def _all_marked_but(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Keep initialisers off the parameters, and off every buffer but those of `names`."""
    wanted = {id(model.get_buffer(name)) for name in names}
    tensors = [*model.parameters(), *(buffer for buffer in model.buffers() if id(buffer) not in wanted)]
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

    With `is_fresh` no forward pass has run since the load: non-persistent buffers are computed again on a copy and
    compared. Buffers on meta are skipped.
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
    """Return what `initialise` makes of a copy of the module's non-persistent buffers; without what it leaves alone."""
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
