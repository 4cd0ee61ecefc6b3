"""HunyuanVideo and HunyuanVideo 1.5: the names of ComfyUI, of Tencent and of diffusers.

ComfyUI calls the blocks as FLUX.1 does (`img_attn.qkv`), Tencent and musubi-tuner otherwise (`img_attn_qkv`; in 1.5
`img_attn_q`, `img_attn_k` and `img_attn_v`).

Source: github.com/Tencent/HunyuanVideo, hyvideo/modules/models.py; github.com/Tencent-Hunyuan/HunyuanVideo-1.5; ComfyUI,
comfy/ldm/hunyuan_video/model.py and comfy/supported_models.py (`process_unet_state_dict`); diffusers 0.42,
loaders/single_file_utils.py (`convert_hunyuan_video_transformer_to_diffusers`), and in its repository
scripts/convert_hunyuan_video1_5_to_diffusers.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ckpt_tools.adapters.architectures.architecture import Architecture, transformer
from ckpt_tools.adapters.architectures.rule import Names, Rule, attention, embedder, rename

_BLOCK = "transformer_blocks.{i}"
_SINGLE = "single_transformer_blocks.{i}"
_REFINER = "context_embedder.token_refiner.refiner_blocks.{i}"


@dataclass(frozen=True, slots=True)
class _Spelling:
    """What an implementation calls layers."""

    time: tuple[str, str]
    text: tuple[str, str]
    mlp: tuple[str, str]
    modulation: str
    dot: str
    """Between an attention and its projections."""
    is_split: bool = False
    """Has a block its query, key and value apart?"""

    def refined(self) -> tuple[Rule, ...]:
        """Return the rules for the text's refiner, and the input and output of the image."""
        native, block = "txt_in", "txt_in.individual_token_refiner.blocks.{i}"
        embedding = "context_embedder.time_text_embed"
        return (
            rename("img_in.proj", "x_embedder.proj"),
            rename(f"{native}.input_embedder", "context_embedder.proj_in"),
            *embedder(f"{native}.t_embedder", f"{embedding}.timestep_embedder", *self.time),
            *embedder(f"{native}.c_embedder", f"{embedding}.text_embedder", *self.text),
            attention(f"{block}.self_attn{self.dot}qkv", f"{_REFINER}.attn"),
            rename(f"{block}.self_attn{self.dot}proj", f"{_REFINER}.attn.to_out.0"),
            *self.feed_forward(f"{block}.mlp", f"{_REFINER}.ff"),
            rename(f"{block}.adaLN_modulation.1", f"{_REFINER}.norm_out.linear"),
            rename("final_layer.linear", "proj_out"),
            Rule(native="final_layer.adaLN_modulation.1", diffusers=("norm_out.linear",), step="swap"),
        )

    def feed_forward(self, native: str, diffusers: str) -> tuple[Rule, ...]:
        """Return the rules for an MLP."""
        first, second = self.mlp
        return rename(f"{native}.{first}", f"{diffusers}.net.0.proj"), rename(
            f"{native}.{second}", f"{diffusers}.net.2"
        )

    def stream(self, native: str, *, added: bool = False) -> tuple[Rule, ...]:
        """Return the rules for the image's or the text's side of a block with both."""
        block, context = f"double_blocks.{{i}}.{native}", "_context" if added else ""
        fused = attention(f"{block}_attn{self.dot}qkv", f"{_BLOCK}.attn", added=added)
        apart = (rename(f"{block}_attn_{part}", path) for part, path in zip("qkv", fused.diffusers, strict=True))
        return (
            *(apart if self.is_split else (fused,)),
            rename(f"{block}_attn{self.dot}proj", f"{_BLOCK}.attn.{'to_add_out' if added else 'to_out.0'}"),
            *self.feed_forward(f"{block}_mlp", f"{_BLOCK}.ff{context}"),
            rename(f"{block}_mod.{self.modulation}", f"{_BLOCK}.norm1{context}.linear"),
        )

    def names(self) -> Names:
        """Return every linear layer and patch embedding of HunyuanVideo, text and image to video."""
        return Names(
            (
                *self.refined(),
                *embedder("time_in", "time_text_embed.timestep_embedder", *self.time),
                *embedder("vector_in", "time_text_embed.text_embedder"),
                *embedder("guidance_in", "time_text_embed.guidance_embedder", *self.time),
                *self.stream("img"),
                *self.stream("txt", added=True),
                Rule(
                    native="single_blocks.{i}.linear1",
                    diffusers=(*(f"{_SINGLE}.attn.to_{part}" for part in "qkv"), f"{_SINGLE}.proj_mlp"),
                    step="qkv_mlp",
                ),
                rename("single_blocks.{i}.linear2", f"{_SINGLE}.proj_out"),
                rename(f"single_blocks.{{i}}.modulation.{self.modulation}", f"{_SINGLE}.norm.linear"),
            )
        )

    def names_1_5(self) -> Names:
        """Return every linear layer and patch embedding of HunyuanVideo 1.5."""
        return Names(
            (
                *self.refined(),
                *embedder("time_in", "time_embed.timestep_embedder", *self.time),
                *embedder("time_r_in", "time_embed.timestep_embedder_r", *self.time),
                *embedder("vision_in.proj", "image_embedder", "1", "3"),
                *(rename(f"byt5_in.fc{n}", f"context_embedder_2.linear_{n}") for n in (1, 2, 3)),
                rename("cond_type_embedding", "cond_type_embed"),
                *self.stream("img"),
                *self.stream("txt", added=True),
            )
        )


_COMFYUI = _Spelling(("in_layer", "out_layer"), ("in_layer", "out_layer"), ("0", "2"), "lin", ".")
_TENCENT = _Spelling(("mlp.0", "mlp.2"), ("linear_1", "linear_2"), ("fc1", "fc2"), "linear", "_")
_TENCENT_1_5 = replace(_TENCENT, is_split=True)
