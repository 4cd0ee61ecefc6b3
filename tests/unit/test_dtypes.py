"""The table of element types, compared with torch and safetensors."""

import json

import pytest
import torch
from safetensors import SafetensorError, deserialize

from ckpt_tools.checkpoint.dtypes import BY_NAME, BY_TORCH_NAME, BY_TORCH_STORAGE, DType


@pytest.mark.parametrize("dtype", [d for d in BY_NAME.values() if d.torch_name], ids=lambda d: d.name)
def test_dtype_of_torch_has_torchs_width(dtype: DType) -> None:
    torch_dtype = getattr(torch, str(dtype.torch_name))
    assert torch_dtype.itemsize * 8 == dtype.bits * dtype.pack
    assert BY_TORCH_NAME[str(dtype.torch_name)] is dtype


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@pytest.mark.parametrize("dtype", [d for d in BY_NAME.values() if d.torch_storage], ids=lambda d: d.name)
def test_dtype_with_a_storage_class_is_that_of_the_class(dtype: DType) -> None:
    assert getattr(torch, str(dtype.torch_storage)).dtype is getattr(torch, str(dtype.torch_name))
    assert BY_TORCH_STORAGE[str(dtype.torch_storage)] is dtype


@pytest.mark.parametrize("dtype", BY_NAME.values(), ids=lambda d: d.name)
def test_dtype_is_known_to_safetensors_as_the_table_says(dtype: DType) -> None:
    nbytes = dtype.num_bytes(8)
    header = json.dumps({"w": {"dtype": dtype.name, "shape": [8], "data_offsets": [0, nbytes]}}).encode()
    raw = len(header).to_bytes(8, "little") + header + bytes(nbytes)
    if dtype.in_safetensors:
        ((name, entry),) = deserialize(raw)
        assert (name, len(entry["data"])) == ("w", nbytes)
    else:
        with pytest.raises(SafetensorError):
            deserialize(raw)


def test_is_float_marks_what_dtype_casts() -> None:
    assert {d.name for d in BY_NAME.values() if d.is_float} == {"F64", "F32", "F16", "BF16"}


@pytest.mark.parametrize(
    ("name", "num_elems", "nbytes"), [("F32", 3, 12), ("F4", 4, 2), ("F6_E2M3", 4, 3), ("C128", 1, 16)]
)
def test_num_bytes_of_whole_bytes_is_their_number(name: str, num_elems: int, nbytes: int) -> None:
    assert BY_NAME[name].num_bytes(num_elems) == nbytes


@pytest.mark.parametrize(("name", "num_elems"), [("F4", 3), ("F6_E2M3", 2), ("F6_E3M2", 3)])
def test_num_bytes_inside_a_byte_is_refused(name: str, num_elems: int) -> None:
    with pytest.raises(ValueError, match="inside a byte"):
        BY_NAME[name].num_bytes(num_elems)


@pytest.mark.parametrize("dtype", BY_NAME.values(), ids=lambda d: d.name)
def test_granule_is_the_least_that_fills_bytes(dtype: DType) -> None:
    assert dtype.granule * dtype.bits % 8 == 0
    assert all(n * dtype.bits % 8 for n in range(1, dtype.granule))
