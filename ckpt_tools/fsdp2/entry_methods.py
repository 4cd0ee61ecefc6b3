"""Methods other than `forward` through which a unit is entered, and the mistake that is easily made with them."""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Callable, Collection, Mapping, Sequence

from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method

from ckpt_tools.checkpoint.globs import compile_glob
from ckpt_tools.errors import UsageError

Methods = Mapping[str | type, Sequence[str]] | Sequence[str]
"""Methods of the root, or by FQN, glob, class or class name the methods of other units."""

DOUBLE_WRAP = "double-wrap"  # The diagnosis of a method that is registered and that forward dispatches to


class DoubleWrapError(UsageError):
    """A method is registered, and forward dispatches to it."""


def find_methods(
    model: nn.Module, methods: Methods, units: Collection[str], kept: Collection[str] = ()
) -> dict[str, tuple[str, ...]]:
    """Return FQN → methods to register, after checking that each can be; `units` are FQNs, "" is the root.

    A method of a module that is no unit is refused: its registration would silently do nothing. `kept` are units whose
    parameters stay gathered after forward, where one entry may run inside another.
    """
    table: Mapping[str | type, Sequence[str]] = methods if isinstance(methods, Mapping) else {"": methods}
    found: dict[str, tuple[str, ...]] = {}
    for wanted, given in table.items():
        names = (given,) if isinstance(given, str) else tuple(given)
        if not names:
            continue
        label = wanted if isinstance(wanted, str) else wanted.__name__
        matches = [name for name, module in model.named_modules() if _is_meant(wanted, name, module)]
        if not matches:
            raise UsageError(f"no module has the name or class {label!r}", where="forward_methods")
        for fqn in matches:
            module = model.get_submodule(fqn)
            if fqn not in units:
                raise UsageError(
                    f"methods of {fqn or 'the root'} cannot be registered: it is not a separate FSDP unit",
                    where="forward_methods",
                    hint="add it to blocks, or register the method on the unit that contains it",
                )
            for method in names:
                _check_method(fqn, module, method, names, keeps=fqn in kept)
            found[fqn] = tuple(dict.fromkeys((*found.get(fqn, ()), *names)))
    return found


def _is_meant(wanted: str | type, name: str, module: nn.Module) -> bool:
    if isinstance(wanted, type):
        return isinstance(module, wanted)
    if wanted == name or not wanted:
        return wanted == name
    if any(wanted == kind.__name__ for kind in type(module).__mro__):
        return True
    return bool(name and compile_glob(wanted).fullmatch(name))


def _check_method(fqn: str, module: nn.Module, method: str, registered: Collection[str], *, keeps: bool) -> None:
    """Raise UsageError unless registering `method` on `module` is possible and right."""
    where = f"{fqn}.{method}" if fqn else method
    if not callable(getattr(module, method, None)):
        raise UsageError(f"{type(module).__name__} has no method {method!r}", where=where)
    if method == "forward":
        raise UsageError(
            "forward is already an entry point", where=where, hint="name only the other methods that callers use"
        )
    path = entry_path(type(module), method, registered, keeps=keeps)
    if path is not None:
        raise DoubleWrapError(
            f"{DOUBLE_WRAP}: {' → '.join(path)} runs inside {path[0]}, which gathers and releases the parameters too; "
            "the inner release would leave backward with SHARDED parameters",
            where=where,
            hint=f"do not register {method} when it is only called through {path[0]}, or let callers use {method} "
            f"and remove the dispatch from {path[0]}",
        )


def entry_path(kind: type, method: str, registered: Collection[str], *, keeps: bool = False) -> tuple[str, ...] | None:
    """Return how another entry of a class, `forward` or a registered method, reaches a registered one, or None.

    With `keeps` (the unit's parameters stay gathered after forward) only when that one reaches a third: FSDP2 counts
    no depth, so that the second of three releases what the first still needs.
    """
    entries = (entry for entry in ("forward", *registered) if entry != method)
    path = next(filter(None, (dispatch_path(kind, entry, method) for entry in entries)), None)
    if path is None or not keeps:
        return path
    others = (other for other in registered if other not in (method, path[0]))
    below = next(filter(None, (dispatch_path(kind, method, other) for other in others)), None)
    return None if below is None else (*path, *below[1:])


def dispatch_path(kind: type, start: str, target: str) -> tuple[str, ...] | None:
    """Return how `start` of a class reaches `self.target(...)` through its own methods, or None when it does not."""
    pending: list[tuple[str, ...]] = [(start,)]
    seen = {start}
    while pending:
        path = pending.pop(0)
        function = _plain_function(kind, path[-1])
        if function is None:
            continue
        for name in _attributes_of_self(function):
            if name == target:
                return (*path, target)
            if name not in seen and _plain_function(kind, name) is not None:
                seen.add(name)
                pending.append((*path, name))
    return None


def _plain_function(kind: type, name: str) -> types.FunctionType | None:
    function = inspect.unwrap(getattr(kind, name, None) or (lambda: None))
    # nn.Module's own machinery calls forward by design.
    is_own = isinstance(function, types.FunctionType) and not function.__module__.startswith("torch.nn.modules.module")
    return function if is_own and name in dir(kind) else None


def _attributes_of_self(function: types.FunctionType) -> list[str]:
    """Return the attributes that a function reads of its first argument, in the order of the code."""
    code = function.__code__
    if not code.co_argcount:
        return []
    return _reads(code, code.co_varnames[0])


def _reads(code: types.CodeType, owner: str) -> list[str]:
    found = []
    loaded = False
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if loaded and name in ("LOAD_ATTR", "LOAD_METHOD"):
            found.append(str(instruction.argval))
        # "LOAD_FAST_LOAD_FAST" and its kin load two; the last one is on top.
        value = instruction.argval[-1] if isinstance(instruction.argval, tuple) else instruction.argval
        loaded = name.startswith(("LOAD_FAST", "LOAD_DEREF")) and value == owner
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType) and owner in constant.co_freevars:
            found += _reads(constant, owner)
    return found


def register_methods(model: nn.Module, methods: Mapping[str, Sequence[str]]) -> None:
    """Register the methods that `find_methods` found; the modules are FSDP units by now."""
    for fqn, names in methods.items():
        register: Callable[[nn.Module, str], None] = register_fsdp_forward_method
        for name in names:
            register(model.get_submodule(fqn), name)
