"""Which library builds the model of a config.json: transformers or diffusers. Imports torch."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ckpt_tools.errors import UsageError
from ckpt_tools.models.config_recipe import FEEDS_ITSELF, ConfigRecipe
from ckpt_tools.models.hf_recipe import HfRecipe
from ckpt_tools.models.recipe import BATCH_SIZE, Batch
from ckpt_tools.models.replace_parameters import parameters_on_meta, replace_parameters
from ckpt_tools.tables import read_packaged


def recipe_of(config: Mapping[str, Any], where: str, *, otherwise: str | None = None) -> ConfigRecipe:
    """Return how to build the model of a config.json; `otherwise` is the hint where there is no `--factory`."""
    is_diffusers = "_class_name" in config and not config.get("architectures")
    return (DiffusersRecipe if is_diffusers else HfRecipe)(config, where, otherwise=otherwise)


# Models that a config.json of diffusers describes (`_class_name`). No code from a checkpoint is run. Imports torch.

_LATENT = 8  # Pixels of a latent's side, for what takes pictures
_STEPS = 1000


def _read_table() -> tuple[dict[str, str], tuple[tuple[str, str, tuple[str, ...]], ...]]:
    """Return the words that stand for others, and the rows, of diffusers.txt, which says what they mean."""
    text = read_packaged(__package__, "diffusers.txt")
    lines = [line.split() for line in text.splitlines() if line.strip() and not line.startswith("#")]
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
    latents: int  # Tokens that the latents of a sample make
    text: int  # Tokens of its text


def draw(kind: type[nn.Module], model: nn.Module, wanted: Wanted) -> dict[str, Any] | str:
    """Return what forward takes, from torch's random state; or the parameter of which nothing is known."""
    # `kind` is the model's class, which a sharded model is a subclass of.
    drawing = _BatchDrawing(kind.__name__, model, wanted)
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


class _BatchDrawing:
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
_OWN = ("grid", "shapes", "conditions", "pixels")  # Kinds that are methods of a drawing
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


_SMALL = Wanted(samples=BATCH_SIZE, latents=16, text=8)
_MAX_TEXT = 512  # Tokens: what FLUX's and most pipelines cut at, beside 4096 for 1024 × 1024 pixels
_ZERO_STD = 0.02  # Of what a class sets to zero: a fresh model's output and gradients would be zero
_TARGET_SEED = 20


class DiffusersRecipe(ConfigRecipe):
    """A diffusers model with the config of a checkpoint; its forward returns the loss of a training step."""

    # Parameters are made on the default device. What a class computes of nothing is made on the CPU even if that is
    # meta: tables of frequencies are plain attributes in many models (Qwen-Image), and no load brings them back.

    depth_keys = re.compile(r"(num_(\w+_)?layers|depth|n_layers|num_(text|visual)_blocks)")

    def _find_class(self, otherwise: str) -> str:
        self._class = _find_class(self._values["_class_name"], self.where, otherwise)
        name: str = self._class.__name__
        return name

    def _construct(self) -> nn.Module:
        if torch.get_default_device().type == "meta":
            with torch.device("cpu"), parameters_on_meta():
                model: nn.Module = self._class.from_config(self.settled())
            # What a class puts in the place of a parameter later than it registers one.
            replace_parameters(model, lambda one: None if one.is_meta else one.detach().to("meta"))
        else:
            model = self._class.from_config(self.settled())
            for parameter in model.parameters():
                if parameter.is_floating_point() and not bool(parameter.any()):
                    nn.init.normal_(parameter, std=_ZERO_STD)
        model.register_forward_hook(_to_loss)
        return model

    def make_batch(self, model: nn.Module) -> Batch:
        """Draw what forward takes, for a small picture."""
        return self.draw(model, _SMALL)

    def sized_batch(self, model: nn.Module, *, samples: int, tokens: int) -> Batch:
        """Draw what forward takes: of a sample's tokens a ninth, 512 at most, are text, the others latents."""
        text = min(_MAX_TEXT, tokens // 9)
        return self.draw(model, Wanted(samples=samples, latents=tokens - text, text=text))

    def draw(self, model: nn.Module, wanted: Wanted) -> Batch:
        """Draw what forward takes, on the default device."""
        found = draw(self._class, model, wanted)
        if isinstance(found, str):
            what = f"ckpt cannot make a batch for a {self.title}: its forward needs {found}"
            raise UsageError(what, where=self.where, hint=self._otherwise or FEEDS_ITSELF)
        return found

    def notes_on(self, batch: Batch) -> tuple[str, ...]:  # noqa: ARG002 - the same for all
        """Say what the loss is."""
        return ("the loss is the mean squared distance of what the model returns from drawn noise",)


def _find_class(name: object, where: str, otherwise: str) -> Any:  # noqa: ANN401 - a class of diffusers
    if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
        raise UsageError("the config names no class", where=where, hint=otherwise)
    try:
        import diffusers
    except ModuleNotFoundError as error:
        what = f"building a {name} needs diffusers"
        raise UsageError(what, where=where, hint=f"pip install 'ckpt-tools[diffusers]', or {otherwise}") from error
    diffusers.utils.logging.set_verbosity_error()
    found = getattr(diffusers, name, None)
    # The name comes from a file: only a model class may be called.
    kinds = (diffusers.ModelMixin, diffusers.configuration_utils.ConfigMixin)
    if not (isinstance(found, type) and all(issubclass(found, kind) for kind in kinds)):
        raise UsageError(f"diffusers {diffusers.__version__} has no model class {name}", where=where, hint=otherwise)
    return found


def _to_loss(model: nn.Module, args: object, output: object) -> dict[str, torch.Tensor]:  # noqa: ARG001 - a hook
    """Return the loss in place of what forward returns: its mean squared distance from noise that is always the same.

    The velocity of flow matching, and the noise that a UNet predicts, are such noise.
    """
    losses = []
    generator = torch.Generator().manual_seed(_TARGET_SEED)
    for tensor in tree_leaves(output):
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            continue
        if tensor.requires_grad or not torch.is_grad_enabled():
            target = torch.randn(tensor.shape, generator=generator, device="cpu").to(tensor.device)
            losses.append((tensor.float() - target).square().mean())
    return {"loss": torch.stack(losses).sum()} if losses else {}
