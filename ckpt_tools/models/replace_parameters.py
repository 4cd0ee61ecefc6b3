"""Parameters of a model: their dtypes, and other tensors in their place. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

# What `__init__` computes and no checkpoint holds (frequencies, masks, schedules), for a model on the meta device


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


DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
"""By the names that options take."""


def replace_parameters(model: nn.Module, make: Callable[[nn.Parameter], torch.Tensor | None]) -> None:
    """Put what `make` returns in the place of every parameter; None leaves it. Names that share one share the new one.

    What hangs on a parameter (attributes, `requires_grad`) hangs on the new one.
    """
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # with the old ones, lest an id be given out again
    for module in model.modules():
        for name, present in list(module._parameters.items()):  # noqa: SLF001 - setattr would register it anew
            if present is None:
                continue
            if id(present) not in made:
                made[id(present)] = (present, _like(present, make(present)))
            module._parameters[name] = made[id(present)][1]  # noqa: SLF001


def _like(present: nn.Parameter, tensor: torch.Tensor | None) -> nn.Parameter:
    if tensor is None:
        return present
    parameter = nn.Parameter(tensor, requires_grad=present.requires_grad)
    parameter.__dict__.update(present.__dict__)
    return parameter
