"""What the forward of diffusers' models takes, drawn as a table (diffusers.txt) says. Imports torch.

Source: signatures and docstrings of the classes of diffusers 0.42, and the shapes that its pipelines make.
"""

from __future__ import annotations

import inspect
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

_LATENT = 8
"""Pixels of a latent's side, for what takes pictures."""
_STEPS = 1000


def _read_table() -> tuple[dict[str, str], tuple[tuple[str, str, tuple[str, ...]], ...]]:
    """Return the words that stand for others, and the rows, of diffusers.txt, which says what they mean."""
    with open(os.path.join(os.path.dirname(__file__), "diffusers.txt"), encoding="utf-8") as file:
        lines = [line.split() for line in file if line.strip() and not line.startswith("#")]
    words = {line[0]: line[1] for line in lines if len(line) == 2}
    rows = []
    for line in lines:
        if len(line) > 2:
            for word, meaning in words.items():
                line = [part.replace(word, meaning) for part in line]  # noqa: PLW2901 - the same line
            rows.append((line[0], line[1], tuple(line[2:])))
    return words, tuple(rows)


_WORDS, _ROWS = _read_table()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """How large a batch is to be, roughly: pictures are square, and their sides even."""

    samples: int
    latents: int
    """Tokens that the latents of a sample make."""
    text: int
    """Tokens of its text."""


def draw(kind: type[nn.Module], model: nn.Module, wanted: Wanted) -> dict[str, Any] | str:
    """Return what forward takes, from torch's random state; or the parameter of which nothing is known.

    `kind` is the model's class, which a sharded model is a subclass of.
    """
    drawing = _Drawing(kind.__name__, model, wanted)
    batch: dict[str, Any] = {}
    for name, parameter in inspect.signature(kind.forward).parameters.items():
        if name == "self" or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        value = drawing.draw(name)
        if value is not None:
            batch[name] = value
        elif parameter.default is parameter.empty:
            return name
    return batch


class _Drawing:
    """The sizes of one batch, and what makes tensors of them."""

    def __init__(self, title: str, model: nn.Module, wanted: Wanted) -> None:
        config: Any = model.config
        self.model = model
        self.title = title
        self.config: Mapping[str, Any] = config
        levels = len(_list(config.get("down_block_types") or config.get("block_out_channels")))
        unit = 2 ** max(0, levels - 1) if "UNet" in self.title or self.title == "ControlNetModel" else 1
        patch = _last(config.get("patch_size")) or 1
        is_packed = re.fullmatch(_WORDS["@packed"], self.title) is not None
        is_film = re.search("3D|Video|Motion|I2V|Temporal|ConsisID", self.title) is not None
        self.frames = _last(config.get("video_length")) or (2 if is_film else 1)
        grid = max(2, round(math.sqrt(wanted.latents / self.frames)))
        grid = math.ceil(grid / unit) * unit
        side = grid * (1 if is_packed else patch)
        axes = next((config[key] for key in ("axes_dims_rope", "axes_dims", "axes_lens") if config.get(key)), (1, 1, 1))
        self.sizes = {
            "B": wanted.samples, "T": wanted.text, "F": self.frames, "G": grid, "H": side, "W": side,
            "S": self.frames * grid * grid, "A": len(axes), "BF": wanted.samples * self.frames,
            "8H": _LATENT * side, "8W": _LATENT * side,
        }  # fmt: skip

    def draw(self, name: str) -> Any:  # noqa: ANN401 - what forward takes
        """Return a value for a parameter of forward; None where no row has one."""
        for title, names, row in _ROWS:
            if name in names.split("|") and re.fullmatch(title, self.title):
                words = list(row)
                if words[0].startswith("?") and not self._said(words.pop(0)[1:]):
                    return None
                kind, _, bound = words[0].partition(":")
                if kind in _OWN:
                    return getattr(self, kind)()
                dims = tuple(map(self.size, words[1:]))
                return _BOUNDED[kind](self.size(bound), dims) if bound else _PLAIN[kind](dims)
        return None

    def _said(self, keys: str) -> Any:  # noqa: ANN401 - a config's own
        return next((value for key in keys.split("|") if (value := self.config.get(key))), None)

    def size(self, word: str) -> int:
        """Return the size of a dim."""
        if word in self.sizes:
            return self.sizes[word]
        if "+" in word:
            return sum(map(self.size, word.split("+")))
        for key in word.split("|"):
            value = int(key) if key.isdigit() else _last(self.config.get(key))
            if key.startswith("first:"):
                value = _last(_list(self.config.get(key.removeprefix("first:")))[:1])
            if value:
                return value
        raise ValueError(f"the config does not say {word.replace('|', ', ')}")

    def grid(self) -> torch.Tensor:
        """Return [S, A] positions: row and column of every latent in the second and third column."""
        side, axes = self.sizes["G"], self.sizes["A"]
        ids = torch.zeros(side, side, axes, dtype=torch.long)
        ids[..., 1 % axes] = torch.arange(side)[:, None]
        ids[..., 2 % axes] = torch.arange(side)[None]
        return ids.reshape(-1, axes)

    def shapes(self) -> list[list[tuple[int, int, int]]]:
        """Return, per sample, the shapes of its pictures."""
        side = self.sizes["G"]
        return [[(1, side, side)]] * self.sizes["B"]

    def conditions(self) -> dict[str, torch.Tensor] | None:
        """Return what SDXL's and PixArt's models are told of a picture besides the text."""
        samples = self.sizes["B"]
        if self.config.get("addition_embed_type") == "text_time":
            width = self.size("projection_class_embeddings_input_dim") - 6 * self.size("addition_time_embed_dim")
            return {"text_embeds": torch.randn(samples, width), "time_ids": torch.ones(samples, 6)}
        if getattr(self.model, "use_additional_conditions", False):
            return {"resolution": torch.ones(samples, 2), "aspect_ratio": torch.ones(samples, 1)}
        return None

    def pixels(self) -> torch.Tensor:
        """Return pictures, films or sound, as the first convolution takes them."""
        samples, side = self.sizes["B"], self.sizes["8H"]
        found = (len(module.kernel_size) for module in self.model.modules() if isinstance(module, _CONVOLUTIONS))
        rank = max(found, default=2)
        channels = self.size(f"in_channels|num_channels|audio_channels|input_channels|{1 if rank == 1 else 3}")
        return torch.randn(samples, channels, *{1: (side * side,), 2: (side, side), 3: (9, side, side)}[rank])


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_OWN = ("grid", "shapes", "conditions", "pixels")
"""Kinds that are methods of a drawing."""
_PLAIN: Mapping[str, Callable[[tuple[int, ...]], Any]] = {
    "normal": torch.randn,
    "list": lambda dims: list(torch.randn(dims).unbind()),
    "time": torch.rand,
    "steps": partial(torch.randint, 0, _STEPS),
    "ones": torch.ones,
    "true": partial(torch.ones, dtype=torch.bool),
    "zeros": partial(torch.zeros, dtype=torch.long),
    "range": lambda dims: torch.arange(dims[0]),
    "ranges": lambda dims: [torch.arange(size) for size in dims],
    "number": lambda dims: dims[0],
}
"""Kind → what makes it of its dims."""
_BOUNDED: Mapping[str, Callable[[int, tuple[int, ...]], Any]] = {
    "below": partial(torch.randint, 0),
    "full": lambda value, dims: torch.full(dims, value),
}
"""The same, for `kind:number`."""


def _list(value: object) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []


def _last(value: object) -> int | None:
    """Return a whole number, or the last of several: of a patch (time, height, width) the width."""
    if isinstance(value, (list, tuple)):
        value = value[-1] if value else None
    return value if type(value) is int else None
