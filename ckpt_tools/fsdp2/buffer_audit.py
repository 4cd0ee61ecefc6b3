"""Are buffers what their module would compute? NaN is not, and neither is what lay in uninitialised memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from ckpt_tools.description.checkpoint import Finding
from ckpt_tools.fsdp2.catalogue import build_finding
from ckpt_tools.fsdp2.internals import non_persistent_names

if TYPE_CHECKING:
    from collections.abc import Callable

_RTOL = 1e-2
"""Between a buffer and its recomputation in another dtype: bf16 keeps 8 bits."""


def check_buffers(model: nn.Module, *, is_fresh: bool) -> Iterator[Finding]:
    """Yield `garbage-buffer` for every buffer with NaN, and for those whose owner computes something else.

    Args:
        model: With buffers on any device; those on meta are skipped.
        is_fresh: No forward pass has run since the load, so that buffers are as initialised. Then non-persistent ones
            of transformers models are computed again, on a copy, and compared.
    """
    initialisers: dict[str, Callable[[nn.Module], object]] = {}
    for fqn, module in model.named_modules():
        initialise = getattr(module, "_init_weights", None)
        if callable(initialise):
            initialisers[fqn] = initialise
        expected = _recompute(module, _nearest(initialisers, fqn)) if is_fresh else {}
        for name, buffer in module.named_buffers(recurse=False):
            where = f"{fqn}.{name}" if fqn else name
            what = None if buffer.is_meta else _problem(buffer, expected.get(name))
            if what is not None:
                yield build_finding("garbage-buffer", where, what)


def _problem(buffer: torch.Tensor, expected: torch.Tensor | None) -> str | None:
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


def _nearest(initialisers: dict[str, Callable[[nn.Module], object]], fqn: str) -> Callable[[nn.Module], object] | None:
    """Return the initialiser of the closest model around `fqn`, itself included."""
    while True:
        if fqn in initialisers:
            return initialisers[fqn]
        if not fqn:
            return None
        fqn = fqn.rpartition(".")[0]


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
            with torch.no_grad(), torch.device("cpu"):
                initialise(bare)
        except Exception:  # noqa: BLE001 - a stranger's code, which may want the parameters that were left out
            return {}
        attempts.append({name: bare.get_buffer(name) for name in names})
    first, second = attempts
    # What depends on the poison was not written.
    return {name: first[name] for name in names if torch.equal(first[name], second[name])}
