"""Sample images and videos of a directory, and the prompts that they were made with.

Sources of a prompt, the nearest first: a file of the same name with .txt or .json; the text chunks of a PNG (what
AUTOMATIC1111 calls `parameters`, ComfyUI's graph under `prompt`, `prompt` as text); the index in the name, where
ai-toolkit (`TIME__STEP_INDEX.jpg`, toolkit/config_modules.py) or kohya and musubi (`NAME_STEP_INDEX_TIME_SEED.png`,
sd-scripts library/train_util.py) wrote it, into ai-toolkit's config.yaml or a prompts.txt of a line for each.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckpt_tools.errors import CkptError, UsageError
from ckpt_tools.formats._json import parse_json
from ckpt_tools.formats.format import read_document
from ckpt_tools.hub.card import Sample
from ckpt_tools.hub.files import file_of_bytes
from ckpt_tools.hub.plan import LocalFile
from ckpt_tools.hub.training import config_of_ai_toolkit, process_of, trigger_of
from ckpt_tools.storage.source import LocalSource, Source
from ckpt_tools.text import escape_name, first_few

MAX_SAMPLES = 24
"""Shown in a gallery; of more, the first by name."""
MAX_SAMPLE_BYTES = 32 << 20
"""Larger files are no samples."""
_MEDIA = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".mp4", ".webm")
_MAX_TEXT_BYTES = 1 << 20
_MAX_PROMPT_CHARS = 2_000
_AI_TOOLKIT = re.compile(r".*__(?P<step>\d+)_(?P<index>\d+)\.\w+", re.ASCII)
_KOHYA = re.compile(r".*?_?(?P<step>e?\d{6})_(?P<index>\d{2})_\d{14}(?:_\d+)?\.\w+", re.ASCII)
_PNG = b"\x89PNG\r\n\x1a\n"
_NEGATIVE = re.compile(r"\n(?:Negative prompt: |Steps: \d)")
"""Ends the prompt in AUTOMATIC1111's text."""


def read_samples(directory: str, config: object = None) -> tuple[dict[str, Sample], tuple[str, ...]]:
    """Return file name → sample, whose url is that name, and what to tell the user.

    Of files whose names bear a step, the last step of each index counts.

    Args:
        directory: Holds the files, and perhaps their prompts.
        config: ai-toolkit's configuration, where it was found.

    Raises:
        UsageError: No directory, or nothing that a gallery shows.
    """
    if not os.path.isdir(directory):
        raise UsageError("--samples must be a directory", where=directory)
    with LocalSource(directory) as source:
        sizes = source.list_files(max_depth=0)
        media = [name for name in sorted(sizes) if name.lower().endswith(_MEDIA) and not name.startswith(".")]
        names = [name for name in _latest(media) if sizes[name] <= MAX_SAMPLE_BYTES and escape_name(name) == name]
        notes = []
        if skipped := len([name for name in media if sizes[name] > MAX_SAMPLE_BYTES]):
            notes.append(f"{skipped} samples are larger than {MAX_SAMPLE_BYTES >> 20} MiB: not in the gallery")
        if not names:
            raise UsageError(
                "no image or video in --samples", where=directory, hint=f"files end in {', '.join(_MEDIA)}"
            )
        if len(names) > MAX_SAMPLES:
            notes.append(f"the gallery shows {MAX_SAMPLES} of {len(names)} samples")
        listed = _listed(source, sizes, config)
        found = {name: Sample(url=name, prompt=_prompt(source, name, sizes, listed)) for name in names[:MAX_SAMPLES]}
    if silent := [name for name, sample in found.items() if sample.prompt is None]:
        notes.append(f"no prompt is known of {first_few(silent)}: a .txt of the same name beside it says one")
    return found, tuple(notes)


def add_gallery(
    directory: str | None, root: str, local: dict[str, LocalFile], config: object
) -> tuple[tuple[Sample, ...], tuple[str, ...]]:
    """Return the gallery, and what to tell the user; what lies elsewhere is added to `local` as `images/NAME`.

    Args:
        directory: What `--samples` names; None: `samples` of the directory itself, if every prompt there is known.
        root: The directory that is pushed.
        local: What is pushed of it.
        config: ai-toolkit's configuration beside the weights.

    Raises:
        UsageError: No samples there, or another file of the same name.
    """
    is_asked, where = directory is not None, directory or os.path.join(root, "samples")
    if not is_asked and not any(path.startswith("samples/") and path.lower().endswith(_MEDIA) for path in local):
        return (), ()
    if config is None and os.path.isdir(where):
        with LocalSource(os.path.dirname(os.path.abspath(where))) as above:
            config = config_of_ai_toolkit(above)
    found, notes = read_samples(where, config)
    if not is_asked and any(sample.prompt is None for sample in found.values()):
        return (), ()
    inside = os.path.relpath(os.path.realpath(where), os.path.realpath(root))
    prefix = "images" if inside.split(os.sep)[0] == os.pardir else inside.replace(os.sep, "/")
    gallery = []
    for name, sample in found.items():
        url = name if prefix == "." else f"{prefix}/{name}"
        if inside.startswith(os.pardir):
            with LocalSource(where) as source:
                content = source.read(name, 0, source.size(name))
            file = file_of_bytes(url, content)
            if url in local and local[url].sha256 != file.sha256:
                hint = "rename one of them"
                raise UsageError(f"--samples and the directory have different files {url}", where=where, hint=hint)
            local.setdefault(url, file)
        if url in local:
            gallery.append(replace(sample, url=url))
    return tuple(gallery), notes


def prompts_of(config: object) -> tuple[str, ...]:
    """Return the prompts of ai-toolkit's configuration, its trigger word in them."""
    process = process_of(config)
    sample = process.get("sample")
    rows = sample.get("samples") or sample.get("prompts") if isinstance(sample, Mapping) else None
    texts = [row.get("prompt") if isinstance(row, Mapping) else row for row in rows] if isinstance(rows, list) else []
    return tuple(str(text).replace("[trigger]", trigger_of(config) or "[trigger]") for text in texts)


def _latest(names: Sequence[str]) -> list[str]:
    """Of the pictures of one prompt only the last step's."""
    last: dict[int, tuple[str, str]] = {}
    for name in names:
        if match := _AI_TOOLKIT.fullmatch(name) or _KOHYA.fullmatch(name):
            step, index = match["step"].removeprefix("e").zfill(12), int(match["index"])
            last[index] = max(last.get(index, ("", "")), (step, name))
    kept = {name for _, name in last.values()}
    return [name for name in names if name in kept or not (_AI_TOOLKIT.fullmatch(name) or _KOHYA.fullmatch(name))]


def _listed(source: Source, sizes: Mapping[str, int], config: object) -> tuple[str, ...]:
    if "prompts.txt" in sizes:
        lines = _text(source, "prompts.txt").splitlines()
        # kohya's lines have options behind the prompt ("--w 1024 --d 42").
        return tuple(re.split(r"\s--\w", line)[0].strip() for line in lines if line.strip() and line[0] != "#")
    return prompts_of(config)


def _prompt(source: Source, name: str, sizes: Mapping[str, int], listed: Sequence[str]) -> str | None:
    stem = name.rpartition(".")[0]
    found: str | None = None
    try:
        if f"{stem}.txt" in sizes:
            found = _text(source, f"{stem}.txt")
        elif beside := next((each for each in (f"{stem}.json", f"{name}.json") if each in sizes), None):
            document = parse_json(read_document(source, beside, _MAX_TEXT_BYTES), what=beside, where=source.root)
            found = _said(document, "prompt", "caption", "text")
        elif name.lower().endswith(".png"):
            found = _png_prompt(source, name, sizes[name])
        match = _AI_TOOLKIT.fullmatch(name) or _KOHYA.fullmatch(name)
        if found is None and match is not None and int(match["index"]) < len(listed):
            found = listed[int(match["index"])]
    except CkptError:  # a sidecar that is none: the picture is shown without a prompt, and that is said
        return None
    words = " ".join((found or "").split())
    return words[:_MAX_PROMPT_CHARS] or None


def _text(source: Source, name: str) -> str:
    return read_document(source, name, _MAX_TEXT_BYTES).decode("utf-8", "replace")


def _said(document: object, *keys: str) -> str | None:
    if not isinstance(document, Mapping):
        return None
    return next((document[key] for key in keys if isinstance(document.get(key), str)), None)


def _png_prompt(source: Source, name: str, nbytes: int) -> str | None:
    chunks = _png_texts(source, name, nbytes)
    if "parameters" in chunks:
        return _NEGATIVE.split(chunks["parameters"])[0]
    text = chunks.get("prompt")
    if text is None or not text.lstrip().startswith("{"):
        return text
    graph = parse_json(text.encode(), what="the PNG's prompt", where=name, max_bytes=_MAX_TEXT_BYTES, infinite=True)
    return _graph_prompt(graph)


def _graph_prompt(graph: object) -> str | None:
    """Return the text that leads into the one `positive` input of ComfyUI's graph; None where several do."""
    nodes = graph if isinstance(graph, Mapping) else {}
    found = set()
    for node in nodes.values():
        inputs = node.get("inputs") if isinstance(node, Mapping) else None
        link = inputs.get("positive") if isinstance(inputs, Mapping) else None
        for _ in range(8):  # through nodes that pass conditioning on
            before = nodes.get(str(link[0])) if isinstance(link, list) and link else None
            inputs = before.get("inputs") if isinstance(before, Mapping) else None
            if not isinstance(inputs, Mapping):
                break
            if text := _said(inputs, "text", "prompt", "clip_l"):
                found.add(text)
                break
            link = inputs.get("conditioning") or inputs.get("positive")
    return found.pop() if len(found) == 1 else None


def _png_texts(source: Source, name: str, nbytes: int) -> dict[str, str]:
    """Return keyword → text of a PNG's chunks (PNG 1.2, 4.2.3), up to the picture's data and some way behind it."""
    found: dict[str, str] = {}
    if nbytes < 8 or source.read(name, 0, 8) != _PNG:
        return found
    at = 8
    for _ in range(10_000):
        if at + 12 > nbytes:
            break
        head = source.read(name, at, 8)
        size, kind = int.from_bytes(head[:4], "big"), head[4:]
        if kind in (b"tEXt", b"zTXt", b"iTXt") and size <= min(_MAX_TEXT_BYTES, nbytes - at - 12):
            keyword, _, rest = source.read(name, at + 8, size).partition(b"\0")
            text = _chunk_text(kind, rest)
            if text is not None:
                found.setdefault(keyword.decode("latin-1"), text)
        at += 12 + size
    return found


def _chunk_text(kind: bytes, rest: bytes) -> str | None:
    if kind == b"tEXt":
        return rest.decode("latin-1")
    is_packed, coding = (True, "latin-1") if kind == b"zTXt" else (rest[:1] == b"\1", "utf-8")
    data = rest[1:]
    if kind == b"iTXt":
        data = rest[2:].split(b"\0", 2)[-1]
    if not is_packed:
        return data.decode(coding, "replace")
    unpacker = zlib.decompressobj()
    try:
        unpacked = unpacker.decompress(data, _MAX_TEXT_BYTES)
    except zlib.error:
        return None
    return None if unpacker.unconsumed_tail else unpacked.decode(coding, "replace")
