"""Select, rename and cast: a description in, a description out, no bytes touched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ckpt_tools.checkpoint import BlobEntry, Checkpoint, TensorEntry
from ckpt_tools.errors import UsageError
from ckpt_tools.rules import compile_glob
from ckpt_tools.text import escape_name

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""Components that torch.compile, activation checkpointing and FSDP1 put into FQNs at any depth."""
_OPTIMIZER_ROOTS = ("optimizer", "optim", "optimizers", "optimizer_states")
_OPTIMIZER_LEAVES = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "step", "master_param")


def select(checkpoint: Checkpoint, *, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> Checkpoint:
    """Keep the tensors and blobs whose FQN matches some `include` glob (or any, without) and no `exclude`.

    Raises:
        UsageError: An `include` glob matches nothing, or nothing is left.
    """
    if not include and not exclude:
        return checkpoint
    fqns = [entry.fqn for entry in checkpoint.tensors] + [blob.fqn for blob in checkpoint.blobs]
    for pattern in include:
        if not any(map(compile_glob(pattern).fullmatch, fqns)):
            raise UsageError(
                f"--include {pattern} matches no tensor",
                hint="`ckpt inspect SRC --tensors` lists the names; ** crosses dots, * does not",
            )
    includes = [compile_glob(pattern) for pattern in include]
    excludes = [compile_glob(pattern) for pattern in exclude]

    def keep(fqn: str) -> bool:
        return (not includes or any(p.fullmatch(fqn) for p in includes)) and not any(p.fullmatch(fqn) for p in excludes)

    return replace(
        checkpoint,
        tensors=tuple(entry for entry in checkpoint.tensors if keep(entry.fqn)),
        blobs=tuple(blob for blob in checkpoint.blobs if keep(blob.fqn)),
    )


def rename(checkpoint: Checkpoint, new_name: Callable[[str], str]) -> Checkpoint:
    """Rename every tensor.

    Raises:
        UsageError: Two tensors get the same name.
    """
    tensors = tuple(replace(entry, fqn=new_name(entry.fqn)) for entry in checkpoint.tensors)
    seen: dict[str, str] = {}
    for old, new in zip(checkpoint.tensors, tensors, strict=True):
        if new.fqn in seen:
            raise UsageError(
                f"{escape_name(old.fqn)!r} and {escape_name(seen[new.fqn])!r} "
                f"would both be named {escape_name(new.fqn)!r}",
                hint="say what to strip: --strip-prefix none|PREFIX, or --exclude one of them",
            )
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
    parts = tuple(entry.path) if len(entry.path) > 1 else tuple(entry.fqn.split("."))
    if any(part in _OPTIMIZER_ROOTS for part in parts[:2]):
        return True
    # Flattened optimizer state: state.<fqn>.exp_avg
    last = parts[-1].rpartition(".")[2]
    return last in _OPTIMIZER_LEAVES and parts[0].partition(".")[0] == "state"


def find_model(checkpoint: Checkpoint) -> tuple[Checkpoint, str]:
    """Find the model inside what a trainer saved.

    Leaves optimizer state and blobs out, and names the root that every model key lies under ("", "model.",
    "app.model.", …). The nesting that DCP records (`TensorEntry.path`) decides; where it is flat or
    unknown, a root is only a root when every key has it and what remains still looks like a model's keys.

    Returns:
        The model's tensors, with their names unchanged, and the prefix to strip.
    """
    tensors = tuple(entry for entry in checkpoint.tensors if not is_optimizer(entry))
    model = replace(checkpoint, tensors=tensors, blobs=())
    if not tensors:
        return model, ""
    nested = _common(tuple(entry.path[:-1] for entry in tensors))
    if nested:
        prefix = ".".join(nested) + "."
        if all(entry.fqn.startswith(prefix) for entry in tensors):
            return model, prefix
    prefix = ""
    names = [strip_wrappers(entry.fqn) for entry in tensors]
    for root in ("module.", "app.model.", "model_state.model.", "state.model.", "module."):
        if all(name.startswith(root) for name in names):
            prefix += root
            names = [name[len(root) :] for name in names]
    # `model.` alone is ambiguous: a base model's own keys begin with it. It is a root when the model's own
    # `model.` follows, or when nothing says how the names were nested and other parts of the trainer's state
    # (optimizer, blobs) stand beside it.
    beside = not any(entry.path for entry in tensors) and (
        len(tensors) < len(checkpoint.tensors) or any(not blob.fqn.startswith("model.") for blob in checkpoint.blobs)
    )
    if all(name.startswith("model.") for name in names) and (
        beside or any(name.startswith("model.model.") for name in names)
    ):
        prefix += "model."
    return model, prefix


def _common(paths: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the longest common beginning."""
    first, last = min(paths), max(paths)
    length = 0
    while length < min(len(first), len(last)) and first[length] == last[length]:
        length += 1
    return first[:length]


def strip_prefix(fqns: Iterable[str], prefix: str) -> Callable[[str], str]:
    """Return the function that removes `prefix` from an FQN.

    Raises:
        UsageError: Some of `fqns` does not begin with it.
    """
    without = next((fqn for fqn in fqns if not fqn.startswith(prefix)), None)
    if without is not None:
        raise UsageError(
            f"tensor {escape_name(without)!r} does not begin with {prefix!r}",
            hint="--strip-prefix auto finds the prefix; --include and --exclude choose the tensors",
        )
    return lambda fqn: fqn[len(prefix) :]


def plain_names(checkpoint: Checkpoint) -> dict[str, TensorEntry]:
    """Index the model's tensors by the names that a plain model gives them.

    Root and wrappers are stripped; a tensor whose plain name is taken keeps its own.
    """
    model, prefix = find_model(checkpoint)
    named: dict[str, TensorEntry] = {}
    for entry in model.tensors:
        plain = strip_wrappers(entry.fqn[len(prefix) :])
        named[plain if plain not in named else entry.fqn] = entry
    return named
