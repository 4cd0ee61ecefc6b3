"""What the forward of diffusers' models takes: a table of shapes by class and parameter. Imports torch.

Source: signatures and docstrings of the classes of diffusers 0.42, and the shapes that its pipelines make.
"""

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

_LATENT = 8
"""Pixels of a latent's side, for what takes pictures."""
_STEPS = 1000
_TEXT = (
    "joint_attention_dim|text_dim|caption_channels|text_embed_dim|cap_feat_dim|in_text_dim|context_in_dim|"
    "encoder_hid_dim|cross_attention_dim"
)
_TOKENS = r"Flux.*|BriaTr.*|BriaFiboTr.*|Chroma.*|LongCatImage.*|Ovis.*|QwenImage.*|LTX.*|Krea2.*|Nucleus.*"

_ROWS: tuple[tuple[str, str, str], ...] = (
    # what is denoised, encoded or conditioned on
    (_TOKENS, "hidden_states|controlnet_cond", "normal B S in_channels"),
    ("CogVideoX.*|ConsisID.*", "hidden_states", "normal B F in_channels H W"),
    ("StableAudioDiT.*", "hidden_states", "normal B in_channels sample_size"),
    ("Kandinsky5.*", "hidden_states", "normal B F H W in_visual_dim"),
    (".*(3D|Video).*", "hidden_states", "normal B in_channels|in_visual_dim F H W"),
    (".*", "hidden_states", "normal B in_channels|in_visual_dim H W"),
    ("UNet1D.*", "sample", "normal B in_channels S"),
    ("UNet3D.*|UNetMotion.*|I2VGen.*", "sample", "normal B in_channels F H W"),
    ("UNetSpatioTemporal.*", "sample", "normal B F in_channels H W"),
    (".*(UNet|ControlNet).*", "sample", "normal B in_channels H W"),
    ("AutoencoderKLMochi", "sample", "normal B 3 7 8H 8W"),
    ("AutoencoderKLTemporal.*", "sample", "normal BF in_channels 8H 8W"),
    (".*", "sample", "pixels"),
    ("WanVACE.*", "control_hidden_states", "normal B vace_in_channels F H W"),
    ("LTX2.*", "audio_hidden_states", "normal B 9 audio_in_channels"),
    ("ZImage.*", "x", "list B in_channels 1 H W"),
    ("SD3.*|Sana.*", "controlnet_cond", "normal B in_channels H W"),
    (".*", "controlnet_cond", "normal B conditioning_channels|3 8H 8W"),
    # text
    ("ZImage.*", "cap_feats", "list B T cap_feat_dim"),
    ("HunyuanDiT.*", "encoder_hidden_states", "normal B text_len cross_attention_dim"),
    ("HunyuanDiT.*", "encoder_hidden_states_t5", "normal B text_len_t5 cross_attention_dim_t5"),
    ("HunyuanDiT.*", "text_embedding_mask", "ones B text_len"),
    ("HunyuanDiT.*", "text_embedding_mask_t5", "ones B text_len_t5"),
    ("HunyuanDiT.*", "image_meta_size", "?use_style_cond_and_image_meta_size ones B 6"),
    ("HunyuanDiT.*", "style", "?use_style_cond_and_image_meta_size zeros B"),
    ("HiDream.*", "encoder_hidden_states_t5", "normal B T first:caption_channels"),
    ("HiDream.*", "encoder_hidden_states_llama3", "normal llama_layers+1 B T caption_channels"),
    ("HiDream.*", "pooled_embeds", "normal B text_emb_dim"),
    ("Hunyuan.*", "encoder_hidden_states_2", "normal B T text_embed_2_dim"),
    ("Hunyuan.*", "encoder_attention_mask_2", "true B T"),
    ("HunyuanVideo15.*", "image_embeds", "normal B T image_embed_dim"),
    ("Krea2.*", "encoder_hidden_states", "normal B T num_text_layers text_hidden_dim"),
    ("Krea2.*", "position_ids", "zeros S+T 3"),
    ("ErnieImage.*", "text_bth", "normal B T text_in_dim"),
    ("ErnieImage.*", "text_lens", "full:T B"),
    ("GlmImage.*", "prior_token_id", "below:prior_vq_quantizer_codebook_size B S"),
    ("GlmImage.*", "prior_token_drop", "true B"),
    ("BriaFiboTr.*", "text_encoder_layers", "list num_layers+num_single_layers B T text_encoder_dim"),
    ("LTX2.*", "audio_encoder_hidden_states", "normal B T caption_channels"),
    ("LTX2.*", "audio_num_frames", "number 9"),
    ("Wan(Tr|VACE|Ani).*", "encoder_hidden_states_image", "?image_dim normal B 257 image_dim"),
    ("StableAudioDiT.*", "encoder_hidden_states", "normal B T cross_attention_input_dim"),
    ("StableAudioDiT.*", "global_hidden_states", "normal B 1 global_states_input_dim"),
    ("UNetMotion.*", "encoder_hidden_states", "normal BF T cross_attention_dim"),
    ("UNetSpatioTemporal.*", "encoder_hidden_states", "normal B 1 cross_attention_dim"),
    (".*", "encoder_hidden_states", f"normal B T {_TEXT}"),
    (".*", "pooled_projections", "?pooled_projection_dim|in_text_dim2 normal B pooled_projection_dim|in_text_dim2"),
    (".*", "encoder_attention_mask|encoder_hidden_states_mask|encoder_mask", "true B T"),
    # time
    ("ZImage.*", "t", "time B"),
    (
        f"{_TOKENS}|Hunyuan(DiT|Image|Video15).*|Ernie.*",
        "timestep",
        "time B",
    ),
    (".*", "timestep|timesteps", "steps B"),
    (".*", "timestep_r", "?use_meanflow time B"),
    (".*", "guidance", "?guidance_embeds time B"),
    # where and what
    ("AutoencoderKLLTX.*", "temb", "?timestep_conditioning time B"),
    (".*", "img_ids", "grid"),
    (".*", "txt_ids", "zeros T A"),
    (".*", "img_shapes", "shapes"),
    ("Kandinsky5.*", "visual_rope_pos", "ranges F G G"),
    ("Kandinsky5.*", "text_rope_pos", "range T"),
    ("LTX.*", "num_frames", "number F"),
    ("LTX.*", "height|width", "number G"),
    ("AutoencoderKLTemporal.*", "num_frames", "number B"),
    (".*", "class_labels", "?num_embeds_ada_norm|num_class_embeds below:num_embeds_ada_norm|num_class_embeds B"),
    (".*", "original_size|target_size", "ones B 2"),
    (".*", "crop_coords", "ones B 2"),
    (".*", "added_time_ids", "ones B 3"),
    (".*", "added_cond_kwargs", "conditions"),
)
"""Class, parameter, and what it is: a kind and its dims. The first row that matches holds.

Dims: B samples, T tokens of text, S tokens of latents, F frames, H × W latents, G tokens along a side, A axes of
positions; else a number, or keys of the config, of which the first that says something holds. A row that begins with
"?key" holds for configs that say the key. What no row names is left out where forward can do without it.
"""


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

    Args:
        kind: The model's class, which a sharded model is a subclass of.
        model: Whose config tells the sizes.
        wanted: How large.
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
        is_packed = re.fullmatch(_TOKENS, self.title) is not None
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
                words = row.split()
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
