"""Which of the hub's tasks a model is for, by its class in diffusers or transformers, as data.

Source: huggingface.co/tasks; diffusers 0.42, pipelines/__init__.py, and the tags of its training examples.
"""

from __future__ import annotations

import re

_FAMILIES: dict[str, tuple[str, tuple[str, ...], bool]] = {
    "stable-diffusion-xl": ("text-to-image", ("stablediffusionxl", "sdxl"), True),
    "sd3": ("text-to-image", ("stablediffusion3", "sd3"), True),
    "stable-diffusion": ("text-to-image", ("stablediffusion", "sd1", "sd2"), True),
    **{
        tag: ("text-to-image", (tag.replace("-", ""),), True)
        for tag in ("kolors", "chroma", "z-image", "lumina", "pixart", "auraflow", "hunyuandit", "cogview")
    },
    "sana-video": ("text-to-video", ("sanavideo",), False),
    "sana": ("text-to-image", ("sana",), True),
    **{
        tag: ("text-to-image", (tag.replace("-", ""),), False)
        for tag in ("flux2", "flux", "qwen-image", "hidream", "hunyuan-image")
    },
    **{
        tag: ("text-to-video", (tag.replace("-", ""),), False)
        for tag in ("hunyuan-video", "cogvideox", "wan", "skyreels", "ltx-2", "ltx", "mochi")
    },
    "stable-audio": ("text-to-audio", ("stableaudio",), True),
}
"""Tag → task, begins of its classes and names, and whether every model of these modules has that task."""

_VARIANTS: tuple[tuple[re.Pattern[str], str | None], ...] = (
    (re.compile(r"ImageToVideo|Image2Video|Img2Vid|(?<!T)I2V|VideoDiffusion(?!Decode)"), "image-to-video"),
    (re.compile(r"VideoToVideo|V2V"), "video-to-video"),
    (re.compile(r"2Img|Inpaint|Edit(?!i)|Kontext|Pix2Pix|Upscale|Variation|Fill(?![a-z])|Layered"), "image-to-image"),
    (re.compile(r"Control|VACE|Animate|S2V|Canny|Depth|Redux|Prior|Decode|Adapter|Refine"), None),
)
"""Words of a class or of a model's name → the task that they stand for; None: another one than the family's usual."""

HEADS = {
    "ForCausalLM": ("AutoModelForCausalLM", "text-generation"),
    "LMHeadModel": ("AutoModelForCausalLM", "text-generation"),
    "ForMaskedLM": ("AutoModelForMaskedLM", "fill-mask"),
    "ForSequenceClassification": ("AutoModelForSequenceClassification", "text-classification"),
    "ForTokenClassification": ("AutoModelForTokenClassification", "token-classification"),
    "ForQuestionAnswering": ("AutoModelForQuestionAnswering", "question-answering"),
    "ForImageClassification": ("AutoModelForImageClassification", "image-classification"),
    "ForObjectDetection": ("AutoModelForObjectDetection", "object-detection"),
    "ForCTC": ("AutoModelForCTC", "automatic-speech-recognition"),
    "ForSpeechSeq2Seq": ("AutoModelForSpeechSeq2Seq", "automatic-speech-recognition"),
}
"""How the name of a class of transformers ends → what loads it, and the hub's name of the task."""


def task_of_class(name: str | None) -> str | None:
    """Return the task of a pipeline of diffusers'; None where its name does not tell."""
    return _task(tag_of(name or ""), name or "")


def task_of_adapter(family: str, base_model: str | None) -> str | None:
    """Return the task of an adapter: of models whose modules have the same names, the base's own name tells which."""
    tag = tag_of(family)
    if tag is None or (base_model is None and not _FAMILIES[tag][2]):
        return None
    return _task(tag, (base_model or "").rpartition("/")[2])


def tag_of(family: str) -> str | None:
    """Return the tag under which the hub lists models of a family, by its name or class."""
    plain = re.sub(r"[-.\s]", "", family).lower()
    return next((tag for tag, (_, begins, _) in _FAMILIES.items() if plain.startswith(begins)), None)


def _task(tag: str | None, name: str) -> str | None:
    usual = None if tag is None else _FAMILIES[tag][0]
    variant = next((task for pattern, task in _VARIANTS if pattern.search(name)), usual)
    # Of sounds, shapes and videos there is editing as well.
    return None if variant == "image-to-image" and usual != "text-to-image" else variant
