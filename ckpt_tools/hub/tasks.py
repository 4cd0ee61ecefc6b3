"""Which of the hub's tasks a model is for, by its class in diffusers or transformers, as data.

Source: huggingface.co/tasks; diffusers 0.42, pipelines/__init__.py, and the tags of its training examples.
"""

from __future__ import annotations

import re

_FAMILIES: tuple[tuple[str, str, str, bool], ...] = (
    ("stablediffusionxl", "stable-diffusion-xl", "text-to-image", True),
    ("sdxl", "stable-diffusion-xl", "text-to-image", True),
    ("stablediffusion3", "sd3", "text-to-image", True),
    ("sd3", "sd3", "text-to-image", True),
    ("stablediffusion", "stable-diffusion", "text-to-image", True),
    ("sd1", "stable-diffusion", "text-to-image", True),
    ("sd2", "stable-diffusion", "text-to-image", True),
    ("sd_", "stable-diffusion", "text-to-image", True),
    ("kolors", "kolors", "text-to-image", True),
    ("flux2", "flux2", "text-to-image", False),
    ("flux", "flux", "text-to-image", False),
    ("chroma", "chroma", "text-to-image", True),
    ("qwenimage", "qwen-image", "text-to-image", False),
    ("zimage", "z-image", "text-to-image", True),
    ("lumina", "lumina2", "text-to-image", True),
    ("sanavideo", "sana-video", "text-to-video", False),
    ("sana", "sana", "text-to-image", True),
    ("hidream", "hidream", "text-to-image", False),
    ("pixart", "pixart", "text-to-image", True),
    ("auraflow", "auraflow", "text-to-image", True),
    ("hunyuandit", "hunyuan-dit", "text-to-image", True),
    ("hunyuanimage", "hunyuan-image", "text-to-image", False),
    ("hunyuanvideo", "hunyuan-video", "text-to-video", False),
    ("cogview", "cogview", "text-to-image", True),
    ("cogvideox", "cogvideox", "text-to-video", False),
    ("wan", "wan", "text-to-video", False),
    ("skyreels", "skyreels", "text-to-video", False),
    ("ltx2", "ltx-2", "text-to-video", False),
    ("ltx", "ltx-video", "text-to-video", False),
    ("mochi", "mochi", "text-to-video", True),
    ("stableaudio", "stable-audio", "text-to-audio", True),
)
"""(begin of the class or of the family's name, tag, task, whether every model of these modules has that task)."""

_VARIANTS: tuple[tuple[re.Pattern[str], str | None], ...] = (
    (re.compile(r"ImageToVideo|Image2Video|Img2Vid|(?<!T)I2V|VideoDiffusion(?!Decode)"), "image-to-video"),
    (re.compile(r"VideoToVideo|V2V"), "video-to-video"),
    (re.compile(r"2Img|Inpaint|Edit(?!ion)|Kontext|Pix2Pix|Upscale|Variation|Fill(?![a-z])|Layered"), "image-to-image"),
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
    variant = _variant(name or "")
    if variant != "":
        return variant
    family = _family(name)
    return family[2] if family is not None else None


def task_of_adapter(family: str, base_model: str | None) -> str | None:
    """Return the task of an adapter: of models whose modules have the same names, the base's own name tells which."""
    found = _family(family)
    if found is None:
        return None
    variant = "" if base_model is None else _variant(base_model.rpartition("/")[2])
    return variant or (found[2] if variant == "" and (found[3] or base_model is not None) else None)


def tag_of(family: str) -> str | None:
    """Return the tag under which the hub lists models of a family, by its name or class."""
    found = _family(family)
    return found[1] if found is not None else None


def _family(name: str | None) -> tuple[str, str, str, bool] | None:
    plain = re.sub(r"[-.\s]", "", name or "").lower()
    return next((row for row in _FAMILIES if plain.startswith(row[0])), None)


def _variant(name: str) -> str | None:
    """Return the task that a word of the name stands for; "" without such a word."""
    return next((task for pattern, task in _VARIANTS if pattern.search(name)), "")
