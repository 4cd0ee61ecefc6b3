"""The quant state of bitsandbytes' 4-bit layers, carried through `state_dict` and `load_state_dict`.

A 4-bit layer's weight is packed bytes, shape (n, 1). What turns them back lies beside it: `absmax` (a scale per
block of 64 weights), `quant_map`, with double quantisation `nested_absmax` and `nested_quant_map`, and a text with
the rest. FSDP shards the bytes and forgets everything else, so that a state dict loses it without a word. Here each
layer adds `weight.<part>` to its state dict and takes it out again: `absmax` cut as the bytes are, the rest whole.
Forward needs all of it: after a load every rank holds the whole state.

Source: bitsandbytes 0.50, `nn/modules.py` (Linear4bit) and `functional.py` (QuantState.as_dict, from_dict).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ckpt_tools.errors import UnreadableError, UsageError

BLOCK_ELEMS = 64  # Weights that share a scale: bitsandbytes' default on every device
NESTED_BLOCK_ELEMS = 256  # Scales that share a scale, with double quantisation
TEXT_PREFIX = "quant_state.bitsandbytes__"  # Of the part that holds a JSON text as bytes; the quant type follows
MAX_TEXT_BYTES = 4096  # Largest such text that is read; real ones have some 170 bytes
_DTYPES = ("float32", "float16", "bfloat16")
_ATTRIBUTE = "ckpt_quantised"


@dataclass(slots=True, kw_only=True)
class QuantisedLayer:
    """What a 4-bit layer is, kept on the layer; the only thing that changes is the text's length."""

    fqn: str  # When it was quantised, for messages
    shape: tuple[int, int]  # (out, in) of the weights
    quant_type: str  # nf4 or fp4
    storage: torch.dtype  # Of the packed tensor
    double_quant: bool  # The scales are quantised too
    text_nbytes: int | None = None  # Length of the text that a load will bring, once known

    @property
    def text_key(self) -> str:
        """Name of the text among the parts."""
        return TEXT_PREFIX + self.quant_type

    @property
    def num_packed(self) -> int:
        """Elements of the packed tensor."""
        return (math.prod(self.shape) + 1) // 2 // self.storage.itemsize

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return part → shape and dtype, without the text, whose length depends on the values."""
        blocks = -(-math.prod(self.shape) // BLOCK_ELEMS)
        if not self.double_quant:
            return {"absmax": ((blocks,), torch.float32), "quant_map": ((16,), torch.float32)}
        return {
            "absmax": ((blocks,), torch.uint8),
            "quant_map": ((16,), torch.float32),
            "nested_absmax": ((-(-blocks // NESTED_BLOCK_ELEMS),), torch.float32),
            "nested_quant_map": ((256,), torch.float32),
        }


def attach(layer: nn.Module, facts: QuantisedLayer) -> None:
    """Make a Linear4bit carry its quant state."""
    setattr(layer, _ATTRIBUTE, facts)
    layer.register_state_dict_post_hook(_add_parts)  # type: ignore[no-untyped-call]
    layer.register_load_state_dict_pre_hook(_take_parts)  # type: ignore[no-untyped-call]
    layer.register_forward_pre_hook(_check_forward)


def quantised_of(layer: nn.Module) -> QuantisedLayer | None:
    """Return what `attach` noted, None for any other layer."""
    facts = getattr(layer, _ATTRIBUTE, None)
    return facts if isinstance(facts, QuantisedLayer) else None


def _add_parts(layer: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    facts = quantised_of(layer)
    weight = layer.weight
    if facts is None or not isinstance(weight, torch.Tensor) or f"{prefix}weight" not in state:
        return
    quant_state: Any = getattr(layer, "quant_state", None)
    parts: dict[str, torch.Tensor]
    if quant_state is None:  # on meta: what a load has to bring
        parts = {key: torch.empty(shape, dtype=dtype, device="meta") for key, (shape, dtype) in facts.shapes().items()}
        if facts.text_nbytes is not None:
            parts[facts.text_key] = torch.empty(facts.text_nbytes, dtype=torch.uint8, device="meta")
    else:
        parts = quant_state.as_dict(packed=True)
    if quant_state is not None and not hasattr(type(weight), "absmax"):  # Params4bit has them
        # torch.distributed.checkpoint finds every name of a state dict by getattr on the module tree.
        for key, part in {**parts, "quant_state": quant_state}.items():
            if "." not in key:
                setattr(weight, key, part)
    if isinstance(weight, DTensor):
        parts["absmax"] = distribute_tensor(parts["absmax"], weight.device_mesh, weight.placements, src_data_rank=None)
    state.update({f"{prefix}weight.{key}": part.detach() for key, part in parts.items()})


def _take_parts(layer: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    facts = quantised_of(layer)
    if facts is None:
        return
    weight = state.get(f"{prefix}weight")
    where = f"{prefix}weight"
    if isinstance(weight, torch.Tensor) and weight.dtype != facts.storage:
        raise UsageError(
            f"the packed weights are stored as {facts.storage} but arrived as {weight.dtype}: a cast destroys them",
            where=where,
            hint="load without a dtype",
        )
    start = f"{prefix}weight."
    found = {key.removeprefix(start): state.pop(key) for key in list(state) if key.startswith(start)}
    if not found:
        return
    parts = {key: part.full_tensor() if isinstance(part, DTensor) else part for key, part in found.items()}
    _check_parts(parts, facts, where)
    parse_text(bytes(parts[facts.text_key].cpu().numpy()), facts, where)
    from bitsandbytes.functional import QuantState

    quant_state: Any = QuantState.from_dict(dict(parts), device=parts["absmax"].device)
    layer.quant_state = quant_state
    if not isinstance(layer.weight, DTensor) and hasattr(layer.weight, "quant_state"):
        layer.weight.quant_state = quant_state


def _check_parts(parts: dict[str, torch.Tensor], facts: QuantisedLayer, where: str) -> None:
    expected = facts.shapes()
    if set(parts) != {*expected, facts.text_key}:
        odd = sorted(set(parts) ^ {*expected, facts.text_key})
        raise UnreadableError(
            f"unexpected quant state of a 4-bit layer: {', '.join(odd)}",
            where=where,
            hint="load with load_quantised, after quantise_linears with the same options (double quantisation, …)",
        )
    for key, (shape, dtype) in expected.items():
        if tuple(parts[key].shape) != shape or parts[key].dtype != dtype:
            raise UnreadableError(
                f"{key} is {parts[key].dtype} {list(parts[key].shape)}, expected {dtype} {list(shape)}", where=where
            )


def parse_text(text: bytes, facts: QuantisedLayer, where: str) -> None:
    """Check the JSON text of a quant state against its layer, before bitsandbytes believes it."""
    try:
        values = json.loads(text[:MAX_TEXT_BYTES])
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"the quant state is not JSON: {error}", where=where) from error
    expected: dict[str, object] = {"quant_type": facts.quant_type, "blocksize": BLOCK_ELEMS, "shape": [*facts.shape]}
    if facts.double_quant:
        expected |= {"nested_blocksize": NESTED_BLOCK_ELEMS, "nested_dtype": "float32"}
    keys = {*expected, "dtype", *(("nested_offset",) if facts.double_quant else ())}
    if not isinstance(values, dict) or set(values) != keys:
        raise UnreadableError(f"the quant state does not have the fields {', '.join(sorted(keys))}", where=where)
    for key, value in expected.items():
        if values[key] != value or type(values[key]) is not type(value):
            raise UnreadableError(
                f"{key} is {values[key]!r} in the quant state, but {value!r} in the layer",
                where=where,
                hint="build and quantise the model as the checkpoint was",
            )
    if values["dtype"] not in _DTYPES:
        raise UnreadableError(f"the quant state says dtype {values['dtype']!r}", where=where)
    offset = values.get("nested_offset", 0.0)
    if not isinstance(offset, float) or not math.isfinite(offset):
        raise UnreadableError(f"the quant state says nested_offset {offset!r}", where=where)


def _check_forward(layer: nn.Module, *_: object) -> None:
    facts = quantised_of(layer)
    if facts is None:
        return
    weight = layer.weight
    if getattr(layer, "quant_state", None) is None:
        raise UsageError(
            "the 4-bit layer has no quant state", where=facts.fqn, hint="load it: load_quantised(model, path)"
        )
    if isinstance(weight, torch.Tensor) and weight.dtype != facts.storage:
        raise UsageError(
            f"the packed weights are stored as {facts.storage} but gathered as {weight.dtype}, which changes the bytes",
            where=facts.fqn,
            hint=f"shard with param_dtype={facts.storage}, or quantise with storage=torch.uint8",
        )
