"""Select, rename and cast: a description in, a description out, no bytes touched."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ckpt_tools.checkpoint.entries import BlobEntry, Checkpoint, KeyPath, TensorEntry
from ckpt_tools.checkpoint.globs import Names, choose_names
from ckpt_tools.errors import UsageError

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""Components that torch.compile, activation checkpointing and FSDP1 put into FQNs at any depth."""
_OPTIMIZER_ROOT = re.compile(r"optim(izer)?s?(_states?)?(_?\d+)?")
_OPTIMIZER_LEAVES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "step", "master_param")
_MODEL_ROOTS = ("model", "app", "app_state", "module", "state_dict", "model_state_dict", "model_state", "state")
"""Keys under which trainers keep the model, or a dict that holds it."""
_TRAINER_ROOTS = ("train_state", "trainer", "trainer_state", "dataloader", "lr_scheduler", "scheduler", "rng_state")
"""Keys of state that trainers keep beside a model whose own keys lie at the root."""

_BESIDE = re.compile(
    r"(lr_?)?sched\w*|train(er|ing)?(_\w+)?|(data_?|batch_?)?(loader|sampler)s?(_\w+)?|ema|amp|loops|hyper_parameters|hparams"
    r"|(\w+_)?(rng|args|metrics?|scaler|step|epoch|history|logs?|generators?|callbacks?)((_\w+)?_(states?|dicts?|\d+))?"
    r"|random(_\w+)?|param_groups|best_\w+"
)
"""First keys of what trainers keep beside a model's tensors."""


def select(
    checkpoint: Checkpoint, *, include: Sequence[str] = (), exclude: Sequence[str] = (), also: Names | None = None
) -> Checkpoint:
    """Keep what of it has an FQN, or another name that `also` has for it, that the globs choose."""
    if not include and not exclude:
        return checkpoint
    own = [*(entry.fqn for entry in checkpoint.tensors), *(blob.fqn for blob in checkpoint.blobs), *checkpoint.sealed]
    kept = choose_names({fqn: (fqn, *(also or {}).get(fqn, ())) for fqn in own}, include, exclude)
    return replace(
        checkpoint,
        tensors=tuple(entry for entry in checkpoint.tensors if entry.fqn in kept),
        blobs=tuple(blob for blob in checkpoint.blobs if blob.fqn in kept),
        sealed={name: what for name, what in checkpoint.sealed.items() if name in kept},
    )


def rename(checkpoint: Checkpoint, new_name: Callable[[str], str]) -> Checkpoint:
    """Rename every tensor; one whose name changes no longer lies where it did in its nested state dict."""
    names = [new_name(entry.fqn) for entry in checkpoint.tensors]
    tensors = tuple(
        entry if fqn == entry.fqn else replace(entry, fqn=fqn, path=())
        for entry, fqn in zip(checkpoint.tensors, names, strict=True)
    )
    seen: dict[str, str] = {}
    for old, new in zip(checkpoint.tensors, tensors, strict=True):
        if new.fqn in seen:
            hint = "choose what to strip: `ckpt gather SRC DST --strip-prefix none|PREFIX`, or --exclude one of them"
            raise UsageError(f"{old.fqn!r} and {seen[new.fqn]!r} would both be named {new.fqn!r}", hint=hint)
        seen[new.fqn] = old.fqn
    return replace(checkpoint, tensors=tensors)


def strip_wrappers(fqn: str) -> str:
    """Remove what wrappers put into an FQN."""
    for wrapper in WRAPPERS:
        fqn = fqn.replace("." + wrapper, ".")
        fqn = fqn.removeprefix(wrapper)
    return fqn


def is_optimizer(entry: TensorEntry | BlobEntry) -> bool:
    """Is this entry optimizer state, to judge by where it lies in the state dict?"""
    parts = tuple(map(str, entry.path)) if len(entry.path) > 1 else tuple(entry.fqn.split("."))
    if any(map(_OPTIMIZER_ROOT.fullmatch, parts[:2])):
        return True
    if len(entry.path) > 3 and (parts[1], parts[-1] in _OPTIMIZER_LEAVES) == ("state", True):
        return True  # of another model's, by whatever name
    # Flattened optimizer state: state.<fqn>.exp_avg
    last = parts[-1].rpartition(".")[2]
    return last in _OPTIMIZER_LEAVES and parts[0].partition(".")[0] == "state"


def in_model(name: str, prefix: str) -> bool:
    """May something be a part of the model whose names begin so? What trainers keep may lie beside it at the root."""
    parts = strip_wrappers(name).split(".")
    is_beside = any(map(_OPTIMIZER_ROOT.fullmatch, parts[:2])) or _BESIDE.fullmatch(parts[0])
    return ".".join((*parts, "")).startswith(prefix) and not (prefix == "" and is_beside)


def find_model(checkpoint: Checkpoint) -> tuple[Checkpoint, str]:
    """Find the model in what a trainer saved; everything else is left out (optimizer, train state, a second copy)."""
    # Return its tensors, with their names unchanged, and the root that their names lie under once `strip_wrappers` is
    # done with them ("", "model.", "app.model.", …). The nesting that DCP records (`TensorEntry.path`) decides; where
    # it is flat or unknown, a root is only a root when every key has it and what remains still looks like a model's
    # keys.
    candidates = tuple(entry for entry in checkpoint.tensors if not is_optimizer(entry))
    tensors, root = _descend(candidates)
    prefix = "".join(f"{key}." for key in root)
    names = [strip_wrappers(entry.fqn) for entry in tensors]
    if not all(name.startswith(prefix) for name in names):  # the names were not made from the paths
        tensors, prefix = candidates, ""
        names = [strip_wrappers(entry.fqn) for entry in tensors]
    model = replace(checkpoint, tensors=tensors, blobs=())
    if not tensors:
        return model, ""
    names = [name[len(prefix) :] for name in names]
    roots = ("app.model.", "model_state.model.", "state.model.", "model_state.", "model_state_dict.", "state_dict.")
    for outer in ("module.", *roots, "module."):
        if all(name.startswith(outer) for name in names):
            prefix += outer
            names = [name[len(outer) :] for name in names]
    # `model.` alone is ambiguous: a base model's own keys begin with it. It is a root when the model's own
    # `model.` follows, or when nothing says how the names were nested and other parts of the trainer's state
    # (optimizer, blobs) stand beside it.
    companions = not any(entry.path for entry in tensors) and (
        len(tensors) < len(checkpoint.tensors) or any(not blob.fqn.startswith("model.") for blob in checkpoint.blobs)
    )
    if all(name.startswith("model.") for name in names) and (
        companions or any(name.startswith("model.model.") for name in names)
    ):
        prefix += "model."
    return model, prefix


def _descend(tensors: tuple[TensorEntry, ...]) -> tuple[tuple[TensorEntry, ...], KeyPath]:
    """Follow the recorded nesting down to the model: its tensors, and the keys that lead to them."""
    root: KeyPath = ()
    while True:
        depth = len(root)
        branches: dict[str | int, list[TensorEntry]] = {}
        for entry in tensors:
            if len(entry.path) > depth + 1:
                branches.setdefault(entry.path[depth], []).append(entry)
        # A model's own keys are flat, with dots in them: a dict nested by modules is not taken apart.
        named: list[str | int] = [
            key for key in _MODEL_ROOTS if any("." in str(entry.path[-1]) for entry in branches.get(key, ()))
        ]
        if not named and len(branches) == 1 and all(len(entry.path) > depth + 1 for entry in tensors):
            named = list(branches)
        if not named:
            break
        tensors = tuple(branches[named[0]])
        root = (*root, named[0])
    if any(len(entry.path) == len(root) + 1 for entry in tensors):
        companions = [key for key in _TRAINER_ROOTS if key in branches]
        tensors = tuple(e for e in tensors if len(e.path) <= len(root) + 1 or e.path[len(root)] not in companions)
    return tensors, root


def strip_prefix(fqns: Iterable[str], prefix: str) -> Callable[[str], str]:
    """Return the function that removes `prefix` from an FQN."""
    without = next((fqn for fqn in fqns if not fqn.startswith(prefix)), None)
    if without is not None:
        hint = "`ckpt gather SRC DST --strip-prefix auto` finds the prefix; --include and --exclude choose tensors"
        raise UsageError(f"tensor {without!r} does not begin with {prefix!r}", hint=hint)
    return lambda fqn: fqn[len(prefix) :]


def plain_names(checkpoint: Checkpoint) -> dict[str, TensorEntry]:
    """Index the model's tensors by the names that a plain model gives them."""
    # Root and wrappers are stripped; tensors whose plain names would be the same keep their own.
    model, prefix = find_model(checkpoint)
    plain = [strip_wrappers(entry.fqn)[len(prefix) :] for entry in model.tensors]
    counts = Counter(plain)
    named = {name if counts[name] == 1 else entry.fqn: entry for name, entry in zip(plain, model.tensors, strict=True)}
    return named if len(named) == len(plain) else {entry.fqn: entry for entry in model.tensors}
