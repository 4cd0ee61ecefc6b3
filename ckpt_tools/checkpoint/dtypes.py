"""One table of element types: safetensors name ↔ torch name ↔ bits per element.

Source: safetensors `tensor.rs` (0.8) for names and widths; `torch._C`/`torch.storage` (2.13) for
torch names and for the storage class that a pickled tensor names.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DType:
    """One element type."""

    name: str
    """Name in a safetensors header; for the types that safetensors lacks, in the same style."""
    torch_name: str | None
    """Attribute of the `torch` module, or None when torch has no such type."""
    bits: int
    """Bits per logical element."""
    torch_storage: str | None = None
    """Typed storage class named by `_rebuild_tensor_v2`; None means `_rebuild_tensor_v3`."""
    is_float: bool = False
    """True for the types that `--dtype` casts (F64, F32, F16, BF16)."""
    in_safetensors: bool = True
    """False when a safetensors file cannot hold the type."""
    pack: int = 1
    """Logical elements in one torch element (2 for F4: torch shapes count bytes)."""

    def num_bytes(self, num_elems: int) -> int:
        """Bytes of `num_elems` logical elements; sub-byte types must fill whole bytes."""
        num_bits = num_elems * self.bits
        if num_bits % 8:
            raise ValueError(f"{num_elems} elements of {self.name} end inside a byte")
        return num_bits // 8

    @property
    def granule(self) -> int:
        """Smallest number of elements along the last dim that fills whole bytes (F4: 2, F6: 4)."""
        return {4: 2, 6: 4}.get(self.bits, 1)


_TABLE = (
    DType(name="BOOL", torch_name="bool", bits=8, torch_storage="BoolStorage"),
    DType(name="F4", torch_name="float4_e2m1fn_x2", bits=4, pack=2),
    DType(name="F6_E2M3", torch_name=None, bits=6),
    DType(name="F6_E3M2", torch_name=None, bits=6),
    DType(name="U8", torch_name="uint8", bits=8, torch_storage="ByteStorage"),
    DType(name="I8", torch_name="int8", bits=8, torch_storage="CharStorage"),
    DType(name="F8_E5M2", torch_name="float8_e5m2", bits=8),
    DType(name="F8_E4M3", torch_name="float8_e4m3fn", bits=8),
    DType(name="F8_E8M0", torch_name="float8_e8m0fnu", bits=8),
    DType(name="F8_E4M3FNUZ", torch_name="float8_e4m3fnuz", bits=8),
    DType(name="F8_E5M2FNUZ", torch_name="float8_e5m2fnuz", bits=8),
    DType(name="I16", torch_name="int16", bits=16, torch_storage="ShortStorage"),
    DType(name="U16", torch_name="uint16", bits=16),
    DType(name="F16", torch_name="float16", bits=16, torch_storage="HalfStorage", is_float=True),
    DType(name="BF16", torch_name="bfloat16", bits=16, torch_storage="BFloat16Storage", is_float=True),
    DType(name="I32", torch_name="int32", bits=32, torch_storage="IntStorage"),
    DType(name="U32", torch_name="uint32", bits=32),
    DType(name="F32", torch_name="float32", bits=32, torch_storage="FloatStorage", is_float=True),
    DType(name="C64", torch_name="complex64", bits=64, torch_storage="ComplexFloatStorage"),
    DType(name="F64", torch_name="float64", bits=64, torch_storage="DoubleStorage", is_float=True),
    DType(name="I64", torch_name="int64", bits=64, torch_storage="LongStorage"),
    DType(name="U64", torch_name="uint64", bits=64),
    DType(name="C32", torch_name="complex32", bits=32, in_safetensors=False),
    DType(name="C128", torch_name="complex128", bits=128, torch_storage="ComplexDoubleStorage", in_safetensors=False),
)

BY_NAME: dict[str, DType] = {dtype.name: dtype for dtype in _TABLE}
BY_TORCH_NAME: dict[str, DType] = {dtype.torch_name: dtype for dtype in _TABLE if dtype.torch_name}
"""Every dtype that torch has, by the name of the attribute of `torch`."""
BY_TORCH_STORAGE: dict[str, DType] = {d.torch_storage: d for d in _TABLE if d.torch_storage}
"""Every dtype that has a typed torch storage class, by that class's name."""


def dtype_word(dtype: object) -> str:
    """Return what options call a dtype of torch, or its name: `torch.bfloat16` and "bfloat16" are "bf16"."""
    text = str(dtype).removeprefix("torch.")
    return BY_TORCH_NAME[text].name.lower() if text in BY_TORCH_NAME and BY_TORCH_NAME[text].is_float else text
