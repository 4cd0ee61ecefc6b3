"""torchao in safetensors: `M.weight` is `M._weight_qdata`, `M._weight_scale` and more, as the header's metadata says.

The weight is (q - zero point) x scale. Source: torchao 0.18, `prototype/safetensors` and `dequantize` of the classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from ckpt_tools.checkpoint.formats import safetensors
from ckpt_tools.checkpoint.formats._json import parse_json
from ckpt_tools.checkpoint.formats.opening import Opened
from ckpt_tools.errors import UnreadableError, UsageError
from ckpt_tools.transfer.quantised.compressed import decode_plain, grid_of
from ckpt_tools.transfer.quantised.parts import check_shape, companions
from ckpt_tools.transfer.quantised.scheme import Found, Quantised, ReadRun, Scheme, Settings, Tensors

NUMBERS = "_qdata"  # Ends the name of a weight's numbers
_KINDS = {"Int8Tensor": ("I8",), "IntxUnpackedToInt8Tensor": ("I8",), "Float8Tensor": ("F8_E4M3", "F8_E5M2")}
"""Class → dtypes of its numbers. Others are laid out for kernels."""


def header_of(opened: Opened) -> dict[str, str]:
    """Return the metadata in the headers of the original files."""
    texts = {} if opened.origin is None else opened.origin.headers
    headers = (safetensors.parse_header(text.encode(), file=file, file_nbytes=None) for file, text in texts.items())
    return {name: text for header in headers for name, text in header.metadata.items()}


def _find_all(tensors: Tensors, settings: Settings, read: ReadRun) -> Found:  # noqa: ARG001 - the header says it all
    """By the header's metadata; see `Find`."""
    header = settings.get("header")
    found = tuple(_find(tensors, header if isinstance(header, Mapping) else {}))
    known = {entry.fqn for one in found for entry in one.stored}
    if strange := [fqn for fqn in tensors if fqn.endswith(NUMBERS) and fqn not in known]:
        what = f"{strange[0]!r}: the header that says what torchao's tensors are is not here, or has no such name"
        raise UnreadableError(what, hint="decode the files that torchao wrote")
    return Found(what="8 bits or fewer (torchao)", tensors=found)


SCHEME = Scheme(method="torchao", find=_find_all)


def _find(tensors: Tensors, header: Mapping[str, str]) -> Iterator[Quantised]:
    for name, text in header.items():
        module, dot, leaf = name.rpartition(".")
        stem = f"{module}{dot}_{leaf}"
        if (data := tensors.get(stem + NUMBERS)) is None:
            continue
        said = parse_json(text.encode(), what=f"the header's description of {name!r}", where=data.fqn)
        told = said if isinstance(said, dict) else {}
        kind, parts, own = map(told.get, ("_type", "_tensor_data_names", "_data"))
        if kind not in _KINDS or not isinstance(parts, list) or not isinstance(own, dict) or "act_pre_scale" in parts:
            what = f"{name!r} is a {kind} of torchao with {parts}, which ckpt does not decode"
            raise UsageError(what, hint=f"supported, except for scales of activations: {', '.join(_KINDS)}")
        stored = {
            part: companions(tensors, f"{stem}_{part}", of=data.fqn) for part in ("qdata", "scale", *map(str, parts))
        }
        scale, zero = stored["scale"], stored.get("zero_point", stored["scale"])
        if data.dtype.name not in _KINDS[kind] or len(data.shape) != 2 or zero.dtype.name == "U8":
            shown = f"{data.fqn!r} {data.dtype.name} {list(data.shape)}"
            raise UnreadableError(f"{name!r} is a {kind} of torchao, and {shown}")
        check_shape(zero, scale.shape, of=data)
        grid = grid_of(data, data.shape, scale, [{"block_structure": own.get("block_size")}])
        decode = partial(decode_plain, data, scale, stored.get("zero_point"), grid)
        yield Quantised(fqn=name, shape=data.shape, stored=tuple(stored.values()), decode=decode)
