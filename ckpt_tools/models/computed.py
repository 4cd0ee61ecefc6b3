"""What `__init__` computes and no checkpoint holds (frequencies, masks, schedules), for a model on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


def adopt_computed(model: nn.Module, build: Callable[[], nn.Module]) -> tuple[str, ...]:
    """Take non-persistent buffers and plain tensors from a second build of the model; return their names."""
    # `model` was built on meta; of the second build only the parameters go to meta.
    wanted = [(fqn, module, key) for fqn, module in model.named_modules() for key in _computed_keys(module)]
    if not wanted:
        return ()
    with torch.random.fork_rng(devices=()), torch.device("cpu"), parameters_on_meta():
        torch.manual_seed(0)  # every rank draws the same
        twins = dict(build().named_modules())
    adopted = []
    for fqn, module, key in wanted:
        # A class may build something else every time, and what is made of parameters is on meta again.
        if (twin := twins.get(fqn)) is None or key in _computed_keys(twin):
            continue
        if key in module._buffers:  # noqa: SLF001 - setattr would register it as persistent
            module._buffers[key] = twin._buffers.get(key)  # noqa: SLF001
        else:
            vars(module)[key] = vars(twin).get(key)
        adopted.append(f"{fqn}.{key}" if fqn else key)
    return tuple(adopted)


def _computed_keys(module: nn.Module) -> Iterator[str]:
    for key in module._non_persistent_buffers_set:  # noqa: SLF001 - there is no public way
        buffer = module._buffers.get(key)  # noqa: SLF001
        if buffer is not None and buffer.is_meta:
            yield key
    for key, value in vars(module).items():
        parts = value if isinstance(value, (list, tuple)) else (value,)
        if not isinstance(value, (nn.Module, torch.Tensor, type)):  # a scheduler, say, with a table of its own
            parts = (*parts, *getattr(value, "__dict__", {}).values())
        if any(type(part) is torch.Tensor and part.is_meta for part in parts):  # no parameter (an RNN lists its own)
            yield key


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Let modules register their parameters on meta, before anything is written to them."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        original(module, name, param)

    nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]
