"""Which modules become FSDP units of their own."""

from __future__ import annotations

import difflib
import inspect
from collections import Counter
from collections.abc import Sequence

from torch import nn

from ckpt_tools.checkpoint.globs import compile_glob
from ckpt_tools.checkpoint.transform import WRAPPERS
from ckpt_tools.errors import UsageError
from ckpt_tools.fsdp2.ties import Owners
from ckpt_tools.text import first_few

Blocks = str | Sequence[str | type]
"""What to wrap: "auto", FQNs, globs on FQNs, classes, or names of classes (also several in one text, with commas)."""


_CACHE = "feat_cache"
"""What the blocks of Wan's and Qwen-Image's autoencoders (diffusers) keep frames in for each other."""


def find_blocks(model: nn.Module, blocks: Blocks = "auto") -> tuple[str, ...]:
    """Return the FQNs of the modules that `blocks` means, children before parents.

    "auto" takes what the model itself says may not be split (transformers' and diffusers' `_no_split_modules`), and
    without that the modules of every list of at least two modules of one class. A module that several of them contain
    becomes a unit of its own, or they are left to the root. Left out are modules without parameters, those that write
    into a list that they are given, and those that share parameters with modules outside of them (tied embeddings):
    FSDP can only manage these in a unit that contains both, which the root does.

    Args:
        model: Not yet sharded.
        blocks: See `Blocks`.

    Raises:
        UsageError: A name that matches nothing, or only modules that cannot be units.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    owners = Owners(model)
    if blocks == "auto":
        found = [name for name in _automatic(model, modules) if _problem(owners, modules[name]) is None]
    else:
        found = []
        listed = filter(None, map(str.strip, blocks.split(","))) if isinstance(blocks, str) else blocks
        for wanted in listed:
            matches = _matches(modules, wanted)
            usable = [name for name in matches if _problem(owners, modules[name]) is None]
            if not usable:
                raise _unusable(owners, modules, wanted, matches)
            found += usable
    return _with_shared(model, owners, tuple(dict.fromkeys(map(_around_wrapped, found))))


def _with_shared(model: nn.Module, owners: Owners, found: tuple[str, ...]) -> tuple[str, ...]:
    """Make modules that are in several units units of their own, or leave those to the root; children come first."""
    paths: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(name)
    inside = {name: tuple(f"{path}." for path in paths[model.get_submodule(name)]) for name in found}
    shared: list[str] = []
    for module, names in paths.items():
        torn = [unit for unit, below in inside.items() if 0 < sum(n.startswith(below) for n in names) < len(names)]
        if not torn or names[0] in found or names[0].startswith(tuple(f"{name}." for name in shared)):
            continue
        if _problem(owners, module) is None:
            shared.append(names[0])
        elif next(module.parameters(recurse=False), None) is not None:
            return _with_shared(model, owners, tuple(name for name in found if name not in torn))
    depths = {names[0]: max(name.count(".") for name in names) for names in paths.values()}
    return tuple(sorted((*shared, *found), key=lambda name: -depths[name]))


def _around_wrapped(name: str) -> str:
    """Return the compiled or checkpointed module around a block: FSDP's hooks belong outside of the graph."""
    while (parent := name.rpartition("."))[0] and f"{parent[2]}." in WRAPPERS:
        name = parent[0]
    return name


def _automatic(model: nn.Module, modules: dict[str, nn.Module]) -> list[str]:
    classes: set[str] = set()
    for module in (model, *modules.values()):
        classes |= set(getattr(module, "_no_split_modules", None) or ())
    named = [name for name, module in modules.items() if type(module).__name__ in classes]
    if named:
        return named
    lists: list[str] = []
    for name, module in modules.items():
        if isinstance(module, nn.ModuleList):
            kinds = Counter(type(child) for child in module if child is not None and _has_forward(child))
            repeated = {kind for kind, count in kinds.items() if count > 1}
            lists += [f"{name}.{key}" for key, child in module.named_children() if type(child) in repeated]
    # The outermost lists are the layers; lists inside of a layer (heads, experts) are parts of it.
    return [name for name in lists if not any(name.startswith(outer + ".") for outer in lists)]


def _matches(modules: dict[str, nn.Module], wanted: str | type) -> list[str]:
    if isinstance(wanted, type):
        return [name for name, module in modules.items() if isinstance(module, wanted)]
    if wanted in modules:
        return [wanted]
    classes = [name for name, module in modules.items() if any(wanted == k.__name__ for k in type(module).__mro__)]
    if classes:
        return classes
    pattern = compile_glob(wanted)
    return [name for name in modules if pattern.fullmatch(name)]


def _has_forward(module: nn.Module) -> bool:
    """Has it a forward, around which parameters could be gathered? Lists and bare `nn.Module()`s have none."""
    # What torch.compile returns has one that its class has not.
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _problem(owners: Owners, module: nn.Module) -> str | None:
    """Say why `module` cannot be a unit of its own, or return None."""
    if not _has_forward(module):
        return f"a {type(module).__name__} defines no forward"
    forward = type(module).forward  # None where callers use registered methods alone
    if callable(forward) and _CACHE in inspect.signature(forward).parameters:
        return f"its forward writes into the list {_CACHE}, but FSDP2 passes it a copy"
    if next(module.parameters(), None) is None:
        return "it has no parameters"
    shared = owners.outside(module)
    if shared:
        return f"it shares parameters with {first_few(shared)}, which is outside it"
    return None


def _unusable(owners: Owners, modules: dict[str, nn.Module], wanted: str | type, matches: Sequence[str]) -> UsageError:
    label = wanted if isinstance(wanted, str) else wanted.__name__
    if matches:
        name = matches[0]
        is_list = not _has_forward(modules[name])
        return UsageError(
            f"{label!r} cannot be a separate FSDP unit: {_problem(owners, modules[name])}",
            where=name,
            hint=f"name its modules: {name}.*" if is_list else "leave it to the root, or wrap a module with both",
        )
    names = {*modules, *(type(module).__name__ for module in modules.values())}
    near = difflib.get_close_matches(str(label), sorted(names), n=3, cutoff=0.4)
    return UsageError(
        f"no module has the name or class {label!r}",
        where="blocks",
        hint=f"did you mean {', '.join(near)}?" if near else 'use "auto", or print(model) for the names',
    )
