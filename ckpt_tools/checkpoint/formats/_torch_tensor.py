"""`data.pkl` of one tensor: what torch's rebuild functions would be called with.

Source: torch `_utils.py` and `_tensor.py` (`_reduce_ex_internal`), `serialization.py` (`persistent_id`), 2.13;
torchao 0.18.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from ckpt_tools.checkpoint.dtypes import BY_TORCH_NAME, BY_TORCH_STORAGE, DType
from ckpt_tools.checkpoint.entries import MAX_DIMS, MAX_ELEMS
from ckpt_tools.checkpoint.formats._pickle_objects import parse_objects
from ckpt_tools.checkpoint.formats._pickle_values import PERSISTENT_ID, GlobalName, PickleLimits, Record
from ckpt_tools.checkpoint.formats.inert_pickle import parse_pickle
from ckpt_tools.errors import UnreadableError, UnsupportedError

_V1 = "torch._utils._rebuild_tensor"
DENSE = "torch._utils._rebuild_tensor_v2"
_V3 = "torch._utils._rebuild_tensor_v3"
_PARAMETER = "torch._utils._rebuild_parameter"
_PARAMETER_WITH_STATE = "torch._utils._rebuild_parameter_with_state"
FROM_TYPE = "torch._tensor._rebuild_from_type_v2"
WRAPPER = "torch._utils._rebuild_wrapper_subclass"
_PLAIN_TYPES = frozenset(
    {"torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"}
)
"""Subclasses whose elements are what any tensor's are, whatever attributes they have."""
_INNER = {
    "torchao.float8.fsdp_utils.WeightWithDynamicFloat8CastTensor": "_tensor",
    "torchao.prototype.moe_training.tensor.Float8TrainingWeightWrapperTensor": "_data",
    "torchao.prototype.moe_training.tensor.MXFP8TrainingWeightWrapperTensor": "_data",
    "torchao.prototype.quantized_training.bitnet.BitNetTrainingLinearWeight": "_data",
    "torchao.prototype.quantized_training.int8_mixed_precision.Int8MixedPrecisionTrainingLinearWeight": "_data",
}
"""Class → its attribute with the weight in full precision: what a plain tensor that it is copied to holds then."""
_KINDS = {
    "sparse_tensor": "sparse",
    "nested_tensor": "nested",
    "meta_tensor_no_storage": "meta",
    "qtensor": "quantised",
}
_PLAIN = "if you trust it, load it with the library of that class and save plain tensors (dequantize() of torchao)"
PLAIN_CALLS = (DENSE, _V3)  # Names of calls that make a dense tensor of a part of a storage
_UNTYPED = "torch.storage.UntypedStorage"
_HOOKS = "collections.OrderedDict"
_ALLOWED_GLOBALS = frozenset(
    {
        *(DENSE, _V3, _PARAMETER, _UNTYPED, _HOOKS, "torch.Size"),
        *(f"torch.{name}" for name in BY_TORCH_STORAGE),
        *(f"torch.{name}" for name in BY_TORCH_NAME),
    }
)
_LIMITS = PickleLimits(max_bytes=1 << 16, max_opcodes=1 << 16, max_depth=16, max_string_bytes=1 << 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemHead:
    """What an item says of its one dense tensor."""

    dtype: DType
    shape: tuple[int, ...]  # In logical elements, like `strides`
    strides: tuple[int, ...] | None  # None means row-major
    payload_offset: int  # First byte of the tensor's elements within the item
    payload_nbytes: int  # Bytes from its first element to the end of its last one
    crc32: int | None = None  # CRC-32 of the payload; None when it was not computed or covers a larger storage


@dataclass(frozen=True, slots=True, kw_only=True)
class PickledTensor:
    """One tensor, and its storage."""

    head: ItemHead  # Its payload's offset is that in the storage
    key: str  # Name of the data record
    storage_nbytes: int
    num_storages: int = 1  # with those that lie beside it in a wrapper


@lru_cache(maxsize=4096)
def parse_tensor_pickle(data: bytes) -> PickledTensor:
    """Read `data.pkl`; cached, for the chunks of a checkpoint have few distinct ones."""
    try:
        value = parse_pickle(data, allowed_globals=_ALLOWED_GLOBALS, limits=_LIMITS, persistent_ids=True)
        tensor = rebuild_tensor(value)
    except UnsupportedError:
        raise
    except UnreadableError:
        if (other := _other_kind(data)) is None:
            raise
        tensor = other
    if is_expanded(tensor.head):
        raise UnsupportedError("elements share memory (an expanded tensor)", hint="save tensor.contiguous()")
    return tensor


def _other_kind(data: bytes) -> PickledTensor | None:
    """Read the pickle of a tensor that is not plain; None where it is plain, or no tensor."""
    try:
        pickled = parse_objects(data)
    except UnreadableError:
        return None
    name = pickled.value.name if type(pickled.value) is Record else ""
    if pickled.nbytes != len(data) or "._rebuild_" not in name or name in (_V1, DENSE, _V3, _PARAMETER):
        return None
    return replace(rebuild_tensor(pickled.value), num_storages=len(pickled.storages))


def is_expanded(head: ItemHead) -> bool:
    """Are elements of a tensor the same bytes, along dims of stride 0?"""
    return head.strides is not None and any(
        step == 0 and size > 1 for step, size in zip(head.strides, head.shape, strict=True)
    )


def rebuild_tensor(value: object) -> PickledTensor:
    """Return the dense tensor that a pickled call would make, a parameter, wrapped, or not."""
    outer, claims = value, list[tuple[object, ...]]()
    while type(value) is Record and len(claims) < 16 and (found := _inner_of(value)) is not None:
        value, claim = found
        claims.append(claim)
    if type(value) is not Record or value.name not in (_V1, DENSE, _V3) or value.state is not None:
        name = value.name if isinstance(value, Record | GlobalName) else type(value).__name__
        raise _unsupported(value) or UnreadableError(f"it holds a {name}, not a tensor")
    tensor = _rebuild(value)
    for dtype, size in filter(None, claims):
        is_same = type(dtype) is GlobalName and dtype.name == f"torch.{tensor.head.dtype.torch_name}"
        if not is_same or _numbers(size, "shape") != _numbers(value.args[2], "shape"):
            raise _unsupported(outer) or UnreadableError("a wrapped tensor differs from its wrapper in dtype or shape")
    return tensor


def _inner_of(call: Record) -> tuple[object, tuple[object, ...]] | None:
    """Return what makes a parameter's data, or what a subclass wraps, and the dtype and shape that a wrapper claims."""
    # A subclass whose elements are its own claims nothing; None for what is no subclass, or more than a wrapper.
    num_args = {_PARAMETER: 3, _PARAMETER_WITH_STATE: 4, FROM_TYPE: 4}.get(call.name)
    match call.args if call.state is None and len(call.args) == num_args else ():
        case (data, bool(), hooks, *_) if call.name != FROM_TYPE and _is_no_hooks(hooks):
            return data, ()
        case (GlobalName(name=function), GlobalName(name=kind), tuple(args), state):
            fields = state[1] if type(state) is tuple and len(state) == 2 and not state[0] else state
            own = {**fields} if type(fields) is dict else {} if not fields else {"": fields}
            own.pop("_is_param", None)
            if function != WRAPPER and (kind in _PLAIN_TYPES or not own):
                return Record(function, args, None, 0), ()
            if function == WRAPPER and len(args) > 2:
                inner = own.get(_INNER[kind]) if kind in _INNER else None  # what another does, its code alone says
                if type(inner) is Record and "._rebuild_" in inner.name:
                    return inner, args[1:3]
    return None


def _unsupported(call: object) -> UnsupportedError | None:
    """Return the error for a tensor of a kind that is not read; None for anything else."""
    match (call.name, call.args) if type(call) is Record else ("", ()):
        case name, (_, GlobalName(name=kind), *_) if name == FROM_TYPE:
            return UnsupportedError(f"it is a {kind}, a kind of tensor that ckpt does not read", hint=_PLAIN)
        case name, _ if (word := _KINDS.get(name.removeprefix("torch._utils._rebuild_"))) is not None:
            hint = "save plain tensors with values: to_dense(), unbind(), dequantize()"
            return UnsupportedError(f"it is a {word} tensor, a kind that ckpt does not read", hint=hint)
    return None


def _is_no_hooks(value: object) -> bool:
    if value is None or value == {}:  # as very old files have it; an inert OrderedDict of `_pickle_objects`
        return True
    return type(value) is Record and value.name == _HOOKS and value.args == () and value.state is None


def _rebuild(call: Record) -> PickledTensor:
    args = call.args
    if call.name == _V1:  # before hooks
        call = Record(DENSE, (*args, False, {}), None, 0)
        args = call.args
    num_args = 6 if call.name == DENSE else 7
    if len(args) not in (num_args, num_args + 1):
        raise UnreadableError(f"{call.name} has {len(args)} arguments")
    storage, offset, shape, strides, requires_grad, hooks = args[:6]
    if type(requires_grad) is not bool or not _is_no_hooks(hooks):
        raise UnreadableError("the tensor has hooks or is malformed")
    if len(args) > num_args:
        _check_flags(args[num_args])
    storage_class, key, num_elems = _storage(storage)
    if call.name == DENSE:
        dtype = BY_TORCH_STORAGE.get(storage_class.removeprefix("torch.").removeprefix("cuda."))
    else:
        named = args[6]
        dtype = BY_TORCH_NAME.get(named.name.removeprefix("torch.")) if type(named) is GlobalName else None
        dtype = dtype if storage_class == _UNTYPED else None
    if dtype is None:
        raise UnreadableError(f"the tensor has no dtype that matches its {storage_class}")
    width = dtype.bits * dtype.pack // 8  # bytes of one torch element
    storage_nbytes = num_elems * width if call.name == DENSE else num_elems
    sizes = _numbers(shape, "shape")
    steps = _numbers(strides, "strides")
    (start,) = _numbers((offset,), "storage offset")
    if len(sizes) != len(steps):
        raise UnreadableError(f"the tensor has {len(sizes)} dims and {len(steps)} strides")
    if dtype.pack > 1 and not sizes:
        raise UnreadableError(f"the tensor is a 0-d {dtype.name}, whose elements come in pairs")
    extent = 1 + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
    if 0 in sizes:  # a view of nothing may begin anywhere
        start = extent = 0
    if (start + extent) * width > storage_nbytes:
        what = f"the tensor ends at byte {(start + extent) * width} of a storage of {storage_nbytes} bytes"
        raise UnreadableError(what)
    head = ItemHead(
        dtype=dtype,
        shape=(*sizes[:-1], sizes[-1] * dtype.pack) if sizes else (),
        strides=_logical_strides(dtype, sizes, steps),
        payload_offset=start * width,
        payload_nbytes=extent * width,
    )
    return PickledTensor(head=head, key=key, storage_nbytes=storage_nbytes)


def _storage(value: object) -> tuple[str, str, int]:
    """Return class, key and length of the storage that a persistent id names."""
    if type(value) is Record and value.name == PERSISTENT_ID:
        match value.args[0]:
            case ("storage", GlobalName(name=name), str(key), str(), int(num_elems), *view):
                if len(view) > 1 or (view and view[0] is not None):
                    raise UnreadableError("the tensor is in a view of a storage, which only torch before 0.4 wrote")
                if not key.isdecimal():
                    raise UnreadableError("the name of the storage is not a number")
                if type(num_elems) is int and 0 <= num_elems <= MAX_ELEMS:
                    return name, key, num_elems
    raise UnreadableError("the tensor has no storage")


def _check_flags(metadata: object) -> None:
    """Refuse what torch applies lazily on loading: the stored bytes are not the values then."""
    if type(metadata) is not dict:
        raise UnreadableError("the tensor has metadata of an unknown kind")
    for name, flag in metadata.items():
        if flag is not False:
            shown = name if flag is True and name in ("conj", "neg") else "unknown"
            raise (UnreadableError if shown == "unknown" else UnsupportedError)(
                f"the tensor is stored with a lazy {shown} flag, so its bytes are not its values",
                hint="save it again after tensor.resolve_conj().resolve_neg()",
            )


def _numbers(value: object, what: str) -> tuple[int, ...]:
    if type(value) is Record and value.name == "torch.Size" and len(value.args) == 1:
        value = value.args[0]
    if type(value) is not tuple or not all(type(n) is int and 0 <= n <= MAX_ELEMS for n in value):
        raise UnreadableError(f"the {what} of the tensor is not a tuple of numbers between 0 and 2^62")
    if len(value) > MAX_DIMS:
        raise UnreadableError(f"the {what} of the tensor has {len(value)} dims, PyTorch at most {MAX_DIMS}")
    return value


def _logical_strides(dtype: DType, sizes: tuple[int, ...], steps: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return strides in logical elements, or None for a row-major tensor."""
    if is_row_major(sizes, steps):
        return None
    needed = 1
    for step, size in sorted((step, size) for size, step in zip(sizes, steps, strict=True) if size != 1 and step):
        if step < needed:
            raise UnsupportedError("elements of the tensor share memory", hint="save tensor.contiguous()")
        needed = step * (size - 1) + needed
    if dtype.pack == 1:
        return steps
    if steps[-1] != 1:
        raise UnreadableError(f"the {dtype.name} tensor is transposed across pairs of elements")
    return (*(step * dtype.pack for step in steps[:-1]), 1)


def is_row_major(sizes: tuple[int, ...], steps: tuple[int, ...]) -> bool:
    """Do these strides, in elements, lay elements out one after the other?"""
    dims = [(step, size) for size, step in zip(sizes, steps, strict=True) if size != 1]
    if 0 in sizes:
        return True
    return all(step == math.prod(size for _, size in dims[i + 1 :]) for i, (step, _) in enumerate(dims))
