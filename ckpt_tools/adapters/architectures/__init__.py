"""Model families whose adapters have names of their own: one file for each, and the table of them.

A new one is a file with an `Architecture`, and a line of `ARCHITECTURES`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from ckpt_tools.adapters.architectures.architecture import Architecture
from ckpt_tools.adapters.architectures.chroma import CHROMA
from ckpt_tools.adapters.architectures.cogvideox import COGVIDEOX
from ckpt_tools.adapters.architectures.flux1 import FLUX1
from ckpt_tools.adapters.architectures.flux2 import FLUX2
from ckpt_tools.adapters.architectures.hidream import HIDREAM
from ckpt_tools.adapters.architectures.hunyuan_video import HUNYUAN_VIDEO, HUNYUAN_VIDEO_1_5
from ckpt_tools.adapters.architectures.ldm import KOLORS, SD1, SD2, SDXL
from ckpt_tools.adapters.architectures.ltx import LTX, LTX2
from ckpt_tools.adapters.architectures.lumina2 import LUMINA2
from ckpt_tools.adapters.architectures.qwen_image import QWEN_IMAGE
from ckpt_tools.adapters.architectures.sana import SANA
from ckpt_tools.adapters.architectures.sd3 import SD3
from ckpt_tools.adapters.architectures.wan import WAN
from ckpt_tools.adapters.architectures.z_image import Z_IMAGE

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        each.name: each
        for each in (
            SD1,
            SD2,
            SDXL,
            KOLORS,
            SD3,
            FLUX1,
            FLUX2,
            CHROMA,
            QWEN_IMAGE,
            Z_IMAGE,
            LUMINA2,
            SANA,
            HIDREAM,
            WAN,
            HUNYUAN_VIDEO,
            HUNYUAN_VIDEO_1_5,
            LTX,
            LTX2,
            COGVIDEOX,
        )
    }
)


def candidates(paths: Iterable[str]) -> tuple[str, ...]:
    """Return the families that explain most of the names; more than one where names are shared.

    `transformer_blocks.0.attn.to_q` alone could be FLUX.1, FLUX.2, SD3 or others.
    """
    from ckpt_tools.adapters.architectures.resolve import readings

    names = list(dict.fromkeys(paths))
    counts = {
        name: sum(1 for path in names if readings(path, architecture))
        for name, architecture in ARCHITECTURES.items()
        if architecture.is_told_by_names
    }
    best = max(counts.values(), default=0)
    return tuple(name for name, count in counts.items() if count == best) if best else ()
