"""Sample images and videos for a card's gallery, and the prompts that they were made with."""

from __future__ import annotations

import functools
import os
import re
import zlib
from collections.abc import Mapping

from ckpt_tools.checkpoint.formats._json import parse_json
from ckpt_tools.checkpoint.formats.format import read_document
from ckpt_tools.checkpoint.formats.scan import Stretch
from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.hub.card import Sample
from ckpt_tools.hub.plan import LocalFile, file_of_bytes
from ckpt_tools.hub.secrets import png_texts
from ckpt_tools.hub.training import ai_toolkit_config, value_at
from ckpt_tools.storage.source import LocalSource, Source
from ckpt_tools.text import escape_name, first_few

MAX_SAMPLES = 24  # Shown in a gallery; of more, the first by name
MAX_SAMPLE_BYTES = 32 << 20  # Larger files are no samples
_MEDIA = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".mp4", ".webm")
_MAX_TEXT_BYTES = 1 << 20
_MAX_PROMPT_CHARS = 2_000
_OF_STEP = re.compile(r".*?__(\d+)_(\d+)\.\w+|(?:.*_)?(e?\d{6})_(\d{2})_\d{14}(?:_\d+)?\.\w+", re.ASCII)
"""Step and index in the names that ai-toolkit, and those that kohya and musubi give."""
_NEGATIVE = re.compile(r"\n(?:Negative prompt: |Steps: \d)")  # Ends the prompt in AUTOMATIC1111's text


def add_gallery(directory: str, root: str, local: dict[str, LocalFile]) -> tuple[tuple[Sample, ...], tuple[str, ...]]:
    """Return the gallery and notes for the user; samples from outside `root` are added to `local` as `images/NAME`.

    Of files whose names bear a step, the last step of each index counts.
    """
    if not os.path.isdir(directory):
        raise UsageError("--samples must be a directory", where=directory)
    inside = os.path.relpath(os.path.realpath(directory), os.path.realpath(root)).replace(os.sep, "/")
    is_outside = inside.split("/")[0] == ".."
    prefix = "images/" if is_outside else "" if inside == "." else f"{inside}/"
    gallery = []
    with LocalSource(directory) as source:
        sizes = source.list_files(max_depth=0)
        names = _latest([name for name in sorted(sizes) if _is_sample(name, sizes[name])])
        listed = _listed(source, sizes, root)
        for name in names[:MAX_SAMPLES]:
            url = prefix + name
            if is_outside:
                file = file_of_bytes(url, source.read(name, 0, sizes[name]))
                if local.setdefault(url, file).sha256 != file.sha256:
                    what = f"--samples and the directory contain different files named {url}"
                    raise UsageError(what, where=directory, hint="rename one of them")
            if url in local:
                gallery.append(Sample(url=url, prompt=_prompt(source, name, sizes, listed)))
    if not gallery:
        hint = f"add files of up to {MAX_SAMPLE_BYTES >> 20} MiB that end in {', '.join(_MEDIA)}"
        raise UsageError("no image or video in --samples", where=directory, hint=hint)
    notes = [f"the gallery shows {MAX_SAMPLES} of {len(names)} samples"] if len(names) > MAX_SAMPLES else []
    if silent := [each.url for each in gallery if each.prompt is None]:
        notes.append(f"no prompt for {first_few(silent)}: put it into a .txt of the same name beside the sample")
    return tuple(gallery), tuple(notes)


def _is_sample(name: str, nbytes: int) -> bool:
    is_media = name.lower().endswith(_MEDIA) and not name.startswith(".") and escape_name(name) == name
    return is_media and nbytes <= MAX_SAMPLE_BYTES


def _of_step(name: str) -> tuple[str, int] | None:
    match = _OF_STEP.fullmatch(name)
    return match and ((match[1] or match[3]).removeprefix("e").zfill(12), int(match[2] or match[4]))


def _latest(names: list[str]) -> list[str]:
    """Of the pictures of one prompt keep the last step's."""
    last: dict[int, tuple[str, str]] = {}
    for name in names:
        if (of_step := _of_step(name)) is not None:
            last[of_step[1]] = max(last.get(of_step[1], ("", "")), (of_step[0], name))
    kept = {name for _, name in last.values()}
    return [name for name in names if name in kept or _of_step(name) is None]


def _listed(source: Source, sizes: Mapping[str, int], root: str) -> list[str]:
    """Return the prompts by their index."""
    if "prompts.txt" in sizes:
        lines = _text(source, "prompts.txt").splitlines()
        # kohya's lines have options behind the prompt ("--w 1024 --d 42").
        return [re.split(r"\s--\w", line)[0].strip() for line in lines if line.strip() and line[0] != "#"]
    config = ai_toolkit_config(root) or ai_toolkit_config(os.path.dirname(source.root))
    rows = value_at(config, "sample.samples") or value_at(config, "sample.prompts")
    texts = [row.get("prompt") if isinstance(row, Mapping) else row for row in rows] if isinstance(rows, list) else []
    trigger = value_at(config, "trigger_word")
    return [str(text).replace("[trigger]", str(trigger or "[trigger]")) for text in texts]


def _prompt(source: Source, name: str, sizes: Mapping[str, int], listed: list[str]) -> str | None:
    stem = name.rpartition(".")[0]
    found: str | None = None
    try:
        if f"{stem}.txt" in sizes:
            found = _text(source, f"{stem}.txt")
        elif f"{stem}.json" in sizes:
            found = _first_of(_json(_text(source, f"{stem}.json")), "prompt", "caption", "text")
        elif name.lower().endswith(".png"):
            found = _png_prompt(source, name, sizes[name])
    except (CkptError, zlib.error):  # a sidecar that is none: the picture is shown without a prompt, and that is said
        return None
    of_step = _of_step(name)
    if found is None and of_step is not None and of_step[1] < len(listed):
        found = listed[of_step[1]]
    return " ".join((found or "").split())[:_MAX_PROMPT_CHARS] or None


def _text(source: Source, name: str) -> str:
    return read_document(source, name, _MAX_TEXT_BYTES).decode("utf-8", "replace")


def _json(text: str) -> object:
    return parse_json(text.encode(), what="the prompt", where=None, max_bytes=_MAX_TEXT_BYTES, infinite=True)


def _first_of(document: object, *keys: str) -> str | None:
    values = (value_at(document, key) for key in keys)
    return next((value for value in values if isinstance(value, str) and value), None)


def _png_prompt(source: Source, name: str, nbytes: int) -> str | None:
    texts: dict[str, str] = {}
    for keyword, text, _ in png_texts(Stretch(name, nbytes, functools.partial(source.read, name)).open()):
        texts.setdefault(keyword, text[:_MAX_TEXT_BYTES])
    if "parameters" in texts:
        return _NEGATIVE.split(texts["parameters"])[0]
    text = texts.get("prompt", "")
    return _graph_prompt(_json(text)) if text.lstrip().startswith("{") else text or None


def _graph_prompt(graph: object) -> str | None:
    """Return the text that leads into the `positive` inputs of ComfyUI's graph; None where several do."""
    inputs = {key: value_at(node, "inputs") for key, node in graph.items()} if isinstance(graph, Mapping) else {}
    links = [value_at(each, "positive") for each in inputs.values()]
    found = {_first_of(inputs.get(str(link[0])), "text", "prompt") for link in links if isinstance(link, list) and link}
    return found.pop() if len(found) == 1 else None
