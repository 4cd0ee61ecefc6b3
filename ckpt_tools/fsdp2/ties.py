"""Parameters that several names share, and how to share them again once a load has replaced one of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from ckpt_tools.checkpoint.globs import find_named
from ckpt_tools.checkpoint.transform import strip_wrappers

Ties = tuple[tuple[str, ...], ...]  # Groups of FQNs, each of one parameter, in the order of the module tree


def tied_groups(model: nn.Module) -> Ties:
    """Return the groups of FQNs that name one and the same parameter."""
    names: dict[int, list[str]] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(fqn)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


def declared_ties(model: nn.Module) -> Ties:
    """Return the groups of names that transformers ties by the config, the source first, whether they are one or not.

    `to_empty` takes them apart without a word.
    """
    groups: dict[str, list[str]] = {}
    for fqn, module in model.named_modules():
        for target, source in wanted_ties(module).items():
            one, other = (strip_wrappers(f"{fqn}.{name}" if fqn else name) for name in (source, target))
            if other not in (group := groups.setdefault(one, [one])):
                group.append(other)
    return tuple(map(tuple, groups.values()))


def wanted_ties(module: nn.Module) -> dict[str, str]:
    """Return target → source as a transformers model says it (`all_tied_weights_keys`, since transformers 5)."""
    ties = vars(module).get("all_tied_weights_keys")
    return ties if isinstance(ties, dict) else {}


def tied_modules(model: nn.Module) -> set[str]:
    """Return the FQNs of the modules that share a parameter of theirs."""
    return {fqn.rpartition(".")[0] for group in tied_groups(model) for fqn in group}


def output_layer(model: nn.Module) -> nn.Module | None:
    """Return the layer that makes a model's outputs, as transformers says it."""
    get_output = getattr(model, "get_output_embeddings", None)
    found = get_output() if callable(get_output) else None
    return found if isinstance(found, nn.Module) else None


def input_layer(model: nn.Module) -> nn.Module | None:
    """Return the layer that takes a model's tokens, as transformers says it."""
    get_input = getattr(model, "get_input_embeddings", None)
    found = get_input() if callable(get_input) else None
    return found if isinstance(found, nn.Module) else None


class Owners:
    """Who holds which parameter, looked up once for a whole model."""

    def __init__(self, model: nn.Module) -> None:
        self._owners: dict[int, list[tuple[int, str]]] = {}
        for name, module in model.named_modules():
            for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                fqn = f"{name}.{key}" if name else key
                self._owners.setdefault(id(parameter), []).append((id(module), fqn))

    def outside(self, module: nn.Module) -> list[str]:
        """Return the FQNs outside of `module` whose parameters `module` has too."""
        inside = {id(child) for child in module.modules()}
        own = {id(parameter) for parameter in module.parameters()}
        return [fqn for parameter in own for owner, fqn in self._owners.get(parameter, ()) if owner not in inside]


def around(fqn: str) -> Iterator[str]:
    """Yield an FQN and those of the modules around it, innermost first, "" last."""
    while fqn:
        yield fqn
        fqn = fqn.rpartition(".")[0]
    yield ""


def find_parameters(model: nn.Module, globs: Sequence[str], where: str) -> tuple[str, ...]:
    """Return the FQNs of parameters that match a glob, or lie in a module that does, with or without wrappers."""
    fqns = [fqn for fqn, _ in model.named_parameters(remove_duplicate=False)]
    # A glob may mean a parameter by its names and its modules', as they are and without wrappers.
    names = {fqn: [*filter(None, (*around(fqn), *around(strip_wrappers(fqn))))] for fqn in fqns}
    kind = "parameter and no module"
    found = [find_named(repr(glob), glob, names, where, kind=kind) for glob in globs]
    return tuple(dict.fromkeys(fqn for chosen in found for fqn in names if fqn in chosen))


def owner_of(model: nn.Module, fqn: str) -> tuple[nn.Module, str]:
    """Return the module that holds the parameter or buffer `fqn`, and its name there, or raise AttributeError."""
    path, _, name = fqn.rpartition(".")
    return model.get_submodule(path), name


def plain_fqns(model: nn.Module) -> dict[str, str]:
    """Return the name in a state dict → the FQN in the module tree, which wrappers make longer."""
    fqns = [fqn for fqn, _ in model.named_parameters(remove_duplicate=False)]
    fqns += [fqn for fqn, _ in model.named_buffers(remove_duplicate=False)]
    return {strip_wrappers(fqn): fqn for fqn in fqns}


def tie(model: nn.Module, ties: Ties, loaded: Iterable[str]) -> None:
    """Make every name of a group the parameter of the one that was loaded (the first of them)."""
    fresh = set(loaded)
    for group in ties:
        source = next((fqn for fqn in group if fqn in fresh), group[0])
        module, name = owner_of(model, source)
        parameter = module._parameters[name]  # noqa: SLF001 - the public way, setattr, registers anew and reorders
        for fqn in group:
            if fqn != source:
                module, name = owner_of(model, fqn)
                module._parameters[name] = parameter  # noqa: SLF001
