"""Text encoders of image models: CLIP's and T5's modules, which all ecosystems call as transformers does.

transformers 5 has taken CLIP's `text_model.` away: the short path is the second spelling of the same module. Adapters
keep the long one, which diffusers and ComfyUI understand both before and after.
"""

from __future__ import annotations

from ckpt_tools.adapters.architectures.rule import Names, rename

_CLIP_LAYER = (
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj")),
    "mlp.fc1",
    "mlp.fc2",
)
_T5_LAYER = (
    *(f"layer.0.SelfAttention.{name}" for name in "qkvo"),
    *(f"layer.1.DenseReluDense.{name}" for name in ("wi_0", "wi_1", "wo")),
)

CLIP = Names(
    (
        *(rename(f"text_model.encoder.layers.{{i}}.{name}", f"encoder.layers.{{i}}.{name}") for name in _CLIP_LAYER),
        rename("text_projection", "text_projection"),
    )
)
"""CLIPTextModel and CLIPTextModelWithProjection."""

T5 = Names(tuple(rename(path, path) for path in (f"encoder.block.{{i}}.{name}" for name in _T5_LAYER)))
