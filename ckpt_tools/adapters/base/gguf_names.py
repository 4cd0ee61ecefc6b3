"""llama.cpp's names of a model's weights, by the base's config.json; of architectures without a map none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ckpt_tools.checkpoint.dtypes import BY_NAME
from ckpt_tools.checkpoint.names.keymap import KeyMap, load_key_maps
from ckpt_tools.checkpoint.names.keymap_lines import Patterns, fill
from ckpt_tools.checkpoint.names.keymap_steps import LineStep, apply
from ckpt_tools.checkpoint.names.mosaic import whole
from ckpt_tools.errors import UnsupportedError, UsageError
from ckpt_tools.models.conventions import Convention

Config = Mapping[str, object]
_ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "olmo3": "olmo2",
    "cohere": "command-r",
    "phi": "phi2",
}
"""`model_type` → what llama.cpp calls the architecture, where it is not the same."""


def architecture_of(config: Config) -> str:
    """Return what llama.cpp calls a base's architecture; raise UnsupportedError for one without a map."""
    kind = str(config.get("model_type"))
    if kind not in load_key_maps("gguf"):
        what = f"ckpt has no map to llama.cpp's names for models of the type {kind}"
        raise UnsupportedError(what, hint="merge the adapter into the base, and convert the result: ckpt merge-lora")
    return _ARCHITECTURES.get(kind, kind)


def of_adapter(metadata: Mapping[str, str], config: Config) -> tuple[tuple[Convention, ...], Config]:
    """Return the convention of a GGUF adapter's names for a base, and the config that its map needs."""
    own, wanted = metadata.get("general.architecture", ""), architecture_of(config)
    if own != wanted:
        raise UsageError(f"the adapter is for the architecture {own!r}, and the base is {wanted!r}", where="--base")
    return (Convention(name="gguf", key_map=_map_of(config), is_of_class=False),), _with_groups(config)


def names_of(weights: Iterable[str], config: Config) -> Iterator[tuple[str, str, tuple[LineStep, ...]]]:
    """Yield (the hub's name, llama.cpp's name, what is done to its rows) of the weights that the map has."""
    patterns = Patterns([(line.hub[0], line) for line in _map_of(config).section.lines])
    for weight in weights:
        for _, numbers, line in patterns.all(weight):
            spelling = line.spellings[0]
            yield weight, fill(spelling.names[0], line.signs, numbers), spelling.steps


def patterns_of(config: Config) -> set[str]:
    """Return all of llama.cpp's names that the map has, numbers as *."""
    return {line.spellings[0].names[0] for line in _map_of(config).section.lines}


def row_order(steps: tuple[LineStep, ...], rows: int, config: Config) -> list[int] | None:
    """Return which row of the hub's tensor each row is; None where the order is the same."""
    if not steps:
        return None
    try:
        (mosaic,) = apply(steps, [whole("", BY_NAME["F32"], (rows,))], _with_groups(config))
    except ValueError as error:
        raise UsageError(str(error), where="--base", hint="is it the base of the training run?") from error
    order = [0] * rows
    for piece in mosaic.pieces:
        at, count, step = piece.box.offsets[0], piece.box.sizes[0], piece.steps[0]
        order[at : at + count] = range(piece.starts[0], piece.starts[0] + count * step, step)
    return order


def _map_of(config: Config) -> KeyMap:
    architecture_of(config)
    return load_key_maps("gguf")[str(config["model_type"])]


def _with_groups(config: Config) -> Config:
    """Older configs have as many heads of keys as of queries, and do not say so."""
    return {"num_key_value_heads": config.get("num_attention_heads"), **config}
