"""Where the sizes of a model come from: its config, a few figures, or a checkpoint's headers. No torch."""

from __future__ import annotations

import os

from ckpt_tools.description.transform import is_optimizer
from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.estimate.figures import Figures, figures_from_counts, figures_from_shapes
from ckpt_tools.estimate.options import EstimateOptions
from ckpt_tools.formats.opening import open_path
from ckpt_tools.models.config import config_path, read_config
from ckpt_tools.text import escape_name

SIZES_HINT = "name a config.json, its directory or a checkpoint, or write --params 7B --layers 32 --hidden 4096"
"""What says how large a model is."""


def config_of(options: EstimateOptions) -> str | None:
    """Return the path of the config.json that `options.model` means, None when there is none.

    Raises:
        UsageError: There is nothing at all, or something that cannot be read.
    """
    path = options.path
    if path is None:
        return None
    if os.path.isdir(path):
        file = config_path(path)
        return file if os.path.isfile(file) and _names_architecture(file) else None
    if not os.path.exists(path):
        raise UsageError("there is no such file or directory", where=path, hint=SIZES_HINT)
    if not path.endswith(".json") or path.endswith(".index.json"):
        return None
    return path


def _names_architecture(path: str) -> bool:
    """Is it a config of transformers? One of diffusers, beside its weights, is not: then these answer."""
    return bool(read_config(path, hint=SIZES_HINT).values.get("architectures"))


def find_figures(options: EstimateOptions) -> tuple[str, Figures, tuple[str, ...]]:
    """Return what is estimated, its figures, and what they leave open: without a config.

    Raises:
        UsageError: Neither figures nor a checkpoint with blocks.
        UnreadableError: The checkpoint cannot be described.
    """
    if options.path is None:
        if options.num_params is None or options.layers is None or options.hidden is None:
            raise UsageError("nothing says how large the model is", hint="--params, --layers and --hidden")
        figures = figures_from_counts(
            params=options.num_params, layers=options.layers, hidden=options.hidden, vocab=options.vocab
        )
        title = f"{options.layers} layers of width {options.hidden}"
        return title, figures, ("a decoder like Llama's is assumed: gated feed-forward network, two embeddings",)
    try:
        with open_path(options.path) as opened:
            shapes = {entry.fqn: entry.shape for entry in opened.checkpoint.tensors if not is_optimizer(entry)}
    except CkptError as error:
        if error.hint is None:
            error.hint = SIZES_HINT
        raise
    figures, notes = figures_from_shapes(shapes)
    kinds = ", ".join(f"{block.count} of {block.params:,} parameters" for block in figures.blocks)
    title = f"{escape_name(options.path)}: {len(shapes)} tensors, blocks: {kinds}"
    return title, figures, ("sizes are those of the checkpoint's tensors", *notes)
