"""Train state beside the model: named values, in the form in which DCP stores them, and back.

A value is a module, an optimizer, an object with `state_dict` and `load_state_dict`, or a tensor, number, text, None,
or a dict or list of these.

Source: torch 2.13 `distributed/checkpoint/{_nested_dict,_traverse,default_planner}.py`: dicts are flattened, lists
where they hold tensors or dicts, keys become text, and of what is not a DTensor the lowest rank's copy is kept.
"""

from __future__ import annotations

import copy
import hashlib
import io
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ckpt_tools.checkpoint.dtypes import BY_TORCH_NAME
from ckpt_tools.checkpoint.entries import KeyPath
from ckpt_tools.checkpoint.formats.digest import digest_bytes
from ckpt_tools.checkpoint.formats.torch_value import parse_value
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.fsdp2.collective import gather, share, this_rank, together, world_size
from ckpt_tools.fsdp2.local import bytes_of
from ckpt_tools.text import first_few

MODEL_KEY = "model"
OPTIMIZER_KEY = "optimizer"

T = TypeVar("T")


class PerRank:
    """An object whose state differs between ranks, such as a data loader: stored once per rank.

    It comes back on the same number of ranks alone.

    Args:
        value: This rank's object.
    """

    def __init__(self, value: Stateful) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, under its number."""
        return {str(this_rank()): self.value.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's state."""
        self.value.load_state_dict(state_dict[str(this_rank())])


def check_names(state: Mapping[str, object]) -> None:
    """Refuse names that cannot be keys beside the model: taken, empty, or with a dot."""
    for name in state:
        if not isinstance(name, str) or not name or "." in name or name in (MODEL_KEY, OPTIMIZER_KEY):
            raise UsageError(
                f"{name!r} is not a valid name for train state",
                where="state",
                hint=f"use a text without dots, other than {MODEL_KEY} and {OPTIMIZER_KEY}",
            )


def models_of(model: nn.Module, state: Mapping[str, object]) -> dict[str, nn.Module]:
    """Return every model by its key."""
    return {MODEL_KEY: model} | {name: value for name, value in state.items() if isinstance(value, nn.Module)}


def refuse_shared(models: Mapping[str, nn.Module]) -> None:
    """Refuse models that share a parameter in modules of their own: a load would give each another one."""
    holders: dict[int, tuple[str, set[int]]] = {}
    for name, model in models.items():
        own: dict[int, set[int]] = {}
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                own.setdefault(id(parameter), set()).add(id(module))
        for key, modules in own.items():
            other, theirs = holders.setdefault(key, (name, modules))
            if modules != theirs:
                what = f"{other} and {name} share a parameter in different modules"
                raise UsageError(what, where="load_checkpoint", hint="put both models into one nn.ModuleDict")


def model_of(optimizer: Optimizer, name: str, models: Mapping[str, nn.Module]) -> nn.Module:
    """Return the model that has all parameters of an optimizer; raise UsageError if none has."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for model in models.values():
        if own <= {id(p) for p in model.parameters()}:
            return model
    raise UsageError(
        f"no model has all parameters of this optimizer; the models are {', '.join(models)}",
        where=f"state[{name!r}]",
        hint="pass its model in state too; if it trains several, put them into one nn.ModuleDict",
    )


def leaves(value: object, path: KeyPath, *, wants_text: bool = False) -> Iterator[tuple[KeyPath, object]]:
    """Yield the keys of everything that DCP stores as one item, and the item; of an empty dict the dict.

    With `wants_text` raise UsageError for a key that is not text: it would come back as text.
    """
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            if wants_text and type(key) is not str:
                what = f"the key {key!r} is not text, but would be loaded as text"
                raise UsageError(what, where=f"state: {fqn_of(path)}")
            yield from leaves(inner, (*path, str(key)), wants_text=wants_text)
    elif isinstance(value, list) and any(map(_is_flattened, value)):
        for index, inner in enumerate(value):
            yield from leaves(inner, (*path, index), wants_text=wants_text)
    else:
        yield path, value


def _is_flattened(value: object) -> bool:
    return isinstance(value, (torch.Tensor, Mapping)) or (isinstance(value, list) and any(map(_is_flattened, value)))


def fqn_of(path: Iterable[str | int]) -> str:
    """Return the name that DCP makes of keys."""
    return ".".join(map(str, path))


def collect(state: Mapping[str, object]) -> dict[str, Any]:
    """Return what is stored beside modules and optimizers; refuse values that differ between ranks. Collective."""
    taken: dict[str, Any] = {}

    def take() -> dict[str, dict[str, str]]:
        digests = {}
        for name, value in state.items():
            digests[name] = {name: type(value).__name__}
            if isinstance(value, (nn.Module, Optimizer)):
                continue
            taken[name] = value.state_dict() if isinstance(value, Stateful) else value
            try:
                found = _digests(taken[name], name, wants_text=not isinstance(value, Stateful))
            except RecursionError:
                raise UsageError("it is nested too deeply, or contains itself", where=f"state: {name}") from None
            if not isinstance(value, PerRank):
                digests[name] = found
        return digests

    _check_equal(together(take))
    return taken


def _digests(value: object, name: str, *, wants_text: bool) -> dict[str, str]:
    """Return name → digest of every leaf; that of a DTensor, which every rank has a part of, says nothing."""
    found: dict[str, str] = {}
    for path, leaf in leaves(value, (name,), wants_text=wants_text):
        fqn = fqn_of(path)
        if fqn in found:
            raise UsageError(f"two values would both be stored as {fqn!r}", where="state", hint="rename one key")
        found[fqn] = _digest(leaf, fqn)
    return found


def _digest(leaf: object, fqn: str) -> str:
    if isinstance(leaf, torch.Tensor):
        kind = str(leaf.dtype).removeprefix("torch.")
        if leaf.is_meta or leaf.layout is not torch.strided or kind not in BY_TORCH_NAME:
            what = "no values" if leaf.is_meta else f"{leaf.layout}, {leaf.dtype}"
            raise UsageError(f"a tensor that checkpoints cannot store: {what}", where=f"state: {fqn}")
        if isinstance(leaf, DTensor) or world_size() == 1:
            return ""
        return f"{kind} {list(leaf.shape)} {digest_bytes(bytes_of(leaf.detach().cpu()).numpy().tobytes())}"
    buffer = io.BytesIO()
    try:
        torch.save(leaf, buffer)
        return repr(parse_value(buffer.getvalue(), where=fqn))
    except Exception as error:  # pickle raises whatever an object's own methods do
        raise UsageError(
            f"a value of type {type(leaf).__name__} cannot be read back: only tensors, numbers, texts, None, and "
            "tuples, lists and dicts of plain values can",
            where=f"state: {fqn}",
            hint="convert it (float, list, torch.from_numpy, generator.get_state), or give its owner a "
            "state_dict and a load_state_dict that do",
        ) from error


def _check_equal(digests: Mapping[str, Mapping[str, str]]) -> None:
    """Refuse what differs between ranks: DCP would keep one rank's."""
    theirs = gather({name: digest_bytes(repr(found).encode()) for name, found in digests.items()})
    names = sorted({name for each in theirs for name in each if each.get(name) != theirs[0].get(name)})
    names += sorted({name for name in theirs[0] for each in theirs if name not in each} - set(names))
    if not names:
        return
    first = share(dict(digests.get(names[0], {})))
    own = digests.get(names[0], {})
    ranks = gather([fqn for fqn in (*first, *own) if first.get(fqn) != own.get(fqn)])
    rank, fqns = next((rank, found) for rank, found in enumerate(ranks) if found)
    raise UsageError(
        f"rank {rank} and rank 0 differ in {first_few(list(dict.fromkeys(fqns)), 4)}, but only one copy is stored",
        where=f"state[{names[0]!r}]",
        hint="wrap it in PerRank if every rank has its own value (RngState for random generators)",
    )


def rebuild(
    items: Mapping[KeyPath, T], like: object, read: Callable[[T, object], object], notes: list[str], name: str
) -> Any:  # noqa: ANN401 - whatever was saved
    """Return the value whose leaves are `items`, by the keys that remain: texts, or numbers for places in a list.

    `like` has the same form: its dicts give their class and keys. `read` makes a leaf of an item and what stands in its
    place; what cannot be known goes to `notes`. Raise UnreadableError for keys that no value has.
    """
    if list(items) == [()]:
        return read(items[()], like)
    if () in items:
        raise UnreadableError("is stored both as one value and as several", where=name)
    branches: dict[str | int, dict[KeyPath, T]] = {}
    for path, item in items.items():
        branches.setdefault(path[0], {})[path[1:]] = item
    numbers = [key for key in branches if isinstance(key, int)]
    if numbers:
        if sorted(numbers) != list(range(len(branches))):
            raise UnreadableError("is a list with missing elements", where=name)
        given = like if isinstance(like, list) and len(like) == len(branches) else [None] * len(branches)
        return [rebuild(branches[i], given[i], read, notes, f"{name}.{i}") for i in range(len(branches))]
    keys: dict[Any, Any] = {str(key): key for key in like} if isinstance(like, Mapping) else {}
    is_numbered = bool(keys) and all(type(key) is int for key in keys.values())
    result: MutableMapping[Any, Any] = {}
    if isinstance(like, MutableMapping):
        result = copy.copy(like)  # a Counter stays one
        result.clear()
    if not keys and all(key.isdecimal() for key in map(str, branches)):
        notes.append(f"{name}: its keys ({first_few(list(map(str, branches)), 3)}) were loaded as text")
    for key, inner in branches.items():
        own = keys.get(key, int(key) if is_numbered and str(key).isdecimal() else key)
        inside = like.get(own) if isinstance(like, Mapping) else None
        result[own] = rebuild(inner, inside, read, notes, f"{name}.{key}")
    return result


def fill(target: object, value: object) -> None:
    """Give a tensor, or a dict of values, what was read: tensors keep their place, other entries are replaced."""
    if isinstance(target, torch.Tensor) and isinstance(value, torch.Tensor):
        with torch.no_grad():
            target.copy_(value)
    elif isinstance(target, MutableMapping) and isinstance(value, Mapping):
        for key, inner in value.items():
            own = target.get(key)
            is_kept = isinstance(own, torch.Tensor) and isinstance(inner, torch.Tensor) and not own.is_meta
            if is_kept or (isinstance(own, MutableMapping) and isinstance(inner, Mapping)):
                fill(own, inner)
            else:
                target[key] = inner


class RngState(PerRank):
    """The generators of torch, Python and numpy, and that of the current GPU: stored once per rank.

    At another world size every rank that was saved continues its own stream, and a new rank gets one of its own
    (`start`). The report of the load names both.
    """

    def __init__(self) -> None:
        super().__init__(_Generators())

    def start(self, like: dict[str, Any]) -> None:
        """Begin a stream that no other rank has: made of the state of a saved rank, and this rank's number."""
        seed = _derive(like["torch"], f"rank {this_rank()}")
        torch.manual_seed(seed)  # GPUs as well
        random.seed(seed)
        np.random.seed(seed % 2**32)


class _Generators:
    def state_dict(self) -> dict[str, Any]:
        kind, words, *rest = np.random.get_state(legacy=True)
        state = {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": (
                str(kind),
                np.asarray(words).tolist(),
                *(float(v) if isinstance(v, float) else int(v) for v in rest),
            ),
        }
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        torch.set_rng_state(state_dict["torch"])
        random.setstate(state_dict["python"])
        np.random.set_state(state_dict["numpy"])
        if torch.cuda.is_available():
            if "cuda" in state_dict:
                torch.cuda.set_rng_state(state_dict["cuda"])
            else:  # saved on CPUs: still one stream per rank
                torch.cuda.manual_seed(_derive(state_dict["torch"], f"cuda {this_rank()}"))


def _derive(state: torch.Tensor, what: str) -> int:
    content = state.cpu().numpy().tobytes() + what.encode()
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little") >> 1
