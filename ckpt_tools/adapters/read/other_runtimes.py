"""Adapters of llama.cpp (GGUF) and of mlx-lm under the names and in the axes that PEFT's factors have.

Module paths of GGUF stay llama.cpp's until a base tells the order of rows (`base.reading.in_hub_names`), but for the
embedding, which has one name in all models.

Source: llama.cpp, src/llama-adapter.cpp, November 2026; mlx-lm 0.32, tuner/{lora,dora}.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace

from ckpt_tools.adapters.adapter import Convention, Sourced
from ckpt_tools.adapters.read.sidecars import ADAPTER_CONFIG, MLX_FILE, Sidecars, read_sidecars
from ckpt_tools.checkpoint.entries import TensorEntry
from ckpt_tools.checkpoint.formats import gguf
from ckpt_tools.checkpoint.formats.format import Opened
from ckpt_tools.checkpoint.formats.opening import open_path
from ckpt_tools.checkpoint.names.apply_mosaic import lay_out
from ckpt_tools.checkpoint.names.mosaic import transpose, whole
from ckpt_tools.errors import UnreadableError, UnsupportedError
from ckpt_tools.storage.locations import open_place

_GGUF_NAME = re.compile(r"(?P<path>.+)\.weight\.lora_(?P<side>[ab])")
_MLX_NAME = re.compile(r"(?P<path>.+)\.(?:lora_(?P<side>[ab])|m)")
_EMBEDDING = "token_embd"


def open_adapter(path: str, format: str | None) -> Opened:  # noqa: A002 - the option's name
    """Open what holds an adapter, GGUF too."""
    if format is not None or not path.endswith(gguf.FORMAT.suffix):
        return open_path(path, format=format, as_part=True)
    source, name = open_place(path)
    try:
        files = {} if name is None else {name: source.size(name)}
        return gguf.FORMAT.open(source, files, path=path)
    except BaseException:
        source.close()
        raise


def as_peft(
    opened: Opened, places: Iterable[tuple[str, frozenset[str]]]
) -> tuple[Opened, Sidecars | None, Convention | None]:
    """Return an adapter in PEFT's factors, with what its file says of it, and whose it is; others as they are."""
    if opened.format is not gguf.FORMAT and MLX_FILE not in opened.checkpoint.files:
        return opened, None, None
    sidecars = read_sidecars(places, opened.metadata, is_training=False)
    told = Sidecars(stated=sidecars.stated)  # these loaders read no other file, and no other field
    if opened.format is gguf.FORMAT:
        alpha = Sourced(_number(opened.metadata.get(gguf.ALPHA, "0"), gguf.ALPHA), gguf.ALPHA)
        return _renamed(opened, _of_gguf), replace(told, peft={"lora_alpha": alpha}), "gguf"
    fields = sidecars.peft
    if not fields.keys() & {"fine_tune_type", "lora_parameters"}:
        return opened, None, None
    if (kind := fields["fine_tune_type"].value if "fine_tune_type" in fields else "lora") not in ("lora", "dora"):
        what = f"mlx-lm's fine_tune_type {kind!s:.40} (whole weights, no adapter)"
        raise UnsupportedError(what, where=ADAPTER_CONFIG, hint="fuse it with mlx_lm.fuse")
    ranks = {entry.shape[-1] for entry in opened.checkpoint.tensors if entry.fqn.endswith(".lora_a") and entry.shape}
    if len(ranks) != 1:
        raise UnsupportedError(f"mlx-lm has one rank for all modules, and these have {sorted(ranks)}", where=MLX_FILE)
    parameters = fields["lora_parameters"].value if "lora_parameters" in fields else None
    scale = _number(parameters.get("scale") if isinstance(parameters, dict) else None, "lora_parameters.scale")
    found: Sourced[object] = Sourced(scale * ranks.pop(), f"scale in {ADAPTER_CONFIG}, times the rank")
    return _renamed(opened, _of_mlx), replace(told, peft={"lora_alpha": found}), "mlx"


def _number(value: object, name: str) -> float:
    try:
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            return float(value)
    except (ValueError, OverflowError):
        pass
    raise UnreadableError(f"{name} must be a number, got {value!r:.40}")


def _renamed(opened: Opened, name_of: Callable[[TensorEntry], tuple[str, bool]]) -> Opened:
    tensors = []
    for entry in opened.checkpoint.tensors:
        name, is_turned = name_of(entry)
        if len(entry.shape) > 2:
            raise UnsupportedError(f"{entry.fqn} has {len(entry.shape)} dims: factors of stacked experts", where=name)
        mosaic = whole(entry.fqn, entry.dtype, entry.shape)
        turned = transpose(mosaic, 0, 1) if is_turned and len(entry.shape) == 2 else mosaic
        tensors.append(lay_out(name, turned, {entry.fqn: entry}))
    return replace(opened, checkpoint=replace(opened.checkpoint, tensors=tuple(tensors)))


def _of_gguf(entry: TensorEntry) -> tuple[str, bool]:
    """Return the name of a factor, and whether its axes are to be exchanged."""
    hit = _GGUF_NAME.fullmatch(entry.fqn)
    if hit is None:
        return entry.fqn, False
    side = hit["side"].upper()
    if hit["path"] == _EMBEDDING:
        return f"model.embed_tokens.lora_embedding_{side}", side == "A"
    return f"{hit['path']}.lora_{side}.weight", False


def _of_mlx(entry: TensorEntry) -> tuple[str, bool]:
    """Return the name of a factor; all matrices are stored the other way round."""
    hit = _MLX_NAME.fullmatch(entry.fqn)
    if hit is None:
        return entry.fqn, False
    if hit["side"] is None:
        return f"{hit['path']}.lora_magnitude_vector", False
    is_embedding = hit["path"].endswith(("embed_tokens", "wte"))
    side = hit["side"].upper()
    return f"{hit['path']}.lora_{'embedding_' * is_embedding}{side}{'' if is_embedding else '.weight'}", True
